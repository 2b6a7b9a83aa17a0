"""Extract the text model of a vision-language model: its config.json, and its tensor names in memory.

transformers is needed for both: the config.json of the larger model may have the text model's sizes at its top level.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptkit.errors import Unsupported, Usage
from ckptkit.models.known_types import HEAD
from ckptkit.models.transformers_model import (
    MetaModel,
    config_class,
    find_meta_model,
    quiet_transformers,
    sanitized_config,
)

# text models without a class of their own, and the config keys of a type that computes the same for text: without an
# image, the three positions of a token are equal.
# Sources: transformers/models/qwen2_vl/modeling_qwen2_vl.py and qwen3_vl_moe/modeling_qwen3_vl_moe.py, whose router
# always divides by the sum
_SAME_AS: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}
_IMAGE_KEYS = ("mrope_section", "mrope_interleaved")  # keys in rope_parameters that only images need
_FROM_OUTER_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version")


class TextModel(NamedTuple):
    """The config.json of a text model, and for each of its tensors in memory the name in the larger model."""

    config: dict[str, Any]
    names: dict[str, str]


def find_text_model(config: Mapping[str, Any]) -> TextModel:
    """Return the text model inside the model of a config.json.

    Raises `Usage` if the model is a text model itself, `Unsupported` if transformers has no class for the text model.
    """
    full_model = find_meta_model(config)
    text = text_config_of(config, full_model)
    return TextModel(text, names_in_larger_model(full_model, find_meta_model(text), str(config.get("model_type"))))


def text_config_of(config: Mapping[str, Any], whole: MetaModel) -> dict[str, Any]:
    """Return the config.json of the text model inside a multimodal model."""
    import transformers

    model_type = str(config.get("model_type"))
    with quiet_transformers():
        known = config_class(transformers, model_type).from_dict(sanitized_config(dict(config)))
        inner = known.get_text_config()
        text_config: dict[str, Any] = json.loads(inner.to_json_string(use_diff=True))
    if inner is known:
        raise Usage(f"expected a vision-language model, found type `{model_type}`", hint="drop --text-only")
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    same = _SAME_AS.get(inner.model_type, {"model_type": inner.model_type})
    kind = transformers.CONFIG_MAPPING[same["model_type"]]
    if kind not in classes or inner.is_encoder_decoder:
        what = f"a causal language model for `{inner.model_type}`"
        raise Unsupported(f"transformers {transformers.__version__} does not have {what}", hint="drop --text-only")
    rope = text_config.get("rope_parameters")
    if inner.model_type in _SAME_AS and isinstance(rope, dict):
        kept = {key: value for key, value in rope.items() if key not in _IMAGE_KEYS and value != "mrope"}
        text_config["rope_parameters"] = {"rope_type": "default", **kept}
    text_config |= {
        key: config[key] for key in _FROM_OUTER_CONFIG if text_config.get(key) is None and config.get(key) is not None
    }
    text_config = {key: value for key, value in text_config.items() if not key.startswith("_")}
    return text_config | same | {"architectures": [classes[kind].__name__], "tie_word_embeddings": HEAD in whole.tied}


def names_in_larger_model(whole: MetaModel, text: MetaModel, model_type: str) -> dict[str, str]:
    """Return the name in the larger model of each tensor of the text model. Raises `Unsupported` if one is missing."""
    base_prefix = f"{text.model.base_model_prefix}."
    inside = [name.removeprefix(base_prefix) for name in text.shapes if name.startswith(base_prefix)]
    ends = [name.removesuffix(inside[0]) for name in whole.shapes if name.endswith(f".{inside[0]}")]
    fitting = [end for end in ends if all(end + name in whole.shapes for name in inside)]
    prefix = fitting[0] if len(fitting) == 1 else base_prefix
    names = {
        name: prefix + name.removeprefix(base_prefix) if name.startswith(base_prefix) else name for name in text.shapes
    }
    different = [name for name, old in names.items() if whole.shapes.get(old) != text.shapes[name]]
    if different:
        message = f"ckptkit does not know the names of the text model in `{model_type}`"
        raise Unsupported(message, tensor=different[0], hint="drop --text-only")
    return names
