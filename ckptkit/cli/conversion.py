"""Options and output of the commands that write a checkpoint.

For a damaged checkpoint, the output also lists the lost tensors.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ckptkit.checkpoints.find_components import LOST, describe_not_copied
from ckptkit.checkpoints.salvage_account import NAME, Account, Lost
from ckptkit.cli.options import checkpoint_argument, given_settings, typer_option_of
from ckptkit.cli.output import (
    pick,
    print_files,
    print_json,
    print_note,
    print_table,
    print_text_line,
    print_used_checkpoint,
    set_quiet,
)
from ckptkit.entry_points import import_object
from ckptkit.errors import Usage, names_and_more
from ckptkit.formats import describe_writable_formats, writable_formats
from ckptkit.io.destination import is_on_hub, to_destination
from ckptkit.io.path import capabilities_at
from ckptkit.models.names.weights import NOT_ASKED, LeftOut
from ckptkit.settings import Setting, settings_of
from ckptkit.state.options import ADAPTER, RANK, ConvertOptions
from ckptkit.words import count, format_bytes, format_number_ranges, natural_sort_key

if TYPE_CHECKING:
    from ckptkit.runs.cp import CopiedFiles
    from ckptkit.state.report import Converted

    Done = TypeVar("Done", Converted, CopiedFiles)

# numpy reads this when it is imported, which is later. Each thread of ckptkit multiplies matrices by itself: threads of
# BLAS, which spin while they wait, would compete for the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_MOST_LEFT_OUT = 8  # names of entries that are not copied, in one line

Source = Annotated[Path, checkpoint_argument("SRC")]
Out = Annotated[Path, typer.Argument(parser=to_destination, metavar="OUT", help="The directory to write, or a URL.")]
Yes = Annotated[
    bool, typer.Option(help="Needed to send to the Hub. Without --yes, ckptkit only shows what it would send.")
]
if TYPE_CHECKING:
    Writable = str
    WritableOrAdapter = str
else:
    Writable = Literal[writable_formats()]
    WritableOrAdapter = Literal[(*writable_formats(), ADAPTER)]

_MOST_FAULTS, _MOST_LINES, _MOST_TENSORS = 8, 16, 4
_LAYER = re.compile(r"(.*?\.[0-9]+)\.(.*)")


def report_salvage(account: Account, output: Path, *, dry_run: bool) -> None:
    """Print to stderr which tensors were filled and lost, by file and layer, and what to do about it."""
    if account.repaired:
        print_note(
            f"note: {count(len(account.repaired), 'damaged tensor', 'was')} read from another copy in the checkpoint"
        )
    by_source: dict[tuple[str, str], list[str]] = defaultdict(list)
    for tensor in account.filled:
        by_source[tensor.source, tensor.cast].append(tensor.name)
    for (source, cast), names in by_source.items():
        print_note(f"filled {count(len(names), 'tensor')} from {source}{f', cast {cast}' if cast else ''}")
        for layer, inside in group_names_by_layer(names):
            print_note(f"  {layer}  {inside}")
    if account.is_fully_from_source:
        print_note(f"note: nothing was lost: {output} is complete")
    if account.lost:
        report_lost(account, output, dry_run=dry_run)
    if account.lost and not account.filled:
        print_note("hint: pass --fill-from OTHER to take them from an earlier step or from the base model")


def report_lost(account: Account, output: Path, *, dry_run: bool) -> None:
    """Print the lost entries by file."""
    named = [entry for entry in account.lost if entry.name]
    size = format_bytes(sum(entry.nbytes for entry in named))
    total = account.kept + len(named)
    where = f"{output} would not contain them" if dry_run else f"its {NAME} lists them"
    print_note(f"lost: {len(named):,} of {count(total, 'entry')} ({size}) are not in {output}; {where}")
    faults: dict[str, list[Lost]] = defaultdict(list)
    for entry in account.lost:
        faults[entry.describe_loss(account.source)].append(entry)
    for fault, lost in list(faults.items())[:_MOST_FAULTS]:
        print_note(f"  {fault}")
        for layer, inside in group_names_by_layer([entry.label for entry in lost if entry.name]):
            print_note(f"    {layer}  {inside}")
        if not all(entry.name for entry in lost):
            print_note("    no file lists its contents")
    if len(faults) > _MOST_FAULTS:
        print_note(f"  ... and for {count(len(faults) - _MOST_FAULTS, 'more reason')}")


def group_names_by_layer(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (layers, names in them) for each line of a list of tensors. Layers with the same names share a line.

    The layers are padded to equal width. Only the first `_MOST_LINES` lines are returned.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.fullmatch(name)
        layer, inner = (match[1], match[2]) if match else ("", name)
        layers[layer].append(inner)
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for layer, inside in sorted(layers.items(), key=lambda item: natural_sort_key(item[0])):
        above, _, number = layer.rpartition(".")
        alike[above, names_and_more(inside, _MOST_TENSORS)].append(number)
    lines = [
        (f"{above}.{format_number_ranges(map(int, numbers))}" if above else "", inside)
        for (above, inside), numbers in alike.items()
    ]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], ("...", f"and {count(len(lines) - _MOST_LINES, 'line')} more like these")]
    width = max((len(layer) for layer, _ in lines), default=0)
    return [(layer.ljust(width), inside) for layer, inside in lines]


To = Annotated[Writable, typer.Option(help=f"{describe_writable_formats()}.")]
ToOrAdapter = Annotated[
    WritableOrAdapter | None,
    typer.Option(
        help=f"{describe_writable_formats()}; {ADAPTER}: the adapter in SRC alone. "
        "By default pt if OUT is a file such as x.pt; required if OUT is a directory."
    ),
]
OPTIONS = settings_of(ConvertOptions)
Map = Annotated[str | None, typer_option_of(OPTIONS["map"])]
Overwrite = Annotated[bool, typer_option_of(OPTIONS["overwrite"])]
Jobs = Annotated[int | None, typer_option_of(OPTIONS["jobs"])]
NoSync = Annotated[bool, typer_option_of(OPTIONS["sync"])]
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def shared_options(*names: str) -> dict[str, Setting]:
    """Return options that a command has in common with the conversions."""
    return {name: OPTIONS[name] for name in names}


def complete_given_options(options: dict[str, Any], out: Path | None, *, yes: bool) -> dict[str, Any]:
    """Return the options that the user gave, and `dry_run=True` for an output on the Hub without `--yes`.

    Under torchrun, adds the option for this rank's part of the work.
    """
    chosen = given_settings(options) | hub_dry_run_option(out, yes=yes)
    if "part" in chosen or not is_torchrun_rank():
        return chosen
    set_quiet(os.environ["RANK"] != "0")
    print_note(
        f"one of {os.environ['WORLD_SIZE']} ranks: the first finishes the output when every rank has done its part"
    )
    return chosen | {"part": RANK}


def hub_dry_run_option(out: Path | None, *, yes: bool) -> dict[str, bool]:
    return {} if yes or not is_on_hub(out) else {"dry_run": True}


def with_hub_note(done: Done, *, yes: bool) -> Done:
    """Return the result; after a dry run to the Hub, with a note on what ckptkit would send."""
    if not (done.dry_run and is_on_hub(done.output)):
        return done
    describe = import_object(capabilities_at(done.output).describe)
    text = f"would write to {describe(done.output)}"
    text += "" if yes else "; nothing was sent yet: pass --yes to send it"
    return replace(done, notes=(*done.notes, text))


def is_torchrun_rank() -> bool:
    """Return True under `torchrun -m ckptkit`, but not for a `ckptkit` that a rank of a training starts.

    Such a process inherits torchrun's environment, but no other ranks take part in its work.
    """
    return Path(sys.argv[0]).name == "__main__.py" and all(name in os.environ for name in _TORCHRUN)


def print_result(source: Path | None, result: Converted, verb: str, *, yes: bool = True, json: bool) -> None:
    """Print the result as text or JSON. Under torchrun only rank 0 prints."""
    if is_torchrun_rank() and os.environ["RANK"] != "0":
        return
    result = with_hub_note(result, yes=yes)
    for text in result.salvaged.warnings(result.output) if result.salvaged else ():
        print_note(f"warning: {text}")
    if json:
        print_json(to_json(result))
    else:
        report(source, result, verb)
    if result.salvaged is not None:
        report_salvage(result.salvaged, result.output, dry_run=result.dry_run)
    for text in () if json else result.warnings:
        print_note(f"warning: {text}")


def to_json(done: Converted) -> dict[str, Any]:
    """Return the result under the keys that scripts rely on."""
    names = ("source", "output", "format", "world_size", "tensors", "nbytes", "seconds", "renamed", "dropped")
    result = {
        **pick(done, *names, "entries", "cast", "completed", "plan", "notes", "warnings"),
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()],
        "left_behind": [pick(left, "path", "why") for left in done.left_behind],
        "finished": done.is_finished,
    }
    if done.weights:
        pairs = zip(done.sources, done.weights, strict=True)
        result["sources"] = [{"path": path, "weight": weight} for path, weight in pairs]
    if done.salvaged is not None:
        result |= done.salvaged.to_json()
    if done.dry_run:
        return result | pick(done, "copies", "free_bytes")
    return result | pick(done, "resumed_bytes", "checked_bytes", "unchecked_bytes", "peak_rss_bytes")


def report(src: Path | None, done: Converted, verb: str) -> None:
    """Print the result for a reader."""
    from ckptkit.state.report import amount_lines, source_and_output_line

    print_used_checkpoint(src, done.source)
    print_text_line(source_and_output_line(done, verb))
    if done.weights:
        rows = [(f"  {weight:.4g}", path) for path, weight in zip(done.sources, done.weights, strict=True)]
        print_table(rows, ("  factor", "checkpoint"))
    print_files(done.files)
    for line in (*remark_lines(done), *amount_lines(done)):
        print_text_line(line)


def remark_lines(result: Converted) -> list[str]:
    """Return lines about entries that were renamed, cast, completed, dropped or not copied, and the notes."""
    lines = []
    if result.wrapper:
        lines.append(f"found the model under the key `{result.wrapper}`")
    by_reason: dict[str, list[LeftOut]] = defaultdict(list)
    for left in result.dropped:
        if left.why not in NOT_ASKED:
            by_reason[left.why].append(left)
    for why, group in by_reason.items():
        names = names_and_more([f"`{left.name}`" for left in group], _MOST_LEFT_OUT)
        entries, nbytes = sum(left.entries for left in group), sum(left.nbytes for left in group)
        lines.append(f"not copied: {names}, {count(entries, 'entry')}, {format_bytes(nbytes)} ({why})")
    named = [(old, new) for old, new in result.renamed.items() if old.removeprefix(f"{result.wrapper}.") != new]
    if named:
        lines.append(f"renamed {count(len(named), 'entry')}, such as {named[0][0]} => {named[0][1]}")
    casts = list(result.cast.values())
    lines += [f"cast {count(casts.count(change), 'tensor')}: {change}" for change in sorted(set(casts))]
    zeros: dict[str, list[str]] = defaultdict(list)  # by parameter: the parts of its missing optimizer state
    for name, form in result.completed.items():
        state, _, kind = name.rpartition(".")
        zeros[state].append(f"{kind} {form}")
    lines += [f"zeros for `{state}`: {', '.join(kinds)}" for state, kinds in zeros.items()]
    lines += [f"note: {text}" for text in result.notes]
    return lines + describe_not_copied([left for left in result.left_behind if left.why not in LOST], "not copied")


def parse_factors(text: str) -> list[float]:
    """Return the numbers in `0.5,0.3,0.2`."""
    try:
        return [float(number) for number in text.split(",")] if text else []
    except ValueError:
        raise Usage(f"--factors: expected numbers like 0.5,0.3,0.2, found `{text}`") from None
