"""FSDP1's flat parameters, cut by the names and shapes of the optimizer beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import CkptError
from tests.conftest import Produce
from tests.formats.ranks.test_ranks import assert_is, of
from tests.trainers import produced_ranks as produced

KINDS = ("units", "orig")


@pytest.mark.parametrize("kind", KINDS)
def test_holds_the_live_state(produce: Produce, tmp_path: Path, kind: str) -> None:
    made = produce(produced.flat_parameters)
    checkpoint = Checkpoint.open(made.root / kind)
    assert [part.place for part in checkpoint.parts] == ["", "optimizer_0"]
    assert checkpoint.trainer == "Accelerate"
    assert_is(checkpoint.layout, of(kind, made.truth))
    ckptkit.consolidate(made.root / kind, tmp_path / "out")
    weights = {name.removeprefix("model."): t for name, t in of(kind, made.truth).items() if name.startswith("model.")}
    found = ckptkit.open(tmp_path / "out")
    assert set(found) == weights.keys()


def test_says_what_is_needed_without_an_optimizer(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced.flat_parameters).root / "units", tmp_path / "there"))
    shutil.rmtree(root / "optimizer_0")
    with pytest.raises(CkptError, match="in no file here") as raised:
        _ = Checkpoint.open(root).layout
    assert raised.value.code == "unsupported"
    assert "optimizer_0" in str(raised.value.hint)


def test_refuses_the_optimizer_of_another_model(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced.flat_parameters).root / "units", tmp_path / "there"))
    shutil.rmtree(root / "optimizer_0")
    source = produce(produced.four_ranks).root / "tp"
    ckptkit.convert(source, tmp_path / "other", to="dcp", include="optimizer.*")
    shutil.copytree(tmp_path / "other", root / "optimizer_0")
    with pytest.raises(CkptError, match="numbers, but the optimizer has"):
        _ = Checkpoint.open(root).layout
