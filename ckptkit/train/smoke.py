"""Smoke: a short run on this machine, and whether everything that became of it is right. Reads results off the disk."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from ckptkit.errors import CkptError, Occupied, translate_os_errors
from ckptkit.ops.consolidate import consolidate
from ckptkit.runs import Run
from ckptkit.staging import check_destination
from ckptkit.train.config import TrainConfig
from ckptkit.train.data import Corpus, read_text
from ckptkit.train.launch import launch
from ckptkit.train.llama import Llama
from ckptkit.train.loop import METRICS, train
from ckptkit.train.model_config import ModelConfig
from ckptkit.train.state import CONFIG

STEPS, SAVED = 8, 4
MARK = ".smoke"  # in a run that smoke made, and so may replace


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found. `ok` is None for a check that was skipped; `detail` says why, or what was compared."""

    name: str
    ok: bool | None
    detail: str
    seconds: float


class Failed(Exception):
    """What a check looked at is not as it should be."""


class Skipped(Exception):
    """A check cannot be made on this machine."""


@dataclass(frozen=True)
class Trial:
    """The run under test, and where its export goes. What is read of them is read once, when first asked for."""

    config: TrainConfig
    nproc: int
    out: Path

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint of the run."""
        latest = Run(self.config.run).latest()
        if latest is None:
            raise Failed(f"no checkpoint in {self.config.run}")
        return latest.path

    @cached_property
    def trained(self) -> Llama:
        """The built-in model with the weights of the last checkpoint, read by torch and no part of ckptkit."""
        model = Llama(ModelConfig.read(self.checkpoint / CONFIG))
        with warnings.catch_warnings(action="ignore"):  # torch warns that it loads in one process, as it is told to
            state_dict_loader.load({"model": model.state_dict()}, checkpoint_id=self.checkpoint, no_dist=True)
        return model

    @cached_property
    def exported(self) -> dict[str, Tensor]:
        """The tensors of the export by name."""
        files = sorted(self.out.glob("*.safetensors"))
        if not files:
            raise Failed(f"no safetensors in {self.out}")
        return {name: tensor for path in files for name, tensor in load_file(path).items()}

    @cached_property
    def prompt(self) -> Tensor:
        """Tokens to compare logits on: int64 [4, sequence_length]."""
        return Corpus(read_text(self.config.data), self.config.sequence_length, seed=1).batch(range(4)).inputs


def smoke(
    run: Path,
    out: Path,
    *,
    nproc: int = 2,
    tied: bool = True,
    device: str = "auto",
    overwrite: bool = False,
    report: Callable[[Check], None] = lambda _: None,
) -> list[Check]:
    """Train a tiny model into `run`, resume it, export it to `out`, and check each; `report` hears of every check.

    A check that fails is a row with `ok` False, never an exception; `Occupied` is raised where `run` or `out` exist
    (`overwrite` replaces what an earlier smoke left).
    """
    clear(run, out, overwrite=overwrite)
    config = TrainConfig(
        run=run, model=ModelConfig.sized("tiny", tied=tied), steps=STEPS, save_every=SAVED, device=device,
        sequence_length=128, lr=3e-3, warmup=2,
    )  # fmt: skip
    trial = Trial(config, nproc, out)
    checks = []
    for name, look in CHECKS.items():
        checks.append(make(name, partial(look, trial)))
        report(checks[-1])
    return checks


def make(name: str, look: Callable[[], str]) -> Check:
    """Make one check: `look` returns what it compared, or raises."""
    started = time.perf_counter()
    ok: bool | None = True
    try:
        detail = look()
    except Skipped as reason:
        ok, detail = None, f"skipped: {reason}"
    except Failed as reason:
        ok, detail = False, str(reason)
    except CkptError as error:
        ok, detail = False, f"{error.path}: {error}" if error.path else str(error)
    except Exception as error:  # noqa: BLE001 - whatever it was, the check failed and the table must say so
        ok, detail = False, f"{type(error).__name__}: {error}"
    return Check(name, ok, detail, time.perf_counter() - started)


def clear(run: Path, out: Path, *, overwrite: bool) -> None:
    """Make an empty run directory with our mark, in place of an earlier smoke's if asked; refuse any other."""
    check_destination(out, overwrite)
    with translate_os_errors(run):
        if run.exists() and any(run.iterdir()):
            if not (run / MARK).exists():
                raise Occupied("not made by smoke, so not replaced", path=run, hint="use another `--run`")
            if not overwrite:
                raise Occupied("the run exists", path=run, hint="use another `--run`, or `--overwrite`")
            shutil.rmtree(run)
        run.mkdir(parents=True, exist_ok=True)
        (run / MARK).touch()


