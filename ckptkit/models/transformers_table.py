"""Convert a model's tensors between transformers' form in memory and its form on disk.

The table is transformers' own, of the version that is installed: its transforms rename tensors, and move their
elements by functions of torch. Source: transformers/core_model_loading.py, `revert_weight_conversion`, and
`convert_and_load_state_dict_in_model`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import CkptError, Mismatch, Unsupported
from ckptkit.models.transformers_model import MetaModel, quiet
from ckptkit.words import natural


@dataclass(frozen=True, slots=True)
class TransformedTensors:
    """Tensors under new names, and the old names that each came from."""

    tensors: dict[str, Any] = field(default_factory=dict)
    came_from: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class TransformGroup:
    """Tensors that one transform takes together: by the pattern that each matched, in order."""

    transform: Any
    found: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names in self.found.values() for name in names)


def transforms_of(meta: MetaModel, hub_names: Collection[str] | None) -> list[Any]:
    """Return the transforms from disk to memory that saving reverts.

    Of a model that was loaded from tensors with `hub_names` it is those that had something to do; of any other, all
    but those for prefixes that a file may have.
    """
    from transformers.core_model_loading import PrefixChange

    found = every_transform(meta, add_legacy=False)
    if hub_names is None:
        return [transform for transform in found if not isinstance(transform, PrefixChange)]
    for name in sorted(hub_names, key=natural):
        rename(name, found)
    return [transform for transform in found if transform.was_used()]


def every_transform(meta: MetaModel, *, add_legacy: bool) -> list[Any]:
    """Return all transforms from disk to memory, with those for old names if wanted."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    with quiet():
        return list(get_model_conversion_mapping(meta.model, add_legacy=add_legacy))


def to_disk(meta: MetaModel, transforms: Sequence[Any], tensors: Mapping[str, Any]) -> TransformedTensors:
    """Return tensors that are in memory as `save_pretrained` would write them."""
    reverse = [transform.reverse_transform() for transform in reversed(transforms)]
    converters, renamings = kinds_of(reverse)
    made = TransformedTensors()
    groups: dict[str, TransformGroup] = {}
    for name in sorted(tensors, key=natural):
        key, pattern = convert_name(name, converters)
        if pattern is None:
            new, _ = rename(name, renamings)
            put(made, new, tensors[name], (name,))
        else:
            collect(groups, converters, key, pattern, name)
    for key, group in groups.items():
        for new, tensor in convert(meta, key, group, tensors):
            put(made, rename(new, renamings)[0], tensor, group.names)
    return made


def to_memory(meta: MetaModel, tensors: Mapping[str, Any]) -> TransformedTensors:
    """Return tensors that are on disk as `from_pretrained` would have them in memory."""
    converters, renamings = kinds_of(every_transform(meta, add_legacy=True))
    made = TransformedTensors()
    groups: dict[str, TransformGroup] = {}
    for name in sorted(tensors, key=natural):
        key, pattern = convert_name(rename(name, renamings)[0], converters)
        if key not in meta.shapes and name in meta.shapes:
            key, pattern = name, None  # it is as in memory already
        if pattern is None:
            put(made, key, tensors[name], (name,))
        else:
            collect(groups, converters, key, pattern, name)
    for key, group in groups.items():
        for new, tensor in convert(meta, key, group, tensors):
            put(made, new, tensor, group.names)
    return made


def kinds_of(transforms: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the transforms that change tensors, and those that change names only."""
    every = list(transforms)
    converters = [transform for transform in every if hasattr(transform, "operations")]
    return converters, [transform for transform in every if not hasattr(transform, "operations")]


def rename(name: str, transforms: Iterable[Any]) -> tuple[str, str | None]:
    """Return a name as all transforms make it in turn, and the last pattern that it matched."""
    matched = None
    for transform in transforms:
        name, pattern = transform.rename_source_key(name)
        matched = pattern or matched
    return name, matched


def convert_name(name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
    """Return a name as the first transform makes it that knows it, and the pattern that it matched; None if none."""
    for converter in converters:
        new, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return new, pattern
    return name, None


def collect(groups: dict[str, TransformGroup], converters: Iterable[Any], key: str, pattern: str, name: str) -> None:
    """Add a tensor to those that become one, or several, of which the first is called `key`."""
    if key not in groups:
        own = [converter for converter in converters if pattern in converter.source_patterns]
        groups[key] = TransformGroup(deepcopy(own[-1]))
    groups[key].found.setdefault(pattern, []).append(name)


def convert(meta: MetaModel, key: str, group: TransformGroup, tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a transform makes of the tensors that it takes together.

    Raises `Mismatch` if one is missing or has a shape that it cannot have, `Unsupported` for a step that is not known.
    """
    transform = group.transform
    missing = [pattern for pattern in transform.source_patterns if pattern not in group.found]
    if missing:
        message = (
            f"`{group.names[0]}` is here, but the tensors that it is merged with are missing, such as `{missing[0]}`"
        )
        raise Mismatch(message, tensor=group.names[0])
    for pattern, names in group.found.items():
        for name in names:
            transform.add_tensor(key, name, pattern, tensors[name])
    try:
        made = transform.convert(key, model=meta.model, config=meta.model.config)
    except CkptError as error:
        raise error.blame(tensor=group.names[0]) from error.__cause__
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError, NotImplementedError) as error:
        steps = ", ".join(type(step).__name__ for step in transform.operations)
        raise Unsupported(
            f"transformers' own {steps} cannot convert this tensor: {error}", tensor=group.names[0]
        ) from error
    for name, value in made.items():
        yield name, value[0] if isinstance(value, list) else value


def put(made: TransformedTensors, name: str, tensor: Any, origins: tuple[str, ...]) -> None:
    """Add a tensor under its new name. Raises `Mismatch` if another has it."""
    if name in made.tensors:
        clash = f"`{made.came_from[name][0]}` and `{origins[0]}` would both get this name"
        raise Mismatch(clash, tensor=name)
    made.tensors[name] = tensor
    made.came_from[name] = origins
