"""Quantize the linear layers of a model: new dtypes, additional scale tensors, their recipes, and a new config.json.

Sources: transformers/quantizers/quantizer_finegrained_fp8.py, and the preset FP8_DYNAMIC in
compressed_tensors/quantization/quant_scheme.py. Both also quantize inputs to 8 bits, with scales computed while the
model runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.layout import Layout, Spec, StoredTensor, edits
from ckptkit.layout.box import Shape
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import Operand
from ckptkit.models.expected import Form, expected_model
from ckptkit.models.fit import join_few_names
from ckptkit.state.model import Model, RecipeFor, recipe_for_any_tensor
from ckptkit.state.options import ConvertOptions
from ckptkit.state.quantized.config import KEYS, Block
from ckptkit.words import count

# Choose the weights to quantize: linear layers, except where loaders expect plain weights.
#
# Transformers skips the head, and modules that its classes keep in fp32 (transformers/quantizers/base.py). vLLM runs
# routers, image and audio encoders, and the projection for draft tokens (MTP) without scales, and fuses some
# projections into one matrix, whose parts must be treated alike (`packed_modules_mapping` of its classes).
_ROUTERS = ("gate", "router", "shared_expert_gate", "eh_proj")
_TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder", "multi_modal_projector", "audio_tower")
_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_EXPERTS = "experts"
HEADS, ASKED, RAGGED, ALONE = (
    "loaders expect plain weights there",
    "--exclude-quantize matches",
    "rows or columns are not multiples of 128",
    "loaders use them together with plain weights",
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization scheme: the name suffix of scales, and the box that shares one scale (None: one scale per row).

    With `exponents`, scales are powers of 2 and only their exponents are stored: UE8M0.
    """

    name: str
    suffix: str
    block: Block | None
    exponents: bool = False

    def find_scale_shape(self, shape: Shape) -> Shape | None:
        """Return the shape of the scales of a matrix; None if the boxes do not divide the matrix.

        Loaders disagree about smaller boxes at the edges: transformers computes the box size as rows divided by rows of
        scales.
        """
        rows, columns = shape
        box_rows, box_columns = self.box_shape(shape)
        return (rows // box_rows, columns // box_columns) if rows % box_rows == columns % box_columns == 0 else None

    def box_shape(self, shape: Shape) -> Block:
        """Return the rows and columns that share one scale in a matrix of this shape."""
        return self.block or (1, shape[1])

    def scale_dtype(self, dtype: DType) -> DType:
        if self.exponents:
            return DTYPES["float8_e8m0fnu"]
        is_half = self.block is None and dtype.name == "bfloat16"
        return DTYPES["bfloat16" if is_half else "float32"]

    def quantization_config(self, unquantized: Sequence[str]) -> Mapping[str, Any]:
        """Return the `quantization_config` for config.json; the modules in `unquantized` are unquantized."""
        if self.block is not None:  # the entries of transformers' `FineGrainedFP8Config`, which vLLM reads too
            config = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                "modules_to_not_convert": list(unquantized),
            }
            return {**config, "scale_fmt": "ue8m0"} if self.exponents else config
        # the entries of compressed-tensors, with one scale per weight row and per input token
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**common, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [rf"re:{re.escape(name)}\..*" if name.endswith(f".{_EXPERTS}") else name for name in unquantized],
        }


_BLOCK = (128, 128)
_SCHEMES = (
    Scheme("fp8-block", "_scale_inv", _BLOCK),
    Scheme("fp8-channel", "_scale", None),
    Scheme("fp8-block-ue8m0", "_scale_inv", _BLOCK, exponents=True),
)
SCHEMES = {scheme.name: scheme for scheme in _SCHEMES}


@dataclass(frozen=True, slots=True)
class ChosenWeights:
    """The linear-layer weights to quantize, and the reasons why others stay unquantized, by name."""

    names: tuple[str, ...]
    left: Mapping[str, str]

    @property
    def unquantized_names_by_reason(self) -> Mapping[str, Sequence[str]]:
        ordered = sorted(self.left, key=lambda name: (self.left[name], name))
        return {reason: list(names) for reason, names in groupby(ordered, self.left.__getitem__)}


