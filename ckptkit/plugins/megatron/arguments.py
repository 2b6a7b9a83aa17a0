"""Compare the arguments in a Megatron checkpoint with the config of the model.

Source: megatron/training/arguments.py. They lie in `common.pt` beside the shards, or in the checkpoint itself: as an
entry of their own, or since core 0.20 in `common_state` (`save` in megatron/core/dist_checkpointing/serialization.py).
What ckptkit writes has no arguments, which Megatron would compare with its own, but `apply_layernorm_1p` beside the
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.formats.archives.flatten import pairs_of
from ckptkit.formats.archives.state_files import read_state_file
from ckptkit.formats.archives.values import load_value
from ckptkit.formats.pickles.inert_pickle import Record
from ckptkit.io.file import is_there
from ckptkit.layout import Blob, Layout
from ckptkit.models.computation import POSITIONS
from ckptkit.models.names.sizes import Sizes
from ckptkit.plugins.megatron import hybrid_names as hybrid

COMMON, _ARGS = "common.pt", "args"
_INSIDE = "common_state/shard_0_1"  # since core 0.20: a list with the dict that was in `common.pt` before
LAYERNORM_1P = "apply_layernorm_1p"
ZERO_CENTERED = ("gemma",)  # types whose norms lie around zero on the Hub
_OF_GPT = frozenset("*-E|")  # in the pattern of a HybridModel: what a GPT has, and where stages of a pipeline begin
_ACTIVATION = "relu2"  # what transformers calls it, and its default for these types
_TENSOR_PARALLEL = "tensor_model_parallel_size"
_JOINED = "megatron"  # the format of files of ranks, whose tensors are joined by rules
_COMPUTED = {"norm_epsilon": "rms_norm_eps"}
_OF_ROUTER = {
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
}
_ROTARY = ("rope", "mrope", "yarn")  # kinds of positions that transformers has as rope
_ROTARY_NUMBERS = {"rotary_base": "rope_theta", "rotary_percent": "partial_rotary_factor"}
_OF_MAMBA = [
    ("mamba_num_heads", "mamba_heads"),
    ("mamba_head_dim", "mamba_width"),
    ("mamba_num_groups", "mamba_groups"),
    ("mamba_state_dim", "mamba_states"),
]
_SWITCHES = {
    "rotary_interleaved": "the rotary embeddings are interleaved, and no model on the Hub has that for this type",
    "attention_output_gate": "queries have gates",
    "multi_latent_attention": "the attention has latent heads",
}


def check(checkpoint: Layout, sizes: Sizes) -> None:
    """Raise `Mismatch` for arguments that contradict a config, `Unsupported` where more than names would change."""
    args = read_args(checkpoint)
    is_hybrid = sizes.model_type in hybrid.TYPES
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if is_hybrid:
        check_hybrid(checkpoint, args, pattern, sizes)
    else:
        check_pattern(pattern)
    for name, said, wanted in list_numbers(args, sizes):
        if said != wanted:
            hint = "check that config.json belongs to this model"
            raise Mismatch(f"expected {name} {wanted} (config.json), found {said} in Megatron's arguments", hint=hint)
    if args.get("swiglu") is is_hybrid:
        gates = "no gated" if is_hybrid else "gated"
        raise Mismatch(
            f"Megatron's arguments say swiglu {is_hybrid}, but a model of type `{sizes.model_type}` has {gates} layers"
        )
    for name, meaning in _SWITCHES.items():
        if args.get(name) is True:
            raise Unsupported(f"Megatron's arguments say {name}: {meaning}", hint="pass --names keep to keep the names")
    check_norms(args.get(LAYERNORM_1P), sizes.model_type)


def describe(checkpoint: Layout) -> dict[str, Any]:
    """Return what the arguments say of the computation, in keys of config.json; {} where none are kept.

    Source: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py.
    """
    args = read_args(checkpoint)
    numbers = _COMPUTED | (_OF_ROUTER if args.get("num_experts") else {})
    found = {hub: args[own] for own, hub in numbers.items() if args.get(own) is not None}
    if args.get("swiglu") is True:
        found["hidden_act"] = "silu"
    elif args.get("squared_relu") is True:
        found["hidden_act"] = _ACTIVATION
    if (
        args.get("num_experts")
        and args.get("moe_router_score_function") == "softmax"
        and type(args.get("moe_router_pre_softmax")) is bool
    ):
        found["norm_topk_prob"] = not args["moe_router_pre_softmax"]
    return found | describe_positions(args) if args else {}


def describe_positions(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the arguments say of positions and windows.

    A window of Megatron's is the tokens before and after one; transformers' counts the token itself, too.
    """
    found: dict[str, Any] = {}
    window = args.get("window_size")
    if "window_size" in args:
        found["sliding_window"] = window[0] + 1 if isinstance(window, list | tuple) and window else 0
    kind = args.get("position_embedding_type")
    if kind in _ROTARY:
        found |= {hub: args[own] for own, hub in _ROTARY_NUMBERS.items() if args.get(own) is not None}
        scaled = "llama3" if args.get("use_rope_scaling") is True else "default"
        scaled = "linear" if args.get("rotary_seq_len_interpolation_factor") else scaled
        found["rope_type"] = "yarn" if kind == "yarn" else scaled
    if kind is not None:
        found[POSITIONS] = "rope" if kind in _ROTARY else kind
    return found


