"""Name the parameters of a numbered optimizer, by the one model of a checkpoint that it can belong to.

A checkpoint may have several models: a generator and a discriminator, a student and a teacher, averaged weights. A
number becomes a name where the optimizer has recorded it; or where one model has an order that fits, and the tensors of
all other models cannot have these states. Tensors of the same names and shapes as the model's do not count, as their
optimizer would get the same names. What the keys are called is no evidence: `opt_d` may be the optimizer of any model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Mismatch, SeveralModels, Unsupported
from ckptkit.layout import KeyPath, Layout, StoredTensor
from ckptkit.layout.matching import KEEP_NUMBERS, match_trained
from ckptkit.layout.recorded_names import PARAM_NAMES, bare, match_recorded, match_with_prefix
from ckptkit.models.companions import find_config
from ckptkit.names.weights import find_model_key, names_of_training
from ckptkit.optimizers.keys import Optimizer, known_sizes_of, recorded_names, sizes_of
from ckptkit.optimizers.parameter_order import float_shapes, is_buffer, ordered_parameters, own_tensors
from ckptkit.tensors.box import Shape

_HINT = (
    f"{KEEP_NUMBERS}; if you know the model, write it and its optimizer alone with "
    "`convert --to pt` and --include, and convert the result"
)
Names = dict[Any, str]  # of parameters, by their numbers


@dataclass(frozen=True)
class OneModel:
    """A model of a checkpoint: a layout with nothing else in it, and the key path of its state dict."""

    above: KeyPath
    layout: Layout

    @property
    def name(self) -> str:
        """Return what the model is called in the checkpoint."""
        return ".".join(map(str, self.above)) or "the model"

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of its tensors of floats, as the keys call them."""
        return float_shapes(own_tensors(self.layout))


@dataclass(frozen=True, slots=True)
class NamedNumbers:
    """The names of an optimizer's parameters by their numbers, in a model, and in words what proves them."""

    names: Mapping[Any, str]
    model: OneModel
    proof: str


def find_models(layout: Layout) -> list[OneModel]:
    """Return the models in a checkpoint or a part of it: each dict of tensors that is no state of a training.

    The one that is taken for the model of the checkpoint comes first.
    """
    main = main_key(layout)
    training = names_of_training(layout)
    groups: dict[KeyPath, dict[str, StoredTensor]] = {main: {}} if main is not None else {}
    for name, tensor in layout.tensors.items():
        key = layout.key(name)
        is_main = bool(main) and key[: len(main or ())] == main
        if isinstance(key[-1], str) and (is_main or name not in training):
            groups.setdefault(main or () if is_main else key[:-1], {})[name] = tensor
    alone = replace(layout, blobs={}, twins={})
    return [OneModel(above, replace(alone, tensors=tensors)) for above, tensors in groups.items() if tensors]


def main_key(layout: Layout) -> KeyPath | None:
    """Return the key path of the model, None where there are several models or none."""
    try:
        return find_model_key(layout)
    except (Mismatch, SeveralModels):
        return None


def find_names(layout: Layout, optimizer: Optimizer, models: Sequence[OneModel], path: Path) -> NamedNumbers:
    """Return the name for each number of an optimizer in a layout.

    `models` are all of the checkpoint; config.json lies at `path`, or above it. Raises `Unsupported` or `Mismatch` if
    the names are not certain.
    """
    try:
        recorded = recorded_names(layout, optimizer)
        if recorded:
            sizes = known_sizes_of(layout, optimizer)
            model, names = find_recorded(recorded, sizes, models, optimizer)
            return NamedNumbers(names, model, f"its `{PARAM_NAMES}` lists them")
        return find_by_order(optimizer, sizes_of(layout, optimizer), models, find_config(path))
    except CkptError as error:
        raise error.blame(path=layout.root) from None


def find_by_order(
    optimizer: Optimizer, sizes: Mapping[int, Shape], models: Sequence[OneModel], config: Mapping[str, Any] | None
) -> NamedNumbers:
    """Return the names that one model gives by the order of its parameters. Raises `Unsupported` or `Mismatch`."""

    def fit(model: OneModel) -> list[Names]:
        return [match_trained(optimizer.groups, sizes, ordered_parameters(model.layout, config))]

    model, names = choose(models, fit, optimizer)
    others = [other for other in models if other is not model]
    check_others(optimizer, sizes, model, others)
    owner = f" of `{model.name}`and of no other model" if others else ""
    return NamedNumbers(names, model, f"one order fits all shapes{owner}")


