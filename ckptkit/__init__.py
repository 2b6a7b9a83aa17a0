"""Convert and manage checkpoints of PyTorch distributed training. Importing ckptkit does not import torch."""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
    from ckptkit.checks.diff import diff
    from ckptkit.checks.differences import Diff
    from ckptkit.checks.inspect import Inspected, inspect
    from ckptkit.checks.make_manifest import make_manifest
    from ckptkit.checks.moved import Moved
    from ckptkit.checks.moved import moved as moved
    from ckptkit.checks.open import LazyCheckpoint, LazyTensor, open  # noqa: A004 - `ckptkit.open` is its name
    from ckptkit.checks.stats import Stats, stats
    from ckptkit.checks.verify import Verified, verify
    from ckptkit.conversion.average import average
    from ckptkit.conversion.consolidate import consolidate
    from ckptkit.conversion.convert import convert
    from ckptkit.conversion.finalize import finalize
    from ckptkit.conversion.merge import merge
    from ckptkit.conversion.reshard import reshard
    from ckptkit.diagnosis.doctor import Diagnosis, doctor
    from ckptkit.diagnosis.explain import explain
    from ckptkit.diagnosis.finding import Finding
    from ckptkit.errors import CkptError
    from ckptkit.hub.cp import CopiedFiles, cp
    from ckptkit.hub.pull import Pulled, pull
    from ckptkit.hub.push import Pushed, push
    from ckptkit.plugins.deltas.apply import apply
    from ckptkit.plugins.deltas.apply_in_place import ChangedInPlace, apply_in_place
    from ckptkit.plugins.deltas.delta import WrittenDelta, delta
    from ckptkit.plugins.deltas.inspect_delta import InspectedDelta, inspect_delta
    from ckptkit.plugins.deltas.verify_delta import verify_delta
    from ckptkit.plugins.estimate.estimate import Estimated, estimate
    from ckptkit.plugins.prove.prove import Proved, prove
    from ckptkit.plugins.report.report import Reported, report
    from ckptkit.plugins.watch.watch import Watched, watch
    from ckptkit.runs.ls import Listing, ls
    from ckptkit.runs.ls import list_run as list_run
    from ckptkit.runs.pin import pin, unpin
    from ckptkit.runs.prune import Pruned, prune
    from ckptkit.runs.uploads import PrunedUploads, prune_uploads
    from ckptkit.state.options import ConvertOptions
    from ckptkit.state.report import Converted
    from ckptkit.training.saving.run import Run
    from ckptkit.training.smoke.smoke import smoke
    from ckptkit.training.train import train

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
    name: f"ckptkit.{module}"
    for module, names in {
        "checkpoints.checkpoint": "Checkpoint open_layout",
        "checks.diff": "diff",
        "checks.differences": "Diff",
        "checks.inspect": "inspect Inspected",
        "checks.make_manifest": "make_manifest",
        "checks.moved": "Moved moved",
        "checks.open": "LazyCheckpoint LazyTensor open",
        "checks.stats": "Stats stats",
        "checks.verify": "Verified verify",
        "conversion.average": "average",
        "conversion.consolidate": "consolidate",
        "conversion.convert": "convert",
        "conversion.finalize": "finalize",
        "conversion.merge": "merge",
        "conversion.reshard": "reshard",
        "diagnosis.doctor": "Diagnosis doctor",
        "diagnosis.explain": "explain",
        "diagnosis.finding": "Finding",
        "errors": "CkptError",
        "hub.cp": "CopiedFiles cp",
        "hub.pull": "pull Pulled",
        "hub.push": "push Pushed",
        "plugins.deltas.apply": "apply",
        "plugins.deltas.apply_in_place": "apply_in_place ChangedInPlace",
        "plugins.deltas.delta": "delta WrittenDelta",
        "plugins.deltas.inspect_delta": "inspect_delta InspectedDelta",
        "plugins.deltas.verify_delta": "verify_delta",
        "plugins.estimate.estimate": "estimate Estimated",
        "plugins.prove.prove": "prove Proved",
        "plugins.report.report": "report Reported",
        "plugins.watch.watch": "watch Watched",
        "runs.ls": "list_run Listing ls",
        "runs.pin": "pin unpin",
        "runs.prune": "prune Pruned",
        "runs.uploads": "prune_uploads PrunedUploads",
        "state.options": "ConvertOptions",
        "state.report": "Converted",
        "training.saving.run": "Run",
        "training.smoke.smoke": "smoke",
        "training.train": "train",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import ckptkit` itself costs nothing.

    Functions are wrapped so that they check the types of their arguments first.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from ckptkit.errors import with_torch_hint

        raise with_torch_hint(error) from None
    if isinstance(value, FunctionType):
        from ckptkit.argument_types import with_checked_arguments

        value = with_checked_arguments(value)
        value.__module__ = __name__  # pickle looks the function up by this module name
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted(__all__)
