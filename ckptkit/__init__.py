"""Convert and manage checkpoints of PyTorch distributed training. Importing ckptkit does not import torch."""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ckptkit.version import __version__ as __version__

if TYPE_CHECKING:
    from ckptkit.checkpoints.checkpoint import Checkpoint as Checkpoint
    from ckptkit.checkpoints.checkpoint import open_layout as open_layout
    from ckptkit.checks.diff import diff as diff
    from ckptkit.checks.differences import Diff as Diff
    from ckptkit.checks.inspect import Inspected as Inspected
    from ckptkit.checks.inspect import inspect as inspect
    from ckptkit.checks.make_manifest import make_manifest as make_manifest
    from ckptkit.checks.open import LazyCheckpoint as LazyCheckpoint
    from ckptkit.checks.open import LazyTensor as LazyTensor
    from ckptkit.checks.open import open as open  # noqa: A004 - `ckptkit.open` is its name
    from ckptkit.checks.parameter_changes import Moved as Moved
    from ckptkit.checks.parameter_changes import moved as moved
    from ckptkit.checks.stats import Stats as Stats
    from ckptkit.checks.stats import stats as stats
    from ckptkit.checks.verify import Verified as Verified
    from ckptkit.checks.verify import verify as verify
    from ckptkit.conversion.combine import average as average
    from ckptkit.conversion.combine import merge as merge
    from ckptkit.conversion.convert import consolidate as consolidate
    from ckptkit.conversion.convert import convert as convert
    from ckptkit.conversion.convert import reshard as reshard
    from ckptkit.conversion.finalize import finalize as finalize
    from ckptkit.errors import CkptError as CkptError
    from ckptkit.plugins.deltas.apply import apply as apply
    from ckptkit.plugins.deltas.apply_in_place import ChangedInPlace as ChangedInPlace
    from ckptkit.plugins.deltas.apply_in_place import apply_in_place as apply_in_place
    from ckptkit.plugins.deltas.delta import WrittenDelta as WrittenDelta
    from ckptkit.plugins.deltas.delta import delta as delta
    from ckptkit.plugins.deltas.open_delta import InspectedDelta as InspectedDelta
    from ckptkit.plugins.deltas.open_delta import inspect_delta as inspect_delta
    from ckptkit.plugins.deltas.verify_delta import verify_delta as verify_delta
    from ckptkit.plugins.doctor.doctor import Diagnosis as Diagnosis
    from ckptkit.plugins.doctor.doctor import doctor as doctor
    from ckptkit.plugins.doctor.finding import Finding as Finding
    from ckptkit.plugins.doctor.known_errors import explain as explain
    from ckptkit.plugins.estimate.estimate import Estimated as Estimated
    from ckptkit.plugins.estimate.estimate import estimate as estimate
    from ckptkit.plugins.hub.pull import Pulled as Pulled
    from ckptkit.plugins.hub.pull import pull as pull
    from ckptkit.plugins.hub.push import Pushed as Pushed
    from ckptkit.plugins.hub.push import push as push
    from ckptkit.plugins.prove.prove import Proved as Proved
    from ckptkit.plugins.prove.prove import prove as prove
    from ckptkit.plugins.report.report import Reported as Reported
    from ckptkit.plugins.report.report import report as report
    from ckptkit.plugins.watch.watch import Watched as Watched
    from ckptkit.plugins.watch.watch import watch as watch
    from ckptkit.runs.cp import CopiedFiles as CopiedFiles
    from ckptkit.runs.cp import cp as cp
    from ckptkit.runs.ls import Listing as Listing
    from ckptkit.runs.ls import list_run as list_run
    from ckptkit.runs.ls import ls as ls
    from ckptkit.runs.pin import pin as pin
    from ckptkit.runs.pin import unpin as unpin
    from ckptkit.runs.prune import Pruned as Pruned
    from ckptkit.runs.prune import prune as prune
    from ckptkit.runs.uploads import PrunedUploads as PrunedUploads
    from ckptkit.runs.uploads import prune_uploads as prune_uploads
    from ckptkit.state.options import ConvertOptions as ConvertOptions
    from ckptkit.state.report import Converted as Converted
    from ckptkit.training.loop import train as train
    from ckptkit.training.saving.run import Run as Run
    from ckptkit.training.smoke.smoke import smoke as smoke

_HOMES = {
    name: f"ckptkit.{module}"
    for module, names in {
        "checkpoints.checkpoint": "Checkpoint open_layout",
        "checks.diff": "diff",
        "checks.differences": "Diff",
        "checks.inspect": "inspect Inspected",
        "checks.make_manifest": "make_manifest",
        "checks.parameter_changes": "Moved moved",
        "checks.open": "LazyCheckpoint LazyTensor open",
        "checks.stats": "Stats stats",
        "checks.verify": "Verified verify",
        "conversion.combine": "average merge",
        "conversion.convert": "consolidate convert reshard",
        "conversion.finalize": "finalize",
        "errors": "CkptError",
        "plugins.deltas.apply": "apply",
        "plugins.deltas.apply_in_place": "apply_in_place ChangedInPlace",
        "plugins.deltas.delta": "delta WrittenDelta",
        "plugins.deltas.open_delta": "inspect_delta InspectedDelta",
        "plugins.deltas.verify_delta": "verify_delta",
        "plugins.doctor.doctor": "Diagnosis doctor",
        "plugins.doctor.known_errors": "explain",
        "plugins.doctor.finding": "Finding",
        "plugins.estimate.estimate": "estimate Estimated",
        "plugins.hub.pull": "pull Pulled",
        "plugins.hub.push": "push Pushed",
        "plugins.prove.prove": "prove Proved",
        "plugins.report.report": "report Reported",
        "plugins.watch.watch": "watch Watched",
        "runs.cp": "CopiedFiles cp",
        "runs.ls": "list_run Listing ls",
        "runs.pin": "pin unpin",
        "runs.prune": "prune Pruned",
        "runs.uploads": "prune_uploads PrunedUploads",
        "state.options": "ConvertOptions",
        "state.report": "Converted",
        "training.saving.run": "Run",
        "training.smoke.smoke": "smoke",
        "training.loop": "train",
    }.items()
    for name in names.split()
}
__all__ = sorted({*_HOMES, "__version__"} - {"list_run", "moved"})  # noqa: PLE0605 - `as` marks the exports


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
