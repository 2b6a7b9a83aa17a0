"""Name the parameters of an optimizer with indices: find the one model of the checkpoint that it can belong to.

An index becomes a name only with a proof: the optimizer has recorded the names (`param_names`), or the shapes of the
states allow exactly one assignment to the parameters of all models in the checkpoint, and it uses all parameters of
one of them. An optimizer with fewer parameters may train something that was not saved: the discriminator of a
generator, a temperature. A trainer's files prove nothing: a trainer that fills groups in the model's order also saves
an optimizer that the user's script built.

Alternatively the user states the optimizer's parameter order (`--optimizer-order`). That is an assumption: it must not
contradict a proof, and the summary repeats it.

A checkpoint may have several models: a generator and a discriminator, a student and a teacher, averaged weights. An
order only decides if no other model has tensors of these shapes. Tensors with the same names and shapes as the model's
do not count, because their optimizer would get the same names. Key names prove nothing: `opt_d` may be the optimizer of
any model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.checkpoints.optimizers.keys import Optimizer, parameter_shapes_of, recorded_names_by_index
from ckptkit.checkpoints.optimizers.parameter_order import (
    float_shapes,
    is_buffer,
    model_tensors_by_key,
    ordered_parameters,
    without_tied_tensors,
)
from ckptkit.errors import Mismatch, SeveralModels, Unsupported, Usage, errors_at
from ckptkit.layout import KeyPath, Layout, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.layout.match_parameters import (
    KEEP_NUMBERS,
    are_all_parameters_trained,
    match_by_size,
    match_with_frozen_parameters,
)
from ckptkit.layout.wrappers import PARAM_NAMES, match_with_prefix, parameters_by_index, without_wrapper_prefixes
from ckptkit.models.companions import find_model_config
from ckptkit.models.names.weights import find_model_key, training_state_names

_HINT = (
    f"{KEEP_NUMBERS}; if you know the model, write it and its optimizer alone with "
    "`convert --to pt` and --include, and convert the result"
)
ORDER = "--optimizer-order"
OF_MODEL = "model"  # the order of the model's own `parameters()`
ORDER_HINT = (
    f"pass {ORDER} {OF_MODEL} if each group of the optimizer was built in the model's order, or {ORDER} FILE with the "
    "parameter names in the optimizer's order, one a line"
)
Names = dict[Any, str]  # parameter index -> parameter name


@dataclass(frozen=True, slots=True)
class Order:
    """The parameter order of an optimizer, as the user states it: the model's order, or `names`."""

    text: str
    names: tuple[str, ...] = ()


def read_optimizer_order(option_value: str) -> Order:
    """Return the order that `--optimizer-order` means: a file has one name a line, or is a JSON list of names.

    Raises `Usage` for a file without names, or with a name twice.
    """
    if option_value == OF_MODEL:
        return Order(option_value)
    hint = f"pass {ORDER} {OF_MODEL}, or a file with one parameter name a line"
    try:
        content = Path(option_value).read_text()
    except (OSError, UnicodeDecodeError):
        raise Usage(f"{ORDER}: expected `{OF_MODEL}` or a text file, found `{option_value}`", hint=hint) from None
    try:
        names = json.loads(content)
    except ValueError:
        names = [line.strip() for line in content.splitlines() if line.strip()]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise Usage(f"{ORDER}: expected names of parameters in `{option_value}`, found none", hint=hint)
    repeated = next((name for name, times in Counter(names).items() if times > 1), None)
    if repeated is not None:
        raise Usage(f"{ORDER}: `{option_value}` lists `{repeated}` twice", hint="list each parameter once")
    return Order(option_value, tuple(names))


@dataclass(frozen=True)
class OneModel:
    """A model of a checkpoint: a layout with only its tensors, and the key path of its state dict."""

    above: KeyPath
    layout: Layout

    @property
    def name(self) -> str:
        return ".".join(map(str, self.above)) or "the model"

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of its floating-point tensors, by key."""
        return float_shapes(model_tensors_by_key(self.layout))

    @cached_property
    def parameters(self) -> dict[str, Shape]:
        """Return the shapes of its parameters, by key; tied parameters count once."""
        shapes = float_shapes(without_tied_tensors(model_tensors_by_key(self.layout)))
        return {name: shape for name, shape in shapes.items() if not is_buffer(name)}


class Candidate(NamedTuple):
    """A parameter that an index may mean. Equal parameters of several models, such as averages, are one candidate."""

    name: str
    shape: Shape

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class NamedNumbers:
    """The names of an optimizer's parameters by index, the model they belong to, and the proof as text."""

    names: Mapping[Any, str]
    model: OneModel
    proof: str


