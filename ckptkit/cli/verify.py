"""Run `ckptkit verify` and `ckptkit manifest`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.checkpoints.find_components import describe_not_copied
from ckptkit.cli.conversion import Jobs, shared_options
from ckptkit.cli.options import Also, given_settings, join_also_directories, join_also_if_single, with_options
from ckptkit.cli.output import (
    Json,
    as_printable,
    pick,
    print_json,
    print_note,
    print_table,
    print_text_line,
    progress_bar,
    to_json_value,
)
from ckptkit.errors import Usage
from ckptkit.io.file import missing_path_error
from ckptkit.io.path import to_local_path, to_path
from ckptkit.settings import Setting
from ckptkit.words import command_line, count, format_bytes

if TYPE_CHECKING:
    from ckptkit.checks.stats import TensorStats
    from ckptkit.checks.verify import Verified


_ABOUT_PART = ("path", "format", "tensors", "nbytes", "has_manifest", "proved_files", "salvaged")


_OPTIONS = {
    "fast": Setting(
        bool, False, "Check the structure only: do not read large tensors. On S3, compare the store's CRC-32."
    ),
    "against": Setting(Path, None, "Also compare with another checkpoint, tensor by tensor.", "OTHER"),
    "allow_cast": Setting(bool, False, "With --against: allow dtypes to differ."),
    **shared_options("map"),
    "rename": Setting(
        tuple[str, ...], (), "With --against: rename the parameters of OTHER first; repeatable.", "'REGEX=>TEXT'"
    ),
    "stats": Setting(bool, False, "Also look for NaN, Inf, denormals, and tensors that are all zero or constant."),
    **shared_options("jobs"),
}


@with_options(_OPTIONS, insert_before="base")
def verify(
    paths: Annotated[
        list[Path], typer.Argument(parser=to_path, metavar="PATH", help="Checkpoints, or runs (all their checkpoints).")
    ],
    base: Annotated[
        Path | None, typer.Option(parser=to_path, metavar="BASE", help="For a delta: also check that BASE is its base.")
    ] = None,
    also: Also = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Check that a checkpoint is complete and undamaged.

    Checks its structure, and every byte that has a recorded checksum. PATH may also be a delta or a directory of
    deltas.

    Example: ckptkit verify run/ckpt-500

    Exit codes: 0 no problems; 1 problems, all of them listed; 2 usage; 3 not a checkpoint; 4 an I/O failure.
    """
    from ckptkit.checkpoints.other_kinds import expand_directory_group, find_non_checkpoint_kind
    from ckptkit.checks.verify import verify as check

    fast, against, stats, jobs = (options[name] for name in ("fast", "against", "stats", "jobs"))
    paths = join_also_if_single(paths, also, "verify them one by one")
    if base is None:
        paths = [member for path in paths for member in expand_directory_group(path)]
    deltas = {path: kind for path in paths if (kind := find_non_checkpoint_kind(path))}
    if base and (others := [path for path in paths if path not in deltas]):
        if not others[0].exists():
            raise missing_path_error(others[0])
        hint = "pass deltas only, or use --against for a checkpoint"
        raise Usage(f"--base: expected a delta, found {others[0]}", hint=hint)
    if deltas and (fast or against or stats):
        raise Usage("--fast, --against and --stats cannot be combined with deltas", hint="drop them")
    verified: list[Verified] = [kind.verify_directory(path, base=base, jobs=jobs) for path, kind in deltas.items()]
    checkpoints = [path for path in paths if path not in deltas]
    with progress_bar("verify") as progress:
        if checkpoints or not deltas:
            verified += check(*checkpoints, **given_settings(options), progress=progress)
    is_ok = all(part.is_ok for part in verified)
    numbers = [tensor for part in verified for tensor in part.stats]
    if json:
        counted = [to_json_value(tensor) | {"spec": str(tensor.spec)} for tensor in numbers]
        print_json(to_json(verified) | ({"stats": counted} if stats else {}))
    else:
        report(verified, deltas, fast=fast)
        report_comparison(verified)
        if stats and is_ok:
            report_suspicious_tensors(numbers)
        if not is_ok and (stats or (against and not any(part.compared is not None for part in verified))):
            print_note("nothing else was checked")
    raise typer.Exit(0 if is_ok else 1)


