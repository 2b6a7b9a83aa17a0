"""Find the quantized weights of a checkpoint and their scales, by names, dtypes, shapes and config.json.

The modules in `stored` know the storage schemes, one module each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptkit.checkpoints.component import Component
from ckptkit.entry_points import import_object
from ckptkit.errors import Corrupt, Mismatch, Unsupported, errors_at
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import Shape
from ckptkit.models.companions import find_model_config
from ckptkit.state.quantized.config import (
    OF_MLX,
    OF_WEIGHTS,
    QuantizationConfig,
    is_declared_quantized,
    may_be_quantized_dtype,
    may_be_quantized_model,
    quantization_section,
    read_quantization_config,
)
from ckptkit.state.quantized.packed import BLOCKS, Finder, Packed
from ckptkit.state.quantized.stored import SCHEMES
from ckptkit.state.quantized.stored.affine import SCALES
from ckptkit.state.quantized.stored.floats8 import is_float8_weight
from ckptkit.state.quantized.stored.integers import PACKED


@dataclass(frozen=True, slots=True)
class InspectedQuantized:
    """A summary of quantized weights: the method, counts, and the sizes of the blocks that share one scale.

    A size is () if one scale is for the whole weight. `stored` is the number of elements of all tensors that store the
    weights. `refusal` says why `--dtype` cannot make plain weights of them, None if it can.
    """

    method: str
    weights: int
    parameters: int
    stored: int
    sizes: tuple[Shape, ...]
    refusal: str | None


def inspect_quantized(component: Component) -> InspectedQuantized | None:
    """Return a summary of the quantized weights in the model's component; None without any."""
    try:
        quantized = find_quantized(component.layout, find_model_config(component.path))
    except (Corrupt, Mismatch, Unsupported) as error:
        where = f"`{error.tensor}`: " if error.tensor else ""
        return InspectedQuantized("unknown", 0, 0, 0, (), f"{where}{error.message}")
    if quantized is None:
        return None
    weights, tensors = quantized.weights, quantized.layout.tensors
    return InspectedQuantized(
        method=quantized.method,
        weights=len(weights),
        parameters=sum(prod(packed.shape) for packed in weights.values()),
        stored=sum(tensors[name].spec.numel for name in quantized.members) if weights else 0,
        sizes=tuple(sorted({packed.group for packed in weights.values()})),
        refusal=quantized.refusal,
    )


# Names of related tensors by which ckptkit recognizes unsupported quantization.
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


def find_unsupported_quantized(specs: Mapping[str, Spec]) -> tuple[str, frozenset[str]] | None:
    """Return the method of weights that ckptkit cannot dequantize, and the tensors of these modules except biases."""
    marked: dict[str, str] = {}
    for name in specs:
        method = find_method_in_name(name, specs)
        if method is not None:
            marked[module_of_tensor(name)] = method
    if not marked:
        return None
    members = frozenset(name for name in specs if module_of_tensor(name) in marked and not name.endswith(".bias"))
    return next(iter(marked.values())), members


def find_method_in_name(name: str, specs: Mapping[str, Spec]) -> str | None:
    """Return the method that a tensor's name reveals; None for any other name."""
    by_infix = next((method for infix, method in _BY_INFIX.items() if infix in name), None)
    by_suffix = next((method for suffix, method in _BY_SUFFIX.items() if name.endswith(suffix)), None)
    if by_infix or by_suffix:
        return by_infix or by_suffix
    module = name.removesuffix(_ZEROS)
    numbers = next((specs[one] for one in (f"{module}.weight_packed", f"{module}.weight") if one in specs), None)
    is_of_floats = module != name and numbers is not None and numbers.dtype.name not in ("int32", "int8")
    return _OF_FLOATS if is_of_floats else None


def module_of_tensor(name: str) -> str:
    before, separator, _ = name.partition(".weight.")
    return before if separator else name.rpartition(".")[0].partition("._weight")[0]


_OF_MODULE = ".scale"
_BESIDE = (
    *(".input_scale", ".output_scale", ".activation_scale", ".q_scale", ".k_scale", ".v_scale"),
    *(".input_global_scale", ".input_zero_point", ".output_zero_point", ".weight_shape"),
)


@dataclass(frozen=True, slots=True)
class Quantized:
    """The quantized weights of a checkpoint, by the names of the tensors with their numbers.

    `members` are all tensors that are useless without others: numbers, scales, and related tensors. `refusal` says why
    ckptkit cannot compute the weights, None if it can.
    """

    layout: Layout
    method: str
    weights: Mapping[str, Packed] = field(default_factory=dict)
    members: frozenset[str] = frozenset()
    refusal: str | None = None

    def require_supported(self) -> None:
        """Raise `Unsupported` for weights that ckptkit cannot compute."""
        if self.refusal is not None:
            hint = "drop --dtype to copy them unchanged, or dequantize them with the library that quantized them"
            raise Unsupported(self.refusal, path=self.layout.path, tensor=min(self.members), hint=hint)


