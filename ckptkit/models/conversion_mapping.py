"""Convert a model's tensors between transformers' form in memory and its form on disk.

The table belongs to the installed version of transformers: its transforms rename tensors, and move their elements with
torch functions. Source: transformers/core_model_loading.py, `revert_weight_conversion`, and
`convert_and_load_state_dict_in_model`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import CkptError, Mismatch, Unsupported
from ckptkit.models.transformers_model import MetaModel, quiet_transformers
from ckptkit.words import natural_sort_key


@dataclass(frozen=True, slots=True)
class TransformedTensors:
    """Tensors under new names, and the old names that each came from."""

    tensors: dict[str, Any] = field(default_factory=dict)
    came_from: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class TransformGroup:
    """The tensors that one transform converts together, by the pattern that each matched, in order."""

    transform: Any
    found: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names in self.found.values() for name in names)


def transforms_reverted_on_save(meta: MetaModel, hub_names: Collection[str] | None) -> list[Any]:
    """Return the transforms from disk to memory that saving reverts.

    For a model that was loaded from tensors with `hub_names`, these are the transforms that changed something. For any
    other model, these are all transforms except those for optional prefixes.
    """
    from transformers.core_model_loading import PrefixChange

    transforms = every_transform(meta, add_legacy=False)
    if hub_names is None:
        return [transform for transform in transforms if not isinstance(transform, PrefixChange)]
    for name in sorted(hub_names, key=natural_sort_key):
        rename_by_transforms(name, transforms)  # notes in each transform whether it matched
    return [transform for transform in transforms if transform.was_used()]


def every_transform(meta: MetaModel, *, add_legacy: bool) -> list[Any]:
    """Return all transforms from disk to memory; with `add_legacy` also those for old names."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    with quiet_transformers():
        return list(get_model_conversion_mapping(meta.model, add_legacy=add_legacy))


def transform_to_disk_form(
    meta: MetaModel, transforms: Sequence[Any], tensors: Mapping[str, Any]
) -> TransformedTensors:
    """Return in-memory tensors as `save_pretrained` would write them."""
    reverse = [transform.reverse_transform() for transform in reversed(transforms)]
    return transform_all(meta, reverse, tensors, is_to_disk=True)


def transform_to_memory_form(meta: MetaModel, tensors: Mapping[str, Any]) -> TransformedTensors:
    """Return tensors from disk as `from_pretrained` would have them in memory."""
    return transform_all(meta, every_transform(meta, add_legacy=True), tensors, is_to_disk=False)


def transform_all(
    meta: MetaModel, transforms: Sequence[Any], tensors: Mapping[str, Any], *, is_to_disk: bool
) -> TransformedTensors:
    """Apply the transforms that change only names, and those that change tensors: on the way to disk the latter first.

    A tensor from disk that already has its in-memory name does not change.
    """
    converters = [transform for transform in transforms if hasattr(transform, "operations")]
    renamings = [transform for transform in transforms if not hasattr(transform, "operations")]
    before, after = ([], renamings) if is_to_disk else (renamings, [])
    transformed = TransformedTensors()
    groups: dict[str, TransformGroup] = {}
    for name in sorted(tensors, key=natural_sort_key):
        key, pattern = rename_by_transforms(name, before), None
        for converter in converters:
            new, pattern = converter.rename_source_key(key)
            if pattern is not None:  # the first one that matches converts the tensor
                key = new
                break
        if not is_to_disk and key not in meta.shapes and name in meta.shapes:
            key, pattern = name, None
        if pattern is None:
            put_tensor(transformed, rename_by_transforms(key, after), tensors[name], (name,))
        else:
            if key not in groups:  # `key` is the name of the group's first result
                own = [converter for converter in converters if pattern in converter.source_patterns]
                groups[key] = TransformGroup(deepcopy(own[-1]))
            groups[key].found.setdefault(pattern, []).append(name)
    for key, group in groups.items():
        for new, tensor in convert_group(meta, key, group, tensors):
            put_tensor(transformed, rename_by_transforms(new, after), tensor, group.names)
    return transformed


def rename_by_transforms(name: str, transforms: Iterable[Any]) -> str:
    for transform in transforms:
        name, _ = transform.rename_source_key(name)
    return name


def convert_group(
    meta: MetaModel, key: str, group: TransformGroup, tensors: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a transform makes from a group.

    Raises `Mismatch` if a tensor is missing or has the wrong shape, `Unsupported` if the transform fails.
    """
    transform = group.transform
    missing = [pattern for pattern in transform.source_patterns if pattern not in group.found]
    if missing:
        what = f"the tensors that it is merged with are missing, such as `{missing[0]}`"
        raise Mismatch(f"`{group.names[0]}` is here, but {what}", tensor=group.names[0])
    for pattern, names in group.found.items():
        for name in names:
            transform.add_tensor(key, name, pattern, tensors[name])
    try:
        converted = transform.convert(key, model=meta.model, config=meta.model.config)
    except CkptError as error:
        raise error.blame(tensor=group.names[0]) from error.__cause__
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError, NotImplementedError) as error:
        steps = ", ".join(type(step).__name__ for step in transform.operations)
        message = f"transformers' own {steps} cannot convert this tensor: {error}"
        raise Unsupported(message, tensor=group.names[0]) from error
    for name, value in converted.items():
        yield name, value[0] if isinstance(value, list) else value


def put_tensor(transformed: TransformedTensors, name: str, tensor: Any, origins: tuple[str, ...]) -> None:
    """Add a tensor under its new name. Raises `Mismatch` if the name is already in use."""
    if name in transformed.tensors:
        clash = f"`{transformed.came_from[name][0]}` and `{origins[0]}` would both get this name"
        raise Mismatch(clash, tensor=name)
    transformed.tensors[name] = tensor
    transformed.came_from[name] = origins
