"""Draft a model alone: the weights of a checkpoint, or the mean of those of several, whatever they lie under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit.checkpoints.part import Part
from ckptkit.conversion.draft import Conversion, Draft
from ckptkit.conversion.mean import align, average, cast_to, describe
from ckptkit.conversion.named_weights import asker, name_one, open_weights, without_prefix
from ckptkit.conversion.options import ConvertOptions
from ckptkit.conversion.selection import Edits
from ckptkit.errors import Unsupported, Usage
from ckptkit.files.origin import Origin
from ckptkit.layout import Layout, edits
from ckptkit.layout.plan import Recipe
from ckptkit.models.companions import CONFIG, Companions, find_companions, mend_config
from ckptkit.models.find_form import AskBase, form_or_reason
from ckptkit.models.fit import fit
from ckptkit.models.form import Form
from ckptkit.models.tokens import check_tokens
from ckptkit.models.vocabulary import with_vocabulary
from ckptkit.names import HUB, KEEP
from ckptkit.names.naming import AskedNames
from ckptkit.names.parameters import rename_parameters
from ckptkit.names.weights import Weights
from ckptkit.quantized.find import Quantized
from ckptkit.quantized.make_plain import (
    Dequantizing,
    check_casts,
    check_together,
    find_dequantizing,
    look_for_quantized,
    refuse_mean,
    say_small,
    without_false_words,
)
from ckptkit.quantized.quantizing import Quantizing, find_quantizing, refuse_quantized, without_words
from ckptkit.quantized.require_plain import require_plain
from ckptkit.tensors.dtypes import DTYPES


def draft_model(parts: Sequence[Part], remarks: Sequence[str], output: Path, options: ConvertOptions) -> Conversion:
    """Draft the weights in `parts`, or their mean, with config and tokenizer if the format is that of a model alone.

    `remarks` are what there is to say already.
    """
    origins = [Origin.of(part.path) for part in parts]
    is_alone = options.writer.is_model_only
    if options.changes_names and not is_alone:
        hint = "write a Hugging Face model, and convert that"
        raise Usage(f"a mean keeps names and rows as `{options.to}`", hint=hint)
    notes = list(remarks)
    companions = find_companions(parts[0].path, options.base) if is_alone else Companions()
    if options.quantize:
        companions = without_words(companions)
    opened, quantized, plain = open_all(parts, options)
    if plain is not None:
        companions = plain.of_plain(companions, notes)
    companions = without_false_words(companions, parts[0].layout, notes)
    names = options.names or (HUB if is_alone or options.map else KEEP)
    if names != KEEP and not options.rename:
        opened = [without_prefix(weights, companions, notes) for weights in opened]
    ask_base = asker(options.base)
    asked = AskedNames(
        names=names,
        config=companions.config,
        trainer=None,
        check=require_plain,
        table=options.table,
        rows=options.vocab_size,
        ask_base=ask_base,
    )
    opened = [name_one(weights, part, asked, notes) for weights, part in zip(opened, parts, strict=True)]
    if options.vocab_size is not None:
        companions = with_tokens(companions, options.vocab_size, notes)
    found = align(parts, opened)
    form = form_for(found[0].layout, companions, ask_base) if is_alone and names == HUB else None
    layouts = arrange(parts, found, companions, form, options, notes)
    kept = stay_wide(layouts[0], form, options.edits, notes)
    first, casts = options.edits.cast(layouts[0], lambda name: name not in kept)
    mended = companions
    if plain is not None:
        computed = computed_by(plain, first, found[0].came_from)
    elif options.quantize:
        quantizing = find_quantizing(layouts[0], form, companions, options)
        mended = quantizing.of_quantized(companions, first)
        notes += quantizing.remarks()
        computed = computed_by(quantizing, quantizing.wanted(first), found[0].came_from)
    else:
        check_casts(quantized, casts, found[0].came_from)
        notes += say_small(first, options.edits)
        others = [cast_to(layout, first.specs) for layout in layouts[1:]]
        computed = Computed(first, others, average(first, options.weights))
    world_size = options.world_size or parts[0].layout.world_size or 1
    draft = Draft.of(
        [computed.wanted, *computed.others],
        options,
        world_size,
        made_of=describe(layouts, options.weights),
        renamed=renamed_in(found[0], layouts[0]),
        cast={**casts, **computed.casts},
        recipes=computed.recipes,
    )
    return Conversion(
        origins=origins,
        output=output,
        options=options,
        drafts=[draft],
        made=companion_files(mended, first),
        dropped=found[0].left_out,
        wrapper=found[0].wrapper if is_alone else "",
        world_size=world_size if options.writer.is_sharded else None,
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class Computed:
    """The layout that a model has in the end, and the sources and recipes of what of it is computed."""

    wanted: Layout
    others: Sequence[Layout]
    recipes: Mapping[str, Recipe]
    casts: Mapping[str, str] = field(default_factory=dict)


def computed_by(change: Dequantizing | Quantizing, wanted: Layout, came_from: Mapping[str, str]) -> Computed:
    """Return a model of which weights become plain ones, or quantized ones."""
    return Computed(wanted, [change.source], change.recipes(wanted, came_from), change.casts(wanted, came_from))


def open_all(
    parts: Sequence[Part], options: ConvertOptions
) -> tuple[Sequence[Weights], Quantized | None, Dequantizing | None]:
    """Return the weights of each checkpoint, the quantized ones in the first, and how these become plain ones.

    Raises `Unsupported` for a mean of quantized weights, and for quantized ones that are to be quantized.
    """
    opened = [open_weights(part, options.edits) for part in parts]
    if options.weights:
        refuse_mean(parts)
    quantized = look_for_quantized(parts[0]) if options.dtype or options.quantize else None
    if options.quantize:
        refuse_quantized(parts[0], quantized)
    plain = find_dequantizing(quantized, opened[0], options.edits)
    if plain is None:
        check_together(parts[0], opened[0], options.edits)
    return (opened if plain is None else [plain.unpack(opened[0])]), quantized, plain


def arrange(
    parts: Sequence[Part],
    found: Sequence[Weights],
    companions: Companions,
    form: Form | Unsupported | None,
    options: ConvertOptions,
    notes: list[str],
) -> Sequence[Layout]:
    """Return the weights of each checkpoint as the format has them: held against config.json, or under their keys."""
    if not options.writer.is_model_only:
        return put_back(parts[0].layout, found, options.edits)
    if options.names in (None, HUB):
        layouts, more = fit_all(found, companions, form, strict=options.strict)
        notes += more
        return layouts
    whose = "the checkpoint's own" if options.names == KEEP else f"{options.names}'s"
    notes.append(f"the names are {whose}: they were not held against a config.json")
    return [weights.layout for weights in found]


def with_tokens(companions: Companions, rows: int, notes: list[str]) -> Companions:
    """Return the companions with another size of the vocabulary, and add to `notes` what there is to say."""
    notes += check_tokens(companions, rows)
    config = None if companions.config is None else with_vocabulary(companions.config, rows)
    return replace(companions, config=config)


def form_for(layout: Layout, companions: Companions, ask_base: AskBase) -> Form | Unsupported | None:
    """Return what a model's config.json calls for, or why it is not known; None where there is none."""
    if companions.config is None:
        return None
    return form_or_reason(layout.tensors.keys(), companions.config, ask_base)


