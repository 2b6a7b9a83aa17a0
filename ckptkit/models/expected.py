"""Compute the tensors that a config.json describes: parameters in order, shapes, ties, forms on disk, linear layers.

ckptkit's own table answers first. transformers, whose import takes seconds, is used only for other model types.
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
from ckptkit.models.architectures import EMBEDDING, HEAD, ROUTER, Table, find_table
from ckptkit.models.conversion_mapping import transform_to_disk_form, transforms_reverted_on_save
from ckptkit.models.transformers_model import MetaModel, find_meta_model, is_quantizable_by_linear_module

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
AskBase = Callable[[], frozenset[str] | None] | None


@dataclass(frozen=True, eq=False)
class Form:
    """Names and shapes of all tensors of a model, in one of the forms that it can have on disk.

    `tied` maps names that are not written to the tensors that they equal. `unsaved` are never written. `in_fp32` are
    the tensors that loaders keep in fp32, by the dtype of the other tensors. `came_from` are the names in memory that
    each tensor is made from.
    """

    shapes: Mapping[str, Shape]
    tied: Mapping[str, str] = field(default_factory=dict)
    unsaved: frozenset[str] = frozenset()
    in_fp32: Mapping[str, frozenset[str]] = field(default_factory=dict)
    came_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def needed_names(self) -> frozenset[str]:
        """Return the names of the tensors that a complete model must have."""
        return frozenset(self.shapes) - self.tied.keys() - self.unsaved


class LinearLayers(NamedTuple):
    """The tensors on disk that belong to linear layers or experts. Loaders do not quantize those in `kept`."""

    names: tuple[str, ...]
    kept: frozenset[str]


@dataclass(frozen=True, eq=False)
class Expected(ABC):
    """The tensors that a config.json describes.

    `shapes` are the tensors in memory, in the order of the model's `state_dict()`. `parameters` are the parameters
    among them, in the order of `parameters()`, tied ones once. `tied` maps further names of tensors to the names that
    are written. Properties are computed on first use.
    """

    shapes: Mapping[str, Shape]
    parameters: Mapping[str, Shape]
    tied: Mapping[str, str]

    @property
    @abstractmethod
    def forms(self) -> tuple[Form, ...]:
        """Return the forms that the model can have on disk. The first is the one to write, the last the one in memory.

        A model type can have several valid forms: experts separate or fused, names with or without a prefix. The form
        to write is the base's if the base is known, else that of a new model.
        """

    @abstractmethod
    def linear_layers(self, form: Form) -> LinearLayers:
        """Return the tensors of linear layers and experts, for a model stored in `form`."""

    @property
    def computes_like_llama(self) -> bool:
        """Return whether the model's blocks compute the same as Llama's."""
        return False

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, Any]:
        """Return the config's sizes under Llama's names.

        For a mixture, the total width of the experts that one token uses. Raises `Unsupported` for a model that also
        has an encoder.
        """


@dataclass(frozen=True, eq=False)
class ExpectedByTable(Expected):
    """A model from ckptkit's own table. With `is_fused`, it is written in its in-memory form."""

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

    def linear_layers(self, form: Form) -> LinearLayers:
        mixture = self.table.mixture
        others = (EMBEDDING, mixture.router, ROUTER) if mixture else (EMBEDDING,)  # a router's name on disk, in memory
        names = (name for name, shape in form.shapes.items() if len(shape) > 1 and not name.endswith(others))
        return LinearLayers(tuple(names), frozenset([HEAD]))

    @property
    def computes_like_llama(self) -> bool:
        return self.table.mixture is None

    @property
    def sizes(self) -> Mapping[str, Any]:
        if self.table.mixture is None:
            return self.config
        width = self.config["num_experts_per_tok"] * self.table.sizes["m"]
        return {**self.config, "intermediate_size": width}


@dataclass(frozen=True, eq=False)
class ExpectedByTransformers(Expected):
    """A model that transformers builds. `hub_names` are the names of the base's tensors, None if unknown."""

    meta: MetaModel
    hub_names: frozenset[str] | None

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        known = [None] if self.hub_names is None else [self.hub_names, None]
        return (*(saved_form(self.meta, names) for names in known), memory_form(self.meta))

    def linear_layers(self, form: Form) -> LinearLayers:
        modules = is_quantizable_by_linear_module(self.meta)
        names, kept = [], set()
        for new, olds in form.came_from.items():
            owners = [find_owner_module(old, modules) for old in olds]
            if new.endswith(".bias") or None in owners:
                continue
            names.append(new)
            if not all(modules[one] for one in owners if one):
                kept.add(new)
        return LinearLayers(tuple(names), frozenset(kept))

    @property
    def sizes(self) -> Mapping[str, Any]:
        known = self.meta.model.config
        if known.is_encoder_decoder:
            message = f"a `{known.model_type}` also has an encoder, whose activations ckptkit does not know"
            raise Unsupported(message)
        config = known.get_text_config()
        sizes = {name: getattr(config, name, None) for name in _SIZES}
        if sizes["intermediate_size"] is None:
            sizes["intermediate_size"] = 4 * config.hidden_size  # the default since GPT-2
        experts = getattr(config, "num_experts_per_tok", None)
        if experts:
            sizes["intermediate_size"] = experts * getattr(config, "moe_intermediate_size", sizes["intermediate_size"])
        return sizes | {"model_type": known.model_type}


