"""Join the files of all ranks into the tensors of one model, and its optimizer if the parameter order is certain.

Rules by name say how tensors are split. Source: megatron/core/tensor_parallel/layers.py,
transformer/{attention,mlp}.py, transformer/moe/{experts,router}.py: a ColumnParallelLinear splits the rows of weight
and bias, a RowParallelLinear splits the columns of its weight and copies its bias. A rank has the gates of a gated
layer first, then the up projection. Queries, keys and values are interleaved by groups, and each rank has full groups.
The names before Megatron-Core come from megatron/legacy/model. In a Mamba layer (megatron/core/ssm/mamba_mixer.py) each
rank has some heads and groups, and its rows of z, x, B, C and dt follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ckptkit.errors import Corrupt, Unsupported, errors_at
from ckptkit.formats.shards.join import (
    BY_COLUMNS,
    BY_HALVES,
    BY_ROWS,
    COPIED,
    JoinRule,
    JoinRules,
    first_readable_replica,
    join_by_rule,
    replica_chunks_of,
    require_join_rule,
)
from ckptkit.layout import Chunk, Spec, StoredTensor, axes
from ckptkit.plugins.megatron.rank_files import VERSION, GridSizes, Rank, SavedRank

# Reorder the fused queries, keys and values of checkpoint versions below 2 as later versions store them.
#
# Source: megatron/training/checkpointing.py, `fix_query_key_value_ordering`. The rows of a rank are `[3, heads,
# width]` in version 0 (and in files without a version), `[heads, width, 3]` in version 1, and since version 2
# `[heads, 3, width]`. Keys and values of cross-attention are fused in the same way, with 2 instead of 3.
CURRENT = 2.0
_FUSED = re.compile(r"(?:.*\.)?(query_key_value|key_value)\.(?:weight|bias)")
_RULES: JoinRules = (
    (r"(.*\.)?word_embeddings\.weight", BY_ROWS),
    (r"(.*\.)?output_layer\.(weight|bias)", BY_ROWS),
    (r".*\.linear_qkv\.(weight|bias)", BY_ROWS),
    (r".*\.query_key_value\.(weight|bias)", BY_ROWS),
    (r".*\.linear_q(_up)?_proj\.weight|.*\.linear_kv_up_proj\.weight", BY_ROWS),
    (r".*\.linear_proj\.weight", BY_COLUMNS),
    (r".*\.(self|inter)_attention\.dense\.weight", BY_COLUMNS),
    (r".*\.linear_fc2\.weight[0-9]*", BY_COLUMNS),
    (r".*\.dense_4h_to_h\.weight", BY_COLUMNS),
    (r".*\.(linear_proj|linear_fc2|dense|dense_4h_to_h)\.bias[0-9]*", COPIED),
    (r".*(layernorm|layer_norm)[._](weight|bias)", COPIED),
    (r"(.*\.)?(position|tokentype)_embeddings\.weight", COPIED),
    (r".*\.router\.(weight|bias|expert_bias|local_tokens_per_expert)", COPIED),
    (r".*\.shared_experts\.gate_weight", COPIED),
    (r".*\.eh_proj\.weight", BY_ROWS),
    (r".*\.(enorm|hnorm)\.weight", COPIED),
    (r"(.*\.)?rotary_pos_emb\.inv_freq", COPIED),
    (r".*\.mixer\.(A_log|D|dt_bias|norm\.weight)", BY_ROWS),
    (r".*\.mixer\.out_proj\.weight", BY_COLUMNS),
    (r"(.*\.)?(final_)?norm\.weight", COPIED),
)
_MAMBA = re.compile(r"(.*\.mixer\.)(?:(in_proj\.weight)|conv1d[._](?:weight|bias))")
_FIRST = re.compile(r"(.*\.)(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)([0-9]*)")
_SECOND = ("linear_fc2", "dense_4h_to_h")
_NARROWED = re.compile(r"(?:.*\.)?linear_(q|kv)_down_proj\.weight")
_SIZES = {"q": ("q_lora_rank",), "kv": ("kv_lora_rank", "qk_pos_emb_head_dim")}


def with_current_row_order(tensor: StoredTensor, local_name: str, version: float, heads: int) -> StoredTensor:
    """Return a fused tensor with its rows in the order of version 2; other tensors are returned unchanged.

    `heads` is the number of heads on this rank. Raises `Corrupt` if the heads do not divide the rows, `Unsupported` for
    an unknown version.
    """
    match = _FUSED.fullmatch(local_name)
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

    def full_model_name(self, name: str, virtual_stage: Run, expert_rank: int) -> str:
        experts = range(expert_rank * self.experts, (expert_rank + 1) * self.experts)
        match = _LAYER.fullmatch(name)
        if match:
            name = f"{match[1]}{global_index(self.layers.get((match[1], virtual_stage), range(0)), match[2])}{match[3]}"
        match = _EXPERT.fullmatch(name)
        return f"{match[1]}{global_index(experts, match[2])}{match[3]}" if match else name


def global_index(global_indices: range, local_index: str) -> int:
    """Return the global index of a local index. Raises `Corrupt` if the local index is out of range."""
    local = parse_index(local_index)
    if local >= len(global_indices):
        message = (
            f"expected numbers of layers or experts below {len(global_indices)}, as on the first rank, found {local}"
        )
        raise Corrupt(message)
    return global_indices[local]


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
            for run in saved.models_by_virtual_stage
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
        self, tensors_by_rank: TensorsByRank, virtual_stage: int, first: Rank
    ) -> Iterator[tuple[str, str, list[StoredTensor]]]:
        """Yield each tensor of a run of layers: global name, local name, and the shard of each tensor-parallel rank."""
        by_rank = [tensors_by_rank[first._replace(tensor=i)].get(virtual_stage, {}) for i in range(self.sizes.tensor)]
        for i, on_rank in enumerate(by_rank):
            missing = by_rank[0].keys() ^ on_rank.keys()
            if missing:
                path = self.root / self.ranks[first._replace(tensor=i)].path
                raise Corrupt("some tensor-parallel ranks do not have this tensor", path=path, tensor=min(missing))
        for local in by_rank[0]:
            with errors_at(path=self.root / self.ranks[first].path, tensor=local):
                name = self.numbering.full_model_name(local, (virtual_stage, first.stage), first.expert)
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

    def join_shards(self, local_name: str, shards: list[StoredTensor], virtual_stage: int, stage: int) -> StoredTensor:
        """Return the tensor joined from the shards of all tensor-parallel ranks, by the rule for its name."""
        ranks, experts = self.sizes.tensor, self.sizes.experts
        if local_name.endswith(_GROUPED) and max(ranks, experts) > 1:
            message = f"ckptkit does not read experts that each of {ranks * experts} ranks fused into one tensor"
            raise Unsupported(message)
        if not shards[0].spec.shape:  # the step of an optimizer
            return first_readable_replica(shards)
        first = self.ranks[Rank(0, stage, 0)]
        recorded = first.find_number(VERSION) or 0
        if recorded < self.row_order_version:
            shards = [with_current_row_order(part, local_name, recorded, self.heads_per_rank) for part in shards]
        if len(shards) == 1:
            return shards[0]
        return join_by_rule(shards, join_rule_for(local_name, first.specs(virtual_stage), ranks, first.job_arguments))


def with_replicas(
    name: str, tensor: StoredTensor, shards: Sequence[StoredTensor], other: JoinedTensor | None
) -> JoinedTensor:
    """Return the joined tensor, or `other` from ranks with other experts, with all replicas.

    Each rank counts the tokens of its experts by itself, so these counts are not replicas of each other.
    """
    spares = () if name.endswith(_COUNTED) else replica_chunks_of(tensor, shards)
    if other is None:
        return JoinedTensor(tensor, spares)
    chosen = first_readable_replica([other.tensor, tensor])
    others = () if name.endswith(_COUNTED) else replica_chunks_of(chosen, [other.tensor, tensor])
    return JoinedTensor(chosen, (*other.spares, *others, *spares))


def join_rule_for(name: str, specs: Mapping[str, Spec], ranks: int, args: Mapping[str, int | float]) -> JoinRule:
    """Return how the ranks split a tensor; `specs` are all tensors of one rank by the same names.

    `args` are the arguments of the job. Raises `Unsupported` for an unknown name.
    """
    narrow = _NARROWED.fullmatch(name)
    if narrow is not None:
        # multi_latent_attention.py: Transformer Engine copies it to every rank, other implementations split its rows
        narrow_sizes = [args.get(size) for size in _SIZES[narrow[1]]]
        if not all(type(size) is int for size in narrow_sizes):
            message = "the job's `args` do not give the size: cannot tell whether every rank has the whole tensor"
            raise Unsupported(message)
        found, wanted = specs[name].shape[0], sum(size for size in narrow_sizes if isinstance(size, int))
        if wanted not in (found, found * ranks):
            raise Corrupt(f"expected {wanted} rows in all (the job's `args`), found {found} on each of {ranks} ranks")
        return COPIED if found == wanted else BY_ROWS
    mamba = _MAMBA.fullmatch(name)
    if mamba is not None:
        others = specs.get(f"{mamba[1]}out_proj.weight"), specs.get(f"{mamba[1]}dt_bias")
        return join_rule_for_mamba(specs[name].shape[0], others, has_gates=mamba[2] is not None)
    match = _FIRST.fullmatch(name)
    if match is None:
        return require_join_rule(name, _RULES, ranks)
    second = next((spec for layer in _SECOND if (spec := specs.get(f"{match[1]}{layer}.weight{match[2]}"))), None)
    if second is None or len(second.shape) != 2:
        message = f"{' or '.join(_SECOND)} is missing, whose shape shows whether this layer is gated"
        raise Unsupported(message, tensor=name)
    rows, inner = specs[name].shape[0], second.shape[1]
    if rows not in (inner, 2 * inner):
        raise Corrupt(
            f"expected {inner} or {2 * inner} rows on each rank (columns of the next layer), found {rows}", tensor=name
        )
    return BY_HALVES if rows == 2 * inner else BY_ROWS


def join_rule_for_mamba(rows: int, out_and_dt_bias: tuple[Spec | None, Spec | None], *, has_gates: bool) -> JoinRule:
    """Return how ranks split a Mamba tensor with rows of x, B and C, and with `has_gates` also of z and dt.

    `out_and_dt_bias` are the output projection, whose columns are the channels of x, and the bias of dt, which has one
    value per head.
    """
    out, bias = out_and_dt_bias
    if out is None or bias is None or len(out.shape) != 2 or len(bias.shape) != 1:
        raise Unsupported("out_proj or dt_bias is missing, whose shapes show where the parts of this tensor begin")
    (inner, heads) = out.shape[1], bias.shape[0]
    front, back = ((inner, inner), (heads,)) if has_gates else ((inner,), ())
    states, odd = divmod(rows - sum(front) - sum(back), 2)
    if odd or states < 0:
        least = sum(front) + sum(back)
        raise Corrupt(f"expected {least} rows ({inner} channels, {heads} heads) and an even number more, found {rows}")
    return JoinRule(0, extents=(*front, states, states, *back))
