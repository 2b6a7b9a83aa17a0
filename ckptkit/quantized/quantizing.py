"""Quantize the linear layers of a model that is drafted: other dtypes, more tensors, their recipes, another config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptkit.checkpoints.part import Part
from ckptkit.conversion.options import ConvertOptions
from ckptkit.errors import Unsupported, Usage
from ckptkit.layout import Layout, Spec, StoredTensor, edits
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.models.companions import Companions
from ckptkit.models.expected import Form, expected
from ckptkit.models.fit import abridge
from ckptkit.quantized.choose import RAGGED, Chosen, choose, modules_of
from ckptkit.quantized.config import KEYS, without_quantization
from ckptkit.quantized.find import Quantized
from ckptkit.quantized.schemes import SCHEMES, Scheme
from ckptkit.tensors.dtypes import DTYPES

_NUMBERS = DTYPES["float8_e4m3fn"]
_MOST_AT_HAND = 1 << 28  # bytes of one row of boxes


@dataclass(frozen=True, slots=True)
class Quantizing:
    """The matrices of a model that are quantized, in the dtypes in which they lie in the `source`."""

    scheme: Scheme
    chosen: Chosen
    form: Form
    source: Layout

    def wanted(self, layout: Layout) -> Layout:
        """Return a layout with the numbers and scales of the matrices in place of these. Their bytes are not known."""
        tensors: dict[str, StoredTensor] = {}
        names = set(self.chosen.names)
        for name, tensor in layout.tensors.items():
            if name not in names:
                tensors[name] = tensor
                continue
            shape = tensor.spec.shape
            scales = self.scheme.scales(shape)
            assert scales is not None
            tensors[name] = StoredTensor(Spec(_NUMBERS, shape), ())
            tensors[name + self.scheme.suffix] = StoredTensor(Spec(self.scheme.dtype(tensor.spec.dtype), scales), ())
        return replace(layout, tensors=tensors)

    def recipes(self, wanted: Layout, came_from: Mapping[str, str]) -> dict[str, Recipe]:  # noqa: ARG002
        """Return the recipes of numbers and scales. Their operands are of the second source."""
        from ckptkit.quantized.quantized_blocks import (  # imports numpy, which no copy needs
            Grid,
            Matrix,
            Numbers,
            Scales,
        )

        recipes: dict[str, Recipe] = {}
        for name in self.chosen.names:
            spec, scales = self.source.tensors[name].spec, name + self.scheme.suffix
            rows, columns = spec.shape
            matrix = Matrix(Operand(1, name, spec.dtype), rows, columns)
            grid = Grid(*self.scheme.box(spec.shape), wanted.tensors[scales].spec.dtype, self.scheme.block is None)
            if grid.rows * columns * spec.dtype.itemsize > _MOST_AT_HAND:
                message = f"{grid.rows} rows of {columns} numbers would be in memory at once"
                raise Unsupported(message, path=self.source.root, tensor=name)
            recipes[name], recipes[scales] = Numbers(matrix, grid), Scales(matrix, grid)
        return recipes

    def casts(self, wanted: Layout, came_from: Mapping[str, str]) -> dict[str, str]:  # noqa: ARG002
        """Return what becomes of the dtypes of the matrices, by name."""
        return {
            name: f"{self.source.tensors[name].spec.dtype} => {_NUMBERS} times scales" for name in self.chosen.names
        }

    def of_quantized(self, companions: Companions, layout: Layout) -> Companions:
        """Return companions with a config.json that says how the model is quantized, and which modules are not.

        They have their names in the files, by which some loaders ask, and those in memory, by which others do.
        """
        names = set(self.chosen.names)
        left = [name for name, spec in layout.specs.items() if len(spec.shape) > 1 and name not in names]
        left += [name for name in self.form.tied if len(self.form.shapes.get(name, ())) > 1]
        left += [old for name in left for old in self.form.came_from.get(name, ())]
        said = self.scheme.said(modules_of(left))
        return replace(companions, config={**(companions.config or {}), KEYS[0]: said})

    def remarks(self) -> list[str]:
        """Return what there is to say."""
        count = sum(self.source.tensors[name].spec.numel for name in self.chosen.names)
        weights = f"{len(self.chosen.names)} weights, {count:,} parameters"
        notes = [f"quantized {weights}, as {self.scheme.name} says; config.json has it"]
        for reason, names in self.chosen.reasons.items():
            weights = "1 weight" if len(names) == 1 else f"{len(names)} weights"
            notes.append(f"{weights} of linear layers stayed as they were, {reason}: {abridge(names)}")
        return notes


def refuse_quantized(part: Part, quantized: Quantized | None) -> None:
    """Raise `Unsupported` for a model to be quantized whose weights are quantized already."""
    if quantized is not None:
        message = f"the weights are quantized already ({quantized.method})"
        ours = "make plain weights of them first: ckptkit consolidate SRC OUT --dtype bf16"
        hint = "make plain weights of them with the library that made them" if quantized.refusal else ours
        raise Unsupported(message, path=part.path, hint=hint)


def without_words(companions: Companions) -> Companions:
    """Return companions with a config.json that says nothing of quantized weights. Raises `Usage` if there is none."""
    if companions.config is None:
        hint = "--base MODEL takes it from the model that the training began with"
        raise Usage("there is no config.json, in which loaders look for how the weights are quantized", hint=hint)
    return replace(companions, config=without_quantization(companions.config))


def find_quantizing(
    layout: Layout, form: Form | Unsupported | None, companions: Companions, options: ConvertOptions
) -> Quantizing:
    """Find what is to be quantized of a model whose names are those that its config.json calls for.

    Raises `Unsupported` where it is not known which layers are linear, or none of them can be quantized.
    """
    assert options.quantize is not None
    if not isinstance(form, Form):
        hint: str | None = (form.hint if form else None) or "pip install transformers, which knows most types of models"
        message = f"it is not known which of its layers are linear{f': {form.message}' if form else ''}"
        raise Unsupported(message, path=companions.found_in, hint=hint)
    linear, scheme = expected(companions.config or {}).linear_layers(form), SCHEMES[options.quantize]
    chosen = choose(layout.specs, linear.names, linear.kept, scheme, options.exclude_quantize)
    if not chosen.names:
        why = "; ".join(f"{len(names)} stay {reason}" for reason, names in chosen.reasons.items())
        hint = "--quantize fp8-channel has a scale for each row" if RAGGED in chosen.reasons else None
        raise Unsupported(
            f"there is no weight to quantize: {why or 'no linear layer is here'}", path=layout.root, hint=hint
        )
    source = replace(edits.select(layout, set(chosen.names).__contains__), blobs={}, twins={})
    return Quantizing(scheme, chosen, form, source)
