"""FSDP1's flat parameters, cut by the names and shapes of the optimizer beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.optimizers.flat_parameters import split_flat_parameter
from ckptkit.errors import CkptError
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.dtypes import DTYPES
from tests.conftest import Produce
from tests.formats.ranks.test_ranks import assert_is, of
from tests.tiers import nightly_but
from tests.trainers import produced_ranks as produced

KINDS = ("units", "orig")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_holds_the_live_state(produce: Produce, tmp_path: Path, kind: str) -> None:
    made = produce(produced.flat_parameters)
    checkpoint = Checkpoint.open(made.root / kind)
    assert [part.place for part in checkpoint.components] == ["", "optimizer_0"]
    assert checkpoint.trainer == "Accelerate"
    assert_is(checkpoint.layout, of(kind, made.truth))
    ckptkit.consolidate(made.root / kind, tmp_path / "out")
    weights = {name.removeprefix("model."): t for name, t in of(kind, made.truth).items() if name.startswith("model.")}
    found = ckptkit.open(tmp_path / "out")
    assert set(found) == weights.keys()


def test_says_what_is_needed_without_an_optimizer(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced.flat_parameters).root / "units", tmp_path / "there"))
    shutil.rmtree(root / "optimizer_0")
    with pytest.raises(CkptError, match="no file gives the names") as raised:
        _ = Checkpoint.open(root).layout
    assert raised.value.code == "unsupported"
    assert "optimizer_0" in str(raised.value.hint)


@pytest.mark.slow
def test_refuses_the_optimizer_of_another_model(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced.flat_parameters).root / "units", tmp_path / "there"))
    shutil.rmtree(root / "optimizer_0")
    source = produce(produced.four_ranks).root / "tp"
    ckptkit.convert(source, tmp_path / "other", to="dcp", include="optimizer.*")
    shutil.copytree(tmp_path / "other", root / "optimizer_0")
    with pytest.raises(CkptError, match=r"elements in [0-9]+ parameters"):
        _ = Checkpoint.open(root).layout


@pytest.mark.parametrize("place", nightly_but(["llama", "orig"], produced.FLAT_MODELS))
def test_config_tells_what_they_are_made_of(produce: Produce, tmp_path: Path, place: str) -> None:
    made = produce(produced.flat_by_config)
    truth = of(place, made.truth)
    if place != "by-hand":  # which has another key above the model
        assert_is(Checkpoint.open(made.root / place).layout, truth)
    done = ckptkit.consolidate(made.root / place, tmp_path / "out")
    assert done.unchecked_bytes == 0
    found = ckptkit.open(tmp_path / "out")
    assert {f"model.{name}" for name in found} == truth.keys()
    for name, lazy in found.items():
        assert torch.equal(lazy.torch(), truth[f"model.{name}"]), name


def copy_of(produce: Produce, place: str, there: Path) -> tuple[Path, Path]:
    """A checkpoint without a config.json, and the directory that has it."""
    made = produce(produced.flat_by_config).root / place
    return Path(shutil.copytree(made / "checkpoint-3", there / "checkpoint-3")), made


def test_config_may_lie_in_the_base(produce: Produce, tmp_path: Path) -> None:
    root, base = copy_of(produce, "llama", tmp_path / "in")
    with pytest.raises(CkptError, match="no file gives the names") as raised:
        ckptkit.consolidate(root, tmp_path / "out")
    assert "--base" in str(raised.value.hint)
    ckptkit.consolidate(root, tmp_path / "out", base=base)
    assert ckptkit.diff(tmp_path / "out", produce(produced.flat_by_config).root / "llama").is_equal


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 16},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"vocab_size": 18},
        {"model_type": "unheard of"},
        {"num_hidden_layers": 10**9},
        {"hidden_size": None},
    ],
)
def test_the_config_of_another_model_is_refused(produce: Produce, tmp_path: Path, change: dict[str, Any]) -> None:
    root, base = copy_of(produce, "llama", tmp_path)
    config = json.loads((base / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CkptError) as raised:
        _ = Checkpoint.open(root).layout
    assert raised.value.exit_code == 3
    assert raised.value.path is not None


def test_parameters_that_fit_in_two_ways_are_refused(tmp_path: Path) -> None:
    """The second may begin at 4 or 8: on so many ranks the padding at the end hides which."""
    flat = Layout(tmp_path, "raw", {}, world_size=12)
    stored = StoredTensor(Spec(DTYPES["float32"], (12,)), ())
    with pytest.raises(CkptError, match="fit into this flat parameter in 2 ways"):
        list(split_flat_parameter(stored, {"a": (2,), "b": (2,)}, "config.json", "_flat_param", flat))
