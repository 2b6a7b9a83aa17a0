"""Read and write DeepSpeed's universal checkpoints: one file for each parameter and each of its optimizer states.

Source: deepspeed/checkpoint/ds_to_universal.py, deepspeed/checkpoint/universal_checkpoint.py and
`load_hp_checkpoint_state_from_checkpoint_dir*` in deepspeed/runtime. The file `latest_universal` names a directory with
model states and `zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt`. DeepSpeed loads it at any ZeRO stage and world size, if
its configuration has `"checkpoint": {"load_universal": true}`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.engine.read import read_box
from ckptkit.errors import Corrupt, Mismatch, Report, Unsafe, Unsupported, raise_problem
from ckptkit.formats.archives.flatten import unflatten
from ckptkit.formats.archives.locate import locate_in_archives
from ckptkit.formats.archives.torch_save import archive_extents_of, checksum_offsets_in
from ckptkit.formats.archives.write_archive import Storages, make_zip_template, tensor_rebuild_record
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatWriter
from ckptkit.io.file import is_existing_path, read_small, require_plain_file_name
from ckptkit.layout import Extent, FileOffset, Layout, NewFile, WriterOptions
from ckptkit.layout.box import full_box
from ckptkit.plugins.deepspeed.auto_experts import LAYERS
from ckptkit.plugins.deepspeed.experts import split_at_expert_index
from ckptkit.plugins.deepspeed.file_names import is_deepspeed_file
from ckptkit.plugins.deepspeed.read_universal import (
    MASTER,
    NAME,
    OPTIMIZER,
    POINTER,
    STEP,
    ZERO,
    check_parameter_files,
    path_from_root,
    read_universal,
)
from ckptkit.plugins.deepspeed.unpartitioned import GROUPS, MODEL, STATE

# Lay out the files of a universal checkpoint, with space for the data of its tensors.
#
# ZeRO 1 and 2 expect another model-states file than ZeRO 3, and other keys for hyperparameters and step in the
# optimizer file: ckptkit writes both.
_MODEL_STATES = "mp_rank_00_model_states.pt"  # of ZeRO 1 and 2
_MODEL_STATES_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_VERSION = "0.19.8"  # the DeepSpeed version to record if the source has none
_OF_OPTIMIZER = frozenset(["loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"])
_DROPPED = frozenset(["zero_stage"])
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_SIZE = Global("torch", "Size")


@dataclass(slots=True)
class UniversalEntries:
    """The entries of a layout by kind: weights and optimizer states by parameter name, groups, and other entries."""

    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, wanted: Layout) -> UniversalEntries:
        """Return the entries of a layout, sorted into kinds by their key paths.

        Raises `Mismatch` if the optimizer has an unknown parameter, or no states at all.
        """
        entries = cls()
        for name in wanted.names:
            match wanted.key(name):
                case (str(top), str(parameter)) if top == MODEL:
                    entries.weights[parameter] = name
                case (*above, str(parameter), str(what)) if tuple(above) == STATE:
                    entries.states.setdefault(parameter, {})[what] = name
                case (*above, int(), str()) if tuple(above) == GROUPS:
                    entries.groups.append(name)
                case _:
                    entries.others.append(name)
        unknown = sorted(entries.states.keys() - entries.weights.keys())
        if unknown:
            message = "the optimizer contains the parameter, the model does not"
            raise Mismatch(message, path=wanted.root, tensor=unknown[0])
        if not entries.states:
            hint = "pass --to hf for the weights alone: `universal` needs an optimizer"
            raise Mismatch("expected optimizer states by parameter name, found none", path=wanted.root, hint=hint)
        return entries


def universal_files(wanted: Layout, options: WriterOptions) -> Iterator[NewFile]:
    """Yield the files for a model under `model` and its optimizer by name under `optimizer`."""
    entries = UniversalEntries.of(wanted)
    hint = "pass --to dcp or --to pt"
    expert = next(filter(split_at_expert_index, entries.weights), None)
    if expert is not None:
        message = "this is an expert: each rank would look for its own experts under the same names and find other ones"
        raise Unsupported(message, path=wanted.root, tensor=expert, hint=hint)
    if LAYERS in entries.others:
        message = f"`{LAYERS}` lists experts that AutoEP fused: ckptkit cannot write the marks that their files need"
        raise Unsupported(message, path=wanted.root, hint=hint)
    steps = Storages(wanted).picklable_value_of("global_steps") if "global_steps" in wanted.blobs else None
    tag = f"global_step{steps}" if type(steps) is int and steps >= 0 else "universal"
    for parameter, states in entries.states.items():
        if "/" in parameter or "\0" in parameter or parameter in ("", ".", ".."):
            raise Unsafe("a directory cannot have this name", path=wanted.root, tensor=parameter)
        for state_name, entry in {MASTER: entries.weights[parameter], **states}.items():
            storages = Storages(wanted)
            value = storages.picklable_value_of(entry)
            # DeepSpeed expects the step without a dict around it
            content = value if state_name == STEP else {"cat_dim": 0, "param": value}
            yield make_torch_save_file(path_from_root(tag, ZERO, parameter, f"{state_name}.pt"), content, storages)
    for name, with_module in ((_MODEL_STATES, True), (_MODEL_STATES_3, False)):
        path = path_from_root(tag, name)
        yield make_model_states_file(wanted, entries, path, options.world_size, with_module=with_module)
    yield make_optimizer_states_file(wanted, entries, path_from_root(tag, ZERO, OPTIMIZER))
    yield NewFile(POINTER, len(tag), [(0, tag.encode())])


def make_torch_save_file(path: str, value: Any, storages: Storages) -> NewFile:
    """Return a torch.save file, with space for the storages of its tensors."""
    envelope = make_zip_template(dump(value), storages.contents)
    return NewFile(path, envelope.nbytes, envelope.parts)


def make_model_states_file(
    wanted: Layout, entries: UniversalEntries, path: str, world_size: int, *, with_module: bool
) -> NewFile:
    """Return a model-states file: shapes by name, and with `with_module` also the untrained entries."""
    storages = Storages(wanted)
    # a weight is tied if it shares its storage with a trained weight
    weights = {name: wanted.tensors[entry] for name, entry in entries.weights.items() if entry in wanted.tensors}
    trained = {weights[name]: name for name in entries.states if name in weights and weights[name].chunks}
    tied = {
        name: trained[weight] for name, weight in weights.items() if name not in entries.states and weight in trained
    }
    kept = [name for name in entries.weights if name not in entries.states and name not in tied]
    others = [name for name in entries.others if wanted.key(name)[0] not in _OF_OPTIMIZER | _DROPPED]
    saved_names = others if with_module else [name for name in others if name in wanted.blobs]
    saved = unflatten(saved_names, wanted.key, storages.picklable_value_of) if saved_names else {}
    value = {
        **dict.fromkeys(("global_steps", "skipped_steps", "global_samples"), 0),
        **dict.fromkeys(("lr_scheduler", "data_sampler", "random_ltd")),
        "ds_config": {},
        "ds_version": _VERSION,
        **saved,
        "module": {name: storages.picklable_value_of(entries.weights[name]) for name in kept} if with_module else {},
        "buffer_names": kept,
        "optimizer": None,
        "param_shapes": [
            {name: Record(_SIZE, (wanted.tensors[entries.weights[name]].spec.shape,)) for name in names}
            for names in settings_and_names_by_group(wanted, entries)[1]
        ],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": tied,
        "dp_world_size": world_size,
        "mp_world_size": 1,
    }
    return make_torch_save_file(path, value, storages)


def settings_and_names_by_group(
    wanted: Layout, entries: UniversalEntries
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Return the hyperparameters and the parameter names of each group; one group if the source has no groups."""
    storages = Storages(wanted)
    if not entries.groups:
        return [{}], [list(entries.states)]
    groups = unflatten(entries.groups, lambda name: wanted.key(name)[len(GROUPS) :], storages.picklable_value_of)
    names = [group.pop("params", None) for group in groups]
    listed = [name for group in names if isinstance(group, list) for name in group]
    if None in names or sorted(map(str, listed)) != sorted(entries.states):
        message = f"expected a state for {len(listed)} parameters (optimizer groups), found {len(entries.states)}"
        raise Mismatch(message, path=wanted.root, hint="pass a checkpoint whose optimizer has names in all groups")
    return groups, names


