"""Print the tables, notes, bars and JSON of every command. Data goes to stdout, all else to stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptkit.errors import CkptError
from ckptkit.words import fold, format_bytes, visible

_quiet = False
_NARROWEST = 16  # columns that a column keeps in a terminal too narrow for a table; no number is wider
_AGES = ((60, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"))  # below so many seconds, divided by, unit
_SOON = 0.5  # seconds: work that is done by then shows no bar
_LEAST_LOGGED = 10**8  # bytes: less is done before anybody reads the log


def be_quiet(wanted: bool) -> None:
    """Silence all but errors and JSON from now on, if `wanted`."""
    global _quiet  # noqa: PLW0603 - one terminal, one voice
    _quiet = _quiet or wanted


Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=be_quiet, help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def reserve_stdout() -> None:
    """Keep stdout for data, from now on: what libraries write there, as torch 2.10's gloo does, goes to stderr."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def note(text: str) -> None:
    """Print a line to stderr, unless that is silenced."""
    if not _quiet:
        typer.echo(visible(text), err=True)


def say(text: str) -> None:
    """Print a line to stdout, unless that is silenced."""
    print_line(visible(text))


def print_line(text: str) -> None:
    """Print a line to stdout as it is, escape sequences too, unless that is silenced."""
    if not _quiet:
        typer.echo(text)


def print_json(value: Any) -> None:
    """Print one JSON object to stdout."""
    typer.echo(json.dumps(plain(value)))


def plain(value: Any) -> Any:
    """Return a value as JSON says it: records by their fields, paths as text, null for what is no finite number."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def pick(record: object, *names: str) -> dict[str, Any]:
    """Return attributes of a result by the names that scripts, too, know them by."""
    return {name: getattr(record, name) for name in names}


def print_error(error: CkptError, *, as_json: bool) -> None:
    """Print an error as one line with file and tensor, and its hints; or as JSON."""
    if as_json:
        print_json({"error": error.to_json()})
        return
    typer.echo(visible(f"error: {error.line}"), err=True)
    if error.hint:
        typer.echo(visible(f"hint: {error.hint}"), err=True)


def print_problem(problem: CkptError) -> None:
    """Print a problem that a check found, as two lines at most; --quiet does not silence it."""
    typer.echo(visible(f"problem: {problem.line}"))
    if problem.hint:
        typer.echo(visible(f"  hint: {problem.hint}"))


def print_table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> None:
    """Print rows in columns; on a terminal that is too narrow, names and sentences go on in further lines."""
    cells = [[visible(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    if sys.stdout.isatty():
        narrow(widths, terminal_width() - 2 * (len(widths) - 1))
    for row in cells:
        for line in zip_longest(*map(fold, row, widths), fillvalue=""):
            say("  ".join(piece.ljust(width) for piece, width in zip(line, widths, strict=True)).rstrip())


def narrow(widths: list[int], room: int) -> None:
    """Narrow the widest columns until the table fits."""
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1


def terminal_width() -> int:
    """Return columns of the terminal; plenty where the output goes to a file."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 200


@contextmanager
def progress_bar(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, and a line every 10 % elsewhere. Give it (bytes more, bytes in all)."""
    if _quiet or not sys.stderr.isatty():
        yield ProgressLog(verb).tell
        return
    from tqdm import tqdm

    with tqdm(desc=verb, unit="B", unit_scale=True, leave=False, delay=_SOON) as bar:

        def tell(nbytes: int, total: int) -> None:
            if bar.total not in (None, total):
                bar.reset()  # another thing is being done now
            bar.total = total
            bar.update(nbytes)

        yield tell


@dataclass(slots=True)
class ProgressLog:
    """The progress of some work, as a line every 10 % where there is enough to do."""

    verb: str
    total: int = 0
    done: int = 0
    tenths: int = 0

    def tell(self, nbytes: int, total: int) -> None:
        """Note that more bytes are done, of how many in all."""
        if total != self.total:
            self.total, self.done, self.tenths = total, 0, 0  # another thing is being done now
        self.done += nbytes
        tenths = self.done * 10 // max(total, 1)
        if tenths > self.tenths and total >= _LEAST_LOGGED:
            note(f"{self.verb}: {tenths}0 % of {format_bytes(total)}")
        self.tenths = tenths


def age(seconds: float) -> str:
    """Return how long ago something was: `45 s`, `3 min`, `2 h`, `5 d`."""
    for limit, divisor, unit in _AGES:
        if seconds < limit:
            return f"{max(seconds, 0) // divisor:.0f} {unit}"
    return f"{seconds // 86_400:.0f} d"
