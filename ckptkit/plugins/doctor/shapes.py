"""Find tensors that do not fit a model.

Kinds: another shape, a padded vocabulary, a head that differs from its tied embedding, a tower without tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ckptkit.checkpoints.model_facts import ModelFacts
from ckptkit.errors import Corrupt, IOFailure, Mismatch, Unsafe, Unsupported, names_and_more
from ckptkit.io.path import is_remote
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import find_few_globs
from ckptkit.models.architectures import find_embedding
from ckptkit.models.companions import Companions
from ckptkit.models.fit import require_equal_tied, ties_to_drop
from ckptkit.models.vocabulary import vocabulary_axes_of_config
from ckptkit.plugins.doctor.finding import Finding, Fix, consolidate_fix, has_loadable_weight_files, rewrite_fix
from ckptkit.plugins.doctor.load_target import LoadTarget
from ckptkit.words import count

_TOWERS = {
    "vision_config": re.compile(r"vis(ion|ual)|image|vit\b|clip|\bvpm\b"),  # vpm and apm: MiniCPM-V, MiniCPM-o
    "audio_config": re.compile(r"audio|speech|\bapm\b"),
}
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]+)\.")
_MAX_GLOBS = 3


def find_missing_towers_and_layers(target: LoadTarget) -> Iterator[Finding]:
    """Yield the towers and layers that the config declares and that have no tensors."""
    model = target.model
    is_for_use = target.asked or has_loadable_weight_files(target.checkpoint)
    if (
        model is None
        or not (target.shapes and is_for_use)
        or target.adapters_in_model
        or target.key_mismatch is not None
    ):
        return  # if the model's tensors are known, `find_name_mismatches` reports the missing ones
    for key, words in _TOWERS.items():
        if isinstance(model.config.get(key), Mapping) and not any(words.search(name) for name in target.shapes):
            # copy them from the model that the user named, if it has them
            names = [name for name in model.specs if words.search(name) and name not in target.shapes]
            globs = find_few_globs(names, model.specs.keys() - set(names), _MAX_GLOBS)
            fix = consolidate_fix(target.checkpoint, from_base=globs, base=model.name) if globs else None
            message = f"{model.name} declares `{key}`, but the checkpoint has no tensors of it"
            yield Finding("layers", None, message, fix)
    inner = model.config.get("text_config")
    layers = (inner if isinstance(inner, Mapping) else model.config).get("num_hidden_layers")
    numbers = layer_numbers(target.shapes)
    missing = [number for number in range(layers) if number not in numbers] if isinstance(layers, int) else []
    if numbers and missing:
        absent = f"found no tensors for {len(missing)} of them, such as layer {missing[0]}"
        yield Finding("layers", None, f"expected {layers} layers (num_hidden_layers of {model.name}), {absent}")


Pairs = Mapping[str, tuple[Shape, Shape]]


def find_shape_mismatches(target: LoadTarget) -> Iterator[Finding]:
    """Yield the tensors whose shape differs from the model's."""
    if (
        target.model is None
        or target.best_matching_form is None
        or target.weights is None
        or not target.has_plain_weights
    ):
        return
    pairs = differing_shapes(target)
    vocabulary = vocabulary_axes_of_config(target.model.config)
    padded = {
        name: found
        for name, pair in pairs.items()
        if (found := vocabulary.find_row_counts(target.renames.get(name, name), *pair))
    }
    for name, (rows, expected_rows) in padded.items():
        message = (
            f"expected {expected_rows} rows (vocab_size of {target.model.name}), found {rows}: one of the two is padded"
        )
        yield Finding(
            "vocabulary", name, message, rewrite_fix(target.checkpoint, vocab_size=expected_rows, base=target.base)
        )
    others = {name: pair for name, pair in pairs.items() if name not in padded}
    if most_shapes_differ(target, others):
        here, there = (
            describe_layers_and_width(shapes) for shapes in (target.shapes, target.best_matching_form.shapes)
        )
        name, (shape, wanted) = next(iter(others.items()))
        message = (
            f"{target.model.name} is another model: {here} here, {there} in its config; {len(others)} of "
            f"{len(target.shapes)} tensors have another shape, "
            f"such as `{name}`: expected {list(wanted)}, found {list(shape)}"
        )
        own = target.checkpoint.companions
        fix = own_config_fix(target, str(own.found_in)) if target.asked and own.config is not None else None
        yield Finding("config", None, message, fix)
        return
    yield from find_config_mismatch(target, others)
    for name, (shape, wanted) in others.items():
        yield Finding("shape", name, f"expected {list(wanted)} as in {target.model.name}, found {list(shape)}")


