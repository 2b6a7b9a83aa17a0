"""Join the files of all ranks into the tensors of one model, and its optimizer if the parameter order is certain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ckptkit.errors import Corrupt, Unsupported, errors_at
from ckptkit.formats.shards.join_ranks import first_readable_of_equal_replicas, join_by_rule, replica_chunks_of
from ckptkit.layout import Chunk, StoredTensor, axes
from ckptkit.plugins.megatron.rules import join_rule_for
from ckptkit.plugins.megatron.saved import VERSION, GridSizes, Rank, SavedRank

# Reorder the fused queries, keys and values of checkpoint versions below 2 as later versions store them.
#
# Source: megatron/training/checkpointing.py, `fix_query_key_value_ordering`. The rows of a rank are `[3, heads,
# width]` in version 0 (and in files without a version), `[heads, width, 3]` in version 1, and since version 2
# `[heads, 3, width]`. Keys and values of cross-attention are fused in the same way, with 2 instead of 3.
CURRENT = 2.0
_FUSED = re.compile(r"(?:.*\.)?(query_key_value|key_value)\.(?:weight|bias)")


def with_current_row_order(tensor: StoredTensor, local: str, version: float, heads: int) -> StoredTensor:
    """Return a fused tensor with its rows in the order of version 2; other tensors are returned unchanged.

    `heads` is the number of heads on this rank. Raises `Corrupt` if the heads do not divide the rows, `Unsupported` for
    an unknown version.
    """
    match = _FUSED.fullmatch(local)
    if match is None or version >= CURRENT:
        return tensor
    if version not in (0, 1):
        raise Unsupported(f"expected checkpoint version 0, 1, {CURRENT} or later, found {version}")
    fused = 3 if match[1] == "query_key_value" else 2
    width, remainder = divmod(tensor.spec.shape[0], fused * heads)
    if remainder:
        raise Corrupt(
            f"expected a multiple of {fused * heads} rows ({fused} x {heads} heads), found {tensor.spec.shape[0]}"
        )
    extents, order = ((fused, heads, width), (1, 0, 2)) if version == 0 else ((heads, width, fused), (0, 2, 1))
    split = axes.split_axis(tensor, 0, extents)
    moved = axes.permute_axes(split, (*order, *range(3, len(split.spec.shape))))
    return axes.with_unsplit_chunks(axes.merge_axes(moved, 0, 3))


# Give layers and experts global indices: each pipeline stage counts its layers from 0, each rank its experts.
#
# Source: megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset, and moe/experts.py. With a
# virtual pipeline each stage has several runs of layers: the first runs of all stages come before the second runs.
_LAYER = re.compile(r"((?:.*?\.)?layers\.)([0-9]+)(\..*)", re.DOTALL)
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))([0-9]+)(.*)", re.DOTALL)
_MOST = 1 << 20  # layers or experts; far more than any model has

Run = tuple[int, int]  # (run index in the stage, stage): sorts in layer order


@dataclass(frozen=True, slots=True)
class Numbering:
    """The global layer indices by (module list, run), and the number of experts per rank."""

    layers: Mapping[tuple[str, Run], range]
    experts: int

    def full_model_name(self, name: str, run: Run, expert_rank: int) -> str:
        experts = range(expert_rank * self.experts, (expert_rank + 1) * self.experts)
        match = _LAYER.fullmatch(name)
        if match:
            name = f"{match[1]}{global_index(self.layers.get((match[1], run), range(0)), match[2])}{match[3]}"
        match = _EXPERT.fullmatch(name)
        return f"{match[1]}{global_index(experts, match[2])}{match[3]}" if match else name


def global_index(numbers: range, text: str) -> int:
    """Return the global index of a local index. Raises `Corrupt` if the local index is out of range."""
    local = parse_index(text)
    if local >= len(numbers):
        message = f"expected numbers of layers or experts below {len(numbers)}, as on the first rank, found {local}"
        raise Corrupt(message)
    return numbers[local]


def parse_index(text: str) -> int:
    """Return the index of a layer or an expert. Raises `Corrupt` if it is implausibly large."""
    if len(text) > 8 or int(text) >= _MOST:
        raise Corrupt(f"expected numbers of layers and experts below {_MOST}, found {text[:20]}")
    return int(text)


_GROUPED = (".experts.weight1", ".experts.weight2")
_COUNTED = ".local_tokens_per_expert"

# tensors by rank, run of layers, and local name
TensorsByRank = Mapping[Rank, Mapping[int, Mapping[str, StoredTensor]]]


class JoinedTensor(NamedTuple):
    """A full tensor, and the replicas of its chunks on other ranks."""

    tensor: StoredTensor
    spares: tuple[Chunk, ...]


@dataclass(frozen=True)
class SavedJob:
    """The files of all ranks of one job in directory `root`."""

    root: Path
    ranks: Mapping[Rank, SavedRank]

    @cached_property
    def sizes(self) -> GridSizes:
        return GridSizes(*(1 + max(numbers) for numbers in zip(*self.ranks, strict=True)))

    @cached_property
    def runs(self) -> list[Run]:
        """Return every run of layers, in layer order."""
        return sorted(
            (run, rank.stage)
            for rank, saved in self.ranks.items()
            for run in saved.flat_models_by_run
            if rank.tensor == rank.expert == 0
        )

    @cached_property
    def numbering(self) -> Numbering:
        """Return the global numbering of layers and experts, from the tensor names on one rank per run."""
        layers: dict[tuple[str, Run], range] = {}
        next_layer: dict[str, int] = {}
        experts = 0
        for run, stage in self.runs:
            counts: dict[str, int] = {}
            for name in self.ranks[Rank(0, stage, 0)].specs(run):
                match, expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
                if match:
                    counts[match[1]] = max(counts.get(match[1], 0), 1 + parse_index(match[2]))
                if expert:
                    experts = max(experts, 1 + parse_index(expert[2]))
            for stack, count in counts.items():
                first = next_layer.get(stack, 0)
                layers[stack, (run, stage)] = range(first, first + count)
                next_layer[stack] = first + count
        return Numbering(layers, experts)

    def join_model_tensors(self) -> dict[str, JoinedTensor]:
        """Return the full model tensors by name.

        Raises `Corrupt` if the ranks do not fit together, or if the number of layers differs from the arguments.
        """
        joined = self.join_tensors({rank: saved.weights for rank, saved in self.ranks.items()})
        first = self.ranks[Rank(0, 0, 0)]
        found = {(match[1], match[2]) for match in map(_LAYER.fullmatch, joined) if match}
        layers = {layer for layer in found if not layer[0].startswith("mtp.")}  # `mtp.` has layers of its own
        wanted = first.job_arguments.get("num_layers")
        if type(wanted) is int and len({stack for stack, _ in layers}) == 1 and wanted != len(layers):
            message = f"expected {wanted} layers (`args`), found {len(layers)} in {self.sizes.stages} stages"
            raise Corrupt(message, path=self.root / first.path)
        return joined

    def join_tensors(self, tensors_by_rank: TensorsByRank) -> dict[str, JoinedTensor]:
        """Return the full tensors by name, joined from tensors that each rank has per parameter (weights or states)."""
        tensors: dict[str, JoinedTensor] = {}
        for run, stage in self.runs:
            for expert in range(self.sizes.experts):
                for name, local, parts in self.shards_by_tensor(tensors_by_rank, run, Rank(0, stage, expert)):
                    with errors_at(path=self.root, tensor=name):
                        tensor = self.join_shards(local, parts, run, stage)
                        tensors[name] = with_replicas(name, tensor, parts, tensors.get(name))
        return tensors

    def shards_by_tensor(
        self, tensors_by_rank: TensorsByRank, run: int, first: Rank
    ) -> Iterator[tuple[str, str, list[StoredTensor]]]:
        """Yield each tensor of a run of layers: global name, local name, and the shard of each tensor-parallel rank."""
        by_rank = [tensors_by_rank[first._replace(tensor=i)].get(run, {}) for i in range(self.sizes.tensor)]
        for i, on_rank in enumerate(by_rank):
            missing = by_rank[0].keys() ^ on_rank.keys()
            if missing:
                path = self.root / self.ranks[first._replace(tensor=i)].path
                raise Corrupt("some tensor-parallel ranks do not have this tensor", path=path, tensor=min(missing))
        for local in by_rank[0]:
            with errors_at(path=self.root / self.ranks[first].path, tensor=local):
                name = self.numbering.full_model_name(local, (run, first.stage), first.expert)
            yield name, local, [on_rank[local] for on_rank in by_rank]

    @cached_property
    def row_order_version(self) -> float:
        """Return the checkpoint version whose row order the joined queries, keys and values have.

        It is the recorded version, or the current version if ckptkit can reorder the rows. Raises `Unsupported` for an
        old order on several ranks if the number of heads is unknown.
        """
        first = self.ranks[Rank(0, 0, 0)]
        recorded = first.find_number(VERSION) or 0
        names = (name for saved in self.ranks.values() for weights in saved.weights.values() for name in weights)
        if recorded >= CURRENT or not any(map(_FUSED.fullmatch, names)):
            return recorded
        if self.heads_per_rank:
            return CURRENT
        if self.sizes.tensor == 1:
            return recorded
        order = f"which says how {self.sizes.tensor} ranks store queries, keys and values"
        message = f"checkpoint version {recorded}: `args` do not give the number of heads, {order}"
        hint = "load the checkpoint with a Megatron-LM that reads this version, and save it again"
        raise Unsupported(message, path=self.root / first.path, hint=hint)

    @cached_property
    def heads_per_rank(self) -> int:
        """Return how many heads a rank has, 0 where the arguments do not say."""
        count = self.ranks[Rank(0, 0, 0)].job_arguments.get("num_attention_heads")
        return count // self.sizes.tensor if type(count) is int and count % self.sizes.tensor == 0 else 0

    def join_shards(self, local: str, shards: list[StoredTensor], run: int, stage: int) -> StoredTensor:
        """Return the tensor joined from the shards of all tensor-parallel ranks, by the rule for its name."""
        ranks, experts = self.sizes.tensor, self.sizes.experts
        if local.endswith(_GROUPED) and max(ranks, experts) > 1:
            message = f"ckptkit does not read experts that each of {ranks * experts} ranks fused into one tensor"
            raise Unsupported(message)
        if not shards[0].spec.shape:  # the step of an optimizer
            return first_readable_of_equal_replicas(shards)
        first = self.ranks[Rank(0, stage, 0)]
        recorded = first.find_number(VERSION) or 0
        if recorded < self.row_order_version:
            shards = [with_current_row_order(part, local, recorded, self.heads_per_rank) for part in shards]
        if len(shards) == 1:
            return shards[0]
        return join_by_rule(shards, join_rule_for(local, first.specs(run), ranks, first.job_arguments))


def with_replicas(
    name: str, tensor: StoredTensor, shards: Sequence[StoredTensor], other: JoinedTensor | None
) -> JoinedTensor:
    """Return the joined tensor, or `other` from ranks with other experts, with all replicas.

    Each rank counts the tokens of its experts by itself, so these counts are not replicas of each other.
    """
    spares = () if name.endswith(_COUNTED) else replica_chunks_of(tensor, shards)
    if other is None:
        return JoinedTensor(tensor, spares)
    chosen = first_readable_of_equal_replicas([other.tensor, tensor])
    others = () if name.endswith(_COUNTED) else replica_chunks_of(chosen, [other.tensor, tensor])
    return JoinedTensor(chosen, (*other.spares, *others, *spares))
