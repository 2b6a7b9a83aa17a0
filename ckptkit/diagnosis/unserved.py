"""Find towers and layers that config.json declares and that have no tensors, where the model type is not known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ckptkit.diagnosis.case import Case, TargetModel
from ckptkit.diagnosis.finding import Finding
from ckptkit.diagnosis.fix import Fix, export, is_model
from ckptkit.layout.renames import few_globs

_TOWERS = {
    "vision_config": re.compile(r"vis(ion|ual)|image|vit\b|clip|\bvpm\b"),  # vpm and apm: MiniCPM-V, MiniCPM-o
    "audio_config": re.compile(r"audio|speech|\bapm\b"),
}
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]+)\.")
_MOST_GLOBS = 3


def find_unserved(case: Case) -> Iterator[Finding]:
    """Yield the towers and layers that the config of a model for use declares and that have no tensors."""
    model = case.model
    is_for_use = case.is_asked or is_model(case.checkpoint)
    if model is None or not (case.shapes and is_for_use) or case.adapted or case.misfits is not None:
        return  # where the model's tensors are known, those that are missing are findings of their own
    yield from find_towers(case, model)
    yield from find_layers(case, model)


def find_towers(case: Case, model: TargetModel) -> Iterator[Finding]:
    """Yield the towers for images and sounds that have a config but no tensors."""
    for key, words in _TOWERS.items():
        if isinstance(model.config.get(key), Mapping) and not any(words.search(name) for name in case.shapes):
            fix = from_base(case, model, filter(words.search, model.specs))
            yield Finding("layers", None, f"{model.name} declares `{key}`, but no tensor belongs to such a tower", fix)


def find_layers(case: Case, model: TargetModel) -> Iterator[Finding]:
    """Yield that fewer layers have tensors than the config declares."""
    inner = model.config.get("text_config")
    count = (inner if isinstance(inner, Mapping) else model.config).get("num_hidden_layers")
    numbers = {int(number) for name in case.shapes if not is_of_tower(name) for number in LAYER.findall(name)}
    missing = [number for number in range(count) if number not in numbers] if isinstance(count, int) else []
    if numbers and missing:
        found = f"found no tensors for {len(missing)} of them, such as layer {missing[0]}"
        yield Finding("layers", None, f"expected {count} layers (num_hidden_layers of {model.name}), {found}")


def from_base(case: Case, model: TargetModel, wanted: Iterable[str]) -> Fix | None:
    """Return the command that copies the wanted tensors from the model that you name; None if it does not have them."""
    names = [name for name in wanted if name not in case.shapes]
    globs = few_globs(names, model.specs.keys() - set(names), _MOST_GLOBS)
    return export(case.checkpoint, from_base=globs, base=model.name) if globs else None


def is_of_tower(name: str) -> bool:
    """Return whether a tensor belongs to a tower for images or sounds, whose layers are numbered too."""
    return any(words.search(name) for words in _TOWERS.values())
