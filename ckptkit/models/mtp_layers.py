"""Layers that predict further tokens (MTP): which ones config.json declares, and which tensors belong to them.

transformers drops these tensors when it loads a model, so no training with it saves them.

Sources: `SpeculativeConfig.hf_config_override` of an inference engine, which reads the keys;
transformers/models/*/modeling_*.py, `_keys_to_ignore_on_load_unexpected`, which has the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from ckptkit.words import count

_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
_SECTIONS = ("text_config", "mtp_config")  # sections of config.json and of its text_config that may contain the keys
_LAYERS = "num_hidden_layers"
# lists with an item per layer; some models append items for MTP layers, and loaders cut the lists by their number
# (source: transformers/models/step3p7/configuration_step3p7.py)
_PER_LAYER_LISTS = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)
_OWN_STEP = re.compile(r"(.*\.)?(mtp|nextn)[^.]*(\..*)?")
_NUMBERED = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.([0-9]{1,6})\..*")


class Declared(NamedTuple):
    """A key of config.json, inside `sections`, that declares a number of MTP layers after the first `behind` layers."""

    sections: tuple[str, ...]
    key: str
    layers: int
    behind: int | None

    def is_mtp_tensor(self, name: str) -> bool:
        return _OWN_STEP.fullmatch(name) is not None or self.find_layer_index(name) is not None

    def find_layer_index(self, name: str) -> int | None:
        """Return the index of a tensor's MTP layer, if MTP layers are numbered after the other layers; else None."""
        match = _NUMBERED.fullmatch(name)
        number = int(match[1]) - self.behind if match and self.behind is not None else -1
        return number if 0 <= number < self.layers else None


def declared_mtp_keys(config: Mapping[str, Any]) -> Iterator[Declared]:
    text = config.get("text_config")
    layers = (text if isinstance(text, Mapping) else config).get(_LAYERS, config.get(_LAYERS))
    for sections, section in sections_with_paths(config):
        for key in _KEYS:
            count = section.get(key)
            if type(count) is int and count > 0:
                yield Declared(sections, key, count, layers if type(layers) is int else None)


def sections_with_paths(
    config: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield config.json and its sections that may declare layers, each with its path."""
    yield above, config
    for name in _SECTIONS:
        if isinstance(config.get(name), Mapping):
            yield from sections_with_paths(config[name], (*above, name))


def mtp_tensor_names(names: Iterable[str], config: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of tensors that belong to MTP layers that config.json declares."""
    declarations = tuple(declared_mtp_keys(config))
    return frozenset(name for name in names if any(one.is_mtp_tensor(name) for one in declarations))


def with_present_mtp_layers(config: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a config.json that declares only the layers that have tensors, and a note for each key that changed."""
    changed, words, names = deepcopy(dict(config)), [], list(names)
    for declaration in declared_mtp_keys(config):
        numbers = {declaration.find_layer_index(name) for name in names if declaration.is_mtp_tensor(name)}
        declared, behind = declaration.layers, declaration.behind
        present = declared if None in numbers else len(numbers)  # layers numbered on their own count as all or none
        if present == declared:
            continue
        section: dict[str, Any] = changed
        for step in declaration.sections:
            section = section[step]
        section[declaration.key] = present
        for key in _PER_LAYER_LISTS:
            value = section.get(key)
            if isinstance(value, list) and behind is not None and len(value) == behind + declared:
                section[key] = value[: behind + present]
        path = ".".join((*declaration.sections, declaration.key))
        layers = count(declared, "MTP layer")
        words.append(f"config.json declares {layers} (`{path}`), but only {present} have tensors: set it to {present}")
    return changed, words
