"""What is written as one file of torch.save is what was read, tensors and all else; torch is the oracle."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckptkit import storage
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.checkpoints.finalize_files import create_files, finalize_files, read_output_layout
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats import get_writer, locate_all_chunks
from ckptkit.formats.pickles.inert_pickle import PersistentId
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, Layout, NewFile, Wrapped, WriterOptions, edits
from ckptkit.layout.plan import make_plan
from tests import producers
from tests.conftest import Produce
from tests.execute import execute
from tests.formats.contract import Hostile, assert_holds, raw_bytes
from tests.producers import counted, flatten


def arrange(wanted: Layout) -> NewFile:
    (file,) = get_writer("pt").lay_out_files(wanted, WriterOptions(1 << 40))
    return file


def convert(wanted: Layout, root: Path) -> Path:
    """Write a checkpoint as one file; where it is."""
    writer = get_writer("pt")
    file = arrange(wanted)
    create_files(root, [file], must_be_new=True)
    made = read_output_layout(writer, root, wanted.tensors, wanted.blobs)
    copied = execute(make_plan(locate_all_chunks(wanted), made), jobs=2)
    finalize_files(writer, made, copied.checksums)
    return root / file.name


def loaded(path: Path, *, weights_only: bool = True) -> Any:
    """What torch makes of a file of ours; torch and zipfile check all that they can."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch foretells where each storage lies, and looks
        return torch.load(path, weights_only=weights_only)


def assert_equal(found: Any, expected: Any) -> None:
    """The same values in the same nesting, tensors bit by bit."""
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert raw_bytes(found) == raw_bytes(expected)
    elif isinstance(expected, Mapping):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert (type(found), found) == (type(expected), expected)


