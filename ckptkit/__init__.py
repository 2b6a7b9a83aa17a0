"""ckptkit: converts and manages checkpoints of PyTorch distributed training. Importing it imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckptkit.errors import CkptError
    from ckptkit.formats import open_layout
    from ckptkit.ops.comparing.diff import diff
    from ckptkit.ops.comparing.differences import Diff
    from ckptkit.ops.comparing.moved import Moved, moved
    from ckptkit.ops.converting.average import Averaged, average
    from ckptkit.ops.converting.consolidate import consolidate
    from ckptkit.ops.converting.convert import convert
    from ckptkit.ops.converting.converted import Converted
    from ckptkit.ops.converting.finalize import finalize
    from ckptkit.ops.converting.reshard import reshard
    from ckptkit.ops.estimating.estimate import Estimated, estimate
    from ckptkit.ops.inspecting.inspect import Inspected, inspect
    from ckptkit.ops.inspecting.lazy import LazyCheckpoint, LazyTensor, open  # noqa: A004 - `ckptkit.open` is its name
    from ckptkit.ops.inspecting.listing import Listing, list_run
    from ckptkit.ops.inspecting.stats import Stats, stats
    from ckptkit.ops.keeping.pin import pin, unpin
    from ckptkit.ops.keeping.prune import Pruned, prune
    from ckptkit.ops.reporting.report import Reported, report
    from ckptkit.ops.sharing.pull import Pulled, pull
    from ckptkit.ops.sharing.push import Pushed, push
    from ckptkit.ops.verifying.make_manifest import make_manifest
    from ckptkit.ops.verifying.verify import Verified, verify
    from ckptkit.train.saving.run import Run

__all__ = [
    "Averaged",
    "CkptError",
    "Converted",
    "Diff",
    "Estimated",
    "Inspected",
    "LazyCheckpoint",
    "LazyTensor",
    "Listing",
    "Moved",
    "Pruned",
    "Pulled",
    "Pushed",
    "Reported",
    "Run",
    "Stats",
    "Verified",
    "__version__",
    "average",
    "consolidate",
    "convert",
    "diff",
    "estimate",
    "finalize",
    "inspect",
    "list_run",
    "make_manifest",
    "moved",
    "open",
    "open_layout",
    "pin",
    "prune",
    "pull",
    "push",
    "report",
    "reshard",
    "stats",
    "unpin",
    "verify",
]

_HOMES = {
    "Averaged": "ckptkit.ops.converting.average",
    "CkptError": "ckptkit.errors",
    "Converted": "ckptkit.ops.converting.converted",
    "Diff": "ckptkit.ops.comparing.differences",
    "Estimated": "ckptkit.ops.estimating.estimate",
    "Inspected": "ckptkit.ops.inspecting.inspect",
    "LazyCheckpoint": "ckptkit.ops.inspecting.lazy",
    "LazyTensor": "ckptkit.ops.inspecting.lazy",
    "Listing": "ckptkit.ops.inspecting.listing",
    "Moved": "ckptkit.ops.comparing.moved",
    "Pruned": "ckptkit.ops.keeping.prune",
    "Pulled": "ckptkit.ops.sharing.pull",
    "Pushed": "ckptkit.ops.sharing.push",
    "Reported": "ckptkit.ops.reporting.report",
    "Run": "ckptkit.train.saving.run",
    "Stats": "ckptkit.ops.inspecting.stats",
    "Verified": "ckptkit.ops.verifying.verify",
    "average": "ckptkit.ops.converting.average",
    "consolidate": "ckptkit.ops.converting.consolidate",
    "convert": "ckptkit.ops.converting.convert",
    "diff": "ckptkit.ops.comparing.diff",
    "estimate": "ckptkit.ops.estimating.estimate",
    "finalize": "ckptkit.ops.converting.finalize",
    "inspect": "ckptkit.ops.inspecting.inspect",
    "list_run": "ckptkit.ops.inspecting.listing",
    "make_manifest": "ckptkit.ops.verifying.make_manifest",
    "moved": "ckptkit.ops.comparing.moved",
    "open": "ckptkit.ops.inspecting.lazy",
    "open_layout": "ckptkit.formats",
    "pin": "ckptkit.ops.keeping.pin",
    "prune": "ckptkit.ops.keeping.prune",
    "pull": "ckptkit.ops.sharing.pull",
    "push": "ckptkit.ops.sharing.push",
    "report": "ckptkit.ops.reporting.report",
    "reshard": "ckptkit.ops.converting.reshard",
    "stats": "ckptkit.ops.inspecting.stats",
    "unpin": "ckptkit.ops.keeping.pin",
    "verify": "ckptkit.ops.verifying.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import ckptkit` itself must cost nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
