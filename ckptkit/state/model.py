"""`Model`: the model that a conversion will write. Each step of the conversion returns a changed copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.errors import Unsupported
from ckptkit.layout import Layout, edits
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Recipe
from ckptkit.models.companions import Companions, find_companions
from ckptkit.models.expected import AskBase, Form
from ckptkit.models.names.weights import Weights, find_weights
from ckptkit.state.quantized.config import is_declared_quantized, may_be_quantized_model

RecipeFor = Callable[[str, DType], Recipe]  # called with the final name and dtype of the tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model to write, and all that is known about it. Steps return a new one and change nothing in place.

    `weights` are the tensors under their final names. `part` is the component that they come from, `origins` are the
    paths of all sources, and `base` is the checkpoint of `--base` if its tensors are read. `companions` are config.json
    and the files beside it, as they will be written. `expected` is the form that config.json describes, or the error
    that says why it is unknown, or None without a config.json.

    `siblings` are the same tensors in further checkpoints, for an average. Recipes are made last, when the names and
    dtypes of their tensors are final; their source N is `others[N - 1]`, source 0 is the model itself. `stored_as`
    describes how computed tensors are stored in the source, `casts` the changes of dtypes, `made_of` the source for the
    manifest, `remarks` the notes for the user. `dropped` are source entries that are not written, with reasons;
    `merged` are entries equal to others, which are written.
    """

    part: Component
    weights: Weights
    origins: tuple[Path, ...]
    base: Checkpoint | None = None
    companions: Companions = field(default_factory=Companions)
    ask_base: AskBase = None
    expected: Form | Unsupported | None = None
    siblings: tuple[Layout, ...] = ()
    others: tuple[Layout, ...] = ()
    recipes: Mapping[str, RecipeFor] = field(default_factory=dict)
    stored_as: Mapping[str, str] = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    merged: frozenset[str] = frozenset()
    made_of: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, part: Component, companions_from: str | None) -> Model:
        """Return the model in a component of a checkpoint, with the companions of `companions_from` if given."""
        companions = find_companions(part.path, companions_from)
        return cls(part=part, weights=find_weights(part.layout), origins=(part.path,), companions=companions)

    @property
    def layout(self) -> Layout:
        return self.weights.layout

    @property
    def config(self) -> Mapping[str, Any]:
        """Return config.json, {} without one."""
        return self.companions.config or {}

    @property
    def may_be_quantized(self) -> bool:
        """Return whether tensors of the component may be quantized, or config.json declares that they are."""
        return is_declared_quantized(self.config) or may_be_quantized_model(self.part.layout.specs)

    def kept_in_fp32(self, dtype: str) -> frozenset[str]:
        """Return the tensors that loaders keep in fp32 if they load the others in `dtype`."""
        return self.expected.in_fp32.get(dtype, frozenset()) if isinstance(self.expected, Form) else frozenset()

    def with_remarks(self, *remarks: str) -> Model:
        """Return the model with more remarks. Repeated remarks are kept once."""
        return replace(self, remarks=tuple(dict.fromkeys((*self.remarks, *remarks))))

    def with_layout(self, layout: Layout) -> Model:
        """Return the model with its tensors in another layout, under the same names."""
        return replace(self, weights=replace(self.weights, layout=layout))

    def with_config(self, config: Mapping[str, Any]) -> Model:
        return replace(self, companions=replace(self.companions, config=dict(config)))

    def with_only(self, names: Collection[str]) -> Model:
        recipes = {name: recipe for name, recipe in self.recipes.items() if name in names}
        return replace(self.with_layout(edits.select_entries(self.layout, names.__contains__)), recipes=recipes)

    def with_drop_reasons(self, reasons: Mapping[str, str]) -> Model:
        """Return the model with reasons why the source entries of these tensors are not written."""
        dropped = {old: why for name, why in reasons.items() for old in self.weights.origins_of([name])}
        return replace(self, dropped={**self.dropped, **dropped})

    def with_record_of_duplicates(self, names: Iterable[str]) -> Model:
        """Return the model with the note that these tensors equal others, which are written."""
        return replace(self, merged=self.merged | self.weights.origins_of(names))

    def with_new_names(self, new_name: Callable[[str], str]) -> Model:
        """Return the model with a new name for each tensor."""
        weights = replace(
            self.weights,
            layout=edits.select_and_rename_tensors(self.layout, {name: new_name(name) for name in self.layout.tensors}),
            came_from={new_name(name): old for name, old in self.weights.came_from.items()},
        )
        return replace(
            self,
            weights=weights,
            recipes={new_name(name): recipe for name, recipe in self.recipes.items()},
            stored_as={new_name(name): words for name, words in self.stored_as.items()},
        )

    def recipes_by_name(self) -> dict[str, Recipe]:
        """Return the recipe of each computed tensor. Raises `Unsupported` if such a tensor is missing in the result."""
        if lost := min(self.recipes.keys() - self.layout.tensors.keys(), default=None):
            raise Unsupported("the tensor would be lost: it is not in the result", path=self.part.path, tensor=lost)
        specs = self.layout.specs
        return {name: recipe(name, specs[name].dtype) for name, recipe in self.recipes.items()}


def recipe_for_any_tensor(recipe: Recipe) -> RecipeFor:
    return lambda _name, _dtype: recipe
