"""What SGLang would call, on real checkpoints. SGLang itself does not run here: its five names are stood in for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit.integrations import sglang
from ckptkit.ops.consolidate import consolidate
from tests.conftest import Produce
from tests.integrations.produced_models import SHARDS, sharded_models

HOOKS = "sglang.srt.plugins.hook_registry"
LOADER = "sglang.srt.model_loader.loader"


class DefaultModelLoader:
    def _get_weights_iterator(self, source: Any) -> list[tuple[str, Tensor]]:
        return [("own", torch.ones(1))]


class HookType(Enum):
    AROUND = "around"


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Callable[..., Any], HookType]]:
    """The hooks that were registered, by what they are around."""
    found: dict[str, tuple[Callable[..., Any], HookType]] = {}

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
            found[target] = (hook, hook_type)

    stand_in(monkeypatch, HOOKS, HookRegistry=HookRegistry, HookType=HookType)
    stand_in(monkeypatch, LOADER, DefaultModelLoader=DefaultModelLoader)
    return found


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """Make a module, and the packages that it is in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
            if depth > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module, raising=False)
    for key, value in names.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


def source_of(path: Path, prefix: str = "") -> Any:
    return SimpleNamespace(model_or_path=str(path), revision=None, prefix=prefix)


def test_the_hook_reads_what_sglang_cannot(
    hooks: dict[str, tuple[Callable[..., Any], HookType]], produce: Produce, tmp_path: Path
) -> None:
    sglang.register()
    hook, kind = hooks[f"{LOADER}.DefaultModelLoader._get_weights_iterator"]
    assert kind is HookType.AROUND
    made = produce(sharded_models)
    read, loader = DefaultModelLoader._get_weights_iterator, DefaultModelLoader()
    found = dict(hook(read, loader, source_of(made.root / "llama" / SHARDS, "language.")))
    truth = {name.removeprefix("llama:"): one for name, one in made.truth.items() if name.startswith("llama:")}
    del truth["lm_head.weight"]  # tied
    assert found.keys() == {f"language.{name}" for name in truth}
    assert all(torch.equal(found[f"language.{name}"], one) for name, one in truth.items())
    consolidate(made.root / "llama", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    for own in (tmp_path / "out", tmp_path / "empty", Path("org/model")):
        assert dict(hook(read, loader, source_of(own))).keys() == {"own"}


def test_another_interface_is_said_in_a_line(
    hooks: dict[str, tuple[Callable[..., Any], HookType]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delattr(sys.modules[LOADER], "DefaultModelLoader")
    sglang.register()
    assert not hooks
    (record,) = caplog.records
    assert "ckptkit cannot register its hook with this SGLang" in record.getMessage()
    assert record.levelno == logging.WARNING


def test_a_custom_loader_gets_the_path_as_a_tensor(produce: Produce) -> None:
    path = produce(sharded_models).root / "mixtral"
    given = torch.frombuffer(bytearray(str(path).encode()), dtype=torch.uint8)
    loaded: dict[str, Tensor] = {}
    sglang.load(SimpleNamespace(load_weights=loaded.update), [("path", given)])
    assert any(".experts.2." in name for name in loaded)
    assert "lm_head.weight" in loaded
