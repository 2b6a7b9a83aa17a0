"""One run on two ranks, and everything that must equal it."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import functional as F

from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, Occupied, Usage
from ckptkit.ops.consolidate import consolidate
from ckptkit.runs import Run
from ckptkit.train.config import TrainConfig
from ckptkit.train.data import IGNORED, Corpus, read_text, share
from ckptkit.train.launch import launch
from ckptkit.train.loop import Step, learning_rate, make_optimizer, train
from ckptkit.train.model_config import ModelConfig
from ckptkit.train.ranks import Place
from ckptkit.train.smoke import Trial, has_equal_logits, has_equal_tensors
from tests.train.test_llama import plain_model

STEPS, SAVED = 6, 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run over a text of so few sequences that every step or two has the short last one, on one of its ranks."""
    root = tmp_path_factory.mktemp("loop")
    (root / "text").write_bytes(bytes(range(1, 200)) * 2)
    return TrainConfig(
        run=root / "run", data=root / "text", model=ModelConfig.sized("tiny"), steps=STEPS, save_every=SAVED,
        batch_size=7, sequence_length=48, lr=3e-3, warmup=2, device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def steps(config: TrainConfig) -> list[Step]:
    """What the run on two ranks reported."""
    heard: list[Step] = []
    launch(partial(train, config), 2, heard.append)
    return heard


@pytest.fixture
def alone(tmp_path: Path) -> Callable[[TrainConfig], list[Step]]:
    """Training on one rank: this process."""

    def train_alone(config: TrainConfig) -> list[Step]:
        heard: list[Step] = []
        train(config, Place(0, 1, 0, 1, (tmp_path / "meeting").as_uri()), heard.append)
        return heard

    return train_alone


def test_a_run_leaves_config_metrics_and_complete_checkpoints(config: TrainConfig, steps: list[Step]) -> None:
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert [checkpoint.step for checkpoint in Run(config.run).checkpoints()] == [SAVED, STEPS]
    assert [step.checkpoint for step in steps if step.checkpoint] == [str(config.run / f"ckpt-{n}") for n in (3, 6)]
    for root in (config.run, config.run / "ckpt-3", config.run / "ckpt-6"):
        assert ModelConfig.read(root / "config.json") == config.model
    lines = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    assert [Step(**line) for line in lines] == steps


def test_losses_are_those_of_a_plain_loop_that_counts_tokens(config: TrainConfig, steps: list[Step]) -> None:
    corpus = Corpus(read_text(config.data), config.sequence_length, config.seed)
    model = plain_model(config.model)
    optimizer = make_optimizer(model, config)
    uneven = total = 0
    for step in steps:
        places = range((step.step - 1) * config.batch_size, step.step * config.batch_size)
        first, second = (corpus.batch(share(places, rank, 2)).tokens for rank in (0, 1))
        batch = corpus.batch(places)
        uneven += first % config.sequence_length != 0 or second % config.sequence_length != 0
        total += batch.tokens
        loss = F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step.step - 1, config)
        optimizer.step()
        optimizer.zero_grad()
        assert step.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert step.tokens == total
    assert uneven > 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    config: TrainConfig, steps: list[Step], tmp_path: Path
) -> None:
    heard: list[Step] = []
    again = replace(config, run=tmp_path / "run", resume=config.run / "ckpt-3")
    launch(partial(train, again), 2, heard.append)
    assert list(map(numbers, heard)) == list(map(numbers, steps[SAVED:]))
    expected, found = saved_tensors(config.run / "ckpt-6"), saved_tensors(again.run / "ckpt-6")
    assert any(name.endswith(".exp_avg_sq") for name in expected)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_a_run_resumes_at_another_world_size_with_the_same_batches(
    config: TrainConfig, steps: list[Step], alone: Callable[[TrainConfig], list[Step]], tmp_path: Path
) -> None:
    heard = alone(replace(config, run=tmp_path / "run", resume=config.run / "ckpt-3"))
    assert [step.tokens for step in heard] == [step.tokens for step in steps[SAVED:]]
    assert [step.loss for step in heard] == pytest.approx([step.loss for step in steps[SAVED:]], rel=1e-5)


