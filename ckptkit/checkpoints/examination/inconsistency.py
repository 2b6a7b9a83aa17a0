"""An inconsistency: entries of a checkpoint that contradict each other, as a code and data. Messages are built last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from ckptkit.errors import Mismatch, and_more


class Certainty(IntEnum):
    """How certain it is that an inconsistency is a fault."""

    NOTE = 0  # not a fault, but matters for some uses of the checkpoint
    LIKELY = 1  # loaders fail or miss entries, unless the model differs from what the checkpoint shows
    CERTAIN = 2  # no model and optimizer can have these entries


_NOTE, _LIKELY, _CERTAIN = Certainty
_PREFIX_OF = "names have the prefix `{prefix}` (added by {whose})"
_NO_STATES = "a load by the weights' names finds no states"
_LOST_SETTINGS = "torch's `set_optimizer_state_dict` loses its settings, and the next step fails with a KeyError"
_TRAIN_MODE = "expected `train_mode` False in a schedule-free optimizer, found True"
_NO_AVERAGE = "{averaged} of {total} weights are those for training, not the averaged weights for evaluation"
_WORDS: Mapping[str, tuple[Certainty, str]] = {
    "state_shape": (_CERTAIN, "expected shape {expected} of its parameter, found {found}"),
    "state_size": (_CERTAIN, "expected the shape of a parameter, as {others} other states have, found {found}"),
    "foreign_states": (
        _LIKELY,
        "expected states with the shapes of the weights, found other shapes for {unfit} of {total} parameters",
    ),
    "state_kinds": (_CERTAIN, "expected the states {expected} of this parameter, found only {found}"),
    "prefixed_state": (
        _LIKELY,
        f"the optimizer's names have the prefix `{{prefix}}`, and the weights' names do not: {_NO_STATES}",
    ),
    "prefixed_weight": (
        _LIKELY,
        f"the weights' names have the prefix `{{prefix}}`, and the optimizer's names do not: {_NO_STATES}",
    ),
    "unknown_parameter": (_LIKELY, "no weight has this name; {unknown} of the optimizer's {total} names are unknown"),
    "listed_twice": (_LIKELY, "the optimizer's groups list this parameter {times} times"),
    "unlisted_state": (_LIKELY, "the optimizer has a state for this parameter, but no group contains the parameter"),
    "wrapped_state": (_LIKELY, f"the optimizer's {_PREFIX_OF}, and the weights' names do not: {_NO_STATES}"),
    "wrapped_weight": (_LIKELY, f"the weights' {_PREFIX_OF}, and the optimizer's names do not: {_NO_STATES}"),
    "empty_group": (_LIKELY, f"group {{number}} is without parameters: {_LOST_SETTINGS}"),
    "empty_weight": (_CERTAIN, "expected elements as in the other weights, found shape {found}"),
    "empty_tensor": (_LIKELY, "expected elements as in the other weights, found shape {found}"),
    "layer_gap": (_LIKELY, "expected {expected} numbered modules from 0, found no tensors for {missing}"),
    "layer_lacks": (_LIKELY, "expected the tensor as in the other {others} layers, not found"),
    "layer_differs": (_LIKELY, "expected {expected} as in the other {others} layers, found {found}"),
    "bias": (_LIKELY, "expected {expected} elements, one for each row of its weight, found {found}"),
    "experts": (_LIKELY, "expected {expected} experts as `{other}` has, found {found}"),
    "router": (_LIKELY, "expected {expected} rows, one for each expert, found {found}"),
    "head": (_NOTE, "expected {expected} rows as in `{embedding}`, found {found}; fine if some tokens are input only"),
    "other_step": (
        _LIKELY,
        "expected step {taken} (`global_steps`, without skipped ones), found another: two saves, or a new optimizer",
    ),
    "training_point": (_NOTE, f"{_TRAIN_MODE}: {_NO_AVERAGE}; call `optimizer.eval()` before the save"),
}


@dataclass(frozen=True, slots=True)
class Inconsistency:
    """A contradiction in a checkpoint: `code` is the kind of contradiction, `data` has its names and numbers.

    `tensor` is the entry at fault, with `*` in place of numbers if `names` lists several entries. It is None if no
    single entry is at fault.
    """

    code: str
    tensor: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def certainty(self) -> Certainty:
        return _WORDS[self.code][0]

    @property
    def message(self) -> str:
        return _WORDS[self.code][1].format(**self.data)

    def to_error(self, path: Path) -> Mismatch:
        return Mismatch(f"{self.message}{and_more(len(self.names) - 1)}", path=path, tensor=self.tensor)

    @property
    def message_with_tensor(self) -> str:
        """Return the message with the tensor's name and the number of further entries."""
        more = and_more(len(self.names) - 1)
        return f"`{self.tensor}`{more}: {self.message}" if self.tensor else self.message
