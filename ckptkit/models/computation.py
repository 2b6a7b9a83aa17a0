"""Compare two config.json files for every difference that changes what a model computes.

Every key counts, except those known to be harmless. A key that only one config has is compared with transformers'
default, if transformers knows the model type. transformers is imported only if the configs differ as written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptkit.errors import and_more
from ckptkit.models.harmless_keys import is_harmless
from ckptkit.models.known_types import default_head_width

_IDENTITY = ("model_type", "architectures")  # their absence is not a difference
_ROPE = ("rope_scaling", "rope_parameters")
_COMMON_DEFAULTS = {"rope_type": "default", "is_causal": True}  # defaults that all libraries share
_LENGTH, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_BY_LENGTH = ("dynamic", "longrope", "su")  # rope types that use `max_position_embeddings`
_BY_ORIGINAL = ("llama3", "yarn", "longrope", "su")  # rope types that use the length before scaling
_TEXT = "text_config"
_LABELS = "id2label"
_CODE = "auto_map"
_QUANTIZATION = re.compile(r"(?:.*\.)?(?:quantization|compression)_config(?:\..*)?")
_SHOWN_BY_TENSORS = re.compile(r".*_bias|bias|is_causal")  # tensors show biases; `is_causal` has a common default
# different names of libraries for the same number
_ALIASES = (
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layernorm_epsilon"),
    ("hidden_act", "activation_function", "hidden_activation", "mlp_hidden_act", "activation"),
    ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_selected_experts"),
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ("partial_rotary_factor", "rotary_pct", "rotary_percent"),
)
POSITIONS = "position_embedding_type"
_BY_PRESENCE = (
    "rms_norm_eps",
    "rope_theta",
    "partial_rotary_factor",
    "sliding_window",
)  # their absence is a difference
_CANONICAL = {name: names[0] for names in _ALIASES for name in names}
_MAX_NAMED = 4  # differences in one message


class ConfigDifference(NamedTuple):
    """A key of config.json (dots between nested sections) and its two values; None for an absent value.

    `is_certain` is False if one value is absent and its default is unknown.
    """

    key: str
    here: Any
    there: Any
    is_certain: bool = True


def find_differences(config: Mapping[str, Any], other: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the differences between two configs that change what the model computes, certain ones first.

    Rotary parameters may be in `rope_theta` and `rope_scaling`, or in `rope_parameters` (transformers 5.0 and later).
    If only one of the two models is multimodal, its text model is compared.
    """
    one, two = comparable_parts(config, other)
    keys, other_keys = flatten_both(one, two)
    labels = [ConfigDifference(_LABELS, labels_of(one), labels_of(two))] if has_other_labels(one, two) else []
    differences = sorted(
        [*compare(keys, other_keys), *open_keys(keys, other_keys)], key=lambda pair: not pair.is_certain
    )
    # transformers, whose import takes seconds, can only help if something differs
    if not differences and not may_have_defaults(keys, other_keys):
        return labels
    from ckptkit.models.transformers_model import (
        with_defaults,
    )  # imported late: few configs differ, and the import takes seconds

    full, other_full = with_defaults(one), with_defaults(two)
    if full is None or other_full is None:
        return [*labels, *differences]
    return [*labels, *compare(*flatten_both(full, other_full), is_full=True)]


