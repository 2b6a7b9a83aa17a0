"""Read the array trees that orbax saves for JAX: zarr 2 and 3, in OCDBT or in one directory per array.

Source: orbax/checkpoint/_src/{metadata,path,serialization}, of orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsupported, raise_problem, truncated_error
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatReader
from ckptkit.io.file import (
    OpenFiles,
    file_size,
    is_existing_path,
    list_children,
    names_in,
    read_small,
    require_plain_file_name,
)
from ckptkit.io.remote_file import iterate_with_prefetch
from ckptkit.layout import Blob, Extent, KeyPath, Layout, StoredTensor
from ckptkit.plugins.orbax.arrays import array_metadata_range, tensor_of_array
from ckptkit.plugins.orbax.values import MANIFEST, files_below, require_tensorstore, values_in_files, values_in_ocdbt

# Read `_METADATA`, the JSON in which orbax lists the arrays of a tree.
#
# Source: orbax/checkpoint/_src/metadata/tree.py and _src/tree/types.py, of orbax-checkpoint 0.12.8.
NAME = "_METADATA"
STRINGS = "_strings.json"
_LARGEST = 1 << 28  # bytes
_SEQUENCE = 1  # the type of a key that is the position in a list or tuple
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": {}}


class Tree(NamedTuple):
    """The key paths of a tree's arrays and of its other values by name, and how the arrays are stored."""

    arrays: dict[str, KeyPath]
    values: dict[str, tuple[KeyPath, Any]]
    driver: str
    is_ocdbt: bool


def read_tree_metadata(root: Path) -> Tree:
    """Return the contents of the tree in directory `root`. Raises `Corrupt` for malformed metadata."""
    path = root / NAME
    try:
        metadata = read_orbax_json_object(path)
        tree = Tree({}, {}, "zarr3" if metadata.get("use_zarr3") else "zarr", bool(metadata.get("use_ocdbt", True)))
        for entry in metadata["tree_metadata"].values():
            add_tree_entry(tree, root, entry)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt("the metadata is malformed", path=path) from error
    return tree


def read_orbax_json_object(path: Path) -> dict[str, Any]:
    value = parse_json(read_small(path, _LARGEST), path)
    if not isinstance(value, dict):
        raise Corrupt("expected a JSON object", path=path)
    return value


def add_tree_entry(tree: Tree, root: Path, entry: dict[str, Any]) -> None:
    """Add an entry. Raises `Unsupported` for an unknown type, `Unsafe` for path traversal."""
    steps = [(key["key"], key["key_type"]) for key in entry["key_metadata"]]
    key = tuple(int(step) if kind == _SEQUENCE else str(step) for step, kind in steps)
    name, kind = ".".join(map(str, key)), entry["value_metadata"]["value_type"]
    if name in tree.arrays or name in tree.values:
        raise Corrupt("two entries have the same name", path=root / NAME, tensor=name)
    if kind in _ARRAYS:
        for part in () if tree.is_ocdbt else name.split("/"):  # without OCDBT the name is a directory
            require_plain_file_name(part, root / NAME)
        tree.arrays[name] = key
    elif kind == "string":
        tree.values[name] = (key, read_orbax_json_object(root / STRINGS)[name])
    elif kind in _EMPTY:
        tree.values[name] = (key, _EMPTY[kind])
    else:
        hint = "load the tree with orbax, and save its arrays only"
        raise Unsupported(f"a value of type `{kind}`", path=root / NAME, tensor=name, hint=hint)


_OWN = re.compile(
    r"_METADATA|_sharding|_strings\.json|array_metadatas|manifest\.ocdbt|d|ocdbt_(data|meta)|ocdbt\.process_[0-9]+"
)
_UNFINISHED = re.compile(r".*\.orbax-checkpoint-tmp.*")  # directory name until the save is complete
_STEP = "_CHECKPOINT_METADATA"  # orbax's metadata of a step, or of a tree saved alone
_COMMITTED = "commit_success.txt"
_LARGEST_STEP = 1 << 24  # bytes
_USE_ANOTHER = "use another checkpoint"


