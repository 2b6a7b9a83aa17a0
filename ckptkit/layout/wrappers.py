"""Know the prefixes that wrappers put into the names of parameters, and take them off.

A wrapper keeps the module that it wraps as an attribute, whose name then stands before those of that module's
parameters. Any module of a model may be wrapped, so a prefix may stand anywhere in a name, and more than once.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import NamedTuple


class WrapperPrefix(NamedTuple):
    """A prefix, whose it is, and the source that has it."""

    text: str
    whose: str
    source: str


class Average(NamedTuple):
    """A module that keeps an average of a model: what stands before the model's names, and its own tensors beside it.

    `online` stands before the names of the model that is averaged, if the module keeps that too.
    """

    text: str
    counters: frozenset[str]
    online: str | None
    source: str


# also that of other data parallel wrappers and of averages; it may be a word of a model's own names, too
DDP = WrapperPrefix("module.", "DistributedDataParallel", "torch/nn/parallel/distributed.py")
AVERAGES = (
    Average("module.", frozenset({"n_averaged"}), None, "AveragedModel in torch/optim/swa_utils.py"),
    Average("ema_model.", frozenset({"initted", "step"}), "online_model.", "EMA in ema_pytorch/ema_pytorch.py"),
)

# those that are no word of a model's own names, wherever they stand
INSIDE = (
    WrapperPrefix("_orig_mod.", "torch.compile", "torch/_dynamo/eval_frame.py"),
    WrapperPrefix("_fsdp_wrapped_module.", "FSDP1", "torch/distributed/fsdp/_common_utils.py"),
    WrapperPrefix(
        "_checkpoint_wrapped_module.",
        "activation checkpointing",
        "torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py",
    ),
    WrapperPrefix("_fpw_module.", "fairscale", "fairscale/nn/misc/flatten_params_wrapper.py"),
)
WRAPPERS = (DDP, *INSIDE)

PROMPT = "prompt_embeddings"  # all that prompt learning of PEFT leaves
_ADAPTED = ("lora_", "base_model.", ".base_layer.", "trainable_tokens_delta", ".adapter.")
_FLAT = ("_flat_param", "flat_param")  # torch/distributed/fsdp/_flat_param.py, of several versions


def unwrapped(name: str) -> str:
    """Return a parameter's name without the prefixes that are no word of a model's own."""
    for prefix in INSIDE:
        name = name.replace(prefix.text, "")
    return name


def own_name(name: str, known: Container[str]) -> str:
    """Return what a model calls a parameter; of a name that is not `known` without DDP's prefixes at its start."""
    own = unwrapped(name)
    while own not in known and own.startswith(DDP.text):
        own = own.removeprefix(DDP.text)
    return own


def without_ddp(names: Mapping[str, str]) -> dict[str, str]:
    """Return names, by any keys, without DDP's prefix, as often as all of them begin with it."""
    found = dict(names)
    while found and all(name.startswith(DDP.text) for name in found.values()):
        found = {key: name.removeprefix(DDP.text) for key, name in found.items()}
    return found


def find_average(names: Collection[str]) -> Average | None:
    """Return the average that tensors of these names are, without DDP's prefix; None for a plain model."""
    for average in AVERAGES:
        rest = [name for name in names if name not in average.counters]
        prefixes = tuple(filter(None, (average.text, average.online)))
        is_marked = len(rest) < len(names) or average.text != DDP.text
        if rest and is_marked and all(name.startswith(prefixes) for name in rest):
            return average if any(name.startswith(average.text) for name in rest) else None
    return None


def is_flat_name(name: str) -> bool:
    """Return whether a name is that of a flat parameter, in which FSDP1 has all parameters of a module."""
    return name.rpartition(".")[2] in _FLAT


def may_be_adapted(names: Collection[str]) -> bool:
    """Return whether tensors of these names may be an adapter's, at a glance."""
    return PROMPT in names or any(any(part in name for part in _ADAPTED) for name in names)
