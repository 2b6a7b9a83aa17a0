"""DCP directories, with torch as the oracle; then the same directories damaged in every way we know."""

from __future__ import annotations

import io
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Corrupt, Unsafe, Unsupported
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Layout
from tests import producers
from tests.conftest import Produce
from tests.formats.contract import WriterContract, assert_holds
from tests.producers import ENCODED, READABLE, Producer
from tests.tiers import nightly_but


class TestDcp(WriterContract):
    format = "dcp"
    keeps_order = True

    def write(self, root: Path, tensors: dict[str, Tensor]) -> None:
        dcp.save(dict(tensors), storage_writer=FileSystemWriter(root), no_dist=True)

    def load(self, root: Path) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        _load_state_dict(found, FileSystemReader(root), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return found

    pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class TestDcpOfThreeRanks(TestDcp):
    world_size = 3


@pytest.mark.parametrize("producer", READABLE, ids=lambda producer: producer.__name__)
def test_every_producer_is_read_whole(produce: Produce, producer: Producer) -> None:
    made = produce(producer)
    assert_holds(open_layout(made.root), made.truth)


@pytest.mark.parametrize("producer", ENCODED, ids=lambda producer: producer.__name__)
def test_what_is_not_plain_is_refused_by_name(produce: Produce, producer: Producer) -> None:
    layout = open_layout(produce(producer).root)
    with pytest.raises(Unsupported) as raised:
        locate_all_chunks(layout)
    assert raised.value.tensor in layout.tensors
    assert raised.value.path == layout.root / "__0_0.distcp"


def test_plain_tensors_beside_others_are_readable(produce: Produce) -> None:
    made = produce(producers.quantized)
    layout = open_layout(made.root)
    plain = replace(layout, tensors={"plain": layout.tensors["plain"]})
    assert_holds(plain, {"plain": made.truth["plain"]})


def test_accelerates_two_directories(produce: Produce) -> None:
    made = produce(producers.accelerate)
    model, optimizer = (open_layout(made.root / name) for name in ("pytorch_model_fsdp_0", "optimizer_0"))
    truth = made.truth
    assert_holds(model, {name: truth[name] for name in truth if name.startswith("model.")})
    assert_holds(optimizer, {name: truth[name] for name in truth if name.startswith("optimizer.")})


def test_blobs_keys_and_ranks(produce: Produce) -> None:
    layout = open_layout(produce(producers.fsdp2).root)
    assert {"extra.step", "extra.note", "extra.none", "optim.param_groups.0.lr"} <= layout.blobs.keys()
    for blob in layout.blobs.values():
        raw = (layout.root / blob.path).read_bytes()[blob.offset : blob.offset + blob.length]
        torch.load(io.BytesIO(raw))
    assert layout.key("model.embed.weight") == ("model", "embed.weight")
    assert layout.key("optim.param_groups.0.lr") == ("optim", "param_groups", 0, "lr")
    assert layout.world_size == 3


def test_crc_is_known_unless_it_was_switched_off(produce: Produce) -> None:
    for producer, known in ((producers.many_files, True), (producers.no_crc, False)):
        layout = locate_all_chunks(open_layout(produce(producer).root))
        chunks = [chunk for tensor in layout.tensors.values() for chunk in tensor.chunks if chunk.length]
        assert all((chunk.crc32 is not None) == known for chunk in chunks)


def test_strides_are_told(produce: Produce) -> None:
    layout = locate_all_chunks(open_layout(produce(producers.strided).root))
    strides = {name: tensor.chunks[0].strides for name, tensor in layout.tensors.items()}
    assert strides["model.transposed"] == (1, 4)
    assert strides["model.plain"] is None
    assert strides["model.thin"] is None, "with one element in a row, the order of axes is no matter"


# -- what other versions of Python and torch write ---------------------------------------------------------------------


@pytest.fixture
def checkpoint(produce: Produce, tmp_path: Path) -> Path:
    """A copy of the FSDP2 checkpoint, to be changed."""
    return Path(shutil.copytree(produce(producers.fsdp2).root, tmp_path / "checkpoint"))


def load_metadata(root: Path) -> Metadata:
    loaded: Metadata = pickle.loads((root / ".metadata").read_bytes())
    return loaded


def save_metadata(root: Path, metadata: Metadata, protocol: int = 4) -> None:
    (root / ".metadata").write_bytes(pickle.dumps(metadata, protocol))


def same_but_root(layout: Layout, other: Layout) -> bool:
    return replace(layout, root=other.root) == other


@pytest.mark.parametrize("protocol", nightly_but([2], [2, 3, 4, 5]))
def test_any_protocol(checkpoint: Path, protocol: int) -> None:
    before = open_layout(checkpoint)
    save_metadata(checkpoint, load_metadata(checkpoint), protocol)
    assert open_layout(checkpoint) == before


_PATHS = type(Path()).__module__  # it has moved in Python 3.13, and not in all of its releases


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata"),
        (_PATHS, ({"pathlib", "pathlib._local"} - {_PATHS}).pop()),
        ("PosixPath", "WindowsPath"),
    ],
)
def test_names_of_other_versions(checkpoint: Path, now: str, then: str) -> None:
    before = open_layout(checkpoint)
    old, new = (b"\x8c" + bytes([len(name)]) + name.encode() for name in (now, then))
    data = (checkpoint / ".metadata").read_bytes()
    head, frame = data[:3], data[11:]
    assert head in {b"\x80\x04\x95", b"\x80\x05\x95"}  # protocol (5 since Python 3.14); a frame, whose length follows
    assert old in frame
    frame = frame.replace(old, new)
    (checkpoint / ".metadata").write_bytes(head + len(frame).to_bytes(8, "little") + frame)
    assert open_layout(checkpoint) == before


