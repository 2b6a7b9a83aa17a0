"""Training commands: `train` and `smoke`. Options and lines only; torch is imported when a command runs."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ckptkit.cli.output import Json, Quiet, note, print_json, print_table, say
from ckptkit.errors import NotACheckpoint
from ckptkit.runs import Checkpoint, Run
from ckptkit.train.config import TrainConfig
from ckptkit.train.model_config import ModelConfig

if TYPE_CHECKING:
    from ckptkit.train.loop import Step
    from ckptkit.train.smoke import Check

NPROC = typer.Option("--nproc", min=1, help="Processes to start here; by default one per GPU, or one.")
DEVICE = typer.Option("--device", help="auto, cpu or cuda.")


def train(
    run: Annotated[Path, typer.Argument(help="Directory for checkpoints and metrics.jsonl.")] = Path("run"),
    model: Annotated[
        str | None, typer.Option("--model", help="tiny (the default), 3m, 60m, 1b, or a config.json.")
    ] = None,
    untied: Annotated[
        bool, typer.Option("--untied", help="Give the output its own weights, not the embeddings'.")
    ] = False,
    data: Annotated[Path | None, typer.Option("--data", help="Text; by default the Python library's sources.")] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps of the whole run.")] = 100,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences per step over all ranks.")] = 8,
    sequence_length: Annotated[int, typer.Option("--sequence-length", help="Tokens (bytes) of a sequence.")] = 256,
    lr: Annotated[float, typer.Option("--lr", help="The highest learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps until the learning rate is at its highest.")] = 10,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="AdamW's, of all but the norms.")] = 0.1,
    clip: Annotated[float, typer.Option("--clip", help="Largest norm of the gradients.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of weights and data; the same at any number of ranks.")] = 0,
    save_every: Annotated[int, typer.Option("--save-every", help="Steps between checkpoints; 0: the last only.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's latest complete checkpoint.")] = False,
    device: Annotated[str, DEVICE] = "auto",
    nproc: Annotated[int | None, NPROC] = None,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
) -> None:
    """Train a Llama with FSDP2: a line per step on stdout, checkpoints in RUN/ckpt-N.

    Starts its own processes, or runs as a rank under `torchrun -m ckptkit train`.

    Example: ckptkit train run --model 3m --nproc 2 --steps 200 --save-every 50

    Exit codes: 0 done; 1 the loss is not finite, or a rank died; 2 usage; 3 the checkpoint to resume is damaged or of
    another model; 4 an I/O failure; 5 the run has checkpoints already.
    """
    latest = latest_checkpoint(run) if resume else None
    config = TrainConfig(
        run=run,
        model=choose_model(model, latest, tied=not untied),
        data=data,
        resume=latest.path if latest else None,
        steps=steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        save_every=save_every,
        device=device,
    )
    if latest and latest.step >= steps:
        note(f"nothing to do: {latest.path} is at step {latest.step} of {steps}")
        return
    from ckptkit.train.launch import launch, torchrun_place
    from ckptkit.train.loop import train as work

    launch(partial(work, config), nproc, partial(print_step, steps))
    if torchrun_place():
        leave()


def leave() -> NoReturn:
    """End a rank's process, its work done, as `ckptkit.train.launch` ends those of its own and for the same reason."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def latest_checkpoint(run: Path) -> Checkpoint:
    """The checkpoint to resume from; says which."""
    latest = Run(run).latest()
    if latest is None:
        raise NotACheckpoint("no complete checkpoint to resume from", path=run, hint="start without `--resume`")
    note(f"resuming from {latest.path}")
    return latest


def choose_model(model: str | None, resume: Checkpoint | None, *, tied: bool) -> ModelConfig:
    """The model that was asked for by size or config.json; else the checkpoint's; else the size `tiny`."""
    if model is not None and model.endswith(".json"):
        return ModelConfig.read(Path(model))
    if model is None and resume is not None:
        return ModelConfig.read(resume.path / "config.json")
    return ModelConfig.sized(model or "tiny", tied=tied)


def print_step(steps: int, step: Step) -> None:
    """One line for a step, and a note of its checkpoint."""
    say(
        f"step {step.step}/{steps}  loss {step.loss:.4f}  gradient norm {step.grad_norm:.3f}  lr {step.lr:.2e}  "
        f"{step.tokens_per_second:,.0f} tokens/s"
    )
    if step.checkpoint:
        note(f"saved {step.checkpoint}")


def smoke(
    run: Annotated[Path, typer.Option("--run", help="Where the run is made, and left.")] = Path("run"),
    out: Annotated[Path, typer.Option("--out", help="Where its export is made, and left.")] = Path("out"),
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes to train on.")] = 2,
    untied: Annotated[
        bool, typer.Option("--untied", help="Give the output its own weights, not the embeddings'.")
    ] = False,
    device: Annotated[str, DEVICE] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier smoke left.")] = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Train a tiny model for a few steps, resume it, export it, and check everything that came of it.

    Example: ckptkit smoke --run run --out out

    Exit codes: 0 all checks passed; 1 one failed; 2 usage; 4 an I/O failure; 5 RUN or OUT exists.
    """
    from ckptkit.train.smoke import smoke as make_checks

    checks = make_checks(run, out, nproc=nproc, tied=not untied, device=device, overwrite=overwrite, report=note_check)
    ok = all(check.ok is not False for check in checks)
    if json:
        print_json({"ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        rows = [(check.name, MARKS[check.ok], f"{check.seconds:.1f} s", check.detail) for check in checks]
        print_table(rows, ("check", "", "took", "detail"))
        note(f"the run is in {run}, its export in {out}")
    raise typer.Exit(0 if ok else 1)


MARKS = {True: "ok", False: "FAILED", None: "skipped"}


def note_check(check: Check) -> None:
    """Say how a check went as soon as it is made."""
    note(f"{check.name}: {MARKS[check.ok]}")
