"""Faults: what can go wrong with a call to the system below one directory, and the library that makes it go wrong."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
# in the order of `enum call` in shim.c
CALLS = (
    "open", "read", "write", "truncate", "allocate", "sync", "syncdir", "close", "rename", "exchange", "link", "unlink",
    "mkdir", "rmdir", "lock", "stat", "list",
)  # fmt: skip
# in the order of `enum kind` in shim.c
KINDS = ("nothing", "error", "late", "short", "signal", "torn", "cut", "swap", "journal")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at the `at`-th of the `calls` on paths below `below`, and at all after it if it goes on `forever`.

    nothing  it is counted
    error    it fails with errno `number`, undone
    late     it is done and then fails with errno `number`, as a close does
    short    a read or write does less than it is asked to
    signal   signal `number` comes before it
    torn     signal `number` comes when half of a write has been done, or else when the call has been done
    cut      before it, half of the file is cut off by somebody else
    swap     before it, `below` and `other` are exchanged by somebody else
    journal  what it changes is written to file `other`
    """

    below: str
    kind: str = "nothing"
    number: int = 0
    at: int = 1
    forever: bool = False
    calls: tuple[str, ...] = CALLS
    other: str = ""


@cache
def build() -> Path:
    """The library, compiled unless that has been done."""
    home = Path(tempfile.gettempdir(), f"ckptkit-faults-{os.getuid()}")
    home.mkdir(mode=0o700, exist_ok=True)
    library = home / f"shim-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*command, "-o", made, SOURCE, "-ldl"], check=True)
        made.rename(library)
    return library


def arm(fault: Fault) -> None:
    """Let a fault come to this process, which has the library preloaded."""
    calls = sum(1 << CALLS.index(call) for call in fault.calls)
    status = ctypes.CDLL(None).faults_arm(
        os.fsencode(os.path.realpath(fault.below)),
        KINDS.index(fault.kind),
        fault.number,
        ctypes.c_long(fault.at),
        int(fault.forever),
        calls,
        os.fsencode(fault.other),
    )
    if status:
        raise OSError(status, os.strerror(status), fault.other)


def count_fired() -> int:
    """Faults that have come to this process, or to any that was forked from it."""
    counter = ctypes.CDLL(None).faults_fired
    counter.restype = ctypes.c_long
    return int(counter())


def last_fired() -> str:
    """The call that the last fault came to, and its path; of one that goes on forever, the first of all."""
    library = ctypes.CDLL(None)
    library.faults_path.restype = ctypes.c_char_p
    return f"{CALLS[library.faults_call()]} {os.fsdecode(library.faults_path())}"
