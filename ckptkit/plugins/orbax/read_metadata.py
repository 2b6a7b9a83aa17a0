"""Read `_METADATA`, the JSON in which orbax lists the arrays of a tree.

Source: orbax/checkpoint/_src/metadata/tree.py and _src/tree/types.py, of orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.json_text import parse_json
from ckptkit.io.file import check_name, read_small
from ckptkit.layout import KeyPath

NAME = "_METADATA"
STRINGS = "_strings.json"
_LARGEST = 1 << 28  # bytes
_SEQUENCE = 1  # the type of a key that is the position in a list or tuple
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": {}}


class Tree(NamedTuple):
    """What a tree holds: the key paths of its arrays and its other values by name, and how the arrays are stored."""

    arrays: dict[str, KeyPath]
    values: dict[str, tuple[KeyPath, Any]]
    driver: str
    is_ocdbt: bool


def read_metadata(root: Path) -> Tree:
    """Return what the tree in directory `root` holds. Raises `Corrupt` for metadata that are malformed."""
    path = root / NAME
    try:
        found = read_object(path)
        tree = Tree({}, {}, "zarr3" if found.get("use_zarr3") else "zarr", bool(found.get("use_ocdbt", True)))
        for entry in found["tree_metadata"].values():
            add(tree, root, entry)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt("the metadata is malformed", path=path) from error
    return tree


def read_object(path: Path) -> dict[str, Any]:
    found = parse_json(read_small(path, _LARGEST), path)
    if not isinstance(found, dict):
        raise Corrupt("expected a JSON object", path=path)
    return found


def add(tree: Tree, root: Path, entry: dict[str, Any]) -> None:
    """Add an entry. Raises `Unsupported` for a type that is not known, `Unsafe` for a name that leads elsewhere."""
    steps = [(key["key"], key["key_type"]) for key in entry["key_metadata"]]
    key = tuple(int(step) if kind == _SEQUENCE else str(step) for step, kind in steps)
    name, kind = ".".join(map(str, key)), entry["value_metadata"]["value_type"]
    if name in tree.arrays or name in tree.values:
        raise Corrupt("two entries have the same name", path=root / NAME, tensor=name)
    if kind in _ARRAYS:
        for part in () if tree.is_ocdbt else name.split("/"):  # of zarr without OCDBT it is a directory
            check_name(part, root / NAME)
        tree.arrays[name] = key
    elif kind == "string":
        tree.values[name] = (key, read_object(root / STRINGS)[name])
    elif kind in _EMPTY:
        tree.values[name] = (key, _EMPTY[kind])
    else:
        hint = "load the tree with orbax, and save its arrays only"
        raise Unsupported(f"a value of type `{kind}`", path=root / NAME, tensor=name, hint=hint)
