"""Read from config.json how a model was quantized, and check quickly by names and dtypes whether it may be.

Sources: transformers/utils/quantization_config.py, compressed_tensors/quantization/quant_args.py, and mlx_lm/utils.py.
The default block is 128 x 128, as in DeepSeek's models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptkit.errors import Corrupt
from ckptkit.layout import Spec

KEYS = ("quantization_config", "compression_config")  # sections of config.json
_MLX = "quantization"  # MLX's section, which it repeats in `quantization_config`
_TEXT = "text_config"  # some multimodal models have the section in here
OF_WEIGHTS = (".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale")
_BYTES = ("int8", "uint8", "int32", "uint32")  # dtypes that packed numbers are stored in
_COMPRESSED, _MODELOPT, OF_MLX = "compressed-tensors", "modelopt", "mlx"
_PLAIN = (None, "fp8", "fbgemm_fp8", _COMPRESSED, "mxfp4", _MODELOPT, OF_MLX)  # methods that ckptkit can undo
_KINDS: Mapping[str, tuple[str, ...]] = {  # variants that ckptkit can undo, for methods with several
    _COMPRESSED: (
        *("dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized", "mixed-precision"),
        *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
    ),
    _MODELOPT: ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP4", "MXFP8", "MIXED_PRECISION"),
    OF_MLX: ("affine",),
}
_DEFAULT_BLOCK = (128, 128)
_MAX_BLOCK = 1 << 16  # ten times larger than any model's
_EXPERTS = "expert_dtype"  # DeepSeek V4's dtype of quantized experts

Block = tuple[int, int]


class Integers(NamedTuple):
    """The encoding of weights as integers of so many `bits`.

    `group` is the number of neighbors that share a scale; None means one scale for a row, or for the tensor. Without
    `is_symmetric` they have zero points. With `is_ordered`, columns are in the order of activations.
    """

    bits: int
    group: int | None
    is_symmetric: bool
    is_ordered: bool = False


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The quantization that a config declares: the method (None without one), and the blocks that share one scale.

    Blocks are (rows, columns). `kind` is the variant of the method, if it has several. `integers` are the encodings of
    integer weights. `modules` are modules of an MLX model with an encoding of their own.
    """

    method: str | None = None
    blocks: tuple[Block, ...] = (_DEFAULT_BLOCK,)
    kind: str | None = None
    integers: tuple[Integers, ...] = ()
    modules: Mapping[str, Integers] = field(default_factory=dict)

    @property
    def is_supported(self) -> bool:
        kinds = _KINDS.get(str(self.method))
        return self.method in _PLAIN and (kinds is None or self.kind is None or self.kind in kinds)

    @property
    def description(self) -> str:
        return f"{self.method} {self.kind}" if self.kind else str(self.method)


def read_quantization_config(config: Mapping[str, Any] | None) -> QuantizationConfig:
    """Return the quantization that a config declares. Raises `Corrupt` for invalid values."""
    section = quantization_section(config or {})
    if section is None:
        return QuantizationConfig()
    if "quant_method" not in section and "bits" in section:
        by_module = {
            name: parse_affine_encoding({**section, **value})
            for name, value in section.items()
            if isinstance(value, dict)
        }
        modes = {str(value.get("mode", "affine")) for value in (section, *section.values()) if isinstance(value, dict)}
        mode = min(modes - {"affine"}, default="affine")
        return QuantizationConfig(OF_MLX, kind=mode, integers=(parse_affine_encoding(section),), modules=by_module)
    method, kind = str(section.get("quant_method", _COMPRESSED)), section.get("format")
    if method.startswith(_MODELOPT):
        method, kind = _MODELOPT, section.get("quant_algo")
    blocks = tuple(dict.fromkeys(block_sizes_in(section)))
    of_integers = (one for one in weight_groups_in(section) if str(one.get("type", "int")).lower() == "int")
    integers = tuple(dict.fromkeys(map(parse_integer_encoding, of_integers)))
    kind = str(kind) if method in _KINDS and kind else None
    return QuantizationConfig(method, blocks or (_DEFAULT_BLOCK,), kind, integers)


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section on quantization, of the model or of its text model; None without one."""
    text = config.get(_TEXT)
    for section in (config, text) if isinstance(text, dict) else (config,):
        for key in (*KEYS, _MLX):
            entry = section.get(key)
            if isinstance(entry, dict) and is_about_quantization(key, entry):
                return entry
    return None


def parse_affine_encoding(value: Mapping[str, Any]) -> Integers:
    """Return the bits and group size of MLX's weights. Raises `Corrupt` for values that MLX does not have."""
    match value.get("bits"), value.get("group_size"):
        case [2 | 3 | 4 | 5 | 6 | 8 as bits, int(group)] if group > 0 and group % 32 == 0 and group <= _MAX_BLOCK:
            return Integers(bits, group, is_symmetric=False)
        case [bits, group]:
            message = "config.json: expected weights of 2 to 6 or 8 bits, in groups of a multiple of 32"
            raise Corrupt(f"{message}; found {bits} bits in groups of {group}")


