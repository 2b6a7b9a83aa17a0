"""Convert and manage checkpoints of PyTorch distributed training. Importing this imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
    from ckptkit.comparison.differences import Diff
    from ckptkit.comparison.moved import Moved
    from ckptkit.comparison.moved import moved as moved
    from ckptkit.conversion.options import ConvertOptions
    from ckptkit.conversion.report import Converted
    from ckptkit.diagnosis.finding import Finding
    from ckptkit.errors import CkptError
    from ckptkit.estimates.estimate import Estimated, estimate
    from ckptkit.hub.pull import Pulled, pull
    from ckptkit.hub.push import Pushed, push
    from ckptkit.ops.apply import apply
    from ckptkit.ops.apply_in_place import ChangedInPlace, apply_in_place
    from ckptkit.ops.average import average
    from ckptkit.ops.consolidate import consolidate
    from ckptkit.ops.convert import convert
    from ckptkit.ops.cp import CopiedFiles, cp
    from ckptkit.ops.delta import WrittenDelta, delta
    from ckptkit.ops.diff import diff
    from ckptkit.ops.doctor import Diagnosis, doctor
    from ckptkit.ops.explain import explain
    from ckptkit.ops.finalize import finalize
    from ckptkit.ops.inspect import Inspected, inspect
    from ckptkit.ops.inspect_delta import InspectedDelta, inspect_delta
    from ckptkit.ops.ls import Listing, ls
    from ckptkit.ops.ls import list_run as list_run
    from ckptkit.ops.manifest import make_manifest
    from ckptkit.ops.merge import merge
    from ckptkit.ops.open import LazyCheckpoint, LazyTensor, open  # noqa: A004 - `ckptkit.open` is its name
    from ckptkit.ops.pin import pin, unpin
    from ckptkit.ops.prune import Pruned, prune
    from ckptkit.ops.reshard import reshard
    from ckptkit.ops.stats import Stats, stats
    from ckptkit.ops.uploads import PrunedUploads, prune_uploads
    from ckptkit.ops.verify import Verified, verify
    from ckptkit.ops.verify_delta import verify_delta
    from ckptkit.proving.prove import Proved, prove
    from ckptkit.reports.report import Reported, report
    from ckptkit.training.saving.run import Run
    from ckptkit.training.smoke.smoke import smoke
    from ckptkit.training.train import train
    from ckptkit.watching.watch import Watched, watch

__all__ = [
    "ChangedInPlace",
    "Checkpoint",
    "CkptError",
    "ConvertOptions",
    "Converted",
    "CopiedFiles",
    "Diagnosis",
    "Diff",
    "Estimated",
    "Finding",
    "Inspected",
    "InspectedDelta",
    "LazyCheckpoint",
    "LazyTensor",
    "Listing",
    "Moved",
    "Proved",
    "Pruned",
    "PrunedUploads",
    "Pulled",
    "Pushed",
    "Reported",
    "Run",
    "Stats",
    "Verified",
    "Watched",
    "WrittenDelta",
    "__version__",
    "apply",
    "apply_in_place",
    "average",
    "consolidate",
    "convert",
    "cp",
    "delta",
    "diff",
    "doctor",
    "estimate",
    "explain",
    "finalize",
    "inspect",
    "inspect_delta",
    "ls",
    "make_manifest",
    "merge",
    "open",
    "open_layout",
    "pin",
    "prove",
    "prune",
    "prune_uploads",
    "pull",
    "push",
    "report",
    "reshard",
    "smoke",
    "stats",
    "train",
    "unpin",
    "verify",
    "verify_delta",
    "watch",
]

_HOMES = {
    "ChangedInPlace": "ckptkit.ops.apply_in_place",
    "Checkpoint": "ckptkit.checkpoints.checkpoint",
    "CkptError": "ckptkit.errors",
    "ConvertOptions": "ckptkit.conversion.options",
    "Converted": "ckptkit.conversion.report",
    "CopiedFiles": "ckptkit.ops.cp",
    "Diagnosis": "ckptkit.ops.doctor",
    "Diff": "ckptkit.comparison.differences",
    "Estimated": "ckptkit.estimates.estimate",
    "Finding": "ckptkit.diagnosis.finding",
    "Inspected": "ckptkit.ops.inspect",
    "InspectedDelta": "ckptkit.ops.inspect_delta",
    "LazyCheckpoint": "ckptkit.ops.open",
    "LazyTensor": "ckptkit.ops.open",
    "Listing": "ckptkit.ops.ls",
    "Moved": "ckptkit.comparison.moved",
    "Proved": "ckptkit.proving.prove",
    "Pruned": "ckptkit.ops.prune",
    "PrunedUploads": "ckptkit.ops.uploads",
    "Pulled": "ckptkit.hub.pull",
    "Pushed": "ckptkit.hub.push",
    "Reported": "ckptkit.reports.report",
    "Run": "ckptkit.training.saving.run",
    "Stats": "ckptkit.ops.stats",
    "Verified": "ckptkit.ops.verify",
    "Watched": "ckptkit.watching.watch",
    "WrittenDelta": "ckptkit.ops.delta",
    "apply": "ckptkit.ops.apply",
    "apply_in_place": "ckptkit.ops.apply_in_place",
    "average": "ckptkit.ops.average",
    "consolidate": "ckptkit.ops.consolidate",
    "convert": "ckptkit.ops.convert",
    "cp": "ckptkit.ops.cp",
    "delta": "ckptkit.ops.delta",
    "diff": "ckptkit.ops.diff",
    "doctor": "ckptkit.ops.doctor",
    "estimate": "ckptkit.estimates.estimate",
    "explain": "ckptkit.ops.explain",
    "finalize": "ckptkit.ops.finalize",
    "inspect": "ckptkit.ops.inspect",
    "inspect_delta": "ckptkit.ops.inspect_delta",
    "list_run": "ckptkit.ops.ls",
    "ls": "ckptkit.ops.ls",
    "make_manifest": "ckptkit.ops.manifest",
    "merge": "ckptkit.ops.merge",
    "moved": "ckptkit.comparison.moved",
    "open": "ckptkit.ops.open",
    "open_layout": "ckptkit.checkpoints.checkpoint",
    "pin": "ckptkit.ops.pin",
    "prove": "ckptkit.proving.prove",
    "prune": "ckptkit.ops.prune",
    "prune_uploads": "ckptkit.ops.uploads",
    "pull": "ckptkit.hub.pull",
    "push": "ckptkit.hub.push",
    "report": "ckptkit.reports.report",
    "reshard": "ckptkit.ops.reshard",
    "smoke": "ckptkit.training.smoke.smoke",
    "stats": "ckptkit.ops.stats",
    "train": "ckptkit.training.train",
    "unpin": "ckptkit.ops.pin",
    "verify": "ckptkit.ops.verify",
    "verify_delta": "ckptkit.ops.verify_delta",
    "watch": "ckptkit.watching.watch",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import ckptkit` itself must cost nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from ckptkit.errors import without_torch

        raise without_torch(error) from None


def __dir__() -> list[str]:
    return sorted(__all__)
