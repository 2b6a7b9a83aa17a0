"""Find what a config.json declares and no tensor serves, where nothing says all its tensors: towers and layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ckptkit.diagnosis.case import Case, TargetModel
from ckptkit.diagnosis.finding import Finding
from ckptkit.diagnosis.fix import Fix, export, is_model
from ckptkit.names.renames import few_globs

_TOWERS = {"vision_config": re.compile(r"vis(ion|ual)|image|vit\b"), "audio_config": re.compile(r"audio|speech")}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]+)\.")
_MOST_GLOBS = 3


def find_unserved(case: Case) -> Iterator[Finding]:
    """Yield the layers that the config of a model for use declares, and of which no tensor is here."""
    model = case.model
    is_for_use = case.is_asked or is_model(case.checkpoint)
    if model is None or not (case.shapes and is_for_use) or case.adapted or case.misfits is not None:
        return  # where the model's tensors are known, those that are missing are findings of their own
    yield from find_towers(case, model)
    yield from find_layers(case, model)


def find_towers(case: Case, model: TargetModel) -> Iterator[Finding]:
    """Yield the towers for images and sounds that have a config and no tensors."""
    for key, words in _TOWERS.items():
        if isinstance(model.config.get(key), Mapping) and not any(words.search(name) for name in case.shapes):
            fix = from_base(case, model, filter(words.search, model.specs))
            yield Finding("layers", None, f"{model.name} has a `{key}`, and no tensor is of such a tower", fix)


def find_layers(case: Case, model: TargetModel) -> Iterator[Finding]:
    """Yield that layers are missing of the number that the config says."""
    inner = model.config.get("text_config")
    count = (inner if isinstance(inner, Mapping) else model.config).get("num_hidden_layers")
    numbers = {int(number) for name in case.shapes if not is_of_tower(name) for number in _LAYER.findall(name)}
    missing = [number for number in range(count) if number not in numbers] if isinstance(count, int) else []
    if numbers and missing:
        what = f"no tensor is of {len(missing)} of them, such as layer {missing[0]}"
        yield Finding("layers", None, f"{model.name} has {count} layers, and {what}")


def from_base(case: Case, model: TargetModel, wanted: Iterable[str]) -> Fix | None:
    """Return the command that copies the wanted tensors of the model that was named; None where it has none of them."""
    names = [name for name in wanted if name not in case.shapes]
    globs = few_globs(names, model.specs.keys() - set(names), _MOST_GLOBS)
    return export(case.checkpoint, from_base=globs, base=model.name) if globs else None


def is_of_tower(name: str) -> bool:
    """Return whether a tensor is of another tower than that for text, whose layers are numbered too."""
    return any(words.search(name) for words in _TOWERS.values())
