"""Plan the output for adapters in PEFT's format, each with its config: `default` at the top, others in directories."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.adapters.config import NAME as CONFIG
from ckptkit.adapters.config import AdapterConfig, config_bytes_for_inference, find_adapter_config
from ckptkit.adapters.experts import remarks_on_lora_b_layout
from ckptkit.adapters.find import (
    HINT_KEEP_TENSORS,
    Adapted,
    Adapter,
    TrainerNames,
    find_adapters,
    find_empty_adapter_error,
    find_trainer_names,
)
from ckptkit.adapters.names import DEFAULT, WRAPPER, name_inside_wrapper
from ckptkit.adapters.weight_updates import (
    check_adapter_fits_config,
    embeddings_saved_in_full,
    require_saved_modules,
    trained_biases,
    without_tied_duplicates,
)
from ckptkit.checkpoints.component import Component
from ckptkit.entry_points import import_object
from ckptkit.errors import NotACheckpoint, Unsupported, Usage
from ckptkit.io.origin import Origin
from ckptkit.layout import edits
from ckptkit.layout.wrappers import may_be_adapter
from ckptkit.models.adapter_config_differences import peft_modifies_base
from ckptkit.models.architectures import HEAD, find_embedding
from ckptkit.models.companions import CONFIG as MODEL_CONFIG
from ckptkit.models.companions import read_config_json, tokenizer_paths_in
from ckptkit.models.names.weights import Weights, find_weights
from ckptkit.models.vocabulary import find_vocabulary_size
from ckptkit.state.draft import Conversion, Draft, Entries
from ckptkit.state.options import EXPERT_FORMS, ConvertOptions
from ckptkit.state.selection import DtypeRule, apply_dtypes

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter of a checkpoint, and the config that it was checked against."""

    opened: AdapterComponent
    adapter: Adapter
    config: AdapterConfig

    @property
    def path(self) -> Path:
        return self.opened.part.path


@dataclass(frozen=True, slots=True)
class AdapterComponent:
    """A component of a checkpoint that contains adapters: its weights, and the adapters in them."""

    part: Component
    weights: Weights
    adapted: Adapted
    trainer_names: TrainerNames | None = None

    def with_checked_config(self, adapter: Adapter, config_path: str | None) -> CheckedAdapter:
        """Return an adapter with its config, after checking that they fit. Raises `NotACheckpoint` without a config."""
        if config_path is not None and len(self.adapted.adapters) > 1:
            wanted = f"expected a config for each of {len(self.adapted.adapters)} adapters"
            names = ", ".join(own.name for own in self.adapted.adapters)
            hint = f"put each beside the checkpoint, as NAME/{CONFIG}, or take one adapter with --include '*.NAME.*'"
            raise Usage(f"{wanted}, found one: {names}", hint=hint)
        config = find_adapter_config(self.part.path, adapter.name, config_path)
        if self.trainer_names is not None:
            config = self.trainer_names.config_for_hub_modules(
                config, self.part.layout, adapter.modules, adapter.replaced_parameters
            )
        if config is None:
            message = f"found no {CONFIG} of adapter `{adapter.name}` here or in the run"
            shows = f"the tensors show {describe_adapter(adapter)}, but not alpha"
            hint = "pass --adapter-config FILE; in the training, `LoraConfig(...).save_pretrained(DIR)` writes it"
            raise NotACheckpoint(f"{message}; {shows}", path=self.part.path, hint=hint)
        check_adapter_fits_config(adapter, config)
        return CheckedAdapter(self, without_tied_duplicates(adapter, config), config)


