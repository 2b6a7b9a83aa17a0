"""Collect the state of a model, its optimizer and other objects for a checkpoint, and restore it.

A state is nested dicts and lists, with tensors as leaves.

model           {name: tensor}
optim
├── state       {name: {"step": tensor, "exp_avg": tensor, ...}}, for parameters that have optimizer state
└── param_groups  [{"lr": ..., "params": [name, ...]}, ...]
step            optimizer steps
<other names>   the state of a scheduler, a loader, ...

Names are those of the unwrapped model, without prefixes of FSDP; tensors are sharded as in the model.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptkit.adapters.names import parse_tensor_name
from ckptkit.errors import Mismatch, Unsupported, Usage, and_more
from ckptkit.storage.ranks import Ranks

Tree = dict[str, Any]


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the tree with `change` applied to every tensor, in order; other leaves are unchanged."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(change, value) for value in tree]
    return tree


def tensors_by_dotted_key(tree: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a tree with its keys joined by dots, as DCP joins them."""
    if isinstance(tree, Tensor):
        yield key, tree
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for child_key, value in children:
        yield from tensors_by_dotted_key(value, f"{key}.{child_key}" if key else str(child_key))


def nest_leaves(leaves: Mapping[tuple[str | int, ...], Any]) -> Tree:
    """Return nested dicts and lists with the leaves at their key paths; an integer key is an index of a list.

    Raises `Unsupported` for a list with missing indices.
    """
    tree: Tree = {}
    for (*parents, last), leaf in leaves.items():
        node: dict[Any, Any] = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return {name: with_integer_dicts_as_lists(part) for name, part in tree.items()}


def with_integer_dicts_as_lists(tree: Any) -> Any:
    """Return a tree of dicts with each dict that has only integer keys turned into a list."""
    if not isinstance(tree, dict):
        return tree
    inside = {key: with_integer_dicts_as_lists(value) for key, value in tree.items()}
    if not all(isinstance(key, int) for key in inside):
        return inside
    if sorted(inside) != list(range(len(inside))):
        raise Unsupported(f"expected the members 0 to {len(inside) - 1} of a list, found {sorted(inside)}")
    return [inside[key] for key in range(len(inside))]


def materialize_meta_tensors(tree: Any) -> Any:
    """Return the tree with an uninitialized CPU tensor in place of each meta tensor."""
    return map_tensors(lambda each: torch.empty(each.shape, dtype=each.dtype) if each.is_meta else each, tree)


def with_model_tensors(stored: Any, model_state: Any, name: str) -> Any:
    """Return the `stored` tree with the tensors of the model (`model_state`) as buffers to read into.

    Non-tensor leaves are the stored values. Raises `Mismatch`, with a tensor name that starts with `name`, if keys,
    shapes or dtypes differ.
    """
    if isinstance(stored, dict) and isinstance(model_state, dict):
        require_same_names(stored, model_state, name)
        return {key: with_model_tensors(value, model_state[key], f"{name}.{key}") for key, value in stored.items()}
    if isinstance(stored, Tensor) and isinstance(model_state, Tensor):
        if stored.shape != model_state.shape:
            expected = f"expected shape {list(model_state.shape)} as in the model"
            message = f"{expected}, found {list(stored.shape)} in the checkpoint"
            raise Mismatch(message, tensor=name, hint="check that the checkpoint is of the same model")
        if stored.dtype != model_state.dtype:
            message = (
                f"expected {dtype_name(model_state)} as in the model, found {dtype_name(stored)} in the checkpoint"
            )
            raise Mismatch(message, tensor=name, hint="build the model in the dtype that it was saved in")
        return model_state
    if isinstance(stored, Tensor) or isinstance(model_state, Tensor):
        raise Mismatch("expected a tensor in both the checkpoint and the model, found it in only one", tensor=name)
    return stored


def require_same_names(stored: Tree, ours: Tree, name: str) -> None:
    """Raise `Mismatch` if a name is missing on one side."""
    hint = "check that the checkpoint is of the same model"
    for some, others, who in ((ours, stored, "the checkpoint lacks"), (stored, ours, "the model lacks")):
        missing = [key for key in some if key not in others]
        if missing:
            message = f"{who} `{missing[0]}`{and_more(len(missing) - 1)}"
            raise Mismatch(message, tensor=f"{name}.{missing[0]}", hint=hint)


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype as `float32`, without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


OURS = ("model", "optim", "optimizer", "step", "metrics", "path")  # reserved names, not allowed for other states