def find_recorded(
    recorded: Mapping[Any, str], sizes: Mapping[int, Shape], models: Sequence[OneModel], optimizer: Optimizer
) -> tuple[OneModel, Names]:
    """Return the model that has the recorded names, and its name for each number.

    Raises `Mismatch` or `Unsupported` where there is no such model, or several.
    """
    try:
        return choose(models, lambda one: [match_recorded(recorded, sizes, one.shapes)], optimizer)
    except Mismatch:
        ways = [(one, names) for one in models for names in match_with_prefix(recorded, sizes, one.shapes)]
        if not ways:
            raise
    first, *others = ways
    if not all(is_same(names, first[1]) for _, names in others):
        number, name = next(iter(recorded.items()))
        names = ", ".join(f"`{one}`" for one in dict.fromkeys(way[number] for _, way in ways))
        raise Unsupported(f"`{PARAM_NAMES}` has `{name}`, which can be {names}", hint=_HINT)
    return first


def choose(
    models: Sequence[OneModel], fit: Callable[[OneModel], Iterable[Names]], optimizer: Optimizer
) -> tuple[OneModel, Names]:
    """Return the model that fits an optimizer, and the names that it gives.

    Raises the error of the first model if none fits, and `Unsupported` if the names of several differ.
    """
    fitting: list[tuple[OneModel, Names]] = []
    errors: list[Mismatch | Unsupported] = []
    for model in models:
        try:
            fitting += [(model, names) for names in fit(model)]
        except (Mismatch, Unsupported) as error:
            errors.append(error)
    if not fitting:
        raise errors[0] if len(models) == 1 else fits_none(models, errors)
    first, *others = fitting
    other = next((other for other in others if not is_same(other[1], first[1])), None)
    if other is not None:
        raise ambiguous(optimizer, [first[0], other[0]])
    return first


def fits_none(models: Sequence[OneModel], errors: Sequence[Mismatch | Unsupported]) -> Mismatch | Unsupported:
    """Return the error for an optimizer that fits none of several models, with the reason for each."""
    reasons = (f"`{model.name}`: {error.message}" for model, error in zip(models, errors, strict=True))
    kind = Mismatch if all(isinstance(error, Mismatch) for error in errors) else Unsupported
    return kind(
        f"the optimizer fits none of the {len(models)} models: {'; '.join(reasons)}",
        tensor=errors[0].tensor,
        hint=_HINT,
    )


def is_same(one: Names, other: Names) -> bool:
    """Return whether names are the same but for the prefixes of wrappers."""
    return {number: bare(name) for number, name in one.items()} == {n: bare(name) for n, name in other.items()}


def check_others(optimizer: Optimizer, sizes: Mapping[int, Shape], model: OneModel, others: Sequence[OneModel]) -> None:
    """Raise `Unsupported` if the states of an optimizer fit tensors of other models, of other names than its own."""
    own = {(bare(name), shape) for name, shape in model.shapes.items()}
    rest = {other.name: Counter(shapes_beside(other, own)) for other in others}
    there = sum(rest.values(), Counter[Shape]())
    wanted = Counter(sizes.values())
    if sum(map(len, optimizer.groups)) <= there.total() and wanted <= there:
        raise ambiguous(optimizer, [model, *(other for other in others if rest[other.name] & wanted or not wanted)])


def shapes_beside(model: OneModel, own: set[tuple[str, Shape]]) -> Iterator[Shape]:
    """Yield the shapes of a model's parameters that are not among `own`, by bare name and shape."""
    return (shape for name, shape in model.shapes.items() if (bare(name), shape) not in own and not is_buffer(name))


def ambiguous(optimizer: Optimizer, models: Sequence[OneModel]) -> Unsupported:
    """Return the error for an optimizer that can belong to several models."""
    names = " and ".join(f"`{name}`" for name in dict.fromkeys(model.name for model in models))
    count = sum(map(len, optimizer.groups))
    message = f"the shapes of its {count} parameters fit {names}, and no file says which of them it trains"
    return Unsupported(message, hint=_HINT)
