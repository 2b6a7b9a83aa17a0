"""What the commands that write a checkpoint have in common: their options, and the report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckptkit.cli.output import be_quiet, count, note, print_json, print_table, say
from ckptkit.errors import Usage
from ckptkit.files.path import to_local, to_path
from ckptkit.formats import describe_writable, writable_formats
from ckptkit.pictures.numbers import format_bytes

if TYPE_CHECKING:
    from ckptkit.ops.conversion.output import Workers
    from ckptkit.ops.conversion.result import Converted

Source = Annotated[
    Path,
    typer.Argument(parser=to_path, metavar="SRC", help="A checkpoint, or a run: then its latest complete checkpoint."),
]
Out = Annotated[Path, typer.Argument(parser=to_local, metavar="OUT", help="The directory to make.")]
if TYPE_CHECKING:
    Writable = str
else:
    Writable = Literal[writable_formats()]
To = Annotated[Writable, typer.Option(help=f"{describe_writable()}.")]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DTYPE",
        help="keep, bf16, fp16, fp32 or fp64 for the weights; 'GLOB=DTYPE' for whatever matches; repeatable.",
    ),
]
MaxShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Largest safetensors file, like 5GB or 512MiB.")]
Include = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Only entries that match; repeatable.")]
Exclude = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="No entries that match; repeatable.")]
Rename = Annotated[
    list[str] | None, typer.Option(metavar="'REGEX=>TEXT'", help="For parameters, in the optimizer too; repeatable.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Threads; by default one per core, at most 8; 16 for a remote source."),
]
NoSync = Annotated[bool, typer.Option("--no-sync", help="Do not wait for the disk: faster, not safe from power loss.")]
Part = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Do one part only, of 1/N to N/N; `ckptkit finalize OUT` ends it."),
]
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def find_workers(part: str | None) -> Workers:
    """Who does the work: this process, one part of it, or as one of torchrun's ranks, of which the first finishes."""
    from ckptkit.ops.conversion.output import ALONE, Workers
    from ckptkit.ops.conversion.torchrun import meet

    if part is not None:
        number, count = parse_part(part)
        return Workers(count, number - 1, finishes=count == 1)
    if not is_rank():
        return ALONE
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    be_quiet(rank > 0)
    note(f"one of {ranks} ranks: the first ends the work when each has done its part")
    return Workers(ranks, rank, finishes=rank == 0, meet=meet)


def is_rank() -> bool:
    """True under `torchrun -m ckptkit`; not for a `ckptkit` that a training's rank starts, which inherits all else."""
    return Path(sys.argv[0]).name == "__main__.py" and all(name in os.environ for name in _TORCHRUN)


def parse_part(part: str) -> tuple[int, int]:
    """The numbers in `3/8`."""
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise Usage(f"`{part}` is no part", hint="of eight the first is 1/8, the last 8/8")
    return int(number), int(count)


def show(src: Path | None, done: Converted, verb: str, *, json: bool) -> None:
    """The result, for a reader or for scripts; of several ranks the first speaks."""
    if is_rank() and os.environ["RANK"] != "0":
        return
    if json:
        print_json(to_json(done))
    else:
        report(src, done, verb)


def to_json(done: Converted) -> dict[str, Any]:
    """The result under the keys that scripts rely on."""
    result = {
        "source": str(done.source),
        "output": str(done.output),
        "format": done.format,
        "world_size": done.world_size,
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()],
        "tensors": done.tensors,
        "nbytes": done.nbytes,
        "seconds": done.seconds,
        "renamed": dict(done.renamed),
        "dropped": [{"name": left.name, "entries": left.entries, "nbytes": left.nbytes} for left in done.dropped],
        "cast": dict(done.cast),
        "plan": done.plan,
        "finished": done.is_finished,
        "notes": list(done.notes),
    }
    if done.dry_run:
        return result | {"copies": done.copies, "free_bytes": done.free_bytes}
    return result | {
        "checked_bytes": done.checked_bytes,
        "unchecked_bytes": done.unchecked_bytes,
        "peak_rss_bytes": done.peak_rss_bytes,
    }


def report(src: Path | None, done: Converted, verb: str) -> None:
    """The result for a reader."""
    if done.source != src:
        note(f"taking {done.source}")
    ranks = f" for {count(done.world_size, 'rank')}" if done.world_size else ""
    say(f"{'would make' if done.dry_run else verb} {done.source} into {done.output}{ranks}")
    print_table(files_of(done), ("  file", "size"))
    for line in remarks(done):
        say(line)
    if not done.is_finished:
        say(f"this part is done; when all are: ckptkit finalize {done.output}")
    elif done.dry_run:
        say(prospect(done))
    else:
        say(speed(done))
        say(checked(done))


def files_of(done: Converted) -> list[tuple[str, str]]:
    """The files and their sizes; of many, the first and the last."""
    rows = [(f"  {name}", format_bytes(nbytes)) for name, nbytes in done.files.items()]
    if len(rows) <= 20:
        return rows
    return [*rows[:9], (f"  ... {len(rows) - 18} more", ""), *rows[-9:]]


def remarks(done: Converted) -> list[str]:
    """What was changed on the way, what was left out, and what else there is to say."""
    lines = []
    if done.wrapper:
        lines.append(f"the model was under `{done.wrapper}`")
    lines += [
        f"left out `{left.name}`: {count(left.entries, 'entry')}, {format_bytes(left.nbytes)}" for left in done.dropped
    ]
    named = [(old, new) for old, new in done.renamed.items() if old.removeprefix(f"{done.wrapper}.") != new]
    if named:
        lines.append(f"renamed {count(len(named), 'entry')}, such as {named[0][0]} => {named[0][1]}")
    for change in sorted(set(done.cast.values())):
        lines.append(f"cast {count(list(done.cast.values()).count(change), 'tensor')}: {change}")
    return lines + [f"note: {text}" for text in done.notes]


def prospect(done: Converted) -> str:
    """How much there is to do, and room for it."""
    chunks = f"{count(done.copies, 'chunk')} to read"
    return f"{chunks}, {format_bytes(done.nbytes)} to write; {format_bytes(done.free_bytes)} are free"


def speed(done: Converted) -> str:
    """How much, how fast, in how much memory."""
    amount = f"{count(done.tensors, 'tensor')}, {format_bytes(done.nbytes)}"
    rate = format_bytes(done.nbytes / done.seconds)
    return f"{amount} in {done.seconds:.2f} s ({rate}/s); peak memory {format_bytes(done.peak_rss_bytes)}"


def checked(done: Converted) -> str:
    """How sure: of the source, what had checksums to compare with."""
    compared, others = format_bytes(done.checked_bytes), format_bytes(done.unchecked_bytes)
    if not done.unchecked_bytes:
        return f"{compared} of the source compared with its CRC-32"
    if not done.checked_bytes:
        return f"the source has no CRC-32 to compare its {others} with"
    return f"{compared} of the source compared with its CRC-32; {others} have none"
