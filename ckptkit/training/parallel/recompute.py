"""Recompute activations of blocks, and compile blocks. Wraps their `forward`, so no tensor changes name.

What FSDP does to a block happens around its `forward`: it gathers before and frees after, in backward too. So a
checkpoint inside recomputes with parameters that are there already, under FSDP1 and FSDP2 alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(blocks: Sequence[nn.Module], every: int) -> None:
    """Let every `every`-th block keep its inputs only, and compute the rest again in backward; 0: none."""
    for block in blocks[every - 1 :: every] if every else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block, once for all that are alike; after `recompute`, so that the compiler sees it."""
    for block in blocks:
        block.forward = torch.compile(block.forward)
