"""Forged descriptions: what says where the tensors are contradicts itself or the files. Cases 22 to 29.

The metadata are torch's own objects, changed and pickled again; so are headers and indices, which are JSON.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from tests import producers
from tests.faults.bad_inputs import INDEX, METADATA
from tests.faults.cases import Case
from tests.faults.damage import Damage, become
from tests.faults.originals import original, produced
from tests.faults.subjects import OURS, TO_TORCH_SAVE, weights_of
from tests.faults.tables import UNTOLD
from tests.faults.trials import Bad, case, case_of

TENSOR, OTHER = "model.head.weight", "model.layers.0.up.weight"
NAMED = ("head.weight",)
STRANGE = (
    *(producers.fsdp2, producers.dtypes, producers.strided),
    *(producers.strange_names, producers.file_per_item),
)
SHARD = "shard-00002-model-00001-of-00001.safetensors"
SAFETENSORS = (("hf", "model.safetensors"), ("shards", SHARD))


# -- metadata ----------------------------------------------------------------------------------------------------------


def forge(change: Callable[[Metadata], object]) -> Damage:
    """Change the metadata of a DCP directory."""

    def damage(root: Path) -> None:
        metadata = FileSystemReader(root).read_metadata()
        change(metadata)
        (root / METADATA).write_bytes(pickle.dumps(metadata))

    return damage


def entry(metadata: Metadata) -> Any:
    """What the metadata say of the tensor that is tampered with."""
    return metadata.state_dict_metadata[TENSOR]


def lose_chunk(metadata: Metadata) -> None:
    """Forget the second rank's rows."""
    lost = entry(metadata).chunks.pop()
    del metadata.storage_data[MetadataIndex(TENSOR, lost.offsets)]


def lose_place(metadata: Metadata) -> None:
    """Forget where the second rank's rows lie."""
    del metadata.storage_data[MetadataIndex(TENSOR, entry(metadata).chunks[1].offsets)]


def lose_entry(metadata: Metadata) -> None:
    """Forget what the tensor is."""
    del metadata.state_dict_metadata[TENSOR]


def move_chunk(metadata: Metadata, rows: int) -> None:
    """Let the second rank's rows begin elsewhere."""
    chunk = entry(metadata).chunks[1]
    place = metadata.storage_data.pop(MetadataIndex(TENSOR, chunk.offsets))
    chunk.offsets = torch.Size([chunk.offsets[0] + rows, 0])
    metadata.storage_data[MetadataIndex(TENSOR, chunk.offsets)] = place


def repeat_chunk(metadata: Metadata) -> None:
    """List a chunk twice."""
    entry(metadata).chunks.append(entry(metadata).chunks[1])


def add_chunk(metadata: Metadata) -> None:
    """List a chunk that lies where others do, in the bytes of another."""
    first = entry(metadata).chunks[0]
    more = ChunkStorageMetadata(offsets=torch.Size([24, 0]), sizes=first.sizes)
    entry(metadata).chunks.append(more)
    place = metadata.storage_data[MetadataIndex(TENSOR, first.offsets)]
    metadata.storage_data[MetadataIndex(TENSOR, more.offsets)] = place


def resize(metadata: Metadata, *size: int) -> None:
    """Let the tensor have another shape."""
    entry(metadata).size = torch.Size(size)


def resize_chunk(metadata: Metadata, *size: int) -> None:
    """Let a chunk have another shape."""
    entry(metadata).chunks[1].sizes = torch.Size(size)


def retype(metadata: Metadata, dtype: torch.dtype) -> None:
    """Let the tensor have another dtype."""
    entry(metadata).properties = replace(entry(metadata).properties, dtype=dtype)


def move_item(metadata: Metadata, **values: Any) -> None:
    """Let a chunk's item lie elsewhere: by so many bytes, or in another file."""
    index = MetadataIndex(TENSOR, entry(metadata).chunks[1].offsets)
    place = metadata.storage_data[index]
    changed = {name: getattr(place, name) + by if isinstance(by, int) else by for name, by in values.items()}
    metadata.storage_data[index] = replace(place, **changed)


