"""Read which tensor a pickle describes: torch's call that rebuilds it, as inert data that never runs.

Source: torch/_utils.py, torch/_tensor.py and torch/serialization.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.layout.box import Shape
from ckptkit.layout.dtypes import DTYPES, DType

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_REBUILDS = (*_TENSORS, *_PARAMETERS)
_TENSOR_CALLS = tuple(Global("torch._utils", name) for name in _TENSORS)
_PARAMETER_CALLS = tuple(Global("torch._utils", name) for name in _PARAMETERS)
_SIZE = Global("torch", "Size")
REBUILD_OF_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_PLAIN_TYPES = (
    Global("torch", "Tensor"),
    Global("torch.nn.parameter", "Parameter"),
    Global("torch.nn.parameter", "Buffer"),
)
_REFUSED = {
    "_rebuild_qtensor": "quantized",
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, without data",
    "_rebuild_wrapper_subclass": "a tensor subclass",
    "_rebuild_from_type_v2": "a tensor subclass",
}
# torchao's parameters that are quantized only during computation: the attribute with the unquantized tensor
_HOLDERS = {
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "WeightWithDelayedFloat8CastTensor": "_tensor",
    "WeightWithStaticFloat8CastTensor": "_tensor",
    "ScaledGroupedMMTensor": "_data",
    "Float8TrainingWeightWrapperTensor": "_data",
    "MXFP8TrainingWeightWrapperTensor": "_data",
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
}
_WRAPPING = ("torchao", "transformer_engine")  # packages of tensor classes, which are never imported
OR_EXCLUDE = ", or drop the entry with --exclude"
_MADE_ANEW = "._make_in_reduce_ex"  # the function with which Transformer Engine rebuilds a tensor
_NAMES_BY_MODULE = {
    "torch": (
        *(*DTYPES, *STORAGES, "QUInt8Storage", "QInt8Storage", "QInt32Storage"),
        *("Size", "device", "Tensor", "strided", "per_tensor_affine", "per_channel_affine"),
    ),
    "torch._utils": (*_REBUILDS, *_REFUSED),
    "torch._tensor": ("_rebuild_from_type_v2",),
    "torch.storage": ("UntypedStorage",),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    # for nested classes; a call of it is a name
    "builtins": ("getattr",),
    "__builtin__": ("getattr",),
}


class _Names:
    """The names that the pickle of one tensor may contain."""

    def __contains__(self, name: object) -> bool:
        match name:
            case (str(module), str(known)):
                return module.partition(".")[0] in _WRAPPING or known in _NAMES_BY_MODULE.get(module, ())
        return False


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as `data.pkl` describes it: a view of storage `key`, with offset and strides in elements."""

    key: str
    dtype: DType
    offset: int
    shape: Shape
    strides: Shape

    @property
    def numel_spanned(self) -> int:
        """Return the number of storage elements from the tensor's first to its last element, inclusive."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_row_major(self) -> bool:
        """Return True if the elements are contiguous in row-major order."""
        expected = prod(self.shape)
        for n, stride in zip(self.shape, self.strides, strict=True):
            expected //= n or 1
            if n > 1 and stride != expected:
                return False
        return True


@lru_cache(maxsize=256)
def parse_tensor(data: bytes) -> TensorRecord:
    """Return the tensor that a `data.pkl` describes. Cached, since chunks of one shape have equal pickles."""
    value, _ = inert_pickle.load(data, _Names())
    return as_tensor_record(value)


def is_pickled_tensor(value: object) -> bool:
    """Return True if a function of torch that rebuilds tensors, known to ckptkit or not, would have made `value`."""
    return (
        isinstance(value, Record)
        and isinstance(value.of, Global)
        and (
            (value.of.module in ("torch._utils", "torch._tensor") and value.of.name.startswith("_rebuild"))
            or value.of.name.endswith(_MADE_ANEW)
        )
    )


def is_pickled_tensor_of_class(value: object, name: str, modules: str | tuple[str, ...]) -> bool:
    """Return True for a pickled tensor of the subclass `name` in a module whose name begins with one of `modules`."""
    match value:
        case Record(of=of, args=(_, Global() as kind, *_)) if of == REBUILD_OF_TYPE:
            return kind.name == name and kind.module.startswith(modules)
    return False


def as_tensor_record(value: object) -> TensorRecord:
    """Return the tensor of a pickled value. Raises `Unsupported` for any other kind of object."""
    call = unwrap_tensor_call(value)
    if not isinstance(call, Record) or call.of not in _TENSOR_CALLS:
        made_by = call.of.name if isinstance(call, Record) and isinstance(call.of, Global) else ""
        what = _REFUSED.get(made_by, f"a tensor that is not a plain one ({made_by or type(call).__name__})")
        if made_by.endswith(_MADE_ANEW):
            what = f"a tensor subclass, `{str(call.of).removesuffix(_MADE_ANEW)}`"
        if isinstance(call, Record) and call.of == REBUILD_OF_TYPE and len(call.args) > 1:
            what += f", `{call.args[1]}`"
        hint = f"save a plain dense tensor{OR_EXCLUDE}"
        if is_pickled_tensor_of_class(call, "DTensor", "torch.distributed"):
            hint = "pass the directory with the files of all ranks, or save `tensor.full_tensor()`"
        raise Unsupported(f"the entry holds {what}", hint=hint)
    return parse_rebuild(call)


def unwrap_tensor_call(value: object) -> Any:
    """Return the call that rebuilds the plain tensor in a parameter, a buffer or a tensor with attributes."""
    while isinstance(value, Record) and isinstance(value.args, tuple):
        if value.of in _PARAMETER_CALLS and value.args:
            value = value.args[0]
        elif value.of == REBUILD_OF_TYPE and len(value.args) == 4 and value.args[1] in _PLAIN_TYPES:
            function, _, arguments, _ = value.args
            value = Record(function, arguments)
        elif (inner := find_unquantized_tensor(value)) is not None:
            value = inner
        else:
            break
    return value


def find_unquantized_tensor(value: Record) -> Any | None:
    """Return the unquantized tensor in one of torchao's, else None. Raises `Corrupt` if its shape differs."""
    match value:
        case Record(of=of, args=(function, Global() as kind, (_, _, size, *_), state)):
            attribute = _HOLDERS.get(kind.name) if kind.module.partition(".")[0] in _WRAPPING else None
            attributes = state[0] if isinstance(state, tuple) and state else state
            if of != REBUILD_OF_TYPE or function != REBUILD_WRAPPER or attribute is None:
                return None
            tensor = attributes.get(attribute) if isinstance(attributes, dict) else None
            if tensor is None or as_tensor_record(tensor).shape != as_shape(size):
                raise Corrupt(f"a `{kind}` of shape {size} has no tensor of this shape in `{attribute}`")
            return tensor
    return None


