"""Run torch's tensor functions on stored tensors: they record which boxes move where, and move no bytes.

A `MovedTensor` is a torch tensor without memory. Functions that only move elements return another one. Functions that
would compute values raise `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from ckptkit.errors import Unsupported
from ckptkit.layout import StoredTensor, axes

_META = torch.device("meta")


class MovedTensor(Tensor):
    """A stored tensor as a torch tensor on the meta device. Its torch dtype is always uint8, not the stored dtype."""

    stored: StoredTensor

    @staticmethod
    def __new__(cls, stored: StoredTensor) -> Self:
        """Return the wrapper, a tensor without memory."""
        wrapper = Tensor._make_wrapper_subclass(cls, stored.spec.shape, dtype=torch.uint8, device=_META)
        wrapper.stored = stored
        return wrapper

    def __init__(self, stored: StoredTensor) -> None:
        """Do nothing: `__new__` has already set `stored`."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Move boxes as torch's `func` would move elements. Raises `Unsupported` for a function that computes."""
        del types
        move = _MOVES.get(func.overloadpacket.__name__)
        if move is None:
            raise Unsupported(f"ckptkit cannot follow torch's `{func}`, a step of this tensor's conversion")
        options = {name: unwrap_tensors(value) for name, value in (kwargs or {}).items()}
        moved = move(*map(unwrap_tensors, args), **options)
        return [cls(one) for one in moved] if isinstance(moved, list) else cls(moved)


def unwrap_tensors(value: Any) -> Any:
    """Return an argument of a torch function with stored tensors in place of their wrappers."""
    if isinstance(value, list | tuple):
        return [unwrap_tensors(one) for one in value]
    return value.stored if isinstance(value, MovedTensor) else value


def stack(tensors: Sequence[StoredTensor], dim: int = 0) -> StoredTensor:
    stacked = axes.stack_tensors(tensors)
    return move_axis(stacked, 0, non_negative_axis(stacked, dim))


def unbind(tensor: StoredTensor, dim: int = 0) -> list[StoredTensor]:
    return axes.unstack(move_axis(tensor, non_negative_axis(tensor, dim), 0))


def split_by_size(tensor: StoredTensor, size: int, dim: int = 0) -> list[StoredTensor]:
    """Return chunks of length `size` along an axis; the last may be shorter."""
    extent = tensor.spec.shape[non_negative_axis(tensor, dim)]
    return split_with_sizes(tensor, [min(size, extent - start) for start in range(0, extent, size)], dim)


def split_with_sizes(tensor: StoredTensor, sizes: Sequence[int], dim: int = 0) -> list[StoredTensor]:
    axis = non_negative_axis(tensor, dim)
    if all(size == 1 for size in sizes):  # one pass over the chunks instead of one per size: there may be many of both
        return [unsqueeze(one, axis) for one in unbind(tensor, axis)]
    ends = [0, *accumulate(sizes)]
    return [axes.narrow_axis(tensor, axis, start, stop) for start, stop in pairwise(ends)]


def select(tensor: StoredTensor, dim: int, index: int) -> StoredTensor:
    axis = non_negative_axis(tensor, dim)
    return axes.take_at_index(tensor, axis, index % tensor.spec.shape[axis])


def slice_axis(
    tensor: StoredTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> StoredTensor:
    """Return a contiguous range of an axis."""
    axis = non_negative_axis(tensor, dim)
    first, last, stride = slice(start, end, step).indices(tensor.spec.shape[axis])
    if stride != 1:
        raise Unsupported(f"a step of its conversion takes every {stride}th element")
    return axes.narrow_axis(tensor, axis, first, max(first, last))


def transpose(tensor: StoredTensor, dim0: int = 0, dim1: int = 1) -> StoredTensor:
    order = list(range(len(tensor.spec.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return axes.permute_axes(tensor, order)


def squeeze(tensor: StoredTensor, dim: int | None = None) -> StoredTensor:
    """Return the tensor without an axis of size 1, or without all of them."""
    for axis in range(len(tensor.spec.shape))[::-1] if dim is None else [non_negative_axis(tensor, dim)]:
        if tensor.spec.shape[axis] == 1:
            tensor = axes.take_at_index(tensor, axis, 0)
    return tensor


def unsqueeze(tensor: StoredTensor, dim: int) -> StoredTensor:
    return move_axis(axes.with_new_first_axis(tensor), 0, dim % (len(tensor.spec.shape) + 1))


def reshape(tensor: StoredTensor, shape: Sequence[int], *_: Any) -> StoredTensor:
    """Return the tensor in another shape, row-major."""
    old, new = tensor.spec.shape, tuple(shape)
    if -1 in new:
        new = axes.replace_sizes_at(new, new.index(-1), 1, (prod(old) // -prod(new),))
    if old == new:
        return tensor
    most = min(len(old), len(new)) - 1  # at least one axis remains in both
    before = next((i for i in range(most) if old[i] != new[i]), most)
    most -= before
    after = next((i for i in range(most) if old[-1 - i] != new[-1 - i]), most)
    merged = axes.merge_axes(tensor, before, len(old) - before - after)
    split_shape = new[before : len(new) - after]
    return merged if len(split_shape) == 1 else axes.split_axis(merged, before, split_shape)


def move_axis(tensor: StoredTensor, source: int, target: int) -> StoredTensor:
    order = [axis for axis in range(len(tensor.spec.shape)) if axis != source]
    order.insert(target, source)
    return tensor if source == target else axes.permute_axes(tensor, order)


def non_negative_axis(tensor: StoredTensor, dim: int) -> int:
    """Return the index of an axis; a negative `dim` counts from the end."""
    return dim % len(tensor.spec.shape)


_MOVES: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("alias", "clone", "contiguous", "detach"), lambda tensor, **_: tensor),  # these move no element
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "_reshape_alias"), reshape),
    "cat": lambda tensors, dim=0: axes.concatenate(tensors, non_negative_axis(tensors[0], dim)),
    "permute": lambda tensor, dims: axes.permute_axes(tensor, [non_negative_axis(tensor, dim) for dim in dims]),
    "select": select,
    "slice": slice_axis,
    "split": split_by_size,
    "split_with_sizes": split_with_sizes,
    "squeeze": squeeze,
    "stack": stack,
    "t": transpose,
    "transpose": transpose,
    "unbind": unbind,
    "unsqueeze": unsqueeze,
}
