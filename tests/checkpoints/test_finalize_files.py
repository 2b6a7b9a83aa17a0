"""The files of one folder of an output: created, filled by numpy, sealed, and verified by their manifest."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit.checkpoints.finalize_files import create_files, finalize_files, read_output_layout, write_manifest
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.errors import Mismatch
from ckptkit.formats import get_writer, locate_all_chunks
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor, WriterOptions
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES

_FLOAT = DTYPES["float32"]
_NUMBERS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32), "none": np.ones(0, "f4")}


def wanted_of(root: Path) -> Layout:
    chunks = {
        name: Chunk(full_box(numbers.shape), "memory", 0, numbers.nbytes, _FLOAT) for name, numbers in _NUMBERS.items()
    }
    return Layout(root, "memory", {n: StoredTensor(Spec(_FLOAT, chunk.size), (chunk,)) for n, chunk in chunks.items()})


@pytest.mark.parametrize("to", ["hf", "dcp", "pt"])
def test_files_are_created_filled_sealed_and_summed(tmp_path: Path, to: str) -> None:
    root, writer = tmp_path / "new" / "out", get_writer(to)
    wanted = wanted_of(root)
    files = writer.lay_out_files(wanted, WriterOptions(1 << 30))

    create_files(root, files, must_be_new=True)
    made = locate_all_chunks(read_output_layout(writer, root, wanted.tensors))
    checksums = {}
    for name, tensor in made.tensors.items():
        for chunk in tensor.chunks:
            with (root / chunk.path).open("r+b") as stream:
                stream.seek(chunk.offset)
                stream.write(_NUMBERS[name].tobytes())
            if chunk.length:
                checksums[chunk.path, chunk.offset] = zlib.crc32(_NUMBERS[name].tobytes())
    finalize_files(writer, made, checksums)
    write_manifest(made, checksums, [file.name for file in files], must_be_new=True)

    (verified,) = ckptkit.verify(root)
    assert verified.is_ok
    assert (verified.has_manifest, verified.unchecked_bytes) == (True, 0)
    manifest = read_manifest(root)
    assert manifest is not None
    assert {name: found.crc32 for name, found in manifest.files.items()} == {
        file.name: zlib.crc32((root / file.name).read_bytes()) for file in files
    }
    assert dict(manifest.tensors) == {name: zlib.crc32(numbers.tobytes()) for name, numbers in _NUMBERS.items()}


def test_files_and_a_manifest_may_be_there_already(tmp_path: Path) -> None:
    """An interrupted conversion goes on with what it has made, up to the manifest."""
    writer = get_writer("hf")
    wanted = wanted_of(tmp_path)
    files = writer.lay_out_files(wanted, WriterOptions(1 << 30))
    create_files(tmp_path, files, must_be_new=True)
    made = locate_all_chunks(read_output_layout(writer, tmp_path, wanted.tensors))
    place = made.tensors["a"].chunks[0]
    with (tmp_path / place.path).open("r+b") as stream:
        stream.seek(place.offset)
        stream.write(b"data")

    create_files(tmp_path, files, must_be_new=False)
    assert (tmp_path / place.path).read_bytes()[place.offset : place.offset + 4] == b"data"
    sums = {(chunk.path, chunk.offset): 0 for tensor in made.tensors.values() for chunk in tensor.chunks}
    for source in ("one", "another"):
        write_manifest(made, sums, [], must_be_new=False, source={"path": source, "format": "hf"})
    assert json.loads((tmp_path / "ckptkit.json").read_text())["source"]["path"] == "another"
    with pytest.raises(ckptkit.CkptError):
        write_manifest(made, sums, [], must_be_new=True)


def test_a_tensor_that_the_format_lost_is_named(tmp_path: Path) -> None:
    writer = get_writer("hf")
    wanted = wanted_of(tmp_path)
    create_files(tmp_path, writer.lay_out_files(wanted, WriterOptions(1 << 30)), must_be_new=True)
    with pytest.raises(Mismatch, match="would lose 1 tensor") as caught:
        read_output_layout(writer, tmp_path, [*wanted.tensors, "c"])
    assert caught.value.tensor == "c"
