"""Run `ckptkit doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.options import Also, checkpoint_argument, join_also_directories, with_options
from ckptkit.cli.output import Json, pick, print_json, print_note, print_table, print_text_line
from ckptkit.errors import Usage
from ckptkit.io.destination import is_on_hub
from ckptkit.settings import Setting
from ckptkit.words import format_number_ranges

if TYPE_CHECKING:
    from ckptkit.plugins.doctor.doctor import Diagnosis

_ROWS = 20  # rows of the table without --all


_OPTIONS = {
    "model": Setting(str, None, "The model to load it into: a directory, a config.json, or a Hub id.", "MODEL"),
    "like": Setting(Path, None, "Compare with a checkpoint that your job can load.", "OTHER"),
    "world_size": Setting(int, None, "The number of ranks to load it with.", "N", 1),
    "fix": Setting(Path, None, "If one fix is certain to help, run it and write to OUT.", "OUT"),
}


@with_options(_OPTIONS, insert_before="every")
def doctor(
    ckpt: Annotated[Path, checkpoint_argument("CKPT")],
    every: Annotated[bool, typer.Option("--all", help="List every finding.")] = False,
    also: Also = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Find what breaks when you load a checkpoint, and fix it.

    doctor compares a checkpoint with the model, the number of ranks or the other checkpoint that you pass: names,
    shapes, optimizer states and groups, and the state of single ranks. It reads only metadata, and a tied head with its
    embedding. --fix drops nothing and guesses nothing: if a fix is not certain, doctor only suggests it. CKPT does not
    change.

    Example: ckptkit doctor run/ckpt-500 --model org/model --world-size 16

    Exit codes: 0 nothing will break (with --fix: in OUT); 1 findings, each with the command that fixes it, if there is
    one; 2 usage; 3 not a checkpoint; 4 an I/O failure; 5 OUT exists.
    """
    from ckptkit.plugins.doctor.doctor import doctor as examine

    if is_on_hub(options["fix"]):
        hint = "run `ckptkit doctor CKPT`, then the command that it names, with --yes"
        raise Usage("--fix does not write to the Hub", path=options["fix"], hint=hint)
    diagnosis = examine(join_also_directories(ckpt, also), **options)
    if json:
        print_json(to_json(diagnosis))
    else:
        report(diagnosis, every=every)
        if diagnosis.fixed:
            print_text_line(f"wrote {diagnosis.fixed.path}, which is now:")
            report(diagnosis.fixed, every=every)
    if not diagnosis.is_ok:
        raise typer.Exit(1)


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    findings = [pick(finding, "code", "tensor", "message", "fix", "count", "names") for finding in diagnosis.findings]
    fixed = {"fixed_by": str(diagnosis.fixed_by), "fixed": to_json(diagnosis.fixed)} if diagnosis.fixed else {}
    common = {"ok": diagnosis.is_ok, **pick(diagnosis, "path", "notes"), "not_read": "tensors"}
    return {**common, "findings": findings, **fixed}


def report(diagnosis: Diagnosis, *, every: bool) -> None:
    """Print the findings as a numbered table, and below it the commands that fix them, by number."""
    for text in diagnosis.notes:
        print_note(f"note: {text}")
    shown = diagnosis.findings if every else diagnosis.findings[:_ROWS]
    if shown:
        rows = [(number, finding.code, finding.line) for number, finding in enumerate(shown, 1)]
        print_table(rows, ("", "finding", "tensor: problem"))
    if len(shown) < len(diagnosis.findings):
        print_text_line(f"... {len(diagnosis.findings) - len(shown):,} more: --all lists them")
    fixes = dict.fromkeys(finding.fix for finding in shown if finding.fix)
    for fix in fixes:
        verb = "ran, to fix" if diagnosis.fixed and fix == str(diagnosis.fixed_by) else "fixes"
        print_text_line(
            f"{verb} {format_number_ranges(i for i, finding in enumerate(shown, 1) if finding.fix == fix)}: {fix}"
        )
    if len(fixes) > 1:
        print_note("hint: run one of them, then run `ckptkit doctor` on its output")
    print_text_line(diagnosis.verdict)
    print_note(diagnosis.not_read)
