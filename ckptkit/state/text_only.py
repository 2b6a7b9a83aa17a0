"""Extract the text model of a vision-language model: its tensors under its own names, and its config.json.

transformers is needed for both: the config.json of the larger model may have the text model's sizes at its top level.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.errors import Unsupported, Usage, errors_at
from ckptkit.formats import locate_all_chunks
from ckptkit.models.architectures import HEAD
from ckptkit.models.mtp_layers import mtp_tensor_names
from ckptkit.models.names.between_families import make_translation
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.transformers import TRANSFORMERS
from ckptkit.models.names.weights import JOINED
from ckptkit.models.transformers_model import (
    MetaModel,
    config_class,
    find_meta_model,
    quiet_transformers,
    sanitized_config,
)
from ckptkit.state.model import Model
from ckptkit.state.names import refuse_quantized_weights

_OF_IMAGES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
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


def extract_text_model(model: Model) -> Model:
    """Return the text model of a vision-language model.

    Raises `Usage` without a config.json and for a text model, `Unsupported` if transformers has no class for the text
    model, or the weights are quantized.
    """
    if model.companions.config is None:
        hint = "pass --base MODEL, the model that the training began with"
        raise Usage("--text-only needs config.json, but none was found", path=model.part.path, hint=hint)
    refuse_quantized_weights(model.weights, model.config)
    with errors_at(path=model.part.path):  # translate by way of the in-memory names of both models
        full_model = find_meta_model(model.config)
        config = text_config_of(model.config, full_model)
        names = names_in_larger_model(full_model, find_meta_model(config), str(model.config.get("model_type")))
        layout, came_from = locate_all_chunks(model.layout), model.weights.came_from
        heads = mtp_tensor_names(layout.tensors, model.config)
        others = {name: tensor for name, tensor in layout.tensors.items() if name not in heads}
        memory = make_translation(None, TRANSFORMERS, Sizes(model.config))(others)
        text_tensors = {new: memory.tensors[old] for new, old in names.items() if old in memory.tensors}
        on_hub = make_translation(TRANSFORMERS, None, Sizes(config))(text_tensors)
    sources = {name: (name,) for name in heads} | {
        new: tuple(dict.fromkeys(old for one in in_memory for old in memory.came_from[names[one]]))
        for new, in_memory in on_hub.came_from.items()
    }
    unused = layout.tensors.keys() - {old for olds in sources.values() for old in olds}
    tensors = {name: layout.tensors[name] for name in heads} | on_hub.tensors
    weights = replace(
        model.weights,
        layout=replace(layout, tensors=tensors, blobs={}, keys={}, twins={}),
        came_from={new: JOINED.join(dict.fromkeys(came_from[old] for old in olds)) for new, olds in sources.items()},
        left_out={**model.weights.left_out, **dict.fromkeys(model.weights.origins_of(unused), "--text-only")},
    )
    files = {name: content for name, content in model.companions.files.items() if name not in _OF_IMAGES}
    companions = replace(model.companions, files=files, config=config, absent=())
    remark = f"kept the text model, a `{config['model_type']}` ({config['architectures'][0]})"
    return replace(model, weights=weights, companions=companions, ask_base=None).with_remarks(remark)


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
