"""torch.save files, with torch.save and torch.load as the oracle."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckptkit import consolidate
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Corrupt, Unsafe, Unsupported
from ckptkit.formats import detect_format
from ckptkit.formats.pt import Pt
from tests import producers
from tests.conftest import Produce
from tests.formats.contract import Hostile, WriterContract, assert_holds, assert_same
from tests.producers import counted, flatten


class TestPt(WriterContract):
    format = "pt"
    keeps_order = True

    def write(self, root: Path, tensors: dict[str, Tensor]) -> None:
        torch.save(tensors, root)

    def load(self, root: Path) -> dict[str, Tensor]:
        mapped: dict[str, Tensor] = torch.load(root / "state.pt", mmap=True, weights_only=True)
        assert_same(torch.load(root / "state.pt", weights_only=True), mapped)
        with zipfile.ZipFile(root / "state.pt") as archive:
            assert archive.testzip() is None
        return mapped


def loaded(path: Path) -> Any:
    """What torch makes of the file."""
    return torch.load(path, weights_only=True)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained() -> dict[str, Any]:
    """A training state as scripts save it: nested, with an optimizer, numbers, strings and a random state."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    net(counted(2, 3)).sum().backward()
    optimizer.step()
    return {
        "model": net.state_dict(),
        "optim": optimizer.state_dict(),
        "rng": [torch.get_rng_state(), {"cuda": None}],
        "run": {"step": 7, "note": "ünï", "loss": 0.5, "order": list(range(100)), "done": False},
    }


# -- what is read ------------------------------------------------------------------------------------------------------


def test_nesting_gives_the_names_of_dcp(tmp_path: Path) -> None:
    torch.save(trained(), tmp_path / "state.pt")
    layout = open_layout(tmp_path)
    flat, paths = flatten_state_dict(trained())
    assert layout.tensors.keys() | layout.blobs.keys() == flat.keys()
    assert layout.keys == paths
    assert_holds(layout, flatten(trained()) | {"rng.0": torch.get_rng_state()})
    assert (layout.root, layout.world_size) == (tmp_path, None)


def test_a_full_state_dict_of_fsdp_is_read(produce: Produce) -> None:
    full = produce(producers.full)
    layout = open_layout(full.root)
    assert_holds(layout, full.truth)
    assert layout.key("model.up.weight") == ("model", "up.weight")
    assert layout.key("optim.state.up.weight.exp_avg") == ("optim", "state", "up.weight", "exp_avg")
    assert {"run.step", "optim.param_groups.0.lr"} < layout.blobs.keys()


@pytest.mark.parametrize("wrap", [lambda weights: weights, lambda weights: {"state_dict": weights, "epoch": 3}])
def test_consolidates_to_what_torch_loads(wrap: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    torch.save(wrap(model().state_dict()), source / "pytorch_model.bin")
    consolidate(source, out)
    expected = loaded(source / "pytorch_model.bin")
    assert_same(load_file(out / "model.safetensors"), dict(expected.get("state_dict", expected)))


def test_a_file_is_consolidated_beside_itself_but_not_over_itself(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.arange(4.0), "a.bias": torch.ones(1)}, tmp_path / "best.pt")
    consolidate(tmp_path / "best.pt", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["a.weight"], torch.arange(4.0))
    with pytest.raises(Unsafe, match="or inside it"):
        consolidate(tmp_path / "best.pt", tmp_path, overwrite=True)
    assert (tmp_path / "best.pt").exists()


def test_consolidates_a_full_checkpoint_of_a_run(produce: Produce, tmp_path: Path) -> None:
    full = produce(producers.full)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt-7").symlink_to(full.root)
    result = consolidate(tmp_path / "run", tmp_path / "out")
    expected = {name.removeprefix("model."): t for name, t in full.truth.items() if name.startswith("model.")}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert result.wrapper == "model"
    assert result.checked_bytes > 0
    assert result.checked_bytes + result.unchecked_bytes == sum(t.nbytes for t in expected.values())


