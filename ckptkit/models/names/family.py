"""Describe a family of names: what its names are like, and how they and the Hub's become one another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptkit.layout import Layout, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.models.names.rule import Rule, outline_of
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.translate import Translated, translate

if TYPE_CHECKING:
    from ckptkit.engine.arithmetic import Arithmetic  # most families compute nothing


@dataclass(frozen=True, kw_only=True)
class Family:
    """The names that a library gives to a model's tensors, as a table of rules against the Hub's.

    A name of its own tells it only if the tensor's shape does, by `tells_shape`. `drops` are patterns of entries that
    the Hub has not, with `#` for numbers. `rules` gives the table for a model of some sizes and one of the
    `types`, and raises `Unsupported` for any other. `check` holds what a whole checkpoint says of its model against
    these sizes, and raises `Mismatch` or `Unsupported`. `files` gives what lies beside such a model in DCP, by the
    step that it was saved at and its type; the types `told_by_files` cannot be read without them. `trainer` is who
    writes such names, if others share them. With a tied head (`has_tied_head`) there is a tensor for this too,
    which is the embedding; with None it is left as it is. `biased` is the pattern of modules that have to have a
    bias. Where there is no config.json, `config_of` makes one of what the `sizes_file` beside the weights says.
    `describe` returns what a whole checkpoint says of the computation, in keys of config.json.
    `written_as` gives the name for one that the rules write, where it differs by layer. `arithmetic` says by its name
    how the numbers of a tensor change on the way to the Hub. A family that `is_model_only` gives new names to weights
    alone: ckptkit does not know its optimizers.
    """

    name: str
    rules: Callable[[Sizes], tuple[Rule, ...]]
    types: tuple[str, ...] = ()
    tells_shape: Callable[[Shape], bool] = lambda _: True
    drops: tuple[str, ...] = ()
    check: Callable[[Layout, Sizes], None] = lambda _, __: None
    files: Callable[[int, str], Mapping[str, bytes]] = lambda _, __: {}
    told_by_files: tuple[str, ...] = ()
    trainer: str | None = None
    has_tied_head: bool | None = False
    sizes_file: str = ""
    config_of: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    describe: Callable[[Layout], Mapping[str, Any]] = lambda _: {}
    biased: str = ""
    written_as: Callable[[str, Sizes], str] = lambda name, _: name
    arithmetic: Callable[[str, Sizes], Arithmetic | None] | None = None
    is_model_only: bool = False

    @cached_property
    def drop(self) -> re.Pattern[str]:
        """Return the pattern of a name that the Hub has not."""
        return re.compile("|".join(self.drops) or r"(?!)")

    @property
    def whose(self) -> str:
        """Return whose a tensor of it is: `meta's` or `transformers'`."""
        return f"{self.name}'" if self.name.endswith("s") else f"{self.name}'s"

    def to_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        """Return the tensors as the Hub has them; without those that it has not, which are `unplaced` too."""
        return translate(tensors, self.rules(sizes), sizes)

    def from_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        found = translate(tensors, self.rules(sizes), sizes, to_hub=False)
        return found.renamed(lambda name: self.written_as(name, sizes))

    def find_bias_missing(self, names: Iterable[str]) -> str | None:
        """Return the name of a bias that has to be beside a weight, and is not; None if none is missing."""
        there = set(names)
        biases = (f"{name.removesuffix('.weight')}.bias" for name in there if name.endswith(".weight"))
        lost = (bias for bias in biases if bias not in there and self.has_bias(bias.removesuffix(".bias")))
        return min(lost, default=None)

    def has_bias(self, module: str) -> bool:
        return bool(re.fullmatch(self.biased or r"(?!)", outline_of(module)[0]))

    def drops_name(self, name: str) -> bool:
        """Return whether the Hub has no tensor like the one of this name."""
        return bool(self.drop.fullmatch(outline_of(name)[0]))
