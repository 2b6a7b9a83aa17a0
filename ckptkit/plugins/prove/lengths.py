"""Find the lengths of text beyond which a model computes in another way: windows, chunks, original contexts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptkit.models.computation import rope_of

_FEWEST = 64  # tokens that every run has
_BEYOND = 64  # tokens after a length, so that several of them are computed in the other way
_MOST = 8192  # tokens of a run: attention takes the square of it
_MOST_FLOPS = 4e13  # of one forward pass: some minutes on 16 cores
_MOST_LOGITS = 1 << 27  # numbers: 1 GiB in float64
_WINDOW = re.compile(
    r"(sliding|attention|local_attention|attn)_window(_size)?|window_size|attention_chunk_size|index_topk"
)
_BY_LENGTH = {  # kinds of rope that change at a length, and the keys that may say it, the first first
    "longrope": ("original_max_position_embeddings", "max_position_embeddings"),
    "su": ("original_max_position_embeddings", "max_position_embeddings"),
    "dynamic": ("original_max_position_embeddings", "max_position_embeddings"),
}


def find_lengths(configs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the lengths in the configs of some models, the longest by key."""
    found: dict[str, int] = {}
    for key, length in (pair for config in configs for pair in lengths_in(config)):
        found[key] = max(length, found.get(key, 0))
    return found


def lengths_in(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the lengths in a config and its sections."""
    for key, value in ((str(key), value) for key, value in config.items()):
        if isinstance(value, Mapping) and "vision" not in key and "audio" not in key:
            yield from lengths_in(value)
        elif _WINDOW.fullmatch(key) and type(value) is int and value > 0:
            yield key, value
    rope = rope_of(config)
    for key in _BY_LENGTH.get(str(rope.get("rope_type")), ()):
        length = rope.get(key, config.get(key))
        if type(length) is int:
            yield key, length
            return


def choose_length(configs: Sequence[Mapping[str, Any]]) -> int:
    """Return how many tokens to run: beyond as many of the lengths as fit."""
    most = min(map(most_tokens, configs))
    reached = [length + _BEYOND for length in find_lengths(configs).values() if length + _BEYOND <= most]
    return max([_FEWEST, *reached])


def most_tokens(config: Mapping[str, Any]) -> int:
    """Return how many tokens of a model fit into memory and minutes, by its config."""
    text = next((one for key in ("text_config", "decoder") if isinstance(one := config.get(key), Mapping)), config)
    sizes = {key: int(text.get(key) or 1) for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    kept = sizes["vocab_size"] + sizes["hidden_size"] * sizes["num_hidden_layers"]  # numbers that stay, for each token
    flops = 2 * (
        12 * sizes["hidden_size"] ** 2 * sizes["num_hidden_layers"] + sizes["hidden_size"] * sizes["vocab_size"]
    )
    return int(min(_MOST, _MOST_LOGITS // kept, _MOST_FLOPS // flops))
