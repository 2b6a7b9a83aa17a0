"""Prove that a training script resumes: make every check in order, and write a card of the proof.

The card is for a recipe: command, versions, tolerance, checks.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ckptkit
from ckptkit.checkpoints.checkpoint import find_latest
from ckptkit.checks.verify import verify
from ckptkit.conversion.convert import consolidate, convert, reshard
from ckptkit.errors import Unsupported
from ckptkit.plugins.resume_proof.checks import CHECKS, NEEDED
from ckptkit.plugins.resume_proof.compare import GroupDifference, group_differences
from ckptkit.plugins.resume_proof.execute import execute_command
from ckptkit.plugins.resume_proof.options import ScriptOptions
from ckptkit.plugins.resume_proof.restored import restored_checks
from ckptkit.plugins.resume_proof.runs import COPIES, LOGS, RUNS, Runs, checkpoints_by_step, files_of_checkpoint
from ckptkit.plugins.resume_proof.states import DATA, MOMENTS, RANDOM, WEIGHTS, list_damage, read_checkpoint_contents
from ckptkit.trainers.table import TRAINERS
from ckptkit.training.smoke.run_check import Check, CheckFailed, CheckSkipped, run_check
from ckptkit.version import __version__
from ckptkit.words import count

_RESULTS = {True: "passed", False: "**failed**", None: "skipped"}
_SUMS = 1e-3  # relative: how far sums in another order may drive the tensors of two equal runs apart in some steps
_MOMENTS_OF_SAVING = (0, 0.5, 1)  # shares of a checkpoint's files: at the first file, at half of them, at the last
_RANK_STATE = "restore a state of each rank only on the same number of ranks, and make it anew on another"
_CONFIG = "config.json"
_AFTER = "write it after the save"
_BROKEN = {  # remarks on what `latest` names, and what to do; it names nothing if it was opened, and not yet written
    "which is not complete": _AFTER,
    "which does not exist": _AFTER,
    "names no checkpoint": "write it to another file, and rename that file",
}
_RENAME = "save to a directory with another name, and rename it at the end"


def prove_script(
    script: ScriptOptions, run: Path, out: Path, nproc: int, report: Callable[[Check], None] = lambda _: None
) -> list[Check]:
    """Return the checks of a script, each reported when it is done.

    `run` gets the logs and the card `resume.md`, `out` the export.
    """
    remove_directories(run, RUNS, COPIES, LOGS)  # what an earlier proof has kept would be taken for new checkpoints
    runs = Runs(script, run, out, nproc)
    checks: list[Check] = []

    def make(name: str, look: Callable[[Runs], str]) -> bool:
        def look_or_skip() -> str:
            try:
                return look(runs)
            except Unsupported as error:  # no fault of the script, unless nothing else can be checked without it
                if name in NEEDED:
                    raise
                raise CheckSkipped(f"ckptkit cannot check it: {error.line}") from None

        checks.append(run_check(name, look_or_skip))
        report(checks[-1])
        return checks[-1].ok is not False or name not in NEEDED

    try:
        if all(make(name, look) for name, look in CHECKS.items()):
            further = {
                **restored_checks(runs),
                "another world size": check_resume_at_other_size,
                "one file and back": check_one_file_and_back,
                **kill_survival_checks(runs),
                "export": check_export_matches_checkpoint,
            }
            for name, look in further.items():
                make(name, look)
    finally:
        if not script.keep:
            remove_directories(run, RUNS, COPIES)
    write_card(run / "resume.md", runs, checks)
    return checks


def remove_directories(root: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(root / name, ignore_errors=True)


def write_card(path: Path, runs: Runs, checks: Sequence[Check]) -> None:
    script, failed = runs.script, [check.name for check in checks if check.ok is False]
    verdict = f"failed: {', '.join(failed)}" if failed else "all checks passed"
    if not any(check.name == "deterministic" and check.ok for check in checks):
        tolerance = "not measured"
    elif runs.control_tolerance.is_exact:
        tolerance = "none: bit for bit"
    else:
        tolerance = f"4 x {runs.control_tolerance.largest:.2g} (relative)"
    versions = [f"ckptkit {__version__}", f"Python {platform.python_version()}"]
    for name in dict.fromkeys(("torch", *TRAINERS)):
        with suppress(PackageNotFoundError):  # most environments have only some
            versions.append(f"{name} {version(name)}")
    facts = [
        ("verdict", verdict),
        ("command", f"`{script.command}`"),
        *([("resume with", f"`{script.resume_with}`")] if script.resume_with else []),
        *([("ranks", str(runs.nproc))] if script.has_nproc_placeholder else []),
        ("steps", f"{script.steps}, saved every {script.save_every}"),
        ("tolerance", tolerance),
        ("versions", ", ".join(versions)),
    ]
    lines = [
        "# Resume proof",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {escape_table_cell(text)} |" for name, text in facts),
        "",
    ]
    lines += ["| check | result | seconds | detail |", "|---|---|---|---|"]
    lines += [
        f"| {one.name} | {_RESULTS[one.ok]} | {one.seconds:.1f} | {escape_table_cell(one.detail)} |" for one in checks
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def escape_table_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def check_resume_at_other_size(runs: Runs) -> str:
    """Check that a resharded checkpoint resumes on another number of ranks, and ends near the uninterrupted run.

    That is only so if the global batch does not depend on the number of ranks, which a run from the beginning tells.
    """
    size = runs.script.resume_nproc
    if size is None or size == runs.nproc or not runs.script.has_nproc_placeholder:
        raise CheckSkipped("no other number of ranks: pass --resume-nproc, and {nproc} in --command")
    ranks = count(size, "rank")
    with runs.deleted_afterwards("resharded"), runs.deleted_afterwards("other-size"):
        source = convert_middle_checkpoint(
            runs, "resharded-source", lambda target: reshard(runs.middle_path, target, to=size)
        )
        resumed = runs.resume_run("resharded", source=source, nproc=size)
        shutil.rmtree(source, ignore_errors=True)
        names = (name for group in (RANDOM, DATA) for name in runs.middle_state.names_in(group))
        is_of_rank = not resumed.is_done and is_about_rank_state(resumed.describe_failure(), names)
        runs.require_resumed(resumed, f"on {ranks}", hint=f"; hint: {_RANK_STATE}" if is_of_rank else "")
        state = runs.state_at_end(resumed)
        if runs.has_other_weights:
            why = f"on {count(runs.nproc, 'rank')} the resumed run differs, too"
            raise CheckSkipped(f"resumes on {ranks}; the result was not compared, because {why}")
        control = runs.start_run("other-size", nproc=size)
        runs.require_success(control, f"the script does not run on {ranks}")
        groups = (WEIGHTS, MOMENTS)
        expected = largest_distance(group_differences(runs.last_state, runs.state_at_end(control), groups=groups))
        found = largest_distance(group_differences(runs.last_state, state, groups=groups))
        if expected > _SUMS:
            why = f"depends on the number of ranks (from the beginning, too: {expected:.2g} relative)"
            raise CheckSkipped(f"resumes on {ranks}; the result {why}, so it was not compared")
        if found > 4 * max(expected, runs.control_tolerance.largest):
            differ = f"weights and moments differ by {found:.2g}, and by {expected:.2g} from the beginning"
            raise CheckFailed(f"on {ranks} {differ}: load every entry by its name and not by its rank")
    apart = f"differs by {found:.2g} (relative), from the beginning by {expected:.2g}"
    return f"{runs.nproc} to {ranks}: {apart}"


def is_about_rank_state(failure: str, names: Iterable[str]) -> bool:
    """Return whether an error names one of the entries with another number: `rng_3` where `rng_0` is one of the names.

    Each rank saves such a state under its own number, so a new rank finds none.
    """
    parts = {part for name in names for part in name.split(".")}
    words = [re.sub(r"\d+", r"\\d+", re.escape(part)) for part in parts if re.search(r"[a-z].*\d", part)]
    return any(re.search(rf"(?<!\w){word}(?!\w)", failure) for word in words)


def largest_distance(differences: list[GroupDifference]) -> float:
    return max((gap.distance for gap in differences), default=0.0)


def check_one_file_and_back(runs: Runs) -> str:
    """Check that the checkpoint, converted to one file and back, resumes as the original does."""
    formats = runs.middle_state.formats
    if formats != ("dcp",) or not (runs.middle_path / ".metadata").exists():
        raise CheckSkipped(f"made for a directory in DCP's format, found {' and '.join(formats)}")

    def there_and_back(target: Path) -> None:
        single = target.with_name(f"{target.name}-one-file")
        convert(runs.middle_path, single, to="pt")
        convert(single, target, to="dcp", world_size=runs.nproc)
        shutil.rmtree(single)

    with runs.deleted_afterwards("one-file"):
        source = convert_middle_checkpoint(runs, "one-file-source", there_and_back)
        resumed = runs.resume_run("one-file", source=source)
        shutil.rmtree(source, ignore_errors=True)
        runs.require_resumed(resumed, "from the converted checkpoint")
        gaps = group_differences(runs.resumed_state, runs.state_at_end(resumed), runs.control_tolerance)
        if gaps:
            raise CheckFailed(f"after the conversion differ {gaps[0].describe_difference()}: report this to ckptkit")
    return "dcp to pt to dcp: the resumed run ends with the same state"


def convert_middle_checkpoint(runs: Runs, label: str, write: Callable[[Path], object]) -> Path:
    """Return a converted middle checkpoint: what `write` writes, and the files beside it that no conversion copies."""
    target = runs.room / COPIES / label / runs.middle_path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    write(target)
    layouts = {
        tensor.layout.root / name for tensor in runs.middle_state.tensors.values() for name in tensor.layout.files
    }
    for file in files_of_checkpoint(runs.middle_path) if runs.middle_path.is_dir() else []:
        there = target / file.relative_to(runs.middle_path)
        if file not in layouts and not there.exists() and not file.name.startswith("."):
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, there)
    return target


def kill_survival_checks(runs: Runs) -> dict[str, Callable[[Runs], str]]:
    """Return a check for each moment at which the script is killed: numbers of files of the last checkpoint."""
    total = len(files_of_checkpoint(runs.checkpoint_paths[runs.script.steps]))
    moments = sorted({max(1, round(total * share)) for share in _MOMENTS_OF_SAVING})
    return {f"killed while saving {i}": partial(check_survives_kill, file_count=at) for i, at in enumerate(moments, 1)}


def check_survives_kill(runs: Runs, file_count: int) -> str:
    """Kill the script when the last checkpoint has the wanted number of files, and resume from the latest complete one.

    It must end as the resumed run, which may itself differ from the uninterrupted one.
    """
    last = runs.checkpoint_paths[runs.script.steps]
    if runs.overwrites_checkpoints:
        raise CheckSkipped(f"each save replaces {last.name}, so a kill can leave no complete one: {_RENAME}")
    total = len(files_of_checkpoint(last))
    label = f"killed-at-{file_count}"
    folder = runs.room / RUNS / label / last.relative_to(runs.uninterrupted.run).parent
    names = re.compile(rf"(?<!\d){runs.script.steps}(?!\d)")
    earlier = {path.name for path in runs.checkpoint_paths.values()} - {last.name}
    finished = {entry.name for entry in last.parent.iterdir()}
    seen = 0

    def is_saving() -> bool:
        """Return whether enough files are there: under a name with the step, or under one that a rename replaces."""
        nonlocal seen
        there: dict[str, Path] = {}
        with suppress(OSError):  # the script makes or renames the directory at this moment
            there = {entry.name: entry for entry in folder.iterdir()}
        hidden = there.keys() - finished - earlier if there.keys() >= earlier else set()
        seen = sum(
            len(files_of_checkpoint(entry)) for name, entry in there.items() if names.search(name) or name in hidden
        )
        return seen >= file_count

    with runs.deleted_afterwards(label):
        killed = runs.start_run(label, watch=is_saving)
        if killed.exit_code is not None:
            raise CheckSkipped(f"the save of {last.name} was over before the kill")
        when = f"at {min(seen, total)} of {count(total, 'file')}"  # a lock or a temporary file counts too
        found = find_latest(folder)
        broken = [(remark, hint) for remark in found.remarks for words, hint in _BROKEN.items() if words in remark]
        if broken:
            remark, hint = broken[0]
            raise CheckFailed(f"killed {when} of {last.name}: {remark.partition('; using')[0]}: {hint}")
        if found.checkpoint is None:
            kept, deleted = "save to a new directory", "delete older checkpoints only after a new save"
            hint = kept if runs.has_kept_first_checkpoint else deleted
            raise CheckFailed(f"killed {when}: no complete checkpoint is left: {hint}")
        step, path = found.checkpoint.step, found.checkpoint.path
        damage = list_damage(path)
        if damage:
            raise CheckFailed(f"killed {when}: {path.name} looks complete: {damage[0]}: {_RENAME}")
        again = execute_command(runs.script, killed.run, runs.log_path(f"{label}-resumed"), runs.nproc, checkpoint=path)
        if not again.is_done:
            what = f"{path.name} looks complete, and the script does not resume from it"
            raise CheckFailed(f"killed {when}: {what}: {_RENAME}; seen: {again.describe_failure()}")
        final = checkpoints_by_step(killed.run).get(runs.script.steps)
        if final is None:
            raise CheckFailed(f"killed {when}, and resumed from {path.name}: no checkpoint at the last step")
        # a resumed run that differs shows only how a resume from the same step ends
        is_comparable = not runs.group_differences or step == runs.script.save_every
        end = read_checkpoint_contents(final.path)
        gaps = group_differences(runs.resumed_state, end, runs.control_tolerance) if is_comparable else []
        if gaps:
            raise CheckFailed(f"killed {when}, and resumed from {path.name}: {gaps[0].describe_difference()}")
    return f"{when} of {last.name}: {path.name} is complete and resumes (step {step})"


def check_export_matches_checkpoint(runs: Runs) -> str:
    """Check that the last checkpoint consolidates, and that transformers computes the same if it has a config.json."""
    last = runs.checkpoint_paths[runs.script.steps]
    if not any((folder / _CONFIG).exists() for folder in (last, *last.parents[:2])):
        made = consolidate(last, runs.out, overwrite=True, names="keep")
        problems = [problem.line for part in verify(runs.out, against=last) for problem in part.problems]
        if problems:
            raise CheckFailed(problems[0])
        return f"{count(made.tensors, 'tensor')} in safetensors equal those of {last.name}; no {_CONFIG}, so no logits"
    consolidate(last, runs.out, overwrite=True)
    try:
        proved = ckptkit.prove(runs.out, against=last)
    except (Unsupported, ImportError) as error:
        raise CheckSkipped(f"exported, and the logits were not compared: {error}") from None
    if not proved.is_ok:
        raise CheckFailed("; ".join(proved.summary()))
    return f"the export computes the same as {last.name}: {count(proved.logits.tokens, 'token')}"
