"""Run `ckptkit consolidate`: options in, report out."""

from __future__ import annotations

from typing import Any

from ckptkit.cli.consent import Yes, dry_run_option, with_hub_note
from ckptkit.cli.conversion import OPTIONS, Out, Source, chosen_options, show
from ckptkit.cli.output import Json, Quiet, progress_bar
from ckptkit.cli.settings import with_options
from ckptkit.cli.sources import Also, with_others


@with_options(OPTIONS, leave_out=("world_size", "under", "optimizer_keys", "optimizer_order", "complete_optimizer"))
def consolidate(
    src: Source,
    out: Out,
    also: Also = None,
    yes: Yes = False,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
    **options: Any,
) -> None:
    """Turn a training checkpoint into a Hugging Face model.

    Writes safetensors files, config and tokenizer.

    Example: ckptkit consolidate run/ckpt-500 out

    Exit codes: 0 done; 2 usage; 3 the checkpoint is damaged, incomplete or does not fit its config; 4 an I/O failure,
    OUT is unchanged; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.conversion.consolidate import consolidate as run

    src = with_others(src, also)
    with progress_bar("consolidating") as progress:
        done = run(src, out, **chosen_options(options) | dry_run_option(out, yes=yes), progress=progress)
    show(src, with_hub_note(done, yes=yes), "consolidated", json=json)
