"""Draft a model with adapters merged into it: its base as a model, with recipes for the tensors that they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.adapters.draft import Fitted, describe, open_adapters
from ckptkit.adapters.in_memory import in_memory, to_files
from ckptkit.adapters.recipes import Merging, Source
from ckptkit.adapters.tied import settle_ties
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.manifest import source_of
from ckptkit.checkpoints.part import Part
from ckptkit.conversion.destination import check_apart
from ckptkit.conversion.draft import Conversion, Draft
from ckptkit.conversion.model import companion_files, form_for
from ckptkit.conversion.named_weights import name_one, without_prefix
from ckptkit.conversion.options import ConvertOptions
from ckptkit.errors import Mismatch, Unsupported, Usage
from ckptkit.files.origin import Origin
from ckptkit.files.path import to_path
from ckptkit.layout import Layout, edits
from ckptkit.models.companions import Companions, find_companions, tokenizer_beside
from ckptkit.models.expected import find_embedding
from ckptkit.models.fit import fit, restore_tied
from ckptkit.names import HUB
from ckptkit.names.naming import AskedNames
from ckptkit.names.weights import Weights, find_weights
from ckptkit.quantized.make_plain import Dequantizing, look_for_quantized, make_all_plain, without_false_words
from ckptkit.quantized.require_plain import require_plain

_VOCABULARY = "vocab_size"


@dataclass(frozen=True, slots=True)
class Base:
    """The model that adapters are merged into: where it lies, its tensors, and what a loader needs beside them.

    `plain` says how its weights become plain ones, if they are quantized.
    """

    part: Part
    weights: Weights
    companions: Companions
    plain: Dequantizing | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """Return its config.json, {} if it has none."""
        return self.companions.config or {}


@dataclass(frozen=True, slots=True)
class Merged:
    """A base and all adapters merged into it, as far as names and shapes go: what there is to write, and to say."""

    base: Base
    merging: Merging
    layout: Layout
    companions: Companions
    notes: Sequence[str]


def draft_merge(parts: Sequence[Part], remarks: Sequence[str], output: Path, options: ConvertOptions) -> Conversion:
    """Draft the model of a base and adapters: that in the first of several parts, or what lies beside one adapter.

    `remarks` are what there is to say already. Raises `Mismatch` for an adapter that does not fit its base,
    `Unsupported` for one that cannot be merged.
    """
    *before, last = parts
    adapters = [the_adapter(part, options) for part in (*before[1:], last)]
    base = base_given(before[0], options.base) if before else base_of(adapters[0], output, options)
    merged = merge_all(base, adapters, options)
    draft = draft_merged(merged, adapters, options)
    paths = dict.fromkeys((base.part.path, *(one.path for one in adapters)))
    tokenizer = next((found for one in adapters if (found := tokenizer_of(one, base))), {})
    files = {
        name: file for name, file in companion_files(merged.companions, draft.wanted).items() if name not in tokenizer
    }
    is_alone = options.writer.is_model_only
    return Conversion(
        origins=[Origin.of(path) for path in paths],
        output=output,
        options=options,
        drafts=[draft],
        made=files if is_alone else {},
        carried=tokenizer if is_alone else {},
        dropped=merged.base.weights.left_out,
        wrapper=base.weights.wrapper if is_alone else "",
        world_size=options.world_size if options.writer.is_sharded else None,
        notes=[
            *remarks,
            *merged.notes,
            *([f"the tokenizer is the adapter's: {', '.join(tokenizer)}"] if tokenizer else []),
        ],
    )


def the_adapter(part: Part, options: ConvertOptions) -> Fitted:
    """Return the one adapter in a part of a checkpoint, with its config. Raises `Usage` if there is not one."""
    opened = open_adapters(part, options)
    if opened is None:
        hint = "`ckptkit inspect` shows what is there; the base comes first, then its adapters"
        raise Usage("there is no adapter here to be merged", path=part.path, hint=hint)
    adapters = opened.adapted.adapters
    if len(adapters) > 1:
        names = ", ".join(adapter.name for adapter in adapters)
        hint = "`ckptkit consolidate` writes each to a directory of its own, which `ckptkit merge` takes"
        raise Usage(f"which of these adapters is to be merged: {names}?", path=part.path, hint=hint)
    return opened.fitted(adapters[0], options.adapter_config)


def base_given(part: Part, companions: str | None) -> Base:
    """Return the base that is a checkpoint by itself, with config and tokenizer from there if none are given."""
    return Base(part, find_weights(part.layout), find_companions(part.path, companions))


def base_of(adapter: Fitted, output: Path, options: ConvertOptions) -> Base:
    """Return the base that lies beside an adapter, or else the one that is asked for. Raises `Usage` without any."""
    opened, config = adapter.opened, adapter.config
    if opened.adapted.base:
        names = {name: own for own, name in opened.adapted.base.items()}
        layout = edits.rename(edits.select(opened.weights.layout, names.__contains__), names.__getitem__)
        came_from = {own: opened.weights.came_from[name] for name, own in names.items()}
        weights = replace(opened.weights, layout=layout, came_from=came_from)
        return Base(opened.part, weights, find_companions(opened.part.path, options.base))
    if options.base is None:
        name = config.base or "MODEL"
        hint = f"--base {name} names it, or a directory that it is in"
        raise Usage("the base of the adapter is not in this checkpoint", path=opened.part.path, hint=hint)
    found = Checkpoint.open(to_path(options.base))
    check_apart(found, output, options.writer)
    return base_given(found.model_part, options.base if Path(options.base).is_dir() else None)


def merge_all(base: Base, adapters: Sequence[Fitted], options: ConvertOptions) -> Merged:
    """Merge adapters into a base under the names of its files; under its own where its tensors do not come apart so."""
    notes: list[str] = []
    base = made_plain(base, notes)
    own = without_prefix(base.weights, base.companions, notes)
    remarks: list[str] = []
    asked = AskedNames(
        names=HUB,
        config=base.companions.config,
        trainer=None,
        check=require_plain,
        table=options.table,
        rows=options.vocab_size,
    )
    named = name_one(own, base.part, asked, remarks)
    try:
        return merge_into(replace(base, weights=named), adapters, options, [*notes, *remarks])
    except (Mismatch, Unsupported):
        if named.came_from == own.came_from or not has_modules(own.layout, adapters):
            raise
    return merge_into(replace(base, weights=own), adapters, options, notes)


def merge_into(base: Base, adapters: Sequence[Fitted], options: ConvertOptions, notes: list[str]) -> Merged:
    """Merge adapters into a base of plain weights, as far as names and shapes go, and add to `notes`."""
    weights = base.weights
    whole = restore_tied(weights.layout, base.config)
    memory = None if has_modules(whole, adapters) else in_memory(weights, base.config)
    is_moved = memory is not None and has_modules(memory, adapters)
    merging = Merging(
        restore_tied(memory, base.config) if memory is not None and is_moved else whole,
        base.plain.recipes(whole, weights.came_from, 1 + len(adapters)) if base.plain else {},
    )
    for number, one in enumerate(adapters, 1):
        require_own_base(one, base, notes)
        weight = options.scales[number - 1] if options.scales else 1.0
        merging.add(Source(number, one.adapter, one.config, one.opened.adapted.base, weight))
        times = f"{weight:g} times " if options.scales else ""
        notes.append(f"merged {times}the adapter of {one.path}: {describe(one.adapter)}, by {one.config.path}")
    if is_moved:
        merging = to_files(merging, whole)
        notes.append("the adapter has the names of the model in memory; the base's files have others, which stay")
    layout = replace(whole, tensors=merging.tensors)
    companions = with_vocabulary(base.companions, layout, whole, notes)
    layout, companions = settle_ties(layout, companions, merging, weights.layout, adapters, notes)
    layout, remarks = fit(layout, companions, form_for(layout, companions, None), strict=options.strict)
    weights = replace(weights, layout=layout)
    return Merged(replace(base, weights=weights), merging, layout, companions, [*notes, *merging.notes, *remarks])


def require_own_base(one: Fitted, base: Base, notes: list[str]) -> None:
    """Raise `Unsupported` for an adapter whose training began by changing its base, onto another one.

    Adds to `notes` that the base is not called what the adapter's config says: another model may have the same shapes.
    """
    config = one.config
    if one.path == base.part.path:
        return
    if config.has_changed_base:
        said = config.values["init_lora_weights"]
        message = f"its training began by changing the base (`init_lora_weights` is {said})"
        hint = "merge a checkpoint that has this base in it, or save the adapter converted, as PEFT's docs say"
        raise Unsupported(message, path=config.path, hint=hint)
    if config.base and Path(config.base).name.lower() not in str(base.part.path).lower():
        notes.append(f"{config.path} says that the base was {config.base}: {base.part.path} has to be the same model")


def made_plain(base: Base, notes: list[str]) -> Base:
    """Return a base with plain weights for quantized ones, and add to `notes` that it is so."""
    plain = make_all_plain(look_for_quantized(base.part), base.weights, base.config)
    if plain is None:
        return replace(base, companions=without_false_words(base.companions, base.weights.layout, notes))
    companions = plain.of_plain(base.companions, notes)
    notes.append(f"what was dequantized is {plain.dtype}, unless --dtype says otherwise")
    return replace(base, weights=plain.unpack(base.weights), companions=companions, plain=plain)


def has_modules(layout: Layout, adapters: Sequence[Fitted]) -> bool:
    there = {name.rpartition(".")[0] for name in layout.tensors}
    return all(module in there for one in adapters for module in one.adapter.modules)


def with_vocabulary(companions: Companions, layout: Layout, before: Layout, notes: list[str]) -> Companions:
    """Return companions with a config.json that says how many tokens an embedding has that an adapter made larger."""
    embedding = find_embedding(layout.tensors)
    if embedding is None or companions.config is None or embedding not in before.tensors:
        return companions
    rows, old = layout.tensors[embedding].spec.shape[0], before.tensors[embedding].spec.shape[0]
    if rows == old:
        return companions
    if companions.config.get(_VOCABULARY) != old:
        message = f"it has {rows} rows instead of {old}, and config.json does not say how many tokens there are"
        raise Mismatch(message, path=companions.found_in, tensor=embedding)
    notes.append(f"{_VOCABULARY} in config.json is {rows} instead of {old}")
    return replace(companions, config={**companions.config, _VOCABULARY: rows})


def draft_merged(merged: Merged, adapters: Sequence[Fitted], options: ConvertOptions) -> Draft:
    """Draft the merged model under the names and in the dtypes that are asked for."""
    asked, merging = options.edits, merged.merging
    asked.check_globs([merged.layout])
    new_name = asked.renaming()
    chosen = edits.select(merged.layout, asked.admit)
    names = {name: new_name(name) for name in chosen.tensors}
    came_from = merged.base.weights.came_from
    first, casts = asked.cast(edits.rename(chosen, names.__getitem__), lambda _: True)
    plain = merged.base.plain
    if plain is not None:
        casts |= plain.casts(first, {names[old]: was for old, was in came_from.items() if old in names})
    computed = set(merging.computed)
    recipes = {
        new: merging.recipe(name, new, first.tensors[new].spec.dtype) for name, new in names.items() if name in computed
    }
    made_of = source_of(merged.base.part.layout)
    made_of["adapters"] = ", ".join(one.path.name for one in adapters)
    return Draft.of(
        [first, *(one.adapter.layout for one in adapters), *([plain.source] if plain else [])],
        options,
        options.world_size or merged.base.part.layout.world_size or 1,
        made_of=made_of,
        renamed={came_from[old]: new for old, new in names.items() if old in came_from and came_from[old] != new},
        cast=casts,
        recipes=recipes,
    )


def tokenizer_of(adapter: Fitted, base: Base) -> dict[str, Path]:
    """Return the tokenizer that was saved with an adapter: the training may have added tokens, or a chat template."""
    return tokenizer_beside(adapter.path) if adapter.path != base.part.path else {}
