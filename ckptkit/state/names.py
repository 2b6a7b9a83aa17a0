"""Collect the arguments for a change of tensor names: the requested family, the config, and the user's rules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.errors import Unsupported, errors_at
from ckptkit.layout import Layout
from ckptkit.layout.renames import mask_numbers
from ckptkit.models.companions import find_companions
from ckptkit.models.expected import AskBase
from ckptkit.models.names.family import Family
from ckptkit.models.names.family_file import read_family_file
from ckptkit.models.names.naming import AskedNames
from ckptkit.models.names.rename_parameters import renamable_parameters_in, rename_parameters
from ckptkit.models.names.rule import alternative_patterns
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.weights import Weights, find_weights, has_weights
from ckptkit.state.selection import Edits


def collect_name_arguments(
    source: Checkpoint | Component,
    names: str,
    config: Mapping[str, Any] | None,
    table: Family | None = None,
    rows: int | None = None,
    ask_base: AskBase = None,
) -> AskedNames:
    """Return the arguments of `name_weights` and `rename_checkpoint_parameters` for a checkpoint.

    `names` is a family's name, `HUB` or `KEEP`. For the other parameters see `AskedNames`.
    """
    return AskedNames(
        names=names,
        config=config,
        trainer=source.trainer,
        check=refuse_quantized_weights,
        table=table,
        rows=rows,
        ask_base=ask_base,
    )


def refuse_quantized_weights(found: Weights, config: Mapping[str, Any] | None) -> None:
    """Raise `Unsupported` for quantized weights: other names or rows would separate them from their scales."""
    from ckptkit.state.quantized.find import find_quantized  # imported late: needed only if names change

    with errors_at(path=found.layout.path):
        quantized = find_quantized(found.layout, config)
    is_computed = any(not tensor.chunks and tensor.spec.numel > 0 for tensor in found.layout.tensors.values())
    if quantized is not None or is_computed:
        method = f" ({quantized.method})" if quantized else ""
        message = f"the weights are quantized{method}: other names or rows would separate them from their scales"
        hint = "dequantize them first: ckptkit consolidate SRC OUT --names keep --dtype bf16"
        raise Unsupported(message, path=found.layout.path, hint=hint)


def weight_entry_names(layout: Layout) -> frozenset[str]:
    """Return the entries that are the model's weights. Raises `Mismatch` if it is ambiguous which they are."""
    return frozenset(find_weights(layout).came_from.values()) if has_weights(layout) else frozenset()


@dataclass(frozen=True, slots=True)
class NameOptions:
    """The user's options on names for one of two checkpoints that are compared or combined.

    `table` has rules for names that no family knows. `rename` has rules `REGEX=>TEXT` for the names of parameters.
    `base` contains the config.json of the model. With `allow_unmatched`, a rule may match nothing.
    """

    table: Family | None = None
    rename: tuple[str, ...] = ()
    base: str | None = None
    allow_unmatched: bool = False

    @classmethod
    def of(
        cls,
        map: str | os.PathLike[str] | None = None,  # noqa: A002 - called as the option
        rename: str | Sequence[str] = (),
        base: str | os.PathLike[str] | None = None,
        *,
        allow_unmatched: bool = False,
    ) -> NameOptions:
        """Return the options. Raises `Usage` for an invalid table or rule."""
        table = None if map is None else read_family_file(Path(map))
        rules = (rename,) if isinstance(rename, str) else tuple(rename)
        Edits(rename=rules).check_rule_syntax()
        return cls(table, rules, None if base is None else os.fspath(base), allow_unmatched)

    def find_config_of(self, checkpoint: Checkpoint) -> Mapping[str, Any] | None:
        """Return the config.json that describes the model in a checkpoint; None if there is none."""
        if self.base is None:
            return checkpoint.companions.config
        return find_companions(checkpoint.model_component.path, self.base).config

    def rename_parameters_in_layouts(self, layouts: Sequence[Layout]) -> list[Layout]:
        """Return the layouts of a checkpoint with its parameters renamed, in the optimizer too.

        Raises `Usage` if a rule matches nothing.
        """
        if not self.rename:
            return list(layouts)
        weights = [weight_entry_names(layout) for layout in layouts]
        names = {name for pair in zip(layouts, weights, strict=True) for name in renamable_parameters_in(*pair)}
        rules = Edits(rename=self.rename, allow_unmatched=self.allow_unmatched)
        rules.check_renames(names, layouts[0].path)
        return [rename_parameters(*pair, rules.make_renaming())[0] for pair in zip(layouts, weights, strict=True)]

    def find_table_for(self, names: Iterable[str]) -> Family | None:
        """Return the table if any of a model's `names` occurs in it, and not as a name on the Hub; else None."""
        if self.table is None:
            return None
        rules = self.table.rules(Sizes({}))
        own, hub = (
            {pattern.outline for texts in sides for text in texts for pattern in alternative_patterns(text)}
            for sides in ((rule.family for rule in rules), (rule.hub for rule in rules))
        )
        return self.table if any(mask_numbers(name) in own - hub for name in names) else None


AS_THEY_ARE = NameOptions()  # without options on names
