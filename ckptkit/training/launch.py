"""Launch the ranks of a training as processes, or run as one rank under torchrun, and join them in a process group."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckptkit.errors import CkptError, Usage

# Modules that the fork server imports once for all ranks. FSDP imports torch._dynamo when it wraps modules.
PRELOADED = ["ckptkit.training.loop", "torch._dynamo"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank, its local rank on this machine, and the URL of the rendezvous (torch's `init_method`)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str


@contextmanager
def process_group(place: RankPlace, device: str, *, deterministic: bool = False) -> Iterator[DeviceMesh]:
    """Initialize the process group, yield a one-dimensional mesh, and destroy the group at the end.

    The device "auto" is a GPU if this machine has one for each of its ranks, else the CPU.
    `deterministic` makes results on a GPU repeatable bit for bit where torch can: attention otherwise adds up gradients
    in varying order.
    """
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < place.local_world_size:
        raise Usage(
            f"expected {place.local_world_size} GPUs, one for each rank, found {gpus}",
            hint="pass --nproc with the number of GPUs, or --device cpu",
        )
    device_type, backend = "cpu", "gloo"
    if device != "cpu" and gpus >= place.local_world_size:
        device_type, backend = "cuda", "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(place.local_rank)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(backend, init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    done = False
    try:
        # Wait until all ranks are connected: if a rank fails and exits while another still connects, both fail.
        dist.all_reduce(torch.zeros(1))
        yield init_device_mesh(device_type, (place.world_size,))
        done = True
    finally:
        # After an error NCCL would deadlock here, because other ranks wait for this rank: the process exit ends it.
        if done or device_type == "cpu":
            dist.destroy_process_group()


_UNGUARDED = os.EX_USAGE  # exit code of a rank whose script launches again on import: no `if __name__ == "__main__"`

Report = Callable[[Any], None]
Work = Callable[[RankPlace, Report], None]
Ranks = dict[Connection, BaseProcess]  # processes of the ranks, by the pipe on which each reports


def launch(work: Work, nproc: int | None, report: Report, on_interrupt: Callable[[], bool] = lambda: False) -> None:
    """Run `work` on `nproc` new processes, or in this process under torchrun. `report` gets the messages of the ranks.

    `nproc` None means one process per GPU, or one without GPUs. `work` is pickled: pass a module-level function, or a
    `partial` of one. A CkptError of a rank is raised here. If a rank dies, the other ranks are stopped and a CkptError
    is raised.

    A SIGTERM to this process is forwarded to the ranks. The first Ctrl-C calls `on_interrupt`: if it returns True, the
    ranks get SIGTERM, else they are stopped at once. A second Ctrl-C stops them at once.
    """
    place = find_torchrun_rank()
    if place is not None:
        if nproc is not None:
            raise Usage("--nproc cannot be used under torchrun, which starts the processes", hint="drop --nproc")
        work(place, report)
        return
    nproc = nproc or max(1, torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="ckptkit-") as directory:
        rendezvous = (Path(directory) / "rendezvous").as_uri()  # a file
        context = start_fork_server()
        ranks: Ranks = {}
        try:
            with blocked_interrupts():  # a Ctrl-C between the start and the entry in `ranks` would leave a rank running
                for number in range(nproc):
                    receiver, sender = context.Pipe(duplex=False)
                    own_place = RankPlace(number, nproc, number, nproc, rendezvous)
                    arguments = (work, own_place, sender, dict(os.environ))
                    started = context.Process(target=run_rank, args=arguments, name=f"rank {number}", daemon=True)
                    started.start()
                    sender.close()  # so that the pipe ends when the process ends
                    ranks[receiver] = started
            with forwarding_signals(ranks, on_interrupt):
                relay_reports(ranks, report)
        finally:
            for process in ranks.values():
                process.kill()
            for process in ranks.values():
                process.join()


def find_torchrun_rank() -> RankPlace | None:
    """Return the rank that torchrun set in the environment of this process, None without torchrun."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not all(name in os.environ for name in names):
        return None
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names)
    return RankPlace(rank, world_size, local_rank, local_world_size, rendezvous="env://")


@contextmanager
def forwarding_signals(ranks: Ranks, on_interrupt: Callable[[], bool]) -> Iterator[None]:
    """Forward SIGTERM to the ranks inside the block, and handle Ctrl-C as `launch` documents."""

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
def blocked_interrupts() -> Iterator[None]:
    """Block SIGINT inside the block. Processes that start inside it inherit the blocked signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_fork_server() -> ForkServerContext:
    """Start the fork server, and wait until it has imported torch, so that each rank starts quickly.

    The server only imports torch, because threads and CUDA do not survive a fork. A terminal sends Ctrl-C to every
    process. The server blocks it, since it would print a traceback; it exits by itself after this process.
    """
    # without NVML, counting the GPUs would initialize CUDA, which a forked process cannot use
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()  # before the signals are blocked, because its start unblocks them
    probe = context.Process(target=os.getpid, name="a new process", daemon=True)
    try:
        with blocked_interrupts():
            forkserver.ensure_running()
        probe.start()  # returns when the server has forked
    except RuntimeError:
        # A new process imports the user's script under this name, and may not start processes meanwhile.
        if "__mp_main__" in sys.modules:
            os._exit(_UNGUARDED)
        raise
    require_exit_code_0(probe)
    return context


def run_rank(work: Work, place: RankPlace, pipe: Connection, environment: dict[str, str]) -> None:
    """Run `work` in the process of a rank: send a CkptError over the pipe, and exit."""
    os.environ.clear()  # the process inherits the environment that the fork server was started with
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # children of the rank must not inherit the block
    os.dup2(2, 1)  # stdout is for results; send output of libraries, such as torch 2.10's gloo, to stderr
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))
    code = 0
    try:
        work(place, pipe.send)
    except CkptError as error:
        pipe.send(error)
        code = error.exit_code
    pipe.close()
    # Not sys.exit: DTensor's caches keep gloo's threads alive. A thread that still references a tensor while the
    # interpreter shuts down sometimes aborts the process after its work is done (torch 2.13, on a busy machine).
    os._exit(code)


def relay_reports(ranks: Ranks, report: Report) -> None:
    """Call `report` with each message of the ranks until all have exited. Raises the error of the first that fails."""
    open_pipes = dict(ranks)
    while open_pipes:
        for pipe in wait(list(open_pipes)):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:  # the rank has closed its pipe
                require_exit_code_0(open_pipes.pop(pipe))
                continue
            if isinstance(message, CkptError):
                raise message
            report(message)


def require_exit_code_0(process: BaseProcess) -> None:
    """Wait until a process exits. Raises CkptError unless its exit code is 0."""
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
