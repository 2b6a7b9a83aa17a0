"""Open a checkpoint as a mapping from names to lazy tensors, which are read on access.

The mapping has either the checkpoint's own tensors, or the tensors of the model that `consolidate` would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from operator import index as as_integer
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.component import require_archives_of_one_save
from ckptkit.checkpoints.several_disks import Others
from ckptkit.conversion.build_model import build_model, choose_model_component
from ckptkit.engine.read import SharedRuns, read_box
from ckptkit.errors import Mismatch, Unsupported, errors_at
from ckptkit.formats import decompress_entries, locate_all_chunks
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import Box, Shape, full_box
from ckptkit.layout.dtypes import DTYPES, SMALL_FLOATS, DType
from ckptkit.layout.edits import select_entries
from ckptkit.layout.plan import Recipe
from ckptkit.layout.wrappers import may_be_adapter
from ckptkit.models.companions import CONFIG
from ckptkit.state.options import ConvertOptions
from ckptkit.words import count, format_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

Index = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class HubModel:
    """The model that `consolidate` would write: its small files by name, its config.json, and its lazy tensors.

    Loaders and engines read the tensors directly from the training checkpoint's files. Tied tensors appear once,
    adapters are merged. `remarks` are the notes that `consolidate` would print.
    """

    path: Path
    files: dict[str, bytes]
    config: dict[str, Any]
    tensors: LazyCheckpoint
    remarks: tuple[str, ...] = ()

    @classmethod
    def open(cls, source: Source, *, base: str | Path | None = None) -> HubModel:
        """Open the checkpoint at `source`, or the latest of the run there; config and tokenizer may come from `base`.

        `base` is a directory, a URL or a Hub id; an adapter is merged into it. Locates every byte and reads no tensor.
        Raises `Mismatch` without a config.json, and for tensors that it describes and that are missing or have another
        shape.
        """
        options = ConvertOptions.of({"base": base}, to="hf")
        checkpoint = Checkpoint.open(source).with_base(options.base)
        part, remarks = choose_model_component(checkpoint, options)
        if may_be_adapter(part.layout.tensors):
            from ckptkit.adapters.draft import open_adapters

            options = replace(options, merge=open_adapters(part, options) is not None)
        model = build_model([part], options).with_remarks(*remarks)
        if model.companions.config is None:
            hint = "pass base=MODEL, a directory or Hub id with the config.json of this model"
            message = f"expected a {CONFIG} in the checkpoint or its run, found none"
            raise Mismatch(message, path=checkpoint.path, hint=hint)
        require_archives_of_one_save(part.layout)
        sources = tuple(locate_all_chunks(decompress_entries(layout)) for layout in (model.layout, *model.others))
        tensors = LazyCheckpoint(sources[0], sources, model.recipes_by_name())
        return cls(checkpoint.path, model.companions.to_files(), dict(model.config), tensors, model.remarks)


def open(source: Source, also: Others = ()) -> LazyCheckpoint:  # noqa: A001 - `ckptkit.open` is its name
    """Return the tensors of the checkpoint at `source`, or of the latest of the run there, by name, in any format.

    `also` are other directories with files of the same checkpoint, for example if each node had its own disk. Reads the
    byte offsets of the tensors, but no tensor data. Runs no code from the checkpoint, and does not import torch.
    """
    return LazyCheckpoint(Checkpoint.open(source, also).layout)


Loaded = TypeVar("Loaded")


@dataclass(frozen=True, eq=False, repr=False)
class LazyCheckpoint(Mapping[str, "LazyTensor"]):
    """The tensors of a checkpoint by name, from all its components; `layout` has their byte ranges.

    A tensor with one of the `recipes` is computed when it is read, from tensors of `sources`, whose byte offsets are
    known. Keeps no file open, so there is nothing to close, and any number of threads may read at once.
    """

    layout: Layout
    sources: tuple[Layout, ...] = ()
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    _located: dict[str, Layout] = field(default_factory=dict, init=False)
    _shared: SharedRuns = field(default_factory=SharedRuns, init=False)

    @property
    def path(self) -> Path:
        """The directory that contains its files."""
        return self.layout.root

    @property
    def format(self) -> str:
        """The format of the checkpoint."""
        return self.layout.format

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.layout.nbytes

    def select(self, glob: str) -> LazyCheckpoint:
        """Return the tensors whose names match a glob, such as `model.layers.*.weight`."""
        return replace(self, layout=select_entries(self.layout, lambda name: fnmatchcase(name, glob)))

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self.layout.tensors:
            near = get_close_matches(name, self.layout.tensors, n=1)
            raise KeyError(f"no tensor `{name}` in {self.path}" + (f"; there is `{near[0]}`" if near else ""))
        spec = self.layout.tensors[name].spec
        return LazyTensor(self, name, spec.dtype.name, View.of(spec.shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.tensors)

    def __len__(self) -> int:
        return len(self.layout.tensors)

    def __repr__(self) -> str:
        tensors = count(len(self), "tensor")
        return f"<{self.format} checkpoint, {tensors}, {format_bytes(self.nbytes)}: {self.path}>"

    def read(self, name: str, box: Box) -> memoryview:
        """Return the elements of a box of one tensor: row-major, in its dtype."""
        located, recipe = self.located(name), self.recipes.get(name)
        return read_box(located, name, box, other_layouts=self.sources[1:], recipe=recipe, shared=self._shared)

    def located(self, name: str) -> Layout:
        """Return the located layout of one tensor and of the tensors it is computed from; cached."""
        if name not in self._located:
            needed, recipe = {name: self.layout.tensors[name]}, self.recipes.get(name)
            if recipe is not None:
                needed |= {
                    operand.name: self.sources[0].tensors[operand.name]
                    for operand in recipe.operands
                    if operand.source == 0
                }
            self._located[name] = locate_all_chunks(replace(self.layout, tensors=needed, blobs={}, keys={}, twins={}))
        return self._located[name]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyTensor:
    """A tensor of a checkpoint, or a box of one, which is read on access.

    Index it with integers, slices without a step, and an ellipsis to get a box; only the bytes of the box are read.
    Reading a full tensor verifies its recorded CRC-32; reading a box verifies the chunks that are entirely inside.
    """

    checkpoint: LazyCheckpoint
    name: str
    dtype: str
    view: View

    @property
    def spec(self) -> Spec:
        return Spec(self.checkpoint.layout.tensors[self.name].spec.dtype, self.view.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.spec.numel

    @property
    def nbytes(self) -> int:
        """Return the size of its elements in bytes; reading it takes at least as many."""
        return self.spec.nbytes

    def torch(self) -> torch.Tensor:
        """Read the tensor as a `torch.Tensor` on the CPU."""
        return self._convert(to_torch)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Read the tensor as an array. A dtype that numpy lacks, such as bfloat16, becomes float32, which is exact."""
        return self._convert(to_numpy)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Read the tensor for `np.asarray(tensor)` and similar functions."""
        if copy is False:
            raise ValueError(f"`{self.name}`: numpy asked for an array without a copy, but the tensor is in a file")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> object:
        """Read the tensor for `torch.as_tensor(tensor)` and similar functions, in its own dtype."""
        return self.torch().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and index of the CPU."""
        return 1, 0

    def _convert(self, convert: Callable[..., Loaded]) -> Loaded:
        with errors_at(tensor=self.name):
            return convert(self.checkpoint.read(self.name, self.view.box), self.spec.dtype, self.spec.shape)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> LazyTensor:
        return replace(self, view=self.view.indexed_by(index))

    def __iter__(self) -> Iterator[LazyTensor]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.name} {self.spec} in {self.checkpoint.path}>"


