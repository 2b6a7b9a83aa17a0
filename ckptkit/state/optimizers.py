"""Decide whether an optimizer is written with names or with numbers for its parameters, and which they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.optimizers.flattened import find_flattened, nest
from ckptkit.checkpoints.optimizers.keys import (
    IDS,
    NAMES,
    Optimizer,
    find_optimizers,
    kind_of_keys,
    numbers_of,
    rekeyed,
    split_groups,
)
from ckptkit.checkpoints.optimizers.owners import (
    ORDER,
    ORDER_HINT,
    NamedNumbers,
    OneModel,
    Order,
    find_models,
    find_names,
    order_in_models,
)
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats import get_format
from ckptkit.layout import Layout
from ckptkit.layout.recorded_names import bare
from ckptkit.models.names.weights import find_model_key
from ckptkit.state.options import ConvertOptions
from ckptkit.trainers import is_other_part
from ckptkit.words import count


@dataclass(frozen=True, slots=True)
class Rekeying:
    """The other names or numbers that an optimizer's parameters get, and what there is to say of it.

    `members` has the new one of each old. It is empty if the optimizer stays as it is.
    """

    optimizer: Optimizer
    members: Mapping[Any, str | int]
    remark: str = ""

    def edit(self, layout: Layout) -> Layout:
        """Return a layout with the new ones, wherever the optimizer occurs in it."""
        return rekeyed(layout, self.optimizer, self.members) if self.members else layout


def nest_optimizers(
    checkpoint: Checkpoint, layout: Layout, order: Order | None, *, is_numbered: bool = False
) -> tuple[Layout, list[str]]:
    """Return a layout with groups for the optimizers that torch has flattened, and remarks on their order.

    If their parameters become numbers, their order in the groups counts, else the order of the groups alone. Raises
    `Unsupported` where that is not certain, `Mismatch` if the order that the user says does not fit.
    """
    remarks = []
    layout = split_groups(layout)
    for optimizer in find_flattened(layout):
        names = list(optimizer.settings)
        is_any = not is_numbered and len(optimizer.groups(layout, names)) == 1
        if is_any or is_in_order(checkpoint, layout):
            layout = nest(layout, optimizer, names)
            continue
        if order is None:
            message = f"torch has flattened `{optimizer.name}` on several ranks: the order of its parameters is unknown"
            raise Unsupported(message, path=layout.path, hint=ORDER_HINT)
        listed = order.names or order_in_models(models_of(checkpoint), names, checkpoint.model_component.path)
        called = {bare(name): name for name in names}
        layout = nest(layout, optimizer, [called.get(bare(name), name) for name in listed])
        remarks.append(f"`{optimizer.name}` got groups, each in the order that {ORDER} {order.text} says: assumed")
    return layout, remarks


def is_in_order(checkpoint: Checkpoint, layout: Layout) -> bool:
    """Return whether the entries have the order in which torch wrote them: one process wrote, and nobody rewrote them.

    Source: `create_default_global_save_plan` in torch/distributed/checkpoint/default_planner.py, which concatenates the
    entries of all ranks.
    """
    is_rewritten = any(part.has_manifest for part in checkpoint.components)
    return layout.format == "dcp" and layout.world_size in (None, 1) and not is_rewritten


def key_optimizers(checkpoint: Checkpoint, layouts: Sequence[Layout], options: ConvertOptions) -> list[list[Rekeying]]:
    """Return, for each layout, what becomes of the keys of its optimizers.

    Raises `Unsupported` where names were asked for and are not certain, or numbers of an optimizer without groups.
    """
    wanted = options.wanted_keys
    if wanted is None:
        becomes_shards = options.writer.is_sharded
        wants = [NAMES if becomes_shards and not get_format(each.format).is_sharded else None for each in layouts]
    else:
        wants = [wanted] * len(layouts)
    found = [find_optimizers(layout) if want else [] for layout, want in zip(layouts, wants, strict=True)]
    is_done = options.optimizer_keys == NAMES and any(kind_of_keys(layout) == NAMES for layout in layouts)
    if wanted is not None and not any(found) and (options.order or not is_done):
        raise without_groups(checkpoint, layouts, "--optimizer-keys" if options.optimizer_keys else ORDER)
    return [
        [rekeying for optimizer in optimizers if (rekeying := rekey(checkpoint, layout, optimizer, options))]
        for layout, optimizers in zip(layouts, found, strict=True)
    ]


def without_groups(checkpoint: Checkpoint, layouts: Sequence[Layout], option: str) -> Unsupported:
    """Return the error for a checkpoint in which no group of an optimizer lists parameters, as `option` needs."""
    message = "found no optimizer with parameter groups, such as torch's own"
    kind = next(filter(None, map(kind_of_keys, layouts)), None)
    if kind is not None:
        message = f"the optimizer's states have the {kind} of their parameters, but no group lists the parameters"
    return Unsupported(message, path=checkpoint.path, hint=f"drop {option}")


def rekey(checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, options: ConvertOptions) -> Rekeying | None:
    """Return what becomes of the keys of an optimizer; None if it has those that are wanted."""
    if options.optimizer_keys == IDS:
        return None if optimizer.is_numbered else Rekeying(optimizer, numbers_of(layout, optimizer))
    if optimizer.is_named:
        return None
    must = options.wanted_keys == NAMES
    return by_name(checkpoint, layout, optimizer, options.order, must=must)


def by_name(
    checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, order: Order | None, *, must: bool
) -> Rekeying:
    """Return an optimizer with names for its numbers; with its numbers if no names are certain.

    Raises `Unsupported` or `Mismatch` for names that are not certain and `must` be.
    """
    try:
        found = names_in(checkpoint, layout, optimizer, order)
    except (Mismatch, Unsupported) as error:
        if must:
            raise
        why = f"{error.tensor}: {error.message}" if error.tensor else error.message
        keeps = (
            f"`{optimizer.name}` keeps its parameter numbers, because the names are not certain ({why}); see {ORDER}"
        )
        return Rekeying(optimizer, {}, keeps)
    return Rekeying(optimizer, {**found.names}, describe_names(optimizer, found))


def describe_names(optimizer: Optimizer, found: NamedNumbers) -> str:
    """Return in words that an optimizer got names, and what proves them."""
    return f"`{optimizer.name}` got names for its {count(len(found.names), 'parameter')}: {found.proof}"


def names_in(checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, order: Order | None = None) -> NamedNumbers:
    """Return the names for the numbers of an optimizer in a layout, by the models of the checkpoint.

    Raises `Unsupported` or `Mismatch` if they are not certain, or not in the `order` that the user says.
    """
    path = checkpoint.model_component.path
    return find_names(layout, optimizer, models_of(checkpoint), path, order)


def models_of(checkpoint: Checkpoint) -> list[OneModel]:
    """Return the models in a checkpoint, first those of its model part. Raises `Mismatch` if it has no model."""
    main = checkpoint.model_component
    parts = [main, *(part for part in checkpoint.components if part is not main and not is_other_part(part.place))]
    models = [model for part in parts for model in find_models(part.layout)]
    if not models:
        find_model_key(main.layout)
    return models
