"""Measure what saving costs ckptkit's loop: sharded and full checkpoints, while it waits and in the background."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from ckptkit.storage.ranks import Ranks
from ckptkit.training.config import TrainConfig, read_settings
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.saving.run import Run
from ckptkit.training.start import build_trainer_and_run, make_run
from ckptkit.training.trainer import Trainer
from scripts.benchmarks.training.tables import WARM_UP
from scripts.benchmarks.training.watch import REPORT


@dataclass(frozen=True, slots=True)
class Saved:
    """A save: how long the loop stood still, when the checkpoint was there, and what it cost beside the steps: seconds.

    `cost` is what the steps that were taken until the end took longer than without it, and the standing still.
    """

    stopped: float
    visible: float
    cost: float
    nbytes: int


def saves(home: Path, config: TrainConfig, runs: int, place: RankPlace, _: Report) -> None:
    """Measure steps without a save, then `runs` saves of each kind; rank 0 leaves the report."""
    with process_group(place, config.device) as mesh:
        trainer, _run = build_trainer_and_run(config, mesh)
        step = median([take_step(trainer) for _ in range(WARM_UP + config.steps)][WARM_UP:])
        kinds = {}
        for state_dict in ("sharded", "full"):
            for background in (False, True):
                own = replace(config, run=config.run / state_dict, state_dict=state_dict, background=background)
                with make_run(own, {}) as run:
                    # the first takes memory that the others find again
                    every = [save(trainer, run, step) for _ in range(1 + runs)]
                kinds[f"{state_dict}, {'background' if background else 'waiting'}"] = [asdict(one) for one in every[1:]]
        if place.rank == 0:
            (home / REPORT).write_text(json.dumps({"step": step, "kinds": kinds}))


def take_step(trainer: Trainer) -> float:
    """Take a step and return its seconds."""
    began = time.perf_counter()
    trainer.step()
    return time.perf_counter() - began


def save(trainer: Trainer, run: Run, step: float) -> Saved:
    """Save, and train on until the checkpoint is there; `step` is what a step takes else. It is removed in the end."""
    trainer.step()  # every checkpoint has a step of its own
    wall, began = time.time(), time.perf_counter()
    path = trainer.save(run)
    stopped = time.perf_counter() - began
    steps = 0
    while not Ranks().run_on_first_rank(path.exists):
        trainer.step()
        steps += 1
    run.wait()
    cost = time.perf_counter() - began - steps * step
    visible = (
        Ranks().run_on_first_rank(path.stat).st_ctime - wall
    )  # a file system notes when it gave a directory its name
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if trainer.rank == 0 else 0
    Ranks().run_on_first_rank(partial(shutil.rmtree, path))
    return Saved(stopped, visible, cost, nbytes)


def main() -> None:
    """Measure on the settings of a file that lies in its room."""
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--runs", type=int)
    options = parser.parse_args()
    home = options.settings.parent
    config = TrainConfig(run=home / "run", **read_settings(options.settings))
    launch(partial(saves, home, config, options.runs), options.ranks, lambda _: None)


if __name__ == "__main__":
    main()
