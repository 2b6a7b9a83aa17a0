"""torch computes where storages lie, without reading each header: only right if they lie as torch.save puts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.serialization import config

from ckptkit.conversion.convert import convert
from ckptkit.storage import Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE: dict[str, Any] = {
    "first": ({"seeds": torch.arange(5), "empty": torch.empty(0)},),
    "model": {"a": torch.ones(3), "empty": torch.empty(0, 4), "b": torch.arange(5.0)},
    "last": ({"loss": torch.ones(2)},),
}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch compute offsets in loads, and compare them with those in the archive's directory."""
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with config.patch({"load.calculate_storage_offsets": True}):  # type: ignore[attr-defined]
        yield


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("way", ["torch", "convert", "Writer"])
def test_torch_finds_each_storage(tmp_path: Path, way: str) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp", no_dist=True)
    if way == "torch":
        torch.save(STATE, tmp_path / "state.pt")
    elif way == "convert":
        convert(tmp_path / "dcp", tmp_path / "state.pt", to="pt")
    else:
        dcp.save(STATE, storage_writer=Writer(tmp_path / "pt", "pt"), no_dist=True)
    file = tmp_path / ("pt/state.pt" if way == "Writer" else "state.pt")
    loaded = torch.load(file, mmap=True, weights_only=True)
    torch.testing.assert_close(loaded, STATE, rtol=0, atol=0)
    offsets = torch.load(file, map_location="meta", weights_only=True)["model"]
    content = file.read_bytes()
    for name, tensor in STATE["model"].items():
        at = offsets[name].untyped_storage()._checkpoint_offset
        assert content[at : at + tensor.nbytes] == tensor.numpy().tobytes(), name
