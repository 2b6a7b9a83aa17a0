"""How many tokens `prove` runs: beyond windows, chunks and original contexts, as far as they fit."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.plugins.prove.prove import choose_token_count, largest_length_thresholds

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("config", "lengths", "tokens"),
    [
        ({}, {}, 64),
        ({"sliding_window": None}, {}, 64),
        ({"sliding_window": 256}, {"sliding_window": 256}, 320),
        ({"attention_chunk_size": 100}, {"attention_chunk_size": 100}, 164),
        ({"text_config": {"sliding_window": 96, **SIZES}}, {"sliding_window": 96}, 160),
        ({"vision_config": {"sliding_window": 96}}, {}, 64),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 128}},
            {"original_max_position_embeddings": 128},
            192,
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 300},
            {"max_position_embeddings": 300},
            364,
        ),
        ({"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 99}}, {}, 64),
        ({"n_positions": 16}, {}, 14),
        ({"max_position_embeddings": 40, "sliding_window": 32}, {"sliding_window": 32}, 38),
        ({"max_target_positions": 30, "max_source_positions": 20}, {}, 18),
        ({"text_config": {"n_ctx": 16, **SIZES}}, {}, 14),
        ({"max_seq_len": 1}, {}, 1),
        ({"max_position_embeddings": 64}, {}, 64),
        ({"max_position_embeddings": 40, "rope_theta": 1e4}, {}, 64),
        ({"sliding_window": 1 << 20}, {"sliding_window": 1 << 20}, 64),
    ],
)
def test_lengths(config: dict[str, Any], lengths: dict[str, int], tokens: int) -> None:
    configs = [{**SIZES, **config}]
    assert largest_length_thresholds(configs) == lengths
    assert choose_token_count(configs) == tokens


def test_the_longest_of_both_models_that_fits() -> None:
    one, two = ({**SIZES, "sliding_window": window} for window in (64, 512))
    assert choose_token_count([one, two]) == 576
    large = {**SIZES, "hidden_size": 8192, "num_hidden_layers": 80, "sliding_window": 4096}
    assert choose_token_count([large]) == 64