def weight_groups_in(section: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the description of the weights for each group of modules."""
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield weights


def block_sizes_in(section: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the block sizes: of the whole model, or of groups of modules."""
    if section.get("weight_block_size") is not None:
        yield parse_block_size(section["weight_block_size"])
    for weights in weight_groups_in(section):
        if weights.get("block_structure") is not None:
            yield parse_block_size(weights["block_structure"])
        elif has_group_scales(weights):
            yield parse_block_size([1, weights.get("group_size")])


def has_group_scales(weights: Mapping[str, Any]) -> bool:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    return strategy in ("group", "tensor_group") or (strategy is None and size not in (None, -1))


def parse_integer_encoding(weights: Mapping[str, Any]) -> Integers:
    """Return the encoding of integer weights. Raises `Corrupt` for values that compressed-tensors refuses too."""
    bits, is_symmetric = weights.get("num_bits", 8), weights.get("symmetric", True)
    if not (isinstance(bits, int) and 1 <= bits <= 16):
        raise Corrupt(f"config.json: expected weights of 1 to 16 bits, found {bits!r}")
    if not isinstance(is_symmetric, bool):
        raise Corrupt(f"config.json: `symmetric`: expected true or false, found {is_symmetric}")
    group = parse_block_size([1, weights.get("group_size")])[1] if has_group_scales(weights) else None
    order = weights.get("actorder")
    return Integers(bits, group, is_symmetric, order is True or str(order).lower() in ("group", "dynamic"))


def parse_block_size(value: object) -> Block:
    """Return rows and columns of a block. Raises `Corrupt` for anything else."""
    match value:
        case [int(rows), int(columns)] if 0 < rows <= _MAX_BLOCK and 0 < columns <= _MAX_BLOCK:
            return rows, columns
    raise Corrupt(f"config.json: expected two sizes as blocks of quantized weights, found {value}")


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with plain weights."""
    plain = {key: value for key, value in config.items() if not (is_about_quantization(key, value) or key == _EXPERTS)}
    if isinstance(config.get(_TEXT), dict):
        plain[_TEXT] = without_quantization(config[_TEXT])
    return plain


def may_be_quantized_model(specs: Mapping[str, Spec]) -> bool:
    """Return whether some of these tensors may be quantized weights or their scales."""
    return any(name.endswith(OF_WEIGHTS) for name in specs) or any(map(may_be_quantized_dtype, specs.values()))


def is_declared_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json declares the weights as quantized."""
    text = config.get(_TEXT)
    sections = [config, text] if isinstance(text, dict) else [config]
    return any(is_about_quantization(key, section[key]) for section in sections for key in section)


def is_about_quantization(key: str, value: object) -> bool:
    """Return whether an entry of a config.json describes the quantization of weights."""
    return key in KEYS or (key == _MLX and isinstance(value, dict) and "bits" in value)


def may_be_quantized_dtype(spec: Spec) -> bool:
    """Return whether a tensor's dtype is one that quantized numbers are stored in."""
    return spec.dtype.kind == "small_float" or spec.dtype.name in _BYTES
