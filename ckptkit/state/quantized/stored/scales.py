"""Find the scales of a weight, and check their number and dtype."""

from __future__ import annotations

from ckptkit.errors import Mismatch
from ckptkit.layout import Spec
from ckptkit.layout.box import Shape
from ckptkit.state.quantized.packed import Specs

_SUFFIXES = ("_scale_inv", "_scale")
_WEIGHT, _OF_MODULE = ".weight", ".scale"  # DeepSeek V4 has the scales of `X.weight` in `X.scale`
EXPONENTS = ("float8_e8m0fnu", "uint8")  # dtypes of scales that are powers of 2


def find_scale_name(name: str, specs: Specs) -> str | None:
    """Return the name of the tensor with the scales of another tensor; None without scales."""
    names = [name + suffix for suffix in _SUFFIXES]
    if name.endswith(_WEIGHT):
        names.append(name.removesuffix(_WEIGHT) + _OF_MODULE)
    return next((one for one in names if one in specs), None)


def is_exponent_dtype(spec: Spec) -> bool:
    return spec.dtype.name in EXPONENTS


def partner_mismatch_error(name: str, expected: object, found: object) -> Mismatch:
    """Return the error for scales or zero points that do not fit the quantized weight."""
    hint = "check that no file is missing or from another model"
    return Mismatch(f"expected {expected}, found {found}", tensor=name, hint=hint)


def require_partner_shape(specs: Specs, name: str, shape: Shape, what: str) -> None:
    """Raise `Mismatch` for a related tensor whose shape does not fit the numbers of a weight."""
    actual = specs[name].shape
    if actual != shape:
        raise partner_mismatch_error(name, f"{what} {list(shape)}", list(actual))
