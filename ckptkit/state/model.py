"""The value that the steps of a conversion pass on: the model that will be written."""

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

RecipeFor = Callable[[str, DType], Recipe]  # by the name and the dtype that a tensor is written with


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is about to be written, and all that is known of it. Steps return another one; nothing is changed in place.

    `weights` are the tensors, under the names that they are to have; `part` is where they come from, `origins` are the
    paths of all sources, and `base` is the checkpoint of `--base` if its tensors are read. `companions` are config.json
    and the files beside it, as they will be written. `expected` is what config.json describes, or the reason why that
    is not known, or None without a config.json.

    `siblings` are the same tensors in further checkpoints, for the mean of all. Source N of a recipe is
    `others[N - 1]`, source 0 the model itself. A recipe is made last, when the name and the dtype of its tensor are
    final. `stored_as` says in words what computed tensors are stored as, `casts` what became of dtypes, `made_of` what
    the manifest says of the source, `remarks` what the report will say. Of the entries of the source `dropped` are not
    written, each for a reason; `merged` are the same as others, which are.
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
        """Return the whole model in a part of a checkpoint, with the companions of another one if that is named."""
        companions = find_companions(part.path, companions_from)
        return cls(part=part, weights=find_weights(part.layout), origins=(part.path,), companions=companions)

    @property
    def layout(self) -> Layout:
        """Return where the tensors lie now."""
        return self.weights.layout

    @property
    def config(self) -> Mapping[str, Any]:
        """Return config.json, {} without one."""
        return self.companions.config or {}

    def say(self, *remarks: str) -> Model:
        """Return the model with more remarks. A remark that was made already is not repeated."""
        return replace(self, remarks=tuple(dict.fromkeys((*self.remarks, *remarks))))

    def with_layout(self, layout: Layout) -> Model:
        """Return the model with its tensors in another layout, under the same names."""
        return replace(self, weights=replace(self.weights, layout=layout))

    def with_config(self, config: Mapping[str, Any]) -> Model:
        """Return the model with another config.json."""
        return replace(self, companions=replace(self.companions, config=dict(config)))

    def select(self, names: Collection[str]) -> Model:
        """Return the model without the tensors of other names, and without their recipes."""
        recipes = {name: recipe for name, recipe in self.recipes.items() if name in names}
        return replace(self.with_layout(edits.select(self.layout, names.__contains__)), recipes=recipes)

    def note_dropped(self, reasons: Mapping[str, str]) -> Model:
        """Return the model with reasons why the entries that became tensors of these names are not written."""
        dropped = {old: why for name, why in reasons.items() for old in self.weights.origins_of([name])}
        return replace(self, dropped={**self.dropped, **dropped})

    def note_merged(self, names: Iterable[str]) -> Model:
        """Return the model with the remark that tensors of these names are the same as others, which are written."""
        return replace(self, merged=self.merged | self.weights.origins_of(names))

    def rename(self, new_name: Callable[[str], str]) -> Model:
        """Return the model with a new name for each tensor."""
        weights = replace(
            self.weights,
            layout=edits.rename(self.layout, new_name),
            came_from={new_name(name): old for name, old in self.weights.came_from.items()},
        )
        return replace(
            self,
            weights=weights,
            recipes={new_name(name): recipe for name, recipe in self.recipes.items()},
            stored_as={new_name(name): words for name, words in self.stored_as.items()},
        )

    def made_recipes(self) -> dict[str, Recipe]:
        """Return the recipe of each computed tensor. Raises `Unsupported` if a tensor with a recipe was lost."""
        if lost := min(self.recipes.keys() - self.layout.tensors.keys(), default=None):
            raise Unsupported("the tensor would be lost: it is not in the result", path=self.part.path, tensor=lost)
        specs = self.layout.specs
        return {name: recipe(name, specs[name].dtype) for name, recipe in self.recipes.items()}


def always(recipe: Recipe) -> RecipeFor:
    """Return a recipe that is the same under any name and for any dtype."""
    return lambda _name, _dtype: recipe
