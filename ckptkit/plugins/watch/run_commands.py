"""Fill the path and step of a checkpoint into commands, and run each in its own process, without a shell."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ckptkit.errors import Occupied, Usage

# placeholders; also set as environment variables CKPTKIT_CKPT and so on
PLACES = ("ckpt", "name", "step", "out", "prev")
_PLACE = re.compile(r"(?<!\$)\{([a-z]+)\}")  # not a shell's ${name}
_OF_RANKS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_GRACE = 30.0  # seconds between SIGTERM and SIGKILL
_LOOK = 0.05  # seconds between two checks
_ENDED = ("Z", "X")  # process states in /proc: zombie, dead
_NOT_FOUND = 127  # exit code, as in shells
_FINAL = (Usage.exit_code, Occupied.exit_code)  # exit codes of ckptkit that a retry cannot change


class Final(str):
    """The failure of a command that fails again at every retry."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class WatchCommand:
    """The words of a command, with placeholders like `{ckpt}`; `is_ours` if it is a command of ckptkit."""

    words: tuple[str, ...]
    is_ours: bool

    @classmethod
    def parse(cls, text: str | Sequence[str], *, is_ours: bool) -> Self:
        """Read a command line, split as by a shell, or a list of words. Raises `Usage` if it cannot run."""
        try:
            words = tuple(shlex.split(text) if isinstance(text, str) else text)
        except ValueError as error:
            raise Usage(f"`{text}` cannot be split into words: {str(error).lower()}") from error
        if not words:
            raise Usage("expected a command, found nothing")
        command = cls(words, is_ours)
        unknown = sorted(command.placeholders - set(PLACES))
        if unknown:
            hint = f"there are {', '.join(f'{{{placeholder}}}' for placeholder in PLACES)}"
            raise Usage(f"`{{{unknown[0]}}}` in `{command}` is not a known placeholder", hint=hint)
        if is_ours and not command.placeholders - {"prev"}:
            hint = "write the command with {ckpt}, as in 'consolidate {ckpt} {out}'"
            raise Usage(f"`{command}` does not name the checkpoint", hint=hint)
        if not is_ours and not _PLACE.search(words[0]) and shutil.which(words[0]) is None:
            hint = "check PATH; for pipes, use a shell: sh -c '...' with $CKPTKIT_CKPT and $CKPTKIT_OUT"
            raise Usage(f"unknown program `{words[0]}`", hint=hint)
        return command

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset(placeholder for word in self.words for placeholder in _PLACE.findall(word))

    def __str__(self) -> str:
        return " ".join(self.words)

    def fill(self, values: Mapping[str, str]) -> list[str]:
        return [_PLACE.sub(lambda found: values[found[1]], word) for word in self.words]

    def run_command(self, values: Mapping[str, str], lock_fd: int, timeout: float) -> str | None:
        """Run the command with these values. Return a description of its failure, None if it succeeded.

        The command does not get torchrun's variables, so it is not a rank of the job that this process belongs to. It
        inherits the file descriptor `lock_fd`: if it outlives this process, the checkpoint stays protected. If it runs
        longer than `timeout` seconds, or if this process is interrupted, the command and its children are terminated
        first.
        """
        launcher = [sys.executable, "-m", "ckptkit"] if self.is_ours else []
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        environment |= {f"CKPTKIT_{name.upper()}": value for name, value in values.items()}
        try:
            process = subprocess.Popen(
                [*launcher, *self.fill(values)],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=(lock_fd,),
                start_new_session=True,  # so that Ctrl-C reaches only this process, which then terminates the command
            )
        except OSError:
            return Final(describe_exit(_NOT_FOUND))
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            terminate_group(process)
            return f"ran longer than {timeout:g} s, the timeout, and was ended with its children"
        except BaseException:
            terminate_group(process)
            raise
        if code == _NOT_FOUND or (self.is_ours and code in _FINAL):
            return Final(describe_exit(code))
        return describe_exit(code) if code else None


def terminate_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process and its children: SIGTERM to all, then SIGKILL after a grace period."""
    with suppress(ProcessLookupError):  # all processes have ended
        os.killpg(process.pid, signal.SIGTERM)
        last = time.monotonic() + _GRACE
        while (process.poll() is None or is_group_running(process.pid)) and time.monotonic() < last:
            time.sleep(_LOOK)
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process that waits for a dead file server cannot be killed
        process.wait(_GRACE)


def is_group_running(group: int) -> bool:
    """Return whether any process of a group is running. Zombies do not count."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    states = []
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, process_group = stat_file.read_text().rpartition(")")[2].split()[:3]
            states += [state] if int(process_group) == group else []
    return not states or any(state not in _ENDED for state in states)  # none are found on a system without /proc


def describe_exit(code: int) -> str:
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"ended by {known.get(-code, f'signal {-code}')}"
    return "not found" if code == _NOT_FOUND else f"exit code {code}"
