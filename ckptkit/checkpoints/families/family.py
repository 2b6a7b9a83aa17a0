"""Describe a family of names: what its names are like, and how they and the Hub's become one another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ckptkit.checkpoints.families.rule import Rule, outline_of
from ckptkit.checkpoints.families.sizes import Sizes
from ckptkit.checkpoints.families.translate import Translated, translate
from ckptkit.layout import StoredTensor


@dataclass(frozen=True, kw_only=True)
class Family:
    """The names that a library gives to a model's tensors, as a table of rules against the Hub's.

    `tells` are patterns of names, with `#` for numbers, by one of which it is known; `drops` those of entries that the
    Hub has not. `rules` gives the table for a model of some sizes and type, and raises `Unsupported` for one that it
    has none for. `trainer` is who writes such names, if others share them.
    """

    name: str
    tells: tuple[str, ...]
    rules: Callable[[Sizes], tuple[Rule, ...]]
    drops: tuple[str, ...] = ()
    trainer: str | None = None

    @cached_property
    def tell(self) -> re.Pattern[str]:
        """Return the pattern of a name by which it is known."""
        return re.compile("|".join(self.tells))

    @cached_property
    def drop(self) -> re.Pattern[str]:
        """Return the pattern of a name that the Hub has not."""
        return re.compile("|".join(self.drops) or r"(?!)")

    def is_told_by(self, outlines: Iterable[str]) -> bool:
        """Return whether one of some names, with `#` for numbers, is this family's."""
        return any(map(self.tell.fullmatch, outlines))

    def to_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        """Return the tensors as the Hub has them; without those that it has not, which are `unplaced` too."""
        return translate(tensors, self.rules(sizes), sizes)

    def from_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        """Return tensors of the Hub as this family has them."""
        return translate(tensors, self.rules(sizes), sizes, to_hub=False)

    def drops_name(self, name: str) -> bool:
        """Return whether the Hub has no tensor like the one of this name."""
        return bool(self.drop.fullmatch(outline_of(name)[0]))
