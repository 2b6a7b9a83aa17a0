"""`Family`: the names that a library gives to a model's tensors, and how to translate them to the Hub's and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptkit.layout import Layout, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import mask_numbers
from ckptkit.models.names.rule import Rule
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.translate import Translated, translate_by_rules

if TYPE_CHECKING:
    from ckptkit.engine.arithmetic import Arithmetic  # imports numpy; most families compute nothing


@dataclass(frozen=True, kw_only=True)
class Family:
    """The names that a library gives to a model's tensors, as a table of rules to the Hub's names.

    `rules` returns the table for a model's sizes; it raises `Unsupported` for a model type that is not among `types`. A
    distinctive name counts only if `tells_shape` accepts the tensor's shape. `drops` are patterns of entries that the
    Hub does not have, with `#` for numbers. `check` compares a whole checkpoint with the sizes, and raises `Mismatch`
    or `Unsupported`. `files` returns the files that belong beside such a model in DCP, for a step and a model type; the
    types in `told_by_files` cannot be read without them. `trainer` is the trainer that writes these names, if others
    share them.

    `has_tied_head`: True if the family stores a tied head as a tensor, False if not, None to leave it unchanged.
    `biased` is the pattern of modules that must have a bias. Without a config.json, `config_of` makes one from the
    `sizes_file` beside the weights. `describe` returns facts about the computation in a whole checkpoint, by keys of
    config.json. `written_as` returns the final name for a name that the rules write, if names differ by layer.
    `arithmetic` returns, by name, how the values of a tensor change on the way to the Hub. If `is_model_only`, only
    weights can be translated: ckptkit does not know the optimizers of this library.
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
    def dropped_pattern(self) -> re.Pattern[str]:
        """Return the pattern of names that the Hub does not have."""
        return re.compile("|".join(self.drops) or r"(?!)")

    @property
    def possessive(self) -> str:
        """Return the possessive of the name: `meta's` or `transformers'`."""
        return f"{self.name}'" if self.name.endswith("s") else f"{self.name}'s"

    def to_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        """Return the tensors as the Hub has them; `unplaced` are the names that no rule translates."""
        return translate_by_rules(tensors, self.rules(sizes), sizes)

    def from_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        translated = translate_by_rules(tensors, self.rules(sizes), sizes, to_hub=False)
        new_names = {name: self.written_as(name, sizes) for name in translated.tensors}
        tensors = {new_names[name]: tensor for name, tensor in translated.tensors.items()}
        came_from = {new_names[name]: olds for name, olds in translated.came_from.items()}
        return Translated(tensors, came_from, translated.unplaced)

    def is_unknown_to_hub(self, name: str) -> bool:
        return bool(self.dropped_pattern.fullmatch(mask_numbers(name)))