def open_adapters(component: Component, options: ConvertOptions) -> AdapterComponent | None:
    """Return the adapters in a component, as far as `options` select them; None if it has none.

    Raises `Unsupported` for a model in PEFT's wrapper without a known adapter.
    """
    if not may_be_adapter(component.layout.tensors):
        return None
    # --include names tensors of the merged model, which do not exist yet
    chosen = replace(options.edits, include=()) if options.merge else options.edits
    if not options.merge:
        chosen.check_globs([component.layout], component.path)
    weights = find_weights(edits.select_entries(component.layout, chosen.is_selected))
    trainer_names = find_trainer_names(weights.layout.tensors)
    if trainer_names is not None:
        weights = trainer_names.with_hub_names(weights, component.path, options.base)
    adapted = find_adapters(weights.layout)
    if adapted is not None:
        if component.is_adapter and (error := find_empty_adapter_error(weights.layout)):
            raise error
        return AdapterComponent(component, weights, adapted, trainer_names)
    # nothing would load names with PEFT's prefix without an adapter that ckptkit knows
    names = [options.edits.make_renaming()(name) for name in weights.layout.tensors]
    wrapped = next((name for name in names if f".{WRAPPER}" in f".{name}"), None)
    config = find_adapter_config(component.path) if may_be_adapter(names) else None
    if config is not None and (wrapped or config.peft_type != "LORA"):
        message = f"{config.path} says {config.peft_type}, but the checkpoint contains no LoRA matrices"
        raise Unsupported(message, path=component.path, tensor=wrapped, hint=HINT_KEEP_TENSORS)
    if wrapped and any(".base_layer." in name for name in names):
        message = "the name has PEFT's prefix, but the checkpoint contains no adapter that ckptkit knows"
        raise Unsupported(message, path=component.path, tensor=wrapped, hint=HINT_KEEP_TENSORS)
    return None


def draft_adapters(opened: Sequence[AdapterComponent], output: Path, options: ConvertOptions) -> Conversion:
    """Plan the output of all adapters of a checkpoint, with their configs. Raises `Unsupported` for an average."""
    first, *others = opened
    if first.part.masters is not None:
        hint = "drop --weights-from to take the adapter as it was saved"
        message = "--weights-from: ckptkit does not read the fp32 master weights of an adapter"
        raise Unsupported(message, path=first.part.path, hint=hint)
    if others or options.weights:
        hint = "run `ckptkit merge BASE A B OUT --factors 0.5,0.5`"
        message = "cannot average adapters: the mean of their matrices is not the mean of their weight updates"
        raise Unsupported(message, path=first.part.path, hint=hint)
    new_files: dict[str, bytes] = {}
    drafts: list[Draft] = []
    if options.quantize:
        raise Usage("ckptkit does not quantize adapters", hint="merge them into their base first")
    if options.from_base or options.text_only:
        option = "--text-only" if options.text_only else "--from-base"
        raise Usage(f"{option} needs a model, found adapters", hint=f"drop {option}")
    if options.changes_names:
        hint = "drop --names, --map and --vocab-size, or merge the adapter into its base first"
        raise Usage("--names, --map and --vocab-size cannot change an adapter", hint=hint)
    notes: list[str] = []
    saved_names: list[str] = []
    dtype_rules = options.edits.dtype_rules(first.part.layout.tensors)
    for adapter in first.adapted.adapters:
        fitted = first.with_checked_config(adapter, options.adapter_config)
        if options.experts:
            convert = import_object(EXPERT_FORMS[options.experts].convert)
            made_of = fitted.adapter, fitted.config, fitted.path
            changed, fitting, remark = convert(*made_of, options.experts, options)
            fitted = replace(fitted, adapter=changed, config=fitting)
            notes.append(remark)
        config, subdirectory = fitted.config, "" if adapter.name == DEFAULT else adapter.name
        # PEFT's file has the adapter's own tensors, and tensors of the model that were trained with it
        known = fitted.adapter, config, first.adapted.base
        names = {name: entry.saved for name, entry in fitted.adapter.entries.items()}
        names |= trained_biases(*known) | embeddings_saved_in_full(*known)
        names |= embeddings_unlike_base_vocab(fitted, options.base or config.base)
        saved_names += names.values()
        drafts.append(draft_adapter(fitted, names, options, dtype_rules, subdirectory))
        new_files[str(Path(subdirectory, CONFIG))] = (
            config.content if first.adapted.is_saved else config_bytes_for_inference(config)
        )
        notes.append(f"{config.path} is the config of adapter `{adapter.name}`: {describe_adapter(fitted.adapter)}")
        notes += remarks_on_lora_b_layout(config)
        if peft_modifies_base(config.values):
            said = config.values["init_lora_weights"]
            notes.append(f"training modified the base before the first step ({said}): no other base fits the adapter")
    options.edits.check_renames(saved_names, first.part.path)
    outputs = [name for draft in drafts for name in draft.wanted.tensors]
    notes += options.edits.check_dtype_globs(dtype_rules, outputs, first.part.path)
    base = "its base is here too" if first.adapted.base else "with --base MODEL"
    notes.append(f"loaders need the base of an adapter, too; pass --merge to write the merged model ({base})")
    if options.base is not None and not (options.experts or first.trainer_names):
        notes.append("ckptkit took only the number of tokens from --base; adapters keep their config")
    return Conversion(
        origins=[Origin.of(first.part.path)],
        output=output,
        options=options,
        drafts=drafts,
        made=new_files,
        copied_files={} if options.adapter_config else tokenizer_paths_in(first.part.path),
        entries=[entries_beside_adapters(first, drafts, options)],
        wrapper=first.weights.dotted_prefix,
        notes=notes,
    )


