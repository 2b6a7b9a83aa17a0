"""Read and write DeepSpeed's universal checkpoints: one file for each parameter and each of its optimizer states.

Source: deepspeed/checkpoint/ds_to_universal.py, deepspeed/checkpoint/universal_checkpoint.py and
`load_hp_checkpoint_state_from_checkpoint_dir*` in deepspeed/runtime. The file `latest_universal` names a directory with
model states and `zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt`. DeepSpeed loads it at any ZeRO stage and world size, if
its configuration has `"checkpoint": {"load_universal": true}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Mismatch, Report, Unsafe, Unsupported, refuse
from ckptkit.formats.archives.flatten import unflatten
from ckptkit.formats.archives.locate import locate
from ckptkit.formats.archives.state_files import extents_of, places_in
from ckptkit.formats.archives.write_archive import Storages, describe_tensor, make_envelope
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatWriter
from ckptkit.io.file import check_name, is_there, opening, read_at, read_small
from ckptkit.layout import Extent, FileOffset, Layout, NewFile, StoredTensor, WriterOptions
from ckptkit.plugins.deepspeed.auto_experts import LAYERS
from ckptkit.plugins.deepspeed.experts import without_number
from ckptkit.plugins.deepspeed.names import is_ours
from ckptkit.plugins.deepspeed.read_universal import (
    MASTER,
    NAME,
    OPTIMIZER,
    POINTER,
    STEP,
    ZERO,
    check_files,
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
            raise Mismatch(
                "the optimizer contains the parameter, the model does not", path=wanted.root, tensor=unknown[0]
            )
        if not entries.states:
            hint = "pass --to hf for the weights alone: `universal` needs an optimizer"
            raise Mismatch("expected optimizer states by parameter name, found none", path=wanted.root, hint=hint)
        return entries

    def tied(self, wanted: Layout) -> dict[str, str]:
        """Return the weights that share their storage with a trained weight, mapped to the name of that weight."""
        trained = {key: name for name in self.states if (key := stored_weight(wanted, self.weights[name])) is not None}
        stored_weights = {
            name: stored_weight(wanted, entry) for name, entry in self.weights.items() if name not in self.states
        }
        return {name: trained[stored] for name, stored in stored_weights.items() if stored in trained}


def stored_weight(wanted: Layout, entry: str) -> StoredTensor | None:
    """Return the stored tensor of a weight; None for a non-tensor entry or a tensor without data."""
    stored = wanted.tensors.get(entry)
    return stored if stored and stored.chunks else None


def check_experts(wanted: Layout, entries: UniversalEntries) -> None:
    """Raise `Unsupported` for a model with experts."""
    hint = "pass --to dcp or --to pt"
    expert = next(filter(without_number, entries.weights), None)
    if expert is not None:
        message = "this is an expert: each rank would look for its own experts under the same names and find other ones"
        raise Unsupported(message, path=wanted.root, tensor=expert, hint=hint)
    if LAYERS in entries.others:
        message = f"`{LAYERS}` lists experts that AutoEP fused: ckptkit cannot write the marks that their files need"
        raise Unsupported(message, path=wanted.root, hint=hint)


def files_for(wanted: Layout, options: WriterOptions) -> Iterator[NewFile]:
    """Yield the files for a model under `model` and its optimizer by name under `optimizer`."""
    entries = UniversalEntries.of(wanted)
    check_experts(wanted, entries)
    tag = tag_for(wanted)
    for parameter, states in entries.states.items():
        if "/" in parameter or "\0" in parameter or parameter in ("", ".", ".."):
            raise Unsafe("a directory cannot have this name", path=wanted.root, tensor=parameter)
        for state_name, entry in {MASTER: entries.weights[parameter], **states}.items():
            yield parameter_file(
                wanted, path_from_root(tag, ZERO, parameter, f"{state_name}.pt"), entry, is_bare=state_name == STEP
            )
    yield model_states(wanted, entries, path_from_root(tag, _MODEL_STATES), options.world_size, with_module=True)
    yield model_states(wanted, entries, path_from_root(tag, _MODEL_STATES_3), options.world_size, with_module=False)
    yield optimizer_states(wanted, entries, path_from_root(tag, ZERO, OPTIMIZER))
    yield NewFile(POINTER, len(tag), [(0, tag.encode())])


def tag_for(wanted: Layout) -> str:
    steps = layer_number(wanted, "global_steps")
    return "universal" if steps is None else f"global_step{steps}"


def layer_number(wanted: Layout, name: str) -> int | None:
    value = Storages(wanted).value(name) if name in wanted.blobs else None
    return value if type(value) is int and value >= 0 else None


def parameter_file(wanted: Layout, path: str, entry: str, *, is_bare: bool) -> NewFile:
    """Return the file of one tensor. DeepSpeed expects the step without a dict around it."""
    storages = Storages(wanted)
    value = storages.value(entry)
    return torch_save_file(path, value if is_bare else {"cat_dim": 0, "param": value}, storages)


def torch_save_file(path: str, value: Any, storages: Storages) -> NewFile:
    """Return a torch.save file, with space for the storages of its tensors."""
    envelope = make_envelope(dump(value), storages.contents)
    return NewFile(path, envelope.nbytes, envelope.parts)


def model_states(
    wanted: Layout, entries: UniversalEntries, path: str, world_size: int, *, with_module: bool
) -> NewFile:
    """Return a model-states file: shapes by name, and with `with_module` also the untrained entries."""
    storages = Storages(wanted)
    tied = entries.tied(wanted)
    kept = [name for name in entries.weights if name not in entries.states and name not in tied]
    others = [name for name in entries.others if wanted.key(name)[0] not in _OF_OPTIMIZER | _DROPPED]
    saved_names = others if with_module else [name for name in others if name in wanted.blobs]
    saved = unflatten(saved_names, wanted.key, storages.value) if saved_names else {}
    defaults: dict[str, Any] = {"global_steps": 0, "skipped_steps": 0, "global_samples": 0, "lr_scheduler": None}
    settings: dict[str, Any] = {"data_sampler": None, "random_ltd": None, "ds_config": {}, "ds_version": _VERSION}
    value = {
        **defaults,
        **settings,
        **saved,
        "module": {name: storages.value(entries.weights[name]) for name in kept} if with_module else {},
        "buffer_names": kept,
        "optimizer": None,
        "param_shapes": [weight_shapes(wanted, entries, names) for names in groups_of(wanted, entries)[1]],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": tied,
        "dp_world_size": world_size,
        "mp_world_size": 1,
    }
    return torch_save_file(path, value, storages)


def weight_shapes(wanted: Layout, entries: UniversalEntries, names: Iterable[str]) -> dict[str, Record]:
    return {name: Record(_SIZE, (wanted.tensors[entries.weights[name]].spec.shape,)) for name in names}


def groups_of(wanted: Layout, entries: UniversalEntries) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Return the hyperparameters and the parameter names of each group; one group if the source has no groups."""
    storages = Storages(wanted)
    if not entries.groups:
        return [{}], [list(entries.states)]
    groups = unflatten(entries.groups, lambda name: wanted.key(name)[len(GROUPS) :], storages.value)
    names = [group.pop("params", None) for group in groups]
    listed = [name for group in names if isinstance(group, list) for name in group]
    if None in names or sorted(map(str, listed)) != sorted(entries.states):
        message = f"expected a state for {len(listed)} parameters (optimizer groups), found {len(entries.states)}"
        raise Mismatch(message, path=wanted.root, hint="pass a checkpoint whose optimizer has names in all groups")
    return groups, names


