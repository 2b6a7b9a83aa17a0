"""Compute what a config.json describes: parameters in order, shapes, ties, forms on disk, and linear layers.

ckptkit's own table is asked first. transformers, whose import takes seconds, is asked only where the table has no
answer.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from ckptkit.errors import Unsupported
from ckptkit.layout.box import Shape
from ckptkit.models.known_types import EMBEDDING, HEAD, Table, find_table
from ckptkit.models.transformers_model import MetaModel, find_meta_model, linear_modules, llama_sizes
from ckptkit.models.transformers_table import to_disk, transforms_of

AskBase = Callable[[], frozenset[str] | None] | None


@dataclass(frozen=True, eq=False)
class Form:
    """Names and shapes of all tensors of a model, in one of the forms in which it may lie on disk.

    `tied` are names that are not written, with the name of the tensor that each is the same as; `unsaved` are never
    written. `in_fp32` are those that loaders keep in fp32, by the dtype in which they load the others. `came_from`
    says what each is made of in memory, where that is something else.
    """

    shapes: Mapping[str, Shape]
    tied: Mapping[str, str] = field(default_factory=dict)
    unsaved: frozenset[str] = frozenset()
    in_fp32: Mapping[str, frozenset[str]] = field(default_factory=dict)
    came_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def needed(self) -> frozenset[str]:
        """Return the names of the tensors without which the model is not whole."""
        return frozenset(self.shapes) - self.tied.keys() - self.unsaved


class LinearLayers(NamedTuple):
    """The tensors on disk that belong to linear layers or experts, and those that loaders want `kept` as they are."""

    names: tuple[str, ...]
    kept: frozenset[str]


@dataclass(frozen=True, eq=False)
class Expected(ABC):
    """What a config.json calls for.

    `shapes` are the tensors in memory, in the order of the model's `state_dict()`, and `parameters` those among them
    that are parameters, in the order of `parameters()`, tied ones once. `tied` gives the further names of tensors, and
    the names that are written for them. What takes longer to find is found when it is asked for.
    """

    shapes: Mapping[str, Shape]
    parameters: Mapping[str, Shape]
    tied: Mapping[str, str]

    @property
    @abstractmethod
    def forms(self) -> tuple[Form, ...]:
        """Return the forms in which the model may lie on disk: the one to be written first, that in memory last.

        One type may have several legal forms: experts apart or fused, with a prefix or without it. The one to be
        written is that of the base, where it is known, else that of a new model.
        """

    @abstractmethod
    def linear_layers(self, form: Form) -> LinearLayers:
        """Return the tensors of linear layers and experts of a model that lies on disk as `form` says."""

    @property
    @abstractmethod
    def is_llama(self) -> bool:
        """Return whether the model's blocks compute what Llama's do."""

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, Any]:
        """Return the config's sizes under Llama's names; of experts, the width of those that one token meets.

        Raises `Unsupported` for a model with an encoder too.
        """


@dataclass(frozen=True, eq=False)
class ExpectedByTable(Expected):
    """What ckptkit's own table says of a model; with `is_fused` it is to be written as it is in memory."""

    table: Table
    config: Mapping[str, Any]
    is_fused: bool = False

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        memory = Form(self.table.memory, self.tied, came_from={name: (name,) for name in self.table.memory})
        if self.table.mixture is None:
            return (memory,)
        came_from = {name: (origin,) for name, (_, origin) in self.table.disk.items()}
        disk = Form({name: shape for name, (shape, _) in self.table.disk.items()}, self.tied, came_from=came_from)
        return (memory, disk, memory) if self.is_fused else (disk, memory)

    def with_base(self, names: frozenset[str] | None) -> ExpectedByTable | None:
        """Return what is expected of a model whose base has tensors of these names; None if they are of no form."""
        if names is None or is_of(names, self.forms[0]):
            return self
        return replace(self, is_fused=True) if is_of(names, self.forms[-1]) else None

    def linear_layers(self, form: Form) -> LinearLayers:
        names = (name for name, shape in form.shapes.items() if self.table.is_linear(name, shape))
        return LinearLayers(tuple(names), frozenset([HEAD]))

    @property
    def is_llama(self) -> bool:
        return self.table.mixture is None

    @property
    def sizes(self) -> Mapping[str, Any]:
        if self.table.mixture is None:
            return self.config
        width = self.config["num_experts_per_tok"] * self.table.sizes["m"]
        return {**self.config, "intermediate_size": width}


