"""Read and write checkpoints of the package torch_checkpointing: files of all ranks per item, perhaps with metadata.

Source: torch_checkpointing/{checkpoint_writer,metadata_serialization}.py: `metadata.pkl` describes the items whose
tensors can be resharded; for other items each rank has a file `ITEM_RANK.pt`. Without reshardable items the package
writes no metadata. Then DTensors in the files identify the checkpoint, and record the position of each shard.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.errors import (
    ELSEWHERE,
    CkptError,
    Corrupt,
    Incomplete,
    Report,
    Unsafe,
    Unsupported,
    errors_at,
    raise_problem,
)
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.archives.torch_save import archive_extents_of, is_torch_save
from ckptkit.formats.archives.write_archive import make_zip_template
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.pickles.tensor_calls import TensorRecord
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatWriter
from ckptkit.formats.ranks.file_names import MODEL
from ckptkit.formats.ranks.write_files import Example, RankStorages, Writing, patches_for_rank_files
from ckptkit.formats.safetensors_headers import read_header_chunks
from ckptkit.formats.shards.dtensors import Placed
from ckptkit.formats.shards.join import join_files
from ckptkit.formats.shards.rank_file import RankFile, RankTensor, infer_lost_rank_file, read_rank_file
from ckptkit.formats.shards.write_dtensors import RankMesh
from ckptkit.io.file import is_existing_path, names_in, read_small
from ckptkit.layout import (
    OWN,
    Blob,
    Extent,
    FileOffset,
    KeyPath,
    Layout,
    NewFile,
    Patch,
    Spec,
    WriterOptions,
    check_chunks_tile,
)
from ckptkit.layout.axes import cut_chunk_to_box
from ckptkit.layout.box import Box, row_major_strides
from ckptkit.layout.gc_pause import collector_paused
from ckptkit.layout.placements import Placement, Shard
from ckptkit.plugins.torch_checkpointing.read_metadata import (
    JSON,
    NAME,
    SAFETENSORS,
    TORCH,
    CheckpointItem,
    TensorSharding,
    read_item_metadata,
)

_LIMIT = 1 << 24  # bytes of a file that is read at once
_AXES = ("fsdp",)


def read_item_files(root: Path, name: str, item: CheckpointItem, report: Report) -> list[RankFile]:
    """Return the content of an item on each rank; report and skip files that are missing or unreadable."""
    rank_files = []
    for rank, (file, kind) in sorted(item.files.items()):
        try:
            rank_files.append(read_rank_item(root, name, rank, file, kind, item))
        except CkptError as error:
            report(error)
    return rank_files


def missing_rank_file_error(path: Path) -> Incomplete:
    return Incomplete("the file is missing", path=path, hint=ELSEWHERE)


def read_rank_item(root: Path, name: str, rank: int, file: str, kind: str, item: CheckpointItem) -> RankFile:
    """Return the content of an item on one rank. Every error names the file."""
    if not is_existing_path(root / file):
        raise missing_rank_file_error(root / file)
    with errors_at(path=root / file):
        if kind == TORCH:
            content = read_rank_file(root, file, rank, (name,), must_be_dict=bool(item.spread))
            return with_tensors_as_shards(content, item.spread)
        if kind == SAFETENSORS:
            paths = {".".join(map(str, path)): path for path in item.spread}  # its names are key paths joined by dots
            flat = FlatState()
            for stored, chunk in read_header_chunks(root / file).items():
                key = (name, *paths.get(stored, (stored,)))
                full_name = ".".join(map(str, key))
                flat.keys[full_name] = key
                flat.tensors[full_name] = RankTensor(Spec(chunk.dtype, chunk.size), (chunk._replace(path=file),))
            return with_tensors_as_shards(RankFile(rank, file, flat, None), item.spread)
        data = read_small(root / file, _LIMIT)
        value = parse_json(data, root / file) if kind == JSON else data
        flat = FlatState({}, {name: Blob(file, 0, 0, dump(value))}, {name: (name,)})
        return RankFile(rank, file, flat, value)


def with_tensors_as_shards(file: RankFile, sharding_by_key: Mapping[KeyPath, Mapping[int, TensorSharding]]) -> RankFile:
    """Return the file of a rank, with plain tensors placed as shards where the metadata describes them so."""
    tensors = dict(file.flat.tensors)
    for name, plain in file.tensors.items():
        placement = sharding_by_key.get(file.flat.keys[name][1:], {}).get(file.rank)
        if placement is not None and plain.spread is None:
            with errors_at(tensor=name):
                (chunk,) = plain.chunks
                shape, strides = plain.spec.shape, chunk.strides or row_major_strides(plain.spec.shape)
                record, full = TensorRecord("", chunk.dtype, 0, shape, strides), Spec(chunk.dtype, placement.shape)
                placed = Placed(full, placement.mesh_seen_by(file.rank), placement.placements, None, record)
                chunks = [
                    cut_chunk_to_box(chunk, Box(at, box.size))._replace(box=box) for box, at in placed.placed_boxes
                ]
                tensors[name] = RankTensor(full, tuple(chunks), spread=placed)
    return replace(file, flat=replace(file.flat, tensors=tensors))


_OF_RANK = re.compile(r"(?P<item>.+)_(?P<rank>[0-9]{1,7})\.(?P<kind>pt|safetensors|json|bin)")
_PLAIN = re.compile(r"(?!.*rank_)(?P<item>.+)_(?P<rank>0|[1-9][0-9]{0,6})\.pt")  # other tools write `..._rank_0.pt`


class TorchCheckpointing(FormatWriter):
    """The format of a directory with `metadata.pkl` and the files of each rank."""

    name = "torch_checkpointing"
    known_by = "torch_checkpointing's `metadata.pkl`"
    is_sharded = True
    repeats = True

    def owns_file(self, name: str) -> bool:
        return name == NAME or bool(_OF_RANK.fullmatch(name))

    def rank_of(self, name: str) -> int | None:
        match = _OF_RANK.fullmatch(name)
        return int(match["rank"]) if match else None

    def detect(self, path: Path) -> bool:
        """Return True for a directory with metadata and a file of rank 0, or with DTensors in such a file."""
        if not path.is_dir():
            return False
        names = names_in(path)
        if NAME in names:
            return any(match["rank"] == "0" for match in map(_OF_RANK.fullmatch, names) if match)
        plain = filter(None, map(_PLAIN.fullmatch, sorted(names)))
        return any(has_dtensors(path, match[0]) for match in plain if match["rank"] == "0")

    def check_files_complete(self, path: Path, report: Report) -> None:
        items, _ = read_or_infer_items(path)
        for file in files_of_items(items.values()):
            if not is_existing_path(path / file):
                report(missing_rank_file_error(path / file))

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout of the checkpoint in directory `path`; each item is a top-level key."""
        items, world = read_or_infer_items(path)
        joined = FlatState()
        with collector_paused():
            with errors_at(path=path):
                for name, item in items.items():
                    joined.update(join_item_of_ranks(path, name, item, report))
            found = sorted(file for file in files_of_items(items.values()) if is_existing_path(path / file))
            flats, descriptions = (joined.tensors, joined.blobs, joined.keys), (*metadata_names_in(path), *found)
            layout = Layout(path, self.name, *flats, world, descriptions, spares=joined.spares)
            check_chunks_tile(layout, report)
        return layout

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        """Return every zip entry of torch.save files, and the tensors of other files, which have no checksums."""
        yielded: set[FileOffset] = set()
        for extent in archive_extents_of(layout, torch_save_files_in(layout.root, report), report):
            yielded.add((extent.path, extent.offset))
            yield extent
        for name, tensor in layout.tensors.items():
            for chunk in tensor.chunks:
                if (chunk.path, chunk.offset) not in yielded:
                    yield Extent(chunk.path, chunk.offset, chunk.length, None, name)

    def lay_out_files(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        return tuple(lay_out_item_files(wanted, options.world_size))

    def patches_after_data(self, written: Layout, checksums: Mapping[FileOffset, int]) -> Iterator[tuple[str, Patch]]:
        """Return the replicas that several ranks store, and the CRC-32 of each storage."""
        items, _ = read_or_infer_items(written.root)
        files = [read_item_files(written.root, name, item, raise_problem) for name, item in items.items()]
        return patches_for_rank_files(written.root, files, checksums)


def join_item_of_ranks(path: Path, name: str, item: CheckpointItem, report: Report) -> FlatState:
    """Return an item joined from all ranks; report unreadable files, and tensors that only those files contain."""
    files = read_item_files(path, name, item, report)
    absent = {rank for ranks in item.spread.values() for rank in ranks} - {file.rank for file in files}
    lost = (
        [infer_lost_rank_file(files[0], rank, item.files[rank][0]) for rank in absent & item.files.keys()]
        if files
        else []
    )
    flat = join_files(sorted([*files, *lost], key=lambda file: file.rank), report)
    if absent:
        for tensor in (".".join(map(str, (name, *key))) for key in item.spread):
            if tensor not in flat.tensors:
                report(Corrupt("no file of a rank that has this entry can be read", path=path, tensor=tensor))
    return flat


def has_dtensors(path: Path, name: str) -> bool:
    """Return whether a file is a torch.save file that contains DTensors."""
    try:
        if not is_torch_save(path / name):
            return False
        tensors = read_rank_file(path, name, 0, (), must_be_dict=False).tensors.values()
    except (Corrupt, Unsafe, Unsupported):
        return False
    return any(isinstance(tensor.spread, Placed) for tensor in tensors)


def read_or_infer_items(path: Path) -> tuple[dict[str, CheckpointItem], int]:
    """Return the items in the metadata and further per-rank items, and the world size.

    Raises `Corrupt` if the metadata is missing and a file's format does not record how tensors are sharded.
    """
    has_metadata = bool(metadata_names_in(path))
    items, world = read_item_metadata(path) if has_metadata else ({}, 0)
    listed = set(files_of_items(items.values()))
    matches = [match for name in sorted(set(names_in(path)) - listed) if (match := _OF_RANK.fullmatch(name))]
    if not has_metadata:
        world = max(int(match["rank"]) for match in matches) + 1
        lost = next((match[0] for match in matches if match["kind"] == "safetensors"), None)
        if lost is not None:
            message = f"missing: nothing else says where the tensors in `{lost}` belong"
            raise Corrupt(message, path=path / NAME, hint=ELSEWHERE)
    for name in dict.fromkeys(match["item"] for match in matches if match["kind"] == "pt"):
        items.setdefault(name, CheckpointItem({rank: (f"{name}_{rank}.pt", TORCH) for rank in range(world)}, {}))
    return items, world


def metadata_names_in(path: Path) -> tuple[str, ...]:
    """Return the name of the metadata file if it exists."""
    return (NAME,) if is_existing_path(path / NAME) else ()


def torch_save_files_in(path: Path, report: Report) -> Iterator[str]:
    """Yield the name of every torch.save file. Reports each that cannot be opened."""
    for file in files_of_items(read_or_infer_items(path)[0].values()):
        try:
            if is_torch_save(path / file):
                yield file
        except CkptError as error:
            report(error.blame(path=path / file))


def files_of_items(items: Iterable[CheckpointItem]) -> Iterator[str]:
    return (file for item in items for file, _ in item.files.values())


def lay_out_item_files(wanted: Layout, world_size: int) -> Iterator[NewFile]:
    """Yield the files of `world_size` ranks for each item, and the metadata.

    Raises `Unsupported` for an unsafe item.
    """
    writing = ItemWriting(wanted, Example(), RankMesh((world_size,), _AXES, "cpu"))
    items = writing.names_by_file_kind()
    for item, names in items.items():
        if "/" in item or "rank_" in item:
            raise Unsupported(f"the item `{item}` has no file name in this format", hint="rename it with --rename")
        for rank in range(world_size):
            yield writing.make_rank_file(f"{item}_{rank}.pt", names, rank)
    described = {}  # how the tensors of each item are sharded
    for item, names in items.items():
        shardings = {
            json.dumps(writing.key_in_rank_file(name), separators=(",", ":")): [
                describe_sharding(writing, name, world_size)
            ]
            for name in names
            if name in wanted.tensors
        }
        if shardings:
            ranks = dict.fromkeys(range(world_size))
            described[item] = {"nested_path_to_metadata": shardings, "rank_to_layout_info": ranks}
    metadata = pickle.dumps({"version": "2.0", "world_size": world_size, "metadata": described})
    yield NewFile(NAME, len(metadata), ((0, metadata),))


@dataclass(frozen=True)
class ItemWriting(Writing):
    """A checkpoint to write as items: each top-level key has files of its own."""

    @property
    def numbers(self) -> Mapping[str, int]:
        """Return {}: the optimizer has names."""
        return {}

    def names_by_file_kind(self) -> dict[str, list[str]]:
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
        envelope = make_zip_template(dump(storages.picklable_value_of(names[0])), storages.contents)
        return NewFile(name, envelope.nbytes, envelope.parts)

    def key_in_rank_file(self, name: str) -> KeyPath:
        """Return the key path of an entry in its file; the model is a flat state dict."""
        item, *steps = self.wanted.key(name)
        return (".".join(map(str, steps)),) if item == MODEL else tuple(steps)

    def find_placements(self, name: str) -> tuple[Placement, ...] | None:
        """Return the placements of a tensor on the mesh, None if it is replicated."""
        return (Shard(0),) if self.wanted.tensors[name].spec.shape else None


def describe_sharding(writing: Writing, name: str, world_size: int) -> dict[str, Any]:
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
            "mesh_shape": (world_size,),
            "mesh_data": tuple(range(world_size)),
            "mesh_dim_names": _AXES if placements else None,
        },
        "placements": [
            {"type": "Shard", "dim": placement.dim} if placement else {"type": "Replicate"}
            for placement in placements or (None,)
        ],
    }
    return {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": tuple(range(world_size))}