def make_optimizer_states_file(wanted: Layout, entries: UniversalEntries, path: str) -> NewFile:
    """Return the file with the shared optimizer state, once as ZeRO 1 and 2 read it and once for ZeRO 3."""
    storages = Storages(wanted)
    settings = [{**group, "params": [i]} for i, group in enumerate(settings_and_names_by_group(wanted, entries)[0])]
    saved_names = [name for name in entries.others if wanted.key(name)[0] in _OF_OPTIMIZER]
    saved = unflatten(saved_names, wanted.key, storages.picklable_value_of) if saved_names else {}
    if isinstance(saved.get("loss_scaler"), dict):
        kind = "DynamicLossScaler" if saved["loss_scaler"].get("dynamic") else "LossScaler"
        scaler = Record(Global(_SCALERS, kind), (), is_new=True)
        scaler.state = saved["loss_scaler"]
        saved["loss_scaler"] = scaler
    state = {"step": find_common_step(wanted, entries, storages)}
    value = {
        "ds_version": _VERSION,
        **saved,
        "param_groups": settings,
        "optimizer_state_dict": {"state": {0: state}, "param_groups": settings},
    }
    return make_torch_save_file(path, value, storages)


def find_common_step(wanted: Layout, entries: UniversalEntries, storages: Storages) -> Any:
    """Return the step of all parameters, which ZeRO 3 stores once; None if the groups count the steps.

    Raises `Unsupported` if the parameters have different steps: ZeRO 1 and 2 stop there (`Steps [...] are not equal`),
    and ZeRO 3 takes the first one for all.
    """
    entry_by_parameter = {name: state[STEP] for name, state in entries.states.items() if STEP in state}
    if not entry_by_parameter:
        return None
    tensors = {entry: wanted.tensors[entry] for entry in entry_by_parameter.values() if entry in wanted.tensors}
    located = locate_in_archives(Layout(wanted.root, wanted.format, tensors, keeper=wanted.keeper))
    contents = {
        entry: bytes(read_box(located, entry, full_box(tensors[entry].spec.shape), jobs=1)) for entry in tensors
    }

    def step_of(parameter: str) -> Any:
        entry = entry_by_parameter[parameter]
        if entry in wanted.blobs:
            return storages.picklable_value_of(entry)
        code = _STEP_CODES.get(tensors[entry].spec.dtype.name)
        return struct.unpack_from(code, contents[entry])[0] if code and contents[entry] else contents[entry]

    first = next(iter(entry_by_parameter))
    step = step_of(first)
    for other in entry_by_parameter:
        if step_of(other) != step:
            found = f"found {step} for `{first}` and {step_of(other)} for `{other}`"
            hint = "convert to a format that keeps a step for each parameter, such as dcp"
            raise Unsupported(f"DeepSpeed keeps one step for all parameters, {found}", path=wanted.path, hint=hint)
    entry = entry_by_parameter[first]
    if entry in wanted.blobs:
        return step
    key = str(len(storages.contents))
    storages.contents[key] = contents[entry]
    return tensor_rebuild_record(wanted.tensors[entry].spec, key)


