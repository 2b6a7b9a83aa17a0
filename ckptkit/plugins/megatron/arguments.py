"""Compare the arguments in a Megatron checkpoint with the config of the model.

Source: megatron/training/arguments.py. The arguments are in `common.pt` next to the shards, or in the checkpoint
itself: as an entry, or since core 0.20 in `common_state` (`save` in megatron/core/dist_checkpointing/serialization.py).
Checkpoints written by ckptkit have no arguments, because Megatron would compare them with its own; only
`apply_layernorm_1p` is stored next to the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.formats.archives.flatten import find_dict_items
from ckptkit.formats.archives.non_tensor_entries import load_value
from ckptkit.formats.archives.torch_save import read_state_file
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.io.file import is_existing_path
from ckptkit.layout import Layout
from ckptkit.models.config_differences import POSITIONS
from ckptkit.models.names.sizes import Sizes
from ckptkit.plugins.megatron import hybrid_names as hybrid

COMMON, _ARGS = "common.pt", "args"
_INSIDE = "common_state/shard_0_1"  # since core 0.20: a list with the dict that was in `common.pt` before
LAYERNORM_1P = "apply_layernorm_1p"
ZERO_CENTERED = ("gemma",)  # types whose norm weights are centered at zero on the Hub
_OF_GPT = frozenset("*-E|")  # letters of a HybridModel pattern that a GPT can have; `|` separates pipeline stages
_ACTIVATION = "relu2"  # transformers' name, and its default for these types
_TENSOR_PARALLEL = "tensor_model_parallel_size"
_JOINED = "megatron"  # the format of legacy per-rank files, whose tensors ckptkit joins
_COMPUTED = {"norm_epsilon": "rms_norm_eps"}
_OF_ROUTER = {
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
}
_ROTARY = ("rope", "mrope", "yarn")  # position types that transformers implements as rope
_ROTARY_NUMBERS = {"rotary_base": "rope_theta", "rotary_percent": "partial_rotary_factor"}
_OF_MAMBA = [
    ("mamba_num_heads", "mamba_heads"),
    ("mamba_head_dim", "mamba_width"),
    ("mamba_num_groups", "mamba_groups"),
    ("mamba_state_dim", "mamba_states"),
]
_KEEP_NAMES = "pass --names keep to keep the names"
_SWITCHES = {
    "rotary_interleaved": "the rotary embeddings are interleaved, and no model on the Hub has that for this type",
    "attention_output_gate": "queries have gates",
    "multi_latent_attention": "the attention has latent heads",
}


def check_arguments_against_config(checkpoint: Layout, sizes: Sizes) -> None:
    """Check the arguments against the config.

    Raises `Mismatch` if they contradict the config, `Unsupported` if translating the names is not enough.
    """
    args = read_job_arguments(checkpoint)
    is_hybrid = sizes.model_type in hybrid.TYPES
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if is_hybrid:
        check_hybrid_model(checkpoint, args, pattern, sizes)
    elif isinstance(pattern, str) and pattern:  # GPT's layers each have attention and feed-forward
        message = f"Megatron's arguments say hybrid_layer_pattern {pattern}: the layers are those of a HybridModel"
        to_gpt = "convert it with Megatron's tools/checkpoint/gpt_hybrid_conversion.py --direction hybrid-to-gpt"
        raise Unsupported(message, hint=to_gpt if set(pattern) <= _OF_GPT else _KEEP_NAMES)
    for name, saved, wanted in sizes_to_compare(args, sizes):
        if saved != wanted:
            hint = "check that config.json belongs to this model"
            raise Mismatch(f"expected {name} {wanted} (config.json), found {saved} in Megatron's arguments", hint=hint)
    if args.get("swiglu") is is_hybrid:
        gates = "no gated" if is_hybrid else "gated"
        raise Mismatch(
            f"Megatron's arguments say swiglu {is_hybrid}, but a model of type `{sizes.model_type}` has {gates} layers"
        )
    for name, meaning in _SWITCHES.items():
        if args.get(name) is True:
            raise Unsupported(f"Megatron's arguments say {name}: {meaning}", hint=_KEEP_NAMES)
    is_shifted, model = args.get(LAYERNORM_1P) is True, sizes.model_type
    if model in ZERO_CENTERED and not is_shifted:
        message = f"the norms of `{model}` are centered at zero on the Hub, but no `{LAYERNORM_1P}` says so here"
        raise Unsupported(message, hint=_KEEP_NAMES)
    if is_shifted and model not in ZERO_CENTERED:
        message = f"Megatron's arguments say {LAYERNORM_1P}: all norms of `{model}` would need 1 added"
        raise Unsupported(message, hint=_KEEP_NAMES)


def computation_arguments_of(checkpoint: Layout) -> dict[str, Any]:
    """Return the arguments that affect the computation, in keys of config.json; {} without saved arguments.

    Source: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py.
    """
    args = read_job_arguments(checkpoint)
    if not args:
        return {}
    numbers = _COMPUTED | (_OF_ROUTER if args.get("num_experts") else {})
    config = {hub: args[own] for own, hub in numbers.items() if args.get(own) is not None}
    if args.get("swiglu") is True:
        config["hidden_act"] = "silu"
    elif args.get("squared_relu") is True:
        config["hidden_act"] = _ACTIVATION
    if (
        args.get("num_experts")
        and args.get("moe_router_score_function") == "softmax"
        and type(args.get("moe_router_pre_softmax")) is bool
    ):
        config["norm_topk_prob"] = not args["moe_router_pre_softmax"]
    # Megatron's window counts only the tokens before and after a token; transformers also counts the token itself
    window = args.get("window_size")
    if "window_size" in args:
        config["sliding_window"] = window[0] + 1 if isinstance(window, list | tuple) and window else 0
    kind = args.get("position_embedding_type")
    if kind in _ROTARY:
        config |= {hub: args[own] for own, hub in _ROTARY_NUMBERS.items() if args.get(own) is not None}
        scaled = "llama3" if args.get("use_rope_scaling") is True else "default"
        scaled = "linear" if args.get("rotary_seq_len_interpolation_factor") else scaled
        config["rope_type"] = "yarn" if kind == "yarn" else scaled
    if kind is not None:
        config[POSITIONS] = "rope" if kind in _ROTARY else kind
    return config


def check_hybrid_model(checkpoint: Layout, args: Mapping[str, Any], pattern: object, sizes: Sizes) -> None:
    """Check the layer pattern, positions and activation of a hybrid model.

    Raises `Mismatch` if the pattern has other layers than the config, `Unsupported` if the order of rows is unknown. In
    a pattern `|` starts a pipeline stage, and `/` starts the layers for multi-token prediction.
    """
    kinds = hybrid.layer_kinds_of(sizes)
    saved_kinds = pattern.partition("/")[0].replace("|", "") if isinstance(pattern, str) and pattern else kinds
    if saved_kinds != kinds:
        hint = "check that config.json belongs to this model"
        raise Mismatch(
            f"expected the layers {kinds} (config.json), found {saved_kinds} in Megatron's arguments", hint=hint
        )
    positions = args.get("position_embedding_type")
    if positions not in (None, "none"):
        expected = f"expected position_embedding_type none for a model of type `{sizes.model_type}`"
        message = f"{expected}, found {positions} in Megatron's arguments"
        raise Unsupported(message, hint=_KEEP_NAMES)
    if args.get("squared_relu") is False and sizes.text_config.get("mlp_hidden_act", _ACTIVATION) == _ACTIVATION:
        wanted = f"expected squared_relu True ({_ACTIVATION} in config.json)"
        raise Mismatch(f"{wanted}, found False in Megatron's arguments")
    in_proj = next((name for name in checkpoint.tensors if name.endswith(f".mixer.{hybrid.IN_PROJ}")), None)
    if in_proj is not None and checkpoint.format != _JOINED and args.get(_TENSOR_PARALLEL) != 1:
        message = f"the order of its rows depends on {_TENSOR_PARALLEL}, which is not 1 in Megatron's arguments"
        raise Unsupported(
            message, tensor=in_proj, hint="save it as torch_dist, which has a tensor for each kind of rows"
        )


def sizes_to_compare(args: Mapping[str, Any], sizes: Sizes) -> Iterator[tuple[str, int, int]]:
    """Yield the sizes in the arguments as (name, size in the arguments, size in the config)."""
    groups = "num_attention_heads" if args.get("group_query_attention") is False else "num_query_groups"
    symbols = [("hidden_size", "hidden"), ("num_attention_heads", "heads")]
    symbols += _OF_MAMBA if sizes.model_type in hybrid.TYPES else [("num_layers", "layers")]
    for name, symbol in [*symbols, (groups, "key_heads")]:
        if type(args.get(name)) is int:
            yield name, args[name], sizes[symbol]
    if type(args.get("kv_channels")) is int:
        yield "kv_channels", args["kv_channels"], sizes.head_width


def read_job_arguments(checkpoint: Layout) -> Mapping[str, Any]:
    """Return the arguments of the job by name, or else the entries that all ranks share; {} without either."""
    root, entries = checkpoint.root, {checkpoint.key(name): blob for name, blob in checkpoint.blobs.items()}
    if (_ARGS,) in entries:
        saved = load_value(root, entries[_ARGS,])
    else:
        shared = None
        if (_INSIDE,) in entries:
            listed = load_value(root, entries[_INSIDE,])
            if not (isinstance(listed, list) and len(listed) == 1):
                raise Corrupt("expected a list of one dict, found something else", path=root, tensor=_INSIDE)
            shared = listed[0]
        elif is_existing_path(root / COMMON):
            shared = read_state_file(root, COMMON).value
        common = dict(find_dict_items(shared) or ())
        saved = common.get(_ARGS, common)
    state = saved.state if isinstance(saved, Record) else saved
    return {str(name): value for name, value in find_dict_items(state) or ()}