def stay_wide(layout: Layout, form: Form | Unsupported | None, asked: Edits, notes: list[str]) -> frozenset[str]:
    """Return the weights that stay as they are though others get a dtype of 16 bits: loaders keep them in fp32."""
    dtype = asked.dtype_of_weights
    if dtype is None or not isinstance(form, Form):
        return frozenset()
    specs = layout.specs
    wide = frozenset(
        name for name in form.in_fp32.get(dtype.name, ()) if name in specs and specs[name].dtype == DTYPES["float32"]
    )
    if wide:
        stay = f"stayed in fp32, as transformers keeps it: `{min(wide)}`, and {len(wide) - 1} more like it"
        notes.append(f"{stay} (--dtype '{min(wide)}={dtype.name}' converts it)")
    return wide


def fit_all(
    found: Sequence[Weights], companions: Companions, form: Form | Unsupported | None, *, strict: bool
) -> tuple[Sequence[Layout], Sequence[str]]:
    """Return the layouts as a model's config.json calls for them, and what there is to say of the first."""
    first = found[0].layout
    layout, notes = fit(first, companions, form, strict=strict)
    others = [fit(weights.layout, companions, form, strict=strict)[0] for weights in found[1:]]
    return [layout, *others], notes


def put_back(whole: Layout, found: Sequence[Weights], asked: Edits) -> Sequence[Layout]:
    """Return the layouts under the key paths that the weights have in `whole`, the first checkpoint."""
    first = found[0]
    if not first.layout.tensors.keys() <= first.came_from.keys():  # a tied one was restored: there are no key paths
        return [weights.layout for weights in found]
    names = frozenset(first.came_from.values())
    layout, renamed = rename_parameters(edits.select(whole, names.__contains__), names, asked.renaming())
    place = {new: renamed.get(old, old) for new, old in first.came_from.items()}
    return [layout, *(edits.rename(weights.layout, place.__getitem__) for weights in found[1:])]


def renamed_in(weights: Weights, layout: Layout) -> dict[str, str]:
    """Return the weights that are called otherwise in a layout: the name in the checkpoint, and the new one.

    Of several that one became it is the first, and how many more there are.
    """
    became: dict[str, list[str]] = {}
    for new, old in weights.came_from.items():
        if new in layout.tensors and old != new:
            became.setdefault(old, []).append(new)
    return {old: news[0] + (f" and {len(news) - 1} more" if news[1:] else "") for old, news in became.items()}


def companion_files(companions: Companions, layout: Layout) -> dict[str, bytes]:
    """Return the companions with a config.json that says what is true of these weights; nothing where none is."""
    if companions.config is None:
        return {}
    return companions.files | {CONFIG: mend_config(companions.config, layout.specs.values())}
