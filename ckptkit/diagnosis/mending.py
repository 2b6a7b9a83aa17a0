"""Choose the commands by which findings are mended: as few as can do it, and none that would be refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.diagnosis.commands import SHARDS
from ckptkit.diagnosis.finding import Finding, group
from ckptkit.diagnosis.one_command import Command, join_all
from ckptkit.diagnosis.trial import refusal
from ckptkit.errors import CkptError


@dataclass(frozen=True, slots=True)
class Mended:
    """The findings with the commands that mend them, and words on those that no command mends."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def settle(findings: Iterable[Finding], checkpoint: Checkpoint) -> Mended:
    """Return findings with those as one that say the same, and the fewest commands that are not refused."""
    found = group(findings)
    if any(one.code == "other_model" for one in found):  # which no command makes the model that is wanted
        return Mended(tuple(replace(one, fix=None) for one in found))
    own = {fix: Command.of(fix) for one in found if (fix := one.fix)}
    joint = join_all(own.values(), is_sharded=checkpoint.model_part.reader.name == SHARDS)
    trials = Trials(checkpoint, {})
    settled = {fix: trials.first(joint[one], one) for fix, one in own.items()}
    refused = {fix: error for fix, one in own.items() if settled[fix] is None and (error := trials.errors[one])}
    notes = tuple(f"`{fix}` would end with: {error.message}" for fix, error in refused.items())
    return Mended(tuple(replace(one, fix=settled[one.fix]) if one.fix else one for one in found), notes)


@dataclass(frozen=True, slots=True)
class Trials:
    """The commands that were tried, each once, and the errors of those that would be refused."""

    checkpoint: Checkpoint
    errors: dict[Command, CkptError | None]

    def first(self, *commands: Command) -> str | None:
        """Return the first of commands, or of what does nearly the same, that is not refused; None if all are."""
        wanted = (other for one in commands for other in (one, *one.others()))
        return next((str(one) for one in wanted if self.admits(one)), None)

    def admits(self, one: Command) -> bool:
        """Return whether a command is not refused."""
        if one not in self.errors:
            self.errors[one] = refusal(one, self.checkpoint)
        return self.errors[one] is None
