"""Read `metadata.pkl`: the items, the file of each rank, and how tensors are sharded.

Source: torch_checkpointing/{distributed_metadata,dtensor_metadata,checkpoint_layout,types}.py. It is a pickle of dicts,
lists and tuples without classes or functions; a pickle that refers to any is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Unsafe, Unsupported, errors_at
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.tensor_calls import as_shape
from ckptkit.formats.shards.dtensors import Mesh, unravel
from ckptkit.io.file import read_small, require_plain_file_name
from ckptkit.layout import KeyPath
from ckptkit.layout.box import Shape
from ckptkit.layout.placements import Placement, Shard

NAME = "metadata.pkl"
_LIMIT = 1 << 28  # bytes
_MOST_RANKS = 1 << 20
TORCH, SAFETENSORS, JSON, RAW = (f"{kind}Serialization" for kind in ("Torch", "Safetensors", "Json", "Raw"))


@dataclass(frozen=True, slots=True)
class TensorSharding:
    """The full `shape` of a tensor, and its placement on a mesh of ranks."""

    shape: Shape
    mesh: Shape
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    def mesh_seen_by(self, rank: int) -> Mesh:
        if rank not in self.ranks:
            raise Corrupt(f"expected a rank of the mesh ({', '.join(map(str, self.ranks[:8]))}), found rank {rank}")
        return Mesh(self.mesh, self.ranks, unravel(self.ranks.index(rank), self.mesh), None, "")


@dataclass(frozen=True, slots=True)
class CheckpointItem:
    """An item of a checkpoint: file and serialization format by rank, and the sharding of tensors by key path."""

    files: Mapping[int, tuple[str, str]]
    spread: Mapping[KeyPath, Mapping[int, TensorSharding]]


def read_item_metadata(root: Path) -> tuple[dict[str, CheckpointItem], int]:
    """Return the items in the metadata of directory `root`, and the world size."""
    path = root / NAME
    with errors_at(path=path):
        try:
            value, _ = inert_pickle.load(read_small(path, _LIMIT), frozenset())
            version = value.get("version", "1.0")
            if version not in ("1.0", "2.0"):
                raise Unsupported(f"expected metadata of version 1.0 or 2.0, found {version!a}")
            world = value["world_size"]
            if type(world) is not int or not 0 < world <= _MOST_RANKS:
                raise Corrupt(f"expected metadata of 1 to {_MOST_RANKS} ranks, found {world!a}")
            items = group_by_item(value) if version == "1.0" else value["metadata"]
            return {name: parse_item(root, name, item, world) for name, item in items.items()}, world
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Corrupt("the metadata is malformed") from error


def group_by_item(value: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return metadata of version 1.0, whose paths begin with the item, in the form of later versions."""
    items: dict[str, dict[str, Any]] = {}
    for text, groups in value["metadata"].items():
        name, *path = parse_json(text.encode(), Path(NAME))
        item = items.setdefault(name, {"nested_path_to_metadata": {}, "rank_to_layout_info": {}})
        item["nested_path_to_metadata"][tuple(path)] = groups
    for rank, files in value["rank_to_layout_info_mappings"].items():
        for name, file in files.items():
            if name in items:
                items[name]["rank_to_layout_info"][int(rank)] = file
    return items


def parse_item(root: Path, name: str, metadata: Mapping[str, Any], world_size: int) -> CheckpointItem:
    file_infos = {int(rank): file for rank, file in metadata["rank_to_layout_info"].items()}
    files = {rank: parse_file_info(root, name, rank, file_infos.get(rank)) for rank in range(world_size)}
    spread: dict[KeyPath, dict[int, TensorSharding]] = {}
    for path, groups in metadata["nested_path_to_metadata"].items():
        steps = path if isinstance(path, tuple) else tuple(parse_json(path.encode(), root / NAME))
        if not all(type(step) in (str, int) for step in steps):
            raise ValueError("path")
        for group in groups:
            sharding = parse_sharding(group["sharding_metadata"])
            spread.setdefault(steps, {}).update(dict.fromkeys(group["ranks"], sharding))
    return CheckpointItem(files, spread)


def parse_file_info(root: Path, name: str, rank: int, file_info: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return file name and format of a rank's file. Raises `Unsafe` for path traversal."""
    if file_info is None:
        file_info = {"file_path": f"{name}_{rank}.pt", "serialization_format": {"type": TORCH}}
    file, kind = file_info["file_path"], file_info["serialization_format"]["type"]
    if not isinstance(file, str) or Path(file).is_absolute():
        raise Unsafe(f"the metadata refers to `{file!a}`", path=root)
    for part in file.split("/"):
        require_plain_file_name(part, root)
    if kind not in (TORCH, SAFETENSORS, JSON, RAW):
        raise Unsupported(f"a file in the format `{kind!a}`")
    return file, kind


def parse_sharding(metadata: Mapping[str, Any]) -> TensorSharding:
    """Return how a tensor is sharded. Raises `Unsupported` for anything but a DTensor."""
    if metadata["type"] != "DTensorShardingMetadata":
        raise Unsupported(f"sharding of the kind `{metadata['type']!a}`")
    data = metadata["data"]
    mesh = as_shape(tuple(data["mesh_spec"]["mesh_shape"]))
    ranks = as_shape(tuple(data["mesh_spec"]["mesh_data"]))
    shape = as_shape(tuple(data["global_shape"]))
    placements = tuple(parse_placement(placement, len(shape), prod(mesh)) for placement in data["placements"])
    if len(ranks) != prod(mesh) or len(set(ranks)) != len(ranks) or len(placements) != len(mesh):
        raise ValueError("mesh")
    return TensorSharding(shape, mesh, ranks, placements)


def parse_placement(metadata: Mapping[str, Any], ndim: int, world_size: int) -> Placement:
    """Return the placement along one axis of the mesh."""
    if metadata["type"] == "Replicate":
        return None
    if metadata["type"] not in ("Shard", "StridedShard"):
        raise Unsupported(f"a placement of the kind `{metadata['type']!a}`")
    dim, stride = metadata["dim"], metadata.get("split_factor", 1)
    if type(dim) is not int or type(stride) is not int or not 0 <= dim < ndim or not 0 < stride <= world_size:
        raise ValueError("placement")
    return Shard(dim, stride)