@pytest.mark.usefixtures("steps")
def test_a_tied_model_is_exported_with_one_embedding_and_equal_logits(config: TrainConfig, tmp_path: Path) -> None:
    consolidate(config.run, tmp_path / "out")
    trial = Trial(config, 2, tmp_path / "out")
    assert "lm_head.weight" not in trial.exported
    assert has_equal_tensors(trial) == "20 tensors equal to dcp.load's"
    assert "equal, bit for bit" in has_equal_logits(trial)


def numbers(step: Step) -> tuple[float, ...]:
    return (step.step, step.loss, step.grad_norm, step.lr, step.tokens)


def saved_tensors(root: Path) -> dict[str, torch.Tensor]:
    entries = FileSystemReader(root).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    state_dict_loader.load(tensors, checkpoint_id=root, no_dist=True)
    return tensors


def test_metrics_of_steps_taken_again_are_forgotten(
    config: TrainConfig, alone: Callable[[TrainConfig], list[Step]], tmp_path: Path
) -> None:
    first = replace(config, run=tmp_path / "run", steps=2, save_every=0)
    before = alone(first)
    with (first.run / "metrics.jsonl").open("a") as file:  # a step whose checkpoint was never finished, and half a line
        file.write(json.dumps({"step": 3, "loss": 0.0}) + '\n{"step": 4')
    after = alone(replace(first, steps=3, resume=first.run / "ckpt-2"))
    lines = [json.loads(line) for line in (first.run / "metrics.jsonl").read_text().splitlines()]
    assert [Step(**line) for line in lines] == before + after
    (first.run / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(Corrupt, match="not the metrics of a step"):
        alone(replace(first, steps=4, resume=first.run / "ckpt-3"))


@pytest.mark.usefixtures("steps")
def test_what_cannot_be_trained_is_refused_before_it_starts(
    config: TrainConfig, alone: Callable[[TrainConfig], list[Step]], tmp_path: Path
) -> None:
    resumed = replace(config, run=tmp_path / "run", resume=config.run / "ckpt-3")
    with pytest.raises(Occupied, match="has checkpoints already"):
        alone(config)
    with pytest.raises(Mismatch, match="trained with seed 0, not 1"):
        alone(replace(resumed, seed=1))
    with pytest.raises(Mismatch, match="of another model"):
        alone(replace(resumed, model=ModelConfig.sized("tiny", tied=False)))
    with pytest.raises(IOFailure, match="no such file") as raised:
        alone(replace(resumed, resume=tmp_path / "absent"))
    assert raised.value.path == tmp_path / "absent/config.json"
    assert not (tmp_path / "run").exists()


def test_a_rank_without_a_sequence_is_refused(config: TrainConfig) -> None:
    with pytest.raises(Usage, match="batch_size 1 leaves some of 2 ranks"):
        train(replace(config, batch_size=1), Place(0, 2, 0, 2, "env://"), print)


def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint(
    config: TrainConfig, alone: Callable[[TrainConfig], list[Step]], tmp_path: Path
) -> None:
    wild = replace(config, run=tmp_path / "run", lr=1e30, warmup=0, save_every=1, clip=1e30)
    with pytest.raises(CkptError, match=r"step 2: .* gradient norm nan"):
        alone(wild)
    assert [checkpoint.step for checkpoint in Run(wild.run).checkpoints()] == [1]


def test_learning_rate_rises_then_falls_to_a_tenth(tmp_path: Path) -> None:
    config = TrainConfig(run=tmp_path, steps=100, warmup=10, lr=1.0)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert math.isclose(learning_rate(100, config), 0.1)
