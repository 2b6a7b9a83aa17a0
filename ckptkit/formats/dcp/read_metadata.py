"""Find the files of a DCP checkpoint by their names, and read its pickled `Metadata` into a layout.

Sources: torch/distributed/checkpoint/metadata.py and filesystem.py. The metadata maps each chunk of a tensor to a byte
range of a file. Megatron-LM records no key paths, so ckptkit infers the key paths of an optimizer from names: a state
is `optimizer.state.exp_avg.<name of the tensor>` (megatron/core/dist_checkpointing/optimizer.py), and the names of
several optimizers begin with `chained_0.` and so on (megatron/core/optimizer/optimizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptkit.errors import ELSEWHERE, RESTORE, CkptError, Corrupt, Incomplete, Report, Unsupported, raise_problem
from ckptkit.formats.archives.locate import ENVELOPE
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import FlatInstance, Global, InstanceTable, attribute_columns
from ckptkit.formats.pickles.tensor_calls import as_shape, as_shapes
from ckptkit.io.file import find_missing_content_error, names_in, read_small, require_plain_file_name
from ckptkit.layout import Blob, Chunk, KeyPath, Layout, Spec, StoredTensor, Wrapped
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.dtypes import DTYPES, DType

_METADATA_LIMIT = 1 << 34
METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA = re.compile(r".*?__(\d+)_\d+\.distcp")
_PLAIN = Wrapped(ENVELOPE)  # of an item without a transform
_INDEX_FIELDS = ["fqn", "index", "offset"]
_CHUNK_FIELDS = ["offsets", "sizes"]
_INFO_FIELDS = ["relative_path", "offset", "length", "transform_descriptors"]
_BATCH = 4096  # records that are parsed together

_RECORDS = (
    "Metadata MetadataIndex TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata "
    "StorageMeta _MEM_FORMAT_ENCODING"
)
_PATHS = "PosixPath PurePosixPath WindowsPath"
_NAMES_BY_MODULE = {
    "torch.distributed.checkpoint.metadata": _RECORDS,
    "torch.distributed._shard.checkpoint.metadata": _RECORDS,
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed._shard.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    # Megatron-LM stores its save plans in the metadata
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    # OLMo-core has its own writer, whose classes have torch's names
    "olmo_core.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch": " ".join((*DTYPES, "Size", "strided")),
    "torch.serialization": "_get_layout",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "collections": "OrderedDict",
    # Python 3.11.2 pickles enum members with it; it is never called
    "builtins": "getattr",
    "__builtin__": "getattr",
}
_NAMES = frozenset((module, name) for module, names in _NAMES_BY_MODULE.items() for name in names.split())
_OPTIMIZER = re.compile(r"(?:(chained_[0-9]+)\.)?(optimizer)\.(.+)", re.DOTALL)
_MOMENT = re.compile(r"(state)\.([^.]+)\.(.+)", re.DOTALL)

Attributes = Mapping[str, Any]


def read_metadata(path: Path) -> Attributes:
    """Return the attributes of the pickled `Metadata` object in file `path`."""
    data = read_small(path, _METADATA_LIMIT)
    try:
        value, _ = inert_pickle.load(data, _NAMES, as_flat_instances=True)
        metadata = value.attributes() if isinstance(value, FlatInstance) else {}
    except CkptError as error:
        raise find_missing_content_error(data[:512], path) or error.blame(path=path) from None
    except (TypeError, ValueError):
        metadata = {}
    if "planner_data" not in metadata or not isinstance(metadata.get("state_dict_metadata"), dict):
        raise Corrupt("expected DCP metadata, found another pickle", path=path, hint=RESTORE)
    return metadata


Entry = StoredTensor | Blob
Columns = Sequence[Sequence[Any]]
Place = tuple[Any, Any, Any, Any]  # file, offset, length and transforms of an item, unchecked from the pickle


class Reading:
    """Collects a layout from the `Metadata` of a checkpoint, or of all ranks. Skips malformed entries it reports."""

    def __init__(self, root: Path, report: Report = raise_problem) -> None:
        self.root = root
        self.report = report
        self.spares: dict[str, list[Chunk]] = {}
        self.specs: dict[str, Spec] = {}
        self.chunks: dict[str, dict[Box, Chunk]] = {}
        self.blobs: dict[str, Blob] = {}
        self.keys: dict[str, KeyPath] = {}
        self._files: set[str] = set()

    def add_metadata(self, metadata: Attributes, file: Path) -> None:
        places, report = self._locations(metadata, file), self.report
        for name, entry in metadata["state_dict_metadata"].items():
            if type(name) is not str:
                raise Corrupt(f"expected strings as keys of the state dict, found {type(name).__name__}", path=file)
            try:
                self._add_entry(name, entry, places.pop(name, {}), file)
            except CkptError as error:
                report(error.blame(path=file, tensor=name))
            except (AttributeError, KeyError, TypeError, ValueError, IndexError):
                report(Corrupt("the metadata of this entry is malformed", path=file, tensor=name))
        self.keys.update(read_key_paths(metadata, file))

    def _locations(self, metadata: Attributes, file: Path) -> dict[str, dict[Shape | None, Place]]:
        """Return `storage_data`, the location of each chunk, by name and by the chunk's offset (None for a byte entry).

        Empties `storage_data` on the way: in a large checkpoint it takes most of the memory.
        """
        places: dict[str, dict[Shape | None, Place]] = {}
        try:
            for (names, _, starts), infos in pop_location_columns(metadata["storage_data"]):
                shapes = iter(as_shapes([start for start in starts if start is not None]))
                for name, start, place in zip(
                    map(require_string, names), starts, zip(*infos, strict=True), strict=True
                ):
                    places.setdefault(name, {}).setdefault(None if start is None else next(shapes), place)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Corrupt("`storage_data` is malformed", path=file) from error
        return places

    def _add_entry(self, name: str, entry: FlatInstance, places: Mapping[Shape | None, Place], file: Path) -> None:
        of = type(entry)
        kind = of.name if isinstance(of, Global) else ""
        if kind == "BytesStorageMetadata":
            path, offset, length, wrapped = self._location(places.get(None))
            transform = None if wrapped == _PLAIN else wrapped
            self.blobs.setdefault(name, Blob(path, offset, length, where=transform))
            return
        if kind != "TensorStorageMetadata":
            raise Unsupported(f"an entry of kind `{kind}`")
        tensor = entry.attributes()
        spec = Spec(as_dtype(tensor["properties"]), as_shape(tensor["size"]))
        self.specs[name] = spec
        chunks, report = self.chunks.setdefault(name, {}), self.report
        for box in boxes_of_chunks(tensor["chunks"]):
            try:
                path, offset, length, wrapped = self._location(places.get(box.start))
            except CkptError as error:
                report(error.blame(path=file, tensor=name))
                continue
            chunks.setdefault(box, Chunk(box, path, offset, length, spec.dtype, None, None, wrapped))

    def _location(self, place: Place | None) -> tuple[str, int, int, Wrapped]:
        """Return file name, offset, length and wrapper of one item."""
        if place is None:
            raise Corrupt("the metadata does not say where this entry is stored")
        path, offset, length, transforms = place
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise Corrupt("the metadata gives an impossible offset or length")
        if require_string(path) not in self._files:
            require_plain_file_name(path, self.root)
            self._files.add(path)
        return path, offset, length, Wrapped("+".join(map(require_string, transforms))) if transforms else _PLAIN

    @property
    def names(self) -> Iterable[str]:
        return (*self.specs, *self.blobs)

    def entry(self, name: str) -> Entry:
        return self.blobs[name] if name in self.blobs else self.tensor(name)

    def tensor(self, name: str) -> StoredTensor:
        return StoredTensor(self.specs[name], tuple(self.chunks[name].values()))

    def key(self, name: str) -> KeyPath:
        return self.keys.get(name, (name,))

    def to_layout(self, format_name: str) -> Layout:
        """Return the collected entries as a layout of the format `format_name`."""
        tensors = {name: self.tensor(name) for name in self.specs}
        keys = self.keys
        if all(len(path) == 1 for path in keys.values()):  # Megatron-Core 0.9 records each name as its own path
            inferred: dict[str, KeyPath] = {}
            for name in (*tensors, *self.blobs):
                if match := _OPTIMIZER.fullmatch(name):
                    moment = _MOMENT.fullmatch(match[3])  # of a tensor of the checkpoint
                    rest = moment.groups() if moment and moment[3] in tensors else (match[3],)
                    inferred[name] = (*filter(None, match.groups()[:2]), *rest)
            keys = inferred if not keys or any(path[-3:-2] == ("state",) for path in inferred.values()) else keys
        spares = {name: tuple(chunks) for name, chunks in self.spares.items()}
        return Layout(self.root, format_name, tensors, self.blobs, keys, spares=spares)


def pop_location_columns(storage: dict[Any, Any]) -> Iterator[tuple[Columns, Columns]]:
    """Remove entries from `storage_data` batch by batch: yield columns of their indices and of their locations."""
    while storage:
        batch = [storage.popitem() for _ in range(min(_BATCH, len(storage)))]
        for index, _ in batch:
            if isinstance(index, InstanceTable):
                yield index.columns(_INDEX_FIELDS), index.columns(_INFO_FIELDS, key_or_value=1)
        single = [entry for entry in batch if not isinstance(entry[0], InstanceTable)]
        if single:
            yield (
                attribute_columns([index for index, _ in single], _INDEX_FIELDS),
                attribute_columns([info for _, info in single], _INFO_FIELDS),
            )


def boxes_of_chunks(chunks: list[Any]) -> list[Box]:
    """Return the box of each `ChunkStorageMetadata` in a list, in order."""
    boxes: list[Box] = []
    for record in chunks:
        if type(record) is InstanceTable:
            boxes += map(Box, *map(as_shapes, record.columns(_CHUNK_FIELDS)))
        else:
            offsets, sizes = map(record.attributes().__getitem__, _CHUNK_FIELDS)
            boxes.append(Box(as_shape(offsets), as_shape(sizes)))
    return boxes


def require_string(value: Any) -> str:
    """Return a string, or raise `TypeError`: other pickled values may be extremely expensive to hash or to print."""
    if type(value) is not str:
        raise TypeError("name")
    return value


def as_dtype(properties: FlatInstance) -> DType:
    """Return the dtype in a `TensorProperties`, its state `(dtype, layout, requires_grad, memory format, pinned)`."""
    state = properties[0]
    named = state[0] if isinstance(state, tuple) else properties.attributes()["dtype"]
    if not isinstance(named, Global):
        raise TypeError("dtype")
    dtype = DTYPES.get(named.name)
    if dtype is None:
        raise Unsupported(f"dtype `{named.name}`")
    return dtype


def read_key_paths(metadata: Attributes, file: Path) -> dict[str, KeyPath]:
    """Return `planner_data`: the key path of each flattened name; {} if nothing was flattened.

    A name is its key path joined by dots, so the metadata has each path twice, and damage shows.
    """
    recorded = metadata.get("planner_data")
    if not isinstance(recorded, dict) or not recorded:
        return {}
    for name, steps in recorded.items():
        is_path = isinstance(steps, tuple) and steps and {str, int}.issuperset(map(type, steps))
        if type(name) is not str or not is_path:
            raise Corrupt("`planner_data` has a key path that is not a tuple of names and positions", path=file)
        if ".".join(map(str, steps)) != name:
            message = f"the recorded key path is {list(steps)}, which gives another name"
            raise Corrupt(message, path=file, tensor=name, hint=RESTORE)
    names = metadata["state_dict_metadata"]
    if recorded.keys() != names.keys():
        name = next(iter(recorded.keys() ^ names.keys()))
        message = "`planner_data` and `state_dict_metadata` do not name the same entries"
        raise Corrupt(message, path=file, tensor=name, hint=RESTORE)
    return recorded


def tensors_file_name(rank: int) -> str:
    """Return the name of the file with a rank's shards, whose size is known in advance."""
    return f"__{rank}_0.distcp"


