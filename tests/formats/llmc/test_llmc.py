"""llm.c's files, written as its published layout says; the states of two ranks as its update walks through them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.errors import CkptError
from ckptkit.ops.consolidate import consolidate
from ckptkit.ops.verify import verify
from tests.formats.contract import raw_bytes

T, V, LAYERS, HEADS, C, PADDED = 6, 11, 3, 2, 8, 16
STEP = 1000


def names(layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors in the order of `write_tensors` in train_gpt2.py, by the names that train_gpt2.cu has for them."""
    return {
        "wte": (PADDED, C),
        "wpe": (T, C),
        "ln1w": (layers, C),
        "ln1b": (layers, C),
        "qkvw": (layers, 3 * C, C),
        "qkvb": (layers, 3 * C),
        "attprojw": (layers, C, C),
        "attprojb": (layers, C),
        "ln2w": (layers, C),
        "ln2b": (layers, C),
        "fcw": (layers, 4 * C, C),
        "fcb": (layers, 4 * C),
        "fcprojw": (layers, C, 4 * C),
        "fcprojb": (layers, C),
        "lnfw": (C,),
        "lnfb": (C,),
    }


def random(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in names(LAYERS).items()}


def write_model(path: Path, tensors: dict[str, Tensor], version: int = 3, **header: int) -> Path:
    numbers = [20240326, version, T, V, LAYERS, HEADS, C, PADDED, *[0] * 248]
    for index, number in header.items():
        numbers[int(index.removeprefix("at"))] = number
    path.write_bytes(struct.pack("<256i", *numbers) + b"".join(map(raw_bytes, tensors.values())))
    return path


def write_states(
    root: Path, moments: list[dict[str, Tensor]], ranks: int, *, zero: bool, shuffled: bool = False
) -> None:
    """One file for each rank: for each tensor and each layer of it, as ZeRO-1 has it, the rank's share."""
    for rank in range(ranks):
        numbers = [20240527, 1, ranks, rank, int(len(moments) == 3), int(shuffled), *[0] * 250]
        numbers[10] = STEP
        data = b""
        for tensors in moments:
            for name, tensor in tensors.items():
                layers = tensor.reshape(1 if name in ("wte", "wpe", "lnfw", "lnfb") else LAYERS, -1)
                data += b"".join(raw_bytes(layer.chunk(ranks)[rank] if zero else layer) for layer in layers)
        loader = struct.pack("<Q3iQ5i2520x", 3, 0, 1, 2, 5, *range(5)) if shuffled else b""
        (root / f"state_{STEP:08d}_{rank:05d}.bin").write_bytes(struct.pack("<256i", *numbers) + data + loader)
    (root / f"DONE_{STEP:08d}").touch()


def held(opened: ckptkit.LazyCheckpoint, prefix: str, suffix: str = "") -> dict[str, Tensor]:
    found = {name: lazy for name, lazy in opened.items() if name.startswith(prefix) and name.endswith(suffix)}
    return {name.removeprefix(prefix).removesuffix(suffix): lazy.torch() for name, lazy in found.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert raw_bytes(found[name]) == raw_bytes(tensor), name


@pytest.mark.parametrize(("version", "dtype"), [(3, torch.float32), (5, torch.bfloat16)])
def test_a_model_alone(tmp_path: Path, version: int, dtype: torch.dtype) -> None:
    tensors = random(dtype)
    file = write_model(tmp_path / "gpt2_124M.bin", tensors, version)
    assert_same(held(ckptkit.open(file), "model."), tensors)
    done = consolidate(file, tmp_path / "out", names="keep")
    assert any("the output has the checkpoint's own names" in note for note in done.notes)
    assert_same(dict(sorted(held(ckptkit.open(tmp_path / "out"), "").items())), dict(sorted(tensors.items())))
    found = ckptkit.inspect(file)
    assert (found.trainer, found.layout.format) == ("llm.c", "llmc")
    (verified,) = verify(file)
    assert verified.is_ok
    assert verified.checked_bytes == 0


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("ranks", "zero", "count"), [(1, False, 2), (2, True, 3), (2, False, 3), (4, True, 2)])
def test_a_run_with_states(tmp_path: Path, ranks: int, zero: bool, count: int, shuffled: bool) -> None:
    tensors, moments = random(), [random() for _ in range(count)]
    write_model(tmp_path / f"model_{STEP:08d}.bin", tensors)
    write_states(tmp_path, moments, ranks, zero=zero, shuffled=shuffled)
    found = ckptkit.inspect(tmp_path)
    assert (found.step, found.world_size, set(found.groups)) == (STEP, ranks, {"model", "optimizer", "rest"})
    opened = ckptkit.open(tmp_path)
    assert_same(held(opened, "model."), tensors)
    for moment, expected in zip(("exp_avg", "exp_avg_sq", "master_weights"), moments, strict=False):
        assert_same(held(opened, "optimizer.state.", f".{moment}"), expected)
    ckptkit.convert(tmp_path, tmp_path / "dcp", to="dcp", world_size=2)
    assert not ckptkit.diff(tmp_path / "dcp", tmp_path / f"model_{STEP:08d}.bin").different


Damage = Callable[[Path], Any]
MODEL, STATE = f"model_{STEP:08d}.bin", f"state_{STEP:08d}_0000"


def rewrite(file: Path, at: int, number: int) -> None:
    data = bytearray(file.read_bytes())
    struct.pack_into("<i", data, 4 * at, number)
    file.write_bytes(data)


def cut(file: Path, by: int) -> None:
    file.write_bytes(file.read_bytes()[:-by])


FAULTS: list[tuple[str, Damage, str]] = [
    ("short model", lambda root: cut(root / MODEL, 4), "bytes .header., found"),
    ("old version", lambda root: rewrite(root / MODEL, 1, 1), "expected version 3 or 5 of llm.c's models, found 1"),
    ("negative size", lambda root: rewrite(root / MODEL, 4, -3), "are impossible"),
    ("huge size", lambda root: rewrite(root / MODEL, 6, 2**31 - 1), "are impossible"),
    ("other layers", lambda root: rewrite(root / MODEL, 4, 2), "bytes .header., found"),
    ("missing rank", lambda root: (root / f"{STATE}1.bin").unlink(), f"missing: {STATE}1.bin"),
    ("not done", lambda root: (root / f"DONE_{STEP:08d}").unlink(), "the save did not finish"),
    ("short state", lambda root: cut(root / f"{STATE}1.bin", 8), "the moments of"),
    ("other step", lambda root: rewrite(root / f"{STATE}1.bin", 10, 7), "found 2 at 7"),
    ("other rank", lambda root: rewrite(root / f"{STATE}1.bin", 3, 0), "found 2 at .*rank 0"),
    ("other number of ranks", lambda root: rewrite(root / f"{STATE}0.bin", 2, 3), "of 3 ranks"),
    ("many ranks", lambda root: rewrite(root / f"{STATE}0.bin", 2, 2**27), "missing: "),
    ("no state", lambda root: rewrite(root / f"{STATE}0.bin", 0, 1), "expected the header of an optimizer state"),
]


@pytest.mark.parametrize(("damage", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_files_that_do_not_fit_are_an_error(tmp_path: Path, damage: Damage, message: str) -> None:
    write_model(tmp_path / MODEL, random())
    write_states(tmp_path, [random(), random()], 2, zero=True)
    damage(tmp_path)
    with pytest.raises(CkptError, match=message) as raised:
        consolidate(tmp_path / MODEL, tmp_path / "out")
    assert raised.value.exit_code == 3
    assert not (tmp_path / "out").exists()
