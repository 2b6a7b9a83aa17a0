"""Take the state of a model, its optimizer and the rest for a checkpoint, and give it back.

A state is nested dicts and lists, with tensors as leaves.

model           {name: tensor}
optim
├── state       {name: {"step": tensor, "exp_avg": tensor, ...}}, of the parameters that have any
└── param_groups  [{"lr": ..., "params": [name, ...]}, ...]
step            optimizer steps
<other names>   the state of a scheduler, a loader, ...

Names are the model's own, whatever wraps it; tensors are sharded as the model is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from ckptkit.adapters.names import read_entry
from ckptkit.errors import Mismatch, Unsupported, Usage, and_more
from ckptkit.storage.ranks import Ranks

Tree = dict[str, Any]


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the tree with every tensor changed, in the order of the tree; anything else as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(change, value) for value in tree]
    return tree


def flatten(tree: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree, each with the keys that lead to it, joined by points as torch joins them."""
    if isinstance(tree, Tensor):
        yield key, tree
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for step, value in inside:
        yield from flatten(value, f"{key}.{step}" if key else str(step))


def unflatten(leaves: Mapping[str, Any], keys: Mapping[str, Sequence[str | int]]) -> Tree:
    """Return the leaves in the nested dicts and lists that their `keys` lead through; a number leads into a list.

    Raises `Unsupported` for a list that lacks members.
    """
    tree: Tree = {}
    for name, leaf in leaves.items():
        *above, last = keys[name]
        node: dict[Any, Any] = tree
        for step in above:
            node = node.setdefault(step, {})
        node[last] = leaf
    return {name: with_lists(part) for name, part in tree.items()}


def with_lists(tree: Any) -> Any:
    """Return a tree of dicts with a list in the place of each that has numbers for keys."""
    if not isinstance(tree, dict):
        return tree
    inside = {key: with_lists(value) for key, value in tree.items()}
    if not all(isinstance(key, int) for key in inside):
        return inside
    if sorted(inside) != list(range(len(inside))):
        raise Unsupported(f"expected the members 0 to {len(inside) - 1} of a list, found {sorted(inside)}")
    return [inside[key] for key in range(len(inside))]


def outlined(tree: Any) -> Any:
    """Return the tree with tensors that have a shape and a dtype, but no data."""
    return map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tree)


def blank(tree: Any) -> Any:
    """Return the tree with new tensors on the CPU in the place of those without data."""
    return map_tensors(lambda each: torch.empty(each.shape, dtype=each.dtype) if each.is_meta else each, tree)


def fit(stored: Any, ours: Any, name: str) -> Any:
    """Return our tensors in the place of the stored ones, to be read into; what is no tensor is the stored one's.

    Both have the same keys, shapes and dtypes, or `Mismatch` is raised; `name` is where in the state they are.
    """
    if isinstance(stored, dict) and isinstance(ours, dict):
        require_same_names(stored, ours, name)
        return {key: fit(value, ours[key], f"{name}.{key}") for key, value in stored.items()}
    if isinstance(stored, Tensor) and isinstance(ours, Tensor):
        if stored.shape != ours.shape:
            message = f"expected shape {list(ours.shape)} as in the model, found {list(stored.shape)} in the checkpoint"
            raise Mismatch(message, tensor=name, hint="check that the checkpoint is of the same model")
        if stored.dtype != ours.dtype:
            message = f"expected {dtype_name(ours)} as in the model, found {dtype_name(stored)} in the checkpoint"
            raise Mismatch(message, tensor=name, hint="build the model in the dtype that it was saved in")
        return ours
    if isinstance(stored, Tensor) or isinstance(ours, Tensor):
        raise Mismatch("it is a tensor only in the checkpoint or only in the model", tensor=name)
    return stored


