"""Say which tensors have other names where they are to be loaded, and the command that renames them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.diagnosis.finding import Finding
from ckptkit.diagnosis.fix import rewrite
from ckptkit.layout.renames import by_change


def say_renamed(
    checkpoint: Checkpoint, pairs: Mapping[str, str], rules: Sequence[str] | None, whose: str, base: str | None = None
) -> Iterator[Finding]:
    """Yield the tensors that `whose` names differ for, the new names by the old in `pairs`: a finding for each change.

    `rules` are those that rename them all, None if no few do.
    """
    fix = rewrite(checkpoint, rename=tuple(rules), base=base) if rules else None
    for line, members in by_change(pairs):
        yield Finding("renamed", line.old, f"{whose} uses the name `{line.new}`", fix, members)
