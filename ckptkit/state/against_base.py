"""Compare the names and shapes of the weights to write with those of the base, in both directions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ckptkit.checkpoints.base_weights import BaseWeights
from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import few_globs
from ckptkit.models.expected import Form, closest, forms_for
from ckptkit.models.fit import abridge
from ckptkit.state.model import Model
from ckptkit.state.options import ConvertOptions
from ckptkit.state.quantized.find import find_quantized
from ckptkit.state.quantized.packed import plain_name
from ckptkit.state.quantized.signs import is_declared_quantized
from ckptkit.words import count

Shapes = Mapping[str, Shape]
_COMPUTED = (
    ".inv_freq",
    ".position_ids",
    ".masked_bias",
    ".attn.bias",
    "_extra_state",
)  # buffers in older files that loaders compute
_MAX_GLOBS = 3


class Differences(NamedTuple):
    """Names that only one side has, and names whose shapes differ."""

    only_base: tuple[str, ...]
    only_ours: tuple[str, ...]
    shapes: tuple[str, ...]


def compare_with_base(model: Model, options: ConvertOptions) -> Model:
    """Add notes on tensors that only the base has or only the model has, and on shapes that differ."""
    base = base_to_compare(model, options)
    if base is not None and base.problem is not None:
        return model.say(f"not compared with the weights of {base.base}: {base.problem.message}")
    if base is None or base.layout is None:
        return model
    ours = model.layout.shapes
    theirs = base_shapes(base, is_quantized=is_quantized(model))
    differ = differences(ours, theirs, forms_of(model))
    return model.say(*notes_on_differences(differ, ours, theirs, base.base))


def base_to_compare(model: Model, options: ConvertOptions) -> BaseWeights | None:
    """Return the base that the user named, or else the local directory in `_name_or_path` of config.json."""
    if options.base is not None:
        return model.ask_base if isinstance(model.ask_base, BaseWeights) else BaseWeights(options.base)
    recorded = model.config.get("_name_or_path")
    return (
        BaseWeights(recorded)
        if isinstance(recorded, str) and Path(recorded).is_absolute() and Path(recorded).is_dir()
        else None
    )


def is_quantized(model: Model) -> bool:
    """Return whether config.json declares the weights to write as quantized."""
    return is_declared_quantized(model.config)


def base_shapes(base: BaseWeights, *, is_quantized: bool) -> Shapes:
    """Return the shapes of a base's weights by name.

    Quantized weights get their plain shapes, unless ours are quantized.
    """
    assert base.layout is not None
    shapes = base.layout.shapes
    try:
        quantized = None if is_quantized else find_quantized(base.layout, base.open().companions.config)
    except (Corrupt, Mismatch, Unsupported):  # some tensors are missing: compare the other names anyway
        quantized = None
    if quantized is None:
        return shapes
    packed = {plain_name(name): one.shape for name, one in quantized.weights.items()}
    return {name: shape for name, shape in shapes.items() if name not in quantized.members} | packed


def forms_of(model: Model) -> tuple[Form, ...]:
    """Return the forms that config.json describes; () if the model is unknown."""
    try:
        return forms_for(model.config, model.ask_base) if model.config else ()
    except Unsupported:
        return ()


def differences(ours: Shapes, theirs: Shapes, forms: tuple[Form, ...]) -> Differences:
    """Return the differences in names and shapes between a model and its base.

    If the two use different on-disk names of the same model type, names of either scheme are not reported.
    """
    form, other = (closest(forms, names) if forms else None for names in (ours, theirs))
    if form is None or other is None:
        known: Collection[str] = ()
    elif form.shapes == other.shapes:
        known = {*form.tied, *form.unsaved}
    else:
        known = {name for one in forms for name in one.shapes}
    return Differences(
        tuple(only_in(theirs, ours, known)),
        tuple(only_in(ours, theirs, known)),
        tuple(name for name, shape in ours.items() if name not in known and theirs.get(name, shape) != shape),
    )


def only_in(names: Iterable[str], others: Collection[str], known: Collection[str]) -> list[str]:
    """Return the names that are not in `others`, even without their first two components, except computed buffers."""
    ends = {end for other in others for end in (other, *ends_of(other))}
    candidates = (name for name in names if not (name in known or name in ends or name.endswith(_COMPUTED)))
    return sorted(name for name in candidates if not any(end in others for end in ends_of(name)))


def ends_of(name: str) -> list[str]:
    """Return a name without its first component, and without its first two."""
    first, second = name.partition(".")[2], name.partition(".")[2].partition(".")[2]
    return [end for end in (first, second) if "." in end]


def notes_on_differences(differ: Differences, ours: Shapes, theirs: Shapes, base: str) -> list[str]:
    """Return a sentence for each kind of difference."""
    if not ours.keys() & theirs.keys() and len(differ.only_base) == len(theirs):
        return [f"not compared with the weights of {base}: they have no tensor name in common"] if theirs else []
    notes = []
    if differ.only_base:
        globs = few_globs(differ.only_base, theirs.keys() - set(differ.only_base), _MAX_GLOBS) or ("GLOB",)
        asked = " ".join(f"--from-base {quote(glob)}" for glob in globs)
        lack = f"{base} has {count(len(differ.only_base), 'tensor')} that the output lacks: {abridge(differ.only_base)}"
        notes.append(f"{lack}; {asked} copies {them(differ.only_base)}")
    if differ.only_ours:
        notes.append(
            f"the output has {count(len(differ.only_ours), 'tensor')} that {base} lacks: {abridge(differ.only_ours)}"
        )
    if differ.shapes:
        name = differ.shapes[0]
        shapes = f"expected {list(theirs[name])} as in {base}, found {list(ours[name])}"
        notes.append(f"{count(len(differ.shapes), 'tensor', 'has')} another shape than in {base}: `{name}`: {shapes}")
    return notes


def them(names: Collection[str]) -> str:
    return "them" if len(names) > 1 else "it"
