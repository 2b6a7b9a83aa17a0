"""See quantized weights as the plain ones that they stand for, where two models are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from ckptkit.checkpoints.component import Component
from ckptkit.layout import Layout, Spec, edits
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.models.companions import find_config
from ckptkit.state.quantized.find import Quantized, find_quantized
from ckptkit.state.quantized.packed import plain_name
from ckptkit.state.quantized.plain import recipe_of
from ckptkit.words import count

_FLOAT32 = DTYPES["float32"]


@dataclass(frozen=True, slots=True)
class Plain:
    """A model as it is compared: `specs` of plain weights, and the names of the numbers of those that are quantized."""

    layout: Layout
    quantized: Quantized | None
    specs: Mapping[str, Spec]
    packed: Mapping[str, str]

    @classmethod
    def of(cls, layout: Layout, part: Component) -> Self:
        """Look at the weights of a model under the names that they are compared by.

        Raises `Mismatch` for scales that do not fit. Weights that cannot be computed stay as they are stored.
        """
        quantized = find_quantized(layout, find_config(part.path))
        if quantized is None or quantized.refusal is not None:
            return cls(layout, None, layout.specs, {})
        packed = {plain_name(name): name for name in quantized.weights}
        specs = {name: spec for name, spec in layout.specs.items() if name not in quantized.members}
        specs |= {name: Spec(_FLOAT32, quantized.weights[stored].shape) for name, stored in packed.items()}
        return cls(layout, quantized, specs, packed)

    def remark(self, computed: set[str]) -> str | None:
        """Return what there is to say of the weights that are computed; None of a model without quantized ones."""
        packed = len(computed & self.packed.keys())
        if self.quantized is None or not packed:
            return None
        weights = f"{count(packed, 'quantized weight')} of {self.layout.root} ({self.quantized.method})"
        return f"compared by their values: {weights}"

    def recipe(self, name: str, source: int) -> Recipe:
        """Return the recipe of a weight, whose operands are of the source of this number."""
        from ckptkit.engine.recipes import Taken  # imports numpy, which no copy needs

        if self.quantized is None or name not in self.packed:
            return Taken(Operand(source, name, self.specs[name].dtype))
        return recipe_of(self.quantized, self.packed[name], source)

    def stored(self, names: set[str]) -> Layout:
        """Return what of the model some weights are made of."""
        found = set(self.stored_names(names))
        return replace(edits.select(self.layout, found.__contains__), blobs={}, twins={})

    def stored_names(self, names: set[str]) -> Iterator[str]:
        """Yield the names of the tensors that some weights are made of."""
        for name in names:
            stored = self.packed.get(name, name)
            yield stored
            if self.quantized is not None and name in self.packed:
                yield from self.quantized.weights[stored].beside
