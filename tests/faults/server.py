"""A server that forks: a process that has imported what is to be tried, and makes a child of itself for each try.

A try costs milliseconds so, instead of an interpreter's start. Knows no checkpoint, and judges nothing.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, NoReturn, Self

from tests.faults.shim import Fault, arm, build, count_fired, last_fired

_HOME = Path(__file__).parents[2]
_PAGE = resource.getpagesize()
_HEARD = 1 << 16
_DESCRIPTORS = 1024  # more than a server ever has
_ENVIRONMENT = {
    "MALLOC_PERTURB_": "165",  # memory that nobody wrote shows as such
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # threads do not live through a fork
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a try ended.

    `code` is the exit status, negative for a signal, None for a hang; `fired` how many faults the shim injected; `rss`
    the peak of resident bytes beyond what the server had; `where` the call and the path that the fault came to.
    """

    code: int | None
    out: str
    err: str
    fired: int
    rss: int
    where: str = ""


class Server:
    """Tries one target after the other, each in a child of a process that has imported `modules`.

    With `shim` the calls of the children to libc can be made to fail. The `environment` is added to that of this
    process. A context manager.
    """

    def __init__(
        self, *modules: str, shim: bool = False, environment: Mapping[str, str] = MappingProxyType(_ENVIRONMENT)
    ) -> None:
        self._environment = environment
        self._command = [sys.executable, "-m", "tests.faults.server", *modules]
        self._shim = build() if shim else None

    def __enter__(self) -> Self:
        preload = {} if self._shim is None else {"LD_PRELOAD": str(self._shim)}
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self._environment, **preload},
            cwd=_HOME,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        process = self._process
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.kill()
        process.wait()

    def run(
        self,
        target: str,
        args: Sequence[str],
        *,
        fault: Fault | None = None,
        limits: Mapping[int, int] = {},
        timeout: float = 20.0,
        cwd: Path | None = None,
        env: Mapping[str, str] = {},
    ) -> Ended:
        """Try `target` and say how it ended: "ckptkit" is the command line, "package.module:function" is called.

        Strings are all that it is given. `limits` are by number of `resource.RLIMIT_*`, `timeout` is in seconds.
        """
        if fault is not None and self._shim is None:
            raise ValueError("a fault needs a server with a shim")
        asked = {
            "target": target,
            "args": list(args),
            "fault": None if fault is None else asdict(fault),
            "limits": list(limits.items()),
            "timeout": timeout,
            "cwd": str(cwd or _HOME),
            "env": dict(env),
        }
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        requests.write(json.dumps(asked).encode() + b"\n")
        requests.flush()
        answer = answers.readline()
        if not answer:
            raise ChildProcessError(f"the server ended with status {self._process.wait()}")
        return Ended(**json.loads(answer))


def serve(modules: Sequence[str], requests: IO[bytes], answers: IO[bytes]) -> None:
    """Import the modules, and answer a line for a line until there is none."""
    for name in modules:
        importlib.import_module(name)
    for line in requests:
        answers.write(json.dumps(asdict(attempt(json.loads(line)))).encode() + b"\n")
        answers.flush()


def attempt(asked: Mapping[str, Any]) -> Ended:
    """Do what is asked for in a child, and watch it."""
    fired = count_fired() if asked["fault"] else 0  # since the server began
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    (out, write_out), (err, write_err) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        be_child(asked, write_out, write_err)
    os.setpgid(child, child)  # as it does itself: whoever is first
    os.close(write_out)
    os.close(write_err)
    said, in_time = watch(child, (out, err), asked["timeout"])
    _, status, usage = os.wait4(child, 0)
    fired = count_fired() - fired if asked["fault"] else 0
    return Ended(
        code=os.waitstatus_to_exitcode(status) if in_time else None,
        out=said[out].decode(errors="backslashreplace"),
        err=said[err].decode(errors="backslashreplace"),
        fired=fired,
        rss=max(0, usage.ru_maxrss * 1024 - resident),
        where=last_fired() if fired else "",
    )


def watch(child: int, pipes: Sequence[int], timeout: float) -> tuple[dict[int, bytes], bool]:
    """All that a child says, and whether it ended in time. Whatever it left running is killed."""
    said = dict.fromkeys(pipes, b"")
    last = time.monotonic() + timeout
    ended = os.pidfd_open(child)
    waiting = {ended, *pipes}
    while ended in waiting:
        ready, _, _ = select.select(waiting, [], [], max(0.0, last - time.monotonic()))
        if not ready:
            break
        for fd in ready:
            heard = b"" if fd == ended else os.read(fd, _HEARD)
            said[fd] = said.get(fd, b"") + heard
            if not heard:
                waiting.remove(fd)
    os.killpg(child, signal.SIGKILL)
    for pipe in pipes:
        while heard := os.read(pipe, _HEARD):
            said[pipe] += heard
        os.close(pipe)
    os.close(ended)
    return said, ended not in waiting


def be_child(asked: Mapping[str, Any], out: int, err: int) -> NoReturn:
    """Do what is asked for, and end as an interpreter would."""
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, _DESCRIPTORS)
    os.chdir(asked["cwd"])
    os.environ.update(asked["env"])
    for limit, value in asked["limits"]:
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    try:
        code = run(find(asked["target"], asked["args"]), asked["fault"] and Fault(**asked["fault"]))
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def run(work: Callable[[], object], fault: Fault | None) -> int:
    """Do `work` with a fault, and give the exit status that it asks for."""
    if fault is not None:
        arm(fault)
    try:
        work()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def find(target: str, args: Sequence[str]) -> Callable[[], object]:
    """What is to be called."""
    if target == "ckptkit":
        sys.argv = ["ckptkit", *args]
        target, args = "ckptkit.cli:main", ()
    module, name = target.split(":")
    return partial(getattr(importlib.import_module(module), name), *args)


def main() -> None:
    """Serve over what was standard input and output, which nothing that is imported can then spoil."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    with open(requests, "rb", closefd=True) as asked, open(answers, "wb", closefd=True) as told:
        serve(sys.argv[1:], asked, told)


if __name__ == "__main__":
    main()
