"""Files of torch.save as it wrote them before version 1.6, and still does when asked: torch is the oracle."""

from __future__ import annotations

import random
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.archives.torch_save import read_legacy_torch_save
from ckptkit.formats.pickles.inert_pickle import Global, PersistentId, Record
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.pt import Pt
from tests.formats.contract import ReaderContract, assert_holds
from tests.producers import counted, flatten

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
MACHINE = {"protocol_version": VERSION, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
FLOATS = Global("torch", "FloatStorage")


def save(value: object, path: Path, **options: Any) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False, **options)


class TestLegacy(ReaderContract):
    format = "pt"

    def write(self, root: Path, tensors: dict[str, Tensor]) -> None:
        save(tensors, root)


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(counted(2, 3)).sum().backward()
    optimizer.step()
    return {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def test_a_training_state_with_its_optimizer(tmp_path: Path) -> None:
    save(trained(), tmp_path / "model.pth")
    layout = open_layout(tmp_path)
    assert_holds(layout, flatten(trained()))
    assert layout.key("optimizer.state.0.exp_avg") == ("optimizer", "state", "0", "exp_avg")
    assert dump(3) == layout.blobs["epoch"].content


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_any_protocol(protocol: int, tmp_path: Path) -> None:
    save({"w": counted(3), "n": 1}, tmp_path / "f.pt", pickle_protocol=protocol)
    assert_holds(open_layout(tmp_path / "f.pt"), {"w": counted(3)})


def test_views_into_shared_storages(tmp_path: Path) -> None:
    base, tied = counted(6, 6), counted(3, 2)
    state = {
        "transposed": counted(3, 4).t(),
        "expanded": counted(3, 1).expand(3, 4),
        "whole": base,
        "rows": base[2:4],
        "cells": base[1::2, 1:4],
        "embed": tied,
        "head": tied,
        "parameter": nn.Parameter(counted(4)),
    }
    save(state, tmp_path / "f.pt")
    layout = open_layout(tmp_path / "f.pt")
    assert_holds(layout, {name: tensor.detach() for name, tensor in state.items()})
    assert layout.tensors["embed"] == layout.tensors["head"]
    assert {chunk.crc32 for tensor in layout.tensors.values() for chunk in tensor.chunks} == {None}


def test_a_pickle_longer_than_the_first_read(tmp_path: Path) -> None:
    state = {"notes": ["x" * 1000 + str(i) for i in range(1000)], "w": counted(3)}
    save(state, tmp_path / "f.pt")
    assert_holds(open_layout(tmp_path / "f.pt"), {"w": counted(3)})


# -- what old torch and Python wrote, made by hand and loaded by torch of today ----------------------------------------


def legacy(state: object, storages: dict[str, bytes], *, itemsize: int = 4, **machine: object) -> bytes:
    """A file with this object, of records, and these storages."""
    parts = [dump(value) for value in (MAGIC, VERSION, MACHINE | machine, state, list(storages))]
    for content in storages.values():
        parts += [(len(content) // itemsize).to_bytes(8, "little"), content]
    return b"".join(parts)


def floats(key: str, numel: int, view: object = None) -> PersistentId:
    return PersistentId(("storage", FLOATS, key, "cpu", numel, view))


def tensor_of(storage: PersistentId, offset: int, *shape: int) -> Record:
    hooks = Record(Global("collections", "OrderedDict"), ())
    strides = torch.empty(shape, device="meta").stride()
    return Record(Global("torch._utils", "_rebuild_tensor_v2"), (storage, offset, shape, strides, False, hooks))


def as_torch_loads(path: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = torch.load(path, weights_only=False)
    return loaded


def test_a_storage_that_is_a_view_of_another(tmp_path: Path) -> None:
    root, view = floats("1", 10), floats("1", 10, ("2", 3, 5))
    path = tmp_path / "f.pt"
    path.write_bytes(legacy({"a": tensor_of(root, 1, 2), "b": tensor_of(view, 1, 2, 2)}, {"1": raw(10)}))
    assert torch.equal(as_torch_loads(path)["b"], torch.tensor([[4.0, 5], [6, 7]]))
    assert_holds(open_layout(path), as_torch_loads(path))


def raw(numel: int) -> bytes:
    return counted(numel).numpy().tobytes()


def test_what_python_2_wrote(tmp_path: Path) -> None:
    """Its strings are bytes, and its ordered dicts are made of a list of pairs."""
    old = Record(Global("torch._utils", "_rebuild_tensor"), (floats("key of it", 6), 0, (3, 2), (2, 1)))
    state = Record(Global("collections", "OrderedDict"), ([["a.weight", old], ["note", "x" * 300]],))
    data = legacy(state, {"key of it": raw(6)})
    for text in ("a.weight", "key of it", "cpu", "storage", "x" * 300):
        plain = len(text).to_bytes(4, "little") + text.encode()
        data = data.replace(b"X" + plain, b"T" + plain if len(text) > 255 else b"U" + plain[:1] + plain[4:])
    path = tmp_path / "f.pt"
    path.write_bytes(data)
    assert torch.equal(as_torch_loads(path)["a.weight"], counted(3, 2))
    layout = open_layout(path)
    assert_holds(layout, {"a.weight": counted(3, 2)})
    assert layout.blobs["note"].content == dump("x" * 300)


def test_big_endian_and_tar_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(legacy({}, {}, little_endian=False))
    with pytest.raises(Unsupported, match="big-endian"):
        open_layout(path)
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("sys_info"))
    (problem,) = Pt().problems(path)
    assert "tar" in problem.message
    with pytest.raises(Unsupported, match="tar"):
        open_layout(path)


def test_no_tensor_data_is_read() -> None:
    rows = 5 << 28
    data = legacy({"large": tensor_of(floats("1", rows), 0, rows), "small": tensor_of(floats("2", 2), 0, 2)}, {})
    head = data[: -len(dump([]))] + dump(["1", "2"]) + rows.to_bytes(8, "little")
    tail = (2).to_bytes(8, "little") + raw(2)
    length = len(head) + 4 * rows + len(tail)
    asked = []

    def read(offset: int, size: int) -> bytes:
        assert 0 <= offset <= offset + size <= length
        asked.append(size)
        end = length - len(tail)
        return tail[offset - end :][:size] if offset >= end else (head[offset:] + bytes(size))[:size]

    _, entries = read_legacy_torch_save(read, length)
    assert entries["data/1"].length == 4 * rows
    assert entries["data/2"].offset + entries["data/2"].length == length
    assert sum(asked) < 1 << 20


# -- damage and malice -------------------------------------------------------------------------------------------------


def test_every_cut_is_incomplete_and_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    save({"w": counted(5), "v": counted(3), "n": 1}, path)
    assert Pt().is_complete(path)
    whole = path.read_bytes()
    for end in range(14, len(whole)):
        path.write_bytes(whole[:end])
        assert Pt().detect(path)
        assert not Pt().is_complete(path)
        with pytest.raises(Corrupt) as caught:
            open_layout(path)
        assert caught.value.path == path


def test_bit_flips_give_a_layout_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    save(trained(), path)
    whole, chance = path.read_bytes(), random.Random(0)
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with suppress(CkptError):
            open_layout(path)


def nested(depth: int) -> object:
    """A value whose parts are few, and whose text is endless."""
    value: object = 0
    for _ in range(depth):
        value = (value, value)
    return value


WRONG: dict[str, Callable[[], bytes]] = {
    "another count": lambda: legacy({"w": tensor_of(floats("1", 3), 0, 3)}, {"1": raw(2)}),
    "an endless count": lambda: legacy({"w": tensor_of(floats("1", 1 << 62), 0, 3)}, {"1": raw(3)}),
    "a negative count": lambda: legacy({"w": tensor_of(floats("1", -1), 0, 3)}, {"1": raw(3)}),
    "no such storage": lambda: legacy({"w": tensor_of(floats("1", 3), 0, 3)}, {}),
    "a storage of nothing": lambda: legacy({"w": tensor_of(floats("1", 3), 0, 3)}, {"1": raw(3), "2": raw(1)}),
    "a tensor past its storage": lambda: legacy({"w": tensor_of(floats("1", 3), 1, 3)}, {"1": raw(3)}),
    "a view past its storage": lambda: legacy({"w": tensor_of(floats("1", 3, ("2", 2, 9)), 1, 3)}, {"1": raw(3)}),
    "a view of nothing": lambda: legacy({"w": tensor_of(floats("1", 3, "?"), 0, 3)}, {"1": raw(3)}),
    "two sizes": lambda: legacy([{"w": tensor_of(floats("1", n), 0, 3)} for n in (3, 4)], {"1": raw(3)}),
    "no reference": lambda: legacy({"w": PersistentId(7)}, {}),
    "an endless reference": lambda: legacy({"w": PersistentId(nested(80))}, {}),
    "an endless key": lambda: legacy({"w": PersistentId(("storage", FLOATS, nested(80), "cpu", 3, None))}, {}),
    "an endless numel": lambda: legacy({"w": PersistentId(("storage", FLOATS, "1", "cpu", nested(80), None))}, {}),
    "an unknown storage": lambda: legacy({"w": PersistentId(("storage", MAGIC, "1", "cpu", 3, None))}, {}),
    "another version": lambda: dump(MAGIC) + dump(nested(80)) + dump(MACHINE) + dump({}) + dump([]),
    "no machine": lambda: dump(MAGIC) + dump(VERSION) + dump(nested(80)) + dump({}) + dump([]),
    "no list of keys": lambda: dump(MAGIC) + dump(VERSION) + dump(MACHINE) + dump({}) + dump(nested(80)),
    "odd keys": lambda: dump(MAGIC) + dump(VERSION) + dump(MACHINE) + dump({}) + dump([nested(80), 1]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_makes_no_sense_is_an_error_of_ours(kind: str, tmp_path: Path) -> None:
    (tmp_path / "f.pt").write_bytes(WRONG[kind]())
    with pytest.raises((Corrupt, Unsupported)) as caught:
        open_layout(tmp_path / "f.pt")
    assert caught.value.path == tmp_path / "f.pt"


def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    save({"net": nn.Linear(2, 2), "w": OrderedDict(a=counted(1))}, tmp_path / "f.pt")
    with pytest.raises(Unsupported, match="found a pickled module"):
        open_layout(tmp_path / "f.pt")
