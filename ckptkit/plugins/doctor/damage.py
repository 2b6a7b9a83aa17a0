"""Find damage: missing files, an unfinished save, gaps, too new metadata, and entries that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ckptkit.adapters.find import EMPTY
from ckptkit.checkpoints.checkpoint import Checkpoint, step_checkpoints_in_run
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.examination.facts import Certainty
from ckptkit.checkpoints.problems import Problems
from ckptkit.checks.verify import verify_component
from ckptkit.errors import CkptError, Corrupt, IOFailure, Unsafe, Unsupported
from ckptkit.io.path import is_remote, restore_relative_path
from ckptkit.plugins.doctor.finding import Finding, consolidate_fix, rewrite_fix
from ckptkit.plugins.doctor.load_target import LoadTarget
from ckptkit.runs.ls import make_listing_entry

Damage = Mapping[Path, Sequence[CkptError]]


def problems_by_component(checkpoint: Checkpoint) -> Damage:
    """Return the problems of each component of a checkpoint, by its path.

    Reads what `verify --fast` reads, but only the metadata of a component in an object store without a manifest. Leaves
    out that an adapter is empty: `find_empty_adapter` says more about it. Raises `IOFailure` if a component could not
    be checked.
    """
    problems_by_path: dict[Path, Sequence[CkptError]] = {}
    for part in checkpoint.components:
        if is_remote(part.path) and not part.has_manifest:
            problems_by_path[part.path] = problems_reading_component(part)
        else:
            problems = verify_component(part.path, fast=True).problems
            problems_by_path[part.path] = [problem for problem in problems if problem.code != EMPTY]
    problems_by_path |= {path: [Corrupt("no known format", path=path)] for path in checkpoint.strange}
    for problem in (problem for problems in problems_by_path.values() for problem in problems):
        if isinstance(problem, IOFailure):
            raise problem
    return {path: problems for path, problems in problems_by_path.items() if problems}


def problems_reading_component(component: Component) -> Sequence[CkptError]:
    """Return the reasons why a component cannot be read, () if it can."""
    problems = Problems()
    try:
        _ = component.layout
    except (Corrupt, Unsafe, Unsupported) as error:
        try:
            component.reader.read(component.path, problems.add)
        except (Corrupt, Unsafe, Unsupported) as reason:
            problems.add(reason)
        if not problems.all_problems():
            problems.add(error)
    return problems.all_problems()


def find_damage(checkpoint: Checkpoint, damage: Damage, model: str | Path | None) -> Iterator[Finding]:
    """Yield each damaged or missing file, and name another complete checkpoint of the run, if there is one.

    A salvage does not restore a lost config.json or tokenizer: for those the fix copies them from `model`, if given.
    """
    complete = find_other_complete_checkpoint(checkpoint) if damage else None
    fix = rewrite_fix(checkpoint, salvage=True, fill_from=complete) if damage else None
    copy = consolidate_fix(checkpoint, base=str(model)) if damage and model is not None else None
    other = f"; {complete.name} beside it is complete" if complete else ""
    for problem in (problem for problems in damage.values() for problem in problems):
        root, path = checkpoint.path, problem.path
        is_inside = path is not None and path != root and path.is_relative_to(root)
        where = "" if path is None else f"{path.relative_to(root) if is_inside else path}: "
        hint = f" ({problem.hint})" if problem.hint else ""
        message = f"{where}{problem.message}{hint}{other}"
        is_model_file = (  # such as config.json: a JSON file without tensors or metadata
            path is not None
            and path.suffix == ".json"
            and path.parent in [part.path for part in checkpoint.components]
            and not any(part.reader.owns_file(path.name) for part in checkpoint.components)
        )
        chosen_fix = copy if is_model_file else fix
        yield Finding(problem.code, problem.tensor, message, chosen_fix if isinstance(problem, Corrupt) else None)


def find_other_complete_checkpoint(checkpoint: Checkpoint) -> Path | None:
    """Return the latest other checkpoint of the run that is complete; None if there is none."""
    if checkpoint.step_in_name is None:
        return None
    try:
        others = reversed(
            step_checkpoints_in_run(restore_relative_path(checkpoint.path, checkpoint.path.absolute().parent))
        )
        listed = (make_listing_entry(other) for other in others if other.name != checkpoint.name)
        return next((other.path for other in listed if other.is_complete), None)
    except IOFailure:
        return None


def find_unreadable_torch_metadata(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if a later torch wrote the metadata and the installed torch fails to read it."""
    try:
        own = version("torch")  # without importing it
    except PackageNotFoundError:
        return
    for component in target.checkpoint.components:
        needed = component.reader.least_torch_version(component.path)
        if needed is not None and version_numbers(own) < version_numbers(needed):
            message = f"torch {needed} or later wrote the metadata, and torch {own} fails on it with a ValueError"
            yield Finding("torch_version", None, message, rewrite_fix(target.checkpoint))
            return


def version_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("+", maxsplit=1)[0].split(".")[:2] if number.isdecimal())


# if the model is known, `find_names` reports each tensor
_BY_NAME = frozenset(["layer_gap", "layer_lacks", "empty_weight"])
_BY_SHAPE = frozenset(["bias"])  # likewise `find_shapes`


def find_inconsistencies(target: LoadTarget) -> Iterator[Finding]:
    """Yield the entries that contradict the rest of the checkpoint, with the command that removes a wrong prefix."""
    for inconsistency in target.inconsistencies:
        code, prefix = inconsistency.code, re.escape(inconsistency.data.get("prefix", ""))
        is_reported = target.key_mismatch is not None and (
            code in _BY_SHAPE or (code in _BY_NAME and bool(target.key_mismatch.missing))
        )
        if is_reported or inconsistency.certainty <= Certainty.NOTE:
            continue
        fix = None
        if code in ("wrapped_state", "wrapped_weight"):
            fix = rewrite_fix(target.checkpoint, rename=(rf"(^|\.){prefix}=>\1",))
        elif code == "prefixed_state":
            fix = rewrite_fix(target.checkpoint, rename=(rf"^{prefix}=>",))
        yield Finding(code, inconsistency.tensor, inconsistency.message, fix, inconsistency.names)
