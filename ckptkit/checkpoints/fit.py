"""Check that weights belong to a config.json: tied ones are dropped, missing ones refused. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit import edits
from ckptkit.checkpoints.companions import Companions
from ckptkit.checkpoints.expected import HEAD, expected_shapes, find_embedding, find_rename, is_tied
from ckptkit.checkpoints.trainers import say_own_names
from ckptkit.engine.compare import compare
from ckptkit.errors import Mismatch
from ckptkit.formats import locate
from ckptkit.layout import Layout
from ckptkit.tensors.box import Shape


def fit(layout: Layout, companions: Companions, strict: bool) -> tuple[Layout, list[str]]:
    """Hold the weights against config.json: tied ones are written once, missing ones are an error, others are said."""
    config = companions.config
    if config is None:
        return layout, [
            "no config.json found: loaders need one beside the weights (--base takes it from another model)",
            *remarks_on_names(layout),
        ]
    notes = [f"{', '.join(companions.files)} from {companions.found_in}"]
    if companions.absent:
        missing = ", ".join(companions.absent)
        notes.append(f"config.json needs {missing}, not found beside it: loaders with trust_remote_code will miss it")
    if is_tied(config):
        layout = drop_tied(layout, notes)
    shapes = expected_shapes(config)
    if shapes is None:
        uncompared = f"names not compared with config.json: model type `{config.get('model_type')}`"
        return layout, [*notes, uncompared, *remarks_on_names(layout)]
    check_names(layout, shapes, is_tied(config), str(companions.found_in))
    extra = sorted(layout.tensors.keys() - shapes.keys())
    if extra:
        message = f"{len(extra)} tensors that config.json does not call for: {abridge(extra)}"
        if strict:
            hint = "leave them out with --exclude"
            raise Mismatch(message, tensor=extra[0], path=companions.found_in, hint=hint)
        notes.append(f"kept {message}")
    return layout, notes


def remarks_on_names(layout: Layout) -> list[str]:
    """Return a warning if the weights have names that are a trainer's own."""
    whose = say_own_names(layout.tensors)
    return [f"the names are {whose} own: loaders of Hugging Face's models do not know them"] if whose else []


def find_prefix(layout: Layout, config: Mapping[str, Any]) -> str:
    """Return what stands before every name of a model, if without it all are there that its config calls for.

    A module that a trainer wraps a model in puts its attribute there: `model.` or `net.`. Returns "" where the names
    fit as they are, or fit neither way.
    """
    shapes = {
        name: shape for name, shape in (expected_shapes(config) or {}).items() if name != HEAD or not is_tied(config)
    }
    if not shapes or shapes.keys() <= layout.tensors.keys():
        return ""
    first = min(shapes)
    ends = [name for name in layout.tensors if name.endswith(f".{first}")]
    prefix = ends[0].removesuffix(first) if len(ends) == 1 else ""
    found = {name.removeprefix(prefix): spec.shape for name, spec in layout.specs.items() if name.startswith(prefix)}
    fits = len(found) == len(layout.tensors) and all(found.get(name) == shape for name, shape in shapes.items())
    return prefix if fits else ""


def drop_tied(layout: Layout, notes: list[str]) -> Layout:
    """Return the layout without the head that is tied to the embedding, if both are there and equal to the last bit."""
    embedding = find_embedding(layout.tensors)
    if embedding is None or HEAD not in layout.tensors:
        return layout
    head = locate(edits.rename(edits.select(layout, lambda name: name == HEAD), lambda _: embedding))
    other = locate(edits.select(layout, lambda name: name == embedding))
    if head.specs != other.specs or compare(head, other).different:
        raise Mismatch(
            f"config.json ties it to `{embedding}`, but their bytes differ",
            path=layout.root,
            tensor=HEAD,
            hint="if they were trained apart, give a --base whose config.json has tie_word_embeddings false",
        )
    notes.append(f"{HEAD} is tied to {embedding} and equal to it: written once")
    return edits.select(layout, lambda name: name != HEAD)


def restore_tied(layout: Layout, config: Mapping[str, Any]) -> Layout:
    """Return the layout with a head that `config` ties to the embedding and that was left out: the same bytes again.

    A model in training has both names in its state dict, and so has its checkpoint, which has recorded key paths.
    """
    embedding = find_embedding(layout.tensors)
    if layout.keys or not is_tied(config) or embedding is None or HEAD in layout.tensors:
        return layout
    return replace(layout, tensors={**layout.tensors, HEAD: layout.tensors[embedding]})


def check_names(layout: Layout, shapes: Mapping[str, Shape], tied: bool, found_in: str) -> None:
    """Raise `Mismatch` if a tensor that the config calls for is missing or has another shape."""
    missing = [name for name in shapes if name not in layout.tensors and not (tied and name == HEAD)]
    if missing:
        rule = find_rename(missing, layout.tensors)
        raise Mismatch(
            f"missing, with {len(missing) - 1} more of {len(shapes)} that the config.json in {found_in} calls for",
            path=layout.root,
            tensor=missing[0],
            hint=f"--rename '{rule}'" if rule else f"the checkpoint has {abridge(sorted(layout.tensors))}",
        )
    for name, shape in shapes.items():
        if name in layout.tensors and layout.tensors[name].spec.shape != shape:
            have = list(layout.tensors[name].spec.shape)
            raise Mismatch(
                f"the shape is {have}, the config.json in {found_in} calls for {list(shape)}",
                path=layout.root,
                tensor=name,
                hint="is the config.json that of another model?",
            )


def abridge(names: Sequence[str]) -> str:
    """Return the first few of some names."""
    return ", ".join(names[:4]) + (", ..." if names[4:] else "")
