"""Keep several documents in one sequence apart: which tokens see which."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.errors import Unsupported


def own_document(positions: Tensor) -> Tensor:
    """Return which keys a query may see, bool [batch, 1, query, key]: its own document's, up to itself.

    `positions` int64 [batch, length] count from 0 in each document.
    """
    document = (positions == 0).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


@contextmanager
def apart(blocks: Sequence[nn.Module], positions: Tensor) -> Iterator[None]:
    """Check inside the block that a model keeps documents apart: by its masks, and with nothing else that mixes.

    This is asked of a model that is not ours: not every family does with a mask what it is for. Raises `Unsupported`.
    """
    beyond = ~own_document(positions)

    def check(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments
        mask = bound.get("attention_mask", kwargs.get("attention_mask"))
        masked = isinstance(mask, Tensor) and mask.ndim == 4 and not (visible(mask) & beyond).any()
        if not masked or any(isinstance(module, nn.Conv1d) for module in block.modules()):
            raise Unsupported(
                f"a `{type(block).__name__}` lets documents that share a sequence see each other",
                hint="give data that is one document, or use another model",
            )

    hooks = [block.register_forward_pre_hook(check, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def visible(mask: Tensor) -> Tensor:
    """Return a mask as bools, True where a query sees a key; a mask of floats hides by huge negatives."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
