"""Recognize the prefixes that wrappers add to parameter names, and match the names that an optimizer records.

A wrapper stores the wrapped module as an attribute, whose name becomes a prefix of that module's parameters. Any module
of a model may be wrapped, so a prefix may be anywhere in a name, and more than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout.match_parameters import KEEP_NUMBERS, Size, format_shape_or_numel

# Source of recorded names: torch/optim/optimizer.py since 2.6. An optimizer that got `named_parameters()` has a list
# `param_names` in each group, beside `params`. The names come from the module that was passed: it may have been wrapped
# later, or be a part of the model, so one prefix may be missing or superfluous in all names.
PARAM_NAMES = "param_names"


def read_recorded_names(groups: Sequence[Sequence[Any]], names_by_group: Sequence[Any]) -> dict[Any, str]:
    """Return the recorded name of each parameter index; {} if no group has a list of names.

    `groups` have the indices, `names_by_group` the value of `param_names` of each group, None where it is missing.
    Raises `Unsupported` for lists that do not name each index once.
    """
    if all(names is None for names in names_by_group):
        return {}
    recorded: dict[Any, str] = {}
    for i, (group, names) in enumerate(zip(groups, names_by_group, strict=True)):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            message = f"`{PARAM_NAMES}` of group {i}: expected a list of names, found a {type(names).__name__}"
            raise Unsupported(message, hint=KEEP_NUMBERS)
        if len(names) != len(group):
            message = f"`{PARAM_NAMES}` of group {i}: expected {len(group)} names, found {len(names)}"
            raise Unsupported(message, hint=KEEP_NUMBERS)
        recorded |= dict(zip(group, names, strict=True))
    twice = [name for name, times in Counter(recorded.values()).items() if times > 1]
    if twice:
        message = f"`{PARAM_NAMES}`: expected {len(recorded)} different names, found {len(set(recorded.values()))}"
        raise Unsupported(message, tensor=twice[0], hint=KEEP_NUMBERS)
    return recorded


def parameters_by_index(
    recorded_names: Mapping[int, str],
    size_by_index: Mapping[int, Size],
    parameters: Mapping[str, Size],
    source_label: str = f"`{PARAM_NAMES}`",
) -> dict[int, str]:
    """Return the parameter of each index, by its recorded name. Raises `Mismatch` if name or size do not fit."""
    own = raw_names_by_bare_name(parameters)
    wanted = {number: parameter_name_in_model(name, own) for number, name in recorded_names.items()}
    unknown = [name for name in wanted.values() if name not in own]
    if unknown:
        message = f"{source_label} lists it, but the model does not have it ({len(unknown)} of {len(wanted)} names"
        raise Mismatch(f"{message} are unknown)", tensor=unknown[0], hint=KEEP_NUMBERS)
    matched = {number: own[name] for number, name in wanted.items()}
    for wrong in find_unequal_sizes(matched, size_by_index, parameters):
        message = f"{source_label} gives this name to parameter {wrong}: expected a state of shape "
        message += (
            f"{format_shape_or_numel(parameters[matched[wrong]])}, found {format_shape_or_numel(size_by_index[wrong])}"
        )
        raise Mismatch(message, tensor=matched[wrong], hint=KEEP_NUMBERS)
    return matched


def match_with_prefix(
    recorded_names: Mapping[int, str], size_by_index: Mapping[int, Size], parameters: Mapping[str, Size]
) -> list[dict[int, str]]:
    """Return each assignment that fits all sizes if one prefix is added to all names, or removed from all."""
    own = raw_names_by_bare_name(parameters)
    wanted = {number: parameter_name_in_model(name, own) for number, name in recorded_names.items()}
    first = next(iter(wanted.values()), "")
    added = [name.removesuffix(first) for name in own if name.endswith(f".{first}")]
    ways = [
        {number: own[prefix + name] for number, name in wanted.items()}
        for prefix in added
        if all(prefix + name in own for name in wanted.values())
    ]
    removed = [first[: dot + 1] for dot, letter in enumerate(first) if letter == "."]
    ways += [
        {number: own[name.removeprefix(prefix)] for number, name in wanted.items()}
        for prefix in removed
        if all(name.startswith(prefix) and name.removeprefix(prefix) in own for name in wanted.values())
    ]
    return [matched for matched in ways if not find_unequal_sizes(matched, size_by_index, parameters)]


def names_match_ignoring_wrappers(value: Any, names: Sequence[str]) -> bool:
    """Return whether the value of `param_names` has these names, ignoring the prefixes of wrappers."""
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return is_list and list(map(without_wrapper_prefixes, value)) == list(map(without_wrapper_prefixes, names))


def without_wrapper_prefixes(name: str) -> str:
    return without_prefixes_except_ddp(name).removeprefix(DDP.text)


def raw_names_by_bare_name(parameters: Iterable[str]) -> dict[str, str]:
    """Return the names of parameters, by the names without the prefixes of wrappers."""
    return {
        name: raw
        for raw, name in without_common_ddp_prefix(
            {raw: without_prefixes_except_ddp(raw) for raw in parameters}
        ).items()
    }


def find_unequal_sizes(
    matched: Mapping[int, str], size_by_index: Mapping[int, Size], parameters: Mapping[str, Size]
) -> list[int]:
    """Return the indices of states whose size differs from their parameter's."""
    return [
        number for number, name in matched.items() if size_by_index.get(number, parameters[name]) != parameters[name]
    ]


