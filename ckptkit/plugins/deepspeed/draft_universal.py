"""Draft a universal checkpoint: the model and its optimizer by parameter names, each under one key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptkit import trainers
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.optimizers.keys import find_optimizers
from ckptkit.errors import Unsupported, Usage
from ckptkit.formats.archives.non_tensor_entries import load_value, with_new_value
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.io.origin import Origin
from ckptkit.layout import Blob, KeyPath, Layout, Spec, edits
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.wrappers import parameter_name_in_model
from ckptkit.models.names.rename_parameters import (
    GROUP_MAP,
    is_list_of_names,
    is_list_of_parameters,
    key_within_optimizer,
    renamable_parameters_in,
    rename_parameters,
)
from ckptkit.models.names.weights import Weights, find_weights
from ckptkit.state.draft import Conversion, Draft, Entries
from ckptkit.state.draft_checkpoint import with_other_files
from ckptkit.state.optimizers import complete_optimizers, nest_optimizers, rekeying_by_name
from ckptkit.state.options import ConvertOptions

MODEL, OPTIMIZER = "model", "optimizer"
STEPS = "global_steps"
NO_PLACE = "the format cannot store it"
_HALVES = ("bfloat16", "float16")


def draft_universal(checkpoint: Checkpoint, output: Path, options: ConvertOptions) -> Conversion:
    """Draft the components of a checkpoint as one: weights in fp32 under `model`, their states under `optimizer`."""
    if options.dtype:
        raise Usage("this format keeps the dtypes of master weights and moments", hint="drop --dtype")
    if options.changes_names:
        raise Usage("this format keeps names and shapes", hint="convert to another format first")
    named_layout, remarks = nest_optimizers(checkpoint, checkpoint.layout, options.order)
    for optimizer in find_optimizers(named_layout):
        if not optimizer.has_parameter_names:
            rekeying = rekeying_by_name(checkpoint, named_layout, optimizer, options.order, is_required=True)
            named_layout = rekeying.apply_to(named_layout)
            remarks.append(rekeying.remark)
    completed = complete_optimizers(checkpoint, [named_layout], options)
    (named_layout,) = completed.layouts
    options.edits.check_globs([named_layout], checkpoint.path)
    chosen = edits.select_entries(named_layout, options.edits.is_selected)
    weights = frozenset(find_weights(chosen).came_from.values())
    options.edits.check_renames(renamable_parameters_in(chosen, weights), checkpoint.path)
    renamed, names = rename_parameters(chosen, weights, options.edits.make_renaming())
    ways = key_paths_by_name(renamed, find_weights(renamed))
    layout = with_universal_names_and_dtypes(renamed, ways)
    if checkpoint.step is not None and STEPS not in layout.names:
        path = next(place.path for _, place in layout.chunks_and_blobs if place.path)
        blobs = {**layout.blobs, STEPS: Blob(path, 0, 0, dump(checkpoint.step))}
        layout = replace(layout, blobs=blobs, keys={**layout.keys, STEPS: (STEPS,)})
    world_size = named_layout.world_size or 1
    no_place = {name: NO_PLACE for name in named_layout.names if names.get(name, name) not in ways}
    written = [name for name in named_layout.names if name not in no_place]
    conversion = Conversion(
        origins=[Origin.of(checkpoint.path)],
        output=output,
        options=options,
        drafts=[Draft.of([layout], options, world_size, renamed=names)],
        entries=[Entries.of(named_layout, written, no_place | options.edits.reasons_to_drop(named_layout.names))],
        notes=[*remarks, *completed.remarks],
        completed=completed.entries,
    )
    layouts = [part.layout for part in checkpoint.components]
    conversion = with_other_files(conversion, checkpoint, layouts, world_size, without_copies=True)
    copied_files = {name: path for name, path in conversion.copied_files.items() if not trainers.is_tracker(name)}
    return replace(conversion, copied_files=copied_files)


def key_paths_by_name(layout: Layout, weights: Weights) -> dict[str, KeyPath]:
    """Return the new key path of each entry: weights, states and groups by the model's own names, the rest unchanged.

    Other entries of an optimizer are left out. Raises `Unsupported` for groups that are stored by parameter.
    """
    own_names = {old: new for new, old in weights.came_from.items()}
    ways: dict[str, KeyPath] = {}
    for name in layout.names:
        key = layout.key(name)
        way = key_within_optimizer(key)
        if name in own_names:
            ways[name] = (MODEL, own_names[name])
        elif way is None:
            if key[0] not in (MODEL, OPTIMIZER):
                ways[name] = key
        elif way[0] == GROUP_MAP:
            message = f"expected a list of the optimizer's groups, found `{GROUP_MAP}`"
            raise Unsupported(message, path=layout.path, tensor=name, hint="pass --to dcp or --to pt")
        elif isinstance(way[1], int):
            ways[name] = (OPTIMIZER, *way)
        else:
            ways[name] = (OPTIMIZER, way[0], name_in_model(way[1], weights, layout), *way[2:])
    return ways


def name_in_model(name: str, weights: Weights, layout: Layout) -> str:
    """Return the model's name for a parameter that an optimizer lists."""
    if name.isdecimal():
        message = f"expected an optimizer that lists its parameters by name, found numbers such as {name}"
        raise Unsupported(message, path=layout.path)
    return parameter_name_in_model(name, weights.came_from)


def with_universal_names_and_dtypes(layout: Layout, key_paths: Mapping[str, KeyPath]) -> Layout:
    """Return the entries in `key_paths`, with the model's own names in the optimizer's lists.

    Weights that have states, and tensors tied to them, get at least fp32.
    """
    weights = find_weights(layout)
    rekeyed = edits.with_new_key_paths(edits.select_entries(layout, key_paths.__contains__), key_paths)
    lists = {
        name: blob
        for name, blob in rekeyed.blobs.items()
        if is_list_of_parameters(rekeyed.key(name)) or is_list_of_names(rekeyed.key(name))
    }
    for name, blob in lists.items():
        names = [name_in_model(str(one), weights, layout) for one in load_value(layout.root, blob)]
        lists[name] = with_new_value(blob, names)
    named = replace(rekeyed, blobs={**rekeyed.blobs, **lists})
    trained = {(MODEL, key[2]) for key in map(named.key, named.tensors) if key[:2] == (OPTIMIZER, "state")}
    chunks = {tensor.chunks for name, tensor in named.tensors.items() if named.key(name) in trained}

    def choose(name: str, spec: Spec) -> DType:
        is_half = named.key(name)[0] == MODEL and spec.dtype.name in _HALVES
        return DTYPES["float32"] if is_half and named.tensors[name].chunks in chunks else spec.dtype

    return edits.cast_tensors(named, choose)
