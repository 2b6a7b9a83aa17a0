"""Read the expert layers that AutoEP fused: three tensors per layer, split over the expert-parallel ranks.

Source: `_save_moe_checkpoint` in deepspeed/runtime/engine.py and deepspeed/checkpoint/autoep_affine.py of DeepSpeed
0.19.8. ZeRO stores the slice of a rank under the name of the full tensor. The file of an expert contains its slice of
each tensor, under the full name plus the global expert index. The full tensor stacks the experts of all ranks along
axis 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Unsupported, errors_at
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.archives.state_files import read_state_file
from ckptkit.formats.pickles.tensor_calls import is_tensor
from ckptkit.layout import StoredTensor
from ckptkit.layout.axes import stack_tensors
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


def read_auto_layers_by_tensor(saved: Mapping[str | int, Any]) -> dict[str, AutoLayer]:
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
    root: Path, files: Mapping[tuple[int, int], str], layers: Mapping[str, AutoLayer]
) -> dict[str, StoredTensor]:
    """Return the full tensors of all experts by name; `files` maps (layer index, expert index) to a file name."""
    in_order = list(dict.fromkeys(layers.values()))
    slices: dict[str, list[StoredTensor]] = {name: [] for name in layers}
    for (layer, expert), file in sorted(files.items()):
        with errors_at(path=root / file):
            state = read_state_file(root, file)
            saved = require_dict(state.value, file)
            flattening = Flattening(state.entries, file)
            for name in in_order[layer].names:
                value = saved.pop(f"{name}.{expert}", None)
                if not is_tensor(value):
                    message = "the file does not contain the tensor of its expert"
                    raise Corrupt(message, tensor=f"{name}.{expert}", hint=_HINT)
                tensor = flattening.make_stored_tensor(value)
                if slices[name] and slices[name][0].spec != tensor.spec:
                    raise Corrupt(f"expected {slices[name][0].spec}, as expert 0 has, found {tensor.spec}", tensor=name)
                slices[name].append(tensor)
            if saved:
                message = f"the tensor does not belong to expert {expert}"
                raise Corrupt(message, tensor=str(next(iter(saved))), hint=_HINT)
    return {name: stack_tensors(tensors) for name, tensors in slices.items()}
