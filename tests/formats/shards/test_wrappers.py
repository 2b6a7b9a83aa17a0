"""Tensor subclasses of torchao and Transformer Engine: those that hold a tensor as it is are it, others are refused.

The classes here are stand-ins that torch pickles as it pickles those of torchao 0.18 and Transformer Engine 2: neither
is a library that the suite needs. Where torchao is installed, its own are tried as well.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

from ckptkit import consolidate, verify
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.tensor_calls import as_tensor_record

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

Save = Callable[[dict[str, Tensor], Path], None]
HOLDERS = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
    "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.quantized_training.bitnet.BitNetTrainingLinearWeight": "_data",
}


class Wrapper(torch.Tensor):
    """A tensor that another one is in."""

    _data: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, attribute: str, size: torch.Size | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, size or held.shape, dtype=held.dtype)

    def __init__(self, held: Tensor, attribute: str, size: torch.Size | None = None) -> None:
        setattr(self, attribute, held)
        self.config = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        return False if "is_pinned" in str(func) else args[0]


class Rebuilt(Wrapper):
    """A tensor that says itself by what call it is made anew."""

    @classmethod
    def _make_in_reduce_ex(cls, held: Tensor) -> Any:
        return cls(held, "_data")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self)._make_in_reduce_ex, (self._data,)


def named(monkeypatch: pytest.MonkeyPatch, path: str, base: type) -> Any:
    """A class that pickles know by this name."""
    *parts, name = path.split(".")
    modules = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    for module in modules:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    made = type(name, (base,), {"__module__": modules[-1], "__qualname__": name})
    setattr(sys.modules[modules[-1]], name, made)
    return made


def save_dcp(state: dict[str, Tensor], root: Path) -> None:
    dcp.save(state, checkpoint_id=root, no_dist=True)


def save_pt(state: dict[str, Tensor], root: Path) -> None:
    root.mkdir()
    torch.save(state, root / "model.pt")


both = pytest.mark.parametrize("save", [save_dcp, save_pt])


@both
@pytest.mark.parametrize("path", HOLDERS)
def test_what_holds_a_tensor_as_it_is_is_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, save: Save
) -> None:
    kind, truth = named(monkeypatch, path, Wrapper), torch.randn(6, 4).bfloat16()
    state = {"weight": kind(truth, HOLDERS[path]), "parameter": nn.Parameter(kind(truth + 1, HOLDERS[path]))}
    save(state, tmp_path / "in")
    assert all(found.is_ok for found in verify(tmp_path / "in"))
    done = consolidate(tmp_path / "in", tmp_path / "out")
    assert done.unchecked_bytes == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["weight"], truth)
    assert torch.equal(found["parameter"], truth + 1)


@both
@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("torchao.quantization.Float8Tensor", Wrapper),
        ("torchao.optim.subclass_8bit.OptimState8bit", Wrapper),
        ("elsewhere.WeightWithDynamicFloat8CastTensor", Wrapper),
        ("transformer_engine.pytorch.tensor.float8_tensor.Float8Tensor", Rebuilt),
    ],
)
def test_any_other_is_refused_by_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, base: type, save: Save
) -> None:
    kind = named(monkeypatch, path, base)
    save({"weight": kind(torch.zeros(4, 4, dtype=torch.uint8), "_data"), "bias": torch.ones(3)}, tmp_path / "in")
    with pytest.raises(Unsupported, match=path.replace(".", r"\.")) as caught:
        consolidate(tmp_path / "in", tmp_path / "out")
    assert caught.value.tensor == "weight"
    assert not (tmp_path / "out").exists()


def test_what_holds_another_shape_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(iter(HOLDERS))
    kind = named(monkeypatch, path, Wrapper)
    save_pt({"weight": kind(torch.ones(4, 4), "_tensor", torch.Size([4, 5]))}, tmp_path / "in")
    with pytest.raises(Corrupt, match="has no tensor of this shape"):
        consolidate(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("state", [{}, {"_tensor": None}, {"_tensor": 7}, None, (), ({"_tensor": []}, {}), "text"])
def test_hostile_wrappers(state: Any) -> None:
    kind = Global("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor")
    arguments = (kind, None, (4, 4), (4, 1))
    value = Record(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (Global("torch._utils", "_rebuild_wrapper_subclass"), kind, arguments, state),
    )
    with pytest.raises(CkptError):
        as_tensor_record(value)


@both
def test_torchao_s_own(tmp_path: Path, save: Save) -> None:
    pytest.importorskip("torchao", reason="the stand-ins are tried without it")
    wrappers = importlib.import_module("torchao.float8.fsdp_utils")
    config = importlib.import_module("torchao.float8.float8_training_tensor").LinearMMConfig()
    truth = torch.randn(32, 64)
    save({"w": wrappers.WeightWithDynamicFloat8CastTensor(truth, config, torch.float8_e4m3fn)}, tmp_path / "in")
    consolidate(tmp_path / "in", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], truth)
