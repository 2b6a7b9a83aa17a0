"""Check that weights fit a config.json: drop tied tensors, refuse missing ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.engine.compare import compare_layouts
from ckptkit.errors import Caution, Mismatch, Unsupported
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Layout, edits
from ckptkit.layout.renames import find_prefix_rule, numbers_to_wildcards
from ckptkit.models.architectures import HEAD, find_embedding, has_tied_head
from ckptkit.models.companions import Companions
from ckptkit.models.expected import Form, closest_form_or_error
from ckptkit.words import count

_EXTRA_STATE = re.compile(r"(.*\.)?_extra_state(/.*)?")


def fit_to_config(
    layout: Layout, companions: Companions, form: Form | Unsupported | None, *, strict: bool
) -> tuple[Layout, dict[str, str], list[str]]:
    """Compare the weights with config.json, and drop the tensors that loaders do not need.

    Tied tensors are written once, missing ones are an error, extra ones a note. `form` is the form that config.json
    describes, or the error that says why it is unknown. Returns the layout to write, the reason for each dropped tensor
    (except tied ones), and notes.
    """
    given = layout
    layout, notes = drop_extra_state(layout)
    dropped = dict.fromkeys(given.tensors.keys() - layout.tensors, "state of a module, not a weight")
    notes += warn_if_not_loadable(layout, companions, strict=strict)
    config = companions.config
    if config is None or form is None:
        return layout, dropped, notes
    notes[:0] = companions.describe_sources()
    layout, remarks = drop_tied(layout, ties_to_drop(layout, config, form))
    notes += remarks
    if isinstance(form, Unsupported):
        return layout, dropped, [*notes, f"names not compared with config.json: {form.message}"]
    unsaved = form.unsaved & layout.tensors.keys()
    if unsaved:
        notes.append(f"dropped {join_few_names(sorted(unsaved))}, which transformers computes itself")
        dropped |= dict.fromkeys(unsaved, "transformers computes it itself")
        layout = edits.select_entries(layout, lambda name: name not in unsaved)
    require_described_tensors(layout, form, str(companions.found_in))
    extra = sorted(layout.tensors.keys() - form.shapes.keys())
    if extra:
        from ckptkit.models.mtp_layers import mtp_tensor_names  # deferred: few models have extra tensors

        declared = mtp_tensor_names(extra, config)  # MTP layers, which transformers' model does not have
        extra = [name for name in extra if name not in declared]
    if extra:
        message = f"{count(len(extra), 'tensor')} that config.json does not describe: {join_few_names(extra)}"
        if strict:
            hint = "drop them with --exclude"
            raise Mismatch(message, tensor=extra[0], path=companions.found_in, hint=hint)
        described = set(map(numbers_to_wildcards, form.shapes))
        is_of_layer = any(numbers_to_wildcards(name) in described for name in extra)
        notes.append(Caution(f"kept {message}; loaders skip them") if is_of_layer else f"kept {message}")
    return layout, dropped, notes


def warn_if_not_loadable(layout: Layout, companions: Companions, *, strict: bool) -> list[str]:
    """Return a warning if there is no config.json, or if it needs code that is missing: loaders cannot open the output.

    Without a config.json, `strict` raises `Mismatch` instead. For a config.json of another library, returns a note, or
    a warning if that library does not load safetensors.
    """
    if companions.config is not None:
        missing = ", ".join(companions.absent)
        words = f"expected {missing} beside config.json, found none: loaders with trust_remote_code need it"
        return [Caution(f"{words}; copy it into {companions.found_in}, and run this again")] if missing else []
    library = companions.library
    if library is not None:
        where = companions.found_in
        words = f"config.json in {where} belongs to {library.title}, not to transformers: copied unchanged, names kept"
        if not library.needs:
            return [words]
        how = "load model.safetensors in Python, and save it with torch.save"
        return [Caution(f"{words}; {library.title} loads only `{library.needs}`: {how}")]
    problem = "no config.json found: loaders of Hugging Face models cannot open the output"
    if strict:
        hint = "pass --base MODEL (a directory or Hub id), or --names keep for a model that is not on the Hub"
        raise Mismatch(problem, path=layout.path, hint=hint)
    return [Caution(f"{problem}; run this again with --base MODEL --overwrite (MODEL is a directory or Hub id)")]


def drop_extra_state(layout: Layout) -> tuple[Layout, list[str]]:
    """Return the layout without `_extra_state` entries of modules, which loaders of models do not know, and a note."""
    extra = [name for name in layout.tensors if _EXTRA_STATE.fullmatch(name)]
    if not extra:
        return layout, []
    note = f"dropped {count(len(extra), 'tensor')} of module state, such as `{extra[0]}`"
    return edits.select_entries(layout, lambda name: not _EXTRA_STATE.fullmatch(name)), [note]


def ties_to_drop(layout: Layout, config: Mapping[str, Any], form: Form | Unsupported | None) -> Mapping[str, str]:
    """Return the tensors that are not written, with the tensors that they are tied to.

    config.json says whether the head is tied to the embedding, even for unknown model types and for classes without
    head.
    """
    known: Mapping[str, str] = {}
    if isinstance(form, Form) and layout.tensors.keys() >= set(form.tied.values()):
        if HEAD not in layout.tensors or HEAD in form.shapes:
            return form.tied
        known = form.tied
    embedding = find_embedding(layout.tensors) if has_tied_head(config) else None
    return {**({} if embedding is None else {HEAD: embedding}), **known}


def drop_tied(layout: Layout, tied: Mapping[str, str]) -> tuple[Layout, list[str]]:
    """Return the layout without the tensors that are tied to others and equal to them, and a note on each."""
    notes = []
    present = {name: source for name, source in tied.items() if name in layout.tensors}
    for name, source in present.items():
        # a salvage: the tied copy replaces a damaged source
        if source in layout.tensors and layout.tensors[source].is_lost and not layout.tensors[name].is_lost:
            layout = replace(layout, tensors={**layout.tensors, source: layout.tensors[name]})
            notes.append(f"{source} is damaged: ckptkit used {name}, which is tied to it")
        elif source in layout.tensors:
            require_equal_tied(layout, name, source)
            notes.append(f"wrote {source} only once: {name} is tied to it and equal")
        else:
            tensors = {source if old == name else old: tensor for old, tensor in layout.tensors.items()}
            layout = replace(layout, tensors=tensors)
            notes.append(f"wrote {name} under the name {source}, because the two are tied")
    return edits.select_entries(layout, lambda name: name not in present), notes


def require_equal_tied(layout: Layout, name: str, tied_to: str) -> None:
    """Raise `Mismatch` if two tied tensors differ, `Unsupported` if they must be computed first. Skips lost ones."""
    if layout.tensors[name].is_lost or layout.tensors[tied_to].is_lost:
        return
    if any(spec.numel and not layout.tensors[tied].chunks for tied in (name, tied_to) if (spec := layout.specs[tied])):
        hint = f"if both are equal, pass --exclude {name}"
        message = f"tied to `{tied_to}`, and ckptkit cannot compare quantized tensors"
        raise Unsupported(message, path=layout.path, tensor=name, hint=hint)
    head = locate_all_chunks(edits.select_and_rename_tensors(layout, {name: tied_to}))
    other = locate_all_chunks(edits.select_entries(layout, tied_to.__eq__))
    if head.tensors == other.tensors:
        return
    message = f"config.json ties it to `{tied_to}`"
    if head.specs != other.specs:
        message += f": expected {other.specs[tied_to]}, found {head.specs[tied_to]}"
        raise Mismatch(message, path=layout.path, tensor=name)
    if compare_layouts(head, other).differing_names:
        hint = "if they were trained separately, pass a --base whose config.json has tie_word_embeddings false"
        raise Mismatch(f"{message}, but their bytes differ", path=layout.path, tensor=name, hint=hint)


def restore_tied(layout: Layout, config: Mapping[str, Any]) -> Layout:
    """Return the layout with the tied tensors that were left out; they refer to the same bytes.

    A model in training has both names in its state dict. So has its checkpoint, if it has recorded key paths.
    """
    if layout.keys or not config:
        return layout
    tied = ties_to_drop(layout, config, closest_form_or_error(layout.tensors.keys(), config))
    omitted = {name: source for name, source in tied.items() if name not in layout.tensors and source in layout.tensors}
    return replace(layout, tensors={**layout.tensors, **{name: layout.tensors[omitted[name]] for name in omitted}})


def require_described_tensors(layout: Layout, form: Form, found_in: str) -> None:
    """Raise `Mismatch` if a tensor that config.json describes is missing or has another shape."""
    needed = form.needed_names
    missing = [name for name in form.shapes if name in needed and name not in layout.tensors]
    if missing:
        rule = find_prefix_rule(missing, layout.tensors)
        number, total = len(missing), len(needed)
        hint = "check that config.json belongs to this model, and that no file of the checkpoint is missing"
        if rule:
            hint = f"--rename '{rule}'"
        elif number == total:
            names = join_few_names(sorted(layout.tensors))
            hint = f"pass --rename 'REGEX=>TEXT' for each name that differs: the checkpoint has {names}"
        message = f"missing: the checkpoint lacks {number} of {total} tensors of the config.json in {found_in}"
        raise Mismatch(message, path=layout.path, tensor=missing[0], hint=hint)
    for name, shape in form.shapes.items():
        if name in layout.tensors and layout.tensors[name].spec.shape != shape:
            have = list(layout.tensors[name].spec.shape)
            message = f"expected shape {list(shape)} (config.json in {found_in}), found {have}"
            hint = "check that config.json belongs to this model"
            raise Mismatch(message, path=layout.path, tensor=name, hint=hint)


def join_few_names(names: Sequence[str]) -> str:
    """Return up to four names, separated by commas."""
    return ", ".join(names[:4]) + (", ..." if names[4:] else "")
