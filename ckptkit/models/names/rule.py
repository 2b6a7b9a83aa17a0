"""Rules: how the tensors of a family are named and stacked, and how the same tensors are on the Hub.

Names have placeholders for their numbers: `layers.{layer}.attention.wq.weight`. If a placeholder is in the name of one
side only, the tensor of the other side has an axis for it, in front of its own axes: `layers.{layer}.moe.experts.w1`
contains all experts. Text in brackets is optional: in the name without this text, the tensor has an axis for the
placeholder in it (`layers[.{layer}].mlp.linear_fc2.weight`). ` | ` separates alternative names of a tensor; ckptkit
writes the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ckptkit.layout.renames import Numbers
from ckptkit.models.names.steps import Same, TensorStep

_CAPTURE = re.compile(r"\{([a-z]+)\}")
_OPTION = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name with `{}` in place of its numbers (`text`), and the names of its placeholders (`captures`)."""

    text: str
    captures: tuple[str, ...]

    @property
    def outline(self) -> str:
        """Return the name with `#` for every number, for comparison with `mask_numbers`."""
        return self.text.replace("{}", "#")

    def format_name(self, numbers: Numbers) -> str:
        return self.text.format(*numbers)


def alternative_patterns(text: str) -> Iterator[Pattern]:
    """Yield each alternative name in the text of a rule; the first is the one that is written."""
    for way in text.split(" | "):
        pieces = _OPTION.split(way)  # every second piece is optional
        for kept in product(*(((piece, "") if i % 2 else (piece,)) for i, piece in enumerate(pieces))):
            name = "".join(kept)
            yield Pattern(_CAPTURE.sub("{}", name), tuple(_CAPTURE.findall(name)))


@dataclass(frozen=True, slots=True)
class Rule:
    """The names of tensors of the family, the names that they have on the Hub, and the step that converts the tensors.

    `flat` is the placeholder whose items are blocks along the first axis of the family's tensor, such as "experts";
    "" if every placeholder has an axis of its own.
    """

    family: tuple[str, ...]
    hub: tuple[str, ...]
    step: TensorStep = Same()  # noqa: RUF009 - a step has no state
    flat: str = ""

    @classmethod
    def of(
        cls, family: str | tuple[str, ...], hub: str | tuple[str, ...], step: TensorStep | None = None, flat: str = ""
    ) -> Rule:
        """Return a rule; a single name may be given as a string."""
        return cls(as_tuple(family), as_tuple(hub), step or Same(), flat)


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def weight_and_bias_rules(
    family: str | tuple[str, ...], hub: str | tuple[str, ...], step: TensorStep | None = None
) -> Iterator[Rule]:
    """Yield the rule for the weight of a module, given by the module's name, and the rule for its bias."""
    for leaf in (".weight", ".bias"):
        own, hub_names = (
            tuple(" | ".join(f"{way}{leaf}" for way in name.split(" | ")) for name in as_tuple(side))
            for side in (family, hub)
        )
        yield Rule(own, hub_names, step or Same())
