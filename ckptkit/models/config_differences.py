"""Compare two config.json files for every difference that changes what a model computes.

Every key counts, except those known to be harmless. A key that only one config has is compared with transformers'
default, if transformers knows the model type. transformers is imported only if the configs differ as written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptkit.errors import and_more
from ckptkit.models.architectures import find_default_head_width

_IDENTITY = ("model_type", "architectures")  # their absence is not a difference
_ROPE = ("rope_scaling", "rope_parameters")
_COMMON_DEFAULTS = {"rope_type": "default", "is_causal": True}  # defaults that all libraries share
_LENGTH, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_BY_LENGTH = ("dynamic", "longrope", "su")  # rope types that use `max_position_embeddings`
_BY_ORIGINAL = ("llama3", "yarn", "longrope", "su")  # rope types that use the length before scaling
_TEXT = "text_config"
_LABELS = "id2label"
_CODE = "auto_map"
_QUANTIZATION = re.compile(r"(?:.*\.)?(?:quantization|compression)_config(?:\..*)?")
_SHOWN_BY_TENSORS = re.compile(r".*_bias|bias|is_causal")  # tensors show biases; `is_causal` has a common default
# different names of libraries for the same number
_ALIASES = (
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layernorm_epsilon"),
    ("hidden_act", "activation_function", "hidden_activation", "mlp_hidden_act", "activation"),
    ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_selected_experts"),
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ("partial_rotary_factor", "rotary_pct", "rotary_percent"),
)
POSITIONS = "position_embedding_type"
_BY_PRESENCE = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "sliding_window")  # absence is a difference
_CANONICAL = {name: names[0] for names in _ALIASES for name in names}
_MAX_NAMED = 4  # differences in one message
# keys, by their last name, that no model reads when it computes, or that shapes determine: a key counts unless it is
# here. Source: the modeling code of transformers 5.23, in which each pattern was searched.
_HARMLESS = re.compile(
    "|".join(
        (
            r"_(name_or_path|commit_hash|auto_class|class_name|from_(auto|pipeline|model_config)|num_labels)",
            r"_(attn|experts)_implementation(_internal|_autoset)?|_flash_attn_2_enabled|_output_attentions",
            r"name_or_path|model_name|base_model_(name_or_path|prefix)|unsloth_(fixed|version)",
            r"_?(transformers|peft|diffusers|torch|sentence_transformers)_version|(tokenizer|processor)_class",
            r"(torch_)?dtype|use_bfloat16|torchscript|transformers_weights",
            # sizes of the values before training; `init_trk_keep_alive` of SAM 3 is none
            r"init(ializer)?_(?!trk_keep_alive).*|.*_init|.*_init_(std|scale|value|method)|rescale_prenorm_residual",
            # ESM scales embeddings by `token_dropout`; SpeechT5 drops elements in inference, too
            r"(?!token_dropout|speech_decoder_prenet_dropout).*drop_?out.*",
            r".*_pdrop|.*drop_path.*|.*layer_?drop|gradient_checkpointing",
            r".*_loss|.*_loss_.*|seq_aux|(router|input)_jitter_noise|label_smoothing|ignore_index",
            r"apply_spec_augment|mask_(time|feature)_(prob|length|min_masks)|ctc_zero_infinity",
            r"return_dict|use_return_dict|output_(attentions|hidden_states|router_logits|scores)",
            r"use_cache|cache_implementation|(.*_)?attn_implementation|use_flash_attn.*|pretraining_tp|ep_size",
            r"chunk_size_feed_forward|.*_[tp]p_plan",
            r"(bos|eos|pad|sep|cls|unk|mask|forced_bos|forced_eos)_token(_id)?|(begin_)?suppress_tokens",
            r"max_length|min_length|do_sample|early_stopping|num_beam.*|diversity_penalty|temperature|top_p|typical_p",
            r".*(repetition|length)_penalty|(encoder_)?no_repeat_ngram_size|bad_words_ids|num_return_sequences",
            r"id2label|label2id|problem_type|finetuning_task|task_specific_params",
            r"vocab_size|max_position_embeddings|n_positions|n_ctx|seq_length|(model_)?max_(sequence|seq)_?len(gth)?",
            r"num_nextn_predict_layers|.*mtp.*",  # MTP layers, which predict further tokens
            # where timm's `pretrained_cfg` found the weights (timm/models/_pretrained.py), and settings of a training
            r"hf_hub_(id|filename)|origin_url|paper_(ids|name)|push_to_hub|repo_id",
            r"optimizer_(lr|lr_backbone|betas|eps|weight_decay|grad_clip_norm)|scheduler_(warmup|decay)_(steps|lr)",
        )
    )
)
# harmless keys that some models read when they compute: patterns of their model types and classes
_READ_BY = {
    "_class_name": re.compile("None"),  # the model's class in diffusers, whose configs have no `model_type`
    # classifiers find the last token; models like RoBERTa count positions from it; others embed it
    "pad_token_id": re.compile(
        r".*(Classification|Reward|Roberta|Electra|Camembert).*|.*(roberta|electra|camembert|seamless_m4t|gemma4).*|"
        r"(esm|evolla|altclip|bridgetower|clap|kosmos|longformer|big_bird|led|layoutlmv3|pp_doclayout).*|ibert|"
        r"data2vec-text|fsmt|lilt|luke|markuplm|m2m_100|nllb-moe|speech_to_text|speecht5|trocr|xmod|udop|splinter|"
        r"t5gemma.*|embedding_gemma.*|neomme|cohere_compass|musicgen.*|pix2struct.*|encoder-decoder|prophetnet|xglm"
    ),
    # text towers and classifiers take the features of this token; n-grams end at it
    "eos_token_id": re.compile(
        r".*clip.*|aimv2.*|groupvit.*|clvp.*|esmfold.*|qwen4_exp.*|"
        r"(Bart|MBart|PLBart|Mvp|LED|BigBirdPegasus|T5|MT5|UMT5)ForSequenceClassification"
    ),
    "bos_token_id": re.compile(r"clvp.*|esmfold.*|rag|t5gemma2.*"),
    "sep_token_id": re.compile(r"big_bird|longformer"),
    "mask_token_id": re.compile(r"esm.*|evolla.*|flaubert|xlm"),
    # positions beyond it are clipped; Qwen scales the attention beyond it
    "max_position_embeddings": re.compile(r"deberta.*|sew-d|mra"),
    "seq_length": re.compile(r"qwen"),
    "n_ctx": re.compile(r"codegen"),
    "temperature": re.compile(r"tapas"),
    "router_jitter_noise": re.compile(r"phimoe"),
}


class ConfigDifference(NamedTuple):
    """A key of config.json (dots between nested sections) and its two values; None for an absent value.

    `is_certain` is False if one value is absent and its default is unknown.
    """

    key: str
    here: Any
    there: Any
    is_certain: bool = True


def find_config_differences(config: Mapping[str, Any], other: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the differences between two configs that change what the model computes, certain ones first.

    Rotary parameters may be in `rope_theta` and `rope_scaling`, or in `rope_parameters` (transformers 5.0 and later).
    If only one of the two models is multimodal, its text model is compared.
    """
    one, two = config, other
    if one.get("model_type") != two.get("model_type"):
        one, two = text_config_to_compare(config, other), text_config_to_compare(other, config)
    ours, theirs = class_labels_of(one), class_labels_of(two)
    labels = [ConfigDifference(_LABELS, ours, theirs)] if ours and theirs and ours != theirs else []
    keys, other_keys = flatten_both_configs(one, two)
    differences = compare_flattened_configs(keys, other_keys)
    # keys that are false or zero in one config and absent in the other: their default may differ
    for key in sorted(keys.keys() ^ other_keys.keys()):
        here, there = keys.get(key), other_keys.get(key)
        if not _SHOWN_BY_TENSORS.fullmatch(key.rpartition(".")[2]) and (here in (False, 0) or there in (False, 0)):
            differences.append(ConfigDifference(key, here, there, is_certain=False))
    differences.sort(key=lambda pair: not pair.is_certain)
    # transformers may have a default for a key that is null in one config and absent in the other
    may_have_defaults = any(keys.get(key, other_keys.get(key)) is None for key in keys.keys() ^ other_keys.keys())
    if not differences and not may_have_defaults:
        return labels
    from ckptkit.models.transformers_model import (
        find_config_with_defaults,  # deferred: few configs differ; it takes seconds
    )

    full, other_full = find_config_with_defaults(one), find_config_with_defaults(two)
    if full is None or other_full is None:
        return [*labels, *differences]
    return [*labels, *compare_flattened_configs(*flatten_both_configs(full, other_full), has_all_defaults=True)]


