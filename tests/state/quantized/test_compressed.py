"""Checkpoints that torch compressed with zstd, by every verb: what comes of them is what comes of the plain ones."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptkit
from ckptkit.errors import CkptError, Corrupt
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from tests.checks.test_verify import flip, one
from tests.producers import counted
from tests.test_matrix import load_dcp, load_hf, load_pt

RANKS = 2


def state() -> dict[str, Any]:
    weights = {"w": counted(90, 70), "turned": counted(6, 4).t(), "none": counted(0, 3), "scale": torch.tensor(2.5)}
    return {"model": weights, "step": 7, "note": ["a", 1.5]}


def save(root: Path, place: RankPlace, report: Report) -> None:
    with process_group(place, "cpu"):
        mesh = init_device_mesh("cpu", (RANKS,))
        sharded = {"w": distribute_tensor(state()["model"]["w"], mesh, [Shard(0)], src_data_rank=None)}
        whole = {**state(), "model": {**state()["model"], **sharded}}
        dcp.save(whole, storage_writer=FileSystemWriter(root / "plain"))
        dcp.save(whole, storage_writer=FileSystemWriter(root / "packed", _extensions=[ZStandard()]))
        report(place.rank)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state of two ranks twice: `plain`, and `packed` with zstd."""
    root = tmp_path_factory.mktemp("saved")
    launch(partial(save, root), RANKS, lambda _: None)
    return root


@pytest.fixture
def packed(saved: Path) -> Path:
    return saved / "packed"


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    (tmp_path / "room").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "room"))
    return tmp_path / "room"


def assert_is_the_state(found: dict[str, Any]) -> None:
    assert (found["step"], found["note"]) == (7, ["a", 1.5])
    assert_is_the_model(found["model"])


def assert_is_the_model(found: dict[str, Any]) -> None:
    expected = state()["model"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def files_in(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.name != "ckptkit.json"}


Write = Callable[[Path, Path], object]
WRITTEN: dict[str, Write] = {
    "consolidate": ckptkit.consolidate,
    "to pt": partial(ckptkit.convert, to="pt"),
    "to dcp": partial(ckptkit.convert, to="dcp"),
    "reshard": partial(ckptkit.reshard, to=3),
    "average": lambda src, dst: ckptkit.average([src, src], dst, weights=[1, 1], to="pt"),
}


@pytest.mark.parametrize("verb", WRITTEN)
def test_every_conversion_makes_the_same_of_both(verb: str, saved: Path, room: Path) -> None:
    for kind in ("plain", "packed"):
        WRITTEN[verb](saved / kind, room.parent / kind)
    assert files_in(room.parent / "packed") == files_in(room.parent / "plain")
    assert list(room.iterdir()) == []


def test_torch_loads_what_was_converted(packed: Path, tmp_path: Path) -> None:
    ckptkit.reshard(packed, tmp_path / "dcp", to=3)
    assert_is_the_state(load_dcp(tmp_path / "dcp"))
    ckptkit.convert(packed, tmp_path / "pt", to="pt")
    assert_is_the_state(load_pt(tmp_path / "pt"))
    ckptkit.consolidate(packed, tmp_path / "hf")
    assert_is_the_model(load_hf(tmp_path / "hf"))


def test_the_source_is_proved_to_be_in_the_result(packed: Path, tmp_path: Path) -> None:
    ckptkit.reshard(packed, tmp_path / "out", to=3)
    (found,) = ckptkit.verify(tmp_path / "out", against=packed)
    assert found.is_ok
    assert found.compared is not None
    assert found.compared.tensors == len(state()["model"])


def test_parts_of_the_work_are_put_together(packed: Path, tmp_path: Path) -> None:
    """Each process unpacks into a file of its own, and all agree on what they make."""
    ckptkit.reshard(packed, tmp_path / "whole", to=3)
    for part in ("2/2", "1/2"):
        ckptkit.reshard(packed, tmp_path / "out", to=3, part=part)
    ckptkit.finalize(tmp_path / "out")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


def test_every_byte_is_compared(saved: Path, room: Path) -> None:
    plain, packed = (one(saved / kind) for kind in ("plain", "packed"))
    assert (packed.problems, packed.unchecked_bytes, packed.checked_bytes) == ((), 0, plain.checked_bytes)
    assert list(room.iterdir()) == []


def test_a_fast_look_decompresses_nothing(packed: Path) -> None:
    code = (
        "import sys; sys.modules['zstandard'] = None\n"
        "import ckptkit; (found,) = ckptkit.verify(sys.argv[1], fast=True); print(found.is_ok, found.checked_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code, packed], capture_output=True, text=True, check=True)
    assert done.stdout == "True 0\n"


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_damage_has_the_name_of_the_tensor_and_of_its_file(where: float, saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for path in (saved / "packed").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    chunk = ckptkit.inspect(source, with_places=True).layout.tensors["model.w"].chunks[0]
    flip(source / chunk.path, chunk.offset + int(chunk.length * where))
    (problem,) = one(source).problems
    assert isinstance(problem, Corrupt)
    assert list((tmp_path / "room").iterdir()) == []
    assert (problem.path, problem.tensor, problem.offset) == (source / chunk.path, "model.w", chunk.offset)
    with pytest.raises(CkptError) as caught:
        ckptkit.convert(source, tmp_path / "out", to="pt")
    assert (caught.value.path, caught.value.tensor) == (problem.path, problem.tensor)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "room").iterdir()) == []


def test_what_only_reads(saved: Path, room: Path) -> None:
    plain, packed = saved / "plain", saved / "packed"
    found = ckptkit.diff(plain, packed)
    assert (found.different, found.only_in_a, found.only_in_b, found.tensors) == ((), (), (), len(state()["model"]))
    assert ckptkit.stats(packed).tensors == ckptkit.stats(plain).tensors
    opened = ckptkit.open(packed)
    assert torch.equal(torch.from_numpy(opened["model.w"].numpy()), state()["model"]["w"])
    assert len(list(room.iterdir())) == 1
    del opened
    assert list(room.iterdir()) == []


def test_places_are_those_of_the_streams(packed: Path, room: Path) -> None:
    chunks = ckptkit.inspect(packed, with_places=True).layout.tensors["model.w"].chunks
    assert {chunk.path for chunk in chunks} == {"__0_0.distcp", "__1_0.distcp"}
    for chunk in chunks:
        with (packed / chunk.path).open("rb") as file:
            file.seek(chunk.offset)
            assert file.read(4) == b"\x28\xb5\x2f\xfd"
    assert list(room.iterdir()) == []


@pytest.mark.parametrize("command", [["convert", "--to", "pt"], ["verify"], ["diff"], ["stats"]], ids=lambda c: c[0])
def test_without_the_package_it_is_named_once(command: list[str], packed: Path, tmp_path: Path) -> None:
    verb, *options = command
    paths = {"convert": [packed, tmp_path / "out"], "diff": [packed, packed]}.get(verb, [packed])
    code = "import sys; sys.modules['zstandard'] = None; from ckptkit.cli import main; main()"
    arguments = [sys.executable, "-c", code, verb, *options, *map(str, paths)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode
    assert (done.stdout + done.stderr).count("pip install 'ckptkit-fsdp[zstd]'") == 1
    assert "Traceback" not in done.stderr