def to_numpy(data: memoryview, dtype: DType, shape: Shape) -> npt.NDArray[Any]:
    """Return the elements in `data` as an array, which shares its memory if numpy has the dtype.

    Other dtypes become the next larger dtype that represents every value: float32 for bfloat16 and 8-bit floats,
    complex64 for complex32. Raises `Unsupported` for dtypes with two numbers per element, and for quantized dtypes
    without scales.
    """
    import numpy as np

    from ckptkit.engine.casting import widener

    if dtype.name in ("bfloat16", "complex32"):
        is_complex = dtype.name == "complex32"
        floats = widener(DTYPES["float16" if is_complex else "bfloat16"])(np.frombuffer(data, np.uint16))
        return (floats.view(np.complex64) if is_complex else floats).reshape(shape)
    if dtype.name.endswith("_x2") or dtype.kind == "quantized":
        raise Unsupported(f"numpy does not have dtype {dtype}", hint="`.torch()` knows some that numpy does not")
    if dtype.kind == "small_float":
        numbers = np.array(SMALL_FLOATS[dtype.name].value_by_bits, np.float32)
        return numbers[np.frombuffer(data, np.uint8)].reshape(shape)
    return np.ndarray(shape, dtype.name, data)


def to_torch(data: memoryview, dtype: DType, shape: Shape) -> torch.Tensor:
    """Return `data` as a CPU tensor, which shares its memory. Raises `Unsupported` if quantized: scales are missing."""
    import torch

    if dtype.kind == "quantized":
        raise Unsupported(f"cannot read {dtype} without its scales")
    torch_dtype = getattr(torch, dtype.name)
    if not data:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class View:
    """A box of a tensor, and the axes that remain: an axis indexed by an integer is dropped."""

    box: Box
    axes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Shape) -> Self:
        return cls(full_box(shape), tuple(range(len(shape))))

    @property
    def shape(self) -> Shape:
        """Return the size along the remaining axes."""
        return tuple(self.box.size[axis] for axis in self.axes)

    def indexed_by(self, index: Index | tuple[Index, ...]) -> View:
        """Return the view that numpy would give for `[index]`, of integers, slices without a step, and one ellipsis.

        Raises IndexError for an index that is out of range or one too many, TypeError for an index of another kind, and
        ValueError for a slice with a step.
        """
        start, size, kept = list(self.box.start), list(self.box.size), list(self.axes)
        for axis, item in zip(self.axes, self._index_per_axis(index), strict=True):
            extent = size[axis]
            if isinstance(item, slice):
                low, high, step = item.indices(extent)
                if step != 1:
                    raise ValueError(
                        f"a slice with step {step}: read without a step, then take `[::{step}]` of the result"
                    )
                start[axis], size[axis] = start[axis] + low, max(0, high - low)
            else:
                at = as_integer(item)
                if not -extent <= at < extent:
                    raise IndexError(f"index {at} is out of range for axis {axis} of size {extent}")
                start[axis], size[axis] = start[axis] + at % extent, 1
                kept.remove(axis)
        return View(Box(tuple(start), tuple(size)), tuple(kept))

    def _index_per_axis(self, index: Index | tuple[Index, ...]) -> list[int | slice]:
        given = index if isinstance(index, tuple) else (index,)
        for item in given:
            if isinstance(item, bool) or not (isinstance(item, slice | EllipsisType) or hasattr(item, "__index__")):
                raise TypeError(f"expected integers and slices as the index of a tensor on disk, found {item!r}")
        dots = sum(item is ... for item in given)
        spare = len(self.axes) - len(given) + dots
        if spare < 0 or dots > 1:
            raise IndexError(
                f"expected at most {count(len(self.axes), 'index')} and one ellipsis, found "
                f"{count(len(given) - dots, 'index')} and {dots} ellipses"
            )
        filled: list[int | slice] = []
        for item in given if dots else (*given, ...):
            if isinstance(item, EllipsisType):
                filled += [slice(None)] * spare
            else:
                filled.append(item)
        return filled