def trains(trial: Trial) -> str:
    """The run ends with both of its checkpoints complete."""
    launch(partial(train, trial.config), trial.nproc, lambda _: None)
    steps = [checkpoint.step for checkpoint in Run(trial.config.run).checkpoints()]
    if steps != [SAVED, STEPS]:
        raise Failed(f"checkpoints of steps {steps}, not {[SAVED, STEPS]}")
    return f"{STEPS} steps, checkpoints at {SAVED} and {STEPS}"


def is_finite(trial: Trial) -> str:
    """Every loss is a number."""
    found = all_losses(trial)
    if not all(map(math.isfinite, found)):
        raise Failed(f"losses {found}")
    return f"{STEPS} losses"


def falls(trial: Trial) -> str:
    """The second half of the run has the lower losses."""
    found = all_losses(trial)
    first, second = sum(found[:SAVED]) / SAVED, sum(found[SAVED:]) / (STEPS - SAVED)
    if not second < first:
        raise Failed(f"mean {first:.4f}, then {second:.4f}")
    return f"mean {first:.4f}, then {second:.4f}"


def resumes(trial: Trial) -> str:
    """A run that goes on from the first checkpoint takes the same steps, to the last bit of the loss."""
    with tempfile.TemporaryDirectory(prefix="ckptkit-") as room:
        again = replace(trial.config, run=Path(room) / "run", resume=Run(trial.config.run).checkpoint(SAVED))
        launch(partial(train, again), trial.nproc, lambda _: None)
        found = losses(again.run)
    expected = {step: loss for step, loss in losses(trial.config.run).items() if step > SAVED}
    if found != expected:
        raise Failed(f"losses {found}, not {expected}")
    return f"{len(found)} losses equal, bit for bit"


def consolidates(trial: Trial) -> str:
    """The last checkpoint becomes safetensors."""
    done = consolidate(trial.checkpoint, trial.out, overwrite=True)
    return f"{done.tensors} tensors, {done.checked_bytes:,} bytes compared with their checksums"


def has_equal_tensors(trial: Trial) -> str:
    """The export has the tensors that `dcp.load` gives; of tied ones, the first."""
    expected = {name: tensor for name, tensor in trial.trained.state_dict().items() if name not in tied_names(trial)}
    if trial.exported.keys() != expected.keys():
        raise Failed(f"names that only one side has: {sorted(trial.exported.keys() ^ expected.keys())}")
    wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, trial.exported[name])]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(expected)} tensors differ, first `{wrong[0]}`")
    return f"{len(expected)} tensors equal to dcp.load's"


def has_equal_logits(trial: Trial) -> str:
    """The built-in model gives the same logits from the export as from the checkpoint."""
    model = Llama(ModelConfig.read(trial.out / CONFIG))
    missing, unexpected = model.load_state_dict(trial.exported, strict=False)
    if unexpected or set(missing) != tied_names(trial):
        raise Failed(f"missing {missing}, unexpected {unexpected}")
    return compare_logits(trial, model)


def opens_in_transformers(trial: Trial) -> str:
    """`AutoModelForCausalLM` opens the export and gives the same logits."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise Skipped("transformers is not installed") from None
    if not trial.out.is_dir():
        raise Failed(f"no export at {trial.out}")
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(trial.out, local_files_only=True)
    return compare_logits(trial, lambda tokens: model(tokens).logits)


@torch.no_grad()
def compare_logits(trial: Trial, model: Callable[[Tensor], Tensor]) -> str:
    """Compare a model's logits with those of the trained one."""
    found, expected = model(trial.prompt), trial.trained(trial.prompt)
    if not torch.equal(found, expected):
        raise Failed(f"logits differ by up to {float((found - expected).abs().max()):.3g}")
    return f"{expected.numel():,} logits equal, bit for bit"


def tied_names(trial: Trial) -> set[str]:
    """The names that an export leaves out since another name holds the same weight."""
    return {"lm_head.weight"} if trial.config.model.tie_word_embeddings else set()


def all_losses(trial: Trial) -> list[float]:
    """The losses of the whole run."""
    found = list(losses(trial.config.run).values())
    if len(found) != STEPS:
        raise Failed(f"{len(found)} of {STEPS} losses")
    return found


def losses(run: Path) -> dict[int, float]:
    """The loss of each step in the order of a run's metrics.jsonl."""
    with translate_os_errors(run):
        lines = (run / METRICS).read_text().splitlines()
    return {metrics["step"]: metrics["loss"] for metrics in map(json.loads, lines)}


CHECKS: dict[str, Callable[[Trial], str]] = {
    "train": trains,
    "losses are finite": is_finite,
    "loss falls": falls,
    "resume": resumes,
    "consolidate": consolidates,
    "equal tensors": has_equal_tensors,
    "equal logits": has_equal_logits,
    "equal logits in transformers": opens_in_transformers,
}
