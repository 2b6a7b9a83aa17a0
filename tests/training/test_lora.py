"""Adapters trained on two ranks, on the weights of a run before; what they are saved as, resumed from and made into."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit.adapters.names import parse_tensor_name
from ckptkit.conversion.combine import merge
from ckptkit.conversion.convert import consolidate
from ckptkit.errors import CkptError, Mismatch, Unsupported, Usage
from ckptkit.training.config import TrainConfig, settings_to_resume_with
from ckptkit.training.launch import launch
from ckptkit.training.metrics import StepMetrics
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import Llama
from ckptkit.training.smoke.runs import read_tensors_by_torch
from tests.training.test_loop import go, go_each, numbers, refuse, require_close, require_equal_tensors

pytestmark = pytest.mark.slow
STEPS, SAVED = 4, 2
WEIGHTS, SAID = "model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that has trained the model, and its export."""
    root = tmp_path_factory.mktemp("adapters")
    (root / "text").write_bytes(b"\0".join(bytes(range(1, 20 + n)) * 2 for n in range(9)))
    config = TrainConfig(
        run=root / "run", data=root / "text", steps=2, batch_size=6, sequence_length=48, lr=3e-3, device="cpu",
    )  # fmt: skip
    go(config, 1)
    consolidate(config.run, root / "base")
    return config


@pytest.fixture(scope="module")
def lora(base: TrainConfig) -> TrainConfig:
    """A training of adapters on that export, saved alone."""
    return replace(
        base, run=base.run.parent / "lora", weights=base.run.parent / "base", steps=STEPS, save_every=SAVED,
        lora_rank=3, lora_alpha=5, state_dict="adapter",
    )  # fmt: skip


WAYS: list[dict[str, Any]] = [
    {},
    {"fsdp": "1", "background": True},
    {"state_dict": "sharded"},
    {"state_dict": "full", "fsdp": "1", "lora_targets": ("q_proj", "down_proj")},
    {"param_dtype": "bf16", "recompute_every": 1},
]


@pytest.fixture(scope="module")
def ran(base: TrainConfig, lora: TrainConfig) -> dict[Path, list[StepMetrics]]:
    """What runs in all of these ways reported, again from the middle, and on a model without a base, by the run."""
    runs = [replace(lora, **{"run": lora.run.with_name(f"lora-{i}"), **way}) for i, way in enumerate(WAYS)]
    again = [
        replace(run, run=run.run.with_name(f"{run.run.name}-again"), resume=str(run.run / "ckpt-2")) for run in runs
    ]
    fresh = replace(base, run=lora.run.with_name("fresh"), lora_rank=2)
    configs = [*runs, *again, fresh]
    return dict(zip([config.run for config in configs], go_each(configs, 2), strict=True))


@pytest.fixture(scope="module")
def trained(lora: TrainConfig, ran: Mapping[Path, list[StepMetrics]]) -> list[TrainConfig]:
    """The runs in all of these ways, the first of which is the plain one."""
    assert ran
    return [replace(lora, **{"run": lora.run.with_name(f"lora-{i}"), **way}) for i, way in enumerate(WAYS)]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    ran: Mapping[Path, list[StepMetrics]], trained: list[TrainConfig]
) -> None:
    for one in trained:
        again = one.run.with_name(f"{one.run.name}-again")
        assert len(ran[one.run]) == STEPS
        assert list(map(numbers, ran[again])) == list(map(numbers, ran[one.run][SAVED:])), one
        require_equal_tensors(one.run / "ckpt-4", again / "ckpt-4")


def test_nothing_else_is_saved_and_nothing_else_has_changed(lora: TrainConfig, trained: list[TrainConfig]) -> None:
    assert lora.weights is not None
    before = load_file(lora.weights / WEIGHTS)
    for run in trained:
        stored = read_tensors_by_torch(run.run / "ckpt-4")
        model = {name.removeprefix("model."): t for name, t in stored.items() if name.startswith("model.")}
        moments = {name for name in stored if name.startswith("optim.state.")}
        adapters = {name for name in model if parse_tensor_name(name) is not None}
        assert {name.removeprefix("optim.state.").rpartition(".")[0] for name in moments} == adapters
        assert all(model[name].any() and model[name].dtype == torch.float32 for name in adapters)
        if run.state_dict == "adapter":
            assert adapters == model.keys()
            continue
        held = torch.bfloat16 if run.param_dtype == "bf16" else torch.float32
        assert [name for name, t in before.items() if not torch.equal(model[name], t.to(held))] == []


def merged_logits(directory: Path, tokens: Tensor) -> Tensor:
    model = Llama(ModelConfig.from_config_json(directory / "config.json"))
    model.load_state_dict(load_file(directory / WEIGHTS), strict=False)
    with torch.no_grad():
        return model(tokens)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # the library's own
