"""The layers of experts that AutoEP fused: three tensors per layer, of which each rank has a part.

Source: `_save_moe_checkpoint` in deepspeed/runtime/engine.py and deepspeed/checkpoint/autoep_affine.py of DeepSpeed
0.19.8. ZeRO has the tensors of a rank under the name of the whole. An expert's file has its part of each, under that
name and its number among all. The whole has the experts of all ranks on its first axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.archives.state_files import StateFile, read_state_file
from ckptkit.formats.pickles.tensor_calls import is_tensor
from ckptkit.layout import StoredTensor
from ckptkit.layout.axes import stack
from ckptkit.layout.box import Shape
from ckptkit.plugins.deepspeed.values import as_count, as_dict, as_kind, dict_or_none

LAYERS = "ds_autoep_layers"
_EARLIER = "autoep_layers"
_FUSED = ("w1", "w2", "w3")
_PARTITIONED = "zero3_partitioned"
_HINT = "check that all files of one save are there, and no others"


@dataclass(frozen=True, slots=True)
class AutoLayer:
    """A layer of `experts`, dealt out in their order to as many `ranks`. Names of its tensors begin with `prefix`."""

    prefix: str
    experts: int
    ranks: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{name}" for name in _FUSED)

    def whole(self, shape: Shape) -> Shape:
        """Return the shape of a tensor with all experts, of which a rank has `shape`."""
        return (self.experts, *shape[1:])

    def share(self, shape: Shape) -> Shape:
        """Return the shape of what a rank has of a tensor with all experts."""
        return (self.experts // self.ranks, *shape[1:])


def read_auto_layers(saved: Mapping[str | int, Any]) -> dict[str, AutoLayer]:
    """Return AutoEP's layers in a file of model states, by the name of each tensor; {} for a model without any.

    Raises `Unsupported` for experts of ZeRO 3, and for those that are not dealt out in their order.
    """
    listed = saved.get(LAYERS) or saved.get(_EARLIER) or []
    layers = [read_layer(as_dict(one, LAYERS)) for one in as_kind(listed, list, LAYERS)]
    return {name: layer for layer in layers for name in layer.names}


def read_layer(layer: Mapping[str | int, Any]) -> AutoLayer:
    """Return one of AutoEP's layers."""
    prefix = as_kind(layer.get("expert_key_prefix"), str, "expert_key_prefix")
    if layer.get("checkpoint_format") == _PARTITIONED:
        message = "AutoEP with ZeRO 3 partitioned the experts among ranks of their own"
        raise Unsupported(message, tensor=prefix, hint="load it with DeepSpeed and save it with ZeRO 2")
    experts, ranks, each = (as_count(layer.get(key), key) for key in ("num_experts", "ep_size", "num_local_experts"))
    if not each or each * ranks != experts:
        message = f"expected {experts} experts on {ranks} ranks, found {each} on each rank"
        raise Corrupt(message, tensor=prefix)
    placement = dict_or_none(layer.get("expert_placement"), "expert_placement")
    places = [as_dict(one, "ranks") for one in as_kind(placement.get("ranks", []), list, "ranks")]
    expected = [(rank, list(range(rank * each, (rank + 1) * each))) for rank in range(ranks)]
    found = [(place.get("rank"), place.get("experts")) for place in places]
    if placement and found != expected:
        message = f"AutoEP placed experts {found[0][1] if found else []} on the first rank, out of their order"
        raise Unsupported(message, tensor=prefix, hint="load it with DeepSpeed and save it with the default placement")
    return AutoLayer(prefix, experts, ranks)


def fuse(root: Path, files: Mapping[tuple[int, int], str], layers: Mapping[str, AutoLayer]) -> dict[str, StoredTensor]:
    """Return the tensors with all experts by name, from the experts' files by the numbers of layer and expert."""
    in_order = list(dict.fromkeys(layers.values()))
    found: dict[str, list[StoredTensor]] = {name: [] for name in layers}
    for (layer, expert), file in sorted(files.items()):
        try:
            for name, tensor in tensors_in(read_state_file(root, file), in_order[layer], expert):
                if found[name] and found[name][0].spec != tensor.spec:
                    raise Corrupt(f"expected {found[name][0].spec}, as expert 0 has, found {tensor.spec}", tensor=name)
                found[name].append(tensor)
        except CkptError as error:
            raise error.blame(path=root / file) from None
    return {name: stack(tensors) for name, tensors in found.items()}


def tensors_in(file: StateFile, layer: AutoLayer, expert: int) -> Iterator[tuple[str, StoredTensor]]:
    """Yield what an expert's file has, by the name of the tensor with all experts."""
    saved = as_dict(file.value, file.name)
    flattening = Flattening(file.entries, file.name)
    for name in layer.names:
        own = f"{name}.{expert}"
        value = saved.pop(own, None)
        if not is_tensor(value):
            raise Corrupt("the file does not contain the tensor of its expert", tensor=own, hint=_HINT)
        yield name, flattening.stored(value)
    if saved:
        raise Corrupt(f"the tensor does not belong to expert {expert}", tensor=str(next(iter(saved))), hint=_HINT)
