"""DeepSpeed's models with experts against the state that its ranks had: every tensor, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.errors import CkptError, Unsupported
from ckptkit.formats.archives.non_tensor_entries import load_value
from tests.conftest import Produce
from tests.plugins.deepspeed.test_deepspeed import (
    MODEL,
    OPTIMIZER,
    add_to_steps,
    assert_holds,
    change,
    refused,
    truth_of,
)
from tests.trainers import produced_experts as experts

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.nightly

EXPERT, OF_EXPERTS = "layer_{}_expert_{}_mp_rank_00_model_states.pt", "expp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("kind", experts.KINDS)
def test_holds_the_live_state(kind: str, produce: Produce) -> None:
    made = produce(experts.experts)
    layout = open_layout(made.root / kind)
    # of what is saved round robin DeepSpeed does not tell the moments right; without that it has the same numbers
    truth = truth_of(made.truth, "zero2" if kind == "round-robin" else kind)
    assert (layout.format, Checkpoint.open(made.root / kind).step) == ("deepspeed", 2)
    assert_holds(layout, truth)
    ours = {name for name in layout.tensors if name.startswith("model.")}
    assert ours == {name for name in truth if name.startswith("model.")}
    moments = {name for name in layout.tensors if name.endswith(("exp_avg", "exp_avg_sq"))}
    assert moments == {name for name in truth if name.endswith(("exp_avg", "exp_avg_sq"))}


@pytest.mark.parametrize("kind", experts.KINDS)
def test_copies_are_those_of_the_masters(kind: str, produce: Produce, tmp_path: Path) -> None:
    """The rounded copy in an expert's file has its number among all: verify finds it if it is another's."""
    root = produce(experts.experts).root / kind
    (found,) = ckptkit.verify(root)
    assert found.is_ok
    assert found.unchecked_bytes == 0
    assert bool(open_layout(root).twins) == (kind != "zero0")
    done = ckptkit.consolidate(root, tmp_path / "out")
    assert done.unchecked_bytes == 0


@pytest.mark.parametrize("kind", ["zero0", "zero1", "data-first"])
def test_groups_list_all_experts(kind: str, produce: Produce) -> None:
    layout = open_layout(produce(experts.experts).root / kind)
    names = [name for name in layout.blobs if layout.key(name)[-3:-2] == ("param_groups",)]
    lists = [load_value(layout.root, layout.blobs[name]) for name in names if layout.key(name)[-1] == "params"]
    states = {str(layout.key(name)[2]) for name in layout.tensors if name.endswith(".exp_avg")}
    assert len(lists) == 2
    assert sorted(one for listed in lists for one in listed) == sorted(states)


def test_dcp_of_it_has_the_same(produce: Produce, tmp_path: Path) -> None:
    root = produce(experts.experts).root / "zero1"
    ckptkit.convert(root, tmp_path / "out", to="dcp")
    assert ckptkit.diff(root, tmp_path / "out").is_equal


def test_no_universal_checkpoint_is_made_of_it(produce: Produce, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="each rank would look for its own experts"):
        ckptkit.convert(produce(experts.experts).root / "zero1", tmp_path / "out", to="universal")


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path, produce: Produce) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        source = produce(experts.experts).root / kind / "global_step2"
        return Path(shutil.copytree(source, tmp_path / "global_step2"))

    return make


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("zero1", EXPERT.format(0, 3)),
        ("zero1", EXPERT.format(1, 0)),
        ("zero1", OPTIMIZER.format(3)),
        ("zero0", OF_EXPERTS.format(0)),
        ("zero0", OF_EXPERTS.format(1)),
    ],
)
def test_a_missing_file_is_named(kind: str, name: str, copy: Callable[[str], Path]) -> None:
    root = copy(kind)
    (path,) = root.glob(f"*{name}")
    path.unlink()
    error = refused(root)
    assert error.path == path
    assert "is missing" in error.message
    assert not Checkpoint.at(root).is_complete


def test_files_of_experts_that_were_exchanged_are_told(copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    (root / EXPERT.format(0, 0)).rename(root / "there")
    (root / EXPERT.format(0, 1)).rename(root / EXPERT.format(0, 0))
    (root / "there").rename(root / EXPERT.format(0, 1))
    assert "does not belong to expert 0" in refused(root).message


def test_a_layer_in_the_place_of_another_is_told(copy: Callable[[str], Path]) -> None:
    root = copy("data-first")
    shutil.copy(root / EXPERT.format(1, 2), root / EXPERT.format(0, 2))
    assert "as in the other files" in refused(root).message


def test_experts_of_a_larger_model_are_told(copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    shutil.copy(root / EXPERT.format(1, 1), root / EXPERT.format(1, 2))
    assert "does not have this expert" in refused(root).message


def test_which_ranks_have_the_same_experts_is_not_guessed(copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    change(root / MODEL, lambda state: state.update(ds_config="settings.json"))
    assert "which of 4 ranks have the same experts" in refused(root, Unsupported).message


def test_an_order_that_is_not_certain_leaves_each_rank_its_optimizer(copy: Callable[[str], Path]) -> None:
    root = copy("zero0")
    for rank in range(2):
        change(root / OF_EXPERTS.format(rank), lambda state: state["optimizer"]["param_groups"].reverse())
    layout = open_layout(root)
    tops = {str(layout.key(name)[0]) for name in layout.tensors}
    assert tops == {"model", "optimizer_expp_rank_0", "optimizer_expp_rank_1"}


@pytest.mark.parametrize(
    "alter",
    [
        lambda state: state.update(num_experts=4),
        lambda state: state.update(num_experts=[4, 0]),
        lambda state: state.update(num_experts=[1 << 60, 2]),
        lambda state: state.update(num_experts=[4, 2, 1]),
        lambda state: state.update(num_experts=[]),
        lambda state: state.update(ds_autoep_layers=[{}]),
        lambda state: state.update(shared_params={name_of_expert(state): "embed.weight"}),
        lambda state: state["param_shapes"][1].update({"embed.bias": torch.Size([3])}),
        lambda state: state["param_shapes"][1].update({name_of_expert(state).replace("experts.0.", "experts.7."): [1]}),
        lambda state: state["param_shapes"][0].update({name_of_expert(state): torch.Size([1])}),
    ],
)
def test_model_states_that_contradict_the_experts(alter: Any, copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    change(root / MODEL, alter)
    with pytest.raises(CkptError) as raised:
        open_layout(root)
    assert raised.value.exit_code == 3
    assert raised.value.path is not None


def name_of_expert(state: Any) -> str:
    """The first name in the group of experts' parameters."""
    return str(next(iter(state["param_shapes"][1])))


