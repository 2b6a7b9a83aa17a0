"""Count the bytes that training holds on each GPU, before there is one. Arithmetic; asks no device.

States (ZeRO, arXiv:1910.02054, section 3). AdamW keeps four numbers a parameter: itself, its gradient and two moments,
all in the master dtype, for `torch.optim.AdamW` makes its moments like its parameters: 16 bytes in fp32. Each tensor
is cut along its first dimension as by `torch.chunk`: a GPU has `ceil(rows / shards)` rows of it, the last one fewer.
That gradients are there all the time is true of all micro-batches of a step but the first.

Gathered (`torch.distributed.fsdp.fully_shard`, read in torch 2.13). A unit's parameters are whole while it works, in
the compute dtype. Units are the transformer blocks, and the root, which is all the rest and stays whole from forward to
the end of backward. A block's backward finds the next blocks gathered already, one at least unless there is one shard
only. Under shard_grad_op (ZeRO-2) all blocks stay whole from forward to backward.

Reduced. A block's backward makes whole gradients in the compute dtype, while the input of the reduce-scatter before it
is there still, in fp32. The head's gradient waits for the embedding's; those of the root are reduced when all is done.

Activations: what autograd saves in a Llama block with fused attention, in bytes per token (c: bytes of the compute
dtype; h, i: hidden and intermediate size; q, k: width of all query heads and of all key heads):

    each norm     its input in fp32, the quotient, and the product, which projections read    (4 + 2c) h
    attention     queries and keys after RoPE, values, the mix that `o_proj` reads            c (2q + 2k)
                  logarithms of the softmax's sums, in fp32                                   4 a query head
    feed-forward  gate, up, silu of the gate, and the product, which `down_proj` reads        4c i

That is 49 h for Llama 3 8B in bf16; Korthikanti et al. (arXiv:2205.05198) count 34 h for GPT, and attention's matrices,
which fused attention does not keep. A recomputed block keeps its input alone, c h, and all of this while it is at work;
the gradients of silu and up, 2c i, come on top. Logits: of their loss in fp32 there are the log-probabilities and two
buffers for their gradient, 12 bytes a logit, before the blocks' backward begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ckptkit.errors import Usage
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.plugins.estimate.architecture import Architecture

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "ddp")
_FLOAT32 = DTYPES["float32"]
_COMPUTABLE = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings of a training that its memory depends on.

    `replicas` counts the copies of the model under hybrid_shard. `param_dtype` is computed in, `master_dtype` stored
    and updated. `micro_batch_size` sequences of `sequence_length` tokens are on a GPU at once. The activations of
    every `recompute_every`-th block are recomputed in backward (0: none); `prefetch` blocks are gathered ahead.
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
                raise Usage(f"{name}: expected {least} or more, found {getattr(self, name)}")
        for name in ("param_dtype", "master_dtype"):
            if getattr(self, name).name not in _COMPUTABLE:
                raise Usage(
                    f"{name}: unknown dtype `{getattr(self, name)}`", hint=f"use one of {', '.join(_COMPUTABLE)}"
                )
        if self.strategy not in STRATEGIES:
            raise Usage(f"unknown strategy `{self.strategy}`", hint=f"use one of {', '.join(STRATEGIES)}")
        if self.world_size % self.replicas and self.strategy == "hybrid_shard":
            raise Usage(
                f"hybrid_shard: expected a multiple of {self.replicas} GPUs (replicas), found {self.world_size}"
            )

    @property
    def shards(self) -> int:
        """Return the number of GPUs that share one copy of the states."""
        if self.strategy == "ddp":
            return 1
        return self.world_size // self.replicas if self.strategy == "hybrid_shard" else self.world_size

    @property
    def tokens(self) -> int:
        """Return the tokens that are on a GPU at once."""
        return self.micro_batch_size * self.sequence_length


Parts = dict[str, int]
WORK = ("gathered", "reduced", "activations", "logits")


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes on the GPU that has most, by moment of a step and then by part; `host` are bytes of the host's, per GPU."""

    setup: Setup
    moments: Mapping[str, Parts]
    host: int

    @property
    def tightest(self) -> str:
        """Return the moment at which most is held."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> Parts:
        """Return the bytes held at that moment, by part."""
        return self.moments[self.tightest]

    @property
    def peak(self) -> int:
        """Return the most bytes that are held at one moment."""
        return sum(self.parts.values())


def make_budget(model: Architecture, setup: Setup) -> Budget:
    """Count the bytes that training `model` holds, at the moments of a step at which it may hold most."""
    stored = shard_numel(model, setup.shards) * setup.master_dtype.itemsize
    states = {"parameters": stored, "gradients": stored, "optimizer": 2 * stored}
    here = dict.fromkeys(states, 0) if setup.cpu_offload else states
    moments = {"loss": at_loss, "backward": in_backward, "embedding": at_embedding, "end": at_end}
    return Budget(
        setup,
        {name: here | dict.fromkeys(WORK, 0) | count(model, setup) for name, count in moments.items()},
        host=sum(states.values()) - sum(here.values()),
    )


def at_loss(model: Architecture, setup: Setup) -> Parts:
    """Count the bytes besides the states when the loss is differentiated: every activation that is kept."""
    return {
        "gathered": resting(model, setup),
        "activations": kept_bytes(model, setup) + norm_bytes(model.hidden, setup),
        "logits": setup.tokens * model.vocabulary * 3 * _FLOAT32.itemsize,
    }


def in_backward(model: Architecture, setup: Setup) -> Parts:
    """Count the bytes besides the states in the backward of the last block, with all the others' activations there.

    It counts a reduce-scatter before it, as in every other block's backward: a little too much.
    """
    itemsize = setup.param_dtype.itemsize
    working = 2 * itemsize * setup.tokens * model.inner
    if setup.recompute_every and model.layers % setup.recompute_every == 0:  # else the last block has kept all of its
        working += block_bytes(model, setup)
    return {
        "gathered": resting(model, setup) + blocks_at_once(model, setup) * model.block * itemsize,
        "reduced": model.block * (itemsize + _FLOAT32.itemsize) + model.head * itemsize,
        "activations": kept_bytes(model, setup) + working,
    }


def at_embedding(model: Architecture, setup: Setup) -> Parts:
    """Count the bytes besides the states in the embedding's backward: its gradient, the head's, if tied their sum."""
    gradients = (3 if model.tied else 2) * model.head * setup.param_dtype.itemsize
    return {
        "gathered": model.root * setup.param_dtype.itemsize,
        "reduced": gradients + model.block * _FLOAT32.itemsize,
    }


def at_end(model: Architecture, setup: Setup) -> Parts:
    """Count the bytes besides the states at the end of backward, when the root's gradients are reduced."""
    return {"reduced": model.root * (setup.param_dtype.itemsize + _FLOAT32.itemsize)}