def parse_rebuild(call: Record) -> TensorRecord:
    """Parse `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, [dtype], [bits])`.

    In torch 0.4 and before, the storage can itself be a view of a larger one, `(key, offset, size)`.
    """
    try:
        storage, offset, shape, strides = call.args[:4]
        shape, strides = as_shape(shape), as_shape(strides)
        kind, storage_type, key, _location, _numel, *view = storage.value
        offset += view[0][1] if view and view[0] else 0
        typed = call.of != _TENSOR_CALLS[-1]  # `_rebuild_tensor_v3`
        dtype = DTYPES[STORAGES[storage_type.name] if typed else call.args[6].name]
        bits = call.args[6 if typed else 7 :]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Unsupported("data.pkl describes an unknown kind of tensor") from error
    flags = [bit for bits_of in bits if isinstance(bits_of, dict) for bit, value in bits_of.items() if value]
    if flags:
        message = f"the tensor is a lazy view ({', '.join(map(str, flags))}): its bytes are not its values"
        raise Unsupported(message, hint="save `tensor.resolve_conj().resolve_neg()`, as storage.Writer does")
    if kind != "storage" or type(key) is not str or type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise Corrupt("data.pkl describes an impossible tensor")
    return TensorRecord(key, dtype, offset, shape, strides)


def as_shape(value: object) -> Shape:
    """Return a tuple of non-negative integers, plain or in a `torch.Size`. Raises `ValueError` for any other value."""
    if isinstance(value, Record) and value.of == _SIZE:
        (value,) = value.args
    shape = tuple(value) if isinstance(value, (tuple, list)) else (None,)
    for n in shape:
        if type(n) is not int or not 0 <= n < 2**63:
            raise ValueError("shape")
    return shape


def as_shapes(values: Sequence[Any]) -> Sequence[Shape]:
    """Return each value as `as_shape` does; fast for tuples of integers, which are not checked for negative numbers."""
    if {tuple}.issuperset(map(type, values)) and {int}.issuperset(map(type, chain.from_iterable(values))):
        return values
    return list(map(as_shape, values))