def find_quantized(layout: Layout, config: Mapping[str, Any] | None) -> Quantized | None:
    """Return the quantized weights in a checkpoint with any names; None without any.

    Raises `Mismatch` for scales that are missing or do not fit, `Corrupt` for an invalid config.
    """
    specs = layout.specs
    if not (may_be_quantized_model(specs) or is_declared_quantized(config or {})):
        return None
    added = {scheme.method for scheme in SCHEMES.values()} - {""}
    is_added = (quantization_section(config or {}) or {}).get("quant_method") in added
    # first, because the tensors of unsupported methods can look like supported ones
    if not is_added and (foreign := find_unsupported_quantized(specs)):
        method, members = foreign
        return Quantized(layout, method, members=members, refusal=f"the weights are quantized by {method}")
    stated = read_quantization_config(config)
    if not (stated.is_supported or is_added):
        if has_no_quantized_tensor(specs):
            return None
        refusal = (
            f"config.json says that the weights are quantized by `{stated.description}`, which ckptkit does not know"
        )
        return Quantized(layout, stated.description, members=frozenset(specs), refusal=refusal)  # any tensor may be one
    with errors_at(path=layout.path):
        finders: list[Finder] = [import_object(scheme.find) for scheme in SCHEMES.values()]
        weights = {name: packed for find in finders for name, packed in find(specs, stated)}
    if not weights and not (
        stated.method
        and any(needs_scales(name, spec, stated) or are_scales(name, spec, stated) for name, spec in specs.items())
    ):
        return None
    beside = {name for packed in weights.values() for name in packed.beside}
    check_weights_have_scales(layout, weights.keys() | beside, stated)
    beside |= {name for name in specs if name.endswith(_BESIDE)}
    method = " and ".join(dict.fromkeys(packed.method for packed in weights.values()))
    return Quantized(layout, method, weights, frozenset(weights.keys() | beside))


def has_no_quantized_tensor(specs: Mapping[str, Spec]) -> bool:
    """Return whether no tensor is quantized, regardless of the config: there are neither packed numbers nor scales."""
    has_packed = any(may_be_quantized_dtype(spec) and len(spec.shape) > 1 for spec in specs.values())
    return not (has_packed or find_unsupported_quantized(specs) or any(name.endswith(OF_WEIGHTS) for name in specs))


def needs_scales(name: str, spec: Spec, stated: QuantizationConfig) -> bool:
    """Return whether a tensor contains numbers that need scales; in a quantized model, each integer matrix does."""
    is_block = name.endswith(BLOCKS) and spec.dtype.name == "uint8"
    is_matrix = name.endswith(".weight") and len(spec.shape) > 1 and may_be_quantized_dtype(spec)
    is_packed = stated.method is not None and is_matrix and not is_float8_weight(spec)
    of_eight = is_float8_weight(spec) and not are_scales(name, spec, stated)
    return of_eight or is_block or is_packed or name.endswith(PACKED)


def are_scales(name: str, spec: Spec, stated: QuantizationConfig) -> bool:
    is_of_module = name.endswith(_OF_MODULE) and spec.dtype.name == "float8_e8m0fnu"
    return name.endswith(OF_WEIGHTS) or is_of_module or (stated.method == OF_MLX and name.endswith(SCALES))


def check_weights_have_scales(layout: Layout, taken: set[str], stated: QuantizationConfig) -> None:
    """Raise `Mismatch` for a quantized weight without scales, or scales without a weight, except those in `taken`."""
    specs, hint = layout.specs, "check that no file of the model is missing"
    rest = {name: spec for name, spec in specs.items() if name not in taken}
    alone = min((name for name, spec in rest.items() if needs_scales(name, spec, stated)), default=None)
    if alone is not None:
        message = f"expected scales for these {specs[alone]} weights, found none"
        raise Mismatch(message, path=layout.path, tensor=alone, hint=hint)
    orphan = min((name for name, spec in rest.items() if are_scales(name, spec, stated)), default=None)
    if orphan is not None:
        weight = f"{orphan.rpartition('.')[0]}.weight"
        message = f"these scales belong to no quantized weight: `{weight}` is {specs.get(weight, 'missing')}"
        raise Mismatch(message, path=layout.path, tensor=orphan, hint=hint)
