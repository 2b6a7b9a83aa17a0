"""Translate the names of MaxText to the Hub's names.

Source: maxtext/checkpoint_conversion/utils/param_mapping.py of maxtext 0.2.5. A kernel has its inputs first. Scanned
layers are stacked in one tensor, along its second axis. Gemma 2 has pairs of a local and a global layer; scanned Gemma
3 has blocks of six layers, followed by the remaining layers. Some values differ: queries are divided by the square root
of the head width, a norm of Gemma is greater by one, and its embedding is multiplied by the square root of the hidden
size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import frexp, ldexp
from typing import NamedTuple

from ckptkit.engine.arithmetic import Arithmetic
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import StoredTensor, axes
from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule
from ckptkit.models.names.sizes import LAYER, Sizes
from ckptkit.models.names.steps import (
    Chain,
    Cropped,
    FlatFront,
    RequiredExtent,
    Reversed,
    Rotary,
    SwappedAxes,
    TensorStep,
)
from ckptkit.models.names.translate import Translated, translate_by_rules

_GEMMAS = ("gemma2", "gemma3_text")
_TYPES = ("llama", "qwen3", *_GEMMAS)
_SCALED = ("llama", "gemma2")  # types whose queries include the attention scale
_SCAN_AXIS = 1  # `param_scan_axis` in MaxText's configs/base.yml
_PATTERN = 6  # layers in a block of Gemma 3: five local ones, and a global one
_OWN = "decoder.layers.{layer}."

# the prefix of a tensor name before its name in the layer
_PLACE = re.compile(
    r"decoder\.(?:layers[_.](?P<one>[0-9]+)|layers\.layers_(?P<block>[0-9]+)|layers_remainder\.layers_(?P<rest>[0-9]+)"
    r"|layers)\.(?P<tensor>[a-z].*)"
)
_HALF = re.compile(r"(?P<module>[^.]+)_(?P<half>local|global)\.(?P<leaf>.*)")
_HALVES = ("local", "global")


class LayerPosition(NamedTuple):
    """The first layer of a tensor, the distance between its layers, and its name in each layer."""

    first: int
    step: int
    tensor: str
    is_scanned: bool


def find_layer_position(name: str, sizes: Sizes) -> LayerPosition | None:
    """Return the layers of a tensor; None for a tensor outside the layers."""
    match = _PLACE.fullmatch(name)
    if match is None:
        return None
    tensor, model = match["tensor"], sizes.model_type
    if match["block"] is not None:
        return LayerPosition(int(match["block"]), _PATTERN, tensor, is_scanned=True)
    if match["rest"] is not None:
        layers = sizes["layers"]
        return LayerPosition(layers - layers % _PATTERN + int(match["rest"]), 1, tensor, is_scanned=False)
    number, is_scanned = int(match["one"] or 0), match["one"] is None
    half = _HALF.fullmatch(tensor) if model == "gemma2" else None
    if half is None:
        return LayerPosition(number, 1, tensor, is_scanned)
    first = len(_HALVES) * number + _HALVES.index(half["half"])
    return LayerPosition(first, len(_HALVES), f"{half['module']}.{half['leaf']}", is_scanned)


def split_by_layer(name: str, tensor: StoredTensor, sizes: Sizes) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a tensor per layer, under a name that does not depend on the model type or on scanning."""
    name = name.removesuffix(".value")  # flax's NNX adds this suffix to every name
    layers = find_layer_position(name, sizes)
    if layers is None:
        yield name, tensor
        return
    full_name = _OWN.format(layer="{}") + layers.tensor
    if not layers.is_scanned:
        yield full_name.format(layers.first), tensor
        return
    shape = tensor.spec.shape
    wanted = len(range(layers.first, sizes["layers"] - (sizes["layers"] % layers.step), layers.step))
    if len(shape) <= _SCAN_AXIS or shape[_SCAN_AXIS] != wanted:
        message = f"expected {wanted} layers along axis {_SCAN_AXIS} (config.json), found shape {list(shape)}"
        raise Mismatch(message, tensor=name)
    first = axes.permute_axes(tensor, (_SCAN_AXIS, *(axis for axis in range(len(shape)) if axis != _SCAN_AXIS)))
    for index, of_layer in enumerate(axes.unstack(first)):
        yield full_name.format(layers.first + index * layers.step), of_layer


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    model = sizes.require_type("maxtext", _TYPES)
    if sizes.text_config is not sizes.config:
        hint = "pass --base MODEL with the config.json of the text model alone"
        raise Unsupported(f"ckptkit does not know maxtext's names for a `{sizes.config.get('model_type')}`", hint=hint)
    rows = Cropped("vocabulary")
    return (
        Rule.of("token_embedder.embedding", "model.embed_tokens.weight", rows),
        Rule.of("decoder.decoder_norm.scale", "model.norm.weight"),
        Rule.of("decoder.logits_dense.kernel", "lm_head.weight", Chain((SwappedAxes(), rows))),
        *(Rule.of(f"{_OWN}{own}.scale", f"{LAYER}{hub}.weight") for own, hub in hub_norm_modules(model).items()),
        *attention_rules(is_in_pairs=model == "llama"),
        *(
            Rule.of(f"{_OWN}mlp.{own}.kernel", f"{LAYER}mlp.{hub}_proj.weight", SwappedAxes())
            for own, hub in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items()
        ),
    )


