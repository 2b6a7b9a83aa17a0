"""A quantized weight: its tensors, its plain shape, how ckptkit computes it, and which tensors are its scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.errors import Mismatch
from ckptkit.layout import Spec
from ckptkit.layout.box import Shape
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.state.quantized.config import QuantizationConfig

BLOCKS, _PACKED = "_blocks", "_packed"  # suffixes of packed tensors' names
_SUFFIXES = ("_scale_inv", "_scale")
_WEIGHT, _OF_MODULE = ".weight", ".scale"  # DeepSeek V4 has the scales of `X.weight` in `X.scale`
_EXPONENTS = ("float8_e8m0fnu", "uint8")  # dtypes of scales that are powers of 2


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized weight: the `method` that quantized it, and its plain `shape`.

    `beside` are the names of the other tensors that it is computed from. `group` is the (rows, columns) that share one
    scale, () for a single scale. `make` returns the recipe of the plain weight; its operands are the numbers and the
    tensors in `beside`, in this order, in the dtypes in which they are stored.
    """

    method: str
    shape: Shape
    beside: tuple[str, ...]
    group: Shape
    make: Callable[[Sequence[Operand]], Recipe]


Specs = Mapping[str, Spec]
Finder = Callable[
    [Specs, QuantizationConfig], Iterator[tuple[str, Packed]]
]  # yields weights by the names of their numbers


def dequantized_name(name: str) -> str:
    return name.removesuffix(BLOCKS).removesuffix(_PACKED)


def have_matching_new_names(names: Sequence[str], new_names: Sequence[str | None]) -> bool:
    """Return whether the tensors of one weight get new names that still match each other, or none of them gets one."""
    if None in new_names:
        return all(new is None for new in new_names)
    alike = (len(set(letters)) == 1 for letters in zip(*names, strict=False))
    stem = next((at for at, same in enumerate(alike) if not same), min(map(len, names)))
    pairs = [(str(new), name[stem:]) for name, new in zip(names, new_names, strict=True)]
    return all(new.endswith(end) for new, end in pairs) and len({new.removesuffix(end) for new, end in pairs}) == 1


def find_scale_name(name: str, specs: Specs) -> str | None:
    """Return the name of the tensor with the scales of another tensor; None without scales."""
    names = [name + suffix for suffix in _SUFFIXES]
    if name.endswith(_WEIGHT):
        names.append(name.removesuffix(_WEIGHT) + _OF_MODULE)
    return next((one for one in names if one in specs), None)


def is_exponent_dtype(spec: Spec) -> bool:
    return spec.dtype.name in _EXPONENTS


def partner_mismatch_error(name: str, expected: object, found: object) -> Mismatch:
    """Return the error for scales or zero points that do not fit the quantized weight."""
    hint = "check that no file is missing or from another model"
    return Mismatch(f"expected {expected}, found {found}", tensor=name, hint=hint)


def require_partner_shape(specs: Specs, name: str, shape: Shape, what: str) -> None:
    """Raise `Mismatch` for a related tensor whose shape does not fit the numbers of a weight."""
    actual = specs[name].shape
    if actual != shape:
        raise partner_mismatch_error(name, f"{what} {list(shape)}", list(actual))
