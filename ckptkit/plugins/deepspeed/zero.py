"""Join the ranks' partitions of ZeRO to parameters by name, each with its fp32 master weights and optimizer states.

The same cuts tensors into partitions as ZeRO does.

ZeRO 1 and 2: the ranks' buffers of a group make up one row, in which the parameters follow one another in the order of
`param_shapes`; the row is padded at its end, and the masters are saved without that padding. ZeRO 3: of each parameter
every rank has as much, and in the buffer of a sub-group these parts follow one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.layout import Chunk, Spec, StoredTensor
from ckptkit.layout.axes import boxes_of_run, concatenate
from ckptkit.layout.box import Shape
from ckptkit.plugins.deepspeed.experts import ExpertFiles, fleets
from ckptkit.plugins.deepspeed.partitions import Partition, PartitionedGroup
from ckptkit.plugins.deepspeed.tensor_parallel import SlicedParameter


class RankRun(NamedTuple):
    """The elements of a flattened tensor that a rank has: `numel` from `at`, and where they begin in its buffer."""

    rank: int
    start: int
    at: int
    numel: int


def runs_in_row(first: int, numel: int, size: int, ranks: int) -> Iterator[RankRun]:
    """Yield the runs of `numel` elements from `first` of the row that the ranks' buffers of `size` elements make up.

    So ZeRO 1 and 2 cut: tensors follow one another, and the ranks' buffers do. The last may be of another size.
    """
    at = 0
    while at < numel:
        rank = min((first + at) // size, ranks - 1) if size else ranks - 1
        start = first + at - rank * size
        count = numel - at if rank == ranks - 1 else min(size - start, numel - at)
        yield RankRun(rank, start, at, count)
        at += count


def runs_of_each(first: int, numel: int, ranks: int) -> Iterator[RankRun]:
    """Yield the runs of a tensor of which each rank has as much, from `first` of its buffer; the last have less.

    So ZeRO 3 cuts: each tensor by itself, with padding behind it.
    """
    size = share_of(numel, ranks)
    for rank in range(ranks):
        count = min(size, numel - rank * size)
        if count <= 0:
            return
        yield RankRun(rank, first, rank * size, count)


def share_of(numel: int, ranks: int) -> int:
    """Return the elements, padding among them, that each rank has of a tensor that is cut by itself."""
    return -(-numel // ranks)


def join(shape: Shape, runs: Iterable[RankRun], buffers: Sequence[Chunk]) -> StoredTensor:
    """Return the tensor that lies in runs of the ranks' buffers, each of one axis."""
    chunks = (boxes_of_run(buffers[run.rank], run.start, shape, run.at, run.at + run.numel) for run in runs)
    return StoredTensor(Spec(buffers[0].dtype, shape), tuple(chain.from_iterable(chunks)))


_HINT = "check that all files of one save are there, and no others"
_ALIGNMENT = 2  # elements, times the number of ranks: what a row is padded to a multiple of


@dataclass(frozen=True, slots=True)
class ZeroParameter:
    """A trained parameter: its fp32 master, what the optimizer has for it, and the number of its parameter group.

    `values` are what its whole group has in common, of the file of the first rank that has a part of it.
    """

    name: str
    master: StoredTensor
    moments: Mapping[str, StoredTensor]
    flattening: Flattening
    values: Mapping[str, Any]
    settings: int


def parameters_of(
    shapes: Sequence[Mapping[str, Shape]], partitions: Sequence[Partition], experts: ExpertFiles | None, root: Path
) -> Iterator[ZeroParameter]:
    """Yield the parameters, by the names and shapes of each group, of which each rank has a partition.

    Of the parameters of experts ranks have different ones under the same names.
    """
    first = partitions[0]
    for partition in partitions:
        if len(partition.groups) != len(shapes) or partition.cuts_each != first.cuts_each:
            message = f"expected {len(shapes)} groups of parameters (`param_shapes`), found {len(partition.groups)}"
            raise Corrupt(message, path=root / partition.path, hint=_HINT)
    if first.cuts_each and experts is not None:
        raise Unsupported("experts with ZeRO 3", path=root / first.path)
    for number, named in enumerate(shapes):
        found: dict[str, list[ZeroParameter]] = {}
        for fleet in fleets(number, named, partitions, experts):
            groups = [partition.groups[number] for partition in fleet.partitions]
            check_alike(groups, fleet.partitions, root)
            for one in (cut_each if first.cuts_each else cut_row)(fleet.named, groups, root):
                found.setdefault(one.name, []).append(one)
        yield from map(join_ranks, found.values())


def join_ranks(parts: Sequence[ZeroParameter]) -> ZeroParameter:
    """Return the parameter that ranks of experts have in parts, one after the other on the first axis."""
    moments = {what: concatenate([part.moments[what] for part in parts], 0) for what in parts[0].moments}
    return replace(parts[0], master=concatenate([part.master for part in parts], 0), moments=moments)


