"""What every format must keep. A format's test subclasses this with an oracle: the library that owns the format.

The oracle writes and we read; we write and the oracle reads. Bytes are compared, not numbers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.checkpoints.finalize_files import create_files, finalize_files
from ckptkit.errors import CkptError
from ckptkit.formats import detect_format, get_writer, locate_all_chunks
from ckptkit.layout import Layout, Spec, StoredTensor, WriterOptions
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES as OURS
from ckptkit.layout.plan import make_plan
from tests.execute import execute
from tests.producers import DTYPES, bits, counted
from tests.raw import Files, contents

SHAPES = {"matrix": (3, 4), "odd": (7,), "one": (1,), "scalar": (), "no_rows": (0, 4), "no_columns": (3, 0)}
NAMES = ("layers.0.weight", "layers.10.weight", "layers.9.weight", "a b", "ünï", "0", "x" * 200, "a.b.c_d-e")


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    flat = tensor.detach().contiguous().clone().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def spec_of(tensor: Tensor) -> Spec:
    return Spec(OURS[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))


def assert_holds(layout: Layout, tensors: dict[str, Tensor]) -> None:
    """The layout has these tensors, and their bytes are where it says."""
    found = locate_all_chunks(layout)
    assert found.specs == {name: spec_of(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert contents(found, name) == raw_bytes(tensor), name


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw_bytes(found[name]) == raw_bytes(tensor), name


class Hostile:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class ReaderContract:
    """A format that we read."""

    format: str
    cannot_hold: frozenset[torch.dtype] = frozenset()

    def write(self, root: Path, tensors: dict[str, Tensor]) -> None:
        """Let the oracle write a checkpoint."""
        raise NotImplementedError

    def dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype in DTYPES if dtype not in self.cannot_hold]

    def of_every_kind(self) -> dict[str, Tensor]:
        """A tensor of every shape and dtype that the format can hold."""
        torch.manual_seed(2)
        return {
            f"{str(dtype).removeprefix('torch.')}.{kind}": bits(shape, dtype)
            for dtype in self.dtypes()
            for kind, shape in SHAPES.items()
        }

    def check_reading(self, root: Path, tensors: dict[str, Tensor]) -> None:
        self.write(root, tensors)
        layout = open_layout(root)
        assert layout.format == self.format
        assert_holds(layout, tensors)

    def test_reads_every_dtype_and_shape(self, tmp_path: Path) -> None:
        self.check_reading(tmp_path / "there", self.of_every_kind())

    def test_reads_any_names(self, tmp_path: Path) -> None:
        self.check_reading(tmp_path / "there", {name: counted(2) + i for i, name in enumerate(NAMES)})

    def test_reads_equal_tensors_under_two_names(self, tmp_path: Path) -> None:
        shared = counted(3, 2)
        self.check_reading(tmp_path / "there", {"embed.weight": shared, "head.weight": shared.clone()})

    def test_reads_a_single_tensor(self, tmp_path: Path) -> None:
        self.check_reading(tmp_path / "there", {"w": counted(1)})

    def test_claims_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_bytes(b"anything")
        for name in ("empty", "file", "absent"):
            assert detect_format(tmp_path / name) is None
            with pytest.raises(CkptError) as raised:
                open_layout(tmp_path / name)
            assert raised.value.code == "not_a_checkpoint"

    def test_reads_the_same_twice(self, tmp_path: Path) -> None:
        self.write(tmp_path / "there", self.of_every_kind())
        assert open_layout(tmp_path / "there") == open_layout(tmp_path / "there")


class WriterContract(ReaderContract):
    """A format that we also write."""

    world_size = 1  # of those that are to load it
    keeps_order = False  # of the tensors, in its files

    def load(self, root: Path) -> dict[str, Tensor]:
        """Let the oracle read a checkpoint of ours."""
        raise NotImplementedError

    def make(self, root: Path, tensors: dict[str, Tensor], *, max_shard_size: int = 1 << 40) -> Layout:
        """Let us write a checkpoint of tensors that lie in raw files."""
        files = Files(root.with_name(f"{root.name}-source"))
        stored = {}
        for name, tensor in tensors.items():
            spec = spec_of(tensor)
            numbers = np.frombuffer(raw_bytes(tensor), f"V{spec.dtype.itemsize}").reshape(spec.shape)
            stored[name] = StoredTensor(spec, (files.put(numbers, full_box(spec.shape), spec.dtype),))
        source = files.layout(**stored)
        writer = get_writer(self.format)
        create_files(
            root, writer.lay_out_files(source, WriterOptions(max_shard_size, self.world_size)), must_be_new=True
        )
        made = locate_all_chunks(writer.read(root))
        copied = execute(make_plan(source, made), jobs=2)
        finalize_files(writer, made, copied.checksums)
        return writer.read(root)

    def check_writing(self, root: Path, tensors: dict[str, Tensor], *, max_shard_size: int = 1 << 40) -> None:
        assert_holds(self.make(root, tensors, max_shard_size=max_shard_size), tensors)
        assert_same(self.load(root), tensors)

    def test_writes_every_dtype_and_shape(self, tmp_path: Path) -> None:
        self.check_writing(tmp_path / "there", self.of_every_kind())

    def test_writes_any_names(self, tmp_path: Path) -> None:
        self.check_writing(tmp_path / "there", {name: counted(2) + i for i, name in enumerate(NAMES)})

    def test_writes_several_files(self, tmp_path: Path) -> None:
        tensors = {f"layers.{i}.weight": counted(5, i) for i in range(12)}
        self.check_writing(tmp_path / "there", tensors, max_shard_size=300)

    def test_writes_a_tensor_larger_than_a_file_should_be(self, tmp_path: Path) -> None:
        self.check_writing(tmp_path / "there", {"a": counted(2), "b": counted(100), "c": counted(2)}, max_shard_size=50)

    def test_writes_no_tensors_at_all(self, tmp_path: Path) -> None:
        self.check_writing(tmp_path / "there", {})

    def test_the_same_tensors_give_the_same_bytes(self, tmp_path: Path) -> None:
        tensors = self.of_every_kind()
        self.make(tmp_path / "one", tensors, max_shard_size=400)
        again = tensors if self.keeps_order else dict(reversed(tensors.items()))
        self.make(tmp_path / "two", again, max_shard_size=400)
        one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
        assert one == two

    def test_refuses_what_it_cannot_hold_before_writing(self, tmp_path: Path) -> None:
        for dtype in self.cannot_hold:
            stored = StoredTensor(spec_of(torch.empty(2, dtype=dtype)), ())
            with pytest.raises(CkptError) as raised:
                get_writer(self.format).lay_out_files(Layout(tmp_path, "raw", {"w": stored}), WriterOptions(1 << 40))
            assert raised.value.tensor == "w"