def manifest(
    path: Annotated[
        Path,
        typer.Argument(
            parser=to_local_path, metavar="PATH", help="A checkpoint, or a run (its latest complete checkpoint)."
        ),
    ],
    overwrite: Annotated[bool, typer.Option(help="Replace an existing manifest.")] = False,
    jobs: Jobs = None,
    also: Also = None,
    json: Json = False,
) -> None:
    """Write checksums, so that verify finds later changes.

    The manifest, `ckptkit.json`, contains the checksum of every file. `ckptkit verify` compares the files with it.

    Example: ckptkit manifest run/ckpt-500

    Exit codes: 0 done; 2 usage; 3 not a checkpoint, or damaged; 4 an I/O failure; 5 a manifest exists.
    """
    from ckptkit.checks.make_manifest import make_manifest

    path = join_also_directories(path, also)
    with progress_bar("manifest") as progress:
        written = make_manifest(path, overwrite=overwrite, jobs=jobs, progress=progress)
    if json:
        print_json(to_json(written))
        return
    for part in written:
        amount = f"{count(len(part.sums), 'file')}, {format_bytes(part.nbytes)}"
        print_text_line(f"wrote {part.path / 'ckptkit.json'}: checksums of {amount}")
        for text in describe_not_copied(part.left_behind, "not in the manifest"):
            print_note(f"note: {text}")


def to_json(verified: Sequence[Verified]) -> dict[str, Any]:
    """Return the result under the keys that scripts rely on."""
    problems = [problem for part in verified for problem in part.problems]
    return {
        "ok": not problems,
        "problems": [problem.to_json() for problem in problems],
        "checked_bytes": sum(part.checked_bytes for part in verified),
        "unchecked_bytes": sum(part.unchecked_bytes for part in verified),
        "left_behind": [pick(one, "path", "why") for part in verified for one in part.left_behind],
        "checkpoints": [{"ok": part.is_ok, **pick(part, *_ABOUT_PART)} for part in verified],
        "compared": [
            {"path": pair.a, "other": pair.b, **pick(pair, "tensors", "nbytes")}
            for part in verified
            if (pair := part.compared) is not None
        ],
    }


def report(verified: Sequence[Verified], deltas: Collection[Path], *, fast: bool) -> None:
    """Print a table with a row for each component or delta, and all problems below it."""
    rows = [
        (
            "ok" if part.is_ok else count(len(part.problems), "problem"),
            format_bytes(part.nbytes),
            format_bytes(part.checked_bytes),
            format_bytes(part.unchecked_bytes),
            "yes" if part.has_manifest else "no",
            part.path,
        )
        for part in verified
    ]
    print_table(rows, ("", "size", "checked", "unchecked", "manifest", "checkpoint"))
    for text in dict.fromkeys(part.loss for part in verified if part.loss):
        print_note(f"warning: {text}")
    for part in verified:
        for text in part.notes:
            print_note(f"note: {part.path}: {text}")
        for text in describe_not_copied(part.left_behind, "not checked"):
            print_note(f"note: {part.left_behind[0].root}: {text}")
        for problem in part.problems:  # even with --quiet
            typer.echo(as_printable(f"problem: {problem.line}"))
            if problem.hint:
                typer.echo(as_printable(f"  hint: {problem.hint}"))
    if fast and not all(part.proved_files for part in verified):
        print_note("only the structure was checked: drop --fast to read every byte")
    elif any(part.unchecked_bytes and not part.has_manifest and part.path not in deltas for part in verified):
        print_note("unchecked bytes have no checksum: run `ckptkit manifest` to record checksums for later checks")


def report_comparison(verified: Sequence[Verified]) -> None:
    """Print whether the checkpoints are equal to the one of --against, and each note once."""
    pairs = [part.compared for part in verified if part.compared is not None]
    for pair in pairs:
        equal = "are the same" if pair.has_same_entries else "differ"
        print_text_line(
            f"{count(pair.tensors, 'tensor')}, {format_bytes(pair.nbytes)}, of {pair.a} and {pair.b} {equal}"
        )
        if not pair.has_same_entries:
            print_note(f"hint: {command_line('diff', pair.a, pair.b)} says by how much they differ")
    for text in dict.fromkeys(text for pair in pairs for text in pair.notes):
        print_note(f"note: {text}")


def report_suspicious_tensors(tensors: Sequence[TensorStats]) -> None:
    """Print the tensors with NaN, Inf, denormal or constant values, which are suspicious but not a problem."""
    rows = []
    for tensor in tensors:
        counts = [tensor.nan, tensor.inf, tensor.denormal]
        if any(counts) or tensor.is_constant or tensor.is_all_zero:
            constant = f"{tensor.low:g}" if tensor.is_constant and tensor.low is not None else ""
            constant = "0" if tensor.is_all_zero else constant
            rows.append((*(number or "" for number in counts), constant, tensor.spec, tensor.name))
    if rows:
        print_table(rows, ("NaN", "Inf", "denormal", "all", "", "tensor"))
    print_text_line(
        f"{count(len(rows), 'tensor')} of {len(tensors):,} with NaN, Inf, denormals, or all numbers the same"
    )