class Orbax(FormatReader):
    """The format of a directory with orbax's `_METADATA`, which ckptkit reads and does not write."""

    name = "orbax"
    known_by = "orbax's `_METADATA`"

    def owns_file(self, name: str) -> bool:
        return bool(_OWN.fullmatch(name))

    def detect(self, path: Path) -> bool:
        """Return True for an array tree, and for the leftovers of an unfinished save."""
        if not path.is_dir():
            return False
        names = names_in(path)
        return NAME in names or MANIFEST in names or (is_unfinished_save(path) and _STEP in names)

    def check_files_complete(self, path: Path, report: Report) -> None:
        names = names_in(path)
        if is_unfinished_save(path):
            raise Incomplete("orbax did not finish this save", path=path, hint="use an older checkpoint")
        if NAME not in names:
            report(Incomplete(f"no `{NAME}`: it lists the arrays", path=path, hint=_USE_ANOTHER))
        elif read_tree_metadata(path).is_ocdbt and MANIFEST not in names:
            report(Incomplete("the file is missing", path=path / MANIFEST, hint=_USE_ANOTHER))

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout of the tree in directory `path`.

        Reports each array that cannot be opened or lacks cells.
        """
        self.check_files_complete(path, raise_problem)
        require_tensorstore(path)
        tree = read_tree_metadata(path)
        values = values_in_ocdbt(path) if tree.is_ocdbt else values_in_files(path, tree.arrays)
        tensors: dict[str, StoredTensor] = {}
        keys: dict[str, KeyPath] = dict(tree.arrays)
        absent: dict[str, str] = {}
        ranges = partial(array_metadata_range, driver=tree.driver, values=values)
        with OpenFiles(path, in_order=False) as files:
            for name in iterate_with_prefetch(path, tree.arrays, ranges):
                try:
                    tensors[name] = tensor_of_array(path, name, tree.driver, values, files)
                except CkptError as error:
                    report(error)
                    absent[name] = NAME
        blobs = {}
        for name, (key, value) in tree.values.items():
            keys[name] = key
            blobs[name] = Blob(STRINGS if isinstance(value, str) else NAME, 0, 0, dump(value))
        own = [entry for entry in list_children(path) if self.owns_file(entry.name) or entry.name in tree.arrays]
        file_names = [str(file.relative_to(path)) for entry in own for file in files_below(entry)]
        layout = Layout(path, self.name, tensors, blobs, keys, absent=absent)
        ends: dict[str, int] = {}
        for _, item in layout.chunks_and_blobs:
            ends[item.path] = max(ends.get(item.path, 0), item.offset + item.length)
        for name in sorted(ends):
            if name not in file_names:
                report(Incomplete("the file is missing", path=path / name, hint=_USE_ANOTHER))
            elif (size := file_size(path / name)) < ends[name]:
                report(truncated_error(ends[name], size, path=path / name))
        return replace(layout, descriptions=tuple(name for name in file_names if name not in ends))

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:  # noqa: ARG002 - there is no sum
        """Return every file as one extent without a checksum: orbax records none."""
        for name in sorted(layout.files):
            if is_existing_path(layout.root / name):
                yield Extent(name, 0, file_size(layout.root / name), None, "")


def is_unfinished_save(path: Path) -> bool:
    """Return whether orbax did not finish saving this directory, or the step directory around it."""
    absolute = path.absolute()
    return any(
        bool(_UNFINISHED.fullmatch(directory.name)) or is_uncommitted_save(directory)
        for directory in (absolute, absolute.parent)
    )


def is_uncommitted_save(path: Path) -> bool:
    """Return whether a save under its final name, as in a bucket, lacks both the marker and the commit time.

    Orbax writes the time first. A copy without the marker, or from an orbax version without markers, still has the
    time.
    """
    if not is_existing_path(path / _STEP) or is_existing_path(path / _COMMITTED):
        return False
    metadata = parse_json(read_small(path / _STEP, _LARGEST_STEP), path / _STEP)
    return (
        isinstance(metadata, dict)
        and "init_timestamp_nsecs" in metadata
        and metadata.get("commit_timestamp_nsecs") is None
    )