def has_other_labels(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Return whether two classifiers have different label names; False if either has no names."""
    here, there = labels_of(one), labels_of(two)
    return bool(here and there) and here != there


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """Return the label names of a classifier in order; [] for names that transformers generates (`LABEL_0`)."""
    id2label = config.get(_LABELS)
    pairs = (
        sorted((str(key).zfill(9), str(label)) for key, label in id2label.items()) if isinstance(id2label, dict) else ()
    )
    labels = [label for _, label in pairs]
    return [] if all(re.fullmatch(r"LABEL_[0-9]+", label) for label in labels) else labels


def find_contradictions(reported: Mapping[str, Any], config: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the keys in `reported` that config.json contradicts.

    `reported` is a partial config from a trainer's own file. Its value of `POSITIONS` is "rope" or another kind of
    position embedding.
    """
    text = config.get(_TEXT)
    config = text if isinstance(text, Mapping) else config
    differences = contradictions(reported, config)
    if not differences:
        return []
    from ckptkit.models.transformers_model import with_defaults  # as in `find_differences`

    full = with_defaults(config)
    return differences if full is None else contradictions(reported, full)


def contradictions(said: Mapping[str, Any], config: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the keys with other values in a config, and the keys among `_BY_PRESENCE` that it lacks."""
    known = {canonical(key): value for key, value in flatten(said).items() if value is not None}
    config_values = {canonical(key): value for key, value in flatten(config).items()}
    if rope_of(config).get("rope_theta") is not None:
        config_values[POSITIONS] = "rope"
    differences = compare(known, {key: value for key, value in config_values.items() if key in known})
    return [one for one in differences if (one.key in _BY_PRESENCE or one.there is not None) and not is_neutral(one)]


def is_neutral(difference: ConfigDifference) -> bool:
    """Return whether a difference has no effect: an absent factor of 1, or a window that differs by one token."""
    if difference.there is None:
        return bool(difference.here == 1)
    is_window = difference.key == "sliding_window" and difference.here and isinstance(difference.there, int)
    return bool(is_window and abs(difference.here - difference.there) <= 1)


def describe_differences(differences: Sequence[ConfigDifference], other_name: str) -> str:
    """Return the first differences as text, `rope_theta (10000.0, in OTHER 500000.0)`, and the number of others."""
    words = (
        f"{one.key} ({spell_value(one.here)}, in {other_name} {spell_value(one.there)})"
        for one in differences[:_MAX_NAMED]
    )
    return f"{', '.join(words)}{and_more(len(differences) - _MAX_NAMED)}"


def spell_value(value: Any) -> str:
    """Return a value of config.json as text for a message, at most 60 characters."""
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def comparable_parts(
    config: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the two configs to compare: if only one model is multimodal, its text config replaces it."""

    def text_of(whole: Mapping[str, Any], wanted: object) -> Mapping[str, Any]:
        text = whole.get(_TEXT)
        return text if isinstance(text, Mapping) and text.get("model_type") == wanted else whole

    one, two = config.get("model_type"), other.get("model_type")
    return (config, other) if one == two else (text_of(config, two), text_of(other, one))


def compare(one: Mapping[str, Any], two: Mapping[str, Any], *, is_full: bool = False) -> list[ConfigDifference]:
    """Return the keys that differ. False, zero and null equal an absent key.

    If both configs have all defaults (`is_full`), a difference to null is certain.
    """
    differences = []
    for key in sorted({*one, *two}):
        here, there = one.get(key), two.get(key)
        last = key.rpartition(".")[2]
        here, there = (_COMMON_DEFAULTS.get(last) if value is None else value for value in (here, there))
        if here == there or not (here or there):
            continue
        is_one_absent = here is None or there is None
        if is_one_absent and last in _IDENTITY:
            continue
        is_certain = not is_one_absent or (is_full and key in one and key in two)
        differences.append(ConfigDifference(key, here, there, is_certain))
    return sorted(differences, key=lambda pair: not pair.is_certain)


def open_keys(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the keys that are false or zero in one config and absent in the other: their default may differ."""
    alone = sorted(key for key in one.keys() ^ two.keys() if not _SHOWN_BY_TENSORS.fullmatch(key.rpartition(".")[2]))
    found = (ConfigDifference(key, one.get(key), two.get(key), is_certain=False) for key in alone)
    return [pair for pair in found if pair.here in (False, 0) or pair.there in (False, 0)]


def may_have_defaults(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Return whether a key is null in one config and absent in the other: transformers may have a default for it."""
    return any(one.get(key, two.get(key)) is None for key in one.keys() ^ two.keys())


def flatten_both(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both configs flattened, without the quantization that only one describes: the tensors show it."""
    keys = flatten(one), flatten(two)
    if all(any(map(_QUANTIZATION.fullmatch, flat)) for flat in keys):
        return keys
    first, second = ({key: value for key, value in flat.items() if not _QUANTIZATION.fullmatch(key)} for flat in keys)
    return first, second


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config that change the computation, flattened; rope parameters are at the top level."""
    return dict(entries_in(config, "", tuple(map(str, config.get("architectures") or ()))))


def entries_in(config: Mapping[str, Any], section: str, readers: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the keys that change the computation, with their values, from all sections.

    `readers` are the classes of the model, and the model types of the sections around this one.
    """
    rope = rope_of(config)
    kind = rope.get("rope_type")
    readers = (*readers, str(config.get("model_type")))
    entries: Iterable[tuple[str, Any]] = ({**config, **default_widths(config), **rope}).items()
    for key, value in entries:
        if key in _ROPE or is_harmless(str(key), readers) or (key == _ORIGINAL and kind not in _BY_ORIGINAL):
            continue
        if isinstance(value, Mapping):
            yield from entries_in(classes_in(value) if key == _CODE else value, f"{section}{key}.", readers)
        else:
            yield f"{section}{key}", plain_value(str(key), value)
    if config.get(_LENGTH) and kind in _BY_LENGTH:
        yield f"{section}{_LENGTH}", config[_LENGTH]


def classes_in(auto_map: Mapping[str, Any]) -> dict[str, Any]:
    """Return the classes of a model's own code in `auto_map`, without repositories: `modeling_x.XForCausalLM`."""
    return {kind: str(name).rpartition("--")[2] for kind, name in auto_map.items() if "Tokenizer" not in kind}


def default_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the head width and the number of key heads, if the config leaves them to their defaults."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not (isinstance(hidden, int) and isinstance(heads, int) and heads):
        return {}
    width = default_head_width(str(config.get("model_type"))) or hidden // heads
    return {key: one for key, one in (("head_dim", width), ("num_key_value_heads", heads)) if config.get(key) is None}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters in a config.json, or in a section of one, under the keys of `rope_parameters`.

    The length before scaling is taken from the config, else from the rope parameters, else it is the maximum length.
    The default factor of yarn is the ratio of the two lengths. Source: `standardize_rope_params` and
    `_compute_yarn_parameters` in transformers/modeling_rope_utils.py.
    """
    rope: dict[str, Any] = {}
    for key in _ROPE:
        rope |= config[key] if isinstance(config.get(key), Mapping) else {}
    kind = rope.pop("type", None)  # the key before transformers 4.43; transformers replaces `mrope` itself
    if kind not in (None, "mrope"):
        rope.setdefault("rope_type", kind)
    if config.get("rope_theta") is not None:
        rope["rope_theta"] = config["rope_theta"]
    if rope.get("rope_type") in _BY_ORIGINAL:
        length = config.get(_LENGTH)
        rope[_ORIGINAL] = config.get(_ORIGINAL) or rope.get(_ORIGINAL) or length
        if rope["rope_type"] == "yarn" and rope.get("factor") is None and length and rope[_ORIGINAL]:
            rope["factor"] = length / rope[_ORIGINAL]
    return {key: value for key, value in rope.items() if value is not None}


def plain_value(key: str, value: Any) -> Any:
    """Return a value of config.json as JSON would have it; class names without FSDP1's prefix."""
    if key == "architectures" and isinstance(value, list):
        return [str(name).removeprefix("FSDP") for name in value]
    return list(value) if isinstance(value, tuple) else value


def canonical(key: str) -> str:
    """Return the common name for a key that libraries name differently."""
    return _CANONICAL.get(key, key)
