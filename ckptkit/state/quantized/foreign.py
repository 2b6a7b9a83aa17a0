"""Recognize quantized weights that ckptkit does not support, by the names of the tensors beside them.

Sources: bitsandbytes/functional.py (QuantState.as_dict), the state dicts of GPTQModel and AutoAWQ,
torchao/prototype/safetensors, compressed_tensors/compressors, NVIDIA's ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptkit.layout import Spec

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
