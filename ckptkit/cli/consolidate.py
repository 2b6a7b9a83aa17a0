"""`ckptkit consolidate`: options in, report out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.output import (
    Json,
    Quiet,
    count,
    format_bytes,
    note,
    parse_bytes,
    print_json,
    print_table,
    progress_bar,
    say,
)

if TYPE_CHECKING:
    from ckptkit.ops.consolidate import Consolidated


def consolidate(
    src: Annotated[Path, typer.Argument(help="A checkpoint, or a run: then its latest complete checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The directory to make.")],
    dtype: Annotated[str, typer.Option(help="keep, or bfloat16 (bf16), float16, float32: floats only.")] = "keep",
    max_shard_size: Annotated[str, typer.Option(help="Largest file, like 5GB or 512MiB.")] = "5GB",
    base: Annotated[
        str | None, typer.Option(help="Directory or Hub id of the model to take config and tokenizer from.")
    ] = None,
    include: Annotated[list[str] | None, typer.Option(help="Only tensors matching this GLOB; repeatable.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No tensors matching this GLOB; repeatable.")] = None,
    rename: Annotated[list[str] | None, typer.Option(help="'REGEX=>TEXT' on the model's names; repeatable.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="A tensor that config.json does not call for is an error.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Threads; by default one per core, at most 8.")] = None,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Do not wait for the disk: faster, not safe from power loss.")
    ] = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Turn a training checkpoint into a Hugging Face model: safetensors, config and tokenizer.

    Example: ckptkit consolidate run/ckpt-500 out

    Exit codes: 0 done; 2 usage; 3 the checkpoint is damaged, incomplete or does not fit its config; 4 an I/O failure,
    OUT is as it was; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.ops.consolidate import consolidate as run

    with progress_bar("consolidating") as progress:
        done = run(
            src,
            out,
            dtype=dtype,
            max_shard_size=parse_bytes(max_shard_size),
            base=base,
            include=include or (),
            exclude=exclude or (),
            rename=rename or (),
            strict=strict,
            overwrite=overwrite,
            dry_run=dry_run,
            jobs=jobs,
            sync=not no_sync,
            progress=progress,
        )
    if json:
        print_json(to_json(done))
    else:
        report(src, done)


def to_json(done: Consolidated) -> dict[str, Any]:
    """The result under the keys that scripts rely on."""
    result = {
        "source": str(done.source),
        "output": str(done.output),
        "format": "hf",
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()],
        "tensors": done.tensors,
        "nbytes": done.nbytes,
        "seconds": done.seconds,
        "renamed": done.renamed,
        "dropped": [{"name": left.name, "entries": left.entries, "nbytes": left.nbytes} for left in done.dropped],
        "cast": done.cast,
        "notes": list(done.notes),
    }
    if done.dry_run:
        return result | {"copies": done.copies, "free_bytes": done.free_bytes}
    return result | {
        "checked_bytes": done.checked_bytes,
        "unchecked_bytes": done.unchecked_bytes,
        "peak_rss_bytes": done.peak_rss_bytes,
    }


def report(src: Path, done: Consolidated) -> None:
    """The result for a reader."""
    if done.source != src:
        note(f"taking {done.source}")
    say(f"{'would consolidate' if done.dry_run else 'consolidated'} {done.source} into {done.output}")
    print_table([(f"  {name}", format_bytes(nbytes)) for name, nbytes in done.files.items()], ("  file", "size"))
    for line in remarks(done):
        say(line)
    if done.dry_run:
        say(f"{count(done.copies, 'copy')} of {format_bytes(done.nbytes)}; {format_bytes(done.free_bytes)} are free")
    else:
        say(summary(done))


def remarks(done: Consolidated) -> list[str]:
    """What was changed on the way, what was left out, and what else there is to say."""
    lines = []
    if done.wrapper:
        lines.append(f"the model was under `{done.wrapper}`")
    lines += [
        f"left out `{left.name}`: {count(left.entries, 'entry')}, {format_bytes(left.nbytes)}" for left in done.dropped
    ]
    named = [(old, new) for old, new in done.renamed.items() if old.removeprefix(f"{done.wrapper}.") != new]
    if named:
        lines.append(f"renamed {count(len(named), 'tensor')}, such as {named[0][0]} => {named[0][1]}")
    for change in sorted(set(done.cast.values())):
        lines.append(f"cast {count(list(done.cast.values()).count(change), 'tensor')}: {change}")
    return lines + [f"note: {text}" for text in done.notes]


def summary(done: Consolidated) -> str:
    """The last line: how much, how fast, how sure, in how much memory."""
    checked = f"{format_bytes(done.checked_bytes)} of the source compared with its CRC-32"
    if done.unchecked_bytes:
        checked += f", {format_bytes(done.unchecked_bytes)} have none"
    rate = format_bytes(done.nbytes / done.seconds)
    return (
        f"{count(done.tensors, 'tensor')}, {format_bytes(done.nbytes)} in {done.seconds:.2f} s ({rate}/s); "
        f"{checked}; peak memory {format_bytes(done.peak_rss_bytes)}"
    )