def choose_weights(
    specs: Mapping[str, Spec], linear: Iterable[str], kept: Iterable[str], scheme: Scheme, excluded: Collection[str]
) -> ChosenWeights:
    """Choose among the weights of `linear` layers; loaders expect the weights in `kept` unquantized.

    The weights in `excluded` stay unquantized, and so do weights that must be treated alike.
    """
    names = [name for name in linear if name in specs]
    kept = set(kept)
    skipped = {
        name: reason for name in names if (reason := find_reason_unquantized(name, specs[name], kept, scheme, excluded))
    }
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[weight_group_of(name)].append(name)
    for group in groups.values():
        if any(name in skipped for name in group):
            skipped |= {name: ALONE for name in group if name not in skipped}
    return ChosenWeights(tuple(name for name in names if name not in skipped), skipped)


def find_reason_unquantized(
    name: str, spec: Spec, kept: set[str], scheme: Scheme, excluded: Collection[str]
) -> str | None:
    """Return why a weight stays unquantized; None if it can be quantized. Raises `Unsupported` if it is not float."""
    parts = name.split(".")
    if spec.dtype.kind != "float":
        raise Unsupported(f"expected floats as the weight of a linear layer, found {spec}", tensor=name)
    if name in kept or len(spec.shape) != 2 or 0 in spec.shape or not name.endswith(".weight"):
        return HEADS
    if parts[-2] in _ROUTERS or not set(parts).isdisjoint(_TOWERS):
        return HEADS
    if name in excluded:
        return ASKED
    return None if scheme.find_scale_shape(spec.shape) else RAGGED


def matches_tensor(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name.removesuffix(".weight"), glob)


def excluded_names(
    options: ConvertOptions, source_names_by_weight: Mapping[str, Collection[str]], path: Path
) -> set[str]:
    """Return the weights that a glob of `--exclude-quantize` matches, by their names in the source, else in the output.

    `source_names_by_weight` gives the names in the source that each weight is made of. In the output, the name of a
    module matches, too. Raises `Usage` for a glob that matches none.
    """
    excluded: set[str] = set()
    for glob in options.exclude_quantize:
        matched = {name for name, olds in source_names_by_weight.items() if any(fnmatchcase(old, glob) for old in olds)}
        matched = matched or {name for name in source_names_by_weight if matches_tensor(name, glob)}
        if not matched:
            what = "weight of a linear layer"
            options.edits.require_matches(
                "--exclude-quantize", [glob], source_names_by_weight, path, is_match=matches_tensor, what=what
            )
        excluded |= matched
    return excluded


def weight_group_of(name: str) -> str:
    """Return the group of a weight. All weights of a group are quantized, or none."""
    parts = name.split(".")
    if _EXPERTS in parts:
        return ".".join(parts[: parts.index(_EXPERTS) + 1])
    joined = next((group for group in _JOINED if parts[-2:-1] and parts[-2] in group), None)
    return name if joined is None else ".".join([*parts[:-2], "+".join(joined)])


def module_names_of(names: Iterable[str]) -> list[str]:
    """Return the module names to list as unquantized in the config; the experts of a layer are one entry."""
    parts = (name.split(".") for name in names)
    return sorted({".".join(part[: part.index(_EXPERTS) + 1] if _EXPERTS in part else part[:-1]) for part in parts})


_NUMBERS = DTYPES["float8_e4m3fn"]
_MOST_AT_HAND = 1 << 28  # bytes in memory for one row of boxes


def quantize(model: Model, options: ConvertOptions) -> Model:
    """Return the model with 8-bit weights and scales in its linear layers.

    The recipes read the weights in their stored dtypes from an additional source. Raises `Unsupported` if it is unknown
    which layers are linear, or if no weight can be quantized.
    """
    assert options.quantize is not None
    if not isinstance(model.expected, Form):
        reason = model.expected
        install = "pip install transformers, which knows most types of models"
        message = f"ckptkit does not know which layers are linear{f': {reason.message}' if reason else ''}"
        raise Unsupported(message, path=model.companions.found_in, hint=(reason and reason.hint) or install)
    form, scheme = model.expected, SCHEMES[options.quantize]
    linear = expected_model(model.config).linear_layers(form)
    names = [name for name in linear.names if name in model.layout.tensors]
    excluded = excluded_names(options, model.weights.origins_by_name(names), model.part.path)
    chosen = choose_weights(model.layout.specs, linear.names, linear.kept, scheme, excluded)
    if not chosen.names:
        why = "; ".join(
            f"skipped {len(names)} because {reason}" for reason, names in chosen.unquantized_names_by_reason.items()
        )
        hint = (
            "pass --quantize fp8-channel, which has one scale per row"
            if RAGGED in chosen.unquantized_names_by_reason
            else None
        )
        message = f"no weight can be quantized: {why or 'found no linear layer'}"
        raise Unsupported(message, path=model.layout.path, hint=hint)
    source = select_weights_in_stored_dtypes(model.layout, chosen)
    quantized_layout = with_scales(model.layout, chosen, scheme)
    # matrices that stay, by their names in the files and in memory: loaders differ in which they look for
    quantized = set(chosen.names)
    remaining = [name for name, spec in model.layout.specs.items() if len(spec.shape) > 1 and name not in quantized]
    remaining += [name for name in form.tied if len(form.shapes.get(name, ())) > 1]
    remaining += [old for name in remaining for old in form.came_from.get(name, ())]
    config = {**model.config, KEYS[0]: scheme.quantization_config(module_names_of(remaining))}
    recipes = quantization_recipes(source, quantized_layout, chosen, scheme, len(model.others) + 1)
    casts = {name: f"{source.tensors[name].spec.dtype} => {_NUMBERS} times scales" for name in chosen.names}
    model = replace(
        model.with_config(config).with_layout(quantized_layout),
        others=(*model.others, source),
        recipes={**model.recipes, **recipes},
        casts={**model.casts, **casts},
    )
    return model.with_remarks(*remarks_on_quantization(source, chosen, scheme))


