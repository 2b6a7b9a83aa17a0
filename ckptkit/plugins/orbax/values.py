"""Locate the values of an orbax tree, and let tensorstore decode them.

A value is a file, or a byte range that the B+tree of OCDBT refers to. ckptkit reads the nodes of the B+tree, from a
disk or a store; tensorstore decodes them and verifies their CRC-32C. Source: google/tensorstore,
tensorstore/kvstore/ocdbt/index.rst and its function `ocdbt.dump`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from ckptkit.errors import Corrupt, Unsafe, Unsupported, truncated_error
from ckptkit.io.file import OpenFiles, file_size, list_children, names_in, read_at, read_small
from ckptkit.io.path import is_remote, map_in_parallel
from ckptkit.io.remote_file import Range, iterate_with_prefetch

if TYPE_CHECKING:
    import tensorstore


# tensorstore decodes data that ckptkit has read into memory: zarr arrays and their cells, and OCDBT nodes.
#
# Source: google/tensorstore, its drivers `zarr`, `zarr3`, `ocdbt` and `memory`. Cells have no checksums; the nodes of
# OCDBT with the locations of cells have a CRC-32C, which tensorstore verifies.
def require_tensorstore(path: Path) -> None:
    """Raise `Unsupported`, with the extra to install, if tensorstore is missing."""
    try:
        import tensorstore  # noqa: F401
    except ImportError as error:
        hint = "run `pip install 'ckptkit-fsdp[orbax]'`"
        raise Unsupported("orbax's arrays need the package `tensorstore`", path=path, hint=hint) from error


def parse_ocdbt_node(values: Mapping[str, bytes], node: str | None = None) -> dict[str, Any]:
    """Return the manifest of an OCDBT database, or one node, as a dict; `values` are the database files."""
    import tensorstore

    dumped: dict[str, Any] = tensorstore.ocdbt.dump(memory_store_with(values, tensorstore.Context()), node).result()
    return dumped


def memory_store_with(values: Mapping[str, bytes], context: tensorstore.Context) -> tensorstore.KvStore:
    import tensorstore

    store = tensorstore.KvStore.open("memory://", context=context).result()
    for key, value in values.items():
        store[key] = value
    return store


@contextmanager
def translate_tensorstore_errors(path: Path, name: str | None = None) -> Iterator[None]:
    """Translate exceptions of tensorstore into a `Corrupt` that names the file and the tensor."""
    try:
        yield
    except (KeyError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition(" [tensorstore_spec")[0].partition(" [source")[0]
        hint = "use another checkpoint"
        raise Corrupt(f"tensorstore cannot read it: {reason}", path=path, tensor=name, hint=hint) from error


MANIFEST = "manifest.ocdbt"
_MANIFESTS = "manifest."  # prefix of the manifest and of further manifests that it refers to
_LARGEST = 1 << 28  # bytes of a manifest or node; orbax allows 100,000,000 in a node
_NODE = "node"  # the name given to tensorstore for a file with a single node


class Value(NamedTuple):
    """`length` bytes at `offset` of file `path` (relative to the tree), or `content` if they are inside a node."""

    path: str
    offset: int
    length: int
    content: bytes | None = None

    @property
    def byte_range(self) -> Range:
        return self.path, self.offset, self.offset + self.length


class Node(NamedTuple):
    """A node of the B+tree, `height` levels above the leaves; its keys start with `prefix`."""

    base: str
    value: Value
    height: int
    prefix: bytes


def values_in_files(root: Path, arrays: Iterable[str]) -> dict[str, Value]:
    """Return the values of arrays with one directory each, by the key `ARRAY/NAME`."""
    folders = [root / name for name in arrays]
    listings = map_in_parallel(files_below, folders) if is_remote(root) else map(files_below, folders)
    files = [(str(file.relative_to(root)), file) for file in chain.from_iterable(listings)]
    return {key: Value(key, 0, file_size(file)) for key, file in files}


def files_below(path: Path) -> list[Path]:
    """Return a file or link, or all files in a directory and its subdirectories."""
    if path.is_symlink() or not path.is_dir():
        return [path] if path.exists() else []
    return [file for inside in list_children(path) for file in files_below(inside)]


def values_in_ocdbt(root: Path) -> dict[str, Value]:
    """Return the values in the newest version of an OCDBT database, by key.

    Raises `Corrupt` for a damaged manifest or node, `Unsafe` for a file outside of `root`.
    """
    manifests = {name: read_small(root / name, _LARGEST) for name in names_in(root) if name.startswith(_MANIFESTS)}
    with translate_tensorstore_errors(root / MANIFEST):
        versions = parse_ocdbt_node(manifests)["versions"]
    if not versions:
        raise Corrupt("the manifest lists no version", path=root / MANIFEST, hint="use another checkpoint")
    level: list[Node] = []
    if location := versions[-1]["root"].get("location"):  # an empty version has none
        level.append(Node(*parse_location(location, root), versions[-1]["root_height"], b""))
    values: dict[str, Value] = {}
    seen: set[tuple[str, int]] = set()
    with OpenFiles(root, in_order=False) as files:
        while level:
            below: list[Node] = []
            for node in iterate_with_prefetch(root, level, lambda node: [node.value.byte_range]):
                if node.value[:2] in seen:
                    raise Corrupt("two nodes of the B+tree refer to the same node", path=root / node.value.path)
                seen.add(node.value[:2])
                for entry in read_node(root, node, files):
                    add_value_or_child(values, below, root, node, entry)
            level = below
    return values


def parse_location(location: str, root: Path) -> tuple[str, Value]:
    """Return the base path and the byte range of a percent-encoded reference such as `value:BASE:d/3f:0:128`."""
    _, base, file, offset, length = location.split(":")
    path = unquote(base) + unquote(file)
    if path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")) or "\0" in path:
        raise Unsafe(f"the checkpoint refers to `{path!a}`, which is not a file in it", path=root)
    return base, Value(path, int(offset), int(length))


def read_node(root: Path, node: Node, files: OpenFiles) -> list[Mapping[str, Any]]:
    path = root / node.value.path
    if node.value.length > _LARGEST:
        raise Corrupt(f"expected a node of at most {_LARGEST} bytes, found {node.value.length}", path=path)
    data = read_value(node.value, files)
    with translate_tensorstore_errors(path):
        dumped = parse_ocdbt_node({unquote(node.base) + _NODE: data}, f"btreenode:{node.base}:{_NODE}:0:{len(data)}")
        if dumped["height"] != node.height:
            raise Corrupt(f"expected a node of height {node.height}, found {dumped['height']}", path=path)
        entries: list[Mapping[str, Any]] = dumped["entries"]
    return entries


def add_value_or_child(
    values: dict[str, Value], below: list[Node], root: Path, node: Node, entry: Mapping[str, Any]
) -> None:
    """Add the value in an entry of a leaf to `values`, or the child node to `below`."""
    if node.height:
        prefix = node.prefix + entry["subtree_common_prefix"]
        below.append(Node(*parse_location(entry["location"], root), node.height - 1, prefix))
        return
    key = (node.prefix + entry["key"]).decode(errors="replace")
    if "inline_value" in entry:
        values[key] = Value(node.value.path, 0, 0, entry["inline_value"])
    else:
        values[key] = parse_location(entry["indirect_value"], root)[1]


def read_value(value: Value, files: OpenFiles) -> bytes:
    """Return the bytes of a value. Raises `Corrupt` if its file is too short."""
    if value.content is not None:
        return value.content
    file = files[value.path]
    if value.offset + value.length > file.size:  # check before allocating that much memory
        raise truncated_error(value.offset + value.length, file.size, path=file.path)
    return read_at(file, value.length, value.offset)