@pytest.mark.parametrize(
    "alter",
    [
        lambda group: group.update(name="ep_size_4"),
        lambda group: group.update(name="ep_size_0"),
        lambda group: group.update(name="experts"),
        lambda group: group.update(moe=False),
    ],
)
def test_groups_that_contradict_the_experts(alter: Any, copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    for rank in range(experts.RANKS):
        (path,) = root.glob(f"*{OPTIMIZER.format(rank)}")
        change(path, lambda s: alter(s["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1]))
    with pytest.raises(CkptError) as raised:
        open_layout(root)
    assert raised.value.exit_code == 3
    assert raised.value.path is not None


@pytest.mark.parametrize("name", ["expert_0_mp_rank_00_model_states.pt", "layer_0_expert_0_mp_rank_01_model_states.pt"])
def test_other_layouts_of_experts_are_refused_by_name(name: str, copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    shutil.copy(root / EXPERT.format(0, 0), root / name)
    error = refused(root, Unsupported)
    assert error.path == root / name
    assert "experts" in error.message
    assert json.dumps(error.to_json())


def test_optimizers_of_two_saves_are_not_mixed(copy: Callable[[str], Path]) -> None:
    root = copy("zero0")
    optimizer = root / "expp_rank_1_mp_rank_00_optim_states.pt"
    change(optimizer, add_to_steps)
    error = refused(root)
    assert "several saves" in error.message
    assert error.path == optimizer


@pytest.mark.parametrize("is_cut", [False, True], ids=["missing", "cut"])
@pytest.mark.parametrize(
    ("kind", "lost"), [("zero1", {"scale"}), ("zero0-bf16", {"scale"}), ("residual", {"scale", "up.bias"})]
)
def test_all_but_one_expert_is_salvaged(
    kind: str, lost: set[str], is_cut: bool, copy: Callable[[str], Path], produce: Produce, tmp_path: Path
) -> None:
    """ZeRO's files have the masters of the expert whose own file is lost, but not its buffers and frozen weights."""
    path = copy(kind) / EXPERT.format(0, 1)
    path.unlink() if not is_cut else path.write_bytes(path.read_bytes()[:200])
    done = ckptkit.consolidate(path.parent, tmp_path / "out", salvage=True, names="keep")
    assert done.salvaged is not None
    names = {one.name.partition(".deepspeed_experts.1.")[2] for one in done.salvaged.lost}
    assert names == lost
    truth = truth_of(produce(experts.experts).truth, kind)
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, truth[f"model.{name}"].to(tensor.dtype)), name


def test_all_but_one_expert_without_masters_is_salvaged(copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = copy("zero0")
    (root / EXPERT.format(0, 1)).unlink()
    done = ckptkit.consolidate(root, tmp_path / "out", salvage=True, names="keep")
    assert done.salvaged is not None
    assert {".deepspeed_experts.1." in one.name and "layers.0." in one.name for one in done.salvaged.lost} == {True}
    assert len(done.salvaged.lost) == 4


@pytest.mark.parametrize("kind", ["zero0", "zero0-bf16"])
def test_a_lost_optimizer_of_experts_leaves_the_weights(kind: str, copy: Callable[[str], Path], tmp_path: Path) -> None:
    root = copy(kind)
    (root / OF_EXPERTS.format(1)).unlink()
    done = ckptkit.consolidate(root, tmp_path / "out", salvage=True, names="keep")
    assert done.salvaged is not None
    assert [one.path for one in done.salvaged.lost] == [root / OF_EXPERTS.format(1)]
    assert any("fp32 master weights without parameter names" in line for line in done.warnings) is (kind != "zero0")


@pytest.mark.parametrize("kind", ["mixed", "mixed-few"])
def test_masters_that_no_name_is_known_of_are_told(kind: str, produce: Produce, tmp_path: Path) -> None:
    """Layers that are split among different numbers of ranks: no file says which among how many."""
    root = produce(experts.mixed_experts).root / kind
    layout = open_layout(root)
    assert {layout.key(name)[0] for name in layout.tensors} == {
        "model",
        *(f"optimizer_expp_rank_{i}" for i in range(4)),
    }
    done = ckptkit.consolidate(root, tmp_path / "out", names="keep")
    (told,) = [line for line in done.warnings if "master" in line]
    assert "without parameter names, such as `optimizer_expp_rank_0.fp32_groups." in told
    assert told.endswith("the output has the 16-bit weights")
