"""One run on two ranks, and everything that must equal it."""

import json
import math
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckptkit.checkpoints.run import RunFolder
from ckptkit.conversion.convert import consolidate
from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, NotACheckpoint, Occupied, Usage
from ckptkit.io.disk import lock_path
from ckptkit.training.config import TrainConfig, read_settings
from ckptkit.training.data.batches import Corpus, open_corpus
from ckptkit.training.data.tokenizer import Bytes
from ckptkit.training.data.tokens import prepare_tokens
from ckptkit.training.initial import initialize_model
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.loop import DeferredSignal, take_steps, train_rank
from ckptkit.training.metrics import METRICS, StepMetrics
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import Llama, LlamaBlueprint
from ckptkit.training.smoke.runs import read_tensors_by_torch
from ckptkit.training.start import build_trainer_and_run
from ckptkit.training.trainer import make_scheduler, sum_losses
from scripts.benchmarks.loss import largest_allocation
from tests.tiers import nightly_but

STEPS, SAVED = 6, 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run over documents so short that every sequence has several, and a corpus so short that an epoch is a step."""
    root = tmp_path_factory.mktemp("loop")
    (root / "text").write_bytes(b"\0".join(bytes(range(1, 20 + n)) * 2 for n in range(9)))
    return TrainConfig(
        run=root / "run", data=root / "text", steps=STEPS, save_every=SAVED,
        batch_size=7, sequence_length=48, lr=3e-3, warmup=2, device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def steps(config: TrainConfig) -> list[StepMetrics]:
    """What the run on two ranks reported."""
    return go(config, 2)


def go(config: TrainConfig, nproc: int) -> list[StepMetrics]:
    """Train, and give the steps that were reported."""
    (steps,) = go_each([config], nproc)
    return steps


def go_each(configs: Sequence[TrainConfig], nproc: int) -> list[list[StepMetrics]]:
    """Train one run after the other on the same processes, whose start takes longer than the training."""
    heard: list[Any] = []
    launch(partial(train_each, configs), nproc, heard.append)
    return [
        [step for number, step in heard if number == i and isinstance(step, StepMetrics)] for i in range(len(configs))
    ]


def tell(report: Report, number: int, message: object) -> None:
    report((number, message))


def train_each(configs: Sequence[TrainConfig], place: RankPlace, report: Report) -> None:
    for i, config in enumerate(configs):
        train_rank(config, replace(place, rendezvous=f"{place.rendezvous}-{i}"), partial(tell, report, i))


def corpus_of(config: TrainConfig, room: Path) -> Corpus:
    tokens = prepare_tokens(config.data, Bytes(), room)
    return open_corpus(tokens, length=config.sequence_length, seed=config.seed)


def test_a_run_leaves_settings_config_metrics_and_complete_checkpoints(
    config: TrainConfig, steps: list[StepMetrics]
) -> None:
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert [checkpoint.step for checkpoint in RunFolder(config.run).checkpoints()] == [SAVED, STEPS]
    assert [step.checkpoint for step in steps if step.checkpoint] == [str(config.run / f"ckpt-{n}") for n in (3, 6)]
    for root in (config.run, config.run / "ckpt-3", config.run / "ckpt-6"):
        assert ModelConfig.from_config_json(root / "config.json") == ModelConfig.of_size("tiny")
    lines = [json.loads(line) for line in (config.run / METRICS).read_text().splitlines()]
    assert [StepMetrics(**line) for line in lines] == steps
    assert TrainConfig(run=config.run, **read_settings(config.run / "train.toml")) == config
    assert json.loads((config.run / "ckpt-3/metrics.json").read_text()) == {"loss": steps[2].loss, "step": 3}


def test_losses_are_those_of_a_plain_loop_over_whole_batches(
    config: TrainConfig, steps: list[StepMetrics], tmp_path: Path
) -> None:
    corpus = corpus_of(config, tmp_path)
    blueprint = LlamaBlueprint(ModelConfig.of_size("tiny"))
    model = Llama(blueprint.config)
    initialize_model(blueprint, model, config.seed)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))
    scheduler = make_scheduler(config, optimizer)
    total = 0
    for step in steps:
        batch = corpus.batch_at(range((step.step - 1) * config.batch_size, step.step * config.batch_size))
        assert batch.positions is not None
        total += batch.loss_token_count
        logits = model(batch.inputs, batch.positions)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        assert step.lr == scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert step.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert step.tokens == total


WAYS: list[dict[str, Any]] = [
    {},
    {"state_dict": "full", "fsdp": "1"},
    {"background": True, "fsdp": "1"},
    {"background": True, "state_dict": "full", "micro_batch_size": 2},
    {"strategy": "ddp"},
    {"background": True, "state_dict": "hf"},
]


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "all_ways"), [pytest.param(1, WAYS[3:5], marks=pytest.mark.nightly), (2, WAYS)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    config: TrainConfig, tmp_path: Path, nproc: int, all_ways: list[dict[str, Any]]
) -> None:
    whole = [replace(config, run=tmp_path / f"whole-{i}", **ways) for i, ways in enumerate(all_ways)]
    again = [replace(run, run=tmp_path / f"again-{i}", resume=str(run.run / "ckpt-3")) for i, run in enumerate(whole)]
    found = go_each(whole + again, nproc)
    for ways, one, other, expected, resumed in zip(all_ways, whole, again, found, found[len(whole) :], strict=False):
        assert len(expected) == STEPS, ways
        assert list(map(numbers, resumed)) == list(map(numbers, expected[SAVED:])), ways
        require_equal_tensors(one.run / "ckpt-6", other.run / "ckpt-6")


def numbers(step: StepMetrics) -> tuple[float, ...]:
    return (step.step, step.loss, step.grad_norm, step.lr, step.tokens)


def require_equal_tensors(one: Path, other: Path) -> None:
    expected, found = tensors_in(one), tensors_in(other)
    assert any(name.endswith(".exp_avg_sq") for name in expected)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def tensors_in(checkpoint: Path) -> dict[str, Tensor]:
    if not (checkpoint / "training").exists():
        return read_tensors_by_torch(checkpoint)
    return load_file(checkpoint / "model.safetensors") | read_tensors_by_torch(checkpoint / "training")


@pytest.mark.nightly
def test_what_changes_the_way_changes_no_number(config: TrainConfig, steps: list[StepMetrics], tmp_path: Path) -> None:
    """Seven sequences on two ranks: with one at a time, a rank has a micro-batch of nothing."""
    ways: list[dict[str, Any]] = [
        {"micro_batch_size": 1},
        {"micro_batch_size": 2, "fsdp": "1"},
        {"recompute_every": 1},
        {"prefetch": 0},
    ]
    configs = [replace(config, run=tmp_path / str(i), **way) for i, way in enumerate(ways)]
    for found in go_each(configs, 2):
        require_close(found, steps)


def require_close(found: list[StepMetrics], expected: list[StepMetrics]) -> None:
    assert [step.tokens for step in found] == [step.tokens for step in expected]
    assert [step.loss for step in found] == pytest.approx([step.loss for step in expected], rel=1e-4)
    assert [step.grad_norm for step in found] == pytest.approx([step.grad_norm for step in expected], rel=1e-3)


@pytest.mark.slow
def test_a_run_goes_on_from_two_to_four_to_three_ranks_with_the_same_batches(
    config: TrainConfig, steps: list[StepMetrics], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = go(replace(config, run=run, resume=str(config.run / "ckpt-3"), state_dict="hf", steps=4), 4)
    then = go(replace(config, run=run, resume="auto", state_dict="full", fsdp="1", steps=STEPS), 3)
    assert [step.step for step in first + then] == [4, 5, 6]
    assert [step.tokens for step in first + then] == [step.tokens for step in steps[SAVED:]]
    assert first[0].loss == pytest.approx(steps[3].loss, rel=1e-5)
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 5, 6]


@pytest.mark.slow
def test_a_resumed_run_learns_at_the_rates_asked_for_now(
    config: TrainConfig, steps: list[StepMetrics], tmp_path: Path
) -> None:
    slower = replace(config, run=tmp_path / "run", resume=str(config.run / "ckpt-3"), lr=config.lr / 2)
    assert [step.lr for step in go(slower, 1)] == pytest.approx([step.lr / 2 for step in steps[SAVED:]])


@pytest.mark.slow
@pytest.mark.usefixtures("steps")
def test_starting_weights_come_from_an_export_or_any_checkpoint(config: TrainConfig, tmp_path: Path) -> None:
    consolidate(config.run, tmp_path / "out")
    places = [tmp_path / "out", config.run, config.run / "ckpt-6", config.run / "ckpt-3"]
    starts = [replace(config, run=tmp_path / str(i), weights=place, steps=1) for i, place in enumerate(places)]
    losses = [step.loss for (step,) in go_each([*starts, replace(starts[0], run=tmp_path / "fsdp1", fsdp="1")], 2)]
    assert losses[0] == losses[1] == losses[2] < losses[3]
    assert losses[4] == pytest.approx(losses[0])
    with pytest.raises(Mismatch, match="lacks 1 of the model's 21 tensors") as raised:
        go(replace(starts[0], run=tmp_path / "untied", untied=True), 1)
    assert raised.value.tensor == "lm_head.weight"


@pytest.mark.slow
@pytest.mark.usefixtures("steps")
def test_no_weight_is_left_out_in_silence(config: TrainConfig, tmp_path: Path) -> None:
    consolidate(config.run, tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    embedding, inner = weights["model.embed_tokens.weight"], "model.layers.0.self_attn"
    cases: list[tuple[dict[str, Tensor], str | None]] = [
        ({f"{inner}.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": embedding.clone()}, None),
        ({"lm_head.weight": embedding + 1}, "the checkpoint's bytes differ"),
        ({f"{inner}.q_proj.bias": torch.ones(64)}, "does not have 1 of the checkpoint's tensors: model.layers.0"),
    ]
    for number, (more, said) in enumerate(cases):
        (tmp_path / f"{number}").mkdir()
        save_file(weights | more, tmp_path / f"{number}/model.safetensors")
        start = replace(config, run=tmp_path / f"run-{number}", weights=tmp_path / f"{number}", steps=1)
        if said is None:
            assert len(go(start, 1)) == 1
        else:
            with pytest.raises(Mismatch, match=said) as raised:
                go(start, 1)
            assert raised.value.tensor == next(iter(more))


@pytest.mark.slow
def test_old_checkpoints_go_and_the_best_stays(config: TrainConfig, steps: list[StepMetrics], tmp_path: Path) -> None:
    kept = replace(config, run=tmp_path / "run", save_every=1, keep_last=1, keep_best="loss", background=True)
    found = go(kept, 1)
    best = min(found, key=lambda step: step.loss).step
    assert [checkpoint.step for checkpoint in RunFolder(kept.run).checkpoints()] == sorted({best, STEPS})


def terminate_after_two(config: TrainConfig, place: RankPlace, report: Report) -> None:
    """As a scheduler does that wants its machines back, on one rank only: the others must hear of it."""

    def hear(message: object) -> None:
        report(message)
        if isinstance(message, StepMetrics) and message.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    train_rank(config, place, hear)


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves_first(config: TrainConfig, steps: list[StepMetrics], tmp_path: Path) -> None:
    heard: list[Any] = []
    ended = replace(config, run=tmp_path / "run", background=True)
    launch(partial(terminate_after_two, ended), 2, heard.append)
    assert [message.step for message in heard if isinstance(message, StepMetrics)] == [1, 2, 3]
    assert heard[-1].ended_early
    assert [checkpoint.step for checkpoint in RunFolder(ended.run).checkpoints()] == [3]
    found = go(replace(ended, resume="auto"), 2)
    assert list(map(numbers, found)) == list(map(numbers, steps[SAVED:]))


@pytest.mark.slow
@pytest.mark.parametrize("file", nightly_but(["__1_0.distcp"], ["__1_0.distcp", ".metadata"]))
def test_a_damaged_newest_checkpoint_is_skipped(
    config: TrainConfig, steps: list[StepMetrics], tmp_path: Path, file: str
) -> None:
    run = Path(shutil.copytree(config.run, tmp_path / "run"))
    flip(run / f"ckpt-{STEPS}" / file)
    heard: list[Any] = []
    launch(partial(train_rank, replace(config, run=run, resume="auto")), 2, heard.append)
    assert [numbers(one) for one in heard if isinstance(one, StepMetrics)] == list(map(numbers, steps[SAVED:]))
    assert heard[0].text.startswith(f"warning: {run}/ckpt-6 cannot be loaded: ")
    assert heard[0].text.endswith(f"; resuming from {run}/ckpt-3, ckpt-6 is now damaged-ckpt-6")
    assert [checkpoint.step for checkpoint in RunFolder(run).checkpoints()] == [SAVED, STEPS]
    for step in (SAVED, STEPS):
        flip(run / f"ckpt-{step}" / file)
    with pytest.raises(CkptError) as caught:
        launch(partial(train_rank, replace(config, run=run, resume="auto", steps=STEPS + 1)), 1, heard.append)
    assert caught.value.exit_code == 3
    assert (run / f"ckpt-{STEPS}").exists()


@pytest.mark.slow
def test_a_renamed_checkpoint_is_no_later_step(config: TrainConfig, tmp_path: Path) -> None:
    run = Path(shutil.copytree(config.run, tmp_path / "run"))
    (run / f"ckpt-{SAVED}").rename(run / "ckpt-99")
    with pytest.raises(Mismatch, match=rf"expected step 99 \(in its name\), found {SAVED}") as raised:
        go(replace(config, run=run, resume="auto", steps=100), 1)
    assert raised.value.hint == f"rename it to ckpt-{SAVED}"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0 if path.name == ".metadata" else len(data) // 2] ^= 4  # the metadata is a pickle, and then it is none
    path.write_bytes(data)


@pytest.mark.slow
def test_metrics_of_steps_taken_again_are_forgotten(config: TrainConfig, tmp_path: Path) -> None:
    first = replace(config, run=tmp_path / "run", steps=2, save_every=0)
    before = go(first, 1)
    with (first.run / METRICS).open("a") as file:  # a step whose checkpoint was never finished, and half a line
        file.write(json.dumps({"step": 3, "loss": 0.0}) + '\n{"step": 4')
    after = go(replace(first, steps=3, resume="auto"), 1)
    lines = [json.loads(line) for line in (first.run / METRICS).read_text().splitlines()]
    assert [StepMetrics(**line) for line in lines] == before + after
    assert go(replace(first, steps=3, resume="auto"), 1) == []
    (first.run / METRICS).write_text('{"loss": 1}\n')
    with pytest.raises(Corrupt, match="not the metrics of a step"):
        go(replace(first, steps=4, resume="auto"), 1)


def refuse(cases: list[tuple[TrainConfig, type[CkptError], str]], place: RankPlace, report: Report) -> None:
    for i, (config, kind, said) in enumerate(cases):
        with pytest.raises(CkptError) as raised:
            train_rank(config, replace(place, rendezvous=f"{place.rendezvous}-{i}"), report)
        report((type(raised.value) is kind or kind is CkptError, said in str(raised.value), str(raised.value)))


@pytest.mark.slow
@pytest.mark.usefixtures("steps")
def test_what_cannot_be_trained_is_refused_before_it_starts(config: TrainConfig, tmp_path: Path) -> None:
    resumed = replace(config, run=tmp_path / "run", resume=str(config.run / "ckpt-3"))
    (tmp_path / "other").write_bytes(bytes(range(200)))
    (tmp_path / "half" / "ckpt-2").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    cases = [
        (config, Occupied, "has checkpoints already"),
        (replace(config, run=tmp_path / "half", resume="auto"), Occupied, "only unfinished checkpoints: ckpt-2"),
        (replace(config, run=tmp_path / "model"), Occupied, "found config.json without train.toml"),
        (replace(resumed, run=tmp_path / "model"), Occupied, "found config.json without train.toml"),
        (replace(config, run=tmp_path / "new", batch_size=1), Usage, "batch_size: expected at least 2"),
        (replace(resumed, seed=1), Mismatch, "expected seed 0 as in the checkpoint, found 1"),
        (replace(resumed, sequence_length=40), Mismatch, "expected sequence_length 48 as in the checkpoint, found 40"),
        (replace(resumed, data=tmp_path / "other"), Mismatch, "expected data "),
        (replace(resumed, untied=True), Mismatch, "another model: expected False as `tie_word_embeddings`, found True"),
        (replace(resumed, model="3m"), Mismatch, "the checkpoint has another model"),
        (replace(resumed, resume=str(tmp_path / "absent")), NotACheckpoint, "no such file or directory"),
        (replace(resumed, sequence_length=4096), Usage, "at most 2048"),
        (replace(config, run=tmp_path / "new", data=tmp_path / "nothing"), IOFailure, "no such file"),
    ]
    heard: list[Any] = []
    launch(partial(refuse, cases), 2, heard.append)
    assert [found for found in heard if not (found[0] and found[1])] == []
    assert len(heard) == 2 * len(cases)
    assert not (tmp_path / "run/ckpt-6").exists()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint(config: TrainConfig, tmp_path: Path) -> None:
    wild = replace(config, run=tmp_path / "run", lr=1e30, warmup=0, save_every=1, clip=1e30)
    with pytest.raises(CkptError, match=r"step 2: .* gradient norm nan"):
        go(wild, 1)
    assert [checkpoint.step for checkpoint in RunFolder(wild.run).checkpoints()] == [1]


@pytest.mark.slow
class NumberReads(TorchDispatchMode):
    """Records the modules of the package that turn a tensor into a Python number, which waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            files = [Path(frame.filename) for frame in traceback.extract_stack()]
            self.modules.add(next(file.stem for file in reversed(files) if "ckptkit" in file.parts))
        return func(*args, **(kwargs or {}))


