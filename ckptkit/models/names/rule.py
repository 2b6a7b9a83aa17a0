"""Say how tensors of a family are called and folded, and how the same are on the Hub. Rules are data.

A name is written with its numbers in braces: `layers.{layer}.attention.wq.weight`. A number that stands on one side
only is an axis on the other, in front of the tensor's own: `layers.{layer}.moe.experts.w1` has all experts in it. What
stands in brackets may be missing, and its number is such an axis then: `layers[.{layer}].mlp.linear_fc2.weight`.
Several ways to call one tensor are told apart by ` | `; the first is the one that is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ckptkit.models.names.steps import Same, TensorStep

# a step of a name that is a number, or one at the end of `weight` or `bias`, as experts in one module have it
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])|(?:(?<=\.weight)|(?<=\.bias))[0-9]{1,9}(?![^._])")

Numbers = tuple[int, ...]


def outline_of(name: str) -> tuple[str, Numbers]:
    """Return a name with `#` for every number that is a step of it, or ends `weight` or `bias`, and these numbers."""
    return _NUMBER.sub("#", name), tuple(map(int, _NUMBER.findall(name)))


_CAPTURE = re.compile(r"\{([a-z]+)\}")
_OPTION = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name with `captures`, what its numbers count, in place of the numbers; `text` has `{}` there."""

    text: str
    captures: tuple[str, ...]

    @property
    def outline(self) -> str:
        """Return the name with `#` for every number: what the outline of a matching name is equal to."""
        return self.text.replace("{}", "#")

    def name(self, numbers: Numbers) -> str:
        return self.text.format(*numbers)


def patterns_of(text: str) -> Iterator[Pattern]:
    """Yield each way to call a tensor that a text of a rule gives, the one that is written first."""
    for way in text.split(" | "):
        pieces = _OPTION.split(way)  # every second one may be missing
        for kept in product(*(((piece, "") if i % 2 else (piece,)) for i, piece in enumerate(pieces))):
            name = "".join(kept)
            yield Pattern(_CAPTURE.sub("{}", name), tuple(_CAPTURE.findall(name)))


@dataclass(frozen=True, slots=True)
class Rule:
    """The tensors of the family that become, by a step, those of the Hub: a text for each.

    Where a number counts what lies one below the other in the first axis of the family's tensor, and has no axis of its
    own there, `flat` is the symbol for how many there are.
    """

    family: tuple[str, ...]
    hub: tuple[str, ...]
    step: TensorStep = Same()  # noqa: RUF009 - a step has no state
    flat: str = ""

    @classmethod
    def of(
        cls, family: str | tuple[str, ...], hub: str | tuple[str, ...], step: TensorStep | None = None, flat: str = ""
    ) -> Rule:
        """Return a rule, for which one name may stand alone."""
        return cls(as_tuple(family), as_tuple(hub), step or Same(), flat)


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def with_bias(
    family: str | tuple[str, ...], hub: str | tuple[str, ...], step: TensorStep | None = None
) -> Iterator[Rule]:
    """Yield the rule for the weight of a module, given by its name, and the one for its bias."""
    for leaf in (".weight", ".bias"):
        own, there = (tuple(add_to_each(name, leaf) for name in as_tuple(side)) for side in (family, hub))
        yield Rule(own, there, step or Same())


def add_to_each(text: str, end: str) -> str:
    return " | ".join(way + end for way in text.split(" | "))
