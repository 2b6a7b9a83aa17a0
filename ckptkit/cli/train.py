"""Run `ckptkit train` and `ckptkit smoke`: options and output. torch is imported only when a command runs."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.options import given_settings, with_options
from ckptkit.cli.output import Json, print_json, print_note, print_text_line, reserve_stdout
from ckptkit.entry_points import import_object
from ckptkit.io.destination import to_destination
from ckptkit.io.path import to_local_path, to_path
from ckptkit.settings import settings_of
from ckptkit.training.config import (
    SETTINGS,
    Device,
    TrainConfig,
    settings_from_file,
    settings_to_resume_with,
    train_settings,
)
from ckptkit.training.data.documents import find_data_files
from ckptkit.training.models.config import require_known_model
from ckptkit.training.resume import find_resume_candidates
from ckptkit.training.smoke.smoke import SCRIPTS
from ckptkit.training.smoke.smoke import smoke as make_checks
from ckptkit.words import format_bytes

if TYPE_CHECKING:
    from ckptkit.training.loop import Note
    from ckptkit.training.metrics import StepMetrics
    from ckptkit.training.smoke.run_check import Check

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@with_options(train_settings(), overrides_file=True)
def train(
    run: Annotated[
        Path,
        typer.Argument(
            parser=to_destination,
            metavar="RUN",
            help="Directory for checkpoints, metrics.jsonl and train.toml, or s3://bucket/prefix.",
        ),
    ] = Path("run"),
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|CKPT", help="Continue from this checkpoint; auto: from the latest, if there is one."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            parser=to_path, metavar="PATH", help="Settings in TOML, such as a run's train.toml; options override them."
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes to start here; by default one per GPU, or one.")
    ] = None,
    **options: Any,
) -> None:
    """Train a causal language model with FSDP.

    Prints a line per step, and saves checkpoints to RUN/ckpt-N.

    train starts its own processes, or runs as one rank under `torchrun -m ckptkit train`. A resumed run uses the
    settings in its train.toml. On SIGTERM or Ctrl-C, train saves a checkpoint and ends; a second Ctrl-C ends it
    without a save. RUN may be s3://bucket/prefix: each rank then sends its shards directly to the store.

    Example: ckptkit train run --model 3m --nproc 2 --steps 200 --save-every 50 --keep-last 2 --resume auto

    Exit codes: 0 done; 1 the loss is not finite, or a rank died; 2 usage; 3 the checkpoint to start from is damaged or
    of another model; 4 an I/O failure; 5 the run has checkpoints already, or another job saves to it; 130 ended by
    Ctrl-C; 143 ended by SIGTERM, and saved.
    """
    values = settings_from_file(config, resume) if config else settings_to_resume_with(run, resume)
    is_first = os.environ.get("RANK", "0") == "0"  # one note for all ranks under torchrun
    if is_first and values and not config:
        print_note(f"settings from {run / SETTINGS}")
    values = values | given_settings(options)
    chosen = TrainConfig(run=run, resume=resume, **values)
    if is_first:  # find errors about the run, the model and the data before torch is imported
        find_resume_candidates(chosen)
        require_known_model(chosen.model)
        find_data_files(chosen.data)
        if "save_every" not in values and chosen.steps > chosen.save_every:
            print_note(f"saving every {chosen.save_every} steps and at the end (--save-every)")
    from ckptkit.training.launch import find_torchrun_rank
    from ckptkit.training.loop import train as work

    if find_torchrun_rank():
        reserve_stdout()
    printer = TrainPrinter(chosen.steps)
    try:
        work(run, resume=resume, config=config, nproc=nproc, report=printer.handle_message, **given_settings(options))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if find_torchrun_rank():  # without Python's shutdown, for the reason given in `launch.run_rank`
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(printer.exit_code)
    raise typer.Exit(printer.exit_code)


@dataclass(slots=True)
class TrainPrinter:
    """Prints the messages of rank 0, and keeps the exit code that follows from them."""

    last_step: int
    exit_code: int = 0

    def handle_message(self, message: StepMetrics | Note) -> None:
        """Print a line about a step, or the text of a note."""
        from ckptkit.training.loop import Note

        if isinstance(message, Note):
            print_note(message.text)
            self.exit_code = TERMINATED if message.ended_early else self.exit_code
            return
        facts = [
            f"step {message.step}/{self.last_step}",
            f"loss {message.loss:.4f}",
            f"gradient norm {message.grad_norm:.3f}",
            f"lr {message.lr:.2e}",
            f"{message.tokens_per_second:,.0f} tokens/s",
        ]
        if message.mfu is not None:
            facts.append(f"MFU {message.mfu:.1%}")
        if message.memory_allocated is not None and message.memory_reserved is not None:
            used, reserved = format_bytes(message.memory_allocated), format_bytes(message.memory_reserved)
            facts.append(f"{used} of {reserved} used")
        print_text_line("  ".join(facts))
        if message.checkpoint:
            print_note(f"saved {message.checkpoint}")


# the options of every plugin that `smoke` can check a script with
_SCRIPT_OPTIONS = {
    name: setting for known in SCRIPTS.values() for name, setting in settings_of(import_object(known.options)).items()
}


@with_options(_SCRIPT_OPTIONS, overrides_file=True)
def smoke(
    run: Annotated[Path, typer.Option(parser=to_local_path, metavar="DIR", help="Where to write the run.")] = Path(
        "run"
    ),
    out: Annotated[Path, typer.Option(parser=to_local_path, metavar="DIR", help="Where to write the export.")] = Path(
        "out"
    ),
    nproc: Annotated[int, typer.Option(min=1, help="Number of training processes.")] = 2,
    untied: Annotated[bool, typer.Option(help="Do not share embedding and output weights.")] = False,
    device: Annotated[Device, typer.Option(help="Where to train.")] = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace output of an earlier smoke test.")] = False,
    json: Json = False,
    **script: Any,
) -> None:
    """Check a short training run, or check that your script resumes.

    Trains a tiny model for a few steps, then resumes, reshards and exports, and checks everything that it saves. RUN
    and OUT stay.

    Example: ckptkit smoke --run run --out out

    With --command, runs your script instead: it must stop at {steps} and save every {save_every} steps to {run}. The
    runs are in RUN; smoke deletes them at the end, unless you pass --keep.

    Example: ckptkit smoke --command 'python train.py --out {run} --steps {steps} --save-every {save_every}'

    Exit codes: 0 all checks passed; 1 a check failed; 2 usage; 4 an I/O failure; 5 RUN or OUT exists.
    """
    options = {"nproc": nproc, "tied": not untied, "device": device, "overwrite": overwrite, **given_settings(script)}
    checks = make_checks(run, out, report=print_check_note if json else print_check_row, **options)
    ok = all(check.ok is not False for check in checks)
    if json:
        print_json({"ok": ok, "checks": checks})
    else:
        failed, skipped = ([check.name for check in checks if check.ok is result] for result in (False, None))
        verdict = f"failed: {', '.join(failed)}" if failed else "all checks passed"
        print_text_line(verdict + (f"; skipped: {', '.join(skipped)}" if skipped else ""))
        print_note(f"the results are in {run}" + (f", the export is in {out}" if out.exists() else ""))
    raise typer.Exit(0 if ok else 1)


_LONGEST = len("equal logits in transformers")  # length of the longest name of a check
MARKS = {True: "ok", False: "FAILED", None: "skipped"}


def print_check_row(check: Check) -> None:
    print_text_line(
        f"{check.name:<{_LONGEST}}  {MARKS[check.ok]:<7}  {f'{check.seconds:.1f} s':>6}  {check.detail}".rstrip()
    )


def print_check_note(check: Check) -> None:
    print_note(f"{check.name}: {MARKS[check.ok]}")
