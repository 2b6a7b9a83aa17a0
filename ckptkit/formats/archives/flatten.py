"""Flatten a pickled state dict into tensors and non-tensor entries, and unflatten it.

The names are those that DCP would give. Dicts are entered, and lists that contain a dict or a tensor; any other value
is an entry with its own pickle. Unlike DCP, ckptkit also enters a tuple that contains a tensor, and keeps an empty dict
as an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Unsupported, errors_at
from ckptkit.formats.archives.torch_save import read_state_file
from ckptkit.formats.archives.zip_entries import ZipEntry, locate_storage_of
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import Global, PersistentId, Record
from ckptkit.formats.pickles.tensor_calls import OR_EXCLUDE, as_tensor_record, is_pickled_tensor
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, Chunk, DTypeKey, KeyPath, NumberKey, Spec, StoredTensor, TuplePlace
from ckptkit.layout.box import full_box

# Unflatten: a string in a key path is a key of a dict, an integer is an index of a list or tuple. Missing members of a
# list become None.
Tree = dict[str | int, "Tree | str"]  # the leaves are names of entries
_MOST_MISSING = 256  # missing members of a list


def unflatten(names: Iterable[str], key_of: Callable[[str], KeyPath], value_of: Callable[[str], Any]) -> Any:
    """Return the value of each name, nested in dicts and lists as its key path says.

    Calls `value_of` in the order of the result. Raises `Unsupported` if the key path of one name leads through the
    value of another.
    """
    tree: Tree = {}
    for name in names:
        *above, last = key_of(name)
        if len(above) >= DEEPEST:
            raise Unsupported(f"expected an entry of at most {DEEPEST} levels, found {len(above) + 1}", tensor=name)
        node = tree
        for step in above:
            below = node.setdefault(step, {})
            if isinstance(below, str):
                raise clash_error(below, name)
            node = below
        if last in node:
            raise clash_error(node[last], name)
        node[last] = name
    return build_nested(tree, value_of)


def build_nested(node: Tree | str, value_of: Callable[[str], Any]) -> Any:
    if isinstance(node, str):
        return value_of(node)
    positions = [step for step in node if isinstance(step, int)]
    if not positions:
        nested = {dict_key_of_element(step): build_nested(child, value_of) for step, child in node.items()}
        groups, state = nested.get("param_groups"), nested.get("state")
        # key paths have text for the integer keys of a dict, but torch's optimizers look for their state under integers
        if isinstance(groups, list) and isinstance(state, dict):
            lists = [group.get("params") for group in groups if isinstance(group, dict)]
            numbers = {str(n): n for params in lists if isinstance(params, list) for n in params if type(n) is int}
            nested["state"] = {numbers.get(key, key): child for key, child in state.items()}
        return nested
    if len(positions) < len(node):
        at_index, at_key = (next(node[step] for step in node if isinstance(step, kind)) for kind in (int, str))
        raise clash_error(at_index, first_name_below(at_key))
    length = max(positions) + 1
    if min(positions) < 0 or length - len(positions) > _MOST_MISSING:
        message = f"expected {length} members of a list, found {len(positions)}"
        raise Unsupported(message, tensor=first_name_below(node))
    members = [build_nested(node[i], value_of) if i in node else None for i in range(length)]
    return tuple(members) if all(isinstance(step, TuplePlace) for step in positions) else members


def dict_key_of_element(element: str | int) -> Any:
    """Return the key of a dict that a step of a key path stands for."""
    if isinstance(element, NumberKey):
        return element.number
    if isinstance(element, DTypeKey):
        dtypes = tuple(Global(*name.rsplit(".", 1)) for name in element.strip("()").split(", "))
        return dtypes if element.startswith("(") else dtypes[0]
    return element


def key_path_element(dict_key: Any) -> str | None:
    """Return the step of a key path for the key of a dict; None for a key of an unsupported type."""
    if isinstance(dict_key, str):
        return dict_key
    if isinstance(dict_key, int):
        return NumberKey(dict_key)
    dtypes = dict_key if isinstance(dict_key, tuple) and len(dict_key) > 1 else (dict_key,)
    return (
        DTypeKey(dict_key) if all(isinstance(dtype, Global) and dtype.module == "torch" for dtype in dtypes) else None
    )


def clash_error(node: Tree | str, name: str) -> Unsupported:
    message = f"this entry and `{first_name_below(node)}` cannot both be in one nested dict"
    return Unsupported(message, tensor=name, hint="drop one of them with --exclude")


def first_name_below(node: Tree | str) -> str:
    while not isinstance(node, str):
        node = next(iter(node.values()))
    return node


DEEPEST = 64  # levels of nesting
_EXPANSION = 32  # the entries with their names may be at most this many times larger than their pickle
_MAPPINGS = (Global("collections", "OrderedDict"), Global("collections", "defaultdict"))


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state dict without nesting: entries and key paths by name; `spares` are replicas of chunks on other ranks."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    keys: dict[str, KeyPath] = field(default_factory=dict)
    spares: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)

    def put(self, key: KeyPath, entry: StoredTensor | Blob) -> None:
        """Add an entry. Its name is its key path, joined by dots."""
        name = ".".join(map(str, key))
        self.keys[name] = key
        if isinstance(entry, StoredTensor):
            self.tensors[name] = entry
        else:
            self.blobs[name] = entry

    def update(self, other: FlatState) -> None:
        self.tensors.update(other.tensors)
        self.blobs.update(other.blobs)
        self.keys.update(other.keys)
        self.spares.update(other.spares)


def flatten(state: Any, entries: Mapping[str, ZipEntry], path: str) -> FlatState:
    """Return the entries of a state dict in file `path`. Raises `Unsupported` for a tensor that cannot be read."""
    flattening = Flattening(entries, path)
    flattening.add_children(flattening.members(state), ())
    return flattening.flat


def flatten_file(root: Path, name: str) -> FlatState:
    """Return the entries of the state dict in a file of torch.save. Every error names the file."""
    state = read_state_file(root, name)
    with errors_at(path=root / name):
        return flatten(state.value, state.entries, name)


class Flattening:
    """Collects the entries of one pickle of file `path`, whose pickle and storages are `entries`.

    The size of the pickle limits the result: with shared objects, a few bytes could expand to gigabytes.
    """

    def __init__(self, entries: Mapping[str, ZipEntry], path: str) -> None:
        self.entries = entries
        self.path = path
        self.pickle = entries["data.pkl"]
        self.budget = _EXPANSION * self.pickle.length
        self.flat = FlatState()

    def add_children(self, children: list[tuple[str | int, Any]], key: KeyPath) -> None:
        if len(key) >= DEEPEST:
            raise Unsupported(f"expected a state dict of at most {DEEPEST} levels, found a deeper one")
        for step, child in children:
            self.add_nested(child, (*key, step))

    def add_nested(self, value: Any, key: KeyPath) -> None:
        """Add the entries in `value`, with names that begin with `key`."""
        children = self.find_children(value)
        if children is None:
            self.add_entry(value, key)
        else:
            self.add_children(children, key)

    def members(self, state: Any) -> list[tuple[str | int, Any]]:
        """Return the members of a state dict, as `find_children` does. Raises `Unsupported` for any other object."""
        children = self.find_children(state) if find_dict_items(state) != [] else []
        if children is None:
            refuse_pickled_module(state)
            message = f"expected a state dict, found {describe_pickled_type(state)}"
            raise Unsupported(message, hint="save its `state_dict()`")
        return children

    def find_children(self, value: Any) -> list[tuple[str | int, Any]] | None:
        """Return the members of a dict or list, each with its step of the key path; None for a single entry."""
        pairs = find_dict_items(value)
        steps = [step for key, _ in pairs or () if (step := key_path_element(key)) is not None]
        if pairs and len(steps) == len(pairs):
            return [(step, child) for step, (_, child) in zip(steps, pairs, strict=True)]
        if not isinstance(value, (list, tuple)):
            return None
        # entered: a list with a dict in it or in nested lists, and a list or tuple with a tensor at any depth
        lists = inert_pickle.walk_members(value, lambda member: member if isinstance(member, list) else ())
        has_dict = isinstance(value, list) and any(find_dict_items(member) is not None for member in lists)
        if not has_dict and not contains_tensor(value):
            return None
        return [(TuplePlace(i) if isinstance(value, tuple) else i, child) for i, child in enumerate(value)]

    def add_entry(self, value: Any, key: KeyPath) -> None:
        """Add a tensor, or a value without tensors."""
        name = ".".join(map(str, key))
        self.charge_budget(len(name))
        if name in self.flat.keys:
            raise Unsupported("two entries of the state dict have the same name", tensor=name)
        with errors_at(tensor=name):
            self.flat.put(key, self.make_entry(value))

    def make_entry(self, value: Any) -> StoredTensor | Blob:
        return self.make_stored_tensor(value) if is_pickled_tensor(value) else self.make_blob(value)

    def make_stored_tensor(self, value: Any) -> StoredTensor:
        """Return a tensor with one chunk: its storage, or the part of the storage that it uses."""
        try:
            located = locate_storage_of(as_tensor_record(value), self.entries)
        except CkptError as error:
            error.hint = error.hint and error.hint.removesuffix(OR_EXCLUDE)
            raise
        dtype, shape = located.tensor.dtype, located.tensor.shape
        return StoredTensor(Spec(dtype, shape), (located.as_chunk(full_box(shape), self.path),))

    def make_blob(self, value: Any) -> Blob:
        """Return a non-tensor value with its own pickle."""
        refuse_pickled_module(value)
        if contains_tensor(value):
            hint = "save the tensor in a dict, under a name"
            raise Unsupported(f"ckptkit does not read a tensor inside {describe_pickled_type(value)}", hint=hint)
        content = dump(value)
        self.charge_budget(len(content))
        return Blob(self.path, self.pickle.offset, 0, content)

    def charge_budget(self, nbytes: int) -> None:
        """Raise `Unsupported` if the entries became much larger than their pickle."""
        self.budget -= nbytes
        if self.budget < 0:
            size = self.pickle.length
            raise Unsupported(f"a pickle of {size} bytes expands to more than {_EXPANSION} times its size")


def contains_tensor(value: Any) -> bool:
    return any(
        is_pickled_tensor(member) or isinstance(member, PersistentId) for member in inert_pickle.walk_members(value)
    )


def contains_weights(value: Any) -> bool:
    """Return whether a value contains a tensor of floats with two or more axes, at any depth."""
    for member in inert_pickle.walk_members(value):
        if is_pickled_tensor(member):
            try:
                tensor = as_tensor_record(member)
            except Unsupported:
                return True
            if tensor.dtype.kind == "float" and len(tensor.shape) > 1:
                return True
    return False


def refuse_pickled_module(value: Any) -> None:
    """Raise `Unsupported` for a `torch.nn.Module` that was pickled as an object, which only its own code can load."""
    state = value.state if isinstance(value, Record) else None
    if isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys():
        hint = "load it with `torch.load(..., weights_only=False)`, which runs its code, and save its `state_dict()`"
        raise Unsupported(f"expected a state dict, found a pickled module, {describe_pickled_type(value)}", hint=hint)


def find_dict_items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a dict of any kind; None for any other value."""
    if isinstance(value, dict):
        return list(value.items())
    if not isinstance(value, Record) or value.of not in _MAPPINGS:
        return None
    if all(isinstance(argument, Global) for argument in value.args):  # a defaultdict's factory
        return value.items or []
    match value.args:
        case ([*pairs],) if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):  # as Python 2 pickles it
            return [(key, child) for key, child in pairs]
    return None


def describe_pickled_type(value: Any) -> str:
    if is_pickled_tensor(value):
        return "a single tensor"
    if isinstance(value, Record) and isinstance(value.of, Global):
        return f"`{value.of}`"
    return "`dict`" if isinstance(value, dict) else f"`{type(value).__name__}`"
