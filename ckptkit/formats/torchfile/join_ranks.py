"""Join tensors that tensor-parallel ranks saved in files of their own, by a rule for each name. No bytes move.

Nothing in such files says how a tensor was split: a layer that is parallel by columns has rows of its weight on each
rank, one parallel by rows has columns, a norm is there in full on every rank. So each name needs a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.layout import Chunk, Spec, StoredTensor
from ckptkit.tensors.blocks import row_major
from ckptkit.tensors.box import Box, Shape, whole


@dataclass(frozen=True, slots=True)
class Rule:
    """A way in which ranks share a tensor: cut along `axis`, None for a copy on each.

    With `sections` each rank's part is so many equal ones one after another along the axis, such as a gate and what it
    gates, and those of all ranks that belong together follow one another in the whole.
    """

    axis: int | None
    sections: int = 1


COPIED = Rule(None)
BY_ROWS = Rule(0)
BY_COLUMNS = Rule(1)
BY_HALVES = Rule(0, sections=2)

Rules = Sequence[tuple[str, Rule]]  # patterns of whole names, the first that matches counts


def find_rule(name: str, rules: Rules, ranks: int) -> Rule:
    """Return the rule for a tensor. Raises `Unsupported` where there is none: nothing is guessed."""
    found = next((rule for pattern, rule in rules if re.fullmatch(pattern, name)), None)
    if found is None:
        hint = "please report its name; each rank's own file can be opened under another name"
        raise Unsupported(f"no rule says how it is split over {ranks} ranks", tensor=name, hint=hint)
    return found


def join_ranks(parts: Sequence[StoredTensor], rule: Rule) -> StoredTensor:
    """Return the tensor of which each rank in turn has a part. Raises `Corrupt` where the parts do not add up."""
    if rule.axis is None:
        return join_copies(parts)
    first = parts[0].spec
    for part in parts[1:]:
        if part.spec.dtype != first.dtype or others(part.spec.shape, rule.axis) != others(first.shape, rule.axis):
            raise Corrupt(f"the ranks do not fit together: one has {first}, another {part.spec}")
    if len(first.shape) <= rule.axis:
        raise Corrupt(f"{first} has no axis {rule.axis} along which ranks could share it")
    pieces = [list(cut(part, rule.axis, rule.sections)) for part in parts]
    ordered = [piece for section in zip(*pieces, strict=True) for piece in section]
    starts = [0, *accumulate(piece.spec.shape[rule.axis] for piece in ordered)]
    shape = resized(first.shape, rule.axis, starts[-1])
    chunks = [
        shift(chunk, rule.axis, start)
        for piece, start in zip(ordered, starts, strict=False)
        for chunk in piece.chunks
        if chunk.box.numel
    ]
    return StoredTensor(Spec(first.dtype, shape), tuple(chunks))


def join_copies(parts: Sequence[StoredTensor]) -> StoredTensor:
    """Return the first rank's copy. Raises `Corrupt` if another's is of another kind."""
    for part in parts[1:]:
        if part.spec != parts[0].spec:
            raise Corrupt(f"the copies of the ranks differ: one is {parts[0].spec}, another {part.spec}")
    return parts[0]


def others(shape: Shape, axis: int) -> Shape:
    """Return a shape without one axis."""
    return shape[:axis] + shape[axis + 1 :]


def resized(shape: Shape, axis: int, extent: int) -> Shape:
    """Return a shape with another extent along one axis."""
    return (*shape[:axis], extent, *shape[axis + 1 :])


def cut(tensor: StoredTensor, axis: int, count: int) -> Iterator[StoredTensor]:
    """Yield `count` equal sections of a tensor in one chunk, one after another along an axis."""
    if count == 1:
        yield tensor
        return
    (chunk,) = tensor.chunks
    shape = tensor.spec.shape
    if shape[axis] % count:
        raise Corrupt(f"{tensor.spec} cannot be {count} equal parts along axis {axis}")
    size = resized(shape, axis, shape[axis] // count)
    for i in range(count):
        yield StoredTensor(Spec(tensor.spec.dtype, size), (section(chunk, axis, i, size),))


def section(chunk: Chunk, axis: int, i: int, size: Shape) -> Chunk:
    """Return section `i`, of `size`, of a chunk that is a whole tensor."""
    steps = row_major(chunk.size) if chunk.strides is None else chunk.strides
    is_plain = chunk.strides is None and prod(chunk.size[:axis]) == 1
    span = prod(size) if is_plain else 1 + sum((n - 1) * step for n, step in zip(size, steps, strict=True))
    itemsize = chunk.dtype.itemsize
    return chunk._replace(
        box=whole(size),
        offset=chunk.offset + i * size[axis] * steps[axis] * itemsize,
        length=span * itemsize if prod(size) else 0,
        strides=None if is_plain else steps,
        crc32=None,
    )


def shift(chunk: Chunk, axis: int, by: int) -> Chunk:
    """Return a chunk moved along an axis."""
    start = list(chunk.box.start)
    start[axis] += by
    return chunk._replace(box=Box(tuple(start), chunk.box.size))
