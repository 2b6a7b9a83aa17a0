"""Measure training: ckptkit's loop beside a plain one and Hugging Face's Trainer, its options, and its saves.

Every loop runs in processes of its own, from the same weights, on the same tokens in the same order; that its losses
are those of the plain loop is part of the result. Imports no torch: the cores are for the loops.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.settings import option_name
from ckptkit.training.config import TrainConfig
from ckptkit.training.data.documents import stdlib_modules
from ckptkit.training.models.config import ModelConfig
from scripts.benchmarks.training.tables import (
    WARM_UP,
    Loop,
    Measured,
    cpu_table,
    describe,
    gpu_table,
    saves_table,
    speed,
)
from scripts.benchmarks.workplace import workplace

PLAIN = "OMP_NUM_THREADS={ranks} python -m scripts.benchmarks.training.loops plain {settings}"
OURS = "OMP_NUM_THREADS=1 python -m scripts.benchmarks.training.loops ours {settings} --ranks {ranks}"
TRAINER = "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node {ranks} -m scripts.benchmarks.training.hf_trainer"
SAVES = "OMP_NUM_THREADS=1 python -m scripts.benchmarks.training.saves {settings} --ranks {ranks} --runs {runs}"

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"model": "3m", "sequence_length": 256, "batch_size": 16, "steps": 12, "ranks": 2, "runs": 3},
    "cuda": {"model": "1b", "sequence_length": 4096, "batch_size": 4, "steps": 20, "ranks": 1, "runs": 1},
}
VOCABULARY = {"cpu": 256, "cuda": 128256}  # bytes alone; or as large as Llama 3's, of which bytes use the first 256
OPTIONS = {
    "model": "size of the model",
    "sequence_length": "tokens of a sequence",
    "batch_size": "sequences of a step, over all ranks",
    "steps": "steps of a run",
    "ranks": "processes of a loop that shards",
    "runs": "runs of each loop",
}


def ours(**changes: Any) -> Loop:
    """Return the loop of ckptkit with some of its options."""
    options = [option_name(name) + ("" if value is True else f" {value}") for name, value in changes.items()]
    return Loop(" ".join(["ckptkit train", *options]), OURS, changes)


LOOPS = {
    "cpu": [
        Loop("plain loop, no FSDP", PLAIN, alone=True),
        Loop("Hugging Face Trainer, FSDP2", TRAINER + " fsdp2 {settings}"),
        ours(),
        Loop("Hugging Face Trainer, DDP", TRAINER + " ddp {settings}"),
        ours(strategy="ddp"),
        ours(fsdp="1"),
        ours(recompute_every=1),
    ],
    "cuda": [
        Loop("plain loop, no FSDP, compiled", PLAIN, {"compile": True}, alone=True),
        ours(),
        ours(compile=True),
        ours(compile=True, recompute_every=1),
        ours(compile=True, strategy="shard_grad_op"),
        ours(compile=True, strategy="ddp"),
        ours(compile=True, fsdp="1"),
        ours(compile=True, prefetch=2),
        ours(compile=True, reduce_dtype="bf16"),
        ours(compile=True, deterministic=True),
    ],
}


class Failed(SystemExit):
    """The end of a program that failed, with what it said; it ends this one too, unless that makes a row of it."""


def train(only: Sequence[str] | None, **given: Any) -> None:
    """Measure tokens per second, memory and the cost of saves of ckptkit's training loop, beside other loops."""
    gpus = int(run("python -c 'import torch; print(torch.cuda.device_count())'"))
    device = "cuda" if gpus else "cpu"
    values = DEFAULTS[device] | {name: value for name, value in given.items() if value is not None}
    if values["steps"] <= WARM_UP or values["batch_size"] % values["ranks"]:
        raise SystemExit(f"there must be more than {WARM_UP} steps, and as many sequences for each rank")
    with workplace() as home:
        config = make_room(home, device, values)
        run(f"python -m scripts.benchmarks.training.loops prepare {write(home, config)}")
        facts = json.loads((home / "facts.json").read_text()) | values
        chosen = [loop for loop in LOOPS[device] if wanted(loop.name, only)]
        results = take_turns(home, config, chosen, runs=values["runs"], ranks=values["ranks"])
        print(describe(facts, config))
        if results:
            print((cpu_table if device == "cpu" else gpu_table)(results, config, facts))
        if wanted("saves", only):
            print(saves_table(run_once(home, config, Loop("saves", SAVES), ranks=values["ranks"], runs=values["runs"])))


