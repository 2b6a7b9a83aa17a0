"""Find layers that a config.json declares and that no tensor serves: heads that predict more tokens, towers, layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.finding import Finding
from ckptkit.diagnosis.fix import is_model

_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_IS_OF_HEAD = re.compile(r"(^|[._])(mtp|nextn)[._]")
_TOWERS = {"vision_config": re.compile(r"vis(ion|ual)|image|vit\b"), "audio_config": re.compile(r"audio|speech")}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]+)\.")
_FROM_BASE = "`ckptkit consolidate --base BASE --from-base GLOB` copies it from the model that the training began with"


def find_unserved(case: Case) -> Iterator[Finding]:
    """Yield the layers that the config of a model for use declares, and of which no tensor is here."""
    model = case.model
    if model is None or not case.shapes or case.adapted or not (case.is_asked or is_model(case.checkpoint)):
        return
    text = inner(model.config)
    names = [name for name in case.shapes if not any(words.search(name) for words in _TOWERS.values())]
    for key in _HEADS:
        count = text.get(key)
        if isinstance(count, int) and count > 0 and not any(is_of_head(name, text) for name in names):
            message = f"`{key}` of {model.name} is {count}, and no tensor is of such a head: engines that use it fail"
            yield Finding("layers", None, f"{message}; {_FROM_BASE}; or set it to 0")
    if case.misfits is None:  # else what is missing is named
        yield from find_towers(case, model.config, model.name)
        yield from find_layers(names, text, model.name)


def find_towers(case: Case, config: Mapping[str, Any], whose: str) -> Iterator[Finding]:
    """Yield the towers for images and sounds that have a config and no tensors."""
    for key, words in _TOWERS.items():
        if isinstance(config.get(key), Mapping) and not any(words.search(name) for name in case.shapes):
            yield Finding("layers", None, f"{whose} has a `{key}`, and no tensor is of such a tower; {_FROM_BASE}")


def find_layers(names: Iterable[str], text: Mapping[str, Any], whose: str) -> Iterator[Finding]:
    """Yield that the layers end before the number that the config says."""
    numbers = {int(number) for name in names for number in _LAYER.findall(name)}
    count = text.get("num_hidden_layers")
    if not numbers or not isinstance(count, int):
        return
    missing = sorted(set(range(count)) - numbers)
    if missing:
        message = f"{whose} has {count} layers, and no tensor is of {len(missing)} of them, such as layer {missing[0]}"
        yield Finding("layers", None, message)


def inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model, which may lie in that of a larger one."""
    found = config.get("text_config")
    return {**config, **found} if isinstance(found, Mapping) else config


def is_of_head(name: str, text: Mapping[str, Any]) -> bool:
    """Return whether a tensor is of a head that predicts further tokens; some are numbered behind the layers."""
    count = text.get("num_hidden_layers")
    is_behind = isinstance(count, int) and any(int(number) >= count for number in _LAYER.findall(name))
    return is_behind or _IS_OF_HEAD.search(name) is not None