def expected_model(config: Mapping[str, Any], ask_base: AskBase = None) -> Expected:
    """Return the tensors that a config.json describes.

    `ask_base` returns the names of the base's tensors. It is called only for model types that have several forms on
    disk. Raises `Unsupported` for an unknown model.
    """
    own = find_expected_by_table(config)
    if own is not None and own.computes_like_llama:
        return own
    hub_names = ask_base() if ask_base else None
    if own is not None and (hub_names is None or covers_or_fits_in_form(hub_names, own.forms[0])):
        return own
    if own is not None and hub_names is not None and covers_or_fits_in_form(hub_names, own.forms[-1]):
        return replace(own, is_fused=True)
    return expected_by_transformers(config, hub_names)


def find_expected_by_table(config: Mapping[str, Any]) -> ExpectedByTable | None:
    """Return the model of a config.json from ckptkit's own table; None if the table does not know its type."""
    return expected_of_config_json(json.dumps(config, skipkeys=True, default=repr))


@lru_cache(maxsize=8)  # conversions call this several times, and a mixture has tens of thousands of names
def expected_of_config_json(config_json: str) -> ExpectedByTable | None:
    config = json.loads(config_json)
    table = find_table(config)
    if table is None:
        return None
    tied = {HEAD: EMBEDDING} if table.is_tied else {}
    parameters = {name: shape for name, shape in table.memory.items() if name not in tied}
    return ExpectedByTable(table.memory, parameters, tied, table, config)


def expected_by_transformers(config: Mapping[str, Any], hub_names: frozenset[str] | None) -> ExpectedByTransformers:
    """Return the model of a config.json from transformers. Raises `Unsupported` if transformers does not know it."""
    meta = find_meta_model(config)
    parameters = {name: meta.shapes[name] for name in meta.parameters}
    return ExpectedByTransformers(meta.shapes, parameters, meta.tied, meta, hub_names)


def forms_of_model(config: Mapping[str, Any], ask_base: AskBase = None) -> tuple[Form, ...]:
    """Return the forms of a config.json's model on disk, the one to write first; `ask_base`: see `expected_model`."""
    return expected_model(config, ask_base).forms


def closest_form_or_error(
    names: Collection[str], config: Mapping[str, Any], ask_base: AskBase = None
) -> Form | Unsupported:
    """Return the form that matches tensor names best, or the error that says why no form is known."""
    try:
        return closest_form(forms_of_model(config, ask_base), names)
    except Unsupported as error:
        return error


def closest_form(forms: Iterable[Form], names: Collection[str]) -> Form:
    """Return the form that matches tensor names best; the first of several equal ones."""
    given = frozenset(names)
    return min(forms, key=lambda form: len(form.needed_names - given) + len(given - form.shapes.keys()))


def covers_or_fits_in_form(names: frozenset[str], form: Form) -> bool:
    """Return whether names contain all names of a form, or only names of the form."""
    return names >= form.needed_names or names <= form.shapes.keys()


@cache
def memory_form(meta: MetaModel) -> Form:
    return make_form(meta, meta.shapes, {name: (name,) for name in meta.shapes})


@cache
def saved_form(meta: MetaModel, hub_names: frozenset[str] | None) -> Form:
    on_disk = transform_to_disk_form(meta, transforms_reverted_on_save(meta, hub_names), meta.model.state_dict())
    return make_form(meta, {name: tuple(tensor.shape) for name, tensor in on_disk.tensors.items()}, on_disk.came_from)


def make_form(meta: MetaModel, shapes: Mapping[str, Shape], came_from: Mapping[str, tuple[str, ...]]) -> Form:
    """Return the form with these tensors. `came_from` are the names in memory of each."""
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


def find_owner_module(name: str, modules: Mapping[str, object]) -> str | None:
    """Return the module among `modules` that contains a tensor; None if no module does."""
    module = name.rpartition(".")[0]
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return module or None
