"""Items that torch compressed with zstd, in stores: unpacked into a local file, to what local ones become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._extension import ZStandard

import ckptkit
from ckptkit.errors import Corrupt
from tests.faults.damage import flip_bit
from tests.producers import counted, save_alone
from tests.s3 import Bucket

pytestmark = pytest.mark.slow


def state() -> dict[str, Any]:
    """A model of two tensors, one of random numbers, and the state of its optimizer by name."""
    torch.manual_seed(0)
    weights = {"a.weight": torch.randn(300, 70), "b.weight": counted(5, 3)}
    groups = [{"lr": 0.1, "params": list(weights)}]
    states = {name: {"exp_avg": value * 2} for name, value in weights.items()}
    return {"model": weights, "optim": {"state": states, "param_groups": groups}, "step": 7}


def test_it_becomes_what_a_plain_local_one_becomes(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of entries are read too: those of the optimizer's groups number its parameters."""
    (tmp_path / "room").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "room"))
    save_alone(state(), bucket.root / "run/ckpt-7", _extensions=[ZStandard()])
    save_alone(state(), tmp_path / "plain")
    ckptkit.convert(f"{bucket.url}/run", tmp_path / "out.pt", to="pt", optimizer_keys="ids")
    ckptkit.convert(tmp_path / "plain", tmp_path / "plain.pt", to="pt", optimizer_keys="ids")
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "plain.pt").read_bytes()
    assert all(part.is_ok for part in ckptkit.verify(f"{bucket.url}/run"))
    assert not list((tmp_path / "room").iterdir())


def test_damage_is_named_by_its_url(bucket: Bucket, tmp_path: Path) -> None:
    save_alone(state(), bucket.root / "ckpt-7", _extensions=[ZStandard()])
    place = ckptkit.inspect(bucket.root / "ckpt-7").layout.tensors["model.a.weight"].chunks[0]
    flip_bit(bucket.root / "ckpt-7" / place.path, place.offset + place.length // 2, 3)
    with pytest.raises(Corrupt) as raised:
        ckptkit.consolidate(f"{bucket.url}/ckpt-7", tmp_path / "out")
    assert (str(raised.value.path), raised.value.tensor) == (f"{bucket.url}/ckpt-7/{place.path}", "a.weight")
    assert not (tmp_path / "out").exists()
