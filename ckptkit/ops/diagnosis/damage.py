"""Find what keeps a checkpoint from being read: missing ranks, an unfinished save, files of other nodes, gaps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, latest_in
from ckptkit.checkpoints.part import Part
from ckptkit.errors import CkptError, Corrupt, IOFailure, Unsafe, Unsupported
from ckptkit.ops.diagnosis.commands import command
from ckptkit.ops.diagnosis.finding import Finding

_GONE = re.compile(r"(files?|ranks?|`) (\S+ )?(is|are) missing|did not finish|no such file|there is no `|unfinished")
Damage = Mapping[Path, list[CkptError]]


def look_for_damage(checkpoint: Checkpoint) -> Damage:
    """Return what keeps each part of a checkpoint from being read, by its path, as far as metadata tell."""
    found = {part.path: problems_of(part) for part in checkpoint.parts}
    found |= {path: [Corrupt("no known format", path=path)] for path in checkpoint.strange}
    return {path: problems for path, problems in found.items() if problems}


def problems_of(part: Part) -> list[CkptError]:
    """Return what keeps a part from being read, [] if nothing does. A whole one is read once."""
    found: list[CkptError] = []
    report = found.append
    try:
        _ = part.layout
    except (Corrupt, Unsafe, Unsupported) as error:
        try:
            part.reader.read(part.path, report)
        except (Corrupt, Unsafe, Unsupported) as reason:
            report(reason)
        if not found:
            report(error)
    return found


def find_damage(checkpoint: Checkpoint, damage: Damage) -> Iterator[Finding]:
    """Yield what is damaged or missing, with another checkpoint of the run that is whole, if there is one."""
    older = find_whole(checkpoint) if damage else None
    fix = command("doctor", older) if older else None
    for problem in (problem for problems in damage.values() for problem in problems):
        where = "" if problem.path is None else f"{name_in(checkpoint.path, problem.path)}: "
        hint = f" ({problem.hint})" if problem.hint else ""
        yield Finding(code_of(problem), problem.tensor, f"{where}{problem.message}{hint}", fix)


def find_whole(checkpoint: Checkpoint) -> Path | None:
    """Return the latest checkpoint beside this one that is complete, None if there is none."""
    try:
        found = latest_in(checkpoint.path.absolute().parent)
    except IOFailure:
        return None
    return None if found is None or found.path.name == checkpoint.path.name else found.path


def code_of(problem: CkptError) -> str:
    """Return the code of a problem: what is not there at all is told apart from what is damaged."""
    return "incomplete" if _GONE.search(problem.message) else problem.code


def name_in(root: Path, path: Path) -> str:
    """Return what a file is called in a checkpoint; all of its path, if it lies elsewhere."""
    return str(path.relative_to(root)) if path != root and path.is_relative_to(root) else str(path)
