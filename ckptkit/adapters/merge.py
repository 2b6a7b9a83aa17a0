"""Merge adapters into a model: the base's tensors, with recipes for the tensors that the adapters change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.adapters.config import AdapterConfig
from ckptkit.adapters.draft import CheckedAdapter, describe_adapter, open_adapters
from ckptkit.adapters.experts import find_expert_form
from ckptkit.adapters.find import Adapter
from ckptkit.adapters.in_memory import layout_under_memory_names, translate_updates_to_files
from ckptkit.adapters.merge_arithmetic import AdapterSource, Merging
from ckptkit.adapters.merged_blocks import ExpertsProduct
from ckptkit.adapters.weight_updates import is_saved_module, require_saved_modules
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.manifest import source_record_of
from ckptkit.entry_points import import_object
from ckptkit.errors import Caution, Mismatch, Unsupported, Usage, and_more
from ckptkit.io.file import read_small
from ckptkit.io.path import to_model_path
from ckptkit.layout import Layout, edits
from ckptkit.layout.renames import numbers_to_wildcards
from ckptkit.layout.wrappers import may_be_adapter
from ckptkit.models.adapter_config_differences import peft_modifies_base
from ckptkit.models.architectures import find_embedding
from ckptkit.models.companions import TOKENIZER_LIMIT, find_companions, tokenizer_paths_in
from ckptkit.models.expected import closest_form_or_error
from ckptkit.models.fit import require_equal_tied, restore_tied, ties_to_drop
from ckptkit.models.mtp_layers import mtp_tensor_names
from ckptkit.models.names import HUB
from ckptkit.models.transformers_model import NotBuilt
from ckptkit.models.vocabulary import NewVocabulary, find_vocabulary_size
from ckptkit.state.model import Model
from ckptkit.state.options import EXPERT_FORMS, FLAT, PER_EXPERT, ConvertOptions
from ckptkit.state.quantized.dequantize import dequantize_all
from ckptkit.state.steps import check_and_drop_unneeded_tensors, translate_names, without_trainer_prefix
from ckptkit.words import command_line, count, natural_sort_key

_TIE, _VOCABULARY = "tie_word_embeddings", "vocab_size"
_SHOWN = 2  # modules in a message


def merge_adapters(components: Sequence[Component], options: ConvertOptions) -> Model:
    """Return the model in the first component with the adapters of the others merged into it.

    With one component, that component has the adapter and may have the base; otherwise `--base` gives the base.
    `options` select and rename the output's tensors. Raises `Mismatch` for an adapter that does not fit its base,
    `Unsupported` for one that cannot be merged.
    """
    *before, last = components
    named_by = options if options.base or not before else replace(options, base=str(before[0].path))
    adapters = [open_only_adapter(component, named_by, before[:1]) for component in (*before[1:], last)]
    base = Model.of(before[0], options.base) if before else open_base_in_checkpoint_or_option(adapters[0], options)
    adapters = [with_fused_expert_matrices(adapter, base.layout, options) for adapter in adapters]
    merged = merge_under_fitting_names(base, adapters, options)
    # --exclude may also name tensors of the adapters
    asked, names, path = options.edits, list(merged.layout.tensors), merged.part.path
    asked.require_matches("--include", asked.include, names, path)
    asked.require_some_left(names, path)
    names += [name for adapter in adapters for name in adapter.opened.part.layout.names]
    asked.require_matches("--exclude", asked.exclude, names, path)
    merged = merged.with_drop_reasons(asked.reasons_to_drop(merged.layout.tensors))
    merged = merged.with_only(set(filter(asked.is_selected, merged.layout.tensors)))
    asked.check_renames(merged.layout.tensors, path)
    merged = merged.with_new_names(asked.make_renaming())
    # training may have added tokens, so the tokenizer that was saved with an adapter is the right one
    beside = [tokenizer_paths_in(adapter.path) for adapter in adapters if adapter.path != path]
    if tokenizer := next(filter(None, beside), None):
        files = {name: read_small(file, TOKENIZER_LIMIT) for name, file in tokenizer.items()}
        companions = replace(merged.companions, files=merged.companions.files | files, elsewhere=tokenizer)
        merged = replace(merged, companions=companions)
        merged = merged.with_remarks(f"the tokenizer is the adapter's: {', '.join(tokenizer)}")
    own = [adapter.path for adapter in adapters]
    paths = dict.fromkeys([base.part.path, *own] if before else [*own, base.part.path])  # the source comes first
    return replace(merged, origins=tuple(paths))


def with_fused_expert_matrices(adapter: CheckedAdapter, base: Layout, options: ConvertOptions) -> CheckedAdapter:
    """Convert an adapter's expert matrices to fused experts, unless the base has a tensor for each expert, too."""
    form = find_expert_form(adapter.adapter)
    is_fused = any(name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for name in base.tensors)
    if form in (None, FLAT) or (form == PER_EXPERT and not is_fused):
        return adapter
    convert = import_object(EXPERT_FORMS[FLAT].convert)
    fused, config, _ = convert(adapter.adapter, adapter.config, adapter.path, FLAT, options)
    return replace(adapter, adapter=fused, config=config)


