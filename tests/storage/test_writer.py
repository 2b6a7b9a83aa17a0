"""dcp.save through us: files that others open, the same whoever wrote which part, and nothing if anything fails."""

from __future__ import annotations

import gc
import json
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.errors import CkptError, IOFailure, Mismatch, Occupied, Unsafe, Unsupported, Usage
from ckptkit.storage import Reader, Writer, find_cause
from ckptkit.storage.local_writer import PieceWriter, StagedWriter
from ckptkit.storage.plans import layout_of_save_plans
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from tests.formats.contract import raw_bytes
from tests.producers import counted
from tests.storage.states import LARGE, assert_same_bits, blank, cause_of, every_kind, local, spread

CONFIG = {"config.json": b"{}"}
FORMATS = ("hf", "dcp", "pt")

pytestmark = pytest.mark.usefixtures("alone")


def a_state(to: str) -> dict[str, Tensor]:
    """Every kind of tensor that the format can hold."""
    tensors = every_kind() | {"large": torch.rand(LARGE), "rows": counted(7, 3), "deep": counted(3, 4, 5)}
    return {name: t for name, t in tensors.items() if to != "hf" or t.dtype is not torch.complex128}


def load_by_others(path: Path, to: str, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is at `path`, read by no code of ours."""
    if to == "hf":
        return load_file(path / "model.safetensors")
    if to == "pt":
        return dict(torch.load(path / "state.pt", weights_only=True))
    found = blank(expected)
    dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def names_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


# -- alone -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_every_kind_of_tensor_is_saved_to_every_format(to: str, tmp_path: Path) -> None:
    state = a_state(to)
    apart = {
        "turned": torch.rand(6, 5).t(),
        "every other": torch.rand(9, 4)[::2, ::2],
        "parameter": torch.nn.Linear(3, 2).weight,
    }
    dcp.save({**state, **apart}, storage_writer=Writer(tmp_path / "out", to, files=CONFIG))
    expected = state | {name: tensor.detach().contiguous() for name, tensor in apart.items()}
    assert_same_bits(load_by_others(tmp_path / "out", to, expected), expected)
    found = blank(expected)
    dcp.load(found, storage_reader=Reader(tmp_path / "out"))
    assert_same_bits(found, expected)
    assert (tmp_path / "out/config.json").read_bytes() == b"{}"
    assert names_in(tmp_path) == {"out"}
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["files"].keys() == names_in(tmp_path / "out") - {MANIFEST}
    sums = {name: int(tensor["crc32"], 16) for name, tensor in manifest["tensors"].items()}
    assert sums == {name: zlib.crc32(raw_bytes(tensor)) for name, tensor in expected.items()}


@pytest.mark.parametrize("to", ["dcp", "pt"])
def test_a_nested_state_stays_nested(to: str, tmp_path: Path) -> None:
    state = {"model": {"a.b": counted(3, 2)}, "optim": {"state": {"a.b": {"step": torch.tensor(3.0)}}}}
    dcp.save(state, storage_writer=Writer(tmp_path / "out", to))
    if to == "pt":
        found = torch.load(tmp_path / "out/state.pt", weights_only=True)
    else:
        found = {"model": {"a.b": torch.ones(3, 2)}, "optim": {"state": {"a.b": {"step": torch.tensor(0.0)}}}}
        dcp.load(found, checkpoint_id=tmp_path / "out")
    assert torch.equal(found["model"]["a.b"], counted(3, 2))
    assert found["optim"]["state"]["a.b"]["step"] == 3


def test_a_large_model_is_cut_into_files(tmp_path: Path) -> None:
    state = {f"{i}": counted(10, 10) + i for i in range(5)}
    dcp.save(state, storage_writer=Writer(tmp_path / "out", max_shard_size=1000))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], state[name])


def test_numbers_that_torch_only_notes_as_conjugated(tmp_path: Path) -> None:
    values = torch.rand(4, 3, dtype=torch.complex64)
    dcp.save({"w": values.conj()}, storage_writer=Writer(tmp_path / "out"))
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], values.conj().resolve_conj())


def test_one_writer_saves_to_several_places(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "0", overwrite=True)
    for number, place in ((0, None), (1, tmp_path / "1"), (2, tmp_path / "1")):
        dcp.save({"w": counted(3) + number}, checkpoint_id=place, storage_writer=writer)
    assert names_in(tmp_path) == {"0", "1"}
    assert torch.equal(load_file(tmp_path / "0/model.safetensors")["w"], counted(3))
    assert torch.equal(load_file(tmp_path / "1/model.safetensors")["w"], counted(3) + 2)


@pytest.mark.slow
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    w = counted(3)
    cases: list[tuple[dict[str, Any], Path, dict[str, Any], type[CkptError], str | None]] = [
        ({"model": {"w": w, "calls": 3}}, tmp_path / "out", {}, Unsupported, "calls"),
        ({"w": w, "c": w.to(torch.complex128)}, tmp_path / "out", {}, Unsupported, "c"),
        ({"w": w.to_sparse()}, tmp_path / "out", {}, Unsupported, "w"),
        ({"w": w.to("meta")}, tmp_path / "out", {}, Unsupported, "w"),
        ({"w": w}, tmp_path / "taken", {}, Occupied, None),
        ({"w": w, "f": lambda: 1}, tmp_path / "out", {"format": "dcp"}, Unsupported, None),
    ]
    for state, path, options, kind, name in cases:
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state, storage_writer=Writer(path, **options))
        cause = cause_of(caught)
        assert type(cause) is kind
        assert cause.tensor == name
        del caught, cause  # and with them the writer
        gc.collect()
        assert names_in(tmp_path) == {"taken"}
    with pytest.raises(Unsafe):
        Writer(tmp_path / "out", files={"../config.json": b""})
    for name in ("out.pt", "out.safetensors"):
        with pytest.raises(Usage, match="name of a file"):
            Writer(tmp_path / name)
    for to, file in (("hf", "model.safetensors"), ("dcp", ".metadata"), ("dcp", "__0_0.distcp"), ("hf", MANIFEST)):
        with pytest.raises(Usage, match="own"):
            Writer(tmp_path / "out", to, files={file: b""})


@pytest.mark.parametrize("to", FORMATS)
def test_one_rank_has_nobody_to_talk_to(tmp_path: Path, to: str) -> None:
    dcp.save({"w": counted(3)}, storage_writer=Writer(tmp_path / "out", to), use_collectives=False)
    assert torch.equal(load_with_us(tmp_path / "out"), counted(3))


def load_with_us(path: Path) -> Tensor:
    found = {"w": torch.zeros(3)}
    dcp.load(found, storage_reader=Reader(path))
    return found["w"]


W = {"w": torch.ones(3)}


@pytest.mark.parametrize(
    ("state", "names", "beside"),
    [
        ({"model": W}, {"w"}, set()),
        ({"model": W, "step": 5}, {"w"}, {"step"}),
        ({"model": W, "optim": {"state": {"w": {"exp_avg": W["w"]}}}}, {"w"}, {"optim.state.w.exp_avg"}),
        ({"app": {"model": W}}, {"w"}, set()),
        ({"model.w": W["w"]}, {"model.w"}, set()),
        ({"model.w": W["w"], "step": 5}, {"model.w"}, {"step"}),
        ({"actor": W, "critic": W}, {"actor.w", "critic.w"}, set()),
    ],
)
def test_weights_have_the_names_that_the_model_gives_them(
    tmp_path: Path, state: dict[str, Any], names: set[str], beside: set[str]
) -> None:
    dcp.save(state, storage_writer=Writer(tmp_path / "out"))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names
    training = tmp_path / "out" / "training"
    assert (set(open_layout(training).names) if training.exists() else set()) == beside


def test_prefixes_of_a_compiled_model_are_said(tmp_path: Path) -> None:
    model: Any = torch.compile(torch.nn.Linear(3, 2))
    with pytest.warns(UserWarning, match=r"`_orig_mod\.` \(added by torch.compile\).*get_model_state_dict"):
        dcp.save({"model": model.state_dict()}, storage_writer=Writer(tmp_path / "compiled"))
    found = blank(model.state_dict())
    dcp.load(found, storage_reader=Reader(tmp_path / "compiled"))
    assert_same_bits(found, model.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*prefix")
        dcp.save({"model": get_model_state_dict(model)}, storage_writer=Writer(tmp_path / "plain"))
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == {"weight", "bias"}


def test_a_writer_makes_one_save_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second `async_save` moved the writer to its own destination while the first was still writing."""
    begun, go_on, write = threading.Event(), threading.Event(), StagedWriter.write_data

    def wait_and_write(self: StagedWriter, *arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return write(self, *arguments)

    monkeypatch.setattr(StagedWriter, "write_data", wait_and_write)
    writer = Writer(tmp_path / "one")
    first: Any = dcp.async_save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    assert begun.wait(30)
    again: dict[str, Any] = {"checkpoint_id": tmp_path / "two", "storage_writer": writer, "no_dist": True}
    with pytest.raises(CheckpointException, match=r"one: this writer is still saving"):
        refused: Any = dcp.async_save({"w": torch.zeros(4)}, **again)
        refused.result()
    go_on.set()
    first.result()
    second: Any = dcp.async_save({"w": torch.zeros(4)}, **again)
    second.result()
    found = {name: load_file(tmp_path / name / "model.safetensors")["w"].tolist() for name in ("one", "two")}
    assert found == {"one": [1.0] * 4, "two": [0.0] * 4}


def test_a_writer_saves_again_after_a_save_that_failed_in_a_thread(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "out", "dcp")
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(dcp.save, {"w": Unpicklable()}, storage_writer=writer, no_dist=True)
        assert isinstance(failed.exception(), CheckpointException)
        dcp.save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    assert (tmp_path / "out").exists()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError


def test_a_plan_must_cover_every_tensor_and_no_element_twice() -> None:
    def plan(*rows: tuple[int, int]) -> SavePlan:
        items = []
        for start, count in rows:
            index = MetadataIndex("w", torch.Size([start, 0]))
            chunk = ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([count, 3]))
            data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([8, 3]))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    assert len(layout_of_save_plans([plan((0, 4)), plan((4, 4), (8, 0))], Path("out")).tensors["w"].chunks) == 3
    with pytest.raises(Mismatch, match="there is a gap at 4:5 of axis 0") as caught:
        layout_of_save_plans([plan((0, 4)), plan((5, 3))], Path("out"))
    assert caught.value.tensor == "w"
    with pytest.raises(Mismatch, match="are in `rank 0` and in `rank 1`"):
        layout_of_save_plans([plan((0, 4)), plan((3, 5))], Path("out"))


