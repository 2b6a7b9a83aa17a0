"""Torch's own tests of DCP, in short, with our Writer and Reader in the place of its FileSystemWriter and Reader."""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

import ckptkit
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.checks.verify import verify_component
from ckptkit.errors import Usage
from ckptkit.storage import Reader, Writer
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from tests.producers import counted
from tests.training.saving.networks import Trainee, differing, whole

Save = Callable[[Path], Any]
Load = Callable[[Path], Any]
WRITERS: dict[str, Save] = {"torch": FileSystemWriter, "ours": partial(Writer, format="dcp")}
READERS: dict[str, Load] = {"torch": FileSystemReader, "ours": Reader}
PAIRS = [("torch", "ours"), ("ours", "torch"), ("ours", "ours")]
each_pair = pytest.mark.parametrize(("writer", "reader"), PAIRS)

pytestmark = pytest.mark.usefixtures("alone")


def a_state() -> dict[str, Any]:
    """Plain objects of every kind, nested as torch's tests nest them."""
    return {
        "model": {"w": counted(3, 2), "s": torch.tensor(2.5)},
        "bytes0": [1],
        "bytes1": "string",
        "step": 7,
        "none": None,
        "raw": io.BytesIO(b"\0\1 raw"),
        "nested": {"list": [1, {"x": torch.arange(3), "y": 2.5}], "ordered": OrderedDict(a=1), "tuple": (1, "two")},
    }


def an_empty_state() -> dict[str, Any]:
    """The same without a value."""
    return {
        "model": {"w": torch.ones(3, 2), "s": torch.tensor(0.0)},
        **dict.fromkeys(("bytes0", "bytes1", "step", "none", "raw")),
        "nested": {"list": [0, {"x": torch.zeros(3, dtype=torch.int64), "y": 0}], "ordered": {"a": 0}, "tuple": None},
    }