def test_views_strides_and_ties(tmp_path: Path) -> None:
    base, tied = counted(6, 6), counted(3, 2)
    state = {
        "transposed": counted(3, 4).t(),
        "channels_last": counted(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": counted(3, 1).expand(3, 4),
        "whole": base,
        "rows": base[2:4],
        "cells": base[1::2, 1:4],
        "embed": tied,
        "head": tied,
    }
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    torch.save(state, source / "model.pt")
    layout = open_layout(source)
    assert_holds(layout, loaded(source / "model.pt"))
    crcs = {name: tensor.chunks[0].crc32 for name, tensor in layout.tensors.items()}
    assert crcs["transposed"] is not None
    assert crcs["whole"] is not None
    runs = {name: tensor.chunks[0].run for name, tensor in layout.tensors.items()}
    whole = layout.tensors["whole"].chunks[0]
    assert runs["rows"] == runs["cells"] == (whole.offset, whole.length), "a part has the checksum of its storage"
    assert crcs["rows"] == crcs["cells"] == crcs["whole"]
    assert layout.tensors["embed"] == layout.tensors["head"]
    consolidate(source, out)
    assert_same(load_file(out / "model.safetensors"), {n: t.contiguous() for n, t in state.items()})


def test_parameters_buffers_and_tensors_with_attributes(tmp_path: Path) -> None:
    state = {
        "parameter": nn.Parameter(counted(2)),
        "marked": nn.Parameter(counted(3)),
        "buffer": nn.Buffer(counted(4)),
        "tensor": counted(5),
    }
    for name in ("marked", "tensor"):
        state[name].mark = "mine"  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "f.pt")
    assert_holds(open_layout(tmp_path / "f.pt"), {name: t.detach() for name, t in state.items()})


def test_whatever_else_is_in_it_is_an_entry_with_a_pickle_of_its_own(tmp_path: Path) -> None:
    state = {
        "w": counted(2),
        "args": argparse.Namespace(lr=1e-3, path=Path("x")),
        "best": np.float64(3.5),
        "counts": defaultdict(int, {"seen": 3}),
        "by_pair": {(0, 1): "x"},
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "class": OrderedDict,
        "empty": {},
        "list": [[1, 2], [3], (4, {"five": 5})],
        "tuple": ({"six": 6}, 7),
    }
    torch.save(state, tmp_path / "f.pt")
    layout = open_layout(tmp_path / "f.pt")
    assert_holds(layout, {"w": counted(2)})
    expected = {"counts.seen" if name == "counts" else name: value for name, value in state.items() if name != "w"}
    expected["counts.seen"] = 3
    assert {name: pickle.loads(blob.content or b"") for name, blob in layout.blobs.items()} == expected
    assert {blob.length for blob in layout.blobs.values()} == {0}


def test_a_tuple_is_entered_only_for_the_sake_of_a_tensor(tmp_path: Path) -> None:
    state = {"found": ({"w": counted(2), "n": 1}, 2), "left": ({"n": 1}, 2), "deep": [[({"w": counted(1)},)]]}
    torch.save(state, tmp_path / "f.pt")
    layout = open_layout(tmp_path / "f.pt")
    assert_holds(layout, {"found.0.w": counted(2), "deep.0.0.0.w": counted(1)})
    assert layout.key("found.0.w") == ("found", 0, "w")
    assert layout.blobs.keys() == {"found.0.n", "found.1", "left"}


@pytest.mark.parametrize("alignment", [64, 4096])
def test_any_alignment(alignment: int, tmp_path: Path) -> None:
    from torch.utils.serialization import config

    usual = config.save.storage_alignment
    config.save.storage_alignment = alignment
    try:
        torch.save({"a": counted(5), "b": counted(7)}, tmp_path / "f.pt")
    finally:
        config.save.storage_alignment = usual
    layout = open_layout(tmp_path / "f.pt")
    assert layout.tensors["b"].chunks[0].offset % alignment == 0
    assert_holds(layout, {"a": counted(5), "b": counted(7)})