def shard_numel(model: Architecture, shards: int) -> int:
    return sum(-(-rows // shards) * prod(row) for rows, *row in model.parameters.values())


def resting(model: Architecture, setup: Setup) -> int:
    stays = model.numel if setup.strategy == "shard_grad_op" else model.root
    return stays * setup.param_dtype.itemsize


def blocks_at_once(model: Architecture, setup: Setup) -> int:
    """Count the blocks that backward gathers at once, where they do not stay whole: the one at work, and the next."""
    if setup.strategy == "shard_grad_op":
        return 0
    ahead = max(1, setup.prefetch) if setup.shards > 1 else 0  # a copy from one's own shard begins when it is needed
    return min(1 + ahead, model.layers)


def kept_bytes(model: Architecture, setup: Setup) -> int:
    """Count the bytes of activations that blocks keep from forward to backward: recomputed ones their inputs alone."""
    recomputed = model.layers // setup.recompute_every if setup.recompute_every else 0
    inputs = recomputed * setup.tokens * model.hidden * setup.param_dtype.itemsize
    return inputs + (model.layers - recomputed) * block_bytes(model, setup)


def block_bytes(model: Architecture, setup: Setup) -> int:
    """Count the bytes of activations that the backward of one block needs."""
    widths = 2 * model.query + 2 * model.key + 4 * model.inner
    a_token = setup.param_dtype.itemsize * widths + _FLOAT32.itemsize * model.heads
    return setup.tokens * a_token + sum(norm_bytes(width, setup) for width in model.norms)


def norm_bytes(width: int, setup: Setup) -> int:
    """Count the bytes of activations that the backward of a norm needs, and of its output."""
    return setup.tokens * width * (_FLOAT32.itemsize + 2 * setup.param_dtype.itemsize)