# -- from a file of torch.save -----------------------------------------------------------------------------------------


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [{"params": net[0].parameters()}, {"params": net[1:].parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    net(counted(2, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def state_of_a_script() -> dict[str, Any]:
    net, optimizer = trained()
    return {
        "state_dict": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "plain": torch.optim.SGD(net.parameters()).state_dict(),
        "rng": [torch.get_rng_state(), {"cuda": None, "python": (3, (1, 2, 3), None)}],
        "run": {"step": 7, "note": "ünï", "loss": 0.5, "order": list(range(300)), "done": False, "nothing": {}},
        "odd": [[1, 2], [3, (4,)], -(1 << 70), b"bytes", float("inf"), {(0, 1): {2.5: None}}],
        "ordered": OrderedDict(b=1, a=OrderedDict()),
        "transposed": counted(3, 4).t(),
        "rows": counted(6, 6)[2:4],
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "no_rows": counted(0, 4),
    }


@pytest.mark.parametrize("is_zip", [True, False], ids=["archive", "legacy"])
def test_what_a_script_saved_comes_back(is_zip: bool, tmp_path: Path) -> None:
    state = state_of_a_script()
    torch.save(state, tmp_path / "f.pt", _use_new_zipfile_serialization=is_zip)
    path = convert(open_layout(tmp_path / "f.pt"), tmp_path / "out")
    found = loaded(path)
    assert_equal(found, state)
    net, optimizer = trained()
    net.load_state_dict(found["state_dict"])
    optimizer.load_state_dict(found["optimizer"])
    assert_equal(optimizer.state_dict(), state["optimizer"])
    again = convert(open_layout(path), tmp_path / "again")
    assert again.read_bytes() == path.read_bytes()


def test_tied_weights_share_a_storage(tmp_path: Path) -> None:
    tied = counted(3, 2)
    torch.save({"embed": tied, "head": tied, "copy": tied.clone(), "flat": tied.view(-1)}, tmp_path / "f.pt")
    found = loaded(convert(open_layout(tmp_path / "f.pt"), tmp_path / "out"))
    assert_equal(found, {"embed": tied, "head": tied, "copy": tied, "flat": tied.view(-1)})
    places = {name: tensor.data_ptr() for name, tensor in found.items()}
    assert places["embed"] == places["head"]
    assert len(set(places.values())) == 3


def test_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    torch.save({"a": [counted(1), counted(2)], "b": {"c": counted(3), "d": 1}}, tmp_path / "f.pt")
    part = edits.select_entries(open_layout(tmp_path / "f.pt"), lambda name: name in ("a.1", "b.d"))
    assert_equal(loaded(convert(part, tmp_path / "out")), {"a": [None, counted(2)], "b": {"d": 1}})


@pytest.mark.parametrize("is_zip", [True, False], ids=["archive", "legacy"])
def test_no_code_of_the_file_runs_on_the_way(is_zip: bool, tmp_path: Path) -> None:
    state = {"w": counted(2), "model": Hostile(f"touch {tmp_path}/ran")}
    torch.save(state, tmp_path / "f.pt", _use_new_zipfile_serialization=is_zip)
    path = convert(open_layout(tmp_path / "f.pt"), tmp_path / "out")
    with pytest.raises(pickle.UnpicklingError, match="system"):
        torch.load(path, weights_only=True)
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").exists(), "what was passed on should be what was there"


# -- from DCP, whose other entries are archives of their own -----------------------------------------------------------


def as_dcp_loads(root: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        _load_state_dict(state, FileSystemReader(root), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


@pytest.mark.parametrize("producer", [producers.fsdp2, producers.tensor_parallel], ids=lambda p: p.__name__)
def test_a_sharded_checkpoint_becomes_what_dcp_makes_of_it(
    producer: producers.Producer, produce: Produce, tmp_path: Path
) -> None:
    made = produce(producer)
    path = convert(open_layout(made.root), tmp_path / "out")
    found = loaded(path)
    assert_equal(flatten(found), made.truth)
    assert_equal(found, as_dcp_loads(made.root))


def test_other_entries_come_with_their_tensors(tmp_path: Path) -> None:
    shared = counted(4, 4)
    state = {
        "a": {"pair": ({"first": shared, "rows": shared[1:3]}, counted(2, dtype=torch.float64)), "empty": []},
        "b": (torch.get_rng_state(), None),
        "w": counted(3),
        "z": ({"fp8": counted(3).to(torch.float8_e4m3fn)}, "text", {1: (2,)}),
    }
    producers.save_alone(state, tmp_path / "dcp")
    assert open_layout(tmp_path / "dcp").blobs.keys() == {"a.pair", "a.empty", "b", "z"}
    path = convert(open_layout(tmp_path / "dcp"), tmp_path / "out")
    found = loaded(path)
    assert_equal(found, state)
    pair = found["a"]["pair"][0]
    assert pair["first"][1].data_ptr() == pair["rows"].data_ptr()
    assert_holds(edits.select_entries(open_layout(path), lambda name: name == "w"), {"w": counted(3)})


def lying(data: bytes, root: Path, *, wrapper: str | None = None, before: bytes = b"???") -> Layout:
    """A checkpoint with one entry, whose archive is `data`."""
    root.mkdir()
    (root / "f").write_bytes(before + data)
    return Layout(
        root, "dcp", {}, {"x": Blob("f", len(before), len(data), where=Wrapped(wrapper) if wrapper else None)}
    )


def archive_of(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_an_entry_that_is_a_whole_dict(tmp_path: Path) -> None:
    value = {"state": {3: {"step": 1.0}}, "param_groups": [{"params": [3]}], "w": counted(2)}
    assert_equal(loaded(convert(lying(archive_of(value), tmp_path / "in"), tmp_path / "out")), {"x": value})


def test_a_transformed_entry_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="zstd") as caught:
        arrange(lying(b"", tmp_path / "in", wrapper="stream.zstd/1"))
    assert caught.value.tensor == "x"


def test_every_cut_of_an_entry_is_corrupt(tmp_path: Path) -> None:
    data = archive_of((counted(2), 3))
    layout = lying(data, tmp_path / "in")
    arrange(layout)
    for end in range(0, len(data), 7):
        cut = replace(layout, blobs={"x": layout.blobs["x"]._replace(length=end)})
        with pytest.raises(Corrupt) as caught:
            arrange(cut)
        assert (caught.value.tensor, caught.value.path) == ("x", tmp_path / "in/f")


def test_a_damaged_tensor_of_an_entry_is_corrupt(tmp_path: Path) -> None:
    data = archive_of((counted(5), 3))
    at = data.index(raw_bytes(counted(5)))
    with pytest.raises(Corrupt, match="CRC-32"):
        arrange(lying(data[:at] + b"\x01" + data[at + 1 :], tmp_path / "in"))


def forged(value: object, **storages: bytes) -> bytes:
    """An archive with any value, and storages under any keys."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a/data.pkl", dump(value))
        for key, content in storages.items():
            archive.writestr(f"a/data/{key}", content)
    return stream.getvalue()


@pytest.mark.parametrize("reference", [7, ("module", 1, 2), ("storage",), ("storage", 0, ["key"], "cpu", 1), ()])
def test_a_reference_to_something_else_is_corrupt(reference: Any, tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match="not a storage"):
        arrange(lying(forged((PersistentId(reference),)), tmp_path / "in"))


def test_more_than_fits_into_memory_is_refused(tmp_path: Path) -> None:
    """A sparse file: the limit must show before anything is read."""
    layout = lying(archive_of(1), tmp_path / "in")
    os.truncate(tmp_path / "in/f", 1 << 40)
    for length in (1 << 39, (1 << 28) + 1):
        with pytest.raises(Unsupported, match="more than 268435456 bytes") as caught:
            arrange(replace(layout, blobs={"x": layout.blobs["x"]._replace(length=length)}))
        assert caught.value.tensor == "x"


def test_entries_that_lie_in_the_same_bytes_are_counted_each(tmp_path: Path) -> None:
    layout = lying(forged(b"x" * (1 << 22)), tmp_path / "in")
    with pytest.raises(Unsupported, match="more than"):
        arrange(replace(layout, blobs={str(i): layout.blobs["x"] for i in range(100)}))


def test_what_cannot_be_held_is_named(tmp_path: Path) -> None:
    layout = open_layout_of(tmp_path, {"a": {"b": counted(2)}})
    clash = replace(layout, blobs={"a": Blob("f", 0, 0, dump(3))})
    with pytest.raises(CkptError, match="cannot both be") as caught:
        arrange(clash)
    assert caught.value.tensor == "a"


def open_layout_of(root: Path, state: object) -> Layout:
    torch.save(state, root / "f.pt")
    return open_layout(root / "f.pt")


# -- from memory -------------------------------------------------------------------------------------------------------


def test_tensors_alike_that_are_saved_through_the_bridge_are_not_tied(tmp_path: Path) -> None:
    state = {"a": counted(4), "b": counted(4) + 10}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(dict(state), storage_writer=storage.Writer(tmp_path / "out", format="pt"), no_dist=True)
    assert_equal(loaded(tmp_path / "out/state.pt"), state)
