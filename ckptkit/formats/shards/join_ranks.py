"""Join tensors that tensor-parallel ranks saved in separate files, by a rule for each name. Reads no data.

Such files do not say how a tensor was sharded: a column-parallel layer has rows of its weight on each rank, a
row-parallel layer has columns, a norm is replicated. So each name needs a rule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.layout import Chunk, StoredTensor
from ckptkit.layout.axes import concatenate, cut_axis, replace_sizes_at


@dataclass(frozen=True, slots=True)
class JoinRule:
    """How ranks share a tensor: sharded along `axis`, or replicated if `axis` is None.

    With `sections` each shard consists of equal sections along the axis, such as gate and up projection, and the full
    tensor has all shards of the first section, then all of the second. `extents` gives sections of different lengths.
    """

    axis: int | None
    sections: int = 1
    extents: tuple[int, ...] = ()


COPIED = JoinRule(None)
BY_ROWS = JoinRule(0)
BY_COLUMNS = JoinRule(1)
BY_HALVES = JoinRule(0, sections=2)

JoinRules = Sequence[tuple[str, JoinRule]]  # patterns of full names; the first match counts


def require_join_rule(name: str, rules: JoinRules, ranks: int) -> JoinRule:
    """Return the rule for a tensor. Raises `Unsupported` without a rule: ckptkit does not guess."""
    found = next((rule for pattern, rule in rules if re.fullmatch(pattern, name)), None)
    if found is None:
        hint = "report the tensor's name as an issue; to open one rank's file, copy it under a name without a number"
        raise Unsupported(f"there is no rule for how the tensor is split over {ranks} ranks", tensor=name, hint=hint)
    return found


def join_by_rule(shards: Sequence[StoredTensor], rule: JoinRule) -> StoredTensor:
    """Return the tensor from the ranks' shards, in order. Raises `Corrupt` where they do not fit together."""
    if rule.axis is None:
        return first_readable_of_equal_replicas(shards)
    first = shards[0].spec
    rest = replace_sizes_at(first.shape, rule.axis, 1, ())
    for shard in shards[1:]:
        if shard.spec.dtype != first.dtype or replace_sizes_at(shard.spec.shape, rule.axis, 1, ()) != rest:
            raise Corrupt(f"expected a tensor that fits {first} of another rank, found {shard.spec}")
    if len(first.shape) <= rule.axis:
        why = f"because the ranks split axis {rule.axis}"
        raise Corrupt(f"expected at least {rule.axis + 1} axes, {why}; found {first}")
    cut_shards = []
    for shard in shards:
        extents = rule.extents or (shard.spec.shape[rule.axis] // rule.sections,) * rule.sections
        if sum(extents) != shard.spec.shape[rule.axis]:
            parts = f"parts of {', '.join(map(str, rule.extents))}" if rule.extents else f"{rule.sections} equal parts"
            raise Corrupt(f"expected {parts} along axis {rule.axis}, found {shard.spec}")
        ends = pairwise((0, *accumulate(extents)))
        cut_shards.append([cut_axis(shard, rule.axis, start, stop) for start, stop in ends])
    joined = concatenate(list(chain.from_iterable(zip(*cut_shards, strict=True))), rule.axis)
    return replace(joined, chunks=tuple(chunk for chunk in joined.chunks if chunk.box.numel))


def first_readable_of_equal_replicas(replicas: Sequence[StoredTensor]) -> StoredTensor:
    """Return the copy of the first rank whose file can be read. Raises `Corrupt` if dtype or shape differ."""
    for copy in replicas[1:]:
        if copy.spec != replicas[0].spec:
            raise Corrupt(f"expected {replicas[0].spec} as on another rank, found {copy.spec}")
    return next((copy for copy in replicas if not copy.is_unreadable), replicas[0])


def replica_chunks_of(tensor: StoredTensor, shards: Sequence[StoredTensor]) -> tuple[Chunk, ...]:
    """Return the chunks of the other replicas if a joined tensor is one of the ranks' copies, else ()."""
    if not any(tensor is copy for copy in shards):
        return ()
    return tuple(chunk for copy in shards if copy is not tensor for chunk in copy.chunks)


def as_lost_tensors(flat: FlatState, path: str) -> FlatState:
    """Return the tensors that a rank's unreadable file must have had, derived from another rank's file."""
    lost = {
        name: replace(tensor, chunks=tuple(Chunk.unreadable(chunk.box, path, chunk.dtype) for chunk in tensor.chunks))
        for name, tensor in flat.tensors.items()
    }
    return FlatState(lost, {}, flat.keys)
