"""Ranks: saves of two real ranks that are killed, one or both, at any moment; and stops of a real command line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from ckptkit.checkpoints.run import RunFolder
from ckptkit.training.saving.run import Run
from tests.faults.cases import Seen
from tests.faults.verdicts import Verdict

_HOME = Path(__file__).parents[2]
_PATIENCE = 60.0


class Counting(torch.nn.Module):
    """A sharded parameter and a plain one, of which every element is the step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = torch.full((64, 64), float(step))
        self.sharded = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        self.plain = torch.nn.Parameter(torch.full((8,), float(step)))


def save_on(root: str, rank: str, meeting: str) -> None:
    """Be one of two ranks that save step after step until they are killed; each step replaces the one before."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
    run = Run(root, keep_last=1)
    latest = run.latest()
    first = 1 if latest is None else (latest.step or 0) + 1
    for step in range(first, first + 10_000):
        run.save(step, Counting(step), rest={"step": step})
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()


def check(root: str, rank: str, meeting: str) -> None:
    """Load the latest as one of two ranks; every element of it is of the one step that it says."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
    model, rest = Counting(0), {"step": 0}
    step = Run(root).load(model, rest=rest)
    for tensor in model.parameters():
        local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert (local == step).all(), f"step {step} has {sorted(set(local.flatten().tolist()))}"
    assert rest == {"step": step}
    os._exit(0)  # gloo's threads may abort an interpreter's way out


def start(work: str, root: Path, meeting: Path) -> list[subprocess.Popen[str]]:
    """Start both ranks on a piece of work."""
    meeting.unlink(missing_ok=True)
    code = f"import sys; from tests.faults.ranks import {work}; {work}(*sys.argv[1:])"
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(root), str(rank), str(meeting)],
            cwd=_HOME,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]


def try_killing(root: Path, times: int) -> Iterator[Seen]:
    """Kill one rank or both of a training that saves all the time, and load what is there."""
    chance = random.Random(0)
    for number in range(times):
        ranks = start("save_on", root / "run", root / "meeting")
        assert ranks[0].stdout is not None
        ranks[0].stdout.readline()  # the first save is done
        time.sleep(chance.uniform(0, 0.3))
        dead = chance.choice([[0], [1], [0, 1]])
        for rank in dead:
            ranks[rank].kill()
        time.sleep(chance.uniform(0, 0.2))
        for process in ranks:
            process.kill()
            process.communicate()
        latest = RunFolder(root / "run").latest()
        readers = start("check", root / "run", root / "meeting")
        told = [process.communicate(timeout=_PATIENCE)[1] for process in readers]
        is_right = all(process.returncode == 0 for process in readers)
        mixed = any("AssertionError" in said for said in told)
        verdict = Verdict.RIGHT if is_right else Verdict.MIXED if mixed else Verdict.LOST
        yield Seen("ckptkit train", verdict, f"killed ranks {dead}, time {number}: {latest} {told[0][-300:]}")


def try_pipes(root: Path, source: Path) -> Iterator[Seen]:
    """Nobody reads what is said: the standard output is closed before the command writes to it."""
    for command in (["inspect", str(source)], ["consolidate", str(source), str(root / "out")]):
        process = subprocess.Popen(
            [sys.executable, "-m", "ckptkit", *command],
            cwd=_HOME,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        code = process.wait()
        verdict = Verdict.TRACEBACK if "Traceback" in said or "Exception" in said or code < 0 else Verdict.CLEAN
        yield Seen(f"ckptkit {command[0]}", verdict, f"closed standard output: code {code}: {said[-300:]}")


def try_stops(root: Path, source: Path, times: int) -> Iterator[Seen]:
    """SIGINT and SIGTERM at random moments of a real command."""
    chance = random.Random(0)
    for number in range(times):
        sent = chance.choice([signal.SIGINT, signal.SIGTERM])
        process = subprocess.Popen(
            [sys.executable, "-m", "ckptkit", "consolidate", str(source), str(root / f"out{number}"), "--quiet"],
            cwd=_HOME,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        while not list(root.glob(f".out{number}.*")) and process.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        process.send_signal(sent)
        said = process.communicate()[1]
        there = (root / f"out{number}").exists()
        expected = {0, 128 + sent, -sent} if there else {128 + sent}  # when all is done, Python's own handlers are back
        is_right = process.returncode in expected and "Traceback" not in said
        verdict = Verdict.RIGHT if is_right else Verdict.TRACEBACK
        yield Seen("ckptkit consolidate", verdict, f"{sent.name}: code {process.returncode}, {said[-300:]}")
