"""Small models of transformers, the sizes of which are all different: what the Hub has, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HIDDEN, INNER, HEADS, KEY_HEADS, HEAD, VOCABULARY, EXPERTS, LAYERS = 32, 24, 4, 2, 8, 40, 3, 2
_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "max_position_embeddings": 64,
}


def config_of(model_type: str, **changes: Any) -> Any:
    """The config of a small model of a type."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(model_type, **(_SIZES | changes))


def model_of(config: Any) -> Any:
    """The model, with random numbers everywhere, norms and biases too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


def saved(config: Any, place: Path) -> dict[str, Tensor]:
    """What a fresh model of a config writes to a directory."""
    from safetensors.torch import load_file

    model_of(config).save_pretrained(place)
    return load_file(place / "model.safetensors")
