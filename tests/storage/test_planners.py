"""Planners that do more than torch's default ones: what they are promised by torch's storage, they get from ours."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptkit
from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.storage import Reader, Writer
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from tests.producers import counted
from tests.storage.states import cause_of, damage
from tests.storage.test_like_torch import PAIRS, READERS, WRITERS

each_pair = pytest.mark.parametrize(("writer", "reader"), PAIRS)
each_format = pytest.mark.parametrize("to", ["dcp", "pt", "hf"])

pytestmark = pytest.mark.usefixtures("alone")


# -- data of another dtype than the plan's -----------------------------------------------------------------------------


class Rounding(DefaultSavePlanner):
    """Gives data of another dtype, which the plan says only if `is_planned`; as the example in torch's docs."""

    def __init__(self, dtype: torch.dtype, *, is_planned: bool) -> None:
        super().__init__()
        self.dtype = dtype
        self.is_planned = is_planned

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if not self.is_planned:
            return plan
        return replace(plan, items=[self.change(item) for item in plan.items])

    def change(self, item: WriteItem) -> WriteItem:
        if item.tensor_data is None:
            return item
        properties = replace(item.tensor_data.properties, dtype=self.dtype)
        return replace(item, tensor_data=replace(item.tensor_data, properties=properties))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return data.to(self.dtype) if isinstance(data, Tensor) else data


@each_pair
def test_a_planner_that_rounds_what_it_gives(tmp_path: Path, writer: str, reader: str) -> None:
    for is_planned, loaded in ((True, torch.float16), (False, torch.float32)):
        path = tmp_path / str(is_planned)
        planner = Rounding(torch.float16, is_planned=is_planned)
        dcp.save({"w": counted(5) / 3}, storage_writer=WRITERS[writer](path), planner=planner)
        found = {"w": torch.zeros(5, dtype=loaded)}
        dcp.load(found, storage_reader=READERS[reader](path))
        assert torch.equal(found["w"], (counted(5) / 3).half().to(loaded))


def test_a_conversion_casts_what_a_planner_rounded(tmp_path: Path) -> None:
    planner = Rounding(torch.float16, is_planned=False)
    dcp.save({"w": counted(5) / 3}, checkpoint_id=tmp_path / "run", planner=planner)  # float32 in torch's metadata
    done = ckptkit.convert(tmp_path / "run", tmp_path / "out.pt", to="pt")
    assert "`w`: expected float32, found float16 in the file; cast, as torch does" in done.notes
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], (counted(5) / 3).half().float())
    assert ckptkit.verify(tmp_path / "run")[0].is_ok


@each_format
@pytest.mark.parametrize("given", [torch.int32, torch.float64, torch.complex64])
def test_data_that_the_planned_dtype_cannot_hold_is_refused(tmp_path: Path, to: str, given: torch.dtype) -> None:
    planner = Rounding(given, is_planned=False)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": counted(5)}, storage_writer=Writer(tmp_path / "out", to), planner=planner)
    cause = cause_of(caught)
    assert isinstance(cause, Mismatch)
    assert cause.tensor == "w"
    assert cause.message == f"expected dtype float32 (the plan's), found {str(given).removeprefix('torch.')}"
    assert not (tmp_path / "out").exists()


def test_halves_of_another_kind_are_refused(tmp_path: Path) -> None:
    planner = Rounding(torch.bfloat16, is_planned=False)
    with pytest.raises(CheckpointException, match="expected dtype float16"):
        dcp.save({"w": counted(5).half()}, storage_writer=Writer(tmp_path / "out"), planner=planner)


# -- planners that load in their own way -------------------------------------------------------------------------------


class ThroughScratch(DefaultLoadPlanner):
    """Reads every tensor into the same buffer, and copies it from there, as for a device that files are far from."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scratch = torch.zeros(100, dtype=dtype)
        self.events: list[str] = []

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        self.events.append("resolve")
        return self.scratch[: read_item.lengths.numel()].view(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.events.append("commit")
        super().resolve_tensor(read_item).copy_(tensor)


STATE = {"a": counted(3, 4), "b": counted(5) + 100, "c": torch.tensor(7.5)}


@each_pair
def test_a_planner_with_one_buffer_for_all(tmp_path: Path, writer: str, reader: str) -> None:
    dcp.save({**STATE, "step": 3}, storage_writer=WRITERS[writer](tmp_path / "out"))
    found: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()} | {"step": 0}
    planner = ThroughScratch()
    dcp.load(found, storage_reader=READERS[reader](tmp_path / "out"), planner=planner)
    assert found.pop("step") == 3
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())
    assert planner.events == ["resolve", "commit"] * 3


def test_a_planner_with_a_buffer_of_another_dtype(tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=Writer(tmp_path / "out", "dcp"))
    found = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in STATE.items()}
    dcp.load(found, storage_reader=Reader(tmp_path / "out"), planner=ThroughScratch())
    assert all(torch.equal(found[name], tensor.double()) for name, tensor in STATE.items())
    with pytest.raises(CheckpointException, match="expected float64 as in the state to load into, found float32"):
        dcp.load(found, storage_reader=Reader(tmp_path / "out"), planner=ThroughScratch(torch.float64))


@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_damage_is_found_before_a_planner_commits_it(tmp_path: Path, to: str) -> None:
    dcp.save(STATE, storage_writer=Writer(tmp_path / "out", to))
    damage(tmp_path / "out", "b")
    found = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(found, storage_reader=Reader(tmp_path / "out"), planner=ThroughScratch())
    assert isinstance(cause_of(caught), Corrupt)
    assert not found["b"].any()


class Skipping(DefaultLoadPlanner):
    """Leaves out what the checkpoint lacks, at one of the two steps at which a planner is told what there is."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        if self.step == "set up":
            state_dict = {name: one for name, one in state_dict.items() if name in metadata.state_dict_metadata}
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        if self.step == "plan":
            entries = self.metadata.state_dict_metadata
            self.state_dict = {name: one for name, one in self.state_dict.items() if name in entries}
        return super().create_local_plan()


