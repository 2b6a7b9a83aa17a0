"""Steps that apply to every model: its own names, the requested names and rows, ties, dtypes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from shlex import quote
from typing import Any

from ckptkit.checkpoints.component import Component
from ckptkit.errors import Caution, Mismatch, SeveralModels, Unsupported, and_more, errors_at
from ckptkit.layout import Layout, edits
from ckptkit.layout.box import Shape
from ckptkit.layout.dtypes import DTYPES
from ckptkit.models.architectures import find_embedding
from ckptkit.models.companions import (
    CONFIG,
    Companions,
    find_companions,
    find_model_config,
    is_transformers_config,
    with_weights_dtype,
)
from ckptkit.models.expected import AskBase, Form, closest_form_or_error, find_expected_by_table, forms_of_model
from ckptkit.models.fit import fit_to_config
from ckptkit.models.names import HUB, KEEP, find_family_of
from ckptkit.models.names.copies import find_copy
from ckptkit.models.names.naming import name_weights
from ckptkit.models.names.rename_parameters import rename_parameters
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.weights import find_weights
from ckptkit.models.token_ids import check_tokens_have_rows, warn_of_tokens_without_row
from ckptkit.models.trained_class import is_task_head_name, with_trained_class
from ckptkit.models.vocabulary import find_vocabulary_size, with_vocabulary_size
from ckptkit.state.model import Model
from ckptkit.state.names import collect_name_arguments
from ckptkit.state.options import ConvertOptions
from ckptkit.state.quantized.config import is_declared_quantized
from ckptkit.state.selection import apply_dtypes
from ckptkit.words import count

WITH_FILES = "dcp"  # the only format with which ckptkit writes files of a family


def open_selected_model(component: Component, options: ConvertOptions, replacement: Layout | None = None) -> Model:
    """Return the selected weights of a component, or of a layout `replacement`, under the names of `--rename`."""
    layout = component.layout if replacement is None else replacement
    dropped: Mapping[str, str] = {}
    if options.include or options.exclude:
        options.edits.check_globs([layout], component.path)
        dropped = options.edits.reasons_to_drop(layout.names)
        layout = edits.select_entries(layout, options.edits.is_selected)
    companions = find_companions(component.path, options.base) if options.writer.is_model_only else Companions()
    model = Model(
        part=component,
        weights=find_weights(layout),
        origins=(component.masters.root if component.masters else component.path,),
        companions=companions,
        ask_base=base_names_function(options.base),
        dropped=dropped,
    )
    if options.writer.is_model_only:
        require_one_named_module(model)
    if not options.rename:
        return model
    options.edits.check_renames(model.layout.tensors, component.path)
    return model.with_new_names(options.edits.make_renaming())


def require_one_named_module(model: Model) -> None:
    """Raise `Unsupported` for parameters that are stored as a list without names: no loader could find them.

    Also raises it for a model of several modules with weights, because a config.json describes only the first.
    """
    keys = [model.weights.whole.key(old) for old in model.weights.came_from.values()]
    if keys and all(isinstance(key[-1], int) for key in keys):
        where = ".".join(map(str, keys[0][:-1])) or "the file"
        message = f"`{where}` lists {count(len(keys), 'tensor')} without names"
        hint = "save them in a dict by name; for an EMA, call its `copy_to` and save the model's `state_dict()`"
        raise Unsupported(message, path=model.part.path, hint=hint)
    if model.companions.modules:
        names = ", ".join(f"`{name}`" for name in model.companions.modules)
        message = f"a SentenceTransformer whose {names} has weights of its own: ckptkit writes only its transformer"
        hint = "load the checkpoint into the SentenceTransformer, and save that with `save_pretrained`"
        raise Unsupported(message, path=model.companions.found_in, hint=hint)


def base_names_function(base: str | None) -> AskBase:
    """Return a function that returns the names of the base's tensors; None without a base."""
    if base is None:
        return None
    from ckptkit.state.base_tensors import BaseWeights

    return BaseWeights(base)


def is_plain_llama(model: Model) -> bool:
    """Return whether the tensors have the names and shapes of the Llama that config.json describes.

    Then they need no translation. In other model types the same names may have other contents.
    """
    llama = None
    with suppress(Unsupported):  # config.json lacks a size
        llama = None if model.companions.config is None else find_expected_by_table(model.config)
    if llama is None or not llama.computes_like_llama or not model.layout.tensors.keys() <= llama.shapes.keys():
        return False
    shapes = model.layout.shapes
    return all(shapes.get(name) == shape for name, shape in llama.parameters.items())


def without_trainer_prefix(model: Model) -> Model:
    """Remove the prefix of a trainer's module from all names, if config.json or a family of names proves it."""
    prefix, whose = find_trainer_prefix(model.layout.shapes, model.config)
    if not prefix:
        return model
    remark = f"removed the prefix `{prefix}` from all names: the rest are names {whose}"
    return model.with_new_names(lambda name: name.removeprefix(prefix)).with_remarks(remark)