def open_only_adapter(part: Component, options: ConvertOptions, base: Sequence[Component]) -> CheckedAdapter:
    """Return the only adapter in a component. Raises `Usage` for none or several. `base` has its base, if given."""
    opened = open_adapters(part, options)
    if opened is None:
        if any(may_be_adapter(component.layout.tensors) for component in base):
            hint = f"pass the base first: {command_line('merge', part.path, base[0].path, 'OUT')}"
        elif base:
            hint = "pass a directory with adapter_config.json, or a training checkpoint that contains an adapter"
        else:
            hint = "drop --merge"
        raise Usage("there is no adapter to merge", path=part.path, hint=hint)
    adapters = opened.adapted.adapters
    if len(adapters) > 1:
        names = ", ".join(adapter.name for adapter in adapters)
        hint = "write each adapter to a directory of its own with `ckptkit consolidate`, then merge"
        raise Usage(f"expected one adapter, found several: {names}", path=part.path, hint=hint)
    return opened.with_checked_config(adapters[0], options.adapter_config)


def open_base_in_checkpoint_or_option(adapter: CheckedAdapter, options: ConvertOptions) -> Model:
    """Return the base in the adapter's checkpoint, or else the one that `--base` names. Raises `Usage` without any."""
    opened, config = adapter.opened, adapter.config
    if opened.adapted.base:
        names = {name: own for own, name in opened.adapted.base.items()}
        layout = edits.select_and_rename_tensors(opened.weights.layout, names)
        came_from = {own: opened.weights.came_from[name] for name, own in names.items()}
        weights = replace(opened.weights, layout=layout, came_from=came_from)
        companions = find_companions(opened.part.path, options.base)
        return Model(part=opened.part, weights=weights, origins=(opened.part.path,), companions=companions)
    if options.base is None:
        name = config.base or "MODEL"
        hint = f"pass --base {name}, or a directory that has it"
        raise Usage("the base of the adapter is not in this checkpoint", path=opened.part.path, hint=hint)
    checkpoint = Checkpoint.open(to_model_path(options.base))
    companions_from = options.base if Path(options.base).is_dir() else None
    return replace(Model.of(checkpoint.model_component, companions_from), base=checkpoint)


def merge_under_fitting_names(base: Model, adapters: Sequence[CheckedAdapter], options: ConvertOptions) -> Model:
    """Merge adapters into a base under the Hub's names; under the base's own names if only those fit."""
    own = without_trainer_prefix(dequantize_all(base) if base.may_be_quantized else base)
    try:
        named = translate_names(own, HUB, options)
    except NotBuilt:  # keep the base's own tensor names; check_and_drop_unneeded_tensors reports that
        return merge_into_plain_base(own, adapters, options)
    try:
        return merge_into_plain_base(named, adapters, options)
    except (Mismatch, Unsupported):
        if named.weights.came_from == own.weights.came_from or not has_all_adapted_modules(own.layout, adapters):
            raise
    return merge_into_plain_base(own, adapters, options)


