"""Assemble the model: trained parameters with low-precision copies, buffers, frozen and tied parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Incomplete, Report, Unsupported
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.pickles.tensor_calls import as_tensor_record, is_pickled_tensor
from ckptkit.formats.shards.join import STATISTICS
from ckptkit.layout import Spec, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.plugins.deepspeed.experts import split_at_expert_index
from ckptkit.plugins.deepspeed.join_partitions import ZeroParameter, chunks_of_even_shards, padded_elements_per_rank
from ckptkit.plugins.deepspeed.model_states import ModelStates
from ckptkit.plugins.deepspeed.read_partitions import PartOfModel
from ckptkit.plugins.deepspeed.tensor_parallel import SliceMap
from ckptkit.plugins.deepspeed.unpartitioned import MODEL, STATE, Gathering


def put_parameter(gathering: Gathering, parameter: ZeroParameter) -> None:
    gathering.put_entry((MODEL, parameter.name), parameter.master)
    for state_name, moment in parameter.moments.items():
        gathering.put_entry((*STATE, parameter.name, state_name), moment)
    gathering.put_shared_state(parameter.group.flattening, [parameter.name], parameter.group.values)


def put_tied_weights(
    gathering: Gathering, aliases: Mapping[str, str], masters: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Put the trained tensors that also have other names, and return all trained tensors by all of their names."""
    tied = {alias: masters[name] for alias, name in aliases.items() if name in masters and alias not in masters}
    for alias, master in tied.items():
        gathering.put_entry((MODEL, alias), master)
    return {**masters, **tied}


def put_untrained_and_low_precision(
    gathering: Gathering, part: PartOfModel, masters: Mapping[str, StoredTensor], root: Path, report: Report
) -> None:
    """Put the untrained entries of the model, and the low-precision copy of each trained parameter.

    Reports frozen parameters if the fragment of a rank cannot be read.
    """
    model = part.models[0]
    shared = next(filter(split_at_expert_index, (*model.aliases, *model.aliases.values())), None)
    if shared is not None:
        message = "the parameter of an expert is tied, and the file does not say to which rank's expert"
        raise Unsupported(message, tensor=shared)
    known = put_tied_weights(gathering, model.aliases, masters)
    for name, value in (model.module or {}).items():
        if name in known:
            put_low_precision_value(gathering, model.flattening, str(name), value, known[str(name)])
        elif name not in model.frozen or not (is_pickled_tensor(value) and 0 in as_tensor_record(value).shape):
            put_model_entry(gathering, model, str(name), value)
            put_buffer_replicas(gathering, part, str(name))
    for name, shape in model.frozen.items():
        full_name = f"{MODEL}.{name}"
        is_experts = split_at_expert_index(name) is not None or name in model.auto_layers
        if is_experts or name in known or full_name in gathering.flat.keys:
            continue
        if part.lost_models:
            rank, file = next(iter(part.lost_models.items()))
            message = "the parameter is frozen, and the part of one rank cannot be read"
            report(Incomplete(message, path=root / file, tensor=full_name, ranks=[rank]))
        else:
            gathering.put_entry((MODEL, name), join_frozen(part, name, shape))


def put_sliced_module_entries(
    gathering: Gathering, models: Sequence[ModelStates], slices: SliceMap, masters: Mapping[str, StoredTensor]
) -> None:
    """Put buffers, frozen and tied parameters and low-precision copies that are split over tensor-parallel ranks."""
    first = models[0]
    known = put_tied_weights(gathering, first.aliases, masters)
    for name, value in (first.module or {}).items():
        if not is_pickled_tensor(value) or name in first.buffers:
            put_model_entry(gathering, first, str(name), value)
            continue
        values = [(model.module or {}).get(name) for model in models]
        if not all(map(is_pickled_tensor, values)):
            raise Corrupt("expected the tensor on all ranks of tensor parallelism", tensor=str(name))
        parts = [model.flattening.make_stored_tensor(each) for model, each in zip(models, values, strict=True)]
        joined = slices.slicing_of(first.aliases.get(str(name), str(name))).join_parts(parts)
        if name in known:
            put_low_precision_copy(gathering, str(name), joined, known[str(name)])
        else:
            gathering.put_entry((MODEL, str(name)), joined)


def put_low_precision_value(
    gathering: Gathering, flattening: Flattening, name: str, value: Any, master: StoredTensor
) -> None:
    """Put the low-precision copy of a parameter as its twin. ZeRO 3 saves an empty tensor instead of a copy."""
    if not is_pickled_tensor(value):
        raise Corrupt("ZeRO has this parameter, but `module` does not have its tensor", tensor=name)
    put_low_precision_copy(gathering, name, flattening.make_stored_tensor(value), master)


def put_low_precision_copy(gathering: Gathering, name: str, copy: StoredTensor, master: StoredTensor) -> None:
    """Put the low-precision copy of a parameter as its twin, unless it is empty.

    Raises `Corrupt` if the shapes differ.
    """
    if copy.spec.shape == master.spec.shape:
        gathering.twins[f"{MODEL}.{name}"] = copy
    elif copy.spec.shape != (0,):
        message = f"expected {list(master.spec.shape)} (`param_shapes`), found {list(copy.spec.shape)} in `module`"
        raise Corrupt(message, tensor=name)


def put_model_entry(gathering: Gathering, model: ModelStates, name: str, value: Any) -> None:
    """Put a buffer, a frozen parameter or another entry of `module`."""
    if is_pickled_tensor(value) and as_tensor_record(value).shape == (0,) and name not in model.buffers:
        raise Corrupt("the tensor is empty, and no file says where its data is", tensor=name)
    gathering.put_flattened(model.flattening, value, (MODEL, name))


def put_buffer_replicas(gathering: Gathering, part: PartOfModel, name: str) -> None:
    """Put the buffer copies of the other ranks as spare chunks.

    Running statistics are skipped, because every rank computes its own.
    """
    full_name = f"{MODEL}.{name}"
    if full_name not in gathering.flat.tensors or name.endswith(STATISTICS):
        return
    values = [(model.flattening, (model.module or {}).get(name)) for model in part.models[1:]]
    replicas = [flattening.make_stored_tensor(value) for flattening, value in values if is_pickled_tensor(value)]
    if replicas:
        gathering.flat.spares[full_name] = tuple(chunk for replica in replicas for chunk in replica.chunks)


def join_frozen(part: PartOfModel, name: str, shape: Shape) -> StoredTensor:
    """Return a frozen parameter, joined from one fragment per rank or from a single fragment."""
    buffers = []
    for model in part.models:
        if not is_pickled_tensor(model.fragments.get(name)):
            raise Corrupt("the parameter is frozen, and its data is missing", tensor=name)
        fragment = model.flattening.make_stored_tensor(model.fragments[name])
        (chunk,) = fragment.chunks
        if len(part.models) == 1 and fragment.spec.shape == shape:
            return fragment
        needed = padded_elements_per_rank(prod(shape), len(part.models))
        if fragment.spec.shape != (needed,) or chunk.strides is not None:
            message = f"expected [{needed}] of a frozen parameter in `{model.path}`, found {list(fragment.spec.shape)}"
            raise Corrupt(message, tensor=name)
        buffers.append(chunk)
    return StoredTensor(Spec(buffers[0].dtype, shape), tuple(chunks_of_even_shards(buffers, 0, shape)))