def optimizer_states(wanted: Layout, entries: UniversalEntries, path: str) -> NewFile:
    """Return the file with the shared optimizer state, once as ZeRO 1 and 2 read it and once for ZeRO 3."""
    storages = Storages(wanted)
    settings = [{**group, "params": [i]} for i, group in enumerate(groups_of(wanted, entries)[0])]
    saved_names = [name for name in entries.others if wanted.key(name)[0] in _OF_OPTIMIZER]
    saved = unflatten(saved_names, wanted.key, storages.value) if saved_names else {}
    if isinstance(saved.get("loss_scaler"), dict):
        kind = "DynamicLossScaler" if saved["loss_scaler"].get("dynamic") else "LossScaler"
        scaler = Record(Global(_SCALERS, kind), (), is_new=True)
        scaler.state = saved["loss_scaler"]
        saved["loss_scaler"] = scaler
    state = {"step": step_of(wanted, entries, storages)}
    value = {
        "ds_version": _VERSION,
        **saved,
        "param_groups": settings,
        "optimizer_state_dict": {"state": {0: state}, "param_groups": settings},
    }
    return torch_save_file(path, value, storages)


def step_of(wanted: Layout, entries: UniversalEntries, storages: Storages) -> Any:
    """Return the step of the first parameter, which ZeRO 3 uses for all; None if the groups count the steps."""
    entry = next(iter(entries.states.values())).get(STEP)
    if entry is None:
        return None
    if entry in wanted.blobs:
        return storages.value(entry)
    step_layout = Layout(wanted.root, wanted.format, {entry: wanted.tensors[entry]}, keeper=wanted.keeper)
    chunk = next(chunk for chunk in locate(step_layout).tensors[entry].chunks if chunk.box.numel)
    with opening(wanted.root / chunk.path) as file:
        data = read_at(file, chunk.length, chunk.offset)
    key = str(len(storages.contents))
    storages.contents[key] = data
    return describe_tensor(wanted.tensors[entry].spec, key)


