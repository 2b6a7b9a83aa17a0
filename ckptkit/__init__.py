"""ckptkit: converts and manages checkpoints of PyTorch distributed training. Importing it imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckptkit.errors import CkptError
    from ckptkit.formats import open_layout
    from ckptkit.ops.consolidate import consolidate
    from ckptkit.ops.convert import convert
    from ckptkit.ops.converted import Converted
    from ckptkit.ops.estimate import Estimated, estimate
    from ckptkit.ops.finalize import finalize
    from ckptkit.ops.inspect import Inspected, inspect
    from ckptkit.ops.make_manifest import make_manifest
    from ckptkit.ops.prune import Pruned, prune
    from ckptkit.ops.reshard import reshard
    from ckptkit.ops.verify import Verified, verify
    from ckptkit.train.saving.run import Run

__all__ = [
    "CkptError",
    "Converted",
    "Estimated",
    "Inspected",
    "Pruned",
    "Run",
    "Verified",
    "__version__",
    "consolidate",
    "convert",
    "estimate",
    "finalize",
    "inspect",
    "make_manifest",
    "open_layout",
    "prune",
    "reshard",
    "verify",
]

_HOMES = {
    "CkptError": "ckptkit.errors",
    "Converted": "ckptkit.ops.converted",
    "Estimated": "ckptkit.ops.estimate",
    "Inspected": "ckptkit.ops.inspect",
    "Pruned": "ckptkit.ops.prune",
    "Run": "ckptkit.train.saving.run",
    "Verified": "ckptkit.ops.verify",
    "consolidate": "ckptkit.ops.consolidate",
    "convert": "ckptkit.ops.convert",
    "estimate": "ckptkit.ops.estimate",
    "finalize": "ckptkit.ops.finalize",
    "inspect": "ckptkit.ops.inspect",
    "make_manifest": "ckptkit.ops.make_manifest",
    "open_layout": "ckptkit.formats",
    "prune": "ckptkit.ops.prune",
    "reshard": "ckptkit.ops.reshard",
    "verify": "ckptkit.ops.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import ckptkit` itself must cost nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