def entries_file_name(rank: int) -> str:
    """Return the name of the file with a rank's non-tensor entries."""
    return f"__{rank}_1.distcp"


def find_rank_in_file_name(name: str) -> int | None:
    """Return the rank that wrote a data file, None for any other file."""
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else None


def is_metadata(name: str) -> bool:
    """Return whether a file is the metadata of the checkpoint or of one rank."""
    return name == METADATA or bool(_RANK_METADATA.fullmatch(name))


def metadata_files_by_rank(path: Path) -> dict[int, Path]:
    """Return the metadata files by rank: `.metadata` as rank 0, or else each rank's. Raises `Incomplete` if none is."""
    if (path / METADATA).exists():
        return {0: path / METADATA}
    ranks = {int(match[1]): path / name for name in names_in(path) if (match := _RANK_METADATA.fullmatch(name))}
    if not ranks:
        from ckptkit.io.claims import find_claim, find_unfinished_upload_error  # only where nothing can be read

        raise find_unfinished_upload_error(path, find_claim(path)) or Incomplete(
            "no `.metadata`: the save did not finish",
            path=path,
            files=[METADATA],
            hint=f"{ELSEWHERE}, or run `ckptkit reshard` with --salvage --fill-from OLDER, an older checkpoint",
        )
    return dict(sorted(ranks.items()))