_STEP_CODES = {"float32": "f", "float64": "d", "int32": "i", "int64": "q"}  # of `struct`
_POINTER_LIMIT = 1 << 10  # bytes


class Universal(FormatWriter):
    """The universal checkpoint format: the directory with all files, or a directory with a pointer to it."""

    name = NAME
    known_by = "`zero/optimizer_state.pt`"
    drafted_by = "ckptkit.plugins.deepspeed.draft_universal:draft_universal"
    needs_shapes = True

    def owns_file(self, name: str) -> bool:
        return name in (ZERO, POINTER) or is_deepspeed_file(name)

    def detect(self, path: Path) -> bool:
        """Return True for a directory with a parameter directory, or with a pointer to such a directory."""
        return path.is_dir() and find_tag_directory(path) is not None

    def check_files_complete(self, path: Path, report: Report) -> None:
        check_parameter_files(path, find_tag_directory(path) or "", report)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout: the model under `model`, in fp32, and the optimizer by name under `optimizer`."""
        return read_universal(path, find_tag_directory(path) or "", report)

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        return archive_extents_of(layout, (name for name in layout.descriptions if name != POINTER), report)

    def lay_out_files(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        """Return one file per parameter and optimizer state, the model states for all ZeRO stages, and the pointer."""
        return tuple(universal_files(wanted, options))

    def checksum_offsets(self, written: Layout) -> Iterator[tuple[FileOffset, int]]:
        return checksum_offsets_in(written, sorted(written.paths))


def find_tag_directory(path: Path) -> str | None:
    """Return the directory in `path` with the parameters, "" if `path` is that directory; None if there is none."""
    if has_parameter_directory(path):
        return ""
    # a directory with both pointers is a run
    if not is_existing_path(path / POINTER) or is_existing_path(path / "latest"):
        return None
    try:
        tag = read_small(path / POINTER, _POINTER_LIMIT).decode("utf-8").strip()
        require_plain_file_name(tag, path)
    except (Corrupt, Unsafe, UnicodeDecodeError):
        return None
    return tag if has_parameter_directory(path / tag) else None


def has_parameter_directory(path: Path) -> bool:
    return is_existing_path(path / ZERO / OPTIMIZER)