def report_number_reads(config: TrainConfig, place: RankPlace, report: Report) -> None:
    with process_group(place, config.device) as mesh:
        trainer, run = build_trainer_and_run(config, mesh)
        with run, NumberReads() as reads:
            next(take_steps(config, trainer, run, DeferredSignal()))  # the last one would save
        report(sorted(reads.modules))


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_a_step_reads_no_number_of_its_own(fsdp: Any, tmp_path: Path, config: TrainConfig) -> None:
    """But the one list of losses, norm, tokens and stop signals; batches are still on the CPU."""
    heard: list[Any] = []
    once = replace(config, run=tmp_path / "run", fsdp=fsdp, steps=2, save_every=0)
    launch(partial(report_number_reads, once), 1, heard.append)
    assert heard == [["batches"]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch's compiler about torch.jit
def test_the_compiled_loss_never_stores_the_logits_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 64, 2_000, dtype=torch.bfloat16, generator=generator, requires_grad=True)
    targets = torch.randint(2_000, (2, 64), generator=generator)

    def loss_and_gradient(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        loss = function(logits, targets)
        return loss.detach(), *torch.autograd.grad(loss, logits)

    compiled = torch.compile(sum_losses)
    torch.testing.assert_close(loss_and_gradient(compiled), loss_and_gradient(sum_losses))
    assert largest_allocation(partial(loss_and_gradient, compiled)) == logits.nbytes
    assert largest_allocation(partial(loss_and_gradient, sum_losses)) == 2 * logits.nbytes


def test_metrics_go_to_tensorboard_too(config: TrainConfig, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    found = go(replace(config, run=run, steps=2, tensorboard=True), 1)
    board = events.EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([step.loss for step in found])


def test_learning_rate_rises_then_falls_to_a_tenth(tmp_path: Path) -> None:
    config = TrainConfig(run=tmp_path, steps=100, warmup=10, lr=1.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    scheduler = make_scheduler(config, optimizer)
    rates = []
    for _ in range(101):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert math.isclose(rates[100], 0.1)


class Stopped(Exception):
    """Ends a training from its report."""


@pytest.mark.slow
def test_a_second_training_in_the_same_run_is_refused(tmp_path: Path, config: TrainConfig) -> None:
    run = tmp_path / "run"

    def train_again(message: object) -> None:
        if isinstance(message, StepMetrics):
            with pytest.raises(Occupied, match="another `ckptkit train` is saving to this run") as raised:
                launch(partial(train_rank, replace(config, run=run)), 2, print)
            assert raised.value.path == run
            raise Stopped

    with pytest.raises(Stopped):
        launch(partial(train_rank, replace(config, run=run, steps=10**6)), 1, train_again)
    go(replace(config, run=run, resume="auto", steps=1), 1)  # not refused; the first may have saved when it was stopped
    assert not lock_path(run / "train").exists()  # the first may have been killed in a save, which leaves other files
