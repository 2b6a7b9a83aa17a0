"""Print the tables, notes, progress bars and JSON of all commands. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptkit.errors import CkptError, IOFailure
from ckptkit.trainers import find_step_of_path
from ckptkit.words import escape_control_characters, fold_lines, format_bytes

_quiet = False
_NARROWEST = 16  # minimum width of a table column in characters, on a narrow terminal; no number is wider
_AGES = ((60, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"))  # upper limit in seconds, divisor, unit
_SOON = 0.5  # seconds before a progress bar appears; shorter work shows none
_LEAST_LOGGED = 10**8  # bytes; smaller work finishes too soon to need lines in a log


def set_quiet(is_quiet: bool) -> None:
    """Print only errors and JSON from now on, if `is_quiet`."""
    global _quiet  # noqa: PLW0603 - a process has one terminal
    _quiet = _quiet or is_quiet


QUIET = typer.Option("--quiet", "-q", callback=set_quiet, help="Print nothing but errors.")  # of every command
Json = Annotated[bool, typer.Option(help="Print one JSON object.")]


def reserve_stdout() -> None:
    """Reserve stdout for results: output of libraries to stdout, such as torch 2.10's gloo, goes to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # C libraries write to descriptor 1, not to sys.stdout
    sys.stdout = os.fdopen(stdout, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


@cache
def directory_prefix_to_omit() -> str:
    """Return the current directory with a slash; "" if it was deleted, or the user typed a path that starts with it."""
    try:
        directory = f"{os.getcwd()}/"
    except FileNotFoundError:
        return ""
    return "" if any(directory in word for word in sys.argv) else directory


def as_printable(text: str) -> str:
    """Return text for a terminal: paths are relative as the user typed them, and control characters are escaped."""
    directory = directory_prefix_to_omit()
    return escape_control_characters(text.replace(directory, "") if len(directory) > 1 else text)


def print_note(text: str) -> None:
    """Print a line to stderr, unless --quiet is given."""
    if not _quiet:
        typer.echo(as_printable(text), err=True)


def print_used_checkpoint(asked: Path | None, used: Path) -> None:
    """Print which checkpoint is used, if the user named no path, its run, or the step that it is a part of."""
    if used != asked:
        is_part = asked is not None and find_step_of_path(asked) is not None and find_step_of_path(used) is None
        what = "the model" if is_part else "the latest complete checkpoint"
        print_note(f"using {used}, {what}{f' of {asked}' if asked else ''}")


def print_text_line(text: str) -> None:
    """Print a line to stdout, unless --quiet is given."""
    print_raw_line(as_printable(text))


def with_repeat_count(text: str, number: int) -> str:
    """Return a line with a count, `text  x3`, if it represents several."""
    return f"{text}  x{number}" if number > 1 else text


def print_raw_line(text: str) -> None:
    """Print a line to stdout with its escape sequences, unless --quiet is given."""
    if not _quiet:
        write_line(text)


def print_json(value: Any) -> None:
    write_line(json.dumps(to_json_value(value)))


def write_line(text: str) -> None:
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"cannot write to stdout: {(error.strerror or str(error)).lower()}"
        raise IOFailure(message, hint="redirect it to a file on another disk") from error


def to_json_value(value: Any) -> Any:
    """Return a value for JSON: dataclasses as objects, paths as strings, NaN and infinity as null."""
    if is_dataclass(value):
        return {field.name: to_json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(each) for each in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def pick(record: object, *names: str) -> dict[str, Any]:
    """Return attributes of a result by name. The names are JSON keys, so do not rename them."""
    return {name: getattr(record, name) for name in names}


def print_error(error: CkptError, *, as_json: bool) -> None:
    """Print an error as a line with file and tensor, and its hint; or as JSON."""
    if as_json and sys.stdout is not None:
        with suppress(IOFailure):  # stdout is full
            print_json({"error": error.to_json()})
            return
    typer.echo(as_printable(f"error: {error.line}"), err=True)
    if error.hint:
        typer.echo(as_printable(f"hint: {error.hint}"), err=True)


def print_table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> None:
    """Print a table. On a narrow terminal, wide cells wrap onto further lines."""
    cells = [[as_printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    if sys.stdout.isatty():
        room = terminal_width() - 2 * (len(widths) - 1)
        while sum(widths) > room and max(widths) > _NARROWEST:  # narrow the widest column until the table fits
            widths[widths.index(max(widths))] -= 1
    for row in cells:
        for line in zip_longest(*map(fold_lines, row, widths), fillvalue=""):
            print_text_line("  ".join(piece.ljust(width) for piece, width in zip(line, widths, strict=True)).rstrip())


def print_files(files: Mapping[str, int]) -> None:
    rows = [(f"  {name}", format_bytes(nbytes)) for name, nbytes in files.items()]
    print_table(without_middle(rows), ("  file", "size"))


def without_middle(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Return the rows of a table of files; of more than 20 rows, the first and last 9."""
    if len(rows) <= 20:
        return rows
    left_out = (f"  ... {len(rows) - 18} more", *[""] * (len(rows[0]) - 1))
    return [*rows[:9], left_out, *rows[-9:]]


def terminal_width() -> int:
    """Return the width of the terminal in characters; 200 if stdout is not a terminal."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 200


@contextmanager
def progress_bar(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes (additional bytes, total bytes): a bar on a terminal, else a line every 10%."""
    if _quiet or not sys.stderr.isatty():
        yield ProgressLog(verb).advance
        return
    from tqdm import tqdm

    with tqdm(desc=verb, unit="B", unit_scale=True, leave=False, delay=_SOON) as bar:

        def advance(nbytes: int, total: int) -> None:
            if bar.total not in (None, total):
                bar.reset()  # another total means that the next stage has begun
            bar.total = total
            bar.update(nbytes)

        yield advance


@dataclass(slots=True)
class ProgressLog:
    """Prints progress as a line every 10%, for work of at least `_LEAST_LOGGED` bytes."""

    verb: str
    total: int = 0
    done: int = 0
    tenths: int = 0

    def advance(self, nbytes: int, total: int) -> None:
        """Add `nbytes` finished bytes, of `total` bytes."""
        if total != self.total:
            self.total, self.done, self.tenths = total, 0, 0  # another total means that the next stage has begun
        self.done += nbytes
        tenths = self.done * 10 // max(total, 1)
        if tenths > self.tenths and total >= _LEAST_LOGGED:
            print_note(f"{self.verb}: {tenths}0% of {format_bytes(total)}")
        self.tenths = tenths


def format_age(seconds: float) -> str:
    """Return an age as text: `45 s`, `3 min`, `2 h`, `5 d`."""
    for limit, divisor, unit in _AGES:
        if seconds < limit:
            return f"{max(seconds, 0) // divisor:.0f} {unit}"
    return f"{seconds // 86_400:.0f} d"