def select_weights_in_stored_dtypes(layout: Layout, chosen: ChosenWeights) -> Layout:
    """Return the chosen weights in their stored dtypes, so that quantizing rounds them only once."""

    def stored(name: str, spec: Spec) -> DType:
        dtypes = {chunk.dtype for chunk in layout.tensors[name].chunks}
        return dtypes.pop() if len(dtypes) == 1 else spec.dtype

    selected = edits.select_entries(layout, set(chosen.names).__contains__)
    return replace(edits.cast_tensors(selected, stored), blobs={}, twins={})


def with_scales(layout: Layout, chosen: ChosenWeights, scheme: Scheme) -> Layout:
    """Return a layout with quantized weights and scales for the chosen matrices, without data yet."""
    tensors: dict[str, StoredTensor] = {}
    names = set(chosen.names)
    for name, tensor in layout.tensors.items():
        if name not in names:
            tensors[name] = tensor
            continue
        shape = tensor.spec.shape
        scales = scheme.find_scale_shape(shape)
        assert scales is not None
        tensors[name] = StoredTensor(Spec(_NUMBERS, shape), ())
        tensors[name + scheme.suffix] = StoredTensor(Spec(scheme.scale_dtype(tensor.spec.dtype), scales), ())
    return replace(layout, tensors=tensors)


def quantization_recipes(
    source: Layout, made: Layout, chosen: ChosenWeights, scheme: Scheme, source_index: int
) -> dict[str, RecipeFor]:
    """Return the recipes of quantized weights and scales; their operands are in source `source_index`."""
    from ckptkit.plugins.quantize import quantized_blocks as blocks  # imports numpy, which no copy needs

    recipes: dict[str, RecipeFor] = {}
    for name in chosen.names:
        spec, scales = source.tensors[name].spec, name + scheme.suffix
        rows, columns = spec.shape
        matrix = blocks.Matrix(Operand(source_index, name, spec.dtype), rows, columns)
        grid = blocks.Grid(*scheme.box_shape(spec.shape), made.tensors[scales].spec.dtype, scheme.block is None)
        if grid.rows * columns * spec.dtype.itemsize > _MOST_AT_HAND:
            size = (
                f"{grid.rows} rows of {count(columns, 'number')} ({grid.rows * columns * spec.dtype.itemsize:,} bytes)"
            )
            message = f"expected blocks of at most {_MOST_AT_HAND:,} bytes, found {size}"
            raise Unsupported(message, path=source.root, tensor=name)
        recipes[name] = recipe_for_any_tensor(blocks.QuantizedValues(matrix, grid))
        recipes[scales] = recipe_for_any_tensor(blocks.Scales(matrix, grid))
    return recipes


def remarks_on_quantization(source: Layout, chosen: ChosenWeights, scheme: Scheme) -> list[str]:
    numbers = sum(source.tensors[name].spec.numel for name in chosen.names)
    weights = f"{count(len(chosen.names), 'weight')}, {count(numbers, 'parameter')}"
    notes = [f"quantized {weights}, as {scheme.name}; config.json describes it"]
    for reason, names in chosen.unquantized_names_by_reason.items():
        weights = count(len(names), "weight")
        notes.append(f"did not quantize {weights} of linear layers because {reason}: {join_few_names(names)}")
    return notes
