"""The smoke test: train a tiny model on this machine, and check its checkpoints and conversions."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.checkpoints.checkpoint import step_checkpoints_in_run
from ckptkit.checkpoints.replaceable import check_replaceable
from ckptkit.checkpoints.run import RunFolder
from ckptkit.entry_points import PluginTable, import_object
from ckptkit.errors import Occupied, Usage, translate_os_errors
from ckptkit.io.path import to_local_path
from ckptkit.io.staging import require_free_destination
from ckptkit.settings import option_name, settings_of
from ckptkit.training.config import SETTINGS, Device, TrainConfig
from ckptkit.training.smoke.run_check import Check, run_check

MARK = ".smoke"  # marks a run of the smoke test, which a later smoke test may replace
_MOST_NAMED = 5  # checkpoints listed in an error


class KnownScript(NamedTuple):
    """A line of `SCRIPTS`, by the option that asks for it: what checks a script in the place of our own training.

    `options` is the `module:class` of a frozen dataclass with the options, and `where` the `module:function` that takes
    them with run, out, nproc and report, and returns the checks.
    """

    options: str
    where: str


SCRIPTS = PluginTable(
    "ckptkit.smoke_scripts",
    KnownScript,
    {
        "command": KnownScript(
            "ckptkit.plugins.resume_proof.options:ScriptOptions", "ckptkit.plugins.resume_proof.prove:prove_script"
        )
    },
)


def smoke(
    run: str | Path,
    out: str | Path,
    *,
    nproc: int = 2,
    tied: bool = True,
    device: Device = "auto",
    overwrite: bool = False,
    report: Callable[[Check], None] = lambda _: None,
    **script: Any,
) -> list[Check]:
    """Train a tiny model into `run`, resume it, export it to `out`, and check the results.

    With `command`, check a training script instead: `command`, `resume_with`, `steps`, `save_every`, `resume_nproc`,
    `loss`, `time_limit` and `keep` are the options of `ckptkit smoke`.

    Returns the checks, and calls `report` with each as soon as it is done. A failed check has `ok` False and does not
    raise. Raises `Occupied` if `run` or `out` exists; `overwrite` replaces the output of an earlier smoke test.
    """
    run, out = to_local_path(run), to_local_path(out)
    prove: Callable[..., list[Check]] | None = None
    if script:
        name = next((name for name in SCRIPTS if name in script), None)
        if name is None:
            raise Usage(f"{option_name(next(iter(script)))} needs {' or '.join(map(option_name, SCRIPTS))}")
        holder = import_object(SCRIPTS[name].options)
        unknown = [option for option in script if option not in settings_of(holder)]
        if unknown:
            raise Usage(f"{option_name(unknown[0])} does not go with {option_name(name)}")
        prove = partial(import_object(SCRIPTS[name].where), holder(**script))
    require_free_paths(run, out, overwrite=overwrite)
    if prove:
        create_smoke_run(run)
        return prove(run, out, nproc, report)
    from ckptkit.training.smoke.checks import CHECKS  # imports torch, which takes seconds
    from ckptkit.training.smoke.runs import SAVED, STEPS, SmokeRuns

    create_smoke_run(run)
    config = TrainConfig(
        run=run, untied=not tied, steps=STEPS, save_every=SAVED, device=device,
        sequence_length=128, lr=3e-3, warmup=2, deterministic=True,
    )  # fmt: skip
    checks = []
    with tempfile.TemporaryDirectory(prefix="ckptkit-") as scratch:
        runs = SmokeRuns(config, nproc, out, Path(scratch))
        for title, check in CHECKS.items():
            checks.append(run_check(title, partial(check, runs)))
            report(checks[-1])
    return checks


def require_free_paths(run: Path, out: Path, *, overwrite: bool) -> None:
    """Raise `Occupied` if `run` or `out` exists, unless `overwrite` is given and an earlier smoke test made them."""
    try:
        require_free_destination(out, overwrite)
    except Occupied as error:  # the user may not have named it: `out` is the default
        error.hint = "pass another --out, or --overwrite"
        raise
    check_replaceable(out)
    with translate_os_errors(run):
        if run.exists() and any(run.iterdir()):
            if not (run / MARK).exists():
                raise Occupied("not made by a smoke test, so not replaced", path=run, hint="pass another --run")
            if not overwrite:
                raise Occupied("the run exists", path=run, hint="pass another --run, or --overwrite")


def create_smoke_run(run: Path) -> None:
    """Create the run directory with the mark.

    Removes the checkpoints, settings and metrics of an earlier smoke test; other files stay. Raises `Occupied` if the
    run has later checkpoints, because the smoke test would resume from them.
    """
    with translate_os_errors(run):
        if (run / MARK).exists():
            from ckptkit.training.metrics import METRICS, TENSORBOARD  # these import torch, which takes seconds
            from ckptkit.training.smoke.runs import SAVED, STEPS

            named = step_checkpoints_in_run(run)
            later = [checkpoint.name for checkpoint in named if (checkpoint.step_in_name or 0) > STEPS]
            if later:
                message = f"the run has checkpoints that the smoke test did not make: {', '.join(later[:_MOST_NAMED])}"
                raise Occupied(message, path=run, hint="move them elsewhere, or pass another --run")
            folder = RunFolder(run)
            for path in (folder.checkpoint(SAVED), folder.checkpoint(STEPS), run / TENSORBOARD):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
            for name in (SETTINGS, METRICS, MARK):
                (run / name).unlink(missing_ok=True)
        run.mkdir(parents=True, exist_ok=True)
        (run / MARK).touch()
