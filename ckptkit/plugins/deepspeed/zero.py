"""Join the ZeRO partitions of all ranks into parameters by name, with fp32 master weights and optimizer states.

ZeRO 1 and 2: the buffers of all ranks form one flat buffer per group, with the parameters in the order of
`param_shapes`. This buffer is padded at its end, and the master weights are saved without the padding. ZeRO 3: every
rank has an equal share of each parameter, and the buffer of a sub-group contains these shares in order.
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
from ckptkit.layout.axes import chunks_of_flat_range, concatenate
from ckptkit.layout.box import Shape
from ckptkit.plugins.deepspeed.experts import ExpertFiles, partition_groups
from ckptkit.plugins.deepspeed.partitions import Partition, PartitionedGroup
from ckptkit.plugins.deepspeed.tensor_parallel import SlicedParameter


class RankRun(NamedTuple):
    """A run of a flattened tensor on one rank.

    `numel` elements from element `at` of the tensor are at element `start` in the buffer of the rank.
    """

    rank: int
    start: int
    at: int
    numel: int


def ranges_in_joined_buffers(first: int, numel: int, size: int, ranks: int) -> Iterator[RankRun]:
    """Yield the runs of a tensor with `numel` elements from element `first` of the joined buffers of all ranks.

    This is the partitioning of ZeRO 1 and 2. Each buffer has `size` elements; the last may have another size.
    """
    at = 0
    while at < numel:
        rank = min((first + at) // size, ranks - 1) if size else ranks - 1
        start = first + at - rank * size
        count = numel - at if rank == ranks - 1 else min(size - start, numel - at)
        yield RankRun(rank, start, at, count)
        at += count


def ranges_in_each_buffer(first: int, numel: int, ranks: int) -> Iterator[RankRun]:
    """Yield the runs of a tensor that is split evenly over the ranks, from element `first` of each buffer.

    This is the partitioning of ZeRO 3. The last ranks may have fewer elements, followed by padding.
    """
    size = padded_elements_per_rank(numel, ranks)
    for rank in range(ranks):
        count = min(size, numel - rank * size)
        if count <= 0:
            return
        yield RankRun(rank, first, rank * size, count)


def padded_elements_per_rank(numel: int, ranks: int) -> int:
    """Return the number of elements per rank, with padding, of a tensor that is split evenly."""
    return -(-numel // ranks)


def join_ranges(shape: Shape, ranges: Iterable[RankRun], buffers: Sequence[Chunk]) -> StoredTensor:
    """Return the tensor of `shape` that consists of runs in the flat buffers of the ranks."""
    chunks = (chunks_of_flat_range(buffers[run.rank], run.start, shape, run.at, run.at + run.numel) for run in ranges)
    return StoredTensor(Spec(buffers[0].dtype, shape), tuple(chain.from_iterable(chunks)))


_HINT = "check that all files of one save are there, and no others"
_ALIGNMENT = 2  # the flat buffer of a group is padded to a multiple of 2 elements x ranks


@dataclass(frozen=True, slots=True)
class ZeroParameter:
    """A trained parameter: its fp32 master weight, its optimizer states, and the index of its parameter group.

    `values` are the state entries that the group shares, from the first rank that has a shard of the parameter.
    """

    name: str
    master: StoredTensor
    moments: Mapping[str, StoredTensor]
    flattening: Flattening
    values: Mapping[str, Any]
    settings: int


def join_zero_parameters(
    shapes: Sequence[Mapping[str, Shape]], partitions: Sequence[Partition], experts: ExpertFiles | None, root: Path
) -> Iterator[ZeroParameter]:
    """Yield the parameters of each group, joined from the partitions of all ranks; `shapes` has one dict per group.

    Expert-parallel ranks have different experts under the same names, and each expert gets its own parameter.
    """
    first = partitions[0]
    for partition in partitions:
        if len(partition.groups) != len(shapes) or partition.cuts_each != first.cuts_each:
            message = f"expected {len(shapes)} groups of parameters (`param_shapes`), found {len(partition.groups)}"
            raise Corrupt(message, path=root / partition.path, hint=_HINT)
    if first.cuts_each and experts is not None:
        raise Unsupported("experts with ZeRO 3", path=root / first.path)
    for number, named in enumerate(shapes):
        by_name: dict[str, list[ZeroParameter]] = {}
        for group_of_ranks in partition_groups(number, named, partitions, experts):
            groups = [partition.groups[number] for partition in group_of_ranks.partitions]
            check_group_consistent(groups, group_of_ranks.partitions, root)
            for parameter_part in (join_sub_group_parameters if first.cuts_each else join_group_parameters)(
                group_of_ranks.named, groups, root
            ):
                by_name.setdefault(parameter_part.name, []).append(parameter_part)
        yield from map(join_expert_parameters, by_name.values())


def join_expert_parameters(parameters: Sequence[ZeroParameter]) -> ZeroParameter:
    """Return a parameter with the experts of all ranks, concatenated along axis 0."""
    moments = {
        state_name: concatenate([part.moments[state_name] for part in parameters], 0)
        for state_name in parameters[0].moments
    }
    return replace(parameters[0], master=concatenate([part.master for part in parameters], 0), moments=moments)


def join_sliced_parameters(parameters: Sequence[ZeroParameter], sliced: SlicedParameter) -> ZeroParameter:
    """Return a parameter joined from tensor-parallel slices. Raises `Corrupt` if optimizer states differ."""
    first = parameters[0]
    if any(part.moments.keys() != first.moments.keys() or part.settings != first.settings for part in parameters):
        raise Corrupt("the ranks of tensor parallelism have different states of it", tensor=first.name)
    moments = {
        state_name: sliced.join_parts([part.moments[state_name] for part in parameters]) for state_name in first.moments
    }
    return replace(first, master=sliced.join_parts([part.master for part in parameters]), moments=moments)


def check_group_consistent(groups: Sequence[PartitionedGroup], partitions: Sequence[Partition], root: Path) -> None:
    """Check that all ranks saved the same states, paddings and dtypes for a group.

    Raises `Unsupported` if the group has another number of ranks, `Corrupt` if the ranks differ.
    """
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
                f"expected parameters split as in `{partitions[0].path}`, found another split", path=path, hint=_HINT
            )
        for name, buffer in {"fp32": group.masters, **group.moments}.items():
            if buffer.dtype != first.moments.get(name, first.masters).dtype:
                raise Corrupt(f"the dtype of `{name}` differs from the dtype in `{partitions[0].path}`", path=path)


def join_group_parameters(
    named: Mapping[str, Shape], groups: Sequence[PartitionedGroup], root: Path
) -> Iterator[ZeroParameter]:
    """Yield the parameters of a group of ZeRO 1 or 2."""
    paddings = groups[0].paddings or (0,) * len(named)
    if len(paddings) != len(named):
        message = f"`param_alignment_paddings`: expected {len(named)} parameters, found {len(paddings)}"
        raise Corrupt(message, path=root / groups[0].masters.path)
    size = groups[0].masters.box.numel
    at = end = 0
    for (name, shape), padding in zip(named.items(), paddings, strict=True):
        end = at + prod(shape)
        yield join_parameter(name, shape, groups, list(ranges_in_joined_buffers(at, prod(shape), size, len(groups))))
        at = end + padding
    for buffers in buffers_of_ranks(groups):
        check_buffer_lengths(buffers, end, root)


def check_buffer_lengths(buffers: Sequence[Chunk], needed: int, root: Path) -> None:
    """Raise `Corrupt` unless the buffers contain `needed` elements plus at most the padding at the end."""
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


def join_sub_group_parameters(
    named: Mapping[str, Shape], groups: Sequence[PartitionedGroup], root: Path
) -> Iterator[ZeroParameter]:
    """Yield the parameters of a sub-group of ZeRO 3."""
    ranks = len(groups)
    needed = sum(padded_elements_per_rank(prod(shape), ranks) for shape in named.values())
    for buffer in (buffer for buffers in buffers_of_ranks(groups) for buffer in buffers):
        if buffer.box.numel != needed:
            message = f"expected {needed} elements on each of {ranks} ranks, found {buffer.box.numel}"
            hint = f"{_HINT}; ckptkit does not read MiCS, which shards among fewer ranks"
            raise Corrupt(message, path=root / buffer.path, hint=hint)
    at = 0
    for name, shape in named.items():
        yield join_parameter(name, shape, groups, list(ranges_in_each_buffer(at, prod(shape), ranks)))
        at += padded_elements_per_rank(prod(shape), ranks)


def buffers_of_ranks(groups: Sequence[PartitionedGroup]) -> Iterator[list[Chunk]]:
    """Yield the buffers of all ranks: first the master weights, then each optimizer state."""
    yield [group.masters for group in groups]
    for name in groups[0].moments:
        yield [group.moments[name] for group in groups]


def join_parameter(
    name: str, shape: Shape, groups: Sequence[PartitionedGroup], ranges: Sequence[RankRun]
) -> ZeroParameter:
    """Return the parameter that consists of runs in the buffers of the ranks."""
    first = groups[0]
    masters, *moments = (join_ranges(shape, ranges, buffers) for buffers in buffers_of_ranks(groups))
    by_name = dict(zip(first.moments, moments, strict=True))
    return ZeroParameter(name, masters, by_name, first.flattening, first.values, first.settings)