def break_writing(patch: pytest.MonkeyPatch) -> None:
    """Let the disk be full when data is written."""

    def fail(*_: object) -> None:
        raise IOFailure("no space left on device")

    patch.setattr(PieceWriter, "write_tensor", fail)


def test_a_save_that_failed_alone_leaves_nothing_and_another_writer_goes_on(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        break_writing(patch)
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"w": counted(3)}, storage_writer=writer)
    assert isinstance(cause_of(caught), IOFailure)
    assert names_in(tmp_path) == set()
    dcp.save({"w": counted(3)}, storage_writer=Writer(tmp_path / "out"))  # while `caught` keeps the other one alive
    assert names_in(tmp_path) == {"out"}


@pytest.mark.gpu
@pytest.mark.parametrize("to", FORMATS)
def test_tensors_on_a_gpu(to: str, tmp_path: Path) -> None:
    state = {"large": torch.rand(LARGE), "half": torch.rand(7).bfloat16(), "scalar": torch.tensor(2.5)}
    there = {name: tensor.cuda() for name, tensor in state.items()}
    there["turned"], state["turned"] = there["large"].t(), state["large"].t().contiguous()
    dcp.save(there, storage_writer=Writer(tmp_path / "out", to))
    assert_same_bits(load_by_others(tmp_path / "out", to, state), state)


