"""Where a run lies: in a local directory or in a store, and what of it stays on this machine. Imports no torch."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from ckptkit.destinations.stores import require_shared
from ckptkit.errors import Usage
from ckptkit.files.path import RemotePath

_IN_STORES = ("sharded", "adapter")  # state dicts


def require_storable(run: Path, state_dict: str) -> None:
    """Raise an error for a run that cannot go straight to a store: several ranks would write one object, or commit."""
    if isinstance(run, RemotePath):
        require_shared(run)
    if isinstance(run, RemotePath) and state_dict not in _IN_STORES:
        message = f"state dict `{state_dict}` cannot go straight to a store: several ranks would write one object"
        hint = f"save `{_IN_STORES[0]}`, then run `ckptkit convert CHECKPOINT OUT`; OUT may be a URL"
        raise Usage(message, path=run, hint=hint)


def local_folder(run: Path) -> Path:
    """Return where the files of a run lie that only this machine needs: in the run if it is local, or in the cache.

    The cache is `$XDG_CACHE_HOME/ckptkit`, by default `~/.cache/ckptkit`.
    """
    if not isinstance(run, RemotePath):
        return run
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "ckptkit" / "runs" / f"{run.name}-{blake2b(str(run).encode(), digest_size=6).hexdigest()}"