class GetattrPickler(pickle.Pickler):
    """Pickles enum members as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _MEM_FORMAT_ENCODING):
            return getattr, (_MEM_FORMAT_ENCODING, value.name)
        return NotImplemented


def test_enum_members_by_getattr(checkpoint: Path) -> None:
    before = open_layout(checkpoint)
    stream = io.BytesIO()
    GetattrPickler(stream, 4).dump(load_metadata(checkpoint))
    assert b"getattr" in stream.getvalue()
    (checkpoint / ".metadata").write_bytes(stream.getvalue())
    assert open_layout(checkpoint) == before


def test_properties_with_a_sixth_field(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_layout(checkpoint)
    metadata = load_metadata(checkpoint)
    get_state = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda properties: (*get_state(properties), None))
    save_metadata(checkpoint, metadata)
    assert open_layout(checkpoint) == before


def test_metadata_of_old_torch_has_three_fields(checkpoint: Path) -> None:
    before = open_layout(checkpoint)
    metadata = load_metadata(checkpoint)
    del metadata.storage_meta
    del metadata.version
    save_metadata(checkpoint, metadata)
    assert open_layout(checkpoint) == before


def test_metadata_without_planner_data_has_flat_names(checkpoint: Path) -> None:
    metadata = load_metadata(checkpoint)
    metadata.planner_data = None
    save_metadata(checkpoint, metadata)
    assert open_layout(checkpoint).key("model.embed.weight") == ("model.embed.weight",)


def test_megatron_leaves_its_plans(checkpoint: Path) -> None:
    before = open_layout(checkpoint)
    metadata: Any = load_metadata(checkpoint)
    metadata.all_local_plans = [SavePlan([])]
    save_metadata(checkpoint, metadata)
    assert open_layout(checkpoint) == before


# -- damage ------------------------------------------------------------------------------------------------------------

NAME = "model.up.weight"


def place_of(metadata: Metadata, name: str = NAME) -> Any:
    """The storage info of the first chunk of a tensor."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def entry_of(metadata: Metadata, name: str = NAME) -> Any:
    return metadata.state_dict_metadata[name]


def change(root: Path, edit: Callable[[Metadata], object]) -> None:
    metadata = load_metadata(root)
    edit(metadata)
    save_metadata(root, metadata)


def read_fully(root: Path) -> Layout:
    return locate_all_chunks(open_layout(root))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda root: (root / ".metadata").unlink(),
        lambda root: (root / ".metadata").write_bytes(b""),
        lambda root: (root / ".metadata").write_bytes((root / ".metadata").read_bytes()[:1000]),
        lambda root: (root / ".metadata").write_bytes(b"garbage" * 99),
        lambda root: (root / ".metadata").write_bytes(bytes(4096)),
        lambda root: (root / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        lambda root: (root / ".metadata").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
    ],
    ids=["missing", "empty", "half", "garbage", "zeros", "something else", "git lfs"],
)
def test_bad_metadata_is_corrupt(checkpoint: Path, spoil: Callable[[Path], object]) -> None:
    spoil(checkpoint)
    with pytest.raises(CkptError) as raised:
        open_layout(checkpoint)
    assert raised.value.exit_code == 3
    assert raised.value.path in (checkpoint, checkpoint / ".metadata")


