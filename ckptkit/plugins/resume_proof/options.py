"""The options of `ckptkit smoke --command`, checked before anything starts."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ckptkit.errors import Usage
from ckptkit.settings import Help

_PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")  # not the shell's ${NAME}
_KNOWN = ("run", "steps", "save_every", "nproc", "checkpoint")


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """A training script to check: the command that runs it, and the values of its placeholders."""

    command: Annotated[
        str,
        Help(
            "Check that this training script resumes. Placeholders: {run} {steps} {save_every} {nproc} {checkpoint}.",
            "CMD",
        ),
    ]
    resume_with: Annotated[str | None, Help("What to append to the command to resume from {checkpoint}.", "ARGS")] = (
        None
    )
    steps: Annotated[int, Help("Step after which the script stops.", least=2)] = 8
    save_every: Annotated[int, Help("Steps between two checkpoints.", least=1)] = 4
    resume_nproc: Annotated[int | None, Help("Resume on this number of ranks, too.", least=1)] = None
    loss: Annotated[
        str | None,
        Help(
            "Where the losses are: a regular expression with one group, or FILE:KEY of JSON lines in {run}.", "PATTERN"
        ),
    ] = None
    time_limit: Annotated[int, Help("Stop each run of the script after this number of seconds.", least=1)] = 600
    keep: Annotated[bool, "Keep the runs of the script and the changed checkpoints."] = False

    def __post_init__(self) -> None:
        check_template_placeholders(self.command, "--command")
        check_template_placeholders(self.resume_with or "", "--resume-with")
        if "{run}" not in self.command:
            hint = "write {run} where the script takes its output directory"
            raise Usage("--command: expected the placeholder {run}, found none", hint=hint)
        if self.steps <= self.save_every or self.steps % self.save_every:
            message = f"--steps: expected a multiple of {self.save_every} (--save-every) above it, found {self.steps}"
            raise Usage(message, hint="pass twice the value of --save-every")
        if self.loss is None or ("(" not in self.loss and all(self.loss.rpartition(":")[::2])):  # none, or FILE:KEY
            return
        try:
            groups = re.compile(self.loss).groups
        except re.error as error:
            raise Usage(f"--loss: expected a regular expression, found {self.loss!r}: {error}") from None
        if groups != 1:
            hint = r"write `loss ([0-9.]+)`, or FILE:KEY for JSON lines"
            raise Usage(f"--loss: expected a pattern with one group, found {groups} in {self.loss!r}", hint=hint)

    def command_line(self, run: Path, nproc: int, checkpoint: Path | None) -> str:
        """Return the command with its placeholders filled in; to resume if there is a checkpoint."""
        template = f"{self.command} {self.resume_with}" if checkpoint and self.resume_with else self.command
        values = {"run": run, "steps": self.steps, "save_every": self.save_every, "nproc": nproc}
        values |= {"checkpoint": checkpoint or ""}
        return _PLACEHOLDER.sub(lambda match: shlex.quote(str(values[match[1]])), template)

    @property
    def has_nproc_placeholder(self) -> bool:
        """Return whether the command takes the number of ranks; else only the script knows it."""
        return "{nproc}" in self.command

    @property
    def is_resuming_by_itself(self) -> bool:
        """Return whether the script finds the checkpoint in its run directory."""
        return "{checkpoint}" not in f"{self.command} {self.resume_with}"

    @property
    def find_loss_file_and_key(self) -> tuple[str, str] | None:
        """Return the file in the run, and the key in its lines, that the losses are read from; None for a pattern."""
        if self.loss is None or "(" in self.loss:
            return None
        file, _, key = self.loss.rpartition(":")
        return file, key


def check_template_placeholders(template: str, option: str) -> None:
    for match in _PLACEHOLDER.finditer(template):
        if match[1] not in _KNOWN:
            known = ", ".join(f"{{{name}}}" for name in _KNOWN)
            raise Usage(f"{option}: expected a placeholder of {known}, found {match[0]}")