def draft_adapter(
    fitted: CheckedAdapter,
    names: Mapping[str, str],
    options: ConvertOptions,
    dtype_rules: Sequence[DtypeRule],
    directory: str,
) -> Draft:
    """Plan the output of one adapter: all tensors under PEFT's `names`, in the one file that PEFT looks for."""
    require_saved_modules(fitted.adapter, fitted.config)
    new_name = options.edits.make_renaming()
    new_names = {name: new_name(names[name]) for name in fitted.adapter.layout.tensors if name in names}
    layout = edits.select_and_rename_tensors(fitted.adapter.layout, new_names)
    came_from = fitted.opened.weights.came_from
    made_of = {new: fitted.opened.weights.origins_of([name]) for name, new in new_names.items()}
    layout, casts = apply_dtypes(layout, dtype_rules, made_of, lambda _: True)
    # tensors without a single origin combine several tensors of the source
    known = {came_from[name]: saved for name, saved in names.items() if name in came_from}
    renamed = {old: saved for old, saved in known.items() if old != saved}
    return Draft.of([layout], options, 1, file=WEIGHTS, place=directory, renamed=renamed, cast=casts)


def embeddings_unlike_base_vocab(fitted: CheckedAdapter, base: str | None) -> dict[str, str]:
    """Return the embeddings whose row count differs from the `vocab_size` in the base's config.json.

    PEFT saves these in full. A base on the Hub is not looked up. Source: `get_peft_model_state_dict`.
    """
    config_path = os.path.join(base or "", MODEL_CONFIG)  # from an untrusted config: only tested, never fetched
    rows = (
        find_vocabulary_size(read_config_json(Path(config_path)) or {})
        if base and os.path.isfile(config_path)
        else None
    )
    base_tensors, specs = fitted.opened.adapted.base, fitted.adapter.layout.specs
    sought = {HEAD, find_embedding(base_tensors)} - set(fitted.adapter.replaced_parameters)
    names = [name for own, name in base_tensors.items() if own in sought]
    return {
        name: WRAPPER + name_inside_wrapper(name)
        for name in names
        if rows is not None and specs[name].shape[:1] != (rows,)
    }


def describe_adapter(adapter: Adapter) -> str:
    """Return the method, the ranks and the targets of an adapter as text."""
    rows = sorted(adapter.matrix_count_by_rank)
    rank = f" of rank {rows[0]}" if len(rows) == 1 else f" of ranks {rows[0]} to {rows[-1]}" if rows else ""
    targets = list(adapter.target_suffixes)
    named = ", ".join(targets[:8]) + (", ..." if targets[8:] else "")
    return f"{adapter.method}{rank} on {named}"


def entries_beside_adapters(opened: AdapterComponent, drafts: Sequence[Draft], options: ConvertOptions) -> Entries:
    """Return how each entry beside the adapters is handled: PEFT's copies, the base and others are not written."""
    adapted, read, weights = opened.adapted, opened.part.layout, opened.weights
    dropped = options.edits.reasons_to_drop(read.names) | dict(weights.left_out)
    dropped |= dict.fromkeys(weights.origins_of(adapted.base.values()), "of the base, not the adapter")
    dropped |= dict.fromkeys(weights.origins_of(adapted.copies), "a copy that PEFT makes")
    sources = [layout for draft in drafts for layout in draft.sources]
    return Entries.of(read, (), dropped, weights.prefix, sources)