def find_models(layout: Layout) -> list[OneModel]:
    """Return the models in a layout, the main model first: each dict of tensors outside the training state."""
    main: KeyPath | None = None
    with suppress(Mismatch, SeveralModels):
        main = find_model_key(layout)
    training = training_state_names(layout)
    groups: dict[KeyPath, dict[str, StoredTensor]] = {main: {}} if main is not None else {}
    for name, tensor in layout.tensors.items():
        key = layout.key(name)
        is_main = bool(main) and key[: len(main or ())] == main
        if isinstance(key[-1], str) and (is_main or name not in training):
            groups.setdefault(main or () if is_main else key[:-1], {})[name] = tensor
    alone = replace(layout, blobs={}, twins={})
    return [OneModel(above, replace(alone, tensors=tensors)) for above, tensors in groups.items() if tensors]


def find_parameter_names(
    layout: Layout, optimizer: Optimizer, models: Sequence[OneModel], path: Path, order: Order | None = None
) -> NamedNumbers:
    """Return the name for each index of an optimizer in a layout.

    `models` are all models of the checkpoint; config.json is at `path`, or above it. `order` is the user's statement
    about the optimizer. Raises `Unsupported` or `Mismatch` if the names are not certain, or contradict `order`.
    """
    with errors_at(path=layout.path):
        assumed = None if order is None else assume_parameter_names(layout, optimizer, models, path, order)
        try:
            proven = prove_parameter_names(layout, optimizer, models)
        except (Mismatch, Unsupported):
            if assumed is None:
                raise
            return assumed
        if assumed is not None:
            check_order_against_proof(assumed, proven)
        return proven


def prove_parameter_names(layout: Layout, optimizer: Optimizer, models: Sequence[OneModel]) -> NamedNumbers:
    """Return the names that the checkpoint proves. Raises `Unsupported` or `Mismatch` without a proof."""
    recorded = recorded_names_by_index(layout, optimizer)
    if recorded:
        shapes = parameter_shapes_of(layout, optimizer, skip_unknown=True)
        model, names = match_recorded_names(recorded, shapes, models, optimizer)
        return NamedNumbers(names, model, f"its `{PARAM_NAMES}` lists them")
    try:
        shapes = parameter_shapes_of(layout, optimizer)
        names_of = [
            {Candidate(without_wrapper_prefixes(name), shape): name for name, shape in model.parameters.items()}
            for model in models
        ]
        candidates = [{candidate: candidate.shape for candidate in own} for own in names_of]
        assignment = match_by_size(optimizer.groups, shapes, *candidates)
    except Unsupported as error:
        error.hint = ORDER_HINT
        raise
    # an optimizer of a part of a model may train something that was not saved, so it must have all parameters of one
    trained = set(assignment.values())
    pairs = zip(models, names_of, candidates, strict=True)
    model, own = next(
        (model, own) for model, own, shapes_of_model in pairs if are_all_parameters_trained(shapes_of_model, trained)
    )
    names = {number: own[candidate] for number, candidate in assignment.items()}
    return NamedNumbers(names, model, "their shapes allow only one assignment")


def assume_parameter_names(
    layout: Layout, optimizer: Optimizer, models: Sequence[OneModel], path: Path, order: Order
) -> NamedNumbers:
    """Return the names in the order that the user states. Raises `Unsupported` or `Mismatch` if it does not fit."""
    proof = f"assumed, as {ORDER} {order.text} says"
    if not order.names:
        sizes, config = parameter_shapes_of(layout, optimizer), find_model_config(path)

        def fit(model: OneModel) -> Names:
            return match_with_frozen_parameters(optimizer.groups, sizes, ordered_parameters(model.layout, config))

        model, names = choose_model_by_names(models, fit, optimizer)
        others = [other for other in models if other is not model]
        require_no_other_fitting_model(optimizer, sizes, model, others)
        owner = f"; only the shapes of `{model.name}` fit" if others else ""
        return NamedNumbers(names, model, f"{proof}{owner}")
    numbers = list(chain.from_iterable(optimizer.groups))
    if len(numbers) != len(order.names):
        message = (
            f"{ORDER} {order.text}: expected {len(numbers)} names, the parameters of `{optimizer.name}`, "
            f"found {len(order.names)}"
        )
        raise Mismatch(message, hint="list each parameter of the optimizer once, group by group")
    listed = dict(zip(numbers, order.names, strict=True))
    sizes = parameter_shapes_of(layout, optimizer, skip_unknown=True)
    model, names = match_recorded_names(listed, sizes, models, optimizer, f"{ORDER} {order.text}")
    return NamedNumbers(names, model, proof)


def check_order_against_proof(assumed: NamedNumbers, proven: NamedNumbers) -> None:
    """Raise `Mismatch` if the order that the user states contradicts a proven name."""
    for number, name in proven.names.items():
        if without_wrapper_prefixes(assumed.names[number]) != without_wrapper_prefixes(name):
            message = f"{ORDER}: expected `{name}` as parameter {number}, found `{assumed.names[number]}`"
            raise Mismatch(f"{message}; the checkpoint proves the names: {proven.proof}", hint=f"drop {ORDER}")


