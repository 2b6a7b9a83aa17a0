"""Translate the names of Megatron-Core's models, in any of its formats, to the Hub's names.

Source: `sharded_state_dict` in megatron/core/transformer/{transformer_block,transformer_layer,mlp}.py and
moe/experts.py, and fsdp_dtensor_checkpoint.py. `torch_dist` stacks equal layers in one tensor, and also experts; if
layers differ they have indices. With `singleton_local_shards`, and in `fsdp_dtensor`, experts have indices too, and
gates (`_w`) are separate from the values that they gate (`_v`). ckptkit writes indexed layers and stacked experts,
which Megatron loads if its `sharded_state_dict` uses `non_homogeneous_layers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckptkit.errors import Mismatch
from ckptkit.formats.archives.write_archive import make_zip_template
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout.renames import mask_numbers, numbers_in
from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule, weight_and_bias_rules
from ckptkit.models.names.sizes import LAYER, ExpertNames, Sizes, expert_names_of_type
from ckptkit.models.names.steps import Concatenated, Cropped, Grouped
from ckptkit.plugins.megatron import hybrid_names as hybrid
from ckptkit.plugins.megatron.arguments import (
    LAYERNORM_1P,
    ZERO_CENTERED,
    check_arguments_against_config,
    computation_arguments_of,
)

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma")
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "glm4_moe")
_WITH_BIAS = ("glm4_moe",)  # types whose router has a bias
_TYPES = (*_DENSE, *_MIXTURES, *hybrid.TYPES)

_IN_LAYER = "decoder.layers[.{layer}]."
_ATTENTION = _IN_LAYER + "self_attention."

_BACKENDS = {"sharded_backend": "torch_dist", "common_backend": "torch"}


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    model = sizes.require_type("Megatron", _TYPES)
    if model in hybrid.TYPES:
        return hybrid.rules()
    is_mixture = model in _MIXTURES
    return (
        Rule.of("embedding.word_embeddings.weight", "model.embed_tokens.weight", Cropped("vocabulary")),
        Rule.of("output_layer.weight", "lm_head.weight", Cropped("vocabulary")),
        Rule.of("decoder.final_layernorm.weight", "model.norm.weight"),
        Rule.of(
            f"{_ATTENTION}linear_qkv.layer_norm_weight | {_IN_LAYER}input_layernorm.weight",
            f"{LAYER}input_layernorm.weight",
        ),
        Rule.of(
            f"{_IN_LAYER}pre_mlp_layernorm.weight | {_IN_LAYER}mlp.linear_fc1.layer_norm_weight",
            f"{LAYER}post_attention_layernorm.weight",
        ),
        *attention_rules(model),
        *feed_forward_rules(_IN_LAYER + "mlp", LAYER + "mlp", "intermediate"),
        *(mixture_rules(model, expert_names_of_type(model)) if is_mixture else ()),
    )


def norm_name_to_write(name: str, sizes: Sizes) -> str:
    """Return the name under which to write a norm: without experts, the norm before the MLP is inside `linear_fc1`."""
    outline = mask_numbers(name)
    if outline == "decoder.layers.#.norm.weight":
        kinds, layer = hybrid.layer_kinds_of(sizes), numbers_in(name)[0]
        if layer >= len(kinds):
            raise Mismatch(f"expected {len(kinds)} layers (config.json), found layer {layer}")
        return name.replace("norm.weight", hybrid.NORMS[kinds[layer]])
    if outline != "decoder.layers.#.pre_mlp_layernorm.weight":
        return name
    has_norm = sizes.model_type in _MIXTURES and has_experts_in_layer(numbers_in(name)[0], sizes)
    return name if has_norm else name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def has_experts_in_layer(layer: int, sizes: Sizes) -> bool:
    """Return whether a layer of a mixture has experts, by the keys of `Glm4MoeConfig` and `Qwen2MoeConfig`."""
    config = sizes.text_config
    first = config.get("first_k_dense_replace", 1 if sizes.model_type == "glm4_moe" else 0)
    step, dense = config.get("decoder_sparse_step"), config.get("mlp_only_layers")
    is_after_dense = type(first) is not int or layer >= first
    is_nth = type(step) is not int or step < 1 or (layer + 1) % step == 0
    return is_after_dense and is_nth and not (isinstance(dense, list) and layer in dense)


def attention_rules(model: str) -> tuple[Rule, ...]:
    """Return the rules for fused queries, keys and values, the output projection, and head norms."""
    names = tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkv")
    norms = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"} if model in _HEAD_NORMS else {}
    return (
        *weight_and_bias_rules(_ATTENTION + "linear_qkv", names, Grouped()),
        *weight_and_bias_rules(_ATTENTION + "linear_proj", LAYER + "self_attn.o_proj"),
        *(Rule.of(f"{_ATTENTION}{own}.weight", f"{LAYER}self_attn.{hub}.weight") for own, hub in norms.items()),
    )


def feed_forward_rules(own: str, hub: str, size: str) -> tuple[Rule, ...]:
    """Return the rules for a gated MLP of intermediate size `size`: gate and up are fused, or separate."""
    gate, up = f"{hub}.gate_proj", f"{hub}.up_proj"
    return (
        *weight_and_bias_rules(f"{own}.linear_fc1", (gate, up), Concatenated(2, size=size)),
        *(
            Rule.of(tuple(f"{own}.linear_fc1.{leaf}_{half}" for half in "wv"), (f"{gate}.{leaf}", f"{up}.{leaf}"))
            for leaf in ("weight", "bias")
        ),
        *weight_and_bias_rules(f"{own}.linear_fc2", f"{hub}.down_proj"),
    )


def mixture_rules(model: str, hub: ExpertNames) -> tuple[Rule, ...]:
    shared = _IN_LAYER + "mlp.shared_experts"
    gate, up, down = (f"{LAYER}{name}.weight" for name in (hub.gate, hub.up, hub.down))
    return (
        Rule.of(f"{_IN_LAYER}mlp.router.weight", f"{LAYER}{hub.router}.weight"),
        *((Rule.of(f"{_IN_LAYER}mlp.router.expert_bias", LAYER + hub.bias),) if model in _WITH_BIAS else ()),
        Rule.of(
            hybrid.expert_weight_names(_IN_LAYER, "linear_fc1"), (gate, up), Concatenated(2, size="expert_intermediate")
        ),
        Rule.of(
            (
                hybrid.expert_weight_names(_IN_LAYER, "linear_fc1", "_w"),
                hybrid.expert_weight_names(_IN_LAYER, "linear_fc1", "_v"),
            ),
            (gate, up),
        ),
        Rule.of(hybrid.expert_weight_names(_IN_LAYER, "linear_fc2"), down),
        *feed_forward_rules(shared, LAYER + hub.shared, "shared_intermediate"),
        Rule.of(f"{shared}.gate_weight", f"{LAYER}mlp.shared_expert_gate.weight"),
    )


def files_beside_shards(step: int, model_type: str) -> Mapping[str, bytes]:
    """Return the files that Megatron expects next to the shards: the storage format, and the shared state.

    If norms are centered at zero on the Hub, this is recorded too, and Megatron needs `--apply-layernorm-1p`. Source:
    megatron/core/dist_checkpointing/core.py; without a version, Megatron-LM would reorder queries and keys.
    """
    config = {**_BACKENDS, "sharded_backend_version": 1, "common_backend_version": 1}
    state = {"iteration": step, "checkpoint_version": 3.0}
    norms = {LAYERNORM_1P: True} if model_type in ZERO_CENTERED else {}
    ((_, common),) = make_zip_template(dump(state | norms), {}).parts
    return {"metadata.json": json.dumps(config).encode(), "common.pt": common}


MEGATRON = Family(
    name="megatron",
    drops=(r".*\._extra_state", r"(.*\.)?rotary_pos_emb\.inv_freq", r".*\.router\.local_tokens_per_expert"),
    rules=rules,
    written_as=norm_name_to_write,
    types=_TYPES,
    check=check_arguments_against_config,
    describe=computation_arguments_of,
    files=files_beside_shards,
    told_by_files=ZERO_CENTERED,
)
