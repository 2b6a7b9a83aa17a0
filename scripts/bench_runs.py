"""Runs of a benchmark: programs timed in turns, with their memory. Knows nothing of what they do."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Contender:
    """A program to be timed: a shell command about `{src}` and `{out}`.

    `floor` names the contender that it is compared with; one that has a floor must leave its output behind.
    """

    name: str
    command: str
    src: Path
    floor: str | None = None


@dataclass
class Result:
    """What was measured of a contender: seconds by mode, and peak memory in MiB."""

    contender: Contender
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak: float = 0.0


def run(command: str, src: Path, out: Path) -> tuple[float, float]:
    """Run a shell command; its seconds of wall clock and the peak memory of its processes in MiB."""
    line = command.format(src=shlex.quote(str(src)), out=shlex.quote(str(out)))
    with subprocess.Popen(line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as shell:
        began = time.perf_counter()
        said = shell.stdout.read() if shell.stdout else b""
        _, status, usage = os.wait4(shell.pid, 0)
        seconds = time.perf_counter() - began
        shell.returncode = os.waitstatus_to_exitcode(status)
    if shell.returncode:
        raise SystemExit(f"{line}\nexited with {shell.returncode}:\n{said.decode(errors='replace')}")
    return seconds, usage.ru_maxrss / 1024


def measure(contenders: Sequence[Contender], out: Path, *, runs: int, modes: Sequence[str]) -> list[Result]:
    """Run every contender `runs` times in each mode, one after the other; each round begins with another one.

    What ran before has a say in how fast a program gets memory and disk, so none shall always follow the same.
    """
    results = [Result(contender) for contender in contenders]
    for mode in modes:
        for turn in range(runs):
            first = turn * len(results) // runs
            for result in results[first:] + results[:first]:
                seconds, peak = run_once(result.contender, out, mode)
                result.seconds.setdefault(mode, []).append(seconds)
                result.peak = max(result.peak, peak)
                print(f"{mode:5} {seconds:8.2f} s {peak:8.0f} MiB  {result.contender.name}", file=sys.stderr)
    return results


def run_once(contender: Contender, out: Path, mode: str) -> tuple[float, float]:
    """One run, on a quiet disk, with the input in the page cache or out of it. The output is checked and removed."""
    out.mkdir()
    os.sync()
    for path in contender.src.iterdir():
        (evict if mode == "cold" else warm)(path)
    measured = run(contender.command, contender.src, out)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if contender.floor and written < 0.45 * sum(path.stat().st_size for path in contender.src.iterdir()):
        raise SystemExit(f"{contender.name} wrote only {written} bytes")
    shutil.rmtree(out)
    return measured


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
    """The results as a Markdown table: medians, and their ratios to each contender's floor where it has one."""
    modes = list(results[0].seconds)
    medians = {(result.contender.name, mode): median(result.seconds[mode]) for result in results for mode in modes}
    rows = [["", *modes, "peak RSS"], ["---", *("---:" for _ in modes), "---:"]]
    for result in results:
        name, floor = result.contender.name, result.contender.floor
        cells = [f"{medians[name, mode]:.2f} s" for mode in modes]
        if floor:
            cells = [
                f"{cell} ({medians[name, mode] / medians[floor, mode]:.2f})"
                for cell, mode in zip(cells, modes, strict=True)
            ]
        rows.append([name, *cells, f"{result.peak:.0f} MiB"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
