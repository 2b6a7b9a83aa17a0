"""Replace the partitions of ranks whose files cannot be read: by others as large, which are unreadable.

Source: deepspeed/runtime/zero/stage_1_and_2.py: a row is padded to a multiple of twice the number of ranks, who cut it
in equal parts, and the last rank saves its part without the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ckptkit.errors import Unsupported
from ckptkit.formats.deepspeed.names import name_of
from ckptkit.formats.deepspeed.partitions import Group, Partition
from ckptkit.layout import Chunk
from ckptkit.tensors.box import Shape, whole

_ALIGNMENT = 2  # elements, times the number of ranks


def with_lost(
    partitions: Mapping[int, Partition], names: dict[int, str], count: int, shapes: Sequence[Mapping[str, Shape]]
) -> dict[int, Partition]:
    """Return the partitions of `count` ranks: chunks of those that are not among `partitions` are unreadable.

    `names` are those of the files that are there, `shapes` those of each group of parameters. Raises `Unsupported` if
    the sizes of what is here do not fit together.
    """
    return {
        rank: partitions[rank] if rank in partitions else lost(partitions, rank, name_of(names, rank), count, shapes)
        for rank in range(count)
    }


def lost(
    partitions: Mapping[int, Partition], rank: int, name: str, count: int, shapes: Sequence[Mapping[str, Shape]]
) -> Partition:
    """Return the partition that a rank must have had."""
    like = next(iter(partitions.values()))
    if len(shapes) != len(like.groups):
        raise Unsupported(f"{len(like.groups)} groups of parameters, and {len(shapes)} are named")
    groups = []
    for number, group in enumerate(like.groups):
        known = {of: one.groups[number].masters.box.numel for of, one in partitions.items()}
        size = known[min(known)] if like.cuts_each else size_in_row(known, rank, count, shapes[number], group)
        moments = {what: Chunk.unreadable(whole((size,)), name, chunk.dtype) for what, chunk in group.moments.items()}
        masters = Chunk.unreadable(whole((size,)), name, group.masters.dtype)
        groups.append(replace(group, masters=masters, moments=moments))
    return replace(like, path=name, groups=tuple(groups))


def size_in_row(known: Mapping[int, int], rank: int, count: int, named: Mapping[str, Shape], group: Group) -> int:
    """Return how many elements a rank has of the row that the parameters of a group are."""
    total = sum(map(prod, named.values())) + sum(group.paddings[:-1])
    last = count - 1
    size = next((numel for one, numel in known.items() if one != last), -(-total // (_ALIGNMENT * count)) * _ALIGNMENT)
    rest = total - last * size
    fits = all(numel == size for one, numel in known.items() if one != last)
    if rest < 0 or not fits or not rest <= known.get(last, rest) < rest + _ALIGNMENT * count:
        parts = ", ".join(map(str, sorted(known.values())))
        raise Unsupported(f"ranks have {parts} of {total} elements, and nothing says how many the others had")
    return rest if rank == last else size
