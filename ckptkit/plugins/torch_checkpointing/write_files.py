"""Write a checkpoint of torch_checkpointing: a file of each rank for each item, and the metadata that describes them.

Tensors with rows are sharded by rows over one mesh of all ranks, as FSDP2 does; each rank stores all other entries.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.formats.archives.write_archive import make_zip_template
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.ranks.example import Example
from ckptkit.formats.ranks.names import MODEL
from ckptkit.formats.ranks.write_files import RankStorages, Writing
from ckptkit.formats.shards.write_dtensors import RankMesh
from ckptkit.layout import OWN, KeyPath, Layout, NewFile
from ckptkit.layout.box import row_major_strides
from ckptkit.layout.placements import Placement, Shard
from ckptkit.plugins.torch_checkpointing.read_metadata import NAME

_AXES = ("fsdp",)


def arrange_items(wanted: Layout, world: int) -> Iterator[NewFile]:
    """Yield the files of `world` ranks for each item, and the metadata. Raises `Unsupported` for an unsafe item."""
    writing = ItemWriting(wanted, Example(), RankMesh((world,), _AXES, "cpu"))
    items = writing.names_by_kind()
    for item, names in items.items():
        if "/" in item or "rank_" in item:
            raise Unsupported(f"the item `{item}` has no file name in this format", hint="rename it with --rename")
        for rank in range(world):
            yield writing.make_rank_file(f"{item}_{rank}.pt", names, rank)
    described = {}  # how the tensors of each item are sharded
    for item, names in items.items():
        shardings = {
            json.dumps(writing.key_in_rank_file(name), separators=(",", ":")): [describe_sharding(writing, name, world)]
            for name in names
            if name in wanted.tensors
        }
        if shardings:
            ranks = dict.fromkeys(range(world))
            described[item] = {"nested_path_to_metadata": shardings, "rank_to_layout_info": ranks}
    metadata = pickle.dumps({"version": "2.0", "world_size": world, "metadata": described})
    yield NewFile(NAME, len(metadata), ((0, metadata),))


@dataclass(frozen=True)
class ItemWriting(Writing):
    """A checkpoint to write as items: each top-level key has files of its own."""

    @property
    def numbers(self) -> Mapping[str, int]:
        """Return {}: the optimizer has names."""
        return {}

    def names_by_kind(self) -> dict[str, list[str]]:
        kinds: dict[str, list[str]] = {}
        for name in self.wanted.names:
            key = self.wanted.key(name)
            if key[0] != OWN:
                kinds.setdefault(str(key[0]), []).append(name)
        return kinds

    def make_rank_file(self, name: str, names: list[str], rank: int) -> NewFile:
        """Return the file of a rank; an item that is one value has this value alone in its file."""
        if len(self.wanted.key(names[0])) > 1:
            return super().make_rank_file(name, names, rank)
        storages = RankStorages(self, rank)
        envelope = make_zip_template(dump(storages.pickled_value_of(names[0])), storages.contents)
        return NewFile(name, envelope.nbytes, envelope.parts)

    def key_in_rank_file(self, name: str) -> KeyPath:
        """Return the key path of an entry in its file; the model is a flat state dict."""
        item, *steps = self.wanted.key(name)
        return (".".join(map(str, steps)),) if item == MODEL else tuple(steps)

    def find_placements(self, name: str) -> tuple[Placement, ...] | None:
        """Return the placements of a tensor on the mesh, None if it is replicated."""
        return (Shard(0),) if self.wanted.tensors[name].spec.shape else None


def describe_sharding(writing: Writing, name: str, world: int) -> dict[str, Any]:
    """Return the metadata of a tensor; a tensor that each rank stores is replicated.

    Source: torch_checkpointing/dtensor_metadata.py, `DTensorShardingMetadata.to_dict`.
    """
    spec, placements = writing.wanted.tensors[name].spec, writing.find_placements(name)
    data = {
        "global_shape": list(spec.shape),
        "dtype": f"torch.{spec.dtype.name}",
        "stride": list(row_major_strides(spec.shape)),
        "mesh_spec": {
            "device_type": "cpu",
            "mesh_shape": (world,),
            "mesh_data": tuple(range(world)),
            "mesh_dim_names": _AXES if placements else None,
        },
        "placements": [
            {"type": "Shard", "dim": placement.dim} if placement else {"type": "Replicate"}
            for placement in placements or (None,)
        ],
    }
    return {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": tuple(range(world))}