def swap_items(metadata: Metadata, one: str, other: str) -> None:
    """Let each of two tensors of one shape lie where the other does."""
    indices = [[index for index in metadata.storage_data if index.fqn == name] for name in (one, other)]
    for first, second in zip(*indices, strict=True):
        data = metadata.storage_data
        data[first], data[second] = data[second], data[first]


def rename_way(metadata: Metadata) -> None:
    """Let the way to a tensor be that to another, which so is there twice."""
    assert metadata.planner_data is not None
    metadata.planner_data[TENSOR] = metadata.planner_data[OTHER]


def forged(name: str, change: Callable[..., object], *values: Any, **named: Any) -> Bad:
    """A DCP directory with changed metadata."""
    return Bad(name, "dcp", forge(lambda metadata: change(metadata, *values, **named)), (*NAMED, ".distcp"))


# -- headers and indices -----------------------------------------------------------------------------------------------


def rewrite(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the header of a safetensors file; its data stay."""

    def damage(root: Path) -> None:
        content = (root / name).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        (root / name).write_bytes(with_header(json.dumps(header).encode()) + content[end:])

    return damage


def with_header(text: bytes) -> bytes:
    """A header after its length."""
    return len(text).to_bytes(8, "little") + text


def reindex(change: Callable[[dict[str, str]], object]) -> Damage:
    """Change the index of a sharded model."""

    def damage(root: Path) -> None:
        index = json.loads((root / INDEX).read_text())
        change(index["weight_map"])
        (root / INDEX).write_text(json.dumps(index))

    return damage


def set_in_header(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Let what a header says of the tensor be something else; if `value` is a function, what it makes of it."""

    def change(header: dict[str, Any]) -> None:
        said = header["head.weight"]
        said[field] = value(said[field]) if callable(value) else value

    return change


def of_header(name: str, field: str, value: Any) -> list[Bad]:
    """Files whose header says something else of a tensor."""
    return [Bad(name, kind, rewrite(file, set_in_header(field, value)), (*NAMED, file)) for kind, file in SAFETENSORS]


def take_place_of(header: dict[str, Any]) -> None:
    """Let two tensors lie in the same bytes, and nothing in those of the other."""
    header["layers.0.up.weight"]["data_offsets"] = header["layers.1.up.weight"]["data_offsets"]


def change_places(header: dict[str, Any]) -> None:
    """Let each of two tensors of one shape lie where the other does."""
    one, other = header["layers.0.up.weight"], header["layers.1.up.weight"]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def add_name(places: dict[str, str]) -> None:
    """Name a tensor that is in no file."""
    places["more"] = places["head.weight"]


def place_elsewhere(places: dict[str, str]) -> None:
    """Name another file than that which a tensor is in."""
    places["head.weight"] = places["embed.weight"]


def place_nowhere(places: dict[str, str]) -> None:
    """Name a file that is not there."""
    places["head.weight"] = "model-00004-of-00004.safetensors"


# -- whole checkpoints -------------------------------------------------------------------------------------------------


def two_names(root: Path) -> producers.Truth:
    """Two tensors that have one name once the wrappers of modules are taken off."""
    state = {"weight": producers.counted(3, 4), "_orig_mod.weight": producers.counted(3, 4) + 1}
    return producers.save_alone({"model": state}, root)


def clashing() -> Iterator[Bad]:
    """Two keys for one name."""
    sound = produced(two_names)
    damage = become(partial(Path, sound.root))
    yield Bad("two keys", "dcp", damage, ("weight",), truth=sound.truth, subjects=OURS, is_sound=True)


def strange() -> Iterator[Bad]:
    """Sound checkpoints of all that a state dict may hold; each must come out bit for bit or be refused by name."""
    for producer in STRANGE:
        sound = produced(producer)
        given: dict[str, Any] = {"culprits": tuple(weights_of(sound.truth)), "truth": sound.truth, "is_sound": True}
        tried = (*OURS, TO_TORCH_SAVE)
        yield Bad(producer.__name__, "dcp", become(partial(Path, sound.root)), subjects=tried, **given)
    sound = original("scalars")
    yield Bad("0-d", "shards", become(partial(Path, sound.root)), truth=sound.truth, is_sound=True)


CASES: tuple[Case, ...] = (
    case(
        *("22", "struct", "a chunk is missing"),
        [forged("chunk", lose_chunk), forged("its place", lose_place), forged("its entry", lose_entry)],
    ),
    case(
        *("23", "struct", "chunks overlap"),
        [
            forged("by a row", move_chunk, -1),
            forged("a third chunk", add_chunk),
            forged("one listed twice", repeat_chunk),
        ],
    ),
    case(
        *("24", "struct", "a chunk outside the tensor, or less of it than its size"),
        [
            forged("outside", move_chunk, 1),
            forged("far outside", move_chunk, 1 << 40),
            forged("a larger tensor", resize, 200, 32),
            forged("another rank", resize, 95, 32, 1),
            forged("no elements", resize, 0, 32),
        ],
    ),
    case(
        *("25", "struct", "dtype or shape other than in the file"),
        [
            # not float64: planners that round leave fewer bits than they promise, which torch casts
            *(forged(f"{dtype}", retype, dtype) for dtype in (torch.float16, torch.bfloat16, torch.int32)),
            forged("chunk turned", resize_chunk, 32, 47),
            forged("chunk flat", resize_chunk, 47 * 32),
            Bad("as int32", "shards", rewrite(SHARD, set_in_header("dtype", "I32")), (*NAMED, SHARD)),
            *of_header("as bf16", "dtype", "BF16"),
            *of_header("shape", "shape", [3, 1000]),
        ],
    ),
    case(
        *("26", "struct", "bytes beyond the file, before it, twice, or not at all"),
        [
            forged("past the end", move_item, offset=1 << 40),
            forged("too long", move_item, length=1 << 40),
            forged("negative offset", move_item, offset=-(1 << 30)),
            forged("negative length", move_item, length=-(1 << 30)),
            forged("a byte further", move_item, offset=1),
            forged("a byte before", move_item, offset=-1),
            forged("shorter", move_item, length=-64),
            forged("another file", move_item, relative_path="__0_0.distcp"),
            *of_header("past the end", "data_offsets", [1 << 40, (1 << 40) + 12160]),
            *of_header("negative", "data_offsets", [-12160, 0]),
            *of_header("turned", "data_offsets", lambda place: place[::-1]),
            *of_header("hole", "data_offsets", lambda place: [place[0] + 4, place[1]]),
            *(Bad("same bytes", kind, rewrite(file, take_place_of), ("layers.", file)) for kind, file in SAFETENSORS),
        ],
    ),
    case_of("27", "struct", "two keys for one name", clashing),
    case("27", "struct", "two entries with one way", [forged("way of another", rename_way)]),
    case_of("28", "struct", "0-d, empty, integer, boolean, 8-bit, complex, tied and strided tensors", strange),
    case(
        *("29", "struct", "an index that does not fit its files"),
        [
            Bad("names what is not there", "indexed", reindex(add_name), ("more",)),
            Bad("lacks a tensor", "indexed", reindex(lambda places: places.pop("head.weight")), NAMED),
            Bad("another file", "indexed", reindex(place_elsewhere), NAMED),
            Bad("no such file", "indexed", reindex(place_nowhere), ("model-00004",)),
        ],
    ),
    case(
        *("25, 26", UNTOLD, "of another dtype, or two of one shape changed, without a manifest"),
        [
            Bad("as int32", "hf", rewrite("model.safetensors", set_in_header("dtype", "I32")), NAMED),
            Bad("changed", "hf", rewrite("model.safetensors", change_places), NAMED),
            forged("changed", swap_items, OTHER, OTHER.replace("0", "1")),
        ],
    ),
)
