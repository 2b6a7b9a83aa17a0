"""Run a command that fixes a checkpoint; dry-run it first, so that no command is suggested that would be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.account import Account
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.conversion.consolidate import consolidate
from ckptkit.conversion.convert import convert, draft_salvage
from ckptkit.conversion.reshard import reshard
from ckptkit.conversion.salvaging.survey import look_at_sizes, look_at_structure
from ckptkit.diagnosis.choose_fixes import Trial
from ckptkit.diagnosis.exports import repaired
from ckptkit.diagnosis.fix import Fix
from ckptkit.errors import Corrupt, IOFailure, Mismatch, NotACheckpoint, Occupied, Unsafe, Unsupported, Usage
from ckptkit.io.path import is_remote
from ckptkit.state.options import ConvertOptions
from ckptkit.state.report import Converted

_MAKERS: dict[str, Callable[..., Converted]] = {"consolidate": consolidate, "convert": convert, "reshard": reshard}


def dry_run_fix(fix: Fix, checkpoint: Checkpoint) -> Trial:
    """Return the error that a command for this checkpoint would end with, as far as metadata and sizes tell.

    A remote checkpoint is not tried, unless it is damaged.
    """
    options = dict(fix.options)
    try:
        if "salvage" in options:
            return judge_salvage(dry_run_salvage(fix, checkpoint))
        if is_run_here(fix) and not is_remote(checkpoint.path):
            output = options.get("fix", fix.paths[-1])
            run_fix(fix, checkpoint, str(output), dry_run=True, overwrite=True)
    except (Corrupt, Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage) as error:
        return Trial(error)
    except (IOFailure, Occupied):  # another disk or another destination helps
        pass
    return Trial()


def is_run_here(fix: Fix) -> bool:
    """Return whether a command writes another checkpoint."""
    return fix.verb in _MAKERS or "fix" in dict(fix.options)


def run_fix(fix: Fix, checkpoint: Checkpoint, output: str | Path, **more: Any) -> Converted:
    """Run a command for this checkpoint, with another output and `more` options."""
    if fix.verb not in _MAKERS:
        return consolidate(repaired(checkpoint), output, **more)
    return _MAKERS[fix.verb](checkpoint, output, **options_of(fix), **more)


def options_of(fix: Fix) -> dict[str, Any]:
    """Return the options of a command, without the directories that the checkpoint has already."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in fix.options}
    return {name: value for name, value in options.items() if name != "also"}


def dry_run_salvage(fix: Fix, checkpoint: Checkpoint) -> Account:
    """Return what a salvage would lose and fill, as if the bytes of all tensors had been found undamaged."""
    look = look_at_sizes if is_remote(checkpoint.path) else look_at_structure
    asked = ConvertOptions.of({}, **{"to": "hf", **options_of(fix)})
    salvaged = draft_salvage(checkpoint.with_base(asked.base), Path(fix.paths[1]), asked, look).salvaged
    assert salvaged is not None
    return salvaged


def judge_salvage(found: Account) -> Trial:
    """Return how many of the weights a salvage keeps; an error if it would only copy those of another checkpoint."""
    weights = found.weights
    if weights.filled and not weights.own:
        return Trial(Corrupt(f"{weights.share(weights.filled)} come from {found.other}", path=found.source))
    words = [f"keeps {weights.share(weights.own)}"]
    words += [f"takes {weights.share(weights.filled)} from {found.other}"] if weights.filled else []
    words += [f"loses {weights.share(weights.lost)}"] if weights.lost else []
    return Trial(remark=", ".join(words) if weights.filled or weights.lost else "")
