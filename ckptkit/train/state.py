"""State: what a checkpoint of a run holds, saved and loaded shard by shard. Complete or absent; chooses no step.

ckpt-N/
├── model.*      the weights, fp32, by Hugging Face's names
├── optim.*      AdamW's moments and groups, by the same names
├── run.*        the fields of `Progress`
└── config.json  a file beside the tensors
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, translate_os_errors
from ckptkit.staging import Stage
from ckptkit.train.llama import Llama
from ckptkit.train.ranks import on_rank_0

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: optimizer steps, sequences seen (its place in the data), tokens that counted; and its seed."""

    seed: int
    step: int = 0
    sequences: int = 0
    tokens: int = 0


def save(dst: Path, model: Llama, optimizer: Optimizer, progress: Progress) -> None:
    """Save a checkpoint at `dst`, every rank its own shards; a failure on any rank leaves no trace of it.

    Raises `Occupied` where `dst` exists and `IOFailure` where the disk refuses, on all ranks alike.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "run": asdict(progress)}
    stages: list[Stage] = []  # rank 0 has the only one
    room = on_rank_0(partial(open_stage, dst, stages))
    try:
        state_dict_saver.save(state, checkpoint_id=room)
        on_rank_0(partial(commit, stages, model))
    except CheckpointException as error:
        discard(stages)
        raise translate(error, dst, "save") from error
    except BaseException:
        discard(stages)
        raise


def open_stage(dst: Path, stages: list[Stage]) -> Path:
    """Make the hidden directory beside `dst` that will become it."""
    stages.append(Stage(dst))
    return stages[0].open().path


def commit(stages: list[Stage], model: Llama) -> None:
    """Complete the hidden directory and show it. `save` of torch returns when all ranks are done."""
    (stage,) = stages
    with translate_os_errors(stage.path):
        (stage.path / CONFIG).write_text(model.config.to_json())
    stage.commit()


def discard(stages: list[Stage]) -> None:
    """Remove the hidden directory, on the rank that made one."""
    for stage in stages:
        stage.discard()


def load(path: Path, model: Llama, optimizer: Optimizer) -> Progress:
    """Load the checkpoint at `path` into a model and its optimizer, at any world size, and say how far it was.

    Raises `Mismatch` where it lacks a tensor of the model, `Corrupt` where its files do not agree.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optim": optimizer_state, "run": asdict(Progress(seed=0))}
    try:
        state_dict_loader.load(state, checkpoint_id=path)
    except CheckpointException as error:
        raise translate(error, path, "load") from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return Progress(**state["run"])


def translate(error: CheckpointException, path: Path, verb: str) -> CkptError:
    """The CkptError that says what stopped the first of the ranks that failed."""
    rank, (reason, _) = min(error.failures.items())
    said = str(reason).strip() or type(reason).__name__
    message = f"rank {rank} could not {verb} it: {said.splitlines()[0]}"
    if isinstance(reason, OSError):
        return IOFailure(message, path=reason.filename or path)
    if verb == "save":
        return IOFailure(message, path=path, hint="is the disk full, or a limit on it reached?")
    if isinstance(reason, (RuntimeError, ValueError)):
        return Mismatch(message, path=path, hint="is this a checkpoint of the same model?")
    return Corrupt(message, path=path)