def differing_shapes(target: LoadTarget) -> dict[str, tuple[Shape, Shape]]:
    """Return the shapes here and in the model that differ, unless the family stores another shape than the Hub."""
    if target.best_matching_form is None or not target.has_plain_weights:
        return {}
    expected = {
        name: target.best_matching_form.shapes.get(target.renames.get(name, name), shape)
        for name, shape in target.shapes.items()
    }
    pairs = {name: (shape, expected[name]) for name, shape in target.shapes.items() if expected[name] != shape}
    if not pairs or target.checkpoint.family is None:
        return pairs
    return {name: pair for name, pair in pairs.items() if target.hub_shapes.get(name) != pair[1]}


def most_shapes_differ(target: LoadTarget, pairs: Pairs) -> bool:
    """Return whether more than half of the tensors have another shape: then the model is a different one."""
    return 2 * len(pairs) > len(target.shapes)


def own_config_fix(target: LoadTarget, base: str) -> Fix | None:
    """Return the command that exports the model with its own config; None if it has that already."""
    return None if has_loadable_weight_files(target.checkpoint) else consolidate_fix(target.checkpoint, base=base)


def describe_layers_and_width(shapes: Mapping[str, Shape]) -> str:
    """Return the number of layers and the hidden size of a model, as text, from the shapes of its tensors."""
    layers = layer_numbers(shapes)
    embedding = find_embedding(shapes)
    width = f" of width {shapes[embedding][-1]}" if embedding and shapes[embedding] else ""
    return f"{count(len(layers), 'layer')}{width}" if layers else f"{count(len(shapes), 'tensor')}{width}"


def layer_numbers(shapes: Iterable[str]) -> set[int]:
    """Return the numbers of the layers outside towers for images or audio, which have numbered layers too."""
    names = [name for name in shapes if not any(words.search(name) for words in _TOWERS.values())]
    return {int(number) for name in names for number in LAYER.findall(name)}


def find_config_mismatch(target: LoadTarget, pairs: Pairs) -> Iterator[Finding]:
    """Yield a finding if the model's config differs from the checkpoint's own config in sizes or in the computation."""
    model = target.asked
    if model is None or not model.config:
        return
    try:
        own = ModelFacts.of(target.checkpoint)
    except (Corrupt, IOFailure, Unsafe):  # `find_damage` reports files that cannot be read
        return
    differ = own.compare(ModelFacts(Path(model.name), Companions(config=dict(model.config)))).certain_differences
    if not differ:
        form = target.best_matching_form
        here, there = target.shapes, form.shapes if form else {}
        layers, wanted = layer_numbers(here), layer_numbers(there)
        # a gap is a missing layer, not another model
        if own.config is None and wanted and layers != wanted and layers == set(range(len(layers))) != set():
            sizes = f"{describe_layers_and_width(there)} in its config, {describe_layers_and_width(here)} here"
            yield Finding("config", None, f"{model.name} is another model: {sizes}")
        return
    words = names_and_more([f"{pair.key} {pair.there}, not {pair.here}" for pair in differ], 4)
    if pairs:
        fix = None if own.config is None else own_config_fix(target, str(own.config_directory))
        yield Finding("config", None, f"{model.name} is another model: {words}", fix)
    else:
        where = f"{own.described_in} in {own.config_directory}"
        message = f"{model.name} differs from {where} in keys that change the computation: {words}"
        yield Finding("config", None, message)


def find_tie_problems(target: LoadTarget) -> Iterator[Finding]:
    """Yield problems with tied tensors. Loaders use the source of the tie for both names.

    Sharded checkpoints need both names, as the model's state dict has both. Reads both tensors from disk.
    """
    model, weights = target.model, target.weights
    if model is None or weights is None or not target.has_plain_weights:
        return
    compared = comparable_ties(target)
    for name, source in ties_to_drop(weights.layout, model.config, target.best_matching_form).items():
        if name in target.renames.values():
            continue
        if name not in weights.layout.tensors:
            if source in weights.layout.tensors and target.checkpoint.model_component.reader.is_sharded and model.asked:
                message = f"missing, but tied to `{source}`; a model in memory has both, so torch's load asks for both"
                yield Finding("tie", name, message, consolidate_fix(target.checkpoint, base=model.name))
        elif name in compared:
            try:
                with suppress(Unsupported):
                    require_equal_tied(weights.layout, name, source)
            except Mismatch:
                differ = f"ties it to `{source}`, but their values differ: a load loses one of them"
                yield Finding("tie", name, f"the config of {model.name} {differ}")


def comparable_ties(target: LoadTarget) -> dict[str, str]:
    """Return the tied tensors that doctor reads and compares: both tensors are present and on a local disk."""
    model, weights = target.model, target.weights
    if model is None or weights is None or not target.has_plain_weights or is_remote(weights.layout.root):
        return {}
    ties = ties_to_drop(weights.layout, model.config, target.best_matching_form).items()
    present = weights.layout.tensors.keys() - set(target.renames.values())
    return {name: source for name, source in ties if name in present and source in weights.layout.tensors}
