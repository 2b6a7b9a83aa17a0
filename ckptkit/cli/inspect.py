"""`ckptkit inspect`: what is this checkpoint?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.output import Json, Quiet, count, format_bytes, print_json, print_table, say

if TYPE_CHECKING:
    from ckptkit.layout import StoredTensor
    from ckptkit.ops.inspect import Inspected


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a run: then its latest complete checkpoint.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    chunks: Annotated[bool, typer.Option("--chunks", help="List every chunk with its place in its file.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Fold the names by module.")] = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Show what a checkpoint holds, from its metadata: nothing is loaded, no code of its runs.

    Example: ckptkit inspect run/ckpt-500 --tree

    Exit codes: 0 done; 2 usage; 3 not a checkpoint, damaged or beyond us; 4 an I/O failure; 5 an unsafe path.
    """
    from ckptkit.ops.inspect import inspect as look

    found = look(path, with_places=chunks)
    if json:
        print_json(to_json(found, with_chunks=chunks))
        return
    report(found)
    if chunks:
        print_table(chunk_rows(found), ("tensor", "start", "size", "file", "offset"))
    elif tree:
        print_table(tree_rows(found), ("bytes", "tensors", "module or tensor"))
    elif tensors:
        print_table(tensor_rows(found), ("bytes", "chunks", "dtype", "shape", "tensor"))


def to_json(found: Inspected, *, with_chunks: bool) -> dict[str, Any]:
    """The result under the keys that scripts rely on."""
    layout = found.layout
    return {
        "format": layout.format,
        "root": str(layout.root),
        "step": found.step,
        "world_size": layout.world_size,
        "nbytes": layout.nbytes,
        "tensors": [tensor_json(name, tensor, with_chunks=with_chunks) for name, tensor in layout.tensors.items()],
        "blobs": [{"name": name, "nbytes": blob.length} for name, blob in layout.blobs.items()],
    }


def tensor_json(name: str, tensor: StoredTensor, *, with_chunks: bool) -> dict[str, Any]:
    """One tensor of the result."""
    spec = tensor.spec
    result: dict[str, Any] = {
        "name": name,
        "dtype": spec.dtype.name,
        "shape": list(spec.shape),
        "nbytes": spec.nbytes,
    }
    if with_chunks:
        result["chunks"] = [
            {"start": list(chunk.start), "size": list(chunk.size), "file": chunk.path, "offset": chunk.offset}
            for chunk in tensor.chunks
        ]
    return result


def report(found: Inspected) -> None:
    """The checkpoint at a glance."""
    layout = found.layout
    facts = [f"{layout.format} checkpoint"]
    if found.step is not None:
        facts.append(f"step {found.step}")
    if layout.world_size is not None:
        facts.append(f"written by {count(layout.world_size, 'rank')}")
    say(f"{layout.root}: {', '.join(facts)}")
    tensors, others = count(len(layout.tensors), "tensor"), count(len(layout.blobs), "other entry")
    say(f"{tensors}, {format_bytes(layout.nbytes)}, {others}")
    rows = [(f"  {name}", format_bytes(nbytes)) for name, nbytes in found.bytes_by_dtype.items()]
    print_table(rows, ("  dtype", "size"))
    groups = [(f"  {name or '(no wrapper)'}", entries, format_bytes(n)) for name, (entries, n) in found.groups.items()]
    print_table(groups, ("  under", "entries", "size"))


def tensor_rows(found: Inspected) -> list[tuple[object, ...]]:
    """A row per tensor."""
    return [
        (format_bytes(t.spec.nbytes), len(t.chunks), t.spec.dtype.name, list(t.spec.shape), name)
        for name, t in found.layout.tensors.items()
    ]


def tree_rows(found: Inspected) -> list[tuple[object, ...]]:
    """A row per module or tensor; modules alike share one."""
    from ckptkit.ops.tree import fold

    return [
        (format_bytes(line.nbytes), line.tensors, f"{'  ' * line.depth}{line.label}  {line.spec or ''}")
        for line in fold(found.layout.specs)
    ]


def chunk_rows(found: Inspected) -> list[tuple[object, ...]]:
    """A row per chunk."""
    return [
        (name, list(chunk.start), list(chunk.size), chunk.path, chunk.offset)
        for name, tensor in found.layout.tensors.items()
        for chunk in tensor.chunks
    ]
