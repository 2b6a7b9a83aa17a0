"""Find exports that other tools broke. Their tensors are undamaged, so the fix is certain.

Kinds: a wrong or missing index, entries without dtype, a dtype that does not exist, the config of a missing adapter, an
empty adapter, names that end with the number of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.adapters.find import find_empty_adapter_error
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.trainer_evidence import read_json_object
from ckptkit.errors import Corrupt, IOFailure, NotACheckpoint, Unsafe, Unsupported
from ckptkit.formats.hf import INDEX
from ckptkit.formats.index_file import read_index
from ckptkit.formats.safetensors_headers import load_raw_header, parse_header_entry, read_shard_starts, require_no_gaps
from ckptkit.io.file import names_in
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.wrappers import may_be_adapter
from ckptkit.models.adapter_config_differences import ADAPTER_CONFIG
from ckptkit.models.companions import CONFIG, find_companions
from ckptkit.models.expected import closest_form
from ckptkit.plugins.doctor.finding import (
    Finding,
    Fix,
    consolidate_fix,
    has_loadable_weight_files,
    output_path_for,
    rewrite_fix,
)
from ckptkit.plugins.doctor.load_target import KeyMismatch, LoadTarget, TargetModel

_HF = "hf"
_UNREAD = (Corrupt, IOFailure, NotACheckpoint, Unsafe, Unsupported)
# from `experts.gate_proj.weight100` to `experts.100.gate_proj.weight`
_EXPERT = (r"(\.experts)\.([^.]+)\.weight([0-9]+)$", r"\1.\3.\2.weight")
_SUFFIX = ".safetensors"
_SERIES = re.compile(r"(.*?)[-_.]?([0-9]+)-of-([0-9]+)(.*)")  # such as `model-00001-of-00002.safetensors`


def find_broken_export(checkpoint: Checkpoint) -> list[Finding]:
    """Return the problems of a model's index or headers; [] unless its tensors are certainly complete."""
    component = checkpoint.model_component
    broken = find_complete_export(component) if may_be_broken_export(component) else None
    if broken is None:
        return []
    headers, index = broken
    fix = Fix.of("doctor", checkpoint.path, fix=output_path_for(checkpoint.path, "fixed"))
    no_dtype = "lists the tensor without dtype and elements (torch does this for tied weights): loaders fail"
    findings = [Finding("empty_entry", name, f"`{file}` {no_dtype}", fix) for name, file in headers.empty.items()]
    tensors, listed = headers.layout.tensors, index or {}
    unlisted = [name for name, tensor in tensors.items() if listed.get(name) != tensor.chunks[0].path]
    if unlisted:
        what = "there is no index" if index is None else f"`{INDEX}` does not list {len(unlisted)} of them"
        message = f"{len(headers.layout.paths)} files hold {len(tensors)} tensors, and {what}"
        findings.append(Finding("index", None, message, fix))
    return findings


def may_be_broken_export(component: Component) -> bool:
    """Return whether a directory of safetensors cannot be read, or contains files that its index does not list."""
    if component.reader.name != _HF or not component.path.is_dir():
        return False
    try:
        return any(
            name.endswith(".safetensors") and name not in component.layout.paths for name in names_in(component.path)
        )
    except _UNREAD:
        return True


def find_complete_export(component: Component) -> tuple[HeaderFiles, Mapping[str, str] | None] | None:
    """Return the headers of a model's files, and its index; None unless they certainly list the complete model.

    This is certain if they are exactly the tensors that config.json describes, or if the files are a complete numbered
    series and no tensor is missing.
    """
    try:
        headers = join_safetensors_headers(component.path, _HF)
        index = find_index_in(component.path)
        config = find_companions(component.path, component.base).config
    except _UNREAD:
        return None
    if headers is None or not headers.layout.tensors:
        return None
    model = TargetModel.of(CONFIG, config or {}, {})
    shapes = headers.layout.shapes
    misfits = KeyMismatch.of(shapes, closest_form(model.forms, shapes.keys()), model) if model.forms else None
    is_complete = headers.is_series and not (misfits and misfits.missing)
    fits = misfits is not None and not misfits
    return (headers, index) if is_complete or fits else None


def find_index_in(root: Path) -> Mapping[str, str] | None:
    """Return the file of each tensor as the index lists it; {} if the index cannot be read, None if there is none."""
    try:
        return read_index(root / INDEX)[0] if INDEX in names_in(root) else None
    except Corrupt:
        return {}


def find_missing_index(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if several numbered files have no index. transformers needs it."""
    component = target.checkpoint.model_component
    files, is_of_ranks = component.layout.paths, component.layout.world_size is not None
    if component.reader.name != _HF or is_of_ranks or len(files) < 2:
        return
    if not (component.path / INDEX).exists():
        message = f"`{INDEX}` is missing beside {len(files)} files, so transformers finds no model"
        yield Finding("index", None, message, consolidate_fix(target.checkpoint))


def find_invalid_config_dtype(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if config.json names a dtype that torch does not have, such as an empty string."""
    own = target.checkpoint.companions
    config = own.config or {}
    named = {key: config[key] for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)}
    for key, value in named.items() if has_loadable_weight_files(target.checkpoint) else ():
        if value != "auto" and value.removeprefix("torch.") not in DTYPES:
            message = f"`{key}` of {CONFIG} is `{value}`: transformers fails with an AttributeError of torch"
            yield Finding("config_dtype", None, message, consolidate_fix(target.checkpoint))


