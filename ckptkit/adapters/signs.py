"""Tell at a glance whether a model may have adapters, by names alone; few have any."""

from __future__ import annotations

from collections.abc import Collection

PROMPT = "prompt_embeddings"  # all that prompt learning leaves


def may_be_adapted(names: Collection[str]) -> bool:
    """Return whether tensors of these names may be an adapter's, at a glance."""
    return PROMPT in names or any(
        "lora_" in name or "base_model." in name or ".base_layer." in name or "trainable_tokens_delta" in name
        for name in names
    )