def class_labels_of(config: Mapping[str, Any]) -> list[str]:
    """Return the label names of a classifier in order; [] for names that transformers generates (`LABEL_0`)."""
    id2label = config.get(_LABELS)
    pairs = id2label.items() if isinstance(id2label, dict) else ()
    labels = [label for _, label in sorted((str(key).zfill(9), str(label)) for key, label in pairs)]
    return [] if all(re.fullmatch(r"LABEL_[0-9]+", label) for label in labels) else labels


def find_contradictions(reported: Mapping[str, Any], config: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the keys in `reported` that config.json contradicts.

    `reported` is a partial config from a trainer's own file. Its value of `POSITIONS` is "rope" or another kind of
    position embedding.
    """
    text = config.get(_TEXT)
    config = text if isinstance(text, Mapping) else config
    differences = contradicting_keys(reported, config)
    if not differences:
        return []
    from ckptkit.models.transformers_model import find_config_with_defaults  # as in `find_config_differences`

    full = find_config_with_defaults(config)
    return differences if full is None else contradicting_keys(reported, full)


def contradicting_keys(reported: Mapping[str, Any], config: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the keys with other values in a config, and the keys among `_BY_PRESENCE` that it lacks."""
    known = {_CANONICAL.get(key, key): value for key, value in flatten_config(reported).items() if value is not None}
    config_values = {_CANONICAL.get(key, key): value for key, value in flatten_config(config).items()}
    if rope_parameters_of(config).get("rope_theta") is not None:
        config_values[POSITIONS] = "rope"
    differences = compare_flattened_configs(known, {key: value for key, value in config_values.items() if key in known})
    return [one for one in differences if (one.key in _BY_PRESENCE or one.there is not None) and not is_neutral(one)]


def is_neutral(difference: ConfigDifference) -> bool:
    """Return whether a difference has no effect: an absent factor of 1, or a window that differs by one token."""
    if difference.there is None:
        return bool(difference.here == 1)
    is_window = difference.key == "sliding_window" and difference.here and isinstance(difference.there, int)
    return bool(is_window and abs(difference.here - difference.there) <= 1)


def describe_differences(differences: Sequence[ConfigDifference], other_name: str) -> str:
    """Return the first differences as text, `rope_theta (10000.0, in OTHER 500000.0)`, and the number of others."""
    named = differences[:_MAX_NAMED]
    words = (
        f"{one.key} ({format_config_value(one.here)}, in {other_name} {format_config_value(one.there)})"
        for one in named
    )
    return f"{', '.join(words)}{and_more(len(differences) - _MAX_NAMED)}"


def format_config_value(value: Any) -> str:
    """Return a value of config.json as text for a message, at most 60 characters."""
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def text_config_to_compare(config: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model in a config if it has the type of the other model, else the config."""
    text = config.get(_TEXT)
    return text if isinstance(text, Mapping) and text.get("model_type") == other.get("model_type") else config


def compare_flattened_configs(
    one: Mapping[str, Any], two: Mapping[str, Any], *, has_all_defaults: bool = False
) -> list[ConfigDifference]:
    """Return the keys that differ. False, zero and null equal an absent key.

    If both configs have all defaults (`has_all_defaults`), a difference to null is certain.
    """
    differences = []
    for key in sorted({*one, *two}):
        here, there = one.get(key), two.get(key)
        last = key.rpartition(".")[2]
        here, there = (_COMMON_DEFAULTS.get(last) if value is None else value for value in (here, there))
        if here == there or not (here or there):
            continue
        is_one_absent = here is None or there is None
        if is_one_absent and last in _IDENTITY:
            continue
        is_certain = not is_one_absent or (has_all_defaults and key in one and key in two)
        differences.append(ConfigDifference(key, here, there, is_certain))
    return sorted(differences, key=lambda pair: not pair.is_certain)


def flatten_both_configs(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both configs flattened, without the quantization that only one describes: the tensors show it."""
    keys = flatten_config(one), flatten_config(two)
    if all(any(map(_QUANTIZATION.fullmatch, flat)) for flat in keys):
        return keys
    first, second = ({key: value for key, value in flat.items() if not _QUANTIZATION.fullmatch(key)} for flat in keys)
    return first, second


def flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config that change the computation, flattened; rope parameters are at the top level."""
    return dict(computation_entries_in(config, "", tuple(map(str, config.get("architectures") or ()))))


def computation_entries_in(
    config: Mapping[str, Any], section: str, readers: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """Yield the keys that change the computation, with their values, from all sections.

    `readers` are the classes of the model, and the model types of the sections around this one.
    """
    rope = rope_parameters_of(config)
    kind = rope.get("rope_type")
    readers = (*readers, str(config.get("model_type")))
    entries = dict(config)
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads:  # the config may leave these two to their defaults
        width = find_default_head_width(str(config.get("model_type"))) or hidden // heads
        defaults = {"head_dim": width, "num_key_value_heads": heads}
        entries |= {key: value for key, value in defaults.items() if config.get(key) is None}
    for key, value in (entries | rope).items():
        if key in _ROPE or has_no_effect(str(key), readers) or (key == _ORIGINAL and kind not in _BY_ORIGINAL):
            continue
        if isinstance(value, Mapping):
            inner = value
            if key == _CODE:  # the classes of a model's own code, without repositories: `modeling_x.XForCausalLM`
                inner = {role: str(name).rpartition("--")[2] for role, name in value.items() if "Tokenizer" not in role}
            yield from computation_entries_in(inner, f"{section}{key}.", readers)
        elif key == "architectures" and isinstance(value, list):
            yield f"{section}{key}", [str(name).removeprefix("FSDP") for name in value]  # FSDP1's prefix
        else:
            yield f"{section}{key}", list(value) if isinstance(value, tuple) else value
    if config.get(_LENGTH) and kind in _BY_LENGTH:
        yield f"{section}{_LENGTH}", config[_LENGTH]


def has_no_effect(key: str, readers: Collection[str]) -> bool:
    """Return whether a key changes no result. `readers` are the `model_type` and `architectures` of the config."""
    read_by = _READ_BY.get(key)
    if read_by is not None and any(map(read_by.fullmatch, readers)):
        return False
    return _HARMLESS.fullmatch(key) is not None


def rope_parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters in a config.json, or in a section of one, under the keys of `rope_parameters`.

    The length before scaling is taken from the config, else from the rope parameters, else it is the maximum length.
    The default factor of yarn is the ratio of the two lengths. Source: `standardize_rope_params` and
    `_compute_yarn_parameters` in transformers/modeling_rope_utils.py.
    """
    rope: dict[str, Any] = {}
    for key in _ROPE:
        rope |= config[key] if isinstance(config.get(key), Mapping) else {}
    kind = rope.pop("type", None)  # the key before transformers 4.43; transformers replaces `mrope` itself
    if kind not in (None, "mrope"):
        rope.setdefault("rope_type", kind)
    if config.get("rope_theta") is not None:
        rope["rope_theta"] = config["rope_theta"]
    if rope.get("rope_type") in _BY_ORIGINAL:
        length = config.get(_LENGTH)
        rope[_ORIGINAL] = config.get(_ORIGINAL) or rope.get(_ORIGINAL) or length
        if rope["rope_type"] == "yarn" and rope.get("factor") is None and length and rope[_ORIGINAL]:
            rope["factor"] = length / rope[_ORIGINAL]
    return {key: value for key, value in rope.items() if value is not None}