def join_slices(parts: Sequence[ZeroParameter], sliced: SlicedParameter) -> ZeroParameter:
    """Return the parameter of which ranks of tensor parallelism have slices. Raises `Corrupt` if moments differ."""
    first = parts[0]
    if any(part.moments.keys() != first.moments.keys() or part.settings != first.settings for part in parts):
        raise Corrupt("the ranks of tensor parallelism have different states of it", tensor=first.name)
    moments = {what: sliced.join([part.moments[what] for part in parts]) for what in first.moments}
    return replace(first, master=sliced.join([part.master for part in parts]), moments=moments)


def check_alike(groups: Sequence[PartitionedGroup], partitions: Sequence[Partition], root: Path) -> None:
    """Raise `Corrupt` unless every rank has the same of a group, in as many parts as there are files."""
    first = groups[0]
    for group, partition in zip(groups, partitions, strict=True):
        path = root / partition.path
        if group.ranks != len(groups):
            message = f"expected files of {group.ranks} ranks for a group of parameters, found {len(groups)}"
            raise Unsupported(message, path=path, hint=_HINT)
        if group.moments.keys() != first.moments.keys() or group.values.keys() != first.values.keys():
            message = (
                f"expected the optimizer states {sorted(first.moments)} as in `{partitions[0].path}`, "
                f"found {sorted(group.moments)}"
            )
            raise Corrupt(message, path=path, hint=_HINT)
        if (group.paddings, group.settings) != (first.paddings, first.settings):
            raise Corrupt(
                f"its parameters are split differently from those of `{partitions[0].path}`", path=path, hint=_HINT
            )
        for name, buffer in {"fp32": group.masters, **group.moments}.items():
            if buffer.dtype != first.moments.get(name, first.masters).dtype:
                raise Corrupt(f"the dtype of `{name}` differs from the dtype in `{partitions[0].path}`", path=path)


def cut_row(named: Mapping[str, Shape], groups: Sequence[PartitionedGroup], root: Path) -> Iterator[ZeroParameter]:
    """Yield the parameters of a group of ZeRO 1 or 2."""
    paddings = groups[0].paddings or (0,) * len(named)
    if len(paddings) != len(named):
        message = f"`param_alignment_paddings`: expected {len(named)} parameters, found {len(paddings)}"
        raise Corrupt(message, path=root / groups[0].masters.path)
    size = groups[0].masters.box.numel
    at = end = 0
    for (name, shape), padding in zip(named.items(), paddings, strict=True):
        end = at + prod(shape)
        yield parameter(name, shape, groups, list(runs_in_row(at, prod(shape), size, len(groups))))
        at = end + padding
    for buffers in buffers_of(groups):
        check_row(buffers, end, root)


def check_row(buffers: Sequence[Chunk], needed: int, root: Path) -> None:
    """Raise `Corrupt` unless buffers make up a row of `needed` elements, and of no more than the padding at its end."""
    size, total = buffers[0].box.numel, sum(buffer.box.numel for buffer in buffers)
    for buffer in buffers[1:]:
        numel = buffer.box.numel
        if numel > size or (numel < size and buffer is not buffers[-1]):
            message = f"expected a buffer of {size} elements as in `{buffers[0].path}`, found {numel}"
            raise Corrupt(message, path=root / buffer.path, hint=_HINT)
    if not needed <= total < needed + _ALIGNMENT * len(buffers):
        message = (
            f"expected {needed} elements of the named parameters, found {total} in the buffers of {len(buffers)} ranks"
        )
        raise Corrupt(message, path=root / buffers[0].path, hint=_HINT)


def cut_each(named: Mapping[str, Shape], groups: Sequence[PartitionedGroup], root: Path) -> Iterator[ZeroParameter]:
    """Yield the parameters of a sub-group of ZeRO 3."""
    ranks = len(groups)
    needed = sum(share_of(prod(shape), ranks) for shape in named.values())
    for buffer in (buffer for buffers in buffers_of(groups) for buffer in buffers):
        if buffer.box.numel != needed:
            message = f"expected {needed} elements on each of {ranks} ranks, found {buffer.box.numel}"
            hint = f"{_HINT}; ckptkit does not read MiCS, which shards among fewer ranks"
            raise Corrupt(message, path=root / buffer.path, hint=hint)
    at = 0
    for name, shape in named.items():
        yield parameter(name, shape, groups, list(runs_of_each(at, prod(shape), ranks)))
        at += share_of(prod(shape), ranks)


def buffers_of(groups: Sequence[PartitionedGroup]) -> Iterator[list[Chunk]]:
    """Yield the ranks' buffers of a group with the masters, then with each moment."""
    yield [group.masters for group in groups]
    for name in groups[0].moments:
        yield [group.moments[name] for group in groups]


def parameter(name: str, shape: Shape, groups: Sequence[PartitionedGroup], runs: Sequence[RankRun]) -> ZeroParameter:
    """Return the parameter that lies in runs of the ranks' buffers."""
    first = groups[0]
    masters, *moments = (join(shape, runs, buffers) for buffers in buffers_of(groups))
    by_name = dict(zip(first.moments, moments, strict=True))
    return ZeroParameter(name, masters, by_name, first.flattening, first.values, first.settings)