# -- together ----------------------------------------------------------------------------------------------------------


def save_on_ranks(room: Path, shape: tuple[int, ...], place: RankPlace, report: Report) -> None:
    """Save tensors spread over a mesh in every way, at once and behind; rank 0 compares."""
    with process_group(place, "cpu"):
        mesh = init_device_mesh("cpu", shape)
        for to in FORMATS:
            state = a_state(to)
            for way in range(6):
                path = room / f"{to}-{way}"
                shards = {name: spread(t, mesh, way + i) for i, (name, t) in enumerate(state.items())}
                dcp.save(shards, storage_writer=Writer(path, to, sync=False))
                if place.rank == 0:
                    assert_same_bits(load_by_others(path, to, state), state)
                    report(path.name)
            shards = {name: spread(t, mesh, i) for i, (name, t) in enumerate(a_state(to).items())}
            saving: Any = dcp.async_save(shards, storage_writer=Writer(room / f"{to}-behind", to))
            for tensor in shards.values():
                local(tensor).view(-1).view(torch.uint8).fill_(7)
            saving.result()
            if place.rank == 0:
                assert_same_bits(load_by_others(room / f"{to}-behind", to, state), state)
                report(f"{to}-behind")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [*(pytest.param((ranks,), marks=pytest.mark.nightly) for ranks in (1, 3)), (2, 2)], ids=str
)
def test_every_rank_writes_its_part(shape: tuple[int, ...], tmp_path: Path) -> None:
    heard: list[str] = []
    launch(partial(save_on_ranks, tmp_path, shape), torch.Size(shape).numel(), heard.append)
    assert set(heard) == names_in(tmp_path)
    assert len(heard) == 7 * len(FORMATS)