def require_same_names(stored: Tree, ours: Tree, name: str) -> None:
    """Raise `Mismatch` where one side has a name that the other has not."""
    hint = "check that the checkpoint is of the same model"
    for some, others, who in ((ours, stored, "the checkpoint lacks"), (stored, ours, "the model lacks")):
        missing = [key for key in some if key not in others]
        if missing:
            message = f"{who} `{missing[0]}`{and_more(len(missing) - 1)}"
            raise Mismatch(message, tensor=f"{name}.{missing[0]}", hint=hint)


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype as users type it: `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


OURS = ("model", "optim", "optimizer", "step", "metrics", "path")  # names that other state cannot have


@dataclass
class Training:
    """A training as a checkpoint sees it: a model, perhaps its optimizer, and whatever else has a state.

    With `is_adapter` what is saved of the model is its adapters alone. A checkpoint that has no more is put into a
    model that keeps its other weights.
    """

    model: nn.Module
    optimizer: Optimizer | None
    others: Mapping[str, Stateful | dict[Any, Any]]
    ranks: Ranks
    is_adapter: bool = False
    groups: list[set[str]] = field(default_factory=list)  # the parameters' names in each of the optimizer's groups
    kept: Tree = field(default_factory=dict)  # what the model keeps of its own

    def __post_init__(self) -> None:
        for name, thing in self.others.items():
            require_state(name, thing)

    def take(self) -> Tree:
        """Return the state now. Its tensors are the model's and the optimizer's: to be written at once, or copied."""
        others = self.ranks.together(lambda: {name: snapshot(name, thing) for name, thing in self.others.items()})
        model = get_model_state_dict(self.model)
        state: Tree = {"model": adapters_in(model) if self.is_adapter else model}
        if self.optimizer is not None:
            state["optim"] = take_optimizer(self.model, self.optimizer, self.ranks)
        return {**state, **others}

    def prepare(self, stored: Tree) -> Tree:
        """Return the part of a `stored` state that is asked for, with tensors to read it into.

        `stored` is an outline: its tensors have no data. Raises `Mismatch` unless the two agree in everything.
        """
        asked = ["step", "model", *(["optim"] if self.optimizer is not None else []), *self.others]
        for name in asked:
            if name not in stored:
                there = ", ".join(f"`{name}`" for name in stored)
                raise Mismatch(
                    f"expected `{name}` in the checkpoint, found only {there}",
                    hint=f"load without `{name}` if that is intended",
                )
        wanted = {name: blank(stored[name]) for name in ("step", *self.others)}
        ours = get_model_state_dict(self.model)
        if are_adapters(stored["model"]):
            self.kept = {name: tensor for name, tensor in ours.items() if read_entry(name) is None}
            ours = {name: tensor for name, tensor in ours.items() if name not in self.kept}
        wanted["model"] = fit(stored["model"], ours, "model")
        if self.optimizer is not None:
            wanted["optim"] = self._prepare_optimizer(stored["optim"], self.optimizer)
        return wanted

    def _prepare_optimizer(self, stored: Tree, optimizer: Optimizer) -> Tree:
        optimizer.zero_grad(set_to_none=True)  # else torch makes no state to read into
        optimizer.state.clear()
        ours: Tree = dict(get_optimizer_state_dict(self.model, optimizer))
        self.groups = [set(group["params"]) for group in ours["param_groups"]]
        state = stored.get("state", {})
        for name in state:
            if name not in ours["state"]:
                hint = "build the same optimizer over the same parameters"
                raise Mismatch("the optimizer has no state for this parameter", tensor=f"optim.state.{name}", hint=hint)
        return {
            # a parameter that never had a gradient has no state, in the checkpoint and then here
            "state": {name: fit(state[name], ours["state"][name], f"optim.state.{name}") for name in state},
            "param_groups": blank(stored["param_groups"]),
        }

    def restore(self, state: Tree) -> None:
        """Set everything to a state that `prepare` made and that has been read since."""
        if self.optimizer is not None:
            require_same_groups(state["optim"]["param_groups"], self.groups)
        set_model_state_dict(self.model, self.kept | state["model"])
        if self.optimizer is not None:
            # strict would be to demand a state of every parameter
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(self.model, self.optimizer, state["optim"], options=options)
        for name, thing in self.others.items():
            if isinstance(thing, dict):
                thing.clear()
                thing.update(state[name])
            else:
                thing.load_state_dict(state[name])


def are_adapters(names: Iterable[str]) -> bool:
    """Return whether there are adapters of these names, and nothing else."""
    return {read_entry(name) is not None for name in names} == {True}


def adapters_in(model: Tree) -> Tree:
    """Return the adapters in a model's state. Raises `Usage` if there are none."""
    found = {name: tensor for name, tensor in model.items() if read_entry(name) is not None}
    if not found:
        raise Usage("expected adapters to save, found none in the model", hint="save it as `sharded`")
    return found


def require_state(name: str, thing: object) -> None:
    """Raise `Usage` for what has no state, or a name that means something else."""
    if name in OURS:
        raise Usage(f"`{name}` is a name that ckptkit uses itself", hint="choose another name")
    if not isinstance(thing, (dict, Stateful)):
        hint = "pass a dict, or an object with state_dict() and load_state_dict()"
        raise Usage(f"`{name}`: expected an object with a state, found a {type(thing).__name__}", hint=hint)


def snapshot(name: str, thing: Stateful | dict[Any, Any]) -> Any:
    """Return a copy of the state of one thing. Raises `Usage` unless it is of plain values and whole tensors."""
    state = thing if isinstance(thing, dict) else thing.state_dict()
    map_tensors(lambda tensor: require_whole(name, tensor), state)
    return copied(name, state)


def copied(name: str, state: Any) -> Any:
    """Return a copy on the CPU, made as a checkpoint makes it: what comes through here will come out of there."""
    written = io.BytesIO()
    try:
        torch.save(state, written)
        written.seek(0)
        return torch.load(written, map_location="cpu", weights_only=True)
    except Exception as error:
        hint = "keep numbers, strings, tensors, and lists and dicts of them in a state"
        raise Usage(f"the state of `{name}` cannot be saved: {error}", hint=hint) from error


def require_whole(name: str, tensor: Tensor) -> None:
    """Raise `Usage` for a tensor that is sharded: of these there are the model's and the optimizer's only."""
    if isinstance(tensor, (DTensor, ShardedTensor)):
        raise Usage(f"the state of `{name}` holds a sharded tensor", hint="only model and optimizer may hold those")


def take_optimizer(model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> Tree:
    """Return the optimizer's state by the names of the parameters.

    torch fills an optimizer that has none with zeros and `step` 1, as though it had taken a step: neither the
    checkpoint nor the optimizer keeps those. That of a rank may be empty only because its shards of FSDP1 are.
    """
    is_empty = not optimizer.state
    state = dict(get_optimizer_state_dict(model, optimizer))
    if is_empty:
        optimizer.state.clear()
    if all(ranks.gather(is_empty)):
        state["state"] = {}
    state["param_groups"] = copied("optimizer", state["param_groups"])
    return state


def require_same_groups(stored: list[Tree], ours: list[set[str]]) -> None:
    """Raise `Mismatch` unless the stored groups are of the same parameters as the optimizer's."""
    if [set(group["params"]) for group in stored] != ours:
        raise Mismatch(
            f"expected the {len(ours)} parameter groups of the optimizer, found {len(stored)} others in the checkpoint",
            tensor="optim.param_groups",
            hint="group the parameters as they were when it was saved",
        )
