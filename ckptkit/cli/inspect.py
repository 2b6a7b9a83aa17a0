"""Run `ckptkit inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.checkpoints.find_components import describe_not_copied
from ckptkit.checkpoints.salvage_account import describe_account
from ckptkit.cli.options import Also, checkpoint_argument, join_also_directories
from ckptkit.cli.output import (
    Json,
    pick,
    print_json,
    print_note,
    print_table,
    print_text_line,
    print_used_checkpoint,
)
from ckptkit.entry_points import import_object
from ckptkit.errors import names_and_more
from ckptkit.words import count, format_bytes, format_parameter_count

if TYPE_CHECKING:
    from ckptkit.adapters.find import InspectedAdapter
    from ckptkit.checks.inspect import Inspected
    from ckptkit.layout import StoredTensor
    from ckptkit.state.quantized.find import InspectedQuantized

_MOST_KEYS = 8
DRAWINGS = {  # by option: the function that draws a layout
    "shards": "ckptkit.plugins.report.shard_map:print_shard_map",
    "svg": "ckptkit.plugins.report.shard_map:write_shard_map",
}


def inspect(
    path: Annotated[Path, checkpoint_argument("PATH")],
    tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False,
    chunks: Annotated[bool, typer.Option(help="List every chunk with its file and offset.")] = False,
    tree: Annotated[bool, typer.Option(help="Show modules as a tree.")] = False,
    shards: Annotated[
        bool, typer.Option(help="Draw a shard map: which rank stores which rows of each tensor.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw that map into an SVG file.")] = None,
    also: Also = None,
    json: Json = False,
) -> None:
    """Show what a checkpoint is and what it contains.

    Reads metadata, and compares the bytes of a tied head with the embedding. Runs no code from the checkpoint. PATH may
    also be a delta.

    Example: ckptkit inspect run/ckpt-500 --tree

    Exit codes: 0 done; 2 usage; 3 not a checkpoint, damaged or not supported; 4 an I/O failure; 5 an unsafe path.
    """
    from ckptkit.checkpoints.other_kinds import find_non_checkpoint_kind
    from ckptkit.checks.inspect import inspect as look

    path = join_also_directories(path, also)
    if kind := find_non_checkpoint_kind(path):
        kind.show_description(path, tensors=tensors, json=json)
        return
    inspected = look(path, with_places=chunks)
    for fault in inspected.unread:
        print_note(f"warning: a part cannot be read: {fault}")
    if svg is not None:
        import_object(DRAWINGS["svg"])(inspected.layout, svg)
        print_note(f"wrote {svg}")
    if json:
        print_json(to_json(inspected, with_chunks=chunks))
        return
    report(inspected, path)
    if shards:
        import_object(DRAWINGS["shards"])(inspected.layout)
    elif chunks:
        rows: list[tuple[object, ...]] = [
            (name, list(chunk.start), list(chunk.size), chunk.path, chunk.offset)
            for name, tensor in inspected.layout.tensors.items()
            for chunk in tensor.chunks
        ]
        print_table(rows, ("tensor", "start", "size", "file", "offset"))
    elif tree:
        from ckptkit.checks.tree import folded_tree_lines

        rows = [
            (format_bytes(line.nbytes), line.tensors, f"{'  ' * line.depth}{line.label}  {line.spec or ''}")
            for line in folded_tree_lines(inspected.layout.specs)
        ]
        print_table(rows, ("bytes", "tensors", "module or tensor"))
    elif tensors:
        rows = [
            (format_bytes(t.spec.nbytes), len(t.chunks), t.spec.dtype.name, list(t.spec.shape), name)
            for name, t in inspected.layout.tensors.items()
        ]
        print_table(rows, ("bytes", "chunks", "dtype", "shape", "tensor"))


def to_json(inspected: Inspected, *, with_chunks: bool) -> dict[str, Any]:
    """Return the result under the keys that scripts rely on."""
    layout, quantized = inspected.layout, inspected.quantized
    names = ("step", "world_size", "trainer", "family", "parameters", "optimizer_keys", "ties", "has_manifest")
    adapter_names = ("name", "method", "rows", "alpha", "targets", "modules", "replaced", "parameters", "nbytes")
    quantized_names = ("method", "weights", "parameters", "sizes", "refusal")
    return {
        **pick(layout, "format", "root", "nbytes"),
        "checkpoint": inspected.whole,
        **pick(inspected, *names, "salvaged", "unread", "remarks"),
        "producer": inspected.trainer,  # the key of earlier versions
        "adapters": [pick(adapter, *adapter_names, "base", "has_base", "config") for adapter in inspected.adapters],
        "quantized": None if quantized is None else pick(quantized, *quantized_names),
        "left_behind": [pick(left, "path", "why") for left in inspected.left_behind],
        "groups": {
            kind: {**pick(group, "entries", "nbytes"), "dtypes": group.bytes_by_dtype}
            for kind, group in inspected.groups.items()
        },
        "tensors": [tensor_json(name, tensor, with_chunks=with_chunks) for name, tensor in layout.tensors.items()],
        "blobs": [{"name": name, "nbytes": blob.length} for name, blob in layout.blobs.items()],
    }


def tensor_json(name: str, tensor: StoredTensor, *, with_chunks: bool) -> dict[str, Any]:
    spec = tensor.spec
    result: dict[str, Any] = {"name": name, "dtype": spec.dtype.name, **pick(spec, "shape", "nbytes")}
    if with_chunks:
        result["chunks"] = [{"file": chunk.path, **pick(chunk, "start", "size", "offset")} for chunk in tensor.chunks]
    return result


def report(inspected: Inspected, asked: Path) -> None:
    """Print a summary of the checkpoint."""
    print_used_checkpoint(asked, inspected.whole)
    for line in inspected.summary():
        print_text_line(line)
    rows = []
    for kind, group in inspected.groups.items():
        total = sum(group.bytes_by_dtype.values()) or 1
        shares = [f"{name} {format_percentage(nbytes / total)}" for name, nbytes in group.bytes_by_dtype.items()]
        dtypes = ", ".join(shares if len(shares) > 1 else group.bytes_by_dtype)
        name, keys = "other" if kind == "rest" else kind, names_and_more(group.under, _MOST_KEYS)
        rows.append((name, group.entries, format_bytes(group.nbytes), dtypes, keys))
    print_table(rows, ("", "entries", "size", "dtypes", "keys"))
    if inspected.optimizer_keys == "ids":
        print_text_line("the optimizer's keys are parameter indices, not names")
    for adapter in inspected.adapters:
        print_text_line(adapter_line(adapter))
    if inspected.quantized:
        print_text_line(quantized_line(inspected.quantized))
    if inspected.salvaged:
        print_text_line(f"{describe_account(inspected.salvaged)}; salvage.json lists them")
    for tie in inspected.ties:
        print_text_line(f"tied: {' = '.join(tie)}")
    for remark in inspected.remarks:
        print_note(f"note: {remark}")
    for line in describe_not_copied(inspected.left_behind, "other files"):
        print_text_line(line)


def adapter_line(adapter: InspectedAdapter) -> str:
    """Return a line about an adapter."""
    rank = " to ".join(map(str, dict.fromkeys((adapter.rows[0], adapter.rows[-1])))) if adapter.rows else "unknown"
    alpha = f"alpha {adapter.alpha}" if adapter.alpha or adapter.config else "alpha is unknown: no adapter_config.json"
    facts = [
        f"{adapter.method} of rank {rank}, {alpha}",
        f"on {names_and_more(adapter.targets, _MOST_KEYS)} ({count(adapter.modules, 'module')})",
    ]
    if adapter.replaced:
        facts.append(f"with a trained {names_and_more(adapter.replaced, _MOST_KEYS)}")
    if adapter.has_base:
        facts.append("with its base")
    elif adapter.base:
        facts.append(f"of {adapter.base}")
    return f"adapter {adapter.name}: {', '.join(facts)}; {format_parameter_count(adapter.parameters)}"


def quantized_line(quantized: InspectedQuantized) -> str:
    """Return a line about the quantized weights."""
    if quantized.refusal is not None:
        return f"quantized: {quantized.refusal}"
    sizes = ", ".join(" x ".join(map(str, size)) or "a weight" for size in quantized.sizes)
    parameters = format_parameter_count(quantized.parameters)
    weights = f"{count(quantized.weights, 'weight')}, {parameters}, a scale for each {sizes}"
    return f"quantized: {quantized.method}, {weights}; --dtype bf16 dequantizes them"


def format_percentage(fraction: float) -> str:
    """Return a fraction as a percentage that is never rounded to 0% or 100%."""
    if 0 < fraction < 0.01:
        return "<1%"
    return ">99%" if 0.99 < fraction < 1 else f"{fraction:.0%}"
