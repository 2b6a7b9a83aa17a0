"""Unflatten the names of a checkpoint into the nested dicts and lists that they came from.

A step of a key path that is a string leads into a dict, a number into a list or tuple, in which a missing member is
None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.formats.archives.flatten import DEEPEST
from ckptkit.layout import KeyPath, NumberKey, TuplePlace

Tree = dict[str | int, "Tree | str"]  # down to names
_MOST_MISSING = 256  # members of a list


def unflatten(names: Iterable[str], key: Callable[[str], KeyPath], value: Callable[[str], Any]) -> Any:
    """Return the value of each name, in the dicts and lists that its key path leads through.

    Values are asked for in the order in which they lie in the result. Two names of which one lies where the other
    should are `Unsupported`.
    """
    tree: Tree = {}
    for name in names:
        place(tree, key(name), name)
    return build(tree, value)


def place(tree: Tree, key: KeyPath, name: str) -> None:
    """Put a name where its key path leads."""
    if len(key) > DEEPEST:
        raise Unsupported(f"expected an entry of at most {DEEPEST} levels, found {len(key)}", tensor=name)
    *above, last = key
    node = tree
    for step in above:
        below = node.setdefault(step, {})
        if isinstance(below, str):
            raise clash(below, name)
        node = below
    if last in node:
        raise clash(node[last], name)
    node[last] = name


def build(node: Tree | str, value: Callable[[str], Any]) -> Any:
    """Return the dict, list or value that a node of the tree stands for."""
    if isinstance(node, str):
        return value(node)
    positions = [step for step in node if isinstance(step, int)]
    if not positions:
        steps = {step: step.number if isinstance(step, NumberKey) else step for step in node}
        return with_numbers({steps[step]: build(child, value) for step, child in node.items()})
    if len(positions) < len(node):
        one, other = (next(node[step] for step in node if isinstance(step, kind)) for kind in (int, str))
        raise clash(one, first_name(other))
    length = max(positions) + 1
    if min(positions) < 0 or length - len(positions) > _MOST_MISSING:
        message = f"expected {length} members of a list, found {len(positions)}"
        raise Unsupported(message, tensor=first_name(node))
    members = [build(node[i], value) if i in node else None for i in range(length)]
    return tuple(members) if all(isinstance(step, TuplePlace) for step in positions) else members


def clash(node: Tree | str, name: str) -> Unsupported:
    message = f"`{first_name(node)}` and this cannot both be in one nested dict"
    return Unsupported(message, tensor=name, hint="drop one of them with --exclude")


def first_name(node: Tree | str) -> str:
    """Return the first name under a node."""
    while not isinstance(node, str):
        node = next(iter(node.values()))
    return node


def with_numbers(made: dict[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's dict with the keys of its `state` as its `params` have them: numbers, if they are numbers.

    Key paths hold numbers as strings where they lead into a dict, and torch's optimizers would not find their state.
    """
    groups, state = made.get("param_groups"), made.get("state")
    if isinstance(groups, list) and isinstance(state, dict):
        lists = [group.get("params") for group in groups if isinstance(group, dict)]
        numbers = {str(n): n for params in lists if isinstance(params, list) for n in params if type(n) is int}
        made["state"] = {numbers.get(key, key): child for key, child in state.items()}
    return made
