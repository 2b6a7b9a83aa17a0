"""Check that a run's directory or store supports the requested format."""

from __future__ import annotations

from pathlib import Path

from ckptkit.errors import Usage
from ckptkit.io.destination import require_shared
from ckptkit.io.path import is_remote

_IN_STORES = ("sharded", "adapter")  # values of `state_dict` that a store supports


def require_storable(run: Path, state_dict: str) -> None:
    """Raise `Usage` if a run cannot save to a store in this format, because several ranks would write one object."""
    require_shared(run)
    if is_remote(run) and state_dict not in _IN_STORES:
        message = f"state dict `{state_dict}` cannot go straight to a store: several ranks would write one object"
        hint = f"save `{_IN_STORES[0]}`, then run `ckptkit convert CHECKPOINT OUT`; OUT may be a URL"
        raise Usage(message, path=run, hint=hint)
