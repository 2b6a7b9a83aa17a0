"""Join the ZeRO partitions of all ranks into parameters by name, with fp32 master weights and optimizer states.

ZeRO 1 and 2: the buffers of all ranks form one flat buffer per group, with the parameters in the order of
`param_shapes`. This buffer is padded at its end, and the master weights are saved without the padding. ZeRO 3: every
rank has an equal share of each parameter, and the buffer of a sub-group contains these shares in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.pickles.tensor_calls import is_pickled_tensor
from ckptkit.layout import Chunk, Spec, StoredTensor
from ckptkit.layout.axes import chunks_of_flat_range, concatenate, cut_tensor_from_flat, flat_pieces_of_chunks
from ckptkit.layout.box import Shape
from ckptkit.plugins.deepspeed.experts import ExpertFiles, partitions_sharing_group
from ckptkit.plugins.deepspeed.read_partitions import Partition, PartitionedGroup


def chunks_of_even_shards(buffers: Sequence[Chunk], first_element: int, shape: Shape) -> Iterator[Chunk]:
    """Yield the chunks of a tensor that is split evenly over the ranks, from element `first_element` of each buffer.

    This is the partitioning of ZeRO 3. The last ranks may have fewer elements, followed by padding.
    """
    numel, share = prod(shape), padded_elements_per_rank(prod(shape), len(buffers))
    for rank, buffer in enumerate(buffers):
        yield from chunks_of_flat_range(buffer, first_element, shape, rank * share, min((rank + 1) * share, numel))


def padded_elements_per_rank(numel: int, ranks: int) -> int:
    """Return the number of elements per rank, with padding, of a tensor that is split evenly."""
    return -(-numel // ranks)


_HINT = "check that all files of one save are there, and no others"
_ALIGNMENT = 2  # the flat buffer of a group is padded to a multiple of 2 elements x ranks


@dataclass(frozen=True, slots=True)
class ZeroParameter:
    """A trained parameter: its fp32 master weight and its optimizer states.

    `group` is its parameter group on the first rank that has a shard of the parameter.
    """

    name: str
    master: StoredTensor
    moments: Mapping[str, StoredTensor]
    group: PartitionedGroup


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
        join = join_sub_group_parameters if first.cuts_each else join_group_parameters
        for own_partitions, own_named in partitions_sharing_group(number, named, partitions, experts):
            groups = [partition.groups[number] for partition in own_partitions]
            check_group_consistent(groups, own_partitions, root)
            for parameter_part in join(own_named, groups, root):
                by_name.setdefault(parameter_part.name, []).append(parameter_part)
        for parts in by_name.values():  # several parts if AutoEP fused the experts of several ranks
            yield join_parameters(parts, partial(concatenate, axis=0))


def join_parameters(
    parts: Sequence[ZeroParameter], join: Callable[[Sequence[StoredTensor]], StoredTensor]
) -> ZeroParameter:
    """Return a parameter of which several ranks have parts. Raises `Corrupt` if their optimizer states differ."""
    first = parts[0]
    if any((one.moments.keys(), one.group.settings) != (first.moments.keys(), first.group.settings) for one in parts):
        raise Corrupt("the ranks have different states of the parameter", tensor=first.name)
    moments = {state_name: join([part.moments[state_name] for part in parts]) for state_name in first.moments}
    return replace(first, master=join([part.master for part in parts]), moments=moments)


def check_group_consistent(groups: Sequence[PartitionedGroup], partitions: Sequence[Partition], root: Path) -> None:
    """Check that all ranks saved the same states, paddings and dtypes for a group.

    Raises `Unsupported` if the group has another number of ranks, `Corrupt` if the ranks differ.
    """
    first = groups[0]
    steps = [find_step_or_checksum(group.flattening, group.values) for group in groups]
    for group, partition, step in zip(groups, partitions, steps, strict=True):
        path = root / partition.path
        if None not in (step, steps[0]) and step != steps[0]:
            message = f"the optimizer's step differs from the step in `{partitions[0].path}`"
            raise Corrupt(f"{message}: this directory mixes files of several saves", path=path, hint=_HINT)
        if group.ranks != len(groups):
            message = f"expected files of {group.ranks} ranks for a group of parameters, found {len(groups)}"
            raise Unsupported(message, path=path, hint=_HINT)
        if group.moments.keys() != first.moments.keys() or group.values.keys() != first.values.keys():
            expected = f"expected the optimizer states {sorted(first.moments)} as in `{partitions[0].path}`"
            raise Corrupt(f"{expected}, found {sorted(group.moments)}", path=path, hint=_HINT)
        if (group.paddings, group.settings) != (first.paddings, first.settings):
            message = f"expected parameters split as in `{partitions[0].path}`, found another split"
            raise Corrupt(message, path=path, hint=_HINT)
        for name, buffer in {"fp32": group.masters, **group.moments}.items():
            if buffer.dtype != first.moments.get(name, first.masters).dtype:
                raise Corrupt(f"the dtype of `{name}` differs from the dtype in `{partitions[0].path}`", path=path)


def find_step_or_checksum(flattening: Flattening, state: Mapping[Any, Any]) -> float | None:
    """Return the step in a state, or the CRC-32 of the tensor with it, which is as good; None without either."""
    step = state.get("step")
    if is_pickled_tensor(step):
        (chunk,) = flattening.make_stored_tensor(step).chunks
        return chunk.crc32 if chunk.run is None else None  # a view: the checksum is that of its storage
    return step if isinstance(step, int | float) else None


def join_group_parameters(
    shapes: Mapping[str, Shape], groups: Sequence[PartitionedGroup], root: Path
) -> Iterator[ZeroParameter]:
    """Yield the parameters of a group of ZeRO 1 or 2."""
    paddings = groups[0].paddings or (0,) * len(shapes)
    if len(paddings) != len(shapes):
        message = f"`param_alignment_paddings`: expected {len(shapes)} parameters, found {len(paddings)}"
        raise Corrupt(message, path=root / groups[0].masters.path)
    every = list(rank_buffers_by_state(groups))
    flats = [list(flat_pieces_of_chunks((buffer, buffer.box.numel) for buffer in buffers)) for buffers in every]
    at = end = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        yield make_parameter(name, shape, groups[0], [cut_tensor_from_flat(pieces, at, shape) for pieces in flats])
        end = at + prod(shape)
        at = end + padding
    # the buffers contain the named parameters, plus at most the padding at the end
    for buffers in every:
        size, total = buffers[0].box.numel, sum(buffer.box.numel for buffer in buffers)
        for buffer in buffers[1:]:
            numel = buffer.box.numel
            if numel > size or (numel < size and buffer is not buffers[-1]):
                message = f"expected a buffer of {size} elements as in `{buffers[0].path}`, found {numel}"
                raise Corrupt(message, path=root / buffer.path, hint=_HINT)
        if not end <= total < end + _ALIGNMENT * len(buffers):
            message = f"expected {end} elements of the named parameters, found {total} on {len(buffers)} ranks"
            raise Corrupt(message, path=root / buffers[0].path, hint=_HINT)


def join_sub_group_parameters(
    shapes: Mapping[str, Shape], groups: Sequence[PartitionedGroup], root: Path
) -> Iterator[ZeroParameter]:
    """Yield the parameters of a sub-group of ZeRO 3."""
    ranks, every = len(groups), list(rank_buffers_by_state(groups))
    needed = sum(padded_elements_per_rank(prod(shape), ranks) for shape in shapes.values())
    for buffer in (buffer for buffers in every for buffer in buffers):
        if buffer.box.numel != needed:
            message = f"expected {needed} elements on each of {ranks} ranks, found {buffer.box.numel}"
            hint = f"{_HINT}; ckptkit does not read MiCS, which shards among fewer ranks"
            raise Corrupt(message, path=root / buffer.path, hint=hint)
    at = 0
    for name, shape in shapes.items():
        yield make_parameter(name, shape, groups[0], [chunks_of_even_shards(buffers, at, shape) for buffers in every])
        at += padded_elements_per_rank(prod(shape), ranks)


def rank_buffers_by_state(groups: Sequence[PartitionedGroup]) -> Iterator[list[Chunk]]:
    """Yield the buffers of all ranks: first the master weights, then each optimizer state."""
    yield [group.masters for group in groups]
    for name in groups[0].moments:
        yield [group.moments[name] for group in groups]


def make_parameter(
    name: str, shape: Shape, group: PartitionedGroup, chunks: Sequence[Iterator[Chunk]]
) -> ZeroParameter:
    """Return the parameter with these chunks: of the master weight, then of each optimizer state of its group."""
    dtypes = [group.masters.dtype, *(moment.dtype for moment in group.moments.values())]
    master, *moments = (StoredTensor(Spec(d, shape), tuple(c)) for d, c in zip(dtypes, chunks, strict=True))
    return ZeroParameter(name, master, dict(zip(group.moments, moments, strict=True)), group)