def test_a_file_past_4_gib_is_read(tmp_path: Path) -> None:
    """An archive of torch's own in zip64 form, whose large storage is a hole in the file."""
    path = tmp_path / "f.pt"
    with torch.serialization.skip_data():
        torch.save({"large": torch.empty((5 << 30) // 4), "small": torch.empty(3)}, path)
    layout = open_layout(path)
    large, small = (layout.tensors[name].chunks[0] for name in ("large", "small"))
    assert (large.length, small.length) == (5 << 30, 12)
    assert large.offset + large.length < small.offset < path.stat().st_size
    assert small.offset == loaded_offset(path, "small")


def loaded_offset(path: Path, name: str) -> int:
    """Where torch thinks that the bytes of a tensor lie."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return int(torch.load(path)[name].untyped_storage()._checkpoint_offset)


# -- which files are claimed -------------------------------------------------------------------------------------------


def save_files(root: Path, *names: str) -> None:
    root.mkdir(exist_ok=True)
    for name in names:
        torch.save({"w": counted(2)}, root / name)


def claimed(path: Path) -> str | None:
    reader = detect_format(path)
    return reader.name if reader else None


def test_the_one_model_among_what_trainers_leave(tmp_path: Path) -> None:
    beside = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state_0.pth", "training_args.bin")
    save_files(tmp_path, *beside)
    assert claimed(tmp_path) is None
    save_files(tmp_path, "pytorch_model_fsdp.bin")
    assert open_layout(tmp_path).tensors["w"].chunks[0].path == "pytorch_model_fsdp.bin"
    assert claimed(tmp_path / "optimizer.pt") == "pt", "what is named is meant"


def test_state_pt_comes_before_all_others(tmp_path: Path) -> None:
    save_files(tmp_path, "another.pt", "state.pt")
    assert open_layout(tmp_path).tensors["w"].chunks[0].path == "state.pt"


def test_two_models_are_one_too_many(tmp_path: Path) -> None:
    save_files(tmp_path, "a.pt", "b.bin")
    with pytest.raises(Unsupported, match=r"one torch.save file, or `state.pt`, found 2: a.pt, b.bin") as caught:
        open_layout(tmp_path)
    assert caught.value.path == tmp_path
    assert not Pt().is_complete(tmp_path)
    (problem,) = Pt().problems(tmp_path)
    assert problem.to_json() == caught.value.to_json()


def test_other_formats_come_first(produce: Produce, tmp_path: Path) -> None:
    save_files(tmp_path, "model.pt")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert claimed(tmp_path) == "hf"
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    assert claimed(tmp_path) == "dcp"


def test_other_zips_and_other_pickles_are_not_claimed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.bin", a=np.zeros(3))
    os.rename(tmp_path / "a.bin.npz", tmp_path / "a.bin")
    (tmp_path / "b.pt").write_bytes(pickle.dumps({"w": 1}))
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as archive:
        archive.writestr("data.json", "{}")
    os.mkfifo(tmp_path / "d.pt")
    assert [claimed(path) for path in (tmp_path, *tmp_path.iterdir())] == [None] * 5


# -- what is refused ---------------------------------------------------------------------------------------------------


class Wrapped(Tensor):
    """A tensor subclass, as torch lets everyone make."""


class Owner:
    """An object of a user's own, with a tensor in it."""

    def __init__(self) -> None:
        self.hidden = [counted(2)]


REFUSED = {
    "sparse": (lambda: counted(2, 2).to_sparse(), "sparse"),
    "meta": (lambda: counted(2).to("meta"), "meta device"),
    "conjugated": (lambda: torch.complex(counted(2), counted(2)).conj(), "lazy view"),
    "subclass": (lambda: counted(2).as_subclass(Wrapped), "a tensor subclass, `tests.formats.test_pt.Wrapped`"),
    "object": (Owner, "a tensor inside `tests.formats.test_pt.Owner`"),
    "odd key": (lambda: {(0, 1): counted(2)}, "a tensor inside `dict`"),
    "storage": (lambda: counted(2).untyped_storage(), "inside"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_tensor_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, words = REFUSED[kind]
    torch.save({"fine": counted(2), "model": {"odd": make()}}, tmp_path / "f.pt")
    with pytest.raises(Unsupported) as caught:
        open_layout(tmp_path / "f.pt")
    assert words in caught.value.message
    assert (caught.value.path, caught.value.tensor) == (tmp_path / "f.pt", "model.odd")
    assert "--exclude" not in (caught.value.hint or ""), "the file is refused before names are chosen"


@pytest.mark.parametrize("value", [counted(2), 3, [1, 2], None, nn.Linear(2, 2)], ids=lambda v: type(v).__name__)
def test_a_file_without_a_state_dict_is_refused(value: object, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "f.pt")
    with pytest.raises(Unsupported, match="expected a state dict"):
        open_layout(tmp_path / "f.pt")


@pytest.mark.parametrize("value", [counted(2), 3], ids=["tensor", "number"])
def test_two_entries_of_one_name_are_refused(value: object, tmp_path: Path) -> None:
    torch.save({"a.b": value, "a": {"b": value}}, tmp_path / "f.pt")
    with pytest.raises(Unsupported, match="two entries") as caught:
        open_layout(tmp_path / "f.pt")
    assert caught.value.tensor == "a.b"


def rewrite(path: Path, **change: bytes) -> None:
    """Write an archive again with other contents for some entries (dots and slashes in their names as `_`)."""
    with zipfile.ZipFile(path) as old:
        contents = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in contents.items():
            new.writestr(name, change.get(name.partition("/")[2].replace("/", "_").replace(".", "_"), content))


def test_big_endian_and_programs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"w": counted(2)}, path)
    rewrite(path, byteorder=b"big")
    with pytest.raises(Unsupported, match="big-endian"):
        open_layout(path)
    torch.save({"w": counted(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("f/constants.pkl", b"")
    with pytest.raises(Unsupported, match="TorchScript"):
        open_layout(path)


def test_a_storage_too_small_for_its_tensor_is_corrupt(tmp_path: Path) -> None:
    torch.save({"w": counted(5)}, tmp_path / "f.pt")
    rewrite(tmp_path / "f.pt", data_0=bytes(19))
    with pytest.raises(Corrupt, match="expected a storage of at least 20 bytes, found 19") as caught:
        open_layout(tmp_path / "f.pt")
    assert caught.value.tensor == "w"


def test_a_link_is_unsafe(tmp_path: Path) -> None:
    save_files(tmp_path, "elsewhere")
    (tmp_path / "state.pt").symlink_to("elsewhere")
    with pytest.raises(Unsafe, match="symbolic link"):
        open_layout(tmp_path)


# -- damage and malice -------------------------------------------------------------------------------------------------


def test_every_cut_is_incomplete_and_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"w": counted(5)}, path)
    assert Pt().is_complete(path)
    whole = path.read_bytes()
    for end in range(100, len(whole)):
        path.write_bytes(whole[:end])
        assert Pt().detect(path)
        assert not Pt().is_complete(path)
        with pytest.raises(Corrupt):
            open_layout(path)


@pytest.mark.slow
def test_random_bit_flips_are_never_wrong_in_silence(tmp_path: Path) -> None:
    path, out = tmp_path / "in" / "f.pt", tmp_path / "out"
    path.parent.mkdir()
    torch.save(trained(), path)
    expected = model_of(path)
    chance, caught = random.Random(0), 0
    for _ in range(120):
        at, mask = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        flip(path, at, mask)
        try:
            consolidate(path, out, overwrite=True, sync=False)
        except CkptError:
            caught += 1
        else:
            assert_same(load_file(out / "model.safetensors"), expected)
        flip(path, at, mask)
    assert caught > 20


def model_of(path: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = dict(loaded(path)["model"])
    return weights


def flip(path: Path, at: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def test_no_code_of_the_file_runs(tmp_path: Path) -> None:
    torch.save({"w": counted(2), "model": Hostile(f"touch {tmp_path}/ran")}, tmp_path / "f.pt")
    assert_holds(open_layout(tmp_path / "f.pt"), {"w": counted(2)})
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "f.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "the file is harmless: this test tests nothing"


def shared(depth: int) -> dict[str, Any]:
    """A dict that holds one dict twice, which holds one twice, and so on: 2 ** depth entries in a few bytes."""
    state: dict[str, Any] = {"w": counted(1)}
    for _ in range(depth):
        state = {"a": state, "b": state}
    return state


def repeated() -> dict[str, Any]:
    """A long list, and a long string, under many names."""
    numbers, text = list(range(10_000)), "x" * 10_000
    return {str(i): [numbers, text] for i in range(1000)}


def endless() -> dict[str, Any]:
    state: dict[str, Any] = {"w": counted(1)}
    state["again"] = state
    return state


def long_names() -> dict[str, Any]:
    """One long name with many short ones below it."""
    return {"x" * 100_000: {str(i): i for i in range(10_000)}}


@pytest.mark.parametrize(
    "state", [shared(40), endless(), long_names(), repeated()], ids=["shared", "endless", "long names", "repeated"]
)
def test_a_small_pickle_that_says_much_is_refused(state: dict[str, Any], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "f.pt")
    with pytest.raises(Unsupported, match=r"expands to more|found a deeper one"):
        open_layout(tmp_path / "f.pt")


def test_some_sharing_is_usual(tmp_path: Path) -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.99)}
    torch.save({"groups": [group] * 20, "model": {"w": counted(2)}}, tmp_path / "f.pt")
    assert len(open_layout(tmp_path / "f.pt").blobs) == 40


def test_a_compressed_storage_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"w": torch.zeros(100_000)}, stream)
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(tmp_path / "f.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(Unsupported, match="compressed"):
        open_layout(tmp_path / "f.pt")