@each_pair
@pytest.mark.parametrize("step", ["set up", "plan"])
def test_a_planner_that_skips_what_is_missing(tmp_path: Path, step: str, writer: str, reader: str) -> None:
    dcp.save(STATE, storage_writer=WRITERS[writer](tmp_path / "out"))
    found = {"a": torch.zeros(3, 4), "b": torch.zeros(5), "new": torch.ones(2)}
    dcp.load(found, storage_reader=READERS[reader](tmp_path / "out"), planner=Skipping(step))
    assert torch.equal(found["a"], STATE["a"])
    assert torch.equal(found["new"], torch.ones(2))


@each_pair
def test_the_metadata_has_what_is_there(tmp_path: Path, writer: str, reader: str) -> None:
    dcp.save({**STATE, "step": 3}, storage_writer=WRITERS[writer](tmp_path / "out"))
    entries = READERS[reader](tmp_path / "out").read_metadata().state_dict_metadata
    assert sorted(entries) == ["a", "b", "c", "step"]
    assert all(name in entries for name in ("a", "b", "c", "step"))
    assert "no" not in entries
    assert entries.get("no") is None
    with pytest.raises(KeyError):
        entries["no"]


# -- plans that torch caches from save to save -------------------------------------------------------------------------


@pytest.fixture
def _no_plans() -> Iterator[None]:
    """Nothing that torch keeps of the plans of other saves; it does so for the whole process."""
    kept = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached_")]
    for cache in kept:
        cache.clear()
    yield
    for cache in kept:
        cache.clear()


class Other(DefaultSavePlanner):
    """A planner of another class, whose plans torch caches apart."""


@pytest.mark.usefixtures("_no_plans")
@each_format
@pytest.mark.parametrize("is_async", [False, True])
def test_plans_that_torch_caches(tmp_path: Path, to: str, is_async: bool) -> None:
    save: Any = dcp.async_save if is_async else dcp.save
    for number, rows in enumerate((3, 3, 3, 4, 4)):
        state = {"a": counted(rows, 4) + number, "b": counted(5) - number, "c": torch.tensor(float(number))}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        done = save(
            {"model": state, "step": number}, storage_writer=Writer(tmp_path / str(number), to), planner=planner
        )
        if is_async:
            done.result()
    for number, rows in enumerate((3, 3, 3, 4, 4)):
        blank = {"a": torch.zeros(rows, 4), "b": torch.zeros(5), "c": torch.zeros(())}
        found: dict[str, Any] = {"model": blank, "step": -1}
        dcp.load(found, storage_reader=Reader(tmp_path / str(number), under="model" if to == "hf" else ""))
        assert torch.equal(found["model"]["a"], counted(rows, 4) + number)
        assert torch.equal(found["model"]["b"], counted(5) - number)
        assert found["model"]["c"] == found["step"] == number


@pytest.mark.usefixtures("_no_plans")
def test_cached_plans_of_several_planners_are_refused(tmp_path: Path) -> None:
    for number, kind in enumerate((DefaultSavePlanner, Other)):
        planner = kind(enable_plan_caching=True)
        dcp.save({"w": counted(3)}, storage_writer=Writer(tmp_path / str(number)), planner=planner)
    with pytest.raises(CheckpointException) as caught:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": counted(3)}, storage_writer=Writer(tmp_path / "2"), planner=planner)
    assert isinstance(cause_of(caught), Unsupported)
    assert "found 2" in cause_of(caught).message


@pytest.mark.usefixtures("_no_plans")
def test_a_cached_plan_of_a_narrower_dtype_loses_nothing(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"w": counted(3).half()}, storage_writer=Writer(tmp_path / "0"), planner=planner)
    with pytest.raises(CheckpointException, match="expected dtype float16"):
        dcp.save({"w": counted(3)}, storage_writer=Writer(tmp_path / "1"), planner=planner)


