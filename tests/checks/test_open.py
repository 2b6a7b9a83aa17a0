"""Tensors read when they are asked for, from real checkpoints of every format, and no byte more than that."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import Corrupt, Unsupported
from tests import producers
from tests.conftest import Produce
from tests.conversion.judges import raw
from tests.process_io import bytes_read, needs_counts
from tests.producers import Producer

FORMATS = [
    producers.fsdp2,
    producers.accelerate,
    producers.mesh,
    producers.strided,
    producers.dtypes,
    producers.full,
    producers.hf_shards,
]
KNOWN_TO_NUMPY = (torch.float64, torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("producer", FORMATS, ids=lambda producer: producer.__name__)
def test_every_tensor_is_what_went_in(producer: Producer, produce: Produce) -> None:
    made = produce(producer)
    opened = ckptkit.open(made.root)
    truth = {name: tensor for name, tensor in made.truth.items() if isinstance(tensor, torch.Tensor)}
    assert opened.keys() == truth.keys()
    for name, expected in truth.items():
        lazy = opened[name]
        assert (lazy.shape, lazy.nbytes) == (tuple(expected.shape), expected.numel() * expected.itemsize)
        if expected.is_quantized:
            for read in (lazy.torch, lazy.numpy):
                with pytest.raises(Unsupported, match="q"):
                    read()
            continue
        found = lazy.torch()
        assert (found.dtype, found.shape, f"torch.{lazy.dtype}") == (
            expected.dtype,
            expected.shape,
            str(expected.dtype),
        )
        assert raw(found) == raw(expected), name
        if expected.ndim and min(expected.shape) > 0:
            assert raw(lazy[-1].torch()) == raw(expected[-1])
            assert raw(lazy[..., 1:].torch()) == raw(expected[..., 1:])


def test_numpy_has_the_same_numbers(produce: Produce) -> None:
    made = produce(producers.dtypes)
    for name, lazy in ckptkit.open(made.root).items():
        expected = made.truth[name]
        if lazy.dtype in ("float4_e2m1fn_x2", "quint8", "qint8", "qint32"):
            with pytest.raises(Unsupported):
                lazy.numpy()
            continue
        found = lazy.numpy()
        assert found.shape == expected.shape
        if expected.dtype in KNOWN_TO_NUMPY:
            assert found.dtype == expected.numpy().dtype
        wide = expected.to(torch.complex128) if expected.is_complex() else expected.double()
        np.testing.assert_array_equal(found.astype(wide.numpy().dtype), wide.numpy())


def test_shapes_of_nothing_and_of_one(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    tensors = {f"{kind}.{len(shape)}": torch.ones(shape).to(kind) for kind in kinds for shape in ((), (0, 4), (3, 2))}
    save_file(tensors, tmp_path / "model.safetensors")
    for name, lazy in ckptkit.open(tmp_path).items():
        assert lazy.torch().shape == lazy.numpy().shape == tensors[name].shape
        assert lazy.torch().equal(tensors[name])
        assert isinstance(lazy.numpy(), np.ndarray)
        if lazy.shape:
            assert len(lazy) == lazy.shape[0]
            assert [row.shape for row in lazy] == [tuple(row.shape) for row in tensors[name]]
        else:
            with pytest.raises(TypeError):
                len(lazy)


@needs_counts
def test_a_part_costs_its_own_bytes_only(tmp_path: Path) -> None:
    numbers = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    save_file({"w": numbers}, tmp_path / "model.safetensors")
    lazy = ckptkit.open(tmp_path)["w"]
    assert lazy[0, 0].torch() == 0  # what is imported is read, too
    for part, limit in ((lazy[100:104], 16384), (lazy[100:104][:, :4], 4 * 4096), (lazy[512, 7], 4)):
        before = bytes_read()
        found = part.torch()
        assert bytes_read() - before < limit + 4096
        assert found.numel() == part.numel
    assert lazy[512, 7].torch() == 512 * 1024 + 7


def test_what_is_damaged_elsewhere_does_not_matter_to_a_part(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "model.pt")
    content = bytearray((tmp_path / "model.pt").read_bytes())
    content[content.index(torch.tensor(900.0).numpy().tobytes())] ^= 1
    (tmp_path / "model.pt").write_bytes(content)
    lazy = ckptkit.open(tmp_path)["w"]
    assert lazy[:800].torch().equal(torch.arange(800.0))
    with pytest.raises(Corrupt, match="CRC-32") as raised:
        lazy.torch()
    assert raised.value.tensor == "w"


def test_a_strided_tensor_is_checked_too(produce: Produce, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0).reshape(20, 50).t()}, tmp_path / "model.pt")
    content = bytearray((tmp_path / "model.pt").read_bytes())
    content[content.index(torch.tensor(900.0).numpy().tobytes())] ^= 1
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(Corrupt):
        ckptkit.open(tmp_path)["w"].numpy()


def test_threads_may_read_at_once(produce: Produce) -> None:
    made = produce(producers.fsdp2)
    opened = ckptkit.open(made.root)
    names = list(opened) * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda name: opened[name].torch(), names))
    assert all(raw(tensor) == raw(made.truth[name]) for name, tensor in zip(names, found, strict=True))


@pytest.mark.parametrize("producer", [producers.fsdp2, producers.dtypes], ids=lambda producer: producer.__name__)
def test_numpy_and_torch_take_a_tensor_by_itself(producer: Producer, produce: Produce) -> None:
    made = produce(producer)
    for name, lazy in ckptkit.open(made.root).items():
        assert raw(torch.as_tensor(lazy)) == raw(made.truth[name]), name
        if lazy.dtype.endswith("_x2") or lazy.spec.dtype.kind == "quantized":
            with pytest.raises(Unsupported, match=f"{re.escape(name)}.*numpy does not have dtype"):
                np.asarray(lazy)
        else:
            array = np.asarray(lazy)
            assert array.dtype != object
            assert np.array_equal(array, lazy.numpy(), equal_nan=lazy.spec.dtype.kind != "bool")


def test_numpy_asks_for_a_dtype_or_for_no_copy(produce: Produce) -> None:
    lazy = ckptkit.open(produce(producers.fsdp2).root)["model.embed.weight"]
    assert np.asarray(lazy[2:4], dtype=np.float16).dtype == np.float16
    assert torch.as_tensor(lazy[2:4], dtype=torch.bfloat16).dtype == torch.bfloat16
    assert np.add(lazy, 1).shape == lazy.shape
    with pytest.raises(ValueError, match="an array without a copy"):
        np.asarray(lazy, copy=False)


def test_names(produce: Produce) -> None:
    opened = ckptkit.open(produce(producers.fsdp2).root)
    with pytest.raises(KeyError, match=r"there is `model\.embed\.weight`"):
        opened["embed.weight"]
    assert "nothing" not in opened
    assert opened.get("nothing") is None
    chosen = opened.select("model.*.weight")
    assert chosen
    assert set(chosen) == {name for name in opened if name.startswith("model.") and name.endswith(".weight")}
    assert f"dcp checkpoint, {len(opened)} tensors" in repr(opened)
    assert "model.embed.weight float32[11,6]" in repr(opened["model.embed.weight"])


def test_opening_and_reading_import_no_torch(produce: Produce) -> None:
    root = produce(producers.fsdp2).root
    code = (
        "import sys, ckptkit\n"
        f"opened = ckptkit.open({str(root)!r})\n"
        "repr(opened)\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "opened['model.embed.weight'].numpy()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