def find_trainer_prefix(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the prefix that a trainer's module puts before all names, and whose names the rest are; else ("", "").

    `model.` or `net.` may be part of the model's own names: only a known family or config.json decides.
    """
    if len({name.partition(".")[0] for name in shapes}) != 1:
        return "", ""
    first = next(iter(shapes)).partition(".")[0] + "."
    rest = {name.removeprefix(first): shape for name, shape in shapes.items() if name.startswith(first)}
    if len(rest) == len(shapes) and not find_family_of(shapes) and find_family_of(rest):
        return first, "of a known family"
    forms: tuple[Form, ...] = ()
    with suppress(Unsupported):  # an unknown model
        forms = forms_of_model(config) if config else ()
    if any(form.needed_names <= shapes.keys() for form in forms):
        return "", ""
    for form in forms:
        sample = min(form.needed_names)
        ends = [name for name in shapes if name.endswith(f".{sample}")]
        prefix = ends[0].removesuffix(sample) if len(ends) == 1 else ""
        rest = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        fits = len(rest) == len(shapes) and all(rest.get(name) == form.shapes[name] for name in form.needed_names)
        if prefix and fits:
            return prefix, "that config.json describes"
    return "", ""


def refuse_duplicate_model(model: Model) -> None:
    """Raise `SeveralModels` if the model is present twice. A loader uses one copy, and no name says which is right."""
    copy = find_copy(model.layout.shapes)
    if copy is None:
        return
    entry = model.weights.came_from.get(copy.name, copy.name)
    above = entry[: len(entry) - len(copy.name)]
    glob, module = f"{escape(above + copy.prefix)}*", f"{escape(above + copy.module_prefix)}*"
    alone = find_weights(edits.select_entries(model.weights.whole, lambda name: fnmatchcase(name, glob))).layout.tensors
    # `find_weights` removes wrapper prefixes itself
    has_prefix = any(name.startswith(copy.prefix) for name in alone)
    rule = f" --rename {quote(f'^{re.escape(copy.prefix)}=>')}" if has_prefix else ""
    hint = f"pass --exclude {quote(module)}, or for the copy --include {quote(glob)}{rule}"
    message = f"the model is here twice: `{copy.of}` and `{copy.name}`"
    raise SeveralModels(message, path=model.layout.path, hint=hint, globs=[module])


def translate_names(model: Model, names: str, options: ConvertOptions) -> Model:
    """Give the tensors the names of the Hub or of a family, and the embedding the requested number of rows."""
    require_format_for_family(model.companions, options)
    config, rows = model.companions.config, options.vocab_size
    asked = collect_name_arguments(model.part, names, config, table=options.table, rows=rows, ask_base=model.ask_base)
    weights, remarks = name_weights(model.weights, asked)
    model = replace(model, weights=weights).with_remarks(*remarks)
    if names == HUB or not options.writer.is_model_only:
        return model
    whose = "the checkpoint's own names" if names == KEEP else f"the names of {names}"
    return model.with_remarks(f"the output has {whose}, which ckptkit did not compare with a config.json")


def require_format_for_family(companions: Companions, options: ConvertOptions) -> None:
    """Raise `Unsupported` for names that can be read back only with files of the family, which only DCP has."""
    family = options.family
    model_type = Sizes(companions.config or {}).model_type
    if family is not None and options.to != WITH_FILES and model_type in family.told_by_files:
        message = f"`{model_type}` under {family.possessive} names cannot be read back as `{options.to}`"
        hint = f"`ckptkit convert SRC OUT --to {WITH_FILES} --names {family.name}` writes files that describe its norms"
        raise Unsupported(message, path=companions.found_in, hint=hint)


def record_vocabulary_size(model: Model, rows: int) -> Model:
    """Write the number of rows of the vocabulary to config.json. The tensors were resized when they were renamed."""
    model = model.with_remarks(*check_tokens_have_rows(model.companions, rows))
    return model.with_config(with_vocabulary_size(model.config, rows)) if model.config else model


def check_and_drop_unneeded_tensors(model: Model, options: ConvertOptions) -> Model:
    """Compare the tensors with config.json: drop tied copies, refuse missing tensors, report unknown ones."""
    expected = expected_form_or_error(model)
    if isinstance(expected, Form) and any(map(is_task_head_name, model.layout.tensors)):
        with errors_at(path=model.layout.path):
            config, words = with_trained_class(model.layout.shapes, model.config, expected)
        model = model.with_config(config).with_remarks(*words)
        expected = expected_form_or_error(model)
    try:
        layout, dropped, remarks = fit_to_config(model.layout, model.companions, expected, strict=options.strict)
    except Mismatch as error:
        if is_declared_quantized(model.config):
            error.hint = "pass --dtype bf16 to dequantize the weights, or --names keep to copy them unchanged"
        elif options.include or options.exclude:
            error.hint = "select all tensors that config.json describes, or pass --names keep to write only some"
        raise
    # the other models of an average must lose the same tied tensors
    siblings = tuple(
        fit_to_config(other, model.companions, expected, strict=options.strict)[0] for other in model.siblings
    )
    remarks += warn_of_other_base(model, options)
    tied = model.layout.tensors.keys() - layout.tensors.keys() - dropped.keys()
    model = model.with_drop_reasons(dropped).with_record_of_duplicates(tied)
    tokens: list[Caution] = []
    if options.vocab_size is None and model.companions.files.keys() - {CONFIG}:
        embedding = find_embedding(layout.tensors)
        shape = layout.tensors[embedding].spec.shape if embedding else ()
        rows = shape[0] if shape else find_vocabulary_size(model.config)
        tokens = [] if rows is None else warn_of_tokens_without_row(model.companions, rows)
    return replace(model.with_layout(layout), expected=expected, siblings=siblings).with_remarks(*remarks, *tokens)


def warn_of_other_base(model: Model, options: ConvertOptions) -> list[Caution]:
    """Return a warning if the base's config.json describes another model than the config.json beside the checkpoint."""
    own = (
        find_model_config(model.part.path) if options.base is not None and model.companions.config is not None else None
    )
    if own is None or own == model.config or not is_transformers_config(own):
        return []
    # imported late: few conversions compare two configs
    from ckptkit.models.config_differences import describe_differences, find_config_differences

    differences = find_config_differences(own, model.config)
    words = "the output has the config.json of --base, but the one beside the checkpoint differs"
    return [Caution(f"{words}: {describe_differences(differences, str(options.base))}")] if differences else []


def expected_form_or_error(model: Model) -> Form | Unsupported | None:
    """Return the form that config.json describes, or the error why it is unknown; None without a config.json."""
    if model.companions.config is None:
        return None
    return closest_form_or_error(model.layout.tensors.keys(), model.config, model.ask_base)


def restore_key_paths(model: Model, options: ConvertOptions) -> Model:
    """Restore the key paths that the tensors have in the checkpoint."""
    weights = model.weights
    if not model.layout.tensors.keys() <= weights.came_from.keys():
        return model  # a tied tensor was restored, so the source has no key paths
    names = frozenset(weights.came_from.values())
    chosen = edits.select_entries(model.part.layout, names.__contains__)
    layout, renamed = rename_parameters(chosen, names, options.edits.make_renaming())
    entry_names = {new: renamed.get(old, old) for new, old in weights.came_from.items()}
    siblings = tuple(edits.select_and_rename_tensors(other, entry_names) for other in model.siblings)
    came_from = {renamed.get(old, old): old for old in names}
    return replace(model, weights=replace(weights, layout=layout, came_from=came_from), siblings=siblings)


def cast_to_requested(model: Model, options: ConvertOptions) -> Model:
    """Cast the tensors to the requested dtypes. Tensors that loaders keep in fp32 stay in fp32."""
    made_of = model.weights.origins_by_name(model.layout.tensors)
    rules = options.edits.dtype_rules(model.weights.origins_of(made_of))
    remarks = options.edits.check_dtype_globs(rules, made_of, model.part.path)
    dtype, specs = options.edits.dtype_of_weights, model.layout.specs
    kept = model.kept_in_fp32(dtype.name) if dtype is not None else ()
    wide = sorted(name for name in kept if name in specs and specs[name].dtype == DTYPES["float32"])
    layout, casts = apply_dtypes(model.layout, rules, made_of, lambda name: name not in wide)
    specs = layout.specs
    casts |= {name: f"{words} => {specs[name].dtype}" for name, words in model.stored_as.items() if name in specs}
    model = replace(model.with_layout(layout), casts=casts).with_remarks(*remarks)
    if not wide or dtype is None:
        return model
    stay = f"kept in fp32, as transformers does: `{wide[0]}`{and_more(len(wide) - 1)}"
    return model.with_remarks(f"{stay} (--dtype '{wide[0]}={dtype.name}' converts it)")


def record_dtype(model: Model, options: ConvertOptions) -> Model:
    """Write the dtype of most weights to config.json; if several dtypes were requested, the widest of them.

    Loaders that follow config.json round wider weights to its dtype.
    """
    config = with_weights_dtype(model.config, model.layout.specs.values())
    model = model.with_config(config)
    key = "torch_dtype" if "dtype" not in config else "dtype"
    stated = DTYPES.get(str(config.get(key)))
    if stated is None or is_declared_quantized(config):
        return model
    kept = model.kept_in_fp32(stated.name)
    dtypes = {name: spec.dtype for name, spec in model.layout.specs.items() if name not in kept}
    wider = {
        name: dtype for name, dtype in dtypes.items() if dtype.kind == "float" and dtype.itemsize > stated.itemsize
    }
    if not wider:
        return model
    which = f"`{next(iter(wider))}`{and_more(len(wider) - 1)}"
    if not options.dtype:
        return model.with_remarks(f"config.json says dtype {stated}, to which loaders round {which}")
    widest = max(wider.values(), key=lambda dtype: dtype.itemsize).name
    words = f"config.json says dtype {widest}, because loaders round wider weights to its dtype: {which}"
    return model.with_config({**config, key: widest}).with_remarks(words)
