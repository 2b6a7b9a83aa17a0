"""Deltas as an engine gets them: what it patches makes the new model, and what it cannot patch is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.errors import CkptError, Corrupt, Mismatch, Unsupported
from ckptkit.integrations.loaded_weights import (
    LOADED,
    LoadedWeights,
    record_loaded_weights,
)
from ckptkit.plugins.deltas.record import read_delta_record
from ckptkit.plugins.deltas.vllm_patches import all_changes_of, load_and_check_chain
from tests.plugins.deltas.models import as_hf


class Model:
    """What weights are remembered of."""


def model(step: int) -> dict[str, Tensor]:
    """A policy of which each step changes a few elements of `few`, and all of `all`; `same` never changes."""
    few = torch.arange(60, dtype=torch.bfloat16).reshape(6, 10)
    few.view(-1)[step : 2 * step] = -1.0
    return {"few": few, "all": torch.full((3, 2), float(step), dtype=torch.bfloat16), "same": torch.ones(50)}


def deltas(root: Path, *models: Mapping[str, Tensor]) -> list[Path]:
    """Write models, and a delta between each and the next."""
    paths = [as_hf(root / f"model-{i}", one) for i, one in enumerate(models)]
    for i, path in enumerate(paths[1:]):
        ckptkit.delta(paths[i], path, root / f"delta-{i}", force=True)
    return [root / f"delta-{i}" for i in range(len(paths) - 1)]


def loaded(path: Path) -> LoadedWeights:
    """What is remembered of the weights of a checkpoint that is loaded."""
    engine, tensors = Model(), ckptkit.open(path)
    assert LOADED.get(engine) is None
    for _ in record_loaded_weights(engine, tensors.layout, ((name, one.torch()) for name, one in tensors.items())):
        assert LOADED.get(engine) is None
    weights = LOADED.get(engine)
    assert weights is not None
    LOADED.pop(engine, None)
    assert LOADED.get(engine) is None
    return weights


def test_the_changes_make_the_new_model(tmp_path: Path) -> None:
    """Also where a delta holds a tensor whole."""
    models = [model(step) for step in (1, 4, 9)]
    made = deltas(tmp_path, *models)
    weights = loaded(tmp_path / "model-0")
    chain, result = load_and_check_chain(made, weights)
    assert chain.find_last_full_delta("all") == 1
    assert chain.find_last_full_delta("few") is None
    patched = {name: one.clone() for name, one in models[0].items()}
    for name in chain.specs:
        changes = all_changes_of(chain, name)
        patched[name].view(torch.int16).view(-1)[changes.positions] = torch.from_numpy(changes.values.view(np.int16))
    assert patched.keys() == models[2].keys()
    assert all(torch.equal(patched[name], one) for name, one in models[2].items())
    assert result.sums == loaded(tmp_path / "model-2").sums
    with pytest.raises(Mismatch, match="expected base"):
        load_and_check_chain(made[1:], weights)
    with pytest.raises(Mismatch, match="the delta is applied already"):
        load_and_check_chain(made, result)


def test_what_cannot_be_patched_is_refused_by_name(tmp_path: Path) -> None:
    nan, integers = model(4), model(4)
    nan["few"][2, 3] = torch.nan
    integers["same"] = torch.ones(50, dtype=torch.int32)
    more = {**integers, "same": integers["same"].clone()}
    more["same"][7] = 5
    (to_nan,) = deltas(tmp_path / "nan", model(1), nan)
    refuse(to_nan, Unsupported, "tensor `few`: expected new values without NaN, found 1")
    (of_integers,) = deltas(tmp_path / "integers", integers, more)
    refuse(of_integers, Unsupported, "tensor `same`: expected one of float64, float32, float16, bfloat16")


def test_a_delta_that_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    (made,) = deltas(tmp_path, model(1), model(4))
    record = made / "delta.json"
    content = record.read_text()
    record.write_text(content.replace(read_delta_record(made).new, "0" * 64))
    refuse(made, Corrupt, "expected weights 000000000000 after the delta, found")
    record.write_text(content)
    (made / "ckptkit.json").unlink()
    refuse(made, Unsupported, "expected a CRC-32 in `ckptkit.json`, found none")


def refuse(made: Path, kind: type[CkptError], words: str) -> None:
    """Assert that a delta is refused for a model that is its base."""
    with pytest.raises(kind) as caught:
        load_and_check_chain([made], loaded(made.parent / "model-0"))
    assert words in str(caught.value)