_POINTER_LIMIT = 1 << 10  # bytes


class Universal(FormatWriter):
    """The universal checkpoint format: the directory with all files, or a directory with a pointer to it."""

    name = NAME
    known_by = "`zero/optimizer_state.pt`"
    needs_names = True
    needs_shapes = True

    def owns(self, name: str) -> bool:
        """Return True for the parameter directory, the model states and the pointer file."""
        return name in (ZERO, POINTER) or is_ours(name)

    def detect(self, path: Path) -> bool:
        """Return True for a directory with a parameter directory, or with a pointer to such a directory."""
        return path.is_dir() and tag_of(path) is not None

    def check_names(self, path: Path, report: Report) -> None:
        """Report each parameter file that is missing."""
        check_files(path, tag_of(path) or "", report)

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout: the model under `model`, in fp32, and the optimizer by name under `optimizer`."""
        return read_universal(path, tag_of(path) or "", report)

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return every zip entry of every file."""
        return extents_of(layout, (name for name in layout.descriptions if name != POINTER), report)

    def arrange(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        """Return one file per parameter and optimizer state, the model states for all ZeRO stages, and the pointer."""
        return tuple(files_for(wanted, options))

    def checksum_places(self, made: Layout) -> Iterator[tuple[FileOffset, int]]:
        """Return both byte ranges of the CRC-32 of each storage."""
        return places_in(made, sorted({chunk.path for tensor in made.tensors.values() for chunk in tensor.chunks}))


def tag_of(path: Path) -> str | None:
    """Return the directory in `path` with the parameters, "" if `path` is that directory; None if there is none."""
    if holds_parameters(path):
        return ""
    if not is_there(path / POINTER) or is_there(path / "latest"):  # a directory with both pointers is a run
        return None
    try:
        tag = read_small(path / POINTER, _POINTER_LIMIT).decode("utf-8").strip()
        check_name(tag, path)
    except (Corrupt, Unsafe, UnicodeDecodeError):
        return None
    return tag if holds_parameters(path / tag) else None


def holds_parameters(path: Path) -> bool:
    return is_there(path / ZERO / OPTIMIZER)
