"""Read a universal checkpoint. From ZeRO 1 or 2 its tensors have shapes; from ZeRO 3 they are flat and have no step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path, PurePosixPath

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsafe, Unsupported, errors_at
from ckptkit.formats.archives.flatten import Flattening, find_dict_items
from ckptkit.formats.archives.torch_save import StateFile, read_state_file
from ckptkit.formats.pickles.tensor_calls import as_tensor_record, is_pickled_tensor
from ckptkit.io.file import is_existing_path, list_directories, names_in
from ckptkit.layout import Blob, Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import Shape, full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.plugins.deepspeed.experts import split_at_expert_index
from ckptkit.plugins.deepspeed.file_names import DeepSpeedFiles, files_of_part
from ckptkit.plugins.deepspeed.model_states import ModelStates, read_model_states
from ckptkit.plugins.deepspeed.modules import put_low_precision_value, put_tied_weights
from ckptkit.plugins.deepspeed.unpartitioned import MODEL, STATE, Gathering
from ckptkit.plugins.deepspeed.values import dict_or_empty, require_counts, require_dict, require_each

NAME = "universal"
ZERO = "zero"
MASTER = "fp32"
STEP = "step"
OPTIMIZER = "optimizer_state.pt"
POINTER = "latest_universal"
_KEPT = DTYPES["float32"]  # dtype of DeepSpeed's master weights and optimizer states
_INNER = "optimizer_state_dict"  # from ZeRO 3
_USED = frozenset(
    [
        *("param_groups", _INNER, "fp32_flat_groups", "group_paddings", "param_alignment_paddings", "partition_count"),
        *("base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings", "ds_version"),
    ]
)


def read_universal(root: Path, tag: str, report: Report) -> Layout:
    """Return the layout of the directory `tag` in `root`, or of `root` itself if `tag` is empty.

    Reports files that are missing or cannot be read. A missing optimizer-state file is not detected, because no other
    file lists it.
    """
    models = list(read_models(root, tag))
    shapes = [{name: full_shape(models[0], name, group[name]) for name in group} for group in models[0].shapes or ()]
    for model in models[1:]:
        for known, group in zip(shapes, model.shapes or (), strict=False):
            known.update({name: full_shape(model, name, shape) for name, shape in group.items()})
    expert = next((name for group in shapes for name in group if split_at_expert_index(name)), None)
    if expert is not None:
        message = "expected an expert's number in the full model, found its number on one rank, which other ranks reuse"
        raise Unsupported(message, path=root / tag, tensor=expert)
    gathering = Gathering()
    described = {path_from_root(tag, name) for name in names_in(root / tag) if name.endswith("_model_states.pt")}
    trained: dict[str, StoredTensor] = {}
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        files_by_state = dict(parameter_paths_by_state(root, tag, name))
        described |= set(files_by_state.values())
        for state_name, path in {MASTER: path_from_root(tag, ZERO, name, f"{MASTER}.pt"), **files_by_state}.items():
            put_parameter_file(gathering, root, path, name, state_name, shape, report)
        trained[name] = gathering.flat.tensors[f"{MODEL}.{name}"]
    for model in models[:1] if models[0].slices is not None else models:
        put_untrained_and_tied(gathering, model, trained)
    described |= set(put_untrained_from_files(gathering, root, tag, trained, report))
    path = path_from_root(tag, ZERO, OPTIMIZER)
    try:
        put_shared_optimizer_state(gathering, read_state_file(root, path), shapes)
    except CkptError as error:
        report(error.blame(path=root / path))
    for key, value in models[0].others.items():
        if key not in gathering.flat.keys:
            gathering.put_other_entry(models[0].flattening, key, value)
    flat = gathering.flat
    files = tuple(sorted(described | {path} | ({POINTER} if tag else set())))
    return Layout(root, NAME, flat.tensors, flat.blobs, flat.keys, descriptions=files, twins=gathering.twins)


def full_shape(model: ModelStates, name: str, shape_on_rank: Shape) -> Shape:
    """Return the full shape of a parameter from its `shape_on_rank` (fused experts, tensor parallelism)."""
    if model.slices is not None:
        return model.slices.slicing_of(name).shape
    return (model.auto_layers[name].experts, *shape_on_rank[1:]) if name in model.auto_layers else shape_on_rank


def path_from_root(*names: str) -> str:
    return str(PurePosixPath(*names))


def read_models(root: Path, tag: str) -> Iterator[ModelStates]:
    """Yield one model-states file per model part: the shared file, or the file of the first rank."""
    files = DeepSpeedFiles.of(names_in(root / tag), root / tag)
    if not files.models:
        raise Incomplete("`*_model_states.pt` is missing, which has the names and shapes", path=root / tag)
    for of_part in (files_of_part(files.models, part) for part in files.parts):
        if of_part:
            name = path_from_root(tag, next(iter(of_part.values())))
            with errors_at(path=root / name):
                model = read_model_states(read_state_file(root, name))
            yield model


def parameter_paths_by_state(root: Path, tag: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the state name (`fp32`, `exp_avg`, ...) and the path of each file of a parameter.

    Raises `Unsafe` if the name leads outside of the checkpoint.
    """
    folder = root / tag / ZERO / name
    if "/" in name or folder.is_symlink() or (root / tag / ZERO).is_symlink():
        raise Unsafe(f"`{name!a}` points outside of the checkpoint's directory", path=root / tag)
    for file in sorted(names_in(folder)) if folder.is_dir() else ():
        if file.endswith(".pt"):
            yield file.removesuffix(".pt"), path_from_root(tag, ZERO, name, file)


