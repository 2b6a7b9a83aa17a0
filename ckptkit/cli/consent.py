"""The option `--yes`: without it, commands only show what they would send to the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ckptkit.entry_points import load
from ckptkit.io.destination import is_on_hub
from ckptkit.io.path import known_store

if TYPE_CHECKING:
    from ckptkit.hub.cp import CopiedFiles
    from ckptkit.state.report import Converted

    Done = TypeVar("Done", Converted, CopiedFiles)

Yes = Annotated[
    bool, typer.Option("--yes", help="Needed to send to the Hub. Without --yes, ckptkit only shows what it would send.")
]


def dry_run_option(out: Path | None, *, yes: bool) -> dict[str, bool]:
    """Return `dry_run=True` for an output on the Hub without `--yes`, else no options."""
    return {} if yes or not is_on_hub(out) else {"dry_run": True}


def with_hub_note(done: Done, *, yes: bool) -> Done:
    """Return the result; after a dry run to the Hub, with a note on what ckptkit would send."""
    if not (done.dry_run and is_on_hub(done.output)):
        return done
    describe = load(known_store(done.output).describe)
    note = f"would write to {describe(done.output)}"
    note += "" if yes else "; nothing was sent yet: pass --yes to send it"
    return replace(done, notes=(*done.notes, note))