def merge_into_plain_base(base: Model, adapters: Sequence[CheckedAdapter], options: ConvertOptions) -> Model:
    """Merge adapters into a base of plain weights whose names and shapes fit the adapters."""
    whole = restore_tied(base.layout, base.config)
    # an adapter may use transformers' in-memory names instead of the names in the base's files
    memory = (
        None
        if has_all_adapted_modules(whole, adapters)
        else layout_under_memory_names(base.part, base.weights, base.config)
    )
    is_moved = memory is not None and has_all_adapted_modules(memory, adapters)
    specs = base.layout.specs
    named = (memory if memory is not None and is_moved else whole).tensors
    names = named.keys() - mtp_tensor_names(named, base.config)
    plain = {name: recipe(name, specs[name].dtype) for name, recipe in base.recipes.items()}
    merging = Merging(restore_tied(memory, base.config) if memory is not None and is_moved else whole, plain)
    model = base
    for number, fitted in enumerate(adapters, 1 + len(base.others)):
        require_saved_modules(fitted.adapter, fitted.config, names)
        weight = options.scales[number - 1 - len(base.others)] if options.scales else 1.0
        base_beside = fitted.opened.adapted.base
        merging.add_adapter(
            AdapterSource(number, fitted.adapter, fitted.config, base_beside, weight, options.experts_layout)
        )
        which = f"{f'{weight:g} times ' if options.scales else ''}the adapter of {fitted.path}"
        merged = f"merged {which}: {describe_adapter(fitted.adapter)}, by {fitted.config.path}"
        gaps = warn_of_incomplete_adapter(fitted.adapter, fitted.config, names)
        model = model.with_remarks(*remarks_on_base_identity(fitted, base.part), merged, *gaps)
    check_experts_layout(merging, adapters, options)
    if is_moved:
        merging = translate_updates_to_files(merging, whole)
        keeps = "the output has those of the base's files"
        model = model.with_remarks(f"the adapter has the tensor names of the model in memory; {keeps}")
    model = replace(
        model.with_layout(replace(whole, tensors=merging.tensors)),
        others=(*base.others, *(fitted.adapter.layout for fitted in adapters)),
        recipes={name: partial(merging.make_recipe, name) for name in (*merging.changed_tensors, *merging.plain)},
        made_of=source_record_of(base.part.layout) | {"adapters": ", ".join(fitted.path.name for fitted in adapters)},
    )
    model = keep_or_break_ties(with_enlarged_vocab_size(model, whole), merging, base.layout, adapters).with_remarks(
        *merging.notes
    )
    model = check_and_drop_unneeded_tensors(model, options)
    return model.with_only(model.layout.tensors.keys())


def check_experts_layout(merging: Merging, adapters: Sequence[CheckedAdapter], options: ConvertOptions) -> None:
    """Raise `Usage` for --experts-layout without fused experts, or with several adapters, whose layouts may differ."""
    if options.experts_layout is None:
        return
    if len(adapters) > 1:
        message = f"--experts-layout: expected one adapter, found {len(adapters)}"
        raise Usage(message, hint="merge one adapter at a time")
    steps = (step for changes in merging.steps.values() for step in changes)
    if not any(isinstance(step, ExpertsProduct) for step in steps):
        hint = "drop --experts-layout"
        raise Usage("--experts-layout: the adapter has no fused experts", path=adapters[0].path, hint=hint)


def remarks_on_base_identity(adapter: CheckedAdapter, base: Component) -> list[str]:
    """Raise `Unsupported` if the adapter's training modified its base and `base` is another checkpoint.

    Returns a remark if the base's path does not contain the name in the adapter's config: another model may have the
    same shapes.
    """
    config = adapter.config
    if adapter.path == base.path:
        return []
    if peft_modifies_base(config.values):
        said = config.values["init_lora_weights"]
        message = f"training modified the base before the first step (`init_lora_weights` is {said})"
        converted = "save the adapter with PEFT's `path_initial_model_for_weight_conversion`"
        hint = f"merge a checkpoint that contains this base, or {converted}"
        raise Unsupported(message, path=config.path, hint=hint)
    if config.base and Path(config.base).name.lower() not in str(base.path).lower():
        return [f"{config.path} says that the base was {config.base}: check that {base.path} is the same model"]
    return []


def warn_of_incomplete_adapter(adapter: Adapter, config: AdapterConfig, base: set[str]) -> list[Caution]:
    """Return a warning for matrices, and for fully trained parameters, that PEFT would have and the adapter lacks.

    `base` are the base's tensors under the adapter's names. A module is missing if the base has it, the adapter has the
    module of this name in another layer, and the adapter's config does not exclude it.
    """
    adapted = set(adapter.modules)
    folded = {numbers_to_wildcards(module) for module in adapted}
    inside = {
        numbers_to_wildcards(entry.module)
        for entry in adapter.entries.values()
        if entry.multihead_attention_module is not None
    }

    def target_of(module: str) -> str:
        """Return the module that has to be a target: the `nn.MultiheadAttention` of an `out_proj`, else the module."""
        above = module.rpartition(".")[0]
        return above if numbers_to_wildcards(module) in inside and f"{above}.in_proj_weight" in base else module

    in_base = {name.rpartition(".")[0] for name in base}
    missing = sorted(
        (own for own in in_base - adapted if numbers_to_wildcards(own) in folded and config.is_target(target_of(own))),
        key=natural_sort_key,
    )
    matrices = f"the adapter has no matrices for {count(len(missing), 'module')} that it changes in other layers"
    saved = base - set(adapter.replaced_parameters)
    unsaved = sorted((name for name in saved if is_saved_module(name, config)), key=natural_sort_key)
    trained = f"the adapter has no tensors for {count(len(unsaved), 'parameter')} that `modules_to_save` lists"
    return [
        Caution(
            f"{config.path.parent}: {what}: {', '.join(f'`{name}`' for name in names[:_SHOWN])}"
            f"{and_more(len(names) - _SHOWN)}; the output has the weights of the base there"
        )
        for what, names in ((matrices, missing), (trained, unsaved))
        if names
    ]


