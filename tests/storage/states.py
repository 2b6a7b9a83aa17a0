"""States to load and save: every kind of tensor, sharded in every way, in files of every format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError
from ckptkit.formats import locate_all_chunks
from ckptkit.storage import find_cause
from tests.formats.contract import SHAPES, raw_bytes
from tests.producers import DTYPES, Truth, bits

LARGE = (1500, 1001)  # in fp32 more than a block, and no whole number of rows of one


def cause_of(error: pytest.ExceptionInfo[CheckpointException]) -> CkptError:
    """Return our error, of which torch made its own."""
    cause = find_cause(error.value)
    assert isinstance(cause, CkptError)
    return cause


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert raw_bytes(found[name]) == raw_bytes(tensor), name


def blank(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors of the same shapes and dtypes, or of `dtype`, whose every byte is a 1."""
    return {name: ones(t.shape, dtype or t.dtype) for name, t in tensors.items()}


def ones(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.ones(nbytes, dtype=torch.uint8).view(dtype).reshape(shape)


def of_a_model(truth: Truth) -> Truth:
    """The tensors of a checkpoint that are the model's, by its own names."""
    return {name.removeprefix("model."): t for name, t in truth.items() if name.startswith("model.")}


def every_kind() -> dict[str, Tensor]:
    """A tensor of every shape and dtype, but for 4-bit numbers without axes, which safetensors cannot spell."""
    torch.manual_seed(3)
    kinds = {
        f"{str(dtype).removeprefix('torch.')}.{kind}": bits(shape, dtype)
        for dtype in DTYPES
        for kind, shape in SHAPES.items()
    }
    return {name: t for name, t in kinds.items() if name != "float4_e2m1fn_x2.scalar"}


def write_hf(root: Path, tensors: dict[str, Tensor]) -> Path:
    root.mkdir()
    save_file(tensors, root / "model.safetensors")
    return root


def write_pt(path: Path, tensors: dict[str, Tensor]) -> Path:
    torch.save({"model": tensors}, path)
    return path


ON_A_LINE: tuple[tuple[Placement, ...], ...] = ((Shard(0),), (Shard(-1),), (Replicate(),))
ON_A_GRID: tuple[tuple[Placement, ...], ...] = (
    (Shard(0), Shard(0)),
    (Shard(0), Shard(-1)),
    (Shard(-1), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(-1), Replicate()),
)


def spread(tensor: Tensor, mesh: DeviceMesh, number: int) -> Tensor:
    """A tensor sharded over a mesh in one of many ways; every so many one that is not, and those without axes."""
    ways = ON_A_LINE if mesh.ndim == 1 else ON_A_GRID
    number %= len(ways) + 1
    if number == len(ways) or not tensor.ndim or tensor.dtype is torch.float4_e2m1fn_x2:  # which torch cannot shard
        return tensor.clone()
    placements = [p if isinstance(p, Replicate) else Shard(p.dim % tensor.ndim) for p in ways[number]]  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def damage(path: Path, name: str) -> None:
    """Flip a bit in the last chunk of a tensor."""
    layout = locate_all_chunks(open_layout(path))
    chunk = [chunk for chunk in layout.tensors[name].chunks if chunk.length][-1]
    flip(layout.root / chunk.path, chunk.offset + chunk.length - 1)
