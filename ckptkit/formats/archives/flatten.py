"""Flatten a pickled state dict into tensors and other entries, under the names that DCP would give; and the way back.

Dicts are entered, and lists with a dict or a tensor in them; all else is an entry with a pickle of its own. Unlike DCP,
a tuple with a tensor in it is entered as a list is, and a dict with nothing in it is an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import CkptError, Unsupported
from ckptkit.formats.archives.zip_entries import ZipEntry, place_tensor
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import Global, PersistentId, Record
from ckptkit.formats.pickles.tensor_calls import as_tensor, is_tensor
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, Chunk, KeyPath, NumberKey, Spec, StoredTensor, TuplePlace
from ckptkit.layout.box import whole

# Unflatten the names of a checkpoint into the nested dicts and lists that they came from.
#
# A step of a key path that is a string leads into a dict, a number into a list or tuple, in which a missing member is
# None.
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


DEEPEST = 64  # steps of a key path
_EXPANSION = 32  # how much more the entries with their names may be than the pickle that they come from
_MAPPINGS = (Global("collections", "OrderedDict"), Global("collections", "defaultdict"))


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state dict without its nesting: what it holds by name, and the way to each name.

    `spares` are further copies of chunks, where ranks have the same.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    keys: dict[str, KeyPath] = field(default_factory=dict)
    spares: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)

    def update(self, other: FlatState) -> None:
        """Take in what another holds."""
        self.tensors.update(other.tensors)
        self.blobs.update(other.blobs)
        self.keys.update(other.keys)
        self.spares.update(other.spares)


def flatten(state: Any, entries: Mapping[str, ZipEntry], path: str) -> FlatState:
    """Return the contents of a state dict of file `path`; `entries` are its pickle and storages, as in an archive.

    Every tensor in it is found, or the file is refused: `Unsupported` names what it is in.
    """
    flattening = Flattening(entries, path)
    if pairs_of(state) != []:
        children = flattening.children(state)
        if children is None and is_module(state):
            raise a_module(state)
        if children is None:
            raise Unsupported(f"expected a state dict, found {describe(state)}", hint="save its `state_dict()`")
        flattening.add_all(children, ())
    return flattening.flat


class Flattening:
    """The entries of one pickle as they are gathered. Its size bounds the cost: by sharing, few bytes can say much.

    `entries` are the pickle and the storages of file `path`.
    """

    def __init__(self, entries: Mapping[str, ZipEntry], path: str) -> None:
        self.entries = entries
        self.path = path
        self.pickle = entries["data.pkl"]
        self.budget = _EXPANSION * self.pickle.length
        self.flat = FlatState()

    def add_all(self, children: list[tuple[str | int, Any]], key: KeyPath) -> None:
        """Add what is behind each step from `key`."""
        if len(key) >= DEEPEST:
            raise Unsupported(f"expected a state dict of at most {DEEPEST} levels, found a deeper one")
        for step, child in children:
            self.add(child, (*key, step))

    def add(self, value: Any, key: KeyPath) -> None:
        """Add what `value` holds, under names that begin with `key`."""
        children = self.children(value)
        if children is None:
            self.add_entry(value, key)
        else:
            self.add_all(children, key)

    def children(self, value: Any) -> list[tuple[str | int, Any]] | None:
        """Return what a dict or list holds, by the steps to it; None for what is one entry."""
        pairs = pairs_of(value)
        if pairs and all(isinstance(key, (str, int)) for key, _ in pairs):
            return [(key if isinstance(key, str) else NumberKey(key), child) for key, child in pairs]
        if not is_entered(value):
            return None
        return [(TuplePlace(i) if isinstance(value, tuple) else i, child) for i, child in enumerate(value)]

    def add_entry(self, value: Any, key: KeyPath) -> None:
        """Add a tensor, or a value that holds none."""
        name = ".".join(map(str, key))
        self.spend(len(name))
        if name in self.flat.keys:
            raise Unsupported("two entries of the state dict have the same name", tensor=name)
        self.flat.keys[name] = key
        try:
            if is_tensor(value):
                self.flat.tensors[name] = self.stored(value)
            else:
                self.flat.blobs[name] = self.blob(value)
        except CkptError as error:
            raise error.blame(tensor=name) from None

    def stored(self, value: Any) -> StoredTensor:
        """Return a tensor with the one chunk that its storage is, or that is a part of it."""
        try:
            found = place_tensor(as_tensor(value), self.entries)
        except CkptError as error:
            error.hint = error.hint and "save a plain dense tensor instead"
            raise
        dtype, shape = found.tensor.dtype, found.tensor.shape
        return StoredTensor(Spec(dtype, shape), (found.chunk(whole(shape), self.path),))

    def blob(self, value: Any) -> Blob:
        """Return a value that is no tensor, pickled by itself."""
        if is_module(value):
            raise a_module(value)
        if holds_tensor(value):
            raise Unsupported(
                f"ckptkit does not read a tensor inside {describe(value)}",
                hint="save the tensor in a dict, under a name",
            )
        content = dump(value)
        self.spend(len(content))
        return Blob(self.path, self.pickle.offset, 0, content)

    def spend(self, amount: int) -> None:
        """Raise `Unsupported` when the entries have become too many for the pickle to have been meant so."""
        self.budget -= amount
        if self.budget < 0:
            size = self.pickle.length
            raise Unsupported(f"a pickle of {size} bytes expands to more than {_EXPANSION} times its size")


def is_entered(value: Any) -> bool:
    """Return True for a list with a dict in it or in its lists, and for a list or tuple with a tensor anywhere."""
    if isinstance(value, list):
        lists = inert_pickle.walk(value, lambda part: part if isinstance(part, list) else ())
        return any(pairs_of(part) is not None for part in lists) or holds_tensor(value)
    return isinstance(value, tuple) and holds_tensor(value)


def holds_tensor(value: Any) -> bool:
    return any(is_tensor(part) or isinstance(part, PersistentId) for part in inert_pickle.walk(value))


def is_module(value: Any) -> bool:
    """Return whether a value would have become a `torch.nn.Module`."""
    state = value.state if isinstance(value, Record) else None
    return isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys()


def a_module(value: Any) -> Unsupported:
    """Return the error for a module that was pickled whole, which only its own code can load."""
    hint = "load it with `torch.load(..., weights_only=False)`, which runs its code, and save its `state_dict()`"
    return Unsupported(f"expected a state dict, found a pickled module, {describe(value)}", hint=hint)


def pairs_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a dict of any kind; None for what is no dict."""
    if isinstance(value, dict):
        return list(value.items())
    if not isinstance(value, Record) or value.of not in _MAPPINGS:
        return None
    if all(isinstance(argument, Global) for argument in value.args):  # a defaultdict's factory
        return value.items or []
    match value.args:
        case ([*pairs],) if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):  # as Python 2 has it
            return [(key, child) for key, child in pairs]
    return None


def describe(value: Any) -> str:
    """Return in words what a pickled value would have been."""
    if is_tensor(value):
        return "a single tensor"
    if isinstance(value, Record) and isinstance(value.of, Global):
        return f"`{value.of}`"
    return "`dict`" if isinstance(value, dict) else f"`{type(value).__name__}`"