@dataclass
class Training:
    """The objects whose state a checkpoint stores: a model, optionally its optimizer, and others with a state.

    With `is_adapter` only the model's adapters are saved. Loading such a checkpoint keeps the model's other weights.
    """

    model: nn.Module
    optimizer: Optimizer | None
    others: Mapping[str, Stateful | dict[Any, Any]]
    ranks: Ranks
    is_adapter: bool = False
    groups: list[set[str]] = field(default_factory=list)  # parameter names of each parameter group of the optimizer
    kept: Tree = field(default_factory=dict)  # weights of the model that are not loaded from an adapter checkpoint

    def __post_init__(self) -> None:
        others: Mapping[str, object] = self.others  # Python callers may pass anything
        for name, thing in others.items():
            if name in OURS:
                raise Usage(f"`{name}` is a name that ckptkit uses itself", hint="choose another name")
            if not isinstance(thing, (dict, Stateful)):
                hint = "pass a dict, or an object with state_dict() and load_state_dict()"
                raise Usage(f"`{name}`: expected an object with a state, found a {type(thing).__name__}", hint=hint)

    def take_state(self) -> Tree:
        """Return the current state. Its tensors alias model and optimizer: write or copy them before the next step."""
        others = self.ranks.run_on_all_ranks(
            lambda: {name: copy_plain_state(name, thing) for name, thing in self.others.items()}
        )
        model = get_model_state_dict(self.model)
        if self.is_adapter:
            model = {name: tensor for name, tensor in model.items() if parse_tensor_name(name) is not None}
            if not model:
                raise Usage("expected adapters to save, found none in the model", hint="save it as `sharded`")
        state: Tree = {"model": model}
        if self.optimizer is not None:
            state["optim"] = take_optimizer_state(self.model, self.optimizer, self.ranks)
        return {**state, **others}

    def prepare_entries_to_load(self, stored: Tree) -> Tree:
        """Return the entries to load, with tensors to read them into.

        `stored` is the outline of a checkpoint: its tensors have no data. Raises `Mismatch` if an entry is missing, or
        if names, shapes or dtypes differ.
        """
        requested = ["step", "model", *(["optim"] if self.optimizer is not None else []), *self.others]
        for name in requested:
            if name not in stored:
                available = ", ".join(f"`{name}`" for name in stored)
                raise Mismatch(
                    f"expected `{name}` in the checkpoint, found only {available}",
                    hint=f"load without `{name}` if that is intended",
                )
        wanted = {name: materialize_meta_tensors(stored[name]) for name in ("step", *self.others)}
        ours = get_model_state_dict(self.model)
        if are_adapter_names(stored["model"]):
            self.kept = {name: tensor for name, tensor in ours.items() if parse_tensor_name(name) is None}
            ours = {name: tensor for name, tensor in ours.items() if name not in self.kept}
        wanted["model"] = with_model_tensors(stored["model"], ours, "model")
        if self.optimizer is not None:
            # torch initializes an empty optimizer only if no parameter has a gradient
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.state.clear()
            own: Tree = dict(get_optimizer_state_dict(self.model, self.optimizer))
            self.groups = [set(group["params"]) for group in own["param_groups"]]
            # the checkpoint has no state for a parameter that never had a gradient: do not load any for it
            state = stored["optim"].get("state", {})
            for name in state:
                if name not in own["state"]:
                    hint = "build the same optimizer over the same parameters"
                    message = "the optimizer has no state for this parameter"
                    raise Mismatch(message, tensor=f"optim.state.{name}", hint=hint)
            wanted["optim"] = {
                "state": {
                    name: with_model_tensors(state[name], own["state"][name], f"optim.state.{name}") for name in state
                },
                "param_groups": materialize_meta_tensors(stored["optim"]["param_groups"]),
            }
        return wanted

    def restore_state(self, state: Tree) -> None:
        """Load `state`, of `prepare_entries_to_load` and filled by `Stored.read_into`, into the model and all else."""
        if self.optimizer is not None:
            groups = state["optim"]["param_groups"]
            if [set(group["params"]) for group in groups] != self.groups:
                raise Mismatch(
                    f"expected the {len(self.groups)} parameter groups of the optimizer, "
                    f"found {len(groups)} others in the checkpoint",
                    tensor="optim.param_groups",
                    hint="group the parameters as they were when it was saved",
                )
        set_model_state_dict(self.model, self.kept | state["model"])
        if self.optimizer is not None:
            # with strict=True torch requires optimizer state for every parameter
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(self.model, self.optimizer, state["optim"], options=options)
        for name, thing in self.others.items():
            if isinstance(thing, dict):
                thing.clear()
                thing.update(state[name])
            else:
                thing.load_state_dict(state[name])


def are_adapter_names(names: Iterable[str]) -> bool:
    """Return True if all of these tensor names, at least one, are names of adapters."""
    return {parse_tensor_name(name) is not None for name in names} == {True}


def copy_plain_state(name: str, stateful: Stateful | dict[Any, Any]) -> Any:
    """Return a copy of the state of one object. Raises `Usage` unless it has only plain values and full tensors."""
    state = stateful if isinstance(stateful, dict) else stateful.state_dict()
    if any(isinstance(tensor, (DTensor, ShardedTensor)) for _, tensor in tensors_by_dotted_key(state)):
        raise Usage(f"the state of `{name}` holds a sharded tensor", hint="only model and optimizer may hold those")
    return copy_by_saving(name, state)


def copy_by_saving(name: str, state: Any) -> Any:
    """Return a copy on the CPU, made with torch.save and a safe torch.load.

    A state that cannot be loaded again thus fails at the save. Raises `Usage`.
    """
    written = io.BytesIO()
    try:
        torch.save(state, written)
        written.seek(0)
        return torch.load(written, map_location="cpu", weights_only=True)
    except Exception as error:
        hint = "keep numbers, strings, tensors, and lists and dicts of them in a state"
        raise Usage(f"the state of `{name}` cannot be saved: {error}", hint=hint) from error


def take_optimizer_state(model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> Tree:
    """Return the optimizer state by parameter name; a collective.

    torch initializes an empty optimizer with zeros and `step` 1, as if it had taken a step. Such a state is neither
    saved nor left in the optimizer. With FSDP1 a rank's optimizer may be empty only because its shards are, so the
    state is dropped only if it is empty on all ranks.
    """
    is_empty = not optimizer.state
    state = dict(get_optimizer_state_dict(model, optimizer))
    if is_empty:
        optimizer.state.clear()
    if all(ranks.gather_values(is_empty)):
        state["state"] = {}
    state["param_groups"] = copy_by_saving("optimizer", state["param_groups"])
    return state
