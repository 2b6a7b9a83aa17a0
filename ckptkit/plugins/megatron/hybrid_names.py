"""Translate the names of Megatron-Core's hybrid models (Mamba, attention, MLP and experts) to the Hub's names.

Source: `sharded_state_dict` in megatron/core/ssm/{mamba_block,mamba_layer,mamba_mixer}.py of core 0.16, and in
megatron/core/models/hybrid/hybrid_block.py of core 0.20; nemotron_h_bridge.py of Megatron-Bridge 067f987 (August 2026).
Every layer has an index and one norm, whose name depends on the kind of layer. Mamba's `in_proj` and `conv1d` are
stored as several tensors of related rows, so that ranks can split each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import axes
from ckptkit.models.names.rule import Rule
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.steps import Cropped, Grouped, Tensors

TYPES = ("nemotron_h",)
IN_PROJ = "in_proj.weight"
_IN_LAYER, _LAYER = "decoder.layers.{layer}.", "backbone.layers.{layer}."
_NORM = "norm.weight"
NORMS = {  # by the letter in Megatron's layer pattern: the norm's name in Transformer Engine's modules
    "M": "mixer.in_proj.layer_norm_weight",
    "*": "self_attention.linear_qkv.layer_norm_weight",
    "-": "mlp.linear_fc1.layer_norm_weight",
    "E": "pre_mlp_layernorm.weight",
}
_KINDS = {  # names in transformers' `NemotronHConfig`, current and older ones
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}


def rules() -> tuple[Rule, ...]:
    norms = " | ".join(_IN_LAYER + name for name in (_NORM, *NORMS.values(), "input_layernorm.weight"))
    return (
        Rule.of("embedding.word_embeddings.weight", "backbone.embeddings.weight", Cropped("vocabulary")),
        Rule.of("output_layer.weight", "lm_head.weight", Cropped("vocabulary")),
        Rule.of("decoder.final_norm.weight | decoder.final_layernorm.weight", "backbone.norm_f.weight"),
        Rule.of(norms, _LAYER + _NORM),
        *mamba_rules(),
        Rule.of(
            f"{_IN_LAYER}self_attention.linear_qkv.weight",
            tuple(f"{_LAYER}mixer.{name}_proj.weight" for name in "qkv"),
            Grouped(),
        ),
        *mixer_rules({"self_attention.linear_proj.weight": "o_proj.weight"}),
        *mixer_rules({f"mlp.linear_fc{i}.weight": f"{name}_proj.weight" for i, name in ((1, "up"), (2, "down"))}),
        *expert_rules(),
    )


def mamba_rules() -> Iterator[Rule]:
    """Yield the rules for a Mamba layer: split into row groups, or unsplit as in jobs without tensor parallelism."""
    mixer = "mixer."
    for name, pieces in ((IN_PROJ, "z x B C dt"), ("conv1d.weight", "x B C"), ("conv1d.bias", "x B C")):
        own, hub = f"{_IN_LAYER}{mixer}{name}", f"{_LAYER}{mixer}{name}"
        parts = tuple(pieces.split())
        yield Rule.of(tuple(f"{own}.{part}" for part in parts), hub, MambaRows(parts))
        yield Rule.of(f"{own} | {own.replace('conv1d.', 'conv1d_')}", hub)
    yield from mixer_rules({f"mixer.{name}": name for name in ("A_log", "D", "dt_bias", _NORM, "out_proj.weight")})


def expert_rules() -> Iterator[Rule]:
    """Yield the rules for a mixture of experts without a gate projection.

    Experts that work in a smaller (latent) size also have projections into it and back.
    """
    yield from mixer_rules(
        {
            "mlp.router.weight": "gate.weight",
            "mlp.router.expert_bias": "gate.e_score_correction_bias",
            **{f"mlp.fc{i}_latent_proj.weight": f"fc{i}_latent_proj.weight" for i in (1, 2)},
        }
    )
    for i, name in ((1, "up_proj"), (2, "down_proj")):
        layer = f"linear_fc{i}"
        yield from mixer_rules({f"mlp.shared_experts.{layer}.weight": f"shared_experts.{name}.weight"})
        yield Rule.of(expert_weight_names(_IN_LAYER, layer), f"{_LAYER}mixer.experts.{{expert}}.{name}.weight")


def expert_weight_names(in_layer: str, layer: str, half: str = "") -> str:
    """Return all names of an expert weight: stacked, by expert index, and by module."""
    ways = ("experts.{}.weight", "experts.{{expert}}.{}.weight", "local_experts.{{expert}}.{}.weight")
    names = (*(way.format(layer) for way in ways), f"{layer}.weight{{expert}}")
    return " | ".join(f"{in_layer}mlp.experts.{name}{half}" for name in names)


def mixer_rules(names: dict[str, str]) -> Iterator[Rule]:
    """Yield a rule for each layer tensor that the Hub only renames, with the prefix `mixer`."""
    for own, hub in names.items():
        yield Rule.of(_IN_LAYER + own, f"{_LAYER}mixer.{hub}")


@dataclass(frozen=True, slots=True)
class MambaRows:
    """Concatenate the row groups of a Mamba tensor into the Hub's single tensor.

    z and x are the gates and inputs of all heads, B and C the states of each group, and dt has one row per head.
    """

    parts: tuple[str, ...]

    def to_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        for part, tensor, rows in zip(self.parts, tensors, self.row_counts(sizes), strict=True):
            if tensor.spec.shape[0] != rows:
                raise Mismatch(f"expected {rows} rows of {part} (config.json), found {tensor.spec.shape[0]}")
        return (axes.concatenate(tensors, 0),)

    def from_hub(self, tensors: Tensors, sizes: Sizes, /) -> Tensors:
        (full,) = tensors
        ends = (0, *accumulate(self.row_counts(sizes)))
        if ends[-1] != full.spec.shape[0]:
            raise Mismatch(f"expected {ends[-1]} rows (config.json), found {full.spec.shape[0]}")
        return tuple(axes.narrow_axis(full, 0, start, stop) for start, stop in pairwise(ends))

    def row_counts(self, sizes: Sizes) -> tuple[int, ...]:
        inner = sizes["mamba_heads"] * sizes["mamba_width"]
        states = sizes["mamba_groups"] * sizes["mamba_states"]
        rows = {"z": inner, "x": inner, "B": states, "C": states, "dt": sizes["mamba_heads"]}
        return tuple(rows[part] for part in self.parts)


def layer_kinds_of(sizes: Sizes) -> str:
    """Return the kinds of all layers as letters of Megatron's pattern, the keys of NORMS.

    Raises `Unsupported` for an unknown kind.
    """
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    kinds = next((sizes.text_config[key] for key in keys if sizes.text_config.get(key)), None)
    if not isinstance(kinds, list | str):
        raise Mismatch("config.json does not have `layers_block_type`, which translating the names needs")
    letters = [kind if kind in NORMS else _KINDS.get(kind) for kind in map(str, kinds)]
    if None in letters:
        raise Unsupported(f"ckptkit does not know Megatron's names for a layer of `{kinds[letters.index(None)]}`")
    return "".join(map(str, letters))