def plain(value: Any) -> Any:
    """A state that can be compared."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    return (value.tell(), value.getvalue()) if isinstance(value, io.BytesIO) else value


@each_pair
def test_plain_objects_are_saved_and_loaded(tmp_path: Path, writer: str, reader: str) -> None:
    dcp.save(a_state(), storage_writer=WRITERS[writer](tmp_path / "out"))
    found = an_empty_state()
    dcp.load(found, storage_reader=READERS[reader](tmp_path / "out"))
    assert plain(found) == plain(a_state())
    made = _load_state_dict_from_keys(storage_reader=READERS[reader](tmp_path / "out"))
    assert plain(made) == plain(a_state())
    assert list(verify_component(tmp_path / "out").problems) == []


def test_torch_makes_one_file_of_what_we_wrote(tmp_path: Path) -> None:
    dcp.save(a_state(), storage_writer=Writer(tmp_path / "out", "dcp"))
    dcp_to_torch_save(tmp_path / "out", tmp_path / "made.pt")
    assert plain(torch.load(tmp_path / "made.pt", weights_only=False)) == plain(a_state())


def test_one_file_holds_plain_objects_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "out", "pt", files={"config.json": b"{}"})
    dcp.save(a_state(), storage_writer=writer)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"state.pt", "config.json", "ckptkit.json"}
    for mmap in (False, True):
        assert plain(torch.load(tmp_path / "out/state.pt", weights_only=False, mmap=mmap)) == plain(a_state())
    found = an_empty_state()
    dcp.load(found, storage_reader=Reader(tmp_path / "out"))
    assert plain(found) == plain(a_state())
    assert list(verify_component(tmp_path / "out").problems) == []


def test_a_model_holds_plain_objects_beside_it(tmp_path: Path) -> None:
    dcp.save(a_state(), storage_writer=Writer(tmp_path / "out", files={"config.json": b"{}"}))
    assert set(open_layout(tmp_path / "out").names) >= {"w", "s", "step", "raw", "nested.list.1.x"}
    found = an_empty_state()
    dcp.load(found, storage_reader=Reader(tmp_path / "out", under="model"))
    assert plain(found) == plain(a_state())
    weights = {"w": torch.ones(3, 2), "s": torch.tensor(0.0)}
    dcp.load(weights, storage_reader=Reader(tmp_path / "out"))
    assert plain(weights) == plain(a_state()["model"])
    for part in (tmp_path / "out", tmp_path / "out/training"):
        assert list(verify_component(part).problems) == []


@pytest.mark.parametrize("to", ["dcp", "pt", "hf"])
def test_a_state_with_nothing_in_it(tmp_path: Path, to: str) -> None:
    dcp.save({}, storage_writer=Writer(tmp_path / "out", to))
    found: dict[str, Any] = {}
    dcp.load(found, storage_reader=Reader(tmp_path / "out"))
    assert found == {}


@pytest.mark.parametrize("to", ["dcp", "pt"])
def test_a_state_without_tensors(tmp_path: Path, to: str) -> None:
    dcp.save({"step": 3, "lr": [0.5]}, storage_writer=Writer(tmp_path / "out", to))
    found = {"step": 0, "lr": None}
    dcp.load(found, storage_reader=Reader(tmp_path / "out"))
    assert found == {"step": 3, "lr": [0.5]}


@each_pair
def test_keys_that_are_missing(tmp_path: Path, writer: str, reader: str) -> None:
    dcp.save(a_state(), storage_writer=WRITERS[writer](tmp_path / "out"))
    found = {"step": 0, "more": 5, "model": {"w": torch.ones(3, 2), "new": torch.ones(2)}}
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key|the checkpoint does not contain it"):
        dcp.load(found, storage_reader=READERS[reader](tmp_path / "out"))
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, storage_reader=READERS[reader](tmp_path / "out"), planner=planner)
    assert plain(found) == plain({"step": 7, "more": 5, "model": {"w": counted(3, 2), "new": torch.ones(2)}})


@each_pair
def test_a_state_that_is_not_flattened(tmp_path: Path, writer: str, reader: str) -> None:
    state = {"w": counted(3), "nested": {"x": 1, "t": torch.arange(2)}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=WRITERS[writer](tmp_path / "out"), planner=planner)
    found = {"w": torch.ones(3), "nested": None}
    into_it = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(found, storage_reader=READERS[reader](tmp_path / "out"), planner=into_it)
    assert plain(found) == plain(state)


def test_the_same_writer_and_reader_again(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path / "0", "dcp"), Reader(tmp_path / "0")
    for number in range(3):
        state = {"step": number, "w": counted(3) + number}
        dcp.save(state, checkpoint_id=tmp_path / str(number), storage_writer=writer)
        found = {"step": -1, "w": torch.zeros(3)}
        dcp.load(found, checkpoint_id=str(tmp_path / str(number)), storage_reader=reader)
        assert plain(found) == plain(state)


class Counter:
    """A thing that DCP asks for its state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": torch.tensor(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == state["count"]
        self.count = state["count"]


def in_pieces(starts: list[int], tensor: Tensor, fill: Tensor) -> Any:
    """Pieces of four rows as torch's `CheckpointableTensor` has them, with a row of padding before each."""
    held: Any = torch.full((5 * len(starts), *tensor.shape[1:]), -1.0)
    held.global_shape = tuple(tensor.shape)
    held.global_offsets = tuple((start, 0) for start in starts)
    held.local_offsets = tuple((5 * i + 1, 0) for i in range(len(starts)))
    held.local_sizes = ((4, tensor.shape[1]),) * len(starts)
    for (row, _), start in zip(held.local_offsets, starts, strict=True):
        held[row : row + 4] = fill[start : start + 4]
    return held


@each_pair
def test_a_tensor_that_holds_several_pieces(tmp_path: Path, writer: str, reader: str) -> None:
    pytest.importorskip("torch.distributed.checkpoint.protocol", reason="torch is older than 2.14")
    whole = counted(8, 3).float()
    dcp.save({"model": {"w": in_pieces([4, 0], whole, whole)}}, storage_writer=WRITERS[writer](tmp_path / "ckpt"))
    found = in_pieces([0, 4], whole, torch.zeros_like(whole))
    dcp.load({"model": {"w": found}}, storage_reader=READERS[reader](tmp_path / "ckpt"))
    assert torch.equal(found, in_pieces([0, 4], whole, whole))
    assert torch.equal(ckptkit.open(tmp_path / "ckpt")["model.w"].torch(), whole)


