"""A finding: what will break when a checkpoint is loaded, and the command that fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckptkit.diagnosis.fix import Fix
from ckptkit.layout.renames import fold

# the kinds whose fix loses nothing and guesses nothing
_CERTAIN = frozenset(
    ["index", "empty_entry", "config_dtype", "empty_adapter", "experts", "wrapper", "torch_version", "world_size"]
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A thing that will break, or go wrong without a word, when a checkpoint is loaded.

    `code` says what kind of thing, `tensor` what it is about, with `*` in place of numbers where that is several:
    `names` has each. It is None for a finding on the checkpoint as a whole. `fixed_by` is the command that fixes it as
    data, None if no command does.
    """

    code: str
    tensor: str | None
    message: str
    fixed_by: Fix | None = None
    names: tuple[str, ...] = ()

    @property
    def fix(self) -> str | None:
        """Return the command that fixes it as a line for a shell, None if no command does."""
        return None if self.fixed_by is None else str(self.fixed_by)

    @property
    def is_certain(self) -> bool:
        """Return whether its fix is certain to help: it loses nothing, guesses nothing, and the model's names fit."""
        return self.fixed_by is not None and self.code in _CERTAIN and ("names", "keep") not in self.fixed_by.options

    @property
    def line(self) -> str:
        """Return what the finding is about, how many tensors that are, and the message."""
        if self.tensor is None:
            return self.message
        return f"{self.tensor}{f' ({self.count:,})' if self.count > 1 else ''}: {self.message}"

    @property
    def count(self) -> int:
        """Return how many tensors and other entries it is about; 0 for the checkpoint as a whole."""
        return len(self.names) or int(self.tensor is not None)


def group(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings with those as one that say the same of every layer: `layers.*.q_proj.weight`."""
    found: dict[tuple[object, ...], list[Finding]] = {}
    for one in findings:
        name = None if one.tensor is None else fold(one.tensor)
        found.setdefault((one.code, name, one.message, one.fixed_by), []).append(one)
    return tuple(merge(alike) for alike in found.values())


def merge(alike: list[Finding]) -> Finding:
    """Return findings that say the same of tensors called alike as one."""
    first, *others = alike
    names = tuple(dict.fromkeys(name for one in alike for name in one.names or ((one.tensor,) if one.tensor else ())))
    if not others and not (first.names and first.tensor):
        return replace(first, names=names)
    return replace(first, tensor=fold(first.tensor) if first.tensor and len(names) > 1 else first.tensor, names=names)
