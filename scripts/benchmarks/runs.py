"""Time programs in turns, with their memory. Knows nothing of what they do."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from scripts import markdown


@dataclass(frozen=True)
class Contender:
    """A program to be timed: a shell command about `{src}` and `{out}`.

    `floor` names the contender that it is compared with; one that has a floor must leave its output behind, unless it
    `only_reads`: at `least` so much of its input's size. One that `tells` what it took is believed: it knows which part
    of its work counts.
    """

    name: str
    command: str
    src: Path
    floor: str | None = None
    only_reads: bool = False
    tells: bool = False
    least: float = 0.45


@dataclass
class Result:
    """The measurements of a contender: seconds by mode, and peak memory in MiB."""

    contender: Contender
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak: float = 0.0


@dataclass(frozen=True)
class Ended:
    """The cost of a program: seconds of wall clock, and the peak memory of the largest of its processes in MiB."""

    seconds: float
    peak: float
    said: str = ""

    @property
    def told(self) -> dict[str, float]:
        """Return what it says of itself: the last line of its output that is JSON, with `seconds`, `peak` and more."""
        line = next(line for line in reversed(self.said.splitlines()) if line.startswith("{"))
        facts: dict[str, float] = json.loads(line)
        return facts


def run(command: str, src: Path, out: Path) -> Ended:
    """Run a shell command to its end; if we are interrupted, end it and all that it started."""
    line = command.format(src=shlex.quote(str(src)), out=shlex.quote(str(out)))
    with subprocess.Popen(
        line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as shell:
        assert shell.stdout is not None
        began = time.perf_counter()
        try:
            said = shell.stdout.read()
        except BaseException:
            os.killpg(shell.pid, signal.SIGTERM)
            shell.stdout.read()  # ends when the last of its processes has
            raise
        _, status, usage = os.wait4(shell.pid, 0)
        seconds = time.perf_counter() - began
        shell.returncode = os.waitstatus_to_exitcode(status)
    text = said.decode(errors="replace")
    if shell.returncode:
        raise SystemExit(f"{line}\nexited with {shell.returncode}:\n{text}")
    return Ended(seconds, usage.ru_maxrss / 1024, text)


def measure(contenders: Sequence[Contender], out: Path, *, runs: int, modes: Sequence[str]) -> list[Result]:
    """Run every contender `runs` times in each mode, one after the other; each round begins with another one.

    What ran before has a say in how fast a program gets memory and disk, so none shall always follow the same.
    """
    results = [Result(contender) for contender in contenders]
    for mode in modes:
        for turn in range(runs):
            first = turn * len(results) // runs
            for result in results[first:] + results[:first]:
                ended = run_once(result.contender, out, mode)
                result.seconds.setdefault(mode, []).append(ended.seconds)
                result.peak = max(result.peak, ended.peak)
                say = f"{mode:5} {ended.seconds:8.2f} s {ended.peak:8.0f} MiB  {result.contender.name}"
                print(say, file=sys.stderr)
    return results


def run_once(contender: Contender, out: Path, mode: str) -> Ended:
    """Run a program once on a quiet disk, its input in the page cache or out of it; check and remove its output."""
    out.mkdir()
    os.sync()
    for path in contender.src.iterdir():
        (evict if mode == "cold" else warm)(path)
    ended = run(contender.command, contender.src, out)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    must_write = contender.floor and not contender.only_reads
    if must_write and written < contender.least * sum(path.stat().st_size for path in contender.src.iterdir()):
        raise SystemExit(f"{contender.name} wrote only {written} bytes")
    shutil.rmtree(out)
    return Ended(ended.told["seconds"], ended.told["peak"]) if contender.tells else ended


def evict(path: Path) -> None:
    """Drop a file's pages from the cache; they are clean, since the disk was synced."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path) -> None:
    """Read a file, so that it is in the cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table: medians, and their ratios to each contender's floor where it has one."""
    modes = list(results[0].seconds)
    medians = {(result.contender.name, mode): median(result.seconds[mode]) for result in results for mode in modes}
    rows = [["", *modes, "peak RSS"]]
    for result in results:
        name, floor = result.contender.name, result.contender.floor
        cells = [f"{medians[name, mode]:.2f} s" for mode in modes]
        if floor:
            cells = [
                f"{cell} ({medians[name, mode] / medians[floor, mode]:.2f})"
                for cell, mode in zip(cells, modes, strict=True)
            ]
        rows.append([name, *cells, f"{result.peak:.0f} MiB"])
    return markdown.table(rows)
