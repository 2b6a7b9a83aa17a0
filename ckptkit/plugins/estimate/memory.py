"""Compute the bytes of GPU memory that training needs, by arithmetic only.

States (ZeRO, arXiv:1910.02054, section 3). AdamW keeps four values per parameter: the parameter, its gradient,
`exp_avg` and `exp_avg_sq`, all in the master dtype, because `torch.optim.AdamW` creates its states in the dtype of the
parameters: 16 bytes in fp32. Each tensor is split along its first dimension as by `torch.chunk`: a GPU has `ceil(rows /
shards)` rows of it, the last GPU fewer. Gradients are counted at all times, which is true for all micro-batches of a
step but the first.

Gathered (`torch.distributed.fsdp.fully_shard`, read in torch 2.13). The parameters of a unit are unsharded while it
computes, in the compute dtype. Units are the transformer blocks, and the root unit with all other parameters, which
stays unsharded from forward to the end of backward. During the backward of a block the next blocks are already
gathered: at least one, unless there is only one shard. With shard_grad_op (ZeRO-2) all blocks stay unsharded from
forward to backward.

Reduced. The backward of a block makes unsharded gradients in the compute dtype, while the fp32 input of the previous
reduce-scatter still exists. The gradient of the head is kept until the gradient of the embedding exists; the gradients
of the root unit are reduced at the end.

Activations: the tensors that autograd saves in a Llama block with fused attention, in bytes per token (c: bytes of the
compute dtype; h, i: hidden and intermediate size; q, k: width of all query heads and of all key heads):

    each norm     its input in fp32, the quotient, and the product, which projections read    (4 + 2c) h
    attention     queries and keys after RoPE, values, the mix that `o_proj` reads            c (2q + 2k)
                  logarithms of the softmax's sums, in fp32                                   4 a query head
    feed-forward  gate, up, silu of the gate, and the product, which `down_proj` reads        4c i

These are 49 h for Llama 3 8B in bf16; Korthikanti et al. (arXiv:2205.05198) count 34 h for GPT, plus the attention
matrices, which fused attention does not save. A recomputed block saves only its input, c h, and needs all of the above
while its backward runs, plus 2c i for the gradients of silu and up. Logits: the loss in fp32 needs the
log-probabilities and two buffers for their gradient, 12 bytes per logit, before the backward of the blocks begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ckptkit.errors import Unsupported, Usage, too_small_error
from ckptkit.layout.box import Shape
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.models.architectures import sizes_by_letter
from ckptkit.models.expected import expected_model

_UNIT = re.compile(r".*?\.\d+\.")  # `model.layers.0.`, `transformer.h.0.`: a module in a ModuleList
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "ddp")
_FLOAT32 = DTYPES["float32"]
_COMPUTABLE = ("bfloat16", "float32")


@dataclass(frozen=True)
class Architecture:
    """A model described by its config.

    `parameters` are shapes by name, each tensor once; `tied` are the other state-dict names of some of them. Widths are
    elements per token: of the residual stream (`hidden`), the queries, the keys (equal to the values), the feed-forward
    intermediate (`inner`), and each norm in a block. `max_length` is the longest sequence in tokens, 0 if unknown.
    `computes_like_llama` is true if the blocks compute the same as Llama blocks.
    """

    model_type: str
    parameters: Mapping[str, Shape]
    tied: Mapping[str, Shape]
    layers: int
    vocabulary: int
    heads: int
    hidden: int
    query: int
    key: int
    inner: int
    norms: tuple[int, ...]
    max_length: int
    computes_like_llama: bool

    @cached_property
    def numel(self) -> int:
        return sum(map(prod, self.parameters.values()))

    @cached_property
    def largest_block_numel(self) -> int:
        """Return the parameters of the largest transformer block, which is one FSDP unit."""
        return max(self._blocks.values(), default=0)

    @cached_property
    def all_blocks_numel(self) -> int:
        return sum(self._blocks.values())

    @property
    def root_unit_numel(self) -> int:
        """Return the parameters of the root FSDP unit: embedding, head and last norm, all outside the blocks."""
        return self.numel - self.all_blocks_numel

    @cached_property
    def largest_root_matrix_numel(self) -> int:
        """Return the parameters of the largest matrix outside the blocks: the head, or a matrix of the same size."""
        return max((prod(shape) for name, shape in self.parameters.items() if not _UNIT.match(name)), default=0)

    @cached_property
    def _blocks(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, shape in self.parameters.items():
            if match := _UNIT.match(name):
                sizes[match[0]] = sizes.get(match[0], 0) + prod(shape)
        return sizes


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a config.json describes, from ckptkit's tables or from transformers.

    Raises `Unsupported` if both do not know the model, or if the config lacks a size.
    """
    model = expected_model({key: value for key, value in config.items() if key != "quantization_config"})
    described = model.sizes
    parameters = {name: shape or (1,) for name, shape in model.parameters.items()}
    try:  # under the names of Llama's config
        sizes, layers = sizes_by_letter(described), int(described["num_hidden_layers"])
        max_length = int(described.get("max_position_embeddings") or 0)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        message = f"the config of this `{described.get('model_type')}` lacks a size: {error!r}"
        raise Unsupported(message) from error
    if (smallest := min(layers, *sizes.values())) < 1:
        message = f"expected sizes of 1 or more in the config of this `{described.get('model_type')}`, found {smallest}"
        raise Unsupported(message)
    # elements per token of the norms in the first block; two norms if it has none
    widths = {"q_norm": sizes["q"], "k_norm": sizes["k"]}
    norms = [name.split(".")[-2] for name in parameters if re.match(r".*?\.0\..*norm\.weight$", name)]
    return Architecture(
        model_type=str(described["model_type"]),
        parameters=parameters,
        tied={name: model.shapes[name] for name in model.tied},
        layers=layers,
        vocabulary=sizes["v"],
        heads=int(described["num_attention_heads"]),
        hidden=sizes["h"],
        query=sizes["q"],
        key=sizes["k"],
        inner=sizes["i"],
        norms=tuple(widths.get(norm, sizes["h"]) for norm in norms) or (sizes["h"],) * 2,
        max_length=max_length,
        computes_like_llama=model.computes_like_llama,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The training settings that determine its memory.

    `replicas` is the number of model copies with hybrid_shard. `param_dtype` is the compute dtype, `master_dtype` the
    dtype of stored and updated weights. A GPU processes `micro_batch_size` sequences of `sequence_length` tokens at
    once. The activations of every `recompute_every`-th block are recomputed in backward (0: none); `prefetch` blocks
    are gathered ahead.
    """

    world_size: int
    sequence_length: int
    strategy: str = "full_shard"
    replicas: int = 2
    micro_batch_size: int = 1
    param_dtype: DType = DTYPES["bfloat16"]
    master_dtype: DType = _FLOAT32
    recompute_every: int = 1
    prefetch: int = 1
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("world_size", 1), ("sequence_length", 1), ("replicas", 1), ("micro_batch_size", 1),
            ("recompute_every", 0), ("prefetch", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise too_small_error(name, least, getattr(self, name))
        for name in ("param_dtype", "master_dtype"):
            if getattr(self, name).name not in _COMPUTABLE:
                message = f"{name}: unknown dtype `{getattr(self, name)}`"
                raise Usage(message, hint=f"use one of {', '.join(_COMPUTABLE)}")
        if self.strategy not in STRATEGIES:
            raise Usage(f"unknown strategy `{self.strategy}`", hint=f"use one of {', '.join(STRATEGIES)}")
        if self.world_size % self.replicas and self.strategy == "hybrid_shard":
            raise Usage(f"--world-size: expected a multiple of {self.replicas} (--replicas), found {self.world_size}")

    @property
    def shard_count(self) -> int:
        """Return the number of GPUs that share one copy of the states."""
        if self.strategy == "ddp":
            return 1
        return self.world_size // self.replicas if self.strategy == "hybrid_shard" else self.world_size

    @property
    def tokens_per_gpu(self) -> int:
        """Return the number of tokens that a GPU processes at once."""
        return self.micro_batch_size * self.sequence_length


Parts = dict[str, int]
WORK = ("gathered", "reduced", "activations", "logits")


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes on the GPU that needs most, by moment of a step and component; `host` is bytes of host memory per GPU."""

    setup: Setup
    moments: Mapping[str, Parts]
    host: int

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def peak_bytes_by_component(self) -> Parts:
        return self.moments[self.peak_moment]

    @property
    def peak(self) -> int:
        return sum(self.peak_bytes_by_component.values())


def make_budget(model: Architecture, setup: Setup) -> Budget:
    """Compute the memory of training `model`, at each moment of a step that can be the peak."""
    stored = shard_numel(model, setup.shard_count) * setup.master_dtype.itemsize
    states = {"parameters": stored, "gradients": stored, "optimizer": 2 * stored}
    on_gpu = dict.fromkeys(states, 0) if setup.cpu_offload else states
    moments = {
        "loss": bytes_at_loss,
        "backward": bytes_in_last_block,
        "embedding": bytes_at_embedding,
        "end": bytes_at_end,
    }
    return Budget(
        setup,
        {name: on_gpu | dict.fromkeys(WORK, 0) | count_bytes(model, setup) for name, count_bytes in moments.items()},
        host=sum(states.values()) - sum(on_gpu.values()),
    )


def bytes_at_loss(model: Architecture, setup: Setup) -> Parts:
    """Return the bytes besides the states at the start of backward, when all saved activations exist."""
    return {
        "gathered": unsharded_bytes(model, setup),
        "activations": saved_activation_bytes(model, setup) + norm_activation_bytes(model.hidden, setup),
        "logits": setup.tokens_per_gpu * model.vocabulary * 3 * _FLOAT32.itemsize,
    }


def bytes_in_last_block(model: Architecture, setup: Setup) -> Parts:
    """Return the bytes besides the states in the backward of the last block, when all other activations exist.

    This counts the buffer of a previous reduce-scatter, as for every other block: slightly too much.
    """
    itemsize = setup.param_dtype.itemsize
    working = 2 * itemsize * setup.tokens_per_gpu * model.inner
    # if the last block is not recomputed, its activations are already counted in `saved_activation_bytes`
    if setup.recompute_every and model.layers % setup.recompute_every == 0:
        working += block_activation_bytes(model, setup)
    # backward gathers the current block and the prefetched ones, unless the blocks stay gathered after forward
    ahead = max(1, setup.prefetch) if setup.shard_count > 1 else 0  # with one shard there is nothing to prefetch
    blocks = 0 if setup.strategy == "shard_grad_op" else min(1 + ahead, model.layers)
    return {
        "gathered": unsharded_bytes(model, setup) + blocks * model.largest_block_numel * itemsize,
        "reduced": model.largest_block_numel * (itemsize + _FLOAT32.itemsize)
        + model.largest_root_matrix_numel * itemsize,
        "activations": saved_activation_bytes(model, setup) + working,
    }


def bytes_at_embedding(model: Architecture, setup: Setup) -> Parts:
    """Return the bytes besides the states in the backward of the embedding.

    They are the gradients of embedding and head, and their sum if the two are tied.
    """
    gradients = (3 if model.tied else 2) * model.largest_root_matrix_numel * setup.param_dtype.itemsize
    return {
        "gathered": model.root_unit_numel * setup.param_dtype.itemsize,
        "reduced": gradients + model.largest_block_numel * _FLOAT32.itemsize,
    }


def bytes_at_end(model: Architecture, setup: Setup) -> Parts:
    """Return the bytes besides the states at the end of backward, when the gradients of the root unit are reduced."""
    return {"reduced": model.root_unit_numel * (setup.param_dtype.itemsize + _FLOAT32.itemsize)}


def shard_numel(model: Architecture, shards: int) -> int:
    return sum(-(-rows // shards) * prod(row) for rows, *row in model.parameters.values())


def unsharded_bytes(model: Architecture, setup: Setup) -> int:
    numel = model.numel if setup.strategy == "shard_grad_op" else model.root_unit_numel
    return numel * setup.param_dtype.itemsize


def saved_activation_bytes(model: Architecture, setup: Setup) -> int:
    """Return the bytes of activations saved from forward to backward; recomputed blocks save only their inputs."""
    recomputed = model.layers // setup.recompute_every if setup.recompute_every else 0
    inputs = recomputed * setup.tokens_per_gpu * model.hidden * setup.param_dtype.itemsize
    return inputs + (model.layers - recomputed) * block_activation_bytes(model, setup)


def block_activation_bytes(model: Architecture, setup: Setup) -> int:
    """Return the bytes of activations that the backward of one block needs."""
    widths = 2 * model.query + 2 * model.key + 4 * model.inner
    bytes_per_token = setup.param_dtype.itemsize * widths + _FLOAT32.itemsize * model.heads
    return setup.tokens_per_gpu * bytes_per_token + sum(norm_activation_bytes(width, setup) for width in model.norms)


def norm_activation_bytes(width: int, setup: Setup) -> int:
    """Return the bytes of activations that the backward of a norm needs, with the output of the norm."""
    return setup.tokens_per_gpu * width * (_FLOAT32.itemsize + 2 * setup.param_dtype.itemsize)