def save_thrice(root: Path, place: RankPlace, report: Report) -> None:
    """Save sharded tensors with cached plans, of which one rank's changes at last."""
    warnings.simplefilter("ignore")
    with process_group(place, "cpu"):
        mesh = init_device_mesh("cpu", (2,))
        for number in range(3):
            own = {"own": counted(2)} if number == 2 and place.rank == 1 else {}
            state = {"w": distribute_tensor(counted(5, 3) + number, mesh, [Shard(0)]), "step": number, **own}
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state, storage_writer=Writer(root / str(number), "dcp"), planner=planner)
            found: dict[str, Any] = {"w": torch.zeros(5, 3), "step": -1}
            dcp.load(found, storage_reader=FileSystemReader(root / str(number)))
            report((number, torch.equal(found["w"], counted(5, 3) + number) and found["step"] == number))


def test_plans_that_torch_caches_on_ranks(tmp_path: Path) -> None:
    heard: list[tuple[int, bool]] = []
    launch(partial(save_thrice, tmp_path), 2, heard.append)
    assert sorted(heard) == [(0, True), (0, True), (1, True), (1, True), (2, True), (2, True)]


# -- a state that the checkpoint does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_two_tensors_into_one_that_is_tied(tmp_path: Path, to: str, is_equal: bool) -> None:
    head = counted(5, 4) + (0 if is_equal else 1)
    dcp.save({"embed": counted(5, 4), "head": head}, storage_writer=Writer(tmp_path / "out", to))
    shared = torch.zeros(5, 4)
    found = {"embed": shared, "head": shared}
    if is_equal:
        dcp.load(found, storage_reader=Reader(tmp_path / "out"))
        assert torch.equal(shared, counted(5, 4))
        return
    with pytest.raises(CheckpointException, match=r"ties it to `.*`, but the checkpoint's bytes differ") as caught:
        dcp.load(found, storage_reader=Reader(tmp_path / "out"))
    assert isinstance(cause_of(caught), Mismatch)


# -- values that are no tensors ----------------------------------------------------------------------------------------


def a_run() -> dict[str, Any]:
    """Where a training stands: numbers of numpy, and the states of random generators of all three kinds."""
    return {
        "loss": np.float64(1.5),
        "step": np.int64(3),
        "order": np.arange(6, dtype=np.int32).reshape(2, 3),
        "halves": np.asfortranarray(np.ones((2, 3), np.float16)),
        "none yet": np.zeros(0),
        "names": np.array(["up", "down"]),
        "swapped": np.arange(3, dtype=">i8"),
        "rng": {
            "numpy": np.random.get_state(),
            "new": np.random.default_rng(0).bit_generator.state,
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
        },
    }


@each_pair
def test_values_of_numpy_and_states_of_generators(tmp_path: Path, writer: str, reader: str) -> None:
    state = a_run()
    dcp.save(state, storage_writer=WRITERS[writer](tmp_path / "out"))
    found = _load_state_dict_from_keys(storage_reader=READERS[reader](tmp_path / "out"))
    assert_equal(found, state)


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected) or isinstance(expected, dict)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        np.testing.assert_array_equal(found, expected)  # numpy itself reads bytes that are swapped as native ones


class Calls:
    """Pickled as a call of numpy's that makes pointers of bytes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return np.ndarray, self.args


def test_values_of_numpy_that_are_pointers_are_not_made(tmp_path: Path) -> None:
    for number, value in enumerate((np.array([{"a": 1}], dtype=object), np.zeros(2, dtype=[("a", "O"), ("b", "i4")]))):
        dcp.save({"value": value}, checkpoint_id=tmp_path / str(number))
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"value": None}, storage_reader=Reader(tmp_path / str(number)))
        assert isinstance(cause_of(caught), Unsupported)
    dcp.save({"value": Calls((1,), "O", b"pointer!")}, checkpoint_id=tmp_path / "called")
    named = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([np.ndarray, np.dtype])  # as accelerate does when it is imported
    try:
        for _ in range(20):  # torch keeps them in a set: the order is another in each process
            found: dict[str, Any] = {"value": None}
            dcp.load(found, storage_reader=Reader(tmp_path / "called"))
            assert found["value"].shape == (0,)
        assert set(torch.serialization.get_safe_globals()) == {*named, np.ndarray, np.dtype}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(named)


@pytest.mark.parametrize("state", [(1, (2,), None, False, b""), (1,), "x"])
def test_values_of_numpy_that_make_no_sense(tmp_path: Path, state: object) -> None:
    dcp.save({"value": Built(state)}, checkpoint_id=tmp_path / "out")
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"value": None}, storage_reader=Reader(tmp_path / "out"))
    assert isinstance(cause_of(caught), Corrupt | Unsupported)


class Built(Calls):
    """Pickled as an array of numpy's with any state."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), self.args[0]
