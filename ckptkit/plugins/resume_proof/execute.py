"""Run the script, a shell command with a time limit, and read its losses. All its processes end with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from pathlib import Path

from ckptkit.plugins.resume_proof.options import ScriptOptions

_MARK = "CKPTKIT_PROOF"  # an environment variable by which all processes of a command are found
_POLL = 0.002  # seconds between two looks: a small checkpoint is written in some milliseconds
_TAIL = 1 << 16  # bytes at the end of a log in which its last error is looked for
_LONGEST = 200  # characters of a line of output in a message
_SHOWN = 3  # lines at the end of the output that a message quotes, if none of them is an error
_OF_PARENT = ("ChildFailedError", "ProcessExitedException")  # of a launcher: the error of its rank is above it
# torchrun logs a warning or an error as `E1127 18:20:31.5 7 torch/distributed/elastic/...`, and ends with a traceback
_OF_TORCHRUN = re.compile(r"^[WE]\d{4} [\d:. ]+torch/distributed/elastic/multiprocessing", re.MULTILINE)
_OF_GPU = re.compile(
    r"no NVIDIA driver|No CUDA GPUs|not compiled with CUDA|CUDA (is|was) not available|no ROCm", re.IGNORECASE
)
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*|error: .*)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of the command: its run directory, the file with its output, its losses in order.

    `exit_code` is None if it was ended by us: because of the time limit, or where a `watch` asked for it.
    """

    run: Path
    log: Path
    exit_code: int | None
    losses: tuple[float, ...]
    seconds: float

    @property
    def is_done(self) -> bool:
        """Return whether the command ended by itself and without an error."""
        return self.exit_code == 0

    def describe_failure(self) -> str:
        """Return how it ended, with the last error that it printed and where its output is."""
        if self.exit_code is None:
            seen = "".join(f", last line `{line}`" for line in self.last_output_lines(1))
            hint = f"see where it hangs in {self.log}, or raise --time-limit"
            return f"still running after {self.seconds:.0f} s{seen}: {hint}"
        tail = self.read_output_tail()
        if _OF_GPU.search(tail):
            return f"the script needs a GPU, and this machine has none; output: {self.log}"
        errors = [error for error in _ERROR.findall(tail) if not any(name in error for name in _OF_PARENT)]
        lines = [error.strip()[:_LONGEST] for error in errors[-1:]] or self.last_output_lines(_SHOWN) or ["no output"]
        return f"exit code {self.exit_code}: {' / '.join(lines)}; output: {self.log}"

    def last_output_lines(self, number: int) -> list[str]:
        """Return the last lines of the output that have a word, cut to a length that fits a message."""
        lines = [line.strip()[:_LONGEST] for line in self.read_output_tail().splitlines()]
        return [line for line in lines if re.search(r"\w", line)][-number:]

    def read_output_tail(self) -> str:
        """Return the end of the output, without the command itself and what torchrun says of a rank that failed."""
        tail = self.log.read_bytes().partition(b"\n")[2][-_TAIL:].decode("utf-8", "replace")
        return _OF_TORCHRUN.split(tail)[0] or tail


def execute_command(
    script: ScriptOptions,
    run: Path,
    log: Path,
    nproc: int,
    *,
    checkpoint: Path | None = None,
    watch: Callable[[], bool] = lambda: False,
) -> Execution:
    """Run the command in its own session until it ends, its time is over, or `watch` returns True.

    No process that it started is left when this returns. `checkpoint` is what it resumes from.
    """
    run.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    mark, started = uuid.uuid4().hex, time.monotonic()
    command = script.command_line(run, nproc, checkpoint)
    log.write_text(f"$ {command}\n")
    process = subprocess.Popen(
        f"exec >>{shlex.quote(str(log))} 2>&1\n{command}",
        shell=True, stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, _MARK: mark},
    )  # fmt: skip
    try:
        exit_code = None
        while exit_code is None and time.monotonic() < started + script.time_limit and not watch():
            with suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(_POLL)
        seconds = time.monotonic() - started
    finally:
        kill_processes(process, mark)
    return Execution(run, log, exit_code, read_losses(script, run, log), seconds)


def kill_processes(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the command and all that it started: also workers that torchrun has put into sessions of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while marked := find_marked_processes(mark):
        for number in marked:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(_POLL)


def find_marked_processes(mark: str) -> list[int]:
    """Return the living processes that inherited the mark; [] on systems without /proc."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or gone meanwhile
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def read_losses(script: ScriptOptions, run: Path, log: Path) -> tuple[float, ...]:
    """Return the losses in the order in which they were written; () without a pattern, or if none matches."""
    if script.find_loss_file_and_key:
        file, key = script.find_loss_file_and_key
        path = run / file
        losses = []
        for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else []:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and key in found:
                losses.append(float_or_nan(found[key]))
        return tuple(losses)
    if script.loss is None:
        return ()
    text = log.read_text("utf-8", "replace").partition("\n")[2]  # without the command itself
    return tuple(map(float_or_nan, re.findall(script.loss, text)))


def float_or_nan(text: object) -> float:
    try:
        return float(str(text).strip().rstrip(".,;"))
    except ValueError:
        return nan