@dataclass(frozen=True, eq=False)
class ExpectedByTransformers(Expected):
    """What transformers says of a model, whose base had `hub_names`; None where they are not known."""

    meta: MetaModel
    hub_names: frozenset[str] | None

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        known = [None] if self.hub_names is None else [self.hub_names, None]
        return (*(saved_form(self.meta, names) for names in known), memory_form(self.meta))

    def linear_layers(self, form: Form) -> LinearLayers:
        modules = linear_modules(self.meta)
        owners = {
            new: [owner(old, modules) for old in olds]
            for new, olds in form.came_from.items()
            if not new.endswith(".bias")
        }
        found = {new: [one for one in names if one is not None] for new, names in owners.items() if None not in names}
        kept = (new for new, names in found.items() if not all(map(modules.get, names)))
        return LinearLayers(tuple(found), frozenset(kept))

    @property
    def is_llama(self) -> bool:
        return False

    @property
    def sizes(self) -> Mapping[str, Any]:
        return llama_sizes(self.meta)


def expected(config: Mapping[str, Any], ask_base: AskBase = None) -> Expected:
    """Return what a config.json calls for.

    `ask_base` gives the names of the tensors that a training began with; it is asked only for a type of model that may
    lie on disk in several forms. Raises `Unsupported` for a model of which nothing is known.
    """
    own = by_table(as_text(config))
    if own is not None and own.is_llama:
        return own
    hub_names = ask_base() if ask_base else None
    own = own and own.with_base(hub_names)
    return own or by_transformers(config, hub_names)


def expected_llama(config: Mapping[str, Any]) -> Expected | None:
    """Return what ckptkit's own table says of a model whose blocks compute what Llama's do; None for any other."""
    try:
        own = by_table(as_text(config))
    except Unsupported:  # it lacks a size
        return None
    return own if own is not None and own.is_llama else None


def as_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, skipkeys=True, default=repr)


@lru_cache(maxsize=8)  # a conversion asks several times, and a model with experts has tens of thousands of names
def by_table(text: str) -> ExpectedByTable | None:
    """Return what ckptkit's own table says of a config.json, None where it says nothing."""
    config = json.loads(text)
    table = find_table(config)
    if table is None:
        return None
    tied = {HEAD: EMBEDDING} if table.is_tied else {}
    parameters = {name: shape for name, shape in table.memory.items() if name not in tied}
    return ExpectedByTable(table.memory, parameters, tied, table, config)


def by_transformers(config: Mapping[str, Any], hub_names: frozenset[str] | None) -> ExpectedByTransformers:
    """Return what transformers says of a config.json. Raises `Unsupported` for a model that it does not know."""
    meta = find_meta_model(config)
    parameters = {name: meta.shapes[name] for name in meta.parameters}
    return ExpectedByTransformers(meta.shapes, parameters, meta.tied, meta, hub_names)


def forms_for(config: Mapping[str, Any], ask_base: AskBase = None) -> tuple[Form, ...]:
    """Return the forms in which the model of a config.json may lie on disk, the one to be written first.

    For `ask_base` and errors see `expected`.
    """
    return expected(config, ask_base).forms


def form_or_reason(names: Collection[str], config: Mapping[str, Any], ask_base: AskBase = None) -> Form | Unsupported:
    """Return the form of a model that tensors of these names are of, or nearly so, or why none is known."""
    try:
        return closest(forms_for(config, ask_base), names)
    except Unsupported as error:
        return error


def closest(forms: Iterable[Form], names: Collection[str]) -> Form:
    """Return the form that tensors of these names are of, or nearly so; of several the first."""
    found = frozenset(names)
    return min(forms, key=lambda form: len(form.needed - found) + len(found - form.shapes.keys()))


def is_of(names: frozenset[str], form: Form) -> bool:
    """Return whether names are all that a form has, and perhaps more; or some of them, and no others."""
    return names >= form.needed or names <= form.shapes.keys()


@cache
def memory_form(meta: MetaModel) -> Form:
    return form_of(meta, meta.shapes, {name: (name,) for name in meta.shapes})


@cache
def saved_form(meta: MetaModel, hub_names: frozenset[str] | None) -> Form:
    made = to_disk(meta, transforms_of(meta, hub_names), meta.model.state_dict())
    return form_of(meta, {name: tuple(tensor.shape) for name, tensor in made.tensors.items()}, made.came_from)


def form_of(meta: MetaModel, shapes: Mapping[str, Shape], came_from: Mapping[str, tuple[str, ...]]) -> Form:
    """Return a form with these tensors, for each of which it is known what it comes from in memory."""
    single = {olds[0]: new for new, olds in came_from.items() if len(olds) == 1}
    pairs = ((single.get(target), single.get(source)) for target, source in meta.tied.items())
    return Form(
        shapes,
        tied={target: source for target, source in pairs if target is not None and source is not None},
        unsaved=frozenset(new for new, olds in came_from.items() if meta.unsaved.issuperset(olds)),
        in_fp32={
            dtype: frozenset(new for new, olds in came_from.items() if any(map(pattern.search, olds)))
            for dtype, pattern in meta.in_fp32.items()
            if pattern is not None
        },
        came_from=came_from,
    )


def owner(name: str, modules: Mapping[str, object]) -> str | None:
    """Return the module among these that a tensor belongs to, None if it is of none."""
    module = name.rpartition(".")[0]
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return module or None
