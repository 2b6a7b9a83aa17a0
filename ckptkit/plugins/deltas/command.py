"""Run `ckptkit delta` and `ckptkit apply`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.conversion import Jobs, NoSync, Overwrite, print_result
from ckptkit.cli.output import Json, pick, print_json, print_note, print_table, print_text_line, progress_bar
from ckptkit.errors import Usage
from ckptkit.io.destination import to_destination
from ckptkit.io.path import to_path
from ckptkit.words import count, format_bytes


def delta(
    base: Annotated[
        Path,
        typer.Argument(
            parser=to_path, metavar="BASE", help="The old checkpoint, or a run (its latest complete checkpoint)."
        ),
    ],
    new: Annotated[Path, typer.Argument(parser=to_path, metavar="NEW", help="The new checkpoint, of the same model.")],
    out: Annotated[
        Path,
        typer.Argument(
            parser=to_destination, metavar="OUT", help="The directory to write, or a URL: s3://, gs://, az://."
        ),
    ],
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help="Cast BASE and NEW first; by default, to the dtypes of BASE."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write the delta even if it is larger than 60% of the model.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what ckptkit would write, and write nothing.")
    ] = False,
    jobs: Jobs = None,
    no_sync: NoSync = False,
    json: Json = False,
) -> None:
    """Write what changed between two versions of a model.

    BASE and NEW may have any format and world size. ckptkit compares them bit for bit, after the renames and casts that
    `consolidate` would do.

    Example: ckptkit delta policy-100 run/ckpt-110 delta-110

    `ckptkit apply BASE DELTA OUT` restores the new model. Reinforcement learning changes few elements, because its
    learning rate is small. Other training changes most elements, and then ckptkit refuses to write a delta.

    Exit codes: 0 done; 2 usage; 3 a checkpoint is damaged, the two do not belong to one model, or too much changed; 4
    an I/O failure; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.plugins.deltas.delta import delta as run

    with progress_bar("comparing") as progress:
        done = run(
            base,
            new,
            out,
            dtype=dtype or (),
            force=force,
            dry_run=dry_run,
            jobs=jobs,
            sync=not no_sync,
            progress=progress,
        )
    record = done.record
    if json:
        result = pick(done, "base", "new", "output", "density", "nbytes", "checked_bytes", "seconds", "notes")
        result |= {"base_id": record.base, "new_id": record.new, "whole_nbytes": record.nbytes}
        result |= {"changed": len(record.tensors), "unchanged": record.unchanged}
        result |= {"files": [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()]}
        print_json(result | pick(done, "dry_run"))
        return
    first, *further_lines = done.summary()
    print_text_line(first)
    if done.files:
        print_table([(f"  {name}", format_bytes(nbytes)) for name, nbytes in done.files.items()], ("  file", "size"))
    for line in further_lines:
        print_text_line(line)
    for text in done.notes:
        print_note(f"note: {text}")


def apply(
    paths: Annotated[
        list[Path],
        typer.Argument(
            parser=to_path,
            metavar="BASE DELTA... OUT",
            help="The base checkpoint, one or more deltas, and the directory to write.",
        ),
    ],
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help="Cast BASE first; pass the same --dtype as to `ckptkit delta`."),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Update model LOCAL with the deltas in ROOT; the arguments are LOCAL ROOT."),
    ] = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and write nothing.")] = False,
    jobs: Jobs = None,
    no_sync: NoSync = False,
    json: Json = False,
) -> None:
    """Apply deltas to their base, and write the result.

    OUT becomes a Hugging Face model with the config and tokenizer of BASE, and with the same shards if BASE is a
    Hugging Face model. It has the weights that `consolidate` would write for the checkpoint that the last delta was
    made from.

    Example: ckptkit apply policy-100 delta-110 delta-120 policy-120

    Before it writes anything, ckptkit checks that BASE is the base of the first delta, that each delta follows the one
    before, and that no delta is damaged. It compares the CRC-32 of every tensor of OUT with the CRC-32 in the delta.

    `ckptkit apply LOCAL ROOT --in-place` updates LOCAL, a local Hugging Face model, to the newest state in ROOT. ROOT
    is a delta, or a directory of deltas; ckptkit applies the deltas that continue from the state of LOCAL. A journal
    makes that safe: after a crash the same command completes the update. Pause a server that has mapped the files: it
    would see a mixture of old and new weights.

    Exit codes: 0 done; 2 usage; 3 another base, a gap between deltas, or a damaged delta; 4 an I/O failure, OUT is
    unchanged; 5 OUT exists, or a path is unsafe; 130 interrupted.
    """
    from ckptkit.plugins.deltas.apply import apply as run

    if in_place:
        run_apply_in_place(paths, [dtype, overwrite, dry_run, jobs, no_sync], json=json)
        return
    if len(paths) < 3:
        found = count(len(paths), "path")
        raise Usage(f"expected BASE, at least one DELTA, and OUT, found {found}", hint="run with --help")
    base, *deltas, out = paths
    with progress_bar("applying") as progress:
        done = run(
            base,
            deltas,
            out,
            dtype=dtype or (),
            overwrite=overwrite,
            dry_run=dry_run,
            jobs=jobs,
            sync=not no_sync,
            progress=progress,
        )
    print_result(base, done, "patched a copy of", json=json)


def run_apply_in_place(paths: list[Path], others: list[object], *, json: bool) -> None:
    """Run `ckptkit apply LOCAL ROOT --in-place`. Raises `Usage` if any of `others`, the other options, is set."""
    from ckptkit.plugins.deltas.apply_in_place import apply_in_place

    if len(paths) != 2:
        raise Usage(f"--in-place: expected LOCAL and ROOT, found {count(len(paths), 'path')}", hint="run with --help")
    if any(others):
        raise Usage("--in-place takes no other options than --json and --quiet", hint="drop them")
    done = apply_in_place(str(paths[0]), paths[1])
    if json:
        print_json(pick(done, "path", "deltas", "tensors", "elements", "unfinished") | {"completed": done.is_completed})
        return
    for line in done.summary():
        print_text_line(line)