def find_stray_adapter_config(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if a full model has an adapter_config.json beside it: transformers then loads another model."""
    component = target.checkpoint.model_component
    if not has_loadable_weight_files(target.checkpoint) or component.is_adapter or not component.path.is_dir():
        return
    names = names_in(component.path)
    if may_be_adapter(component.layout.tensors) or any(name.startswith("adapter_model.") for name in names):
        return
    if ADAPTER_CONFIG in names and read_json_object(component.path / ADAPTER_CONFIG).get("base_model_name_or_path"):
        message = f"`{ADAPTER_CONFIG}` is here without an adapter: transformers loads the base that it names, and fails"
        yield Finding("adapter_config", None, message, consolidate_fix(target.checkpoint))


def find_empty_adapter(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the saved adapter has tensors without elements. The training state may contain its weights."""
    checkpoint = target.checkpoint
    saved = checkpoint.exported_weights or checkpoint.model_component
    error = find_empty_adapter_error(saved.layout) if saved.is_adapter else None
    if error is None:
        return
    if saved is checkpoint.model_component:
        yield Finding("empty_adapter", error.tensor, f"{error.message} ({error.hint})")
    else:
        message = f"{error.message}; `{checkpoint.model_component.place}` contains the weights"
        yield Finding("empty_adapter", error.tensor, message, consolidate_fix(checkpoint))


def find_experts_numbered_last(
    target: LoadTarget, model: TargetModel, misfits: KeyMismatch
) -> tuple[KeyMismatch, Finding] | None:
    """Return the finding that experts have their number at the end of the name, and the mismatch without them.

    Returns None if that does not explain the names.
    """
    pattern = re.compile(_EXPERT[0])
    names = tuple(name for name in misfits.extra if pattern.search(name))
    if not names:
        return None
    new_names = {name: pattern.sub(_EXPERT[1], name) for name in target.weight_shapes}
    shapes = {new_names[name]: shape for name, shape in target.weight_shapes.items()}
    rest = KeyMismatch.of(shapes, closest_form(model.forms, shapes.keys()), model)
    if len(shapes) != len(target.weight_shapes) or any(new_names[name] in rest.extra for name in names):
        return None
    message = f"the expert's number is at the end of the name: in {model.name} it is `{new_names[names[0]]}`"
    fix = rewrite_fix(target.checkpoint, rename=("=>".join(_EXPERT),), base=target.base)
    return rest, Finding("expert_names", names[0], message, fix, names)


@dataclass(frozen=True, slots=True)
class HeaderFiles:
    """The tensors in the headers of a directory, and entries without elements. `is_series`: numbered and complete."""

    layout: Layout
    empty: Mapping[str, str]  # the file of each entry
    is_series: bool


def join_safetensors_headers(root: Path, format_name: str) -> HeaderFiles | None:
    """Return the contents of all safetensors files in a directory as a layout of the format `format_name`.

    Returns None if that is ambiguous: two files have a tensor of one name, or a rank wrote only its shards.
    """
    tensors: dict[str, StoredTensor] = {}
    empty: dict[str, str] = {}
    files = set()
    for file in sorted(file for file in names_in(root) if file.endswith(_SUFFIX)):
        header, start, size = load_raw_header(root / file)
        if read_shard_starts(header.pop("__metadata__", None), root / file):
            return None
        dropped = {key for key, entry in header.items() if is_unfilled_header_entry(entry)}
        chunks = {
            key: parse_header_entry(key, header[key], None, root / file, start) for key in header.keys() - dropped
        }
        require_no_gaps(chunks, root / file, start, size)
        if chunks.keys() & tensors.keys():
            return None
        for key, chunk in sorted(chunks.items()):
            tensors[key] = StoredTensor(Spec(chunk.dtype, chunk.size), (chunk,))
        empty |= dict.fromkeys(dropped, file)
        files |= {file} if chunks else set()
    matches = [match for file in files if (match := _SERIES.fullmatch(file))]
    kinds = {(match[1], int(match[3]), match[4]) for match in matches}
    numbers = {int(match[2]) for match in matches}
    is_numbered = len(matches) == len(files) and numbers == set(range(1, len(files) + 1))
    is_series = is_numbered and len(kinds) == 1 and next(iter(kinds))[1] == len(files)
    return HeaderFiles(Layout(root, format_name, tensors), empty, is_series)


def is_unfilled_header_entry(entry: Any) -> bool:
    """Return whether an entry is empty, without dtype and elements, like torch's `_FqnData` before it is filled."""
    if not isinstance(entry, dict) or entry.get("dtype") != "":
        return False
    offsets = entry.get("data_offsets")
    return isinstance(offsets, list) and len(offsets) == 2 and offsets[0] == offsets[1]
