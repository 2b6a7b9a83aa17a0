"""Items that torch compressed with zstd: read to the bit, bounded, and gone when they have been read."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint._extension import ZStandard

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import Corrupt, NoRoom, Unsupported
from ckptkit.formats import decompress_entries
from ckptkit.layout import Blob, Layout, Wrapped
from ckptkit.layout.box import full_box
from ckptkit.storage import Reader
from tests import producers
from tests.conftest import Produce
from tests.formats.contract import assert_holds
from tests.producers import counted, save_alone


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    (tmp_path / "room").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "room"))
    return tmp_path / "room"


def lying(data: bytes, root: Path) -> Layout:
    """A checkpoint with one entry, whose stream is `data`."""
    root.mkdir()
    (root / "f").write_bytes(b"???" + data)
    return Layout(root, "dcp", {}, {"x": Blob("f", 3, len(data), where=Wrapped("stream.zstd/1"))})


def test_what_torch_compressed_lies_in_a_file_that_goes(produce: Produce, room: Path) -> None:
    made = produce(producers.zstd)
    layout = decompress_entries(open_layout(made.root))
    assert_holds(layout, made.truth)
    assert len(list(room.iterdir())) == 1
    kept = replace(layout, blobs={})
    del layout
    assert_holds(kept, made.truth)
    del kept
    assert not list(room.iterdir())


def test_torch_loads_it_through_us(room: Path, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": {"w": counted(300, 7), "turned": counted(3, 4).t(), "none": counted(0, 3), "scale": torch.tensor(2.0)},
        "step": 7,
    }
    truth = save_alone(state, tmp_path / "in", _extensions=[ZStandard()])
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
    empty: dict[str, Any] = {"model": zeros, "step": 0}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(empty, storage_reader=Reader(tmp_path / "in"), no_dist=True)
    assert empty["step"] == 7
    for name, tensor in zeros.items():
        assert torch.equal(tensor, truth[f"model.{name}"]), name
    assert not list(room.iterdir())


def test_a_layout_without_streams_is_given_as_it_is(room: Path, tmp_path: Path) -> None:
    save_alone({"w": counted(5)}, tmp_path / "in")
    layout = open_layout(tmp_path / "in")
    assert decompress_entries(layout) is layout
    assert not list(room.iterdir())


@pytest.mark.parametrize("promised", ["tensor", "entry"])
def test_a_bomb_is_refused_before_it_fills_the_disk(room: Path, tmp_path: Path, promised: str) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    layout = lying(bomb, tmp_path / "in")
    if promised == "tensor":
        root = tmp_path / "saved"
        save_alone({"w": counted(5)}, root, _extensions=[ZStandard()])
        made = open_layout(root)
        (chunk,) = made.tensors["w"].chunks
        chunk = chunk._replace(path="f", offset=3, length=len(bomb))
        layout = replace(layout, tensors={"w": replace(made.tensors["w"], chunks=(chunk,))}, blobs={})
    words = f"expected at most {20 + (1 << 16) if promised == 'tensor' else 1 << 26} bytes"
    with pytest.raises(Corrupt, match=words) as raised:
        decompress_entries(layout)
    assert (raised.value.tensor, raised.value.path) == ("w" if promised == "tensor" else "x", tmp_path / "in" / "f")
    assert not list(room.iterdir())


def test_a_promise_beyond_the_disk_is_refused(room: Path, tmp_path: Path) -> None:
    save_alone({"w": counted(5)}, tmp_path / "in", _extensions=[ZStandard()])
    made = open_layout(tmp_path / "in")
    (chunk,) = made.tensors["w"].chunks
    large = replace(made.tensors["w"], chunks=(chunk._replace(box=full_box((1 << 60,))),))
    with pytest.raises(NoRoom):
        decompress_entries(replace(made, tensors={"w": large}))
    assert not list(room.iterdir())


def test_a_window_beyond_all_bounds_is_refused(room: Path, tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    layout = lying(stream.compress(b"a") + stream.flush(), tmp_path / "in")
    with pytest.raises(Corrupt, match="damaged"):
        decompress_entries(layout)
    assert not list(room.iterdir())


def test_every_damage_to_a_stream_is_corrupt_or_harmless(tmp_path: Path) -> None:
    """A frame has no checksum of its own; what is in it has those of its archive."""
    stream = io.BytesIO()
    torch.save([1, 2, 3], stream)
    sound = zstandard.ZstdCompressor().compress(stream.getvalue())
    layout = lying(sound, tmp_path / "in")
    for at in range(0, len(sound), 5):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "in" / "f").write_bytes(b"???" + damaged)
        with suppress(Corrupt, Unsupported):
            assert decompress_entries(layout).blobs["x"].wrapper is None


def test_the_package_is_named_if_it_is_missing(produce: Produce) -> None:
    code = (
        "import sys; sys.modules['zstandard'] = None\n"
        "from pathlib import Path; from ckptkit.errors import Unsupported\n"
        "from ckptkit.checkpoints.checkpoint import open_layout; from ckptkit.formats import decompress_entries\n"
        "try: decompress_entries(open_layout(Path(sys.argv[1])))\n"
        "except Unsupported as error: print(error.path, error.hint)"
    )
    root = produce(producers.zstd).root
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True)
    assert done.stdout == f"{root} run `pip install 'ckptkit-fsdp[zstd]'`\n"
