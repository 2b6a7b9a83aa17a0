"""Read the expert layers that AutoEP fused: three tensors per layer, split over the expert-parallel ranks.

Source: `_save_moe_checkpoint` in deepspeed/runtime/engine.py and deepspeed/checkpoint/autoep_affine.py of DeepSpeed
0.19.8. ZeRO stores the slice of a rank under the name of the full tensor. The file of an expert contains its slice of
each tensor, under the full name plus the global expert index. The full tensor stacks the experts of all ranks along
axis 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import ELSEWHERE, Corrupt, Incomplete, Report, Unsupported
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.archives.torch_save import StateFile
from ckptkit.formats.pickles.tensor_calls import is_pickled_tensor
from ckptkit.formats.rank_names import read_each_file
from ckptkit.layout import Chunk, StoredTensor
from ckptkit.layout.axes import stack_tensors
from ckptkit.layout.box import full_box
from ckptkit.plugins.deepspeed.values import dict_or_empty, require_count, require_dict, require_each, require_type

LAYERS = "ds_autoep_layers"
_EARLIER = "autoep_layers"
_FUSED = ("w1", "w2", "w3")
_PARTITIONED = "zero3_partitioned"
_HINT = "check that all files of one save are there, and no others"


@dataclass(frozen=True, slots=True)
class AutoLayer:
    """A layer with `experts` experts, split in order over `ranks` ranks. Its tensor names start with `prefix`."""

    prefix: str
    experts: int
    ranks: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{name}" for name in _FUSED)


def autoep_layers_by_tensor(saved: Mapping[str | int, Any]) -> dict[str, AutoLayer]:
    """Return the AutoEP layers in a model-states file, keyed by tensor name; {} for a model without AutoEP.

    Raises `Unsupported` for experts saved with ZeRO 3, and for experts that are not placed in order.
    """
    layers: dict[str, AutoLayer] = {}
    for layer in require_each(saved.get(LAYERS) or saved.get(_EARLIER) or [], require_dict, LAYERS):
        prefix = require_type(layer.get("expert_key_prefix"), str, "expert_key_prefix")
        if layer.get("checkpoint_format") == _PARTITIONED:
            message = "AutoEP with ZeRO 3 partitioned the experts among ranks of their own"
            raise Unsupported(message, tensor=prefix, hint="load it with DeepSpeed and save it with ZeRO 2")
        experts, ranks, per_rank = (
            require_count(layer.get(key), key) for key in ("num_experts", "ep_size", "num_local_experts")
        )
        if not per_rank or per_rank * ranks != experts:
            message = f"expected {experts} experts on {ranks} ranks, found {per_rank} on each rank"
            raise Corrupt(message, tensor=prefix)
        placement = dict_or_empty(layer.get("expert_placement"), "expert_placement")
        expected = [(rank, list(range(rank * per_rank, (rank + 1) * per_rank))) for rank in range(ranks)]
        ranks_placed = require_each(placement.get("ranks", []), require_dict, "ranks")
        placed = [(rank.get("rank"), rank.get("experts")) for rank in ranks_placed]
        if placement and placed != expected:
            message = f"AutoEP placed experts {placed[0][1] if placed else []} on the first rank, out of their order"
            hint = "load it with DeepSpeed and save it with the default placement"
            raise Unsupported(message, tensor=prefix, hint=hint)
        fused = AutoLayer(prefix, experts, ranks)
        layers |= dict.fromkeys(fused.names, fused)
    return layers


def stack_experts(
    root: Path,
    file_by_layer_and_expert: Mapping[tuple[int, int], str],
    layers: Mapping[str, AutoLayer],
    read_file: Callable[[tuple[int, int], str], StateFile],
    report: Report,
) -> dict[str, StoredTensor]:
    """Return the full tensors of all experts by name; `file_by_layer_and_expert` has file names.

    Reports the files that cannot be read; their slices get unreadable chunks.
    """
    in_order = list(dict.fromkeys(layers.values()))

    def read_slices(key: tuple[int, int], file: str) -> dict[str, StoredTensor]:
        state = read_file(key, file)
        saved = require_dict(state.value, file)
        flattening = Flattening(state.entries, file)
        slices = {}
        for name in in_order[key[0]].names:
            value = saved.pop(f"{name}.{key[1]}", None)
            if not is_pickled_tensor(value):
                message = "the file does not contain the tensor of its expert"
                raise Corrupt(message, tensor=f"{name}.{key[1]}", hint=_HINT)
            slices[name] = flattening.make_stored_tensor(value)
        if saved:
            message = f"the tensor does not belong to expert {key[1]}"
            raise Corrupt(message, tensor=str(next(iter(saved))), hint=_HINT)
        return slices

    read = read_each_file(root, file_by_layer_and_expert, read_slices, report)
    specs = {name: tensor.spec for slices in reversed(read.values()) for name, tensor in slices.items()}
    if specs.keys() < layers.keys():
        raise Incomplete("the files of all experts of a layer are missing or unreadable", path=root, hint=ELSEWHERE)
    tensors: dict[str, list[StoredTensor]] = {name: [] for name in layers}
    for key, file in file_by_layer_and_expert.items():
        for name in in_order[key[0]].names:
            spec = specs[name]
            lost = StoredTensor(spec, (Chunk.unreadable(full_box(spec.shape), file, spec.dtype),))
            tensors[name].append(read.get(key, {}).get(name, lost))
            if (found := tensors[name][-1].spec) != spec:
                raise Corrupt(f"expected {spec}, as expert 0 has, found {found}", path=root / file, tensor=name)
    return {name: stack_tensors(slices) for name, slices in tensors.items()}
