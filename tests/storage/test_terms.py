"""What a load may leave out or convert: said, and never without a word; with dcp.load in real processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptkit.errors import Mismatch, Usage
from ckptkit.storage import PartialLoad, Reader, load_weights
from tests.conftest import Produce
from tests.producers import _on_ranks, counted, needs_errors_of_ranks
from tests.storage.states import cause_of, write_hf
from tests.tiers import nightly_but
from tests.trainers.produced_unused import LAST, SAVED, begin, train, unused, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(path: Path, **state: Any) -> Path:
    torch.save(state, path)
    return path


def test_all_that_is_missing_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "f.pt", w=counted(3))
    found: dict[str, Any] = {"w": torch.ones(3), "x": torch.ones(2), "nested": {"y": torch.ones(1), "step": 7}}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(found, storage_reader=Reader(path))
    error = cause_of(caught)
    assert isinstance(error, Mismatch)
    assert error.tensor == "nested.y"
    assert error.message.endswith("; also missing: `nested.step`, `x`")
    assert 'missing="keep"' in str(error.hint)
    assert torch.equal(found["w"], torch.ones(3))  # nothing was read


def test_what_is_missing_is_kept_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "f.pt", w=counted(3), step=5)
    found: dict[str, Any] = {"w": torch.ones(3), "x": torch.ones(2), "nested": {"y": 7}, "step": 0}
    with pytest.warns(PartialLoad, match=r"2 entries are not in the checkpoint, and unchanged: `nested\.y`, `x`"):
        dcp.load(found, storage_reader=Reader(path, missing="keep"))
    assert torch.equal(found["w"], counted(3))
    assert torch.equal(found["x"], torch.ones(2))
    assert (found["nested"], found["step"]) == ({"y": 7}, 5)


def test_what_is_missing_becomes_zero(tmp_path: Path) -> None:
    path = write(tmp_path / "f.pt", w=counted(3))
    found = {
        "w": torch.ones(3),
        "x": torch.ones(4, 3).t(),
        "s": torch.tensor(3.5),
        "n": torch.ones(2, dtype=torch.int8),
    }
    with pytest.warns(PartialLoad, match="3 entries are not in the checkpoint, and now zero"):
        dcp.load(found, storage_reader=Reader(path, missing="zero"))
    assert torch.equal(found["w"], counted(3))
    assert all(not found[name].any() for name in ("x", "s", "n"))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.ones(3), "rate": 0.1}, storage_reader=Reader(path, missing="zero"))
    assert "only tensors can be set to zero" in cause_of(caught).message


@pytest.mark.parametrize("missing", ["error", "zero"])
def test_states_by_number_are_not_those_by_name(missing: str, tmp_path: Path) -> None:
    """They are there, so the hint is to name them, and they never become zero."""
    state = {0: {"exp_avg": counted(3)}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
    path = write(tmp_path / "f.pt", model={"w": counted(3)}, optimizer=optimizer)
    found: dict[str, Any] = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {"w": {"exp_avg": torch.ones(3)}}}}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(found, storage_reader=Reader(path, missing=missing))
    assert cause_of(caught).tensor == "optimizer.state.w.exp_avg"
    assert cause_of(caught).hint == "run `ckptkit convert CKPT OUT --to dcp --optimizer-keys names`, and load OUT"
    assert torch.equal(found["optimizer"]["state"]["w"]["exp_avg"], torch.ones(3))


def test_a_planner_that_allows_a_partial_load(tmp_path: Path) -> None:
    path = write(tmp_path / "f.pt", w=counted(3))
    found = {"w": torch.ones(3), "x": torch.ones(2)}
    with pytest.warns(PartialLoad, match="1 entry is not in the checkpoint, and unchanged: `x`"):
        dcp.load(found, storage_reader=Reader(path), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(found["w"], counted(3))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float64])
def test_another_dtype_is_an_error_unless_allowed(stored: torch.dtype, tmp_path: Path) -> None:
    path = write(tmp_path / "f.pt", v=counted(2), w=counted(3).to(stored), x=counted(4).to(stored))
    found = {"v": torch.ones(2), "w": torch.ones(3), "x": torch.ones(4)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(found, storage_reader=Reader(path))
    error = cause_of(caught)
    assert isinstance(error, Mismatch)
    assert error.tensor in ("w", "x")
    dtype = str(stored).removeprefix("torch.")
    assert f"expected float32 as in the state to load into, found {dtype} in the checkpoint" in error.message
    assert all(torch.equal(one, torch.ones_like(one)) for one in found.values())  # nothing was read
    dcp.load(found, storage_reader=Reader(path, cast="allow"))
    assert torch.equal(found["w"], counted(3).to(stored).float())


def save_step(root: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Save a model and its optimizer after a step."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 1}, checkpoint_id=root)
    return model, optimizer


def test_states_that_nobody_asked_for(tmp_path: Path) -> None:
    save_step(tmp_path / "out")
    model = nn.Linear(3, 3)
    fresh = torch.optim.AdamW(model.parameters())  # without states, so that its state asks for none
    state = {"model": model.state_dict(), "optim": fresh.state_dict()}
    with pytest.warns(PartialLoad, match=r"does not have 6 entries under `optim.state`, .* it is not loaded"):
        dcp.load(state, storage_reader=Reader(tmp_path / "out"))
    before = {name: tensor.clone() for name, tensor in nn.Linear(3, 3).state_dict().items()}
    state = {"model": dict(before), "optim": fresh.state_dict()}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=Reader(tmp_path / "out", unasked="error"))
    error = cause_of(caught)
    assert isinstance(error, Mismatch)
    assert "6 entries under `optim.state`" in error.message
    assert "get_optimizer_state_dict" in str(error.hint)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in before.items())  # nothing was read
    dcp.load(state, storage_reader=Reader(tmp_path / "out", unasked="ignore"))
    assert torch.equal(state["model"]["weight"], model.weight)


@pytest.mark.parametrize("unasked", ["warn", "error"])
def test_a_part_of_a_checkpoint_is_loaded_without_a_word(tmp_path: Path, unasked: str) -> None:
    model, optimizer = save_step(tmp_path / "out")
    whole = {"model": nn.Linear(3, 3).state_dict(), "optim": optimizer.state_dict(), "step": 0}
    dcp.load(whole, storage_reader=Reader(tmp_path / "out", unasked=unasked))
    found = {"model": nn.Linear(3, 3).state_dict()}
    dcp.load(found, storage_reader=Reader(tmp_path / "out", unasked=unasked))
    assert torch.equal(found["model"]["weight"], model.state_dict()["weight"])


def test_integers_never_become_floats(tmp_path: Path) -> None:
    path = write(tmp_path / "f.pt", n=torch.arange(3))
    for cast in ("error", "allow"):
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"n": torch.ones(3)}, storage_reader=Reader(path, cast=cast))
        assert isinstance(cause_of(caught), Mismatch)


def test_terms_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="missing: expected"):
        Reader(tmp_path, missing="ignore")
    with pytest.raises(Usage, match="cast: expected"):
        Reader(tmp_path, cast="yes")


def test_weights_on_the_same_terms(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", {"a": counted(2), "b": counted(3).bfloat16()})
    with pytest.raises(Mismatch, match="expected float32 as in the state to load into, found bfloat16"):
        load_weights(path, {"a": torch.ones(2), "b": torch.ones(3)})
    found = {"a": torch.ones(2), "b": torch.ones(3), "head": torch.ones(4)}
    with pytest.warns(PartialLoad, match="unchanged: `head`"):
        assert load_weights(path, found, cast="allow", missing="keep") == ()
    assert torch.equal(found["b"], counted(3))
    assert torch.equal(found["head"], torch.ones(4))
    with pytest.warns(PartialLoad, match="now zero: `head`"):
        load_weights(path, found, cast="allow", missing="zero")
    assert torch.equal(found["head"], torch.zeros(4))


# -- together ----------------------------------------------------------------------------------------------------------


def load_states(root: Path, missing: str) -> dict[str, Tensor]:
    """Load model and optimizer through a reader, and train on; give the warnings, and the error if there was one."""
    model, optimizer = begin(is_sharded=True)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if missing == "error":
            with pytest.raises(CheckpointException) as caught:
                dcp.load(state, storage_reader=Reader(root, missing=missing))
            assert sorted(caught.value.failures) == list(range(dist.get_world_size()))
            assert isinstance(cause_of(caught), Mismatch)
            assert "`optimizer.state.spare.weight.exp_avg`" in cause_of(caught).message
            assert "--complete-optimizer" in str(cause_of(caught).hint)
            assert 'missing="zero", its initial value' in str(cause_of(caught).hint)
            return {"error": torch.ones(1)}
        dcp.load(state, storage_reader=Reader(root, missing=missing))
    said = [str(one.message) for one in heard if one.category is PartialLoad]
    assert len(said) == 1
    assert said[0].startswith("6 entries are not in the checkpoint")
    spare = state["optimizer"]["state"]["spare.weight"]
    step = torch.tensor(float(spare["step"]))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, SAVED, LAST)
    return whole(model) | {"step of spare": step}


@needs_errors_of_ranks
@pytest.mark.parametrize("world_size", nightly_but([2], [1, 2]))
def test_states_that_are_missing(world_size: int, produce: Produce) -> None:
    made = produce(unused)
    assert _on_ranks(world_size, load_states, made.root / "nested", "error").keys() == {"error"}
    kept = _on_ranks(world_size, load_states, made.root / "nested", "keep")
    assert kept["step of spare"] == 1  # torch makes a state by a step with gradients of zero
    zeroed = _on_ranks(world_size, load_states, made.root / "nested", "zero")
    assert zeroed.pop("step of spare") == 0
    wanted = {name: one for name, one in made.truth.items() if not name.startswith("numbered.")}
    assert zeroed.keys() == wanted.keys()
    assert all(torch.equal(zeroed[name], one) for name, one in wanted.items())


def load_another_dtype(root: Path) -> dict[str, Any]:
    model = nn.Linear(6, 7)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = get_model_state_dict(model)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=Reader(root))
    assert isinstance(cause_of(caught), Mismatch)
    dcp.load(state, storage_reader=Reader(root, cast="allow"))
    return state


@needs_errors_of_ranks
def test_another_dtype_in_shards(tmp_path: Path) -> None:
    tensors = {"weight": torch.randn(7, 6).bfloat16(), "bias": torch.randn(7).bfloat16()}
    found = _on_ranks(2, load_another_dtype, write_hf(tmp_path / "hf", tensors))
    assert all(torch.equal(found[name], one.float()) for name, one in tensors.items())