def fail_on_ranks(room: Path, place: RankPlace, report: Report) -> None:
    """What goes wrong on one rank, or between them, leaves nothing; and they can go on."""
    with process_group(place, "cpu") as mesh:
        last = place.rank == place.world_size - 1
        w = distribute_tensor(counted(8, 3), mesh, [Shard(0)], src_data_rank=None)
        writer = Writer(room / "out")

        def expect(kind: type[BaseException], state: dict[str, Any]) -> None:
            with pytest.raises(CheckpointException) as caught:
                dcp.save(state, storage_writer=writer)
            cause = find_cause(caught.value)
            report((place.rank, type(cause) is kind, str(cause)))
            dist.barrier()
            assert not (room / "out").exists()

        expect(ValueError, {"w": w} if last else {"w": w, "x": w})  # torch's own planner sees this one
        expect(Mismatch, {"w": w.double() if last else w})
        expect(AssertionError, {"w": w, "x": 3 if last else torch.ones(3)})  # and this one
        expect(Unsupported, {"w": w, f"of rank {place.rank}": torch.ones(3).to_sparse() if last else torch.ones(3)})
        with pytest.MonkeyPatch.context() as patch:
            if last:
                break_writing(patch)
            expect(IOFailure, {"w": w})
        if place.rank == 0:
            assert names_in(room) == {".out.ckptkit.tmp", ".out.ckptkit.lock"}
        with pytest.raises(Unsupported, match="use_collectives=False: 3 ranks write the same files together"):
            dcp.save({"w": w}, storage_writer=writer, use_collectives=False)
        dcp.save({"w": w}, storage_writer=writer)
        if place.rank == 0:
            assert names_in(room) == {"out"}
            assert torch.equal(load_file(room / "out/model.safetensors")["w"], counted(8, 3))


@pytest.mark.slow
def test_a_failure_of_one_rank_is_one_of_all_and_leaves_nothing(tmp_path: Path) -> None:
    heard: list[Any] = []
    launch(partial(fail_on_ranks, tmp_path), 3, heard.append)
    assert [what for what in heard if not what[1]] == []
    assert len(heard) == 3 * 5