def test_it_is_merged_and_loaded_by_the_library(lora: TrainConfig, trained: list[TrainConfig], tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    assert lora.weights is not None
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    for i, run in enumerate(trained[:4]):
        adapter, merged = tmp_path / f"adapter-{i}", tmp_path / f"merged-{i}"
        consolidate(run.run, adapter)
        merge(lora.weights, [adapter], merged)
        model = transformers.AutoModelForCausalLM.from_pretrained(lora.weights)
        theirs = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
        with torch.no_grad():
            assert torch.equal(merged_logits(merged, tokens), theirs(tokens).logits), run
        base = lora.weights if run.state_dict == "adapter" else None
        done = consolidate(run.run, tmp_path / f"whole-{i}", merge=True, base=base)
        assert_equal(load_file(tmp_path / f"whole-{i}" / WEIGHTS), load_file(merged / WEIGHTS))
        assert done.source.parent == run.run
        assert not [left for left in done.left_behind if left.path.suffix == ".distcp"]


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def test_three_ranks_go_on_where_two_were(
    ran: Mapping[Path, list[StepMetrics]], trained: list[TrainConfig], tmp_path: Path
) -> None:
    first = trained[0]
    more = replace(first, run=tmp_path / "more", resume=str(first.run / "ckpt-2"))
    require_close(go(more, 3), ran[first.run][SAVED:])


def test_on_a_fresh_model_the_base_is_saved_too(
    ran: Mapping[Path, list[StepMetrics]], lora: TrainConfig, tmp_path: Path
) -> None:
    run = lora.run.with_name("fresh")
    assert len(ran[run]) == 2
    assert json.loads((run / "ckpt-2" / SAID).read_text())["base_model_name_or_path"] is None
    consolidate(run, tmp_path / "merged", merge=True)
    assert len(load_file(tmp_path / "merged" / WEIGHTS)) == 20


def test_a_run_goes_on_by_its_own_settings(lora: TrainConfig, trained: list[TrainConfig]) -> None:
    settings = settings_to_resume_with(trained[0].run, "auto")
    assert (settings["weights"], settings["lora_rank"]) == (lora.weights, 3)
    assert go(TrainConfig(run=trained[0].run, resume="auto", **settings), 1) == []


def test_a_run_that_died_before_its_first_save_starts_from_its_weights_again(base: TrainConfig, tmp_path: Path) -> None:
    losses = []
    for name in ("whole", "died"):
        run = replace(base, run=tmp_path / name, weights=base.run, steps=1)
        if name == "died":
            (tmp_path / name).mkdir()
            (tmp_path / name / "train.toml").write_text(run.to_toml())
            run = TrainConfig(run=run.run, resume="auto", **settings_to_resume_with(run.run, "auto"))
        losses.append([step.loss for step in go(run, 1)])
    assert losses[0] == losses[1]


def test_weights_are_forgotten_where_the_checkpoints_have_them(base: TrainConfig, tmp_path: Path) -> None:
    run = replace(base, run=tmp_path / "run", weights=base.run, steps=1)
    go(run, 1)
    settings = settings_to_resume_with(run.run, "auto")
    assert [step.step for step in go(TrainConfig(run=run.run, resume="auto", **settings | {"steps": 2}), 1)] == [2]


def test_what_does_not_go_on_is_refused(
    base: TrainConfig, lora: TrainConfig, trained: list[TrainConfig], tmp_path: Path
) -> None:
    assert lora.weights is not None
    shutil.copytree(lora.weights, tmp_path / "other")
    tensors = load_file(lora.weights / WEIGHTS)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].flip(0)}, tmp_path / "other" / WEIGHTS, {"format": "pt"})
    (tmp_path / "other/ckptkit.json").unlink()
    alone = replace(trained[0], run=tmp_path / "run", resume=str(trained[0].run / "ckpt-2"))
    whole = replace(base, run=tmp_path / "run", resume=str(base.run / "ckpt-2"))
    cases: list[tuple[TrainConfig, type[CkptError], str]] = [
        (replace(alone, lora_rank=4), Mismatch, "another adapter: expected 4 as `r`, found 3"),
        (replace(alone, lora_alpha=6), Mismatch, "another adapter: expected 6 as `lora_alpha`, found 5"),
        (
            replace(alone, lora_targets=("q_proj",)),
            Mismatch,
            "another adapter: expected ['q_proj'] as `target_modules`",
        ),
        (replace(alone, weights=None), Usage, "the checkpoints would contain only adapters, and no file"),
        (replace(alone, weights=tmp_path / "other"), Mismatch, "which were trained on another base"),
        (replace(whole, lora_rank=3), Mismatch, "expected LoRA adapters in the checkpoint to resume, found none"),
        (
            replace(alone, lora_rank=None, lora_alpha=8, state_dict="sharded", weights=None),
            Mismatch,
            "the checkpoint has LoRA adapters, but lora_rank is missing (hint: pass lora_rank=3)",
        ),
        (replace(lora, run=tmp_path / "run", weights=None), Usage, "the checkpoints would contain only adapters"),
        (replace(lora, run=tmp_path / "run", weights=trained[2].run), Mismatch, "the model does not have"),
        (
            replace(lora, run=tmp_path / "run", lora_targets=("q_prjo",)),
            Usage,
            "expected the name of a module, found `q_prjo`",
        ),
        (replace(lora, run=tmp_path / "run", lora_targets=("embed_tokens",)), Unsupported, "is a `Embedding`"),
    ]
    heard: list[Any] = []
    launch(partial(refuse, cases), 1, heard.append)
    for case, (is_kind, is_said, message) in zip(cases, heard, strict=True):
        assert is_kind, (case, message)
        assert is_said, (case, message)
    assert not (tmp_path / "run/ckpt-2").exists()
