"""The account of a conversion: each entry and file of the source is written, dropped for a reason, or left and said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

import ckptkit
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.models.names.weights import TRAINING, UNKNOWN, VALUE
from ckptkit.state.draft import Entries
from tests import producers
from tests.command import ckptkit as run
from tests.conftest import Produce

EMA = {"model": {"w": torch.ones(3, 3)}, "ema": {"w": torch.zeros(3, 3)}, "rng_state": torch.arange(4), "epoch": 3}


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    """What `accelerator.save_state` leaves of a generator and a discriminator."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(8, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    prepared[1](prepared[0](torch.randn(2, 8))).sum().backward()
    for optimizer in prepared[2:]:
        optimizer.step()
    accelerator.save_state(str(tmp_path / "two"))
    accelerator.free_memory()
    return tmp_path / "two"


def test_a_second_model_goes_into_a_whole_checkpoint(two_models: Path, tmp_path: Path) -> None:
    done = ckptkit.convert(two_models, tmp_path / "out", to="dcp")
    names = open_layout(tmp_path / "out").tensors.keys()
    assert {"model.weight", "model_1.weight"} <= names
    assert any(name.startswith("optimizer_1.state") for name in names)
    assert done.entries["left"] == 0
    assert not done.left_behind
    assert [left.name for left in ckptkit.convert(tmp_path / "out", tmp_path / "hf", to="hf").dropped] == [
        *("model_1", "optimizer", "optimizer_1")
    ]


def test_a_second_model_is_not_left_behind_in_silence(two_models: Path, tmp_path: Path) -> None:
    found = run("consolidate", two_models, tmp_path / "out")
    assert found.returncode == 0
    assert "warning: not copied: model_1.safetensors (weights of another model" in found.stderr
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"weight", "bias"}
    with pytest.raises(Mismatch, match=r"`model_1\.safetensors` would not be copied"):
        ckptkit.consolidate(two_models, tmp_path / "strict", strict=True, names="keep")
    assert not (tmp_path / "strict").exists()


def test_every_model_is_verified(two_models: Path) -> None:
    assert all(part.is_ok for part in ckptkit.verify(two_models))
    (two_models / "model_1.safetensors").write_bytes(b"garbage, garbage, garbage")
    assert [part.path.name for part in ckptkit.verify(two_models) if not part.is_ok] == ["model_1.safetensors"]


def test_other_weights_are_verified_and_other_files_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "value_head.safetensors").write_bytes(b"garbage, garbage, garbage")
    (tmp_path / "notes.txt").touch()
    found = run("verify", tmp_path, "--json")
    assert found.returncode != 0
    assert [Path(one["path"]).name for one in json.loads(found.stdout)["left_behind"]] == ["notes.txt"]
    assert [Path(one["path"]).name for one in json.loads(found.stdout)["problems"]] == ["value_head.safetensors"]


def test_why_each_entry_is_not_written(tmp_path: Path) -> None:
    torch.save(EMA, tmp_path / "all.pt")
    done = ckptkit.consolidate(tmp_path / "all.pt", tmp_path / "out")
    assert {left.name: left.why for left in done.dropped} == {"ema": UNKNOWN, "rng_state": TRAINING, "epoch": VALUE}
    assert done.entries == {"written": 1, "dropped": 2, "left": 1}
    found = run("consolidate", tmp_path / "all.pt", tmp_path / "more")
    assert "warning: not copied: `ema`, 1 entry, 36 B" in found.stderr
    with pytest.raises(Mismatch, match="`ema` would be lost: 1 tensor"):
        ckptkit.consolidate(tmp_path / "all.pt", tmp_path / "strict", strict=True, names="keep")
    done = ckptkit.consolidate(tmp_path / "all.pt", tmp_path / "asked", exclude=["ema.*"], strict=True, names="keep")
    assert {left.name: left.why for left in done.dropped}["ema"] == "--exclude"


def test_files_that_stay_are_named(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    save_file({"w": torch.ones(3)}, model / "model.safetensors")
    save_file({"v": torch.ones(3)}, model / "value_head.safetensors")
    for name in ("notes.txt", ".hidden", "1_Pooling/config.json", "2_Dense/model.safetensors", "scheduler.pt"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).touch()
    found = {left.name: left.why for left in ckptkit.consolidate(model, out).left_behind}
    weights = "weights of another model, or of an earlier save"
    assert found == {
        "value_head.safetensors": weights,
        "2_Dense/model.safetensors": weights,
        "1_Pooling/config.json": "config or tokenizer",
        "notes.txt": "not known",
        ".hidden": "hidden",
        "scheduler.pt": TRAINING,
    }


@pytest.mark.parametrize("command", ["consolidate", "dcp", "pt"])
@pytest.mark.parametrize("produced", [producers.fsdp2, producers.full, producers.hsdp])
def test_the_account_balances(produced: Any, command: str, produce: Produce, tmp_path: Path) -> None:
    source = produce(produced).root
    done = (
        ckptkit.consolidate(source, tmp_path / "out")
        if command == "consolidate"
        else ckptkit.convert(source, tmp_path / "out", to=command)
    )
    assert sum(done.entries.values()) == len(open_layout(source).names)


def test_an_entry_that_nobody_accounts_for_is_an_error(produce: Produce) -> None:
    layout = replace(open_layout(produce(producers.fsdp2).root), blobs={})
    first, *others = layout.tensors
    with pytest.raises(Unsupported, match="the output would lose this entry") as raised:
        Entries.of(layout, others, {})
    assert raised.value.tensor == first
    assert Entries.of(layout, others, {}, used=[layout]).written == frozenset(layout.tensors)