class WrapperPrefix(NamedTuple):
    """A prefix, and the wrapper that adds it."""

    text: str
    whose: str


class Average(NamedTuple):
    """A module that stores an average of a model: the prefix of the averaged names, and the module's own tensors.

    `online` is the prefix of the model that is averaged, if the module stores that too.
    """

    text: str
    counters: frozenset[str]
    online: str | None


# torch/nn/parallel/distributed.py; other data-parallel wrappers and averages use this prefix too, and models may
DDP = WrapperPrefix("module.", "DistributedDataParallel")
AVERAGES = (
    Average("module.", frozenset({"n_averaged"}), None),  # AveragedModel in torch/optim/swa_utils.py
    Average("ema_model.", frozenset({"initted", "step"}), "online_model."),  # EMA in ema_pytorch/ema_pytorch.py
)

# prefixes that never occur in a model's own names, so they are removed anywhere in a name
INSIDE = (
    WrapperPrefix("_orig_mod.", "torch.compile"),  # torch/_dynamo/eval_frame.py
    WrapperPrefix("_fsdp_wrapped_module.", "FSDP1"),  # torch/distributed/fsdp/_common_utils.py
    # torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py
    WrapperPrefix("_checkpoint_wrapped_module.", "activation checkpointing"),
    WrapperPrefix("_fpw_module.", "fairscale"),  # fairscale/nn/misc/flatten_params_wrapper.py
)
WRAPPERS = (DDP, *INSIDE)

PROMPT = "prompt_embeddings"  # the only tensor that PEFT's prompt learning saves
_ADAPTED = ("lora_", "base_model.", ".base_layer.", "trainable_tokens_delta", ".adapter.")
_FLAT = ("_flat_param", "flat_param")  # torch/distributed/fsdp/_flat_param.py, of several versions


def without_prefixes_except_ddp(name: str) -> str:
    """Return a parameter's name without the prefixes in `INSIDE`."""
    for prefix in INSIDE if "_mod" in name else ():  # which all of them contain
        name = name.replace(prefix.text, "")
    return name


def parameter_name_in_model(name: str, known: Container[str]) -> str:
    """Return a model's name of a parameter; if it is not `known`, without DDP's prefixes at its start."""
    own = without_prefixes_except_ddp(name)
    while own not in known and own.startswith(DDP.text):
        own = own.removeprefix(DDP.text)
    return own


def without_common_ddp_prefix(names: Mapping[str, str]) -> dict[str, str]:
    """Return names, by any keys, without DDP's prefix, removed as long as all of them begin with it."""
    stripped = dict(names)
    while stripped and all(name.startswith(DDP.text) for name in stripped.values()):
        stripped = {key: name.removeprefix(DDP.text) for key, name in stripped.items()}
    return stripped


def find_average_kind(names: Collection[str]) -> Average | None:
    """Return the kind of average that tensors of these names are, without DDP's prefix; None for a plain model."""
    for average in AVERAGES:
        prefixes = tuple(filter(None, (average.text, average.online)))
        if not all(name.startswith(prefixes) or name in average.counters for name in names):
            continue
        rest = [name for name in names if name not in average.counters]
        if rest and (len(rest) < len(names) or average.text != DDP.text):
            return average if any(name.startswith(average.text) for name in rest) else None
    return None


def is_flat_parameter_name(name: str) -> bool:
    """Return whether a name belongs to a flat parameter, in which FSDP1 stores all parameters of a module."""
    return name.rpartition(".")[2] in _FLAT


def may_be_adapter(names: Collection[str]) -> bool:
    """Return whether tensors of these names may belong to an adapter: a quick check without its config."""
    text = "\n".join(names)  # searched at once: there may be 100,000 names
    return PROMPT in names or any(part in text for part in _ADAPTED)