def parameter_order_in_models(models: Sequence[OneModel], names: Collection[str], path: Path) -> list[str]:
    """Return the parameters of an optimizer in the order of the first model that has them all.

    The names are the model's. Raises `Mismatch` if no model has them, `Unsupported` if its order is unknown.
    """
    wanted = set(map(without_wrapper_prefixes, names))
    for model in models:
        if wanted <= set(map(without_wrapper_prefixes, model.shapes)):
            return [
                name
                for name in ordered_parameters(model.layout, find_model_config(path))
                if without_wrapper_prefixes(name) in wanted
            ]
    raise Mismatch("no model of the checkpoint has all parameters of the optimizer", tensor=next(iter(names), None))


def match_recorded_names(
    recorded: Mapping[Any, str],
    shapes_by_index: Mapping[int, Shape],
    models: Sequence[OneModel],
    optimizer: Optimizer,
    source: str = f"`{PARAM_NAMES}`",
) -> tuple[OneModel, Names]:
    """Return the model that has the names that `source` records, and its name for each index.

    The names may be those of a module of the model, unless the optimizer has all parameters of the model. Raises
    `Mismatch` or `Unsupported` if there is no such model, or several.
    """
    prefixed = [
        (model, names) for model in models for names in match_with_prefix(recorded, shapes_by_index, model.shapes)
    ]
    try:
        exact = choose_model_by_names(
            models, lambda model: parameters_by_index(recorded, shapes_by_index, model.shapes, source), optimizer
        )
        assignments = [exact] if len(exact[1]) == len(exact[0].shapes) else [exact, *prefixed]
    except Mismatch:
        assignments = prefixed
        if not assignments:
            raise
    first, *others = assignments
    if not all(are_same_names(names, first[1]) for _, names in others):
        number, name = next(iter(recorded.items()))
        names = ", ".join(f"`{model}`" for model in dict.fromkeys(assignment[number] for _, assignment in assignments))
        raise Unsupported(f"`{name}` in {source} can mean several parameters: {names}", hint=_HINT)
    return first


def choose_model_by_names(
    models: Sequence[OneModel], fitting_names: Callable[[OneModel], Names], optimizer: Optimizer
) -> tuple[OneModel, Names]:
    """Return the model that fits an optimizer, and the names that it gives.

    Raises the error of the first model if none fits, and `Unsupported` if the names of several differ.
    """
    fitting: list[tuple[OneModel, Names]] = []
    errors: list[Mismatch | Unsupported] = []
    for model in models:
        try:
            fitting.append((model, fitting_names(model)))
        except (Mismatch, Unsupported) as error:
            errors.append(error)
    if not fitting and len(models) == 1:
        raise errors[0]
    if not fitting:
        reasons = (f"`{model.name}`: {error.message}" for model, error in zip(models, errors, strict=True))
        message = f"the optimizer fits none of the {len(models)} models: {'; '.join(reasons)}"
        kind = Mismatch if all(isinstance(error, Mismatch) for error in errors) else Unsupported
        raise kind(message, tensor=errors[0].tensor, hint=_HINT)
    first, *others = fitting
    other = next((other for other in others if not are_same_names(other[1], first[1])), None)
    if other is not None:
        raise ambiguous_models_error(optimizer, [first[0], other[0]])
    return first


def are_same_names(one: Names, other: Names) -> bool:
    """Return whether two assignments give the same names, ignoring wrapper prefixes."""
    return {number: without_wrapper_prefixes(name) for number, name in one.items()} == {
        n: without_wrapper_prefixes(name) for n, name in other.items()
    }


def require_no_other_fitting_model(
    optimizer: Optimizer, shapes_by_index: Mapping[int, Shape], model: OneModel, others: Sequence[OneModel]
) -> None:
    """Raise `Unsupported` if an optimizer's states also fit differently named tensors of other models."""
    own = {(without_wrapper_prefixes(name), shape) for name, shape in model.shapes.items()}
    rest = {
        other.name: Counter(
            shape
            for name, shape in other.shapes.items()
            if (without_wrapper_prefixes(name), shape) not in own and not is_buffer(name)
        )
        for other in others
    }
    other_shapes = sum(rest.values(), Counter[Shape]())
    wanted = Counter(shapes_by_index.values())
    if sum(map(len, optimizer.groups)) <= other_shapes.total() and wanted <= other_shapes:
        raise ambiguous_models_error(
            optimizer, [model, *(other for other in others if rest[other.name] & wanted or not wanted)]
        )


def ambiguous_models_error(optimizer: Optimizer, models: Sequence[OneModel]) -> Unsupported:
    names = " and ".join(f"`{name}`" for name in dict.fromkeys(model.name for model in models))
    count = sum(map(len, optimizer.groups))
    message = f"the shapes of its {count} parameters fit {names}, and no file says which of them it trains"
    return Unsupported(message, hint=_HINT)