def missing_parameter_file_error(path: Path) -> Incomplete:
    return Incomplete("the file is missing", path=path, hint="copy the missing file here")


def put_parameter_file(
    gathering: Gathering, root: Path, path: str, name: str, state_name: str, shape: Shape, report: Report
) -> None:
    """Put the only tensor of a file: master weight, optimizer state or step.

    A flat tensor gets its known `shape`. Reports a file that cannot be read or has another number of elements, and puts
    unreadable chunks instead. A step has no known shape and is left out.
    """
    key_path = (MODEL, name) if state_name == MASTER else (*STATE, name, state_name)
    try:
        if not is_existing_path(root / path):
            raise missing_parameter_file_error(root / path)
        file = read_state_file(root, path)
        value = require_dict(file.value, path).get("param") if find_dict_items(file.value) is not None else file.value
        stored = Flattening(file.entries, path).make_entry(value)
        if not isinstance(stored, Blob) and state_name != STEP and stored.spec.shape != shape:
            (chunk,) = stored.chunks
            if stored.spec.shape != (prod(shape),) or chunk.strides is not None:
                raise Corrupt(f"expected [{prod(shape)}] (`param_shapes`), found {list(stored.spec.shape)}")
            stored = StoredTensor(Spec(stored.spec.dtype, shape), (chunk._replace(box=full_box(shape)),))
        gathering.put_entry(key_path, stored)
    except CkptError as error:
        if state_name == STEP:
            report(error.blame(tensor=".".join(key_path)))
            return
        report(error.blame(path=root / path))
        unreadable = Chunk.unreadable(full_box(shape), path, _KEPT)
        gathering.put_entry(key_path, StoredTensor(Spec(_KEPT, shape), (unreadable,)))


def put_untrained_and_tied(gathering: Gathering, model: ModelStates, trained: Mapping[str, StoredTensor]) -> None:
    """Put the tied names and all entries of a model-states file that are not trained parameters or copies of them."""
    by_any_name = put_tied_weights(gathering, model.aliases, trained)
    for entry, value in (model.module or {}).items():
        known = by_any_name.get(str(entry))
        if known is not None and model.slices is not None:
            continue  # only the slice of one rank, so not a copy of the full tensor
        if known is not None:
            put_low_precision_value(gathering, model.flattening, str(entry), value, known)
        elif not (is_pickled_tensor(value) and as_tensor_record(value).shape == (0,) and entry not in model.buffers):
            gathering.put_flattened(model.flattening, value, (MODEL, str(entry)))


def put_untrained_from_files(
    gathering: Gathering, root: Path, tag: str, trained: Mapping[str, StoredTensor], report: Report
) -> Iterator[str]:
    """Put the tensors that have a file but are neither trained nor in the model states; yield their file names.

    Reports a file that cannot be read.
    """
    for folder in list_directories(root / tag / ZERO):
        if folder.name in trained or f"{MODEL}.{folder.name}" in gathering.flat.keys:
            continue
        for state_name, path in parameter_paths_by_state(root, tag, folder.name):
            if state_name != MASTER:
                continue
            try:
                file = read_state_file(root, path)
                value = dict_or_empty(file.value, path).get("param")
                if not is_pickled_tensor(value):
                    raise Corrupt("there is no tensor under `param`, and the shape is unknown", path=root / path)
                gathering.put_entry((MODEL, folder.name), Flattening(file.entries, path).make_stored_tensor(value))
            except CkptError as error:
                report(error.blame(tensor=f"{MODEL}.{folder.name}"))
            yield path


def put_shared_optimizer_state(gathering: Gathering, file: StateFile, shapes: Sequence[Mapping[str, Shape]]) -> None:
    """Put the state that all parameters share: parameter groups, steps that have no files, the loss scale."""
    flattening = Flattening(file.entries, file.name)
    saved = require_dict(file.value, file.name)
    inner = dict_or_empty(saved.get(_INNER), _INNER)
    groups = require_each(saved.get("param_groups", inner.get("param_groups")), require_dict, "param_groups")
    states = dict_or_empty(inner.get("state"), "state")
    for i, settings in enumerate(groups):
        numbers = require_counts(settings.get("params"), "params")
        if any(number >= len(shapes) for number in numbers):
            expected = f"expected numbers below {len(shapes)} (`param_shapes`) in a parameter group"
            raise Corrupt(f"{expected}, found {list(numbers[:8])}")
        gathering.put_group(flattening, i, settings, [name for number in numbers for name in shapes[number]])
    for number, named in enumerate(shapes):
        step = require_dict(states[number], "state").get(STEP) if number in states else None
        without_step = [name for name in named if ".".join((*STATE, name, STEP)) not in gathering.flat.keys]
        if step is not None:
            gathering.put_shared_state(flattening, without_step, {STEP: step})
    for entry, value in saved.items():
        if entry not in _USED:
            gathering.put_other_entry(flattening, entry, value)


def check_parameter_files(root: Path, tag: str, report: Report) -> None:
    """Report each parameter in the model states that has no file."""
    for model in read_models(root, tag):
        for group in model.shapes or ():
            for name in group:
                try:
                    if MASTER not in dict(parameter_paths_by_state(root, tag, name)):
                        report(missing_parameter_file_error(root / tag / ZERO / name / f"{MASTER}.pt"))
                except CkptError as error:
                    report(error)