def check_pattern(pattern: object) -> None:
    """Raise `Unsupported` for a HybridModel, which has a layer for attention and the next one for what comes after."""
    if not isinstance(pattern, str) or not pattern:
        return
    message = f"Megatron's arguments say hybrid_layer_pattern {pattern}: the layers are those of a HybridModel"
    to_gpt = "convert it with Megatron's tools/checkpoint/gpt_hybrid_conversion.py --direction hybrid-to-gpt"
    raise Unsupported(message, hint=to_gpt if set(pattern) <= _OF_GPT else "pass --names keep to keep the names")


def check_hybrid(checkpoint: Layout, args: Mapping[str, Any], pattern: object, sizes: Sizes) -> None:
    """Raise `Mismatch` for a pattern of other layers than a config calls for, `Unsupported` for rows in no known order.

    A pattern has `|` where a stage of a pipeline begins, and behind `/` the layers that predict further tokens.
    """
    kinds = hybrid.kinds_of(sizes)
    said = pattern.partition("/")[0].replace("|", "") if isinstance(pattern, str) and pattern else kinds
    if said != kinds:
        hint = "check that config.json belongs to this model"
        raise Mismatch(f"expected the layers {kinds} (config.json), found {said} in Megatron's arguments", hint=hint)
    positions = args.get("position_embedding_type")
    if positions not in (None, "none"):
        expected = f"expected position_embedding_type none for a model of type `{sizes.model_type}`"
        message = f"{expected}, found {positions} in Megatron's arguments"
        raise Unsupported(message, hint="pass --names keep to keep the names")
    if args.get("squared_relu") is False and sizes.text.get("mlp_hidden_act", _ACTIVATION) == _ACTIVATION:
        wanted = f"expected squared_relu True ({_ACTIVATION} in config.json)"
        raise Mismatch(f"{wanted}, found False in Megatron's arguments")
    whole = next((name for name in checkpoint.tensors if name.endswith(f".mixer.{hybrid.IN_PROJ}")), None)
    if whole is not None and checkpoint.format != _JOINED and args.get(_TENSOR_PARALLEL) != 1:
        message = f"the order of its rows depends on {_TENSOR_PARALLEL}, which is not 1 in Megatron's arguments"
        raise Unsupported(message, tensor=whole, hint="save it as torch_dist, which has a tensor for each kind of rows")


def list_numbers(args: Mapping[str, Any], sizes: Sizes) -> Iterator[tuple[str, int, int]]:
    """Yield the numbers that arguments say, each with the one that the config calls for."""
    groups = "num_attention_heads" if args.get("group_query_attention") is False else "num_query_groups"
    symbols = [("hidden_size", "hidden"), ("num_attention_heads", "heads")]
    symbols += _OF_MAMBA if sizes.model_type in hybrid.TYPES else [("num_layers", "layers")]
    for name, symbol in [*symbols, (groups, "key_heads")]:
        if type(args.get(name)) is int:
            yield name, args[name], sizes[symbol]
    if type(args.get("kv_channels")) is int:
        yield "kv_channels", args["kv_channels"], sizes.head_width


def check_norms(around_zero: object, model: str) -> None:
    """Raise `Unsupported` where one would have to be added to all norms or taken off, or nothing tells that."""
    if model in ZERO_CENTERED and around_zero is not True:
        message = f"the norms of `{model}` are centered at zero on the Hub, but no `{LAYERNORM_1P}` says so here"
        raise Unsupported(message, hint="pass --names keep to keep the names")
    if around_zero is True and model not in ZERO_CENTERED:
        message = f"Megatron's arguments say {LAYERNORM_1P}: all norms of `{model}` would need 1 added"
        raise Unsupported(message, hint="pass --names keep to keep the names")


def read_args(checkpoint: Layout) -> Mapping[str, Any]:
    """Return the arguments of the job by name, or what else all ranks have in common; {} where none are kept."""
    entries = {checkpoint.key(name): blob for name, blob in checkpoint.blobs.items()}
    if (_ARGS,) in entries:
        found = load_value(checkpoint.root, entries[_ARGS,])
    else:
        common = dict(pairs_of(read_common(checkpoint, entries.get((_INSIDE,)))) or ())
        found = common.get(_ARGS, common)
    state = found.state if isinstance(found, Record) else found
    return {str(name): value for name, value in pairs_of(state) or ()}


def read_common(checkpoint: Layout, inside: Blob | None) -> object:
    """Return the dict that all ranks have in common, from the entry with it or from its file; None without either."""
    if inside is not None:
        found = load_value(checkpoint.root, inside)
        if not (isinstance(found, list) and len(found) == 1):
            raise Corrupt("expected a list of one dict, found something else", path=checkpoint.root, tensor=_INSIDE)
        return found[0]
    is_beside = is_there(checkpoint.root / COMMON)
    return read_state_file(checkpoint.root, COMMON).value if is_beside else None