def hub_norm_modules(model: str) -> dict[str, str]:
    """Return the Hub names of the norms in a layer, keyed by MaxText name."""
    of_heads = {"self_attention.query_norm": "self_attn.q_norm", "self_attention.key_norm": "self_attn.k_norm"}
    if model in _GEMMAS:
        return {
            "pre_self_attention_norm": "input_layernorm",
            "post_self_attention_norm": "post_attention_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            **(of_heads if model == "gemma3_text" else {}),
        }
    return {
        "pre_self_attention_layer_norm": "input_layernorm",
        "post_self_attention_layer_norm": "post_attention_layernorm",
        **(of_heads if model == "qwen3" else {}),
    }


def attention_rules(*, is_in_pairs: bool) -> Iterator[Rule]:
    """Yield the rules for the four attention projections, which have a separate axis for heads."""
    for own, hub, heads in (("query", "q", "heads"), ("key", "k", "key_heads"), ("value", "v", "key_heads")):
        rotary: tuple[TensorStep, ...] = (Rotary(heads),) if is_in_pairs and own != "value" else ()
        in_front = (RequiredExtent(1, heads), SwappedAxes((0, 2)), SwappedAxes((0, 1)))  # heads, their rows, inputs
        step = Chain((*in_front, Reversed(FlatFront(heads)), *rotary))
        yield Rule.of(f"{_OWN}self_attention.{own}.kernel", f"{LAYER}self_attn.{hub}_proj.weight", step)
    step = Chain((RequiredExtent(0, "heads"), Reversed(FlatFront("heads")), SwappedAxes()))
    yield Rule.of(f"{_OWN}self_attention.out.kernel", f"{LAYER}self_attn.o_proj.weight", step)


def find_arithmetic(name: str, sizes: Sizes) -> Arithmetic | None:
    """Return the arithmetic that converts the values of a tensor for the Hub; None if they are equal."""
    model, name = sizes.model_type, name.removesuffix(".value")
    if model in _SCALED and re.search(r"\.self_attention(_local|_global)?\.query\.kernel$", name):
        return Arithmetic(factor=sizes.head_width**0.5)
    if model in _GEMMAS and name.endswith(".scale"):
        return Arithmetic(shift=-1.0)
    if model in _GEMMAS and name == "token_embedder.embedding":
        return Arithmetic(factor=xla_inverse_root(sizes["hidden"], is_rounded=model == "gemma3_text"))
    return None


def xla_inverse_root(hidden_size: int, *, is_rounded: bool) -> float:
    """Return the factor that XLA multiplies by to divide by the square root of `hidden_size`.

    The root is in float32, or in bfloat16 if `is_rounded`.
    """
    fraction, exponent = frexp(hidden_size**0.5)
    bits = 8 if is_rounded else 24  # of the fraction; `round` rounds half to even
    return 1 / ldexp(round(ldexp(fraction, bits)), exponent - bits)


@dataclass(frozen=True, kw_only=True)
class MaxTextNames(Family):
    """The names of MaxText, which ckptkit reads and does not write."""

    def to_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        table = self.rules(sizes)  # first, because it raises for unknown types
        layer_tensors: dict[str, StoredTensor] = {}
        source_name: dict[str, str] = {}
        for name, tensor in tensors.items():
            for layer_name, part in split_by_layer(name, tensor, sizes):
                if layer_name in layer_tensors:
                    raise Mismatch(
                        f"the tensor is the same as `{source_name[layer_name]}`: two names of one tensor", tensor=name
                    )
                layer_tensors[layer_name], source_name[layer_name] = part, name
        translated = translate_by_rules(layer_tensors, table, sizes)
        came_from = {
            new: tuple(dict.fromkeys(source_name[layer_name] for layer_name in olds))
            for new, olds in translated.came_from.items()
        }
        unplaced = tuple(dict.fromkeys(source_name[layer_name] for layer_name in translated.unplaced))
        return Translated(translated.tensors, came_from, unplaced)

    def from_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:  # noqa: ARG002
        hint = "use MaxText's own `to_maxtext`, which reads models of the Hub"
        raise Unsupported("ckptkit reads maxtext's names and does not write them", tensor=min(tensors), hint=hint)


MAXTEXT = MaxTextNames(
    name="maxtext",
    types=_TYPES,
    rules=rules,
    arithmetic=find_arithmetic,
    drops=(r"(.*\.)?(to_nnx__rngs|rngs|[^.]*_rngs)\..*",),
    is_model_only=True,
)
