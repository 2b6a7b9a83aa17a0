"""Change the nested dicts and lists of a state dict, which have tensors as leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptkit.errors import Mismatch, Unsupported, and_more

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
