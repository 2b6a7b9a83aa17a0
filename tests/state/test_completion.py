"""Optimizers with a state of every parameter, judged by torch: it loads them, and trains on as if never interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import ckptkit
from ckptkit.errors import CkptError, Mismatch, Unsupported, Usage
from tests.conftest import Produce
from tests.producers import _on_ranks, needs_errors_of_ranks
from tests.trainers import produced_unused
from tests.trainers.produced_unused import FLAT, LAST, SAVED, begin, resume, resume_ranks, train, unused

STATES = {f"optimizer.state.spare.{name}.{kind}" for name in ("weight", "bias") for kind in ("exp_avg", "exp_avg_sq")}
IN_ORDER: Any = {"optimizer_order": "model"}  # parameters of one shape, which no file tells apart
COMPLETED = STATES | {"optimizer.state.spare.weight.step", "optimizer.state.spare.bias.step"}


def assert_same(found: dict[str, Tensor], truth: dict[str, Tensor], prefix: str = "") -> None:
    wanted = {
        name.removeprefix(prefix): one for name, one in truth.items() if name.startswith("numbered.") == bool(prefix)
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


@needs_errors_of_ranks
@pytest.mark.parametrize(("form", "options"), [("nested", None), ("flat", FLAT)])
@pytest.mark.parametrize("world_size", [1, 4])
def test_torch_loads_what_it_had_missed(
    form: str, options: StateDictOptions | None, world_size: int, produce: Produce, tmp_path: Path
) -> None:
    made = produce(unused)
    if world_size == 1:
        with pytest.raises(ChildProcessError, match=r"Missing key in checkpoint state_dict: optimizer\.state\.spare"):
            _on_ranks(1, resume, made.root / form, options)
    done = ckptkit.reshard(made.root / form, tmp_path / "out", to=world_size, complete_optimizer=True)
    assert done.completed.keys() == COMPLETED
    assert done.completed["optimizer.state.spare.weight.exp_avg"] == "float32[6,6]"
    assert done.completed["optimizer.state.spare.weight.step"] == "float32[]"
    assert any("no state for 2 of its 6 parameters" in note for note in done.notes)
    assert any("`frozen.weight`" in note for note in done.notes)
    assert_same(_on_ranks(world_size, resume, tmp_path / "out", options), made.truth)
    (found,) = ckptkit.verify(tmp_path / "out")
    assert found.is_ok
    assert found.has_manifest
    again = ckptkit.reshard(tmp_path / "out", tmp_path / "again", to=world_size, complete_optimizer=True)
    assert not again.completed
    assert any("nothing to complete" in note for note in again.notes)


def test_files_of_ranks(produce: Produce, tmp_path: Path) -> None:
    made = produce(unused)
    done = ckptkit.reshard(made.root / "ranks", tmp_path / "out", to=4, complete_optimizer=True)
    assert done.completed.keys() == COMPLETED
    assert_same(_on_ranks(4, resume_ranks, tmp_path / "out"), made.truth, "numbered.")


def test_numbers_that_tell(produce: Produce, tmp_path: Path) -> None:
    made = produce(unused)
    source = made.root / "numbered.pt"
    done = ckptkit.convert(source, tmp_path / "out.pt", to="pt", complete_optimizer=True, **IN_ORDER)
    assert {name.rpartition(".")[0] for name in done.completed} == {"optimizer.state.2", "optimizer.state.3"}
    state = torch.load(tmp_path / "out.pt")
    pointers = [
        one.untyped_storage().data_ptr() for states in state["optimizer"]["state"].values() for one in states.values()
    ]
    assert len(set(pointers)) == len(pointers)  # none shares its memory with another, which training would change
    model, optimizer = begin(is_sharded=False, has_frozen=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, SAVED, LAST)
    assert_same(produced_unused.whole(model), made.truth, "numbered.")

    ckptkit.convert(source, tmp_path / "dcp", to="dcp", complete_optimizer=True, **IN_ORDER)
    assert_same(_on_ranks(2, resume, tmp_path / "dcp", None, False), made.truth, "numbered.")


def test_numbers_that_do_not_tell(produce: Produce, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="expected 8 parameters as in the model, found 6"):
        ckptkit.convert(
            produce(unused).root / "frozen.pt", tmp_path / "out.pt", to="pt", complete_optimizer=True, **IN_ORDER
        )
    assert not list(tmp_path.iterdir())


def test_numbers_without_an_order_do_not_tell(produce: Produce, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no file says which state belongs to which"):
        ckptkit.convert(produce(unused).root / "numbered.pt", tmp_path / "out.pt", to="pt", complete_optimizer=True)


def test_universal_checkpoints_need_every_state(produce: Produce, tmp_path: Path) -> None:
    source = produce(unused).root / "nested"
    with pytest.raises(Mismatch, match=r"expected a state for 6 parameters .*found 4"):
        ckptkit.convert(source, tmp_path / "out", to="universal")
    with pytest.raises(Unsupported, match=r"one step for all parameters, found 3.0 for .* and 0.0 for `spare.weight`"):
        ckptkit.convert(source, tmp_path / "out", to="universal", complete_optimizer=True)
    assert not (tmp_path / "out").exists()


def test_shares_of_the_work_make_the_same(produce: Produce, tmp_path: Path) -> None:
    source = produce(unused).root / "nested"
    ckptkit.reshard(source, tmp_path / "alone", to=3, complete_optimizer=True)
    for part in ("2/2", "1/2"):
        done = ckptkit.reshard(source, tmp_path / "shared", to=3, complete_optimizer=True, part=part)
        assert done.completed.keys() == COMPLETED
    ckptkit.finalize(tmp_path / "shared")
    for file in (tmp_path / "alone").iterdir():
        assert (tmp_path / "shared" / file.name).read_bytes() == file.read_bytes()


def test_what_is_left_out_is_not_completed(produce: Produce, tmp_path: Path) -> None:
    source = produce(unused).root / "nested"
    done = ckptkit.reshard(source, tmp_path / "out", to=1, complete_optimizer=True, exclude="*.bias.*")
    assert done.completed.keys() == {name for name in COMPLETED if ".weight." in name}
    names = ckptkit.open_layout(tmp_path / "out").names
    assert {name for name in names if "state.spare" in name} == done.completed.keys()


# -- what is not certain -----------------------------------------------------------------------------------------------


def saved(path: Path, kind: type[torch.optim.Optimizer], change: Any = None, **settings: Any) -> Path:
    """Save a model and its optimizer, which has no state of the last layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
    optimizer = kind(model.parameters(), **settings)
    model[1](model[0](torch.ones(2, 3))).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if change:
        change(state["optimizer"]["state"])
    torch.save(state, path)
    return path


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adamax, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RAdam, {}),
    ],
)
def test_states_begin_as_torch_begins_them(kind: type[torch.optim.Optimizer], settings: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", kind, **settings)
    ckptkit.convert(source, tmp_path / "out.pt", to="pt", complete_optimizer=True, **IN_ORDER)
    found = []
    for path in (source, tmp_path / "out.pt"):
        state = torch.load(path)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
        model.load_state_dict(state["model"])
        optimizer = kind(model.parameters(), **settings)
        optimizer.load_state_dict(state["optimizer"])
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        found.append(model.state_dict())
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def half_of_the_first(state: dict[int, dict[str, Tensor]]) -> None:
    del state[0]["exp_avg_sq"]


def other_dtype(state: dict[int, dict[str, Tensor]]) -> None:
    state[0]["exp_avg"] = state[0]["exp_avg"].double()


def other_shape(state: dict[int, dict[str, Tensor]]) -> None:
    state[0]["exp_avg"] = state[0]["exp_avg"].sum(1)


def no_state(state: dict[int, dict[str, Tensor]]) -> None:
    state.clear()


def step_in_words(state: dict[int, dict[str, Any]]) -> None:
    for one in state.values():
        one["step"] = "one"


@pytest.mark.parametrize(
    ("kind", "settings", "change", "words"),
    [
        (torch.optim.NAdam, {}, None, "initial value of the state `mu_product`, or it is not zero"),
        (torch.optim.Rprop, {}, None, "initial value of the state `prev`"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, None, "uses dampening"),
        (torch.optim.AdamW, {}, half_of_the_first, "the states of this parameter are unknown, because "),
        (torch.optim.AdamW, {}, other_dtype, "the states `exp_avg` differ in shape or dtype"),
        (torch.optim.AdamW, {}, other_shape, "shapes? "),
        (torch.optim.AdamW, {}, no_state, "has no state at all"),
        (torch.optim.AdamW, {}, step_in_words, "expected a tensor or a number, found a str"),
        (torch.optim.SGD, {"lr": 0.1}, None, "has no state at all"),
    ],
)
def test_nothing_is_guessed(
    kind: type[torch.optim.Optimizer], settings: Any, change: Any, words: str, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in.pt", kind, change, **settings)
    with pytest.raises(CkptError, match=words) as caught:
        ckptkit.convert(source, tmp_path / "out.pt", to="pt", complete_optimizer=True, **IN_ORDER)
    assert caught.value.exit_code == 3
    assert caught.value.path in (tmp_path, source)
    assert not (tmp_path / "out.pt").exists()


def test_steps_that_are_plain_numbers(tmp_path: Path) -> None:
    def count(state: dict[int, dict[str, Any]]) -> None:
        for one in state.values():
            one["step"] = int(one["step"])

    source = saved(tmp_path / "in.pt", torch.optim.AdamW, count)
    done = ckptkit.convert(source, tmp_path / "out.pt", to="pt", complete_optimizer=True, **IN_ORDER)
    assert done.completed["optimizer.state.4.step"] == "0"
    state = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert (state[0]["step"], state[4]["step"], type(state[5]["step"])) == (1, 0, int)


def test_without_an_optimizer_or_a_model(produce: Produce, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "model.pt")
    with pytest.raises(Unsupported, match="no optimizer with parameter groups"):
        ckptkit.convert(tmp_path / "model.pt", tmp_path / "out.pt", to="pt", complete_optimizer=True)
    state = torch.load(saved(tmp_path / "in.pt", torch.optim.AdamW))
    torch.save({"optimizer": state["optimizer"]}, tmp_path / "optimizer.pt")
    with pytest.raises(Mismatch, match="expected model weights"):
        ckptkit.convert(tmp_path / "optimizer.pt", tmp_path / "out.pt", to="pt", complete_optimizer=True)
    with pytest.raises(Usage, match="complete_optimizer has no effect: the output has no optimizer"):
        ckptkit.convert(produce(unused).root / "nested", tmp_path / "out", to="hf", complete_optimizer=True)
    shutil.rmtree(tmp_path)
