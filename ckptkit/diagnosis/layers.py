"""Find layers that a config.json declares and that no tensor serves: those for further tokens, towers, any others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ckptkit.diagnosis.case import Case, TargetModel
from ckptkit.diagnosis.finding import Finding
from ckptkit.diagnosis.fix import Fix, export, is_model
from ckptkit.diagnosis.names import globs_for
from ckptkit.models.predictors import count_there, declared

_TOWERS = {"vision_config": re.compile(r"vis(ion|ual)|image|vit\b"), "audio_config": re.compile(r"audio|speech")}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]+)\.")
_MOST_GLOBS = 3


def find_unserved(case: Case) -> Iterator[Finding]:
    """Yield the layers that the config of a model for use declares, and of which no tensor is here."""
    model = case.model
    if model is None or not case.shapes or case.adapted or not (case.is_asked or is_model(case.checkpoint)):
        return
    yield from find_predictors(case, model)
    if case.misfits is None:  # else what is missing is named
        yield from find_towers(case, model)
        yield from find_layers(case, model)


def find_predictors(case: Case, model: TargetModel) -> Iterator[Finding]:
    """Yield the layers for further tokens (MTP) that a training did not save. An export without them declares fewer."""
    own = [name for name in case.shapes if not is_of_tower(name)]
    for one in declared(model.config):
        if (there := count_there(one, own)) < one.layers:
            key = ".".join((*one.sections, one.key))
            message = f"`{key}` of {model.name} declares {one.layers} MTP layers, and tensors of {there} are here"
            fix = from_base(case, model, filter(one.holds, model.specs)) or export(case.checkpoint, base=base_of(model))
            yield Finding("layers", None, f"{message}: an engine that uses them fails", fix)


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
    globs = globs_for(names, model.specs.keys() - set(names), _MOST_GLOBS) if names else None
    return export(case.checkpoint, from_base=globs, base=base_of(model)) if globs else None


def base_of(model: TargetModel) -> str | None:
    return model.name if model.asked else None


def is_of_tower(name: str) -> bool:
    """Return whether a tensor is of another tower than that for text, whose layers are numbered too."""
    return any(words.search(name) for words in _TOWERS.values())
