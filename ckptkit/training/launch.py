"""Launch as many ranks as asked, or be the rank that torchrun made of this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from ckptkit.errors import CkptError, Usage
from ckptkit.training.parallel.ranks import RankPlace

# What every rank imports and forking shares: FSDP wraps modules with the last one.
PRELOADED = ["ckptkit.training.loop", "torch._dynamo"]

_UNGUARDED = os.EX_USAGE  # the exit code of a rank whose script called us again when the rank imported it

Report = Callable[[Any], None]
Work = Callable[[RankPlace, Report], None]
Ranks = dict[Connection, BaseProcess]  # processes of ours, by the pipes over which they report


def launch(work: Work, nproc: int | None, report: Report, on_interrupt: Callable[[], bool] = lambda: False) -> None:
    """Do `work` on `nproc` new processes, or as the rank that torchrun started; `report` hears what a rank reports.

    `nproc` None is one process per GPU, or one. `work` is pickled: a function of a module, or a partial of one.
    A CkptError raised on a rank is raised here; when a rank dies, the others are ended and a CkptError says so.
    The new processes get a SIGTERM that this one gets. The first Ctrl-C calls `on_interrupt`: if that returns True,
    they get a SIGTERM too, else they end at once, as they do at the second one.
    """
    place = torchrun_place()
    if place is None:
        launch_here(work, nproc or max(1, torch.cuda.device_count()), report, on_interrupt)
    elif nproc is None:
        work(place, report)
    else:
        raise Usage("--nproc cannot be used under torchrun, which starts the processes", hint="drop `--nproc`")


def torchrun_place() -> RankPlace | None:
    """Return the place that torchrun gave this process in its environment, None without torchrun."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not all(name in os.environ for name in names):
        return None
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names)
    return RankPlace(rank, world_size, local_rank, local_world_size, rendezvous="env://")


def launch_here(work: Work, nproc: int, report: Report, on_interrupt: Callable[[], bool]) -> None:
    """Start `nproc` processes that meet in a file of a new temporary directory, and wait until all are done."""
    with tempfile.TemporaryDirectory(prefix="ckptkit-") as room:
        rendezvous = (Path(room) / "rendezvous").as_uri()
        context = start_server()
        ranks: Ranks = {}
        try:
            with holding_interrupts():  # one in the middle of a start would leave a rank that nobody ends
                for number in range(nproc):
                    place = RankPlace(number, nproc, number, nproc, rendezvous)
                    ranks.update([start(context, work, place)])
            with forwarding(ranks, on_interrupt):
                follow(ranks, report)
        finally:
            for process in ranks.values():
                process.kill()
            for process in ranks.values():
                process.join()


@contextmanager
def forwarding(ranks: Ranks, on_interrupt: Callable[[], bool]) -> Iterator[None]:
    """Pass SIGTERM on to the ranks, inside the block, and as that the first Ctrl-C: each ends as it sees fit."""

    def forward(*_: object) -> None:
        for process in ranks.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGTERM)

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        if on_interrupt():
            forward()
        else:
            signal.raise_signal(signal.SIGINT)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, forward)
    if before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def holding_interrupts() -> Iterator[None]:
    """Block SIGINT until the end of the block, and for good in processes that start inside it and do not unblock it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_server() -> ForkServerContext:
    """Start the server that forks the ranks, and wait until it has imported torch, so that each start is quick.

    It does nothing with torch, since threads and CUDA do not survive a fork. A Ctrl-C, which a terminal sends to every
    process, ends the wait here; the server would print a traceback, and ends by itself once this process has ended.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else a look for GPUs counts as a use of CUDA
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()  # here, because its start lets signals through again
    probe = context.Process(target=os.getpid, name="a new process", daemon=True)
    try:
        with holding_interrupts():
            forkserver.ensure_running()
        probe.start()  # returns when the server has forked
    except RuntimeError:
        if "__mp_main__" in sys.modules:  # the script's name while a new process imports it, and may not start others
            os._exit(_UNGUARDED)
        raise
    require_good_end(probe)
    return context


def start(context: ForkServerContext, work: Work, place: RankPlace) -> tuple[Connection, BaseProcess]:
    """Start the process of one rank."""
    ours, theirs = context.Pipe(duplex=False)
    given = (work, place, theirs, dict(os.environ))
    process = context.Process(target=run_rank, args=given, name=f"rank {place.rank}", daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return ours, process


def run_rank(work: Work, place: RankPlace, pipe: Connection, environment: dict[str, str]) -> None:
    """Work as the process of a rank: report our errors over the pipe, and exit."""
    os.environ.clear()  # the server has that of the time when it was started
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the server's block is not for what the rank starts
    os.dup2(2, 1)  # results go through the pipe; what libraries print, as torch 2.10's gloo does, is none
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))
    code = 0
    try:
        work(place, pipe.send)
    except CkptError as error:
        pipe.send(error)
        code = error.exit_code
    pipe.close()
    # Not sys.exit: DTensor's caches keep gloo's threads alive, and one that still holds a tensor when the interpreter
    # shuts down aborts a process whose work is done (torch 2.13, now and then on a busy machine).
    os._exit(code)


def follow(ranks: Ranks, report: Report) -> None:
    """Pass on what the ranks report until all have ended; raise what the first failing one raised."""
    open_pipes = dict(ranks)
    while open_pipes:
        for pipe in wait(list(open_pipes)):
            assert isinstance(pipe, Connection)
            message = receive(pipe)
            if message is None:
                require_good_end(open_pipes.pop(pipe))
                continue
            if isinstance(message, CkptError):
                raise message
            report(message)


def receive(pipe: Connection) -> Any:
    """Return what a rank reports, None when it has closed its pipe."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def require_good_end(process: BaseProcess) -> None:
    """Wait for the end of a process. Raises CkptError unless its exit code is 0."""
    process.join()
    code = process.exitcode or 0
    if code == _UNGUARDED:
        raise Usage(
            "each new process imports this script, which would start processes again",
            hint='put the call under `if __name__ == "__main__":`',
        )
    if code < 0:
        name = signal.Signals(-code).name
        hint = "check whether this machine is out of memory" if name == "SIGKILL" else None
        raise CkptError(f"{process.name} was ended by {name}; the other ranks were stopped", hint=hint)
    if code > 0:
        raise CkptError(
            f"{process.name} failed with exit code {code}; the other ranks were stopped",
            hint="read its own message above",
        )