def test_a_save_that_did_not_finish_is_said(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()
    with pytest.raises(Corrupt, match="did not finish"):
        open_layout(checkpoint)


def test_all_missing_files_are_listed(checkpoint: Path) -> None:
    for rank in (0, 2):
        (checkpoint / f"__{rank}_0.distcp").unlink()
    with pytest.raises(Corrupt, match=r"__0_0\.distcp, __2_0\.distcp"):
        open_layout(checkpoint)


@pytest.mark.parametrize("keep", [0, 0.5, -1])
def test_a_truncated_shard_is_found_before_its_data_is_read(checkpoint: Path, keep: float) -> None:
    shard = checkpoint / "__1_0.distcp"
    size = shard.stat().st_size
    os.truncate(shard, int(size * keep) if keep >= 0 else size - 1)
    with pytest.raises(Corrupt) as raised:
        open_layout(checkpoint)
    assert raised.value.path == shard
    assert str(size) in raised.value.message


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", ".", "..", "a/b", "a\0b", "a\\b"])
def test_a_file_outside_the_directory_is_unsafe(checkpoint: Path, name: str) -> None:
    change(checkpoint, lambda metadata: setattr(place_of(metadata), "relative_path", name))
    with pytest.raises(Unsafe):
        open_layout(checkpoint)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_shard_that_is_no_file_is_unsafe(checkpoint: Path, kind: str) -> None:
    shard = checkpoint / "__1_0.distcp"
    shard.rename(checkpoint.parent / "real")
    {"link": lambda: shard.symlink_to(checkpoint.parent / "real"), "pipe": lambda: os.mkfifo(shard)}.get(
        kind, shard.mkdir
    )()
    with pytest.raises(Unsafe) as raised:
        read_fully(checkpoint)
    assert raised.value.path == shard


def set_chunk(metadata: Metadata, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Move the first chunk of a tensor, with the record of where it lies."""
    chunks = entry_of(metadata).chunks
    before = MetadataIndex(NAME, chunks[0].offsets)
    chunks[0] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    metadata.storage_data[MetadataIndex(NAME, torch.Size(offsets))] = metadata.storage_data.pop(before)


CONTRADICTIONS: dict[str, Callable[[Metadata], object]] = {
    "a chunk is missing": lambda m: entry_of(m).chunks.pop(),
    "no chunks": lambda m: entry_of(m).chunks.clear(),
    "two chunks overlap": lambda m: set_chunk(m, (1, 0), (3, 6)),
    "a chunk lies outside": lambda m: set_chunk(m, (6, 0), (3, 6)),
    "a chunk is larger": lambda m: set_chunk(m, (0, 0), (4, 6)),
    "a chunk is smaller": lambda m: set_chunk(m, (0, 0), (2, 6)),
    "a chunk of another rank": lambda m: set_chunk(m, (0,), (3,)),
    "the tensor is larger": lambda m: setattr(entry_of(m), "size", torch.Size((8, 6))),
    "the tensor is huge": lambda m: setattr(entry_of(m), "size", torch.Size((2**40, 2**22))),
    "another dtype": lambda m: setattr(entry_of(m).properties, "dtype", torch.int32),
    "a dtype of another size": lambda m: setattr(entry_of(m).properties, "dtype", torch.int64),
    "nobody knows where": lambda m: m.storage_data.pop(MetadataIndex(NAME, entry_of(m).chunks[0].offsets)),
    "an offset past the end": lambda m: setattr(place_of(m), "offset", 1 << 50),
    "an offset past everything": lambda m: setattr(place_of(m), "offset", 1 << 200),
    "a negative offset": lambda m: setattr(place_of(m), "offset", -1),
    "a negative length": lambda m: setattr(place_of(m), "length", -1),
    "an offset in words": lambda m: setattr(place_of(m), "offset", "7"),
    "another offset": lambda m: setattr(place_of(m), "offset", place_of(m).offset + 1),
    "a shorter item": lambda m: setattr(place_of(m), "length", place_of(m).length - 1),
    "an item of no bytes": lambda m: setattr(place_of(m), "length", 0),
    "a longer item": lambda m: setattr(place_of(m), "length", place_of(m).length + 1),
    "the item of another tensor": lambda m: vars(place_of(m)).update(vars(place_of(m, "model.embed.weight"))),
    "a name of another type": lambda m: setattr(place_of(m), "relative_path", 7),
    "a name that no system has": lambda m: setattr(place_of(m), "relative_path", "\ud800"),
    "a name that is too long": lambda m: setattr(place_of(m), "relative_path", "x" * 300),
    "chunks are no list": lambda m: setattr(entry_of(m), "chunks", 7),
    "size is no shape": lambda m: setattr(entry_of(m), "size", "abc"),
    "no properties": lambda m: setattr(entry_of(m), "properties", None),
    "an entry is a number": lambda m: m.state_dict_metadata.update({NAME: 7}),  # type: ignore[dict-item]
    "a key is a number": lambda m: m.state_dict_metadata.update({7: entry_of(m)}),  # type: ignore[dict-item]
    "storage data is a list": lambda m: setattr(m, "storage_data", []),
    "no storage data": lambda m: setattr(m, "storage_data", None),
    "no entries": lambda m: setattr(m, "state_dict_metadata", None),
    "a key path is a list": lambda m: m.planner_data.update({NAME: ["model"]}),
    "a key path is empty": lambda m: m.planner_data.update({NAME: ()}),
    "a key path of floats": lambda m: m.planner_data.update({NAME: (1.5,)}),
    "a transform is a number": lambda m: setattr(place_of(m), "transform_descriptors", 7),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_an_error(checkpoint: Path, name: str) -> None:
    change(checkpoint, CONTRADICTIONS[name])
    with pytest.raises(CkptError) as raised:
        read_fully(checkpoint)
    assert raised.value.exit_code == 3
    assert raised.value.path is not None


def test_a_rank_that_never_wrote_leaves_a_gap(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(producers.no_collectives).root, tmp_path / "checkpoint"))
    (root / "__1.metadata").unlink()
    with pytest.raises(Corrupt, match="gap"):
        open_layout(root)


def test_another_runs_files_are_not_looked_at(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.leftovers)
    root = Path(shutil.copytree(made.root, tmp_path / "checkpoint"))
    for rank in (2, 3):
        (root / f"__{rank}_0.distcp").write_bytes(b"garbage")
    assert_holds(open_layout(root), made.truth)


def test_every_item_cut_short_is_corrupt(produce: Produce, tmp_path: Path) -> None:
    """The end of an item's archive is where everything else is found from: no byte of it may be missing."""
    root = Path(shutil.copytree(produce(producers.under_model).root, tmp_path / "checkpoint"))
    name = "model.0.weight"
    metadata = load_metadata(root)
    place = place_of(metadata, name)
    for length in range(0, place.length, 13):
        place.length = length
        save_metadata(root, metadata)
        with pytest.raises(CkptError):
            read_fully(root)


@settings(max_examples=200)
@given(data=st.data())
def test_damaged_metadata_gives_a_layout_or_an_error(
    produce: Produce, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    made = produce(producers.under_model).root
    root = tmp_path_factory.getbasetemp() / "damaged-metadata"
    shutil.copytree(made, root, dirs_exist_ok=True)
    damaged = bytearray((made / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (root / ".metadata").write_bytes(damaged)
    with suppress(CkptError):
        read_fully(root)


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_item_gives_the_same_layout_or_an_error(
    produce: Produce, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever byte of the archives is damaged: the bytes of a tensor are found where they are, or not at all."""
    made = produce(producers.under_model).root
    root = tmp_path_factory.getbasetemp() / "damaged-item"
    shutil.copytree(made, root, dirs_exist_ok=True)
    damaged = bytearray((made / "__0_0.distcp").read_bytes())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    (root / "__0_0.distcp").write_bytes(damaged)
    try:
        layout = read_fully(root)
    except CkptError:
        return
    sound = read_fully(made)
    for name, tensor in sound.tensors.items():
        assert layout.tensors[name].spec == tensor.spec
        for found, expected in zip(layout.tensors[name].chunks, tensor.chunks, strict=True):
            assert (found.offset, found.length, found.strides) == (expected.offset, expected.length, expected.strides)


# -- attacks -----------------------------------------------------------------------------------------------------------


class Runs:
    """An object whose unpickling runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_nothing_in_a_checkpoint_runs(checkpoint: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    metadata = load_metadata(checkpoint)
    metadata.planner_data = Runs(f"touch {canary}")
    save_metadata(checkpoint, metadata)
    with pytest.raises(Unsupported, match=r"system"):
        read_fully(checkpoint)
    assert not canary.exists()
    load_metadata(checkpoint)
    assert canary.exists(), "the payload should have been a real one"


def twins(depth: int = 64) -> Any:
    """A tuple of two tuples of two tuples ...: small in a pickle, larger than the universe when walked."""
    found: Any = ("x",)
    for _ in range(depth):
        found = (found, found)
    return found


def name_by_twins(metadata: Metadata) -> None:
    index = MetadataIndex(NAME)
    metadata.storage_data[index] = place_of(metadata)
    object.__setattr__(index, "fqn", twins())


MULTIPLIERS: dict[str, Callable[[Metadata], object]] = {
    "file name": lambda m: setattr(place_of(m), "relative_path", twins()),
    "offset": lambda m: setattr(place_of(m), "offset", twins()),
    "length": lambda m: setattr(place_of(m), "length", [twins()]),
    "transforms": lambda m: setattr(place_of(m), "transform_descriptors", [twins()]),
    "size": lambda m: setattr(entry_of(m), "size", twins()),
    "chunk": lambda m: entry_of(m).chunks.append(twins()),
    "key path": lambda m: m.planner_data.update({NAME: twins()}),
    "entry": lambda m: m.state_dict_metadata.update({NAME: twins()}),
    "name in storage data": name_by_twins,
}


@pytest.mark.parametrize("where", MULTIPLIERS)
def test_what_is_small_in_the_pickle_stays_small(checkpoint: Path, where: str) -> None:
    change(checkpoint, MULTIPLIERS[where])
    assert_refused_cheaply(checkpoint)


@pytest.mark.parametrize("opcode", [b"\x85", b"R"], ids=["tuples", "calls"])
@pytest.mark.parametrize("where", MULTIPLIERS)
def test_what_is_deep_in_the_pickle_breaks_nothing(checkpoint: Path, where: str, opcode: bytes) -> None:
    change(checkpoint, MULTIPLIERS[where])
    data = (checkpoint / ".metadata").read_bytes()
    mark = b"\x8c\x01x\x94"
    assert mark in data
    deep = b"N" + b"\x85" * 100_000 if opcode == b"\x85" else b"\x8c\x05torch\x8c\x04Size\x93" + b")R" * 100_000
    (checkpoint / ".metadata").write_bytes(data.replace(mark, deep + b"\x94", 1))
    assert_refused_cheaply(checkpoint)


READ = """
import sys
from pathlib import Path
from ckptkit.errors import CkptError
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.formats import locate_all_chunks
try:
    locate_all_chunks(open_layout(Path(sys.argv[1])))
except CkptError as error:
    assert len(str(error)) < 10_000, len(str(error))
    sys.exit(error.exit_code)
"""


def assert_refused_cheaply(root: Path) -> None:
    """In 512 MiB and 20 seconds of processor time, far from what walking the bomb would take."""
    child = subprocess.run(
        [sys.executable, "-c", READ, str(root)], capture_output=True, check=False, preexec_fn=limit_resources
    )
    assert child.returncode == 3, (child.returncode, child.stderr.decode()[-1000:])


def limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))


def test_a_tensor_item_that_would_run_something_is_refused(produce: Produce, tmp_path: Path) -> None:
    """The archive of one tensor, with a `data.pkl` that calls the system."""
    canary = tmp_path / "canary"
    root = Path(shutil.copytree(produce(producers.under_model).root, tmp_path / "checkpoint"))
    stream = io.BytesIO()
    torch.save(Runs(f"touch {canary}"), stream)
    shard = root / "__0_0.distcp"
    offset = shard.stat().st_size
    with shard.open("ab") as file:
        file.write(stream.getvalue())

    def point_there(metadata: Metadata) -> None:
        info = place_of(metadata, "model.0.weight")
        info.offset, info.length = offset, len(stream.getvalue())

    change(root, point_there)
    with pytest.raises(CkptError):
        read_fully(root)
    assert not canary.exists()


def test_names_are_kept_as_they_are(produce: Produce) -> None:
    layout = open_layout(produce(producers.strange_names).root)
    assert layout.key("model.../up") == ("model", "../up")
    assert layout.key("model.\x1b[31mred") == ("model", "\x1b[31mred")


def test_dtypes_that_we_do_not_know_are_refused_by_name(checkpoint: Path) -> None:
    change(checkpoint, lambda metadata: setattr(entry_of(metadata).properties, "dtype", torch.bits8))
    with pytest.raises(Unsupported) as raised:
        open_layout(checkpoint)
    assert raised.value.exit_code == 3


def test_copies_of_a_replica_are_one_tensor(produce: Produce) -> None:
    layout = open_layout(produce(producers.no_collectives).root)
    assert len(layout.tensors["model.scale"].chunks) == 1