@each_pair
def test_a_stateful_thing(tmp_path: Path, writer: str, reader: str) -> None:
    dcp.save({"counter": Counter(5)}, storage_writer=WRITERS[writer](tmp_path / "out"))
    found = {"counter": Counter(0)}
    dcp.load(found, storage_reader=READERS[reader](tmp_path / "out"))
    assert found["counter"].count == 5


# -- together ----------------------------------------------------------------------------------------------------------


def state_of(trainee: Trainee) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainee.model, trainee.optimizer)
    return {"model": model, "optim": optimizer, "step": 3, "scheduler": trainee.scheduler.state_dict()}


def give_back(trainee: Trainee, state: dict[str, Any]) -> None:
    set_state_dict(trainee.model, trainee.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    trainee.scheduler.load_state_dict(state["scheduler"])


WRAPPERS = ("fsdp2", "hsdp2", "fsdp1 FULL_SHARD", "fsdp1 HYBRID_SHARD")
Way = tuple[str, str]  # the writer and its reader, or a format of our writer and the key that its tensors are under
WAYS: list[Way] = [*PAIRS, ("behind", ""), ("pt", ""), ("hf", "model")]


def ways_of(wrapper: str) -> list[Way]:
    """Every way for the first wrapper, every third one for the others in turn."""
    number = WRAPPERS.index(wrapper)
    return WAYS[number % 3 :: 3] if number else WAYS


def train_and_swap(root: Path, wrappers: Sequence[str], place: RankPlace, report: Report) -> None:
    """Save model and optimizer by each writer, and load them by each reader that is its fellow."""
    warnings.simplefilter("ignore")
    with process_group(place, "cpu"):
        apart = dist.new_group(backend="gloo")  # for a thread, while the training's collectives go on
        expected = Trainee.make("plain", seed=0)
        expected.learn(2)
        for wrapper in wrappers:
            for way in ways_of(wrapper):
                ours = Trainee.make(wrapper, seed=0)
                ours.learn(2)
                path = root / " ".join((wrapper, *way))
                load_into(path, save_in(way, path, ours, apart), wrapper, expected, report)


def save_in(way: Way, path: Path, ours: Trainee, apart: dist.ProcessGroup) -> Load:
    """Save in one way, and give what reads it."""
    writer, reader = way
    if way in PAIRS:
        dcp.save(state_of(ours), storage_writer=WRITERS[writer](path))
        return READERS[reader]
    if writer == "behind":
        saving: Any = dcp.async_save(state_of(ours), storage_writer=Writer(path, "dcp"), process_group=apart)
        ours.learn(1)
        saving.result()
        return FileSystemReader
    dcp.save(state_of(ours), storage_writer=Writer(path, writer))
    return partial(Reader, under=reader)


def load_into(path: Path, reader: Load, wrapper: str, expected: Trainee, report: Report) -> None:
    other = Trainee.make(wrapper, seed=1)
    other.learn(1)  # so that there is a state to be replaced
    state = state_of(other) | {"step": 0}
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    dcp.load(state, storage_reader=reader(path), planner=planner)
    give_back(other, state)
    other.place = expected.place
    report((path.name, state["step"], expected.compare(other)))


def load_elsewhere(root: Path, place: RankPlace, report: Report) -> None:
    """Load at another number of ranks what was saved."""
    warnings.simplefilter("ignore")
    with process_group(place, "cpu"):
        expected = Trainee.make("plain", seed=0)
        expected.learn(2)
        for path in sorted(root.iterdir()):
            under = "model" if path.name.endswith("hf model") else ""
            load_into(path, partial(Reader, under=under), "fsdp2", expected, report)


@pytest.mark.slow
@pytest.mark.parametrize("wrappers", [WRAPPERS[1:], pytest.param(WRAPPERS[:1], marks=pytest.mark.nightly)], ids=len)
def test_model_and_optimizer_under_every_wrapper(tmp_path: Path, wrappers: Sequence[str]) -> None:
    saved = sum(len(ways_of(wrapper)) for wrapper in wrappers)
    for ranks, work in ((4, partial(train_and_swap, tmp_path, wrappers)), (3, partial(load_elsewhere, tmp_path))):
        heard: list[tuple[str, int, list[str]]] = []
        launch(work, ranks, heard.append)
        assert [what for what in heard if what[1:] != (3, [])] == []
        assert len(heard) == ranks * saved


def parallel_states(root: Path, place: RankPlace, report: Report) -> None:
    """Tensor parallel with FSDP2, states of single ranks, ranks alone, and tensors of some of the ranks only."""
    warnings.simplefilter("ignore")
    with process_group(place, "cpu"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        for layer in (*model, model):
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh["dp"])
        optimizer = AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        own = {"loader": {f"rank{place.rank}": {"at": place.rank, "buffer": "x" * place.rank}}}
        for writer, reader in PAIRS:
            path = root / f"{writer} {reader}"
            got: tuple[Any, Any] = get_state_dict(model, optimizer)
            weights, moments = got
            state = {"model": weights, "optim": moments, **own}
            dcp.save(state, storage_writer=WRITERS[writer](path))
            values = {name: whole(tensor) for name, tensor in weights.items()}
            with torch.no_grad():
                for tensor in (*weights.values(), *(t for of in moments["state"].values() for t in of.values())):
                    tensor.zero_()
            found = {"model": weights, "optim": moments, "loader": {f"rank{place.rank}": {"at": None, "buffer": None}}}
            dcp.load(found, storage_reader=READERS[reader](path))
            report((path.name, differing({n: whole(t) for n, t in weights.items()}, values)))
            report((path.name, [] if plain(found["loader"]) == own["loader"] else ["loader"]))
            steps = {name: whole(of["step"]) for name, of in moments["state"].items()}
            report((path.name, differing(steps, {name: torch.tensor(1.0) for name in steps})))
        assert expected.keys() == values.keys()
        alone = root / f"alone {place.rank}"
        dcp.save({"step": place.rank, "w": counted(4)}, storage_writer=Writer(alone, "dcp"), no_dist=True)
        found = {"step": -1, "w": torch.zeros(4)}
        dcp.load(found, storage_reader=Reader(alone), no_dist=True)
        report((alone.name, [] if plain(found) == plain({"step": place.rank, "w": counted(4)}) else ["alone"]))
        replicated = distribute_tensor(counted(8, 3), mesh, [Replicate(), Shard(1)], src_data_rank=None)
        dcp.save({"w": replicated, "step": 5}, storage_writer=Writer(root / "replicated", "dcp"))
        sharded = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        dcp.load({"w": sharded}, storage_reader=FileSystemReader(root / "replicated"))
        report(("replicated", [] if torch.equal(whole(sharded), counted(8, 3)) else ["w"]))


@pytest.mark.slow
def test_states_of_ranks_that_have_unlike_parts(tmp_path: Path) -> None:
    heard: list[tuple[str, list[str]]] = []
    launch(partial(parallel_states, tmp_path), 4, heard.append)
    assert [what for what in heard if what[1]] == []
    assert len(heard) == 4 * (3 * len(PAIRS) + 2)


def test_a_url_of_no_store_is_no_place_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("memory://x", "s3://bucket"):
        with pytest.raises(Usage, match=r"does not write to|a whole bucket"):
            Writer(url)
        with pytest.raises(Usage, match=r"does not write to|a whole bucket"):
            dcp.save({"w": counted(3)}, checkpoint_id=url, storage_writer=Writer(tmp_path / "out"))
        assert not Writer.validate_checkpoint_id(url)
        assert Reader.validate_checkpoint_id(url)
    assert not Reader.validate_checkpoint_id("s3://")
    for place in ("out", tmp_path, "s3://bucket/x"):
        assert Writer.validate_checkpoint_id(place)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_behind_a_url_is_read(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    dcp.save({"w": counted(3), "step": 4}, storage_writer=Writer(tmp_path / "out", "dcp"))
    fsspec.filesystem("memory").put(str(tmp_path / "out"), "/like-torch", recursive=True)
    found = {"w": torch.ones(3), "step": 0}
    dcp.load(found, storage_reader=Reader("memory://like-torch"))
    assert plain(found) == plain({"w": counted(3), "step": 4})
