"""Read the name of a repository of the Hub as a user writes it."""

from __future__ import annotations

import re

from ckptkit.errors import Usage
from ckptkit.io.stores.hub_errors import MAIN

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def parse_place(place: str, revision: str | None = None) -> tuple[str, str]:
    """Return repository and revision of `org/model`, `org/model@revision` or `hf://org/model`."""
    repo_id, _, named = place.removeprefix("hf://").partition("@")
    if not _ID.fullmatch(repo_id):
        raise Usage(
            f"expected a repository like org/model, found `{place}`",
            hint="write it like org/model, or org/model@revision",
        )
    if named and revision not in (None, named):
        raise Usage(f"`{place}` names one revision and --revision another")
    return repo_id, named or revision or MAIN
