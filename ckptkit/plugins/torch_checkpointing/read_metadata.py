"""Read `metadata.pkl`: which items there are, in which file each rank has its part, and how tensors are spread.

Source: torch_checkpointing/{distributed_metadata,dtensor_metadata,checkpoint_layout,types}.py. It is a pickle of dicts,
lists and tuples, and names nothing; one that does is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Unsafe, Unsupported
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.tensor_calls import as_shape
from ckptkit.formats.shards.dtensors import Mesh, unravel
from ckptkit.io.file import check_name, read_small
from ckptkit.layout import KeyPath
from ckptkit.layout.box import Shape
from ckptkit.layout.placements import Placement, Shard

NAME = "metadata.pkl"
_LIMIT = 1 << 28  # bytes
_MOST_RANKS = 1 << 20
TORCH, SAFETENSORS, JSON, RAW = (
    "TorchSerialization",
    "SafetensorsSerialization",
    "JsonSerialization",
    "RawSerialization",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor's `shape`, and the way it lies on a mesh of ranks."""

    shape: Shape
    mesh: Shape
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    def seen_by(self, rank: int) -> Mesh:
        """Return the mesh as one of its ranks sees it."""
        if rank not in self.ranks:
            raise Corrupt(f"expected a rank of the mesh ({', '.join(map(str, self.ranks[:8]))}), found rank {rank}")
        return Mesh(self.mesh, self.ranks, unravel(self.ranks.index(rank), self.mesh), None, "")


@dataclass(frozen=True, slots=True)
class CheckpointItem:
    """An item of a checkpoint: each rank's file and the format it is in, and by key path how tensors are spread."""

    files: Mapping[int, tuple[str, str]]
    spread: Mapping[KeyPath, Mapping[int, Spread]]


def read_items(root: Path) -> tuple[dict[str, CheckpointItem], int]:
    """Return the items that the metadata in directory `root` name, and the number of ranks."""
    path = root / NAME
    try:
        value, _ = inert_pickle.load(read_small(path, _LIMIT), frozenset())
        version = value.get("version", "1.0")
        if version not in ("1.0", "2.0"):
            raise Unsupported(f"expected metadata of version 1.0 or 2.0, found {version!a}")
        world = value["world_size"]
        if type(world) is not int or not 0 < world <= _MOST_RANKS:
            raise Corrupt(f"expected metadata of 1 to {_MOST_RANKS} ranks, found {world!a}")
        found = grouped(value) if version == "1.0" else value["metadata"]
        return {name: read_item(root, name, item, world) for name, item in found.items()}, world
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt("the metadata is malformed", path=path) from error
    except CkptError as error:
        raise error.blame(path=path) from None


def grouped(value: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return metadata of version 1.0 as later ones are: by item. There a path begins with the item."""
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


def read_item(root: Path, name: str, item: Mapping[str, Any], world: int) -> CheckpointItem:
    """Return one item."""
    said = {int(rank): file for rank, file in item["rank_to_layout_info"].items()}
    files = {rank: file_of(root, name, rank, said.get(rank)) for rank in range(world)}
    spread: dict[KeyPath, dict[int, Spread]] = {}
    for path, groups in item["nested_path_to_metadata"].items():
        steps = path if isinstance(path, tuple) else tuple(parse_json(path.encode(), root / NAME))
        if not all(type(step) in (str, int) for step in steps):
            raise ValueError("path")
        for group in groups:
            how = read_spread(group["sharding_metadata"])
            spread.setdefault(steps, {}).update(dict.fromkeys(group["ranks"], how))
    return CheckpointItem(files, spread)


def file_of(root: Path, name: str, rank: int, said: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return name and format of a rank's file. Raises `Unsafe` for one that does not lie in the directory."""
    file, kind = (
        (f"{name}_{rank}.pt", TORCH) if said is None else (said["file_path"], said["serialization_format"]["type"])
    )
    if not isinstance(file, str) or Path(file).is_absolute():
        raise Unsafe(f"the metadata refers to `{file!a}`", path=root)
    for part in file.split("/"):
        check_name(part, root)
    if kind not in (TORCH, SAFETENSORS, JSON, RAW):
        raise Unsupported(f"a file in the format `{kind!a}`")
    return file, kind


def read_spread(metadata: Mapping[str, Any]) -> Spread:
    """Return how a tensor is spread. Raises `Unsupported` for what is no DTensor."""
    if metadata["type"] != "DTensorShardingMetadata":
        raise Unsupported(f"sharding of the kind `{metadata['type']!a}`")
    data = metadata["data"]
    mesh = as_shape(tuple(data["mesh_spec"]["mesh_shape"]))
    ranks = as_shape(tuple(data["mesh_spec"]["mesh_data"]))
    shape = as_shape(tuple(data["global_shape"]))
    placements = tuple(read_placement(one, len(shape), prod(mesh)) for one in data["placements"])
    if len(ranks) != prod(mesh) or len(set(ranks)) != len(ranks) or len(placements) != len(mesh):
        raise ValueError("mesh")
    return Spread(shape, mesh, ranks, placements)


def read_placement(one: Mapping[str, Any], ndim: int, most: int) -> Placement:
    """Return one placement, along an axis of the mesh."""
    if one["type"] == "Replicate":
        return None
    if one["type"] not in ("Shard", "StridedShard"):
        raise Unsupported(f"a placement of the kind `{one['type']!a}`")
    dim, stride = one["dim"], one.get("split_factor", 1)
    if type(dim) is not int or type(stride) is not int or not 0 <= dim < ndim or not 0 < stride <= most:
        raise ValueError("placement")
    return Shard(dim, stride)
