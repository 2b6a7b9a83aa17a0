"""Open a checkpoint as a mapping from names to tensors that are read when they are asked for, and no more of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.several_disks import Others
from ckptkit.checks.notebook import describe, html_of
from ckptkit.engine.read import SharedRuns, read
from ckptkit.errors import CkptError
from ckptkit.formats import locate
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import Box
from ckptkit.layout.edits import select
from ckptkit.layout.plan import Recipe
from ckptkit.layout.views import Index, View

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


def open(source: Source, also: Others = ()) -> LazyCheckpoint:  # noqa: A001 - `ckptkit.open` is its name
    """Return the tensors of the checkpoint at `source`, or of the latest of the run there, by name, in any format.

    `also` are other directories with files of the same checkpoint, for example if each node had its own disk. Reads the
    positions of the tensors, but no tensor. Runs no code from the checkpoint, and does not import torch.
    """
    return LazyCheckpoint(Checkpoint.open(source, also).layout)


Made = TypeVar("Made")


@dataclass(frozen=True, eq=False, repr=False)
class LazyCheckpoint(Mapping[str, "LazyTensor"]):
    """The tensors of a checkpoint by name, of all its parts; `layout` says where they lie.

    A tensor with one of the `recipes` is computed when it is read, from tensors of the `sources`, which are located.
    Holds no file open, so that there is nothing to close, and any number of threads may read at once.
    """

    layout: Layout
    sources: tuple[Layout, ...] = ()
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    _located: dict[str, Layout] = field(default_factory=dict, init=False)
    _shared: SharedRuns = field(default_factory=SharedRuns, init=False)

    @property
    def path(self) -> Path:
        """The directory that its files are in."""
        return self.layout.root

    @property
    def format(self) -> str:
        """The format that it is in."""
        return self.layout.format

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.layout.nbytes

    def select(self, glob: str) -> LazyCheckpoint:
        """Return those of the tensors whose names match, such as `model.layers.*.weight`."""
        return replace(self, layout=select(self.layout, lambda name: fnmatchcase(name, glob)))

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
        return f"<{describe(self.layout)}>"

    def _repr_html_(self) -> str:
        return html_of(self.layout)

    def read(self, name: str, box: Box) -> bytearray:
        """Return the elements of a box of one tensor: row-major, in its dtype."""
        located, recipe = self.located(name), self.recipes.get(name)
        return read(located, name, box, others=self.sources[1:], recipe=recipe, shared=self._shared)

    def located(self, name: str) -> Layout:
        """Return the layout of one tensor, and of what it is computed of, their bytes found; that is done once."""
        if name not in self._located:
            needed, recipe = {name: self.layout.tensors[name]}, self.recipes.get(name)
            if recipe is not None:
                needed |= {one.name: self.sources[0].tensors[one.name] for one in recipe.operands if one.source == 0}
            self._located[name] = locate(replace(self.layout, tensors=needed, blobs={}, keys={}, twins={}))
        return self._located[name]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyTensor:
    """A tensor of a checkpoint, or a part of one: what it is, and the way to its numbers.

    Indexing gives a part, by integers, slices without a step, and an ellipsis; only its bytes are read then. Where all
    of a tensor is read, it is compared with the CRC-32 that is recorded for it, and of a part whatever it has whole.
    """

    checkpoint: LazyCheckpoint
    name: str
    dtype: str
    view: View

    @property
    def spec(self) -> Spec:
        """Return dtype and shape."""
        return Spec(self.checkpoint.layout.tensors[self.name].spec.dtype, self.view.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its extent along each axis."""
        return self.view.shape

    @property
    def numel(self) -> int:
        """Return how many elements."""
        return self.spec.numel

    @property
    def nbytes(self) -> int:
        """Return how many bytes are read for it, at least."""
        return self.spec.nbytes

    def torch(self) -> torch.Tensor:
        """Read it, as a tensor on the CPU."""
        from ckptkit.layout.arrays import to_torch

        return self._as(to_torch)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Read it, as an array: of float32 where numpy has no such dtype, as for bfloat16, which changes no number."""
        from ckptkit.layout.arrays import to_numpy

        return self._as(to_numpy)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Read it for `np.asarray(tensor)` and the like."""
        if copy is False:
            raise ValueError(f"`{self.name}` lies in a file: reading it makes a copy")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> object:
        """Read it for `torch.as_tensor(tensor)` and the like, in its own dtype."""
        return self.torch().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the CPU, as DLPack numbers devices."""
        return 1, 0

    def _as(self, made: Callable[..., Made]) -> Made:
        try:
            data = self.checkpoint.read(self.name, self.view.box)
            return made(data, self.spec.dtype, self.spec.shape)
        except CkptError as error:
            raise error.blame(tensor=self.name) from None

    def __getitem__(self, index: Index | tuple[Index, ...]) -> LazyTensor:
        return replace(self, view=self.view.take(index))

    def __iter__(self) -> Iterator[LazyTensor]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.name} {self.spec} in {self.checkpoint.path}>"