def wanted(name: str, only: Sequence[str] | None) -> bool:
    """Return True if a row is asked for."""
    return only is None or any(word in name for word in only)


def make_room(home: Path, device: str, values: dict[str, Any]) -> TrainConfig:
    """Write the model's config.json and a text of whole sequences; return the settings that all loops share.

    The text is one document, so that no sequence has parts of two: that is packing, which each loop does in its way.
    """
    (home / "model").mkdir()
    model = home / "model" / "config.json"
    model.write_text(ModelConfig.of_size(values["model"], vocab_size=VOCABULARY[device]).to_json())
    text = b"\n".join(path.read_bytes() for path in stdlib_modules()).replace(b"\0", b"")
    length = values["sequence_length"]
    (home / "text.txt").write_bytes(text[: len(text) // length * length])
    return TrainConfig(
        run=home / "run",
        model=str(model),
        weights=home / "model",
        data=home / "text.txt",
        sequence_length=length,
        batch_size=values["batch_size"],
        steps=values["steps"] + 1,  # the last, which ends in a checkpoint, is none of those that are measured
        warmup=0,  # in which the Trainer's first step has a learning rate of 0, and ckptkit's has not
        device=device,  # type: ignore[arg-type]
    )


def write(home: Path, config: TrainConfig) -> str:
    """Write the settings of a run to a file, and return its name for a shell."""
    path = home / "settings.toml"
    path.write_text(config.to_toml())
    return shlex.quote(str(path))


def run(command: str) -> str:
    """Run a shell command and return what it said on stdout. Raises `Failed`."""
    done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{command}\n{done.stderr}", file=sys.stderr)
        raise Failed(first_error(done.stderr.splitlines()))
    return done.stdout


def first_error(lines: Sequence[str]) -> str:
    """Return the line that the first traceback ends in, or the last line where there is none."""
    inside = False
    for line in lines:
        if inside and line and not line.startswith(" "):
            return line
        inside = inside or line.startswith("Traceback")
    return lines[-1] if lines else "it said nothing"


def take_turns(home: Path, config: TrainConfig, loops: Sequence[Loop], *, runs: int, ranks: int) -> list[Measured]:
    """Run every loop `runs` times, one after the other; each round begins with another one."""
    results = [Measured(loop) for loop in loops]
    for turn in range(runs):
        first = turn * len(results) // runs
        for result in results[first:] + results[:first]:
            if result.failure is None:
                add_run(home, config, result, ranks)
    return results


def add_run(home: Path, config: TrainConfig, result: Measured, ranks: int) -> None:
    """Run a loop once more; one that fails is a result too."""
    try:
        result.reports.append(run_once(home, config, result.loop, ranks=ranks))
    except Failed as failure:
        result.failure = str(failure)
    said = result.failure or f"{speed(result.reports[-1], config):10,.0f} tokens/s"
    print(f"{said}  {result.loop.name}", file=sys.stderr)


def run_once(home: Path, config: TrainConfig, loop: Loop, *, ranks: int, runs: int = 1) -> dict[str, Any]:
    """Run a loop once, remove its directory and return its report."""
    settings = write(home, replace(config, **loop.changes))
    report = home / "report.json"
    report.unlink(missing_ok=True)
    try:
        run(loop.command.format(settings=settings, ranks=ranks, runs=runs))
    finally:
        shutil.rmtree(config.run, ignore_errors=True)
    found: dict[str, Any] = json.loads(report.read_text())
    return found