def has_all_adapted_modules(layout: Layout, adapters: Sequence[CheckedAdapter]) -> bool:
    base_modules = {name.rpartition(".")[0] for name in layout.tensors}
    return all(module in base_modules for adapter in adapters for module in adapter.adapter.modules)


def keep_or_break_ties(model: Model, merging: Merging, base: Layout, adapters: Sequence[CheckedAdapter]) -> Model:
    """Drop the tensors that stay tied to another, or untie them in config.json if the adapters made them differ.

    A tie breaks if an adapter changed only one of the two tensors, or each differently. The tie remains if both have
    the same trained rows, or if the adapters set `ensure_weight_tying`. It always remains if the model's class ties
    them regardless of config.json. Raises `Unsupported` for an updated tensor that the model's class ties to another.
    """
    layout, config, changed = model.layout, model.config, set(merging.changed_tensors)
    tied = ties_in(layout, config)
    is_kept = all(one.config.bool_setting("ensure_weight_tying") for one in adapters)
    untied = {
        target
        for target, source in tied.items()
        if {target, source} & changed
        and not (is_kept and source in changed)
        and not merging.have_same_changed_rows(target, source)
    }
    # without the config's tie, only the ties of the model's class remain
    unbound = {**config, _TIE: False}
    tied_by_class = tied.keys() & ties_in(layout, unbound).keys() if untied else tied.keys()
    for target in untied & tied_by_class & changed:
        message = f"the adapter changes this tensor but not `{tied[target]}`; this model type stores both as one tensor"
        raise Unsupported(message, path=base.root, tensor=target)
    untied_by_config = untied - tied_by_class
    still_tied = tied_by_class if untied_by_config else tied.keys()
    left_out = {target for target in still_tied if {target, tied[target]} & changed or target not in base.tensors}
    for target in left_out & base.tensors.keys():
        require_equal_tied(base, target, tied[target])
    notes = []
    for one in sorted(untied_by_config):
        both = " and ".join(sorted({one, tied[one]} & changed))
        notes.append(f"{one} and {tied[one]} are no longer tied, because training changed {both}")
    notes += [
        f"{one} changes with {tied[one]}, because this model type stores both as one tensor"
        for one in sorted(untied & tied_by_class)
    ]
    model = model.with_record_of_duplicates(left_out).with_only(layout.tensors.keys() - left_out).with_remarks(*notes)
    return model.with_config(unbound) if untied_by_config else model


def ties_in(layout: Layout, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors of a layout that config.json ties to another tensor of it, mapped to that tensor."""
    if not config:
        return {}
    tied = ties_to_drop(layout, config, closest_form_or_error(layout.tensors.keys(), config))
    return {target: source for target, source in tied.items() if {target, source} <= layout.tensors.keys()}


def with_enlarged_vocab_size(model: Model, before: Layout) -> Model:
    """Return a model whose config.json has the token count of an embedding that an adapter enlarged.

    In a training state the base's embedding is enlarged too, and every tensor along the vocabulary has that many rows.
    """
    layout, config = model.layout, model.companions.config
    embedding = find_embedding(layout.tensors)
    if embedding is None or config is None or embedding not in before.tensors:
        return model
    rows, old = layout.tensors[embedding].spec.shape[0], before.tensors[embedding].spec.shape[0]
    said = find_vocabulary_size(config)
    if rows == old and said is not None and rows != said:
        NewVocabulary.of(config, rows).require_one_size(layout.tensors)
        old = said
    if rows == old:
        return model
    if config.get(_VOCABULARY) != old:
        found = config.get(_VOCABULARY, "none")
        message = f"`{_VOCABULARY}` of config.json: expected {old}, the rows of the base, found {found}"
        hint = f"set `{_VOCABULARY}` to the number of rows of the base"
        raise Mismatch(message, path=model.companions.found_in, tensor=embedding, hint=hint)
    note = f"{_VOCABULARY} in config.json is {rows} instead of {old}"
    return model.with_config({**config, _VOCABULARY: rows}).with_remarks(note)
