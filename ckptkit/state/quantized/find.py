"""Find the quantized weights of a checkpoint and their scales, by names, dtypes, shapes and config.json.

And sum them up.

How each way of storing them looks, `stored` says, a module each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptkit.checkpoints.component import Component
from ckptkit.entry_points import load
from ckptkit.errors import CkptError, Corrupt, Mismatch, Unsupported
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import Shape
from ckptkit.models.companions import find_config
from ckptkit.state.quantized.config import (
    OF_MLX,
    OF_WEIGHTS,
    QuantizationConfig,
    may_be_packed,
    may_hold_quantized,
    read_quantization_config,
)
from ckptkit.state.quantized.packed import BLOCKS, Finder, Packed
from ckptkit.state.quantized.stored.affine import SCALES
from ckptkit.state.quantized.stored.floats8 import is_eight_bits
from ckptkit.state.quantized.stored.integers import PACKED
from ckptkit.state.quantized.stored.table import SCHEMES


@dataclass(frozen=True, slots=True)
class InspectedQuantized:
    """Quantized weights at a glance: the method, and the boxes of a weight that have one scale, each size once.

    The size is () where one is for the whole weight. `stored` are the elements of all tensors that they are kept in.
    `refusal` says why `--dtype` cannot make plain weights of them,
    None if it can.
    """

    method: str
    weights: int
    parameters: int
    stored: int
    sizes: tuple[Shape, ...]
    refusal: str | None


def inspect_quantized(part: Component) -> InspectedQuantized | None:
    """Return what is quantized in the part with the model; None where nothing is."""
    try:
        found = find_quantized(part.layout, find_config(part.path))
    except (Corrupt, Mismatch, Unsupported) as error:
        where = f"`{error.tensor}`: " if error.tensor else ""
        return InspectedQuantized("unknown", 0, 0, 0, (), f"{where}{error.message}")
    return look(found) if found else None


def look(found: Quantized) -> InspectedQuantized:
    """Look at quantized weights."""
    sizes = tuple(sorted({packed.group for packed in found.weights.values()}))
    stored = sum(found.layout.tensors[name].spec.numel for name in found.members) if found.weights else 0
    return InspectedQuantized(found.method, len(found.weights), found.parameters, stored, sizes, found.refusal)


# Recognize quantized weights that ckptkit does not support, by the names of the tensors beside them.
#
# Sources: bitsandbytes/functional.py (QuantState.as_dict), the state dicts of GPTQModel and AutoAWQ,
# torchao/prototype/safetensors, compressed_tensors/compressors, NVIDIA's ModelOpt.
_BY_INFIX = {".quant_state.bitsandbytes__": "bitsandbytes in 4 bits"}
_BY_SUFFIX = {
    ".SCB": "bitsandbytes in 8 bits",
    ".qweight": "GPTQ or AWQ",
    "._weight_qdata": "torchao",
    ":_data": "torchao",
    ".weight_g_idx": "compressed-tensors with columns in another order (g_idx)",
    ".bitmask": "compressed-tensors, with sparse weights",
    ".pre_quant_scale": "ModelOpt with AWQ",
    ".W_q": "HQQ",
    ".codebooks": "AQLM",
}
_ZEROS, _OF_FLOATS = ".weight_zero_point", "compressed-tensors with zero points of floats"


def find_foreign(specs: Mapping[str, Spec]) -> tuple[str, frozenset[str]] | None:
    """Return how weights are quantized that are not computed here, and all tensors of these modules; None without any.

    Biases are plain numbers, whatever the weight is.
    """
    marked: dict[str, str] = {}
    for name in specs:
        method = method_of(name, specs)
        if method is not None:
            marked[module_of(name)] = method
    if not marked:
        return None
    members = frozenset(name for name in specs if module_of(name) in marked and not name.endswith(".bias"))
    return next(iter(marked.values())), members


def method_of(name: str, specs: Mapping[str, Spec]) -> str | None:
    """Return the method that leaves a tensor of this name; None for any other."""
    by_infix = next((method for infix, method in _BY_INFIX.items() if infix in name), None)
    by_suffix = next((method for suffix, method in _BY_SUFFIX.items() if name.endswith(suffix)), None)
    if by_infix or by_suffix:
        return by_infix or by_suffix
    module = name.removesuffix(_ZEROS)
    numbers = next((specs[one] for one in (f"{module}.weight_packed", f"{module}.weight") if one in specs), None)
    is_of_floats = module != name and numbers is not None and numbers.dtype.name not in ("int32", "int8")
    return _OF_FLOATS if is_of_floats else None


def module_of(name: str) -> str:
    before, found, _ = name.partition(".weight.")
    return before if found else name.rpartition(".")[0].partition("._weight")[0]


_OF_MODULE = ".scale"
_BESIDE = (
    *(".input_scale", ".output_scale", ".activation_scale", ".q_scale", ".k_scale", ".v_scale"),
    *(".input_global_scale", ".input_zero_point", ".output_zero_point", ".weight_shape"),
)


@dataclass(frozen=True, slots=True)
class Quantized:
    """The quantized weights of a checkpoint by the names of the tensors that hold their numbers.

    `members` are all tensors that mean nothing without others: numbers, scales, and what else lies beside them.
    `refusal` says why the weights cannot be computed, where they cannot.
    """

    layout: Layout
    method: str
    weights: Mapping[str, Packed] = field(default_factory=dict)
    members: frozenset[str] = frozenset()
    refusal: str | None = None

    @property
    def parameters(self) -> int:
        return sum(prod(packed.shape) for packed in self.weights.values())

    def require_known(self) -> None:
        """Raise `Unsupported` for weights that cannot be computed."""
        if self.refusal is not None:
            hint = "drop --dtype to copy them unchanged, or dequantize them with the library that quantized them"
            raise Unsupported(self.refusal, path=self.layout.path, tensor=min(self.members), hint=hint)


def find_quantized(layout: Layout, config: Mapping[str, Any] | None) -> Quantized | None:
    """Return the quantized weights in a checkpoint, by any names; None without any.

    Raises `Mismatch` for scales that are missing or do not fit, `Corrupt` for a config that cannot be so.
    """
    specs = layout.specs
    if not may_hold_quantized(specs, config or {}):
        return None
    foreign = find_foreign(specs)
    if foreign is not None:
        method, members = foreign
        return Quantized(layout, method, members=members, refusal=f"the weights are quantized by {method}")
    stated = read_quantization_config(config)
    if not stated.is_known:
        return None if is_plain(specs) else unknown(layout, stated)
    try:
        finders: list[Finder] = [load(scheme.find) for scheme in SCHEMES.values()]
        weights = {name: packed for find in finders for name, packed in find(specs, stated)}
    except CkptError as error:
        raise error.blame(path=layout.path) from None
    if not (weights or (stated.method and any(is_half(name, spec, stated) for name, spec in specs.items()))):
        return None
    beside = {name for packed in weights.values() for name in packed.beside}
    check_partners(layout, weights.keys() | beside, stated)
    beside |= {name for name in specs if name.endswith(_BESIDE)}
    method = " and ".join(dict.fromkeys(packed.method for packed in weights.values()))
    return Quantized(layout, method, weights, frozenset(weights.keys() | beside))


def is_plain(specs: Mapping[str, Spec]) -> bool:
    """Return whether there is nothing quantized among tensors, whatever a config says: neither numbers nor scales."""
    has_packed = any(may_be_packed(spec) and len(spec.shape) > 1 for spec in specs.values())
    return not (has_packed or find_foreign(specs) or any(name.endswith(OF_WEIGHTS) for name in specs))


def unknown(layout: Layout, stated: QuantizationConfig) -> Quantized:
    """Return weights that config.json says are quantized in some way not known here: any tensor may belong to them."""
    names = frozenset(layout.tensors)
    refusal = f"config.json says that the weights are quantized by `{stated.words}`, which ckptkit does not know"
    return Quantized(layout, stated.words, members=names, refusal=refusal)


def is_half(name: str, spec: Spec, stated: QuantizationConfig) -> bool:
    """Return whether a tensor means nothing without another: numbers without scales, or scales."""
    return are_numbers(name, spec, stated) or are_scales(name, spec, stated)


def are_numbers(name: str, spec: Spec, stated: QuantizationConfig) -> bool:
    """Return whether a tensor is numbers that need scales: of a quantized model, each matrix of whole numbers."""
    is_block = name.endswith(BLOCKS) and spec.dtype.name == "uint8"
    is_matrix = name.endswith(".weight") and len(spec.shape) > 1 and may_be_packed(spec)
    is_packed = stated.method is not None and is_matrix and not is_eight_bits(spec)
    of_eight = is_eight_bits(spec) and not are_scales(name, spec, stated)
    return of_eight or is_block or is_packed or name.endswith(PACKED)


def are_scales(name: str, spec: Spec, stated: QuantizationConfig) -> bool:
    """Return whether a tensor is scales that need numbers."""
    is_of_module = name.endswith(_OF_MODULE) and spec.dtype.name == "float8_e8m0fnu"
    return name.endswith(OF_WEIGHTS) or is_of_module or (stated.method == OF_MLX and name.endswith(SCALES))


def check_partners(layout: Layout, taken: set[str], stated: QuantizationConfig) -> None:
    """Raise `Mismatch` for a quantized weight without scales, or scales without a weight, but for those `taken`."""
    specs, hint = layout.specs, "check that no file of the model is missing"
    rest = {name: spec for name, spec in specs.items() if name not in taken}
    alone = min((name for name, spec in rest.items() if are_numbers(name, spec, stated)), default=None)
    if alone is not None:
        raise Mismatch(
            f"expected scales for these {specs[alone]} weights, found none", path=layout.path, tensor=alone, hint=hint
        )
    orphan = min((name for name, spec in rest.items() if are_scales(name, spec, stated)), default=None)
    if orphan is not None:
        weight = f"{orphan.rpartition('.')[0]}.weight"
        found = specs.get(weight, "missing")
        raise Mismatch(
            f"these scales belong to no quantized weight: `{weight}` is {found}",
            path=layout.path,
            tensor=orphan,
            hint=hint,
        )
