"""slime, miles and SkyRL: their trees, optimizers with states of other shapes, adapters, and what lies beside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptkit
from ckptkit.errors import NotACheckpoint, Unsupported
from ckptkit.runs.ls import ls
from tests.conftest import Produce
from tests.conversion.judges import raw
from tests.producers import Truth
from tests.trainers import produced_rl

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")
LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def read(path: Path) -> dict[str, bytes]:
    return {name: raw(lazy.torch()) for name, lazy in ckptkit.open(path).items()}


def expect(truth: Truth, trainer: str) -> dict[str, bytes]:
    return {name.partition("/")[2]: raw(each) for name, each in truth.items() if name.startswith(f"{trainer}/")}


def test_miles_has_a_directory_for_each_part(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_rl.miles_and_skyrl)
    run = made.root / "miles"
    assert [(one.step, one.is_complete) for one in ls(run).checkpoints] == [(4, True)]
    found = ckptkit.inspect(run)
    assert (found.trainer, found.step, found.world_size, found.optimizer_keys) == ("miles", 4, 2, "names")
    assert read(run) == expect(made.truth, "miles")
    done = ckptkit.consolidate(run, tmp_path / "hf")
    under = "model_state.model."
    model = {name.removeprefix(under): each for name, each in expect(made.truth, "miles").items() if under in name}
    assert read(tmp_path / "hf") == model
    assert all(left.is_expected for left in done.left_behind)


def test_states_of_other_shapes_than_their_parameters_are_kept(produce: Produce, tmp_path: Path) -> None:
    """Dion's `Q` is of [columns, rank], NorMuon's `variance_neuron` of [rows, 1]."""
    made = produce(produced_rl.miles_and_skyrl)
    whole = expect(made.truth, "miles")
    assert {"Q", "variance_neuron", "momentum", "variance"} <= {name.rpartition(".")[2] for name in whole}
    done = ckptkit.reshard(made.root / "miles", tmp_path / "iter_0000004", to=3)
    assert {"rng.pt", "meta.json", "lr_scheduler/.metadata"} <= done.files.keys()
    assert read(tmp_path / "iter_0000004") == whole
    assert all(part.is_ok for part in ckptkit.verify(tmp_path / "iter_0000004"))
    ckptkit.convert(made.root / "miles", tmp_path / "pt", to="pt", optimizer_keys="ids")
    ckptkit.convert(tmp_path / "pt", tmp_path / "back", to="dcp", optimizer_order="model")
    assert read(tmp_path / "back") == whole


def test_a_model_beside_random_states_alone(produce: Produce, tmp_path: Path) -> None:
    """With `--no-save-optim` only `rng.pt` is beside the model: it is not the checkpoint."""
    place = shutil.copytree(produce(produced_rl.miles_and_skyrl).root / "miles" / "iter_0000004", tmp_path / "iter_4")
    for name in ("optimizer", "lr_scheduler"):
        shutil.rmtree(place / name)
    assert set(read(place)) == {name for name in read(place) if name.startswith("model_state.")}
    (place / "rng.pt").rename(place / "noise.pt")
    assert read(place).keys() == read(place / "model").keys()


def test_adapters_of_miles(tmp_path: Path) -> None:
    """miles/backends/megatron_utils/lora_utils.py: PEFT's files, and what each rank goes on from."""
    place = tmp_path / "iter_0000003" / "adapter"
    place.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (place / "adapter_config.json").write_text(json.dumps(config))
    adapter = {f"{LORA}A.weight": torch.ones(4, 6), f"{LORA}B.weight": torch.ones(6, 4)}
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, place / f"adapter_megatron_rank{rank}.pt")
        torch.save({"iteration": 3}, place / f"training_state_rank{rank}.pt")
    with pytest.raises(NotACheckpoint):
        ckptkit.inspect(place)
    torch.save(adapter, place / "adapter_model.bin")
    assert ckptkit.inspect(tmp_path).adapters[0].rows == (4,)
    done = ckptkit.consolidate(tmp_path, tmp_path / "out")
    assert read(tmp_path / "out") == {name: raw(each) for name, each in adapter.items()}
    assert all(left.is_expected for left in done.left_behind)


def test_skyrl_is_known_beside_its_states(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_rl.miles_and_skyrl)
    run = made.root / "skyrl"
    (found,) = ls(run).checkpoints
    assert (found.is_complete, found.trainer, found.named_by) == (True, "SkyRL", ("latest_ckpt_global_step.txt",))
    assert (ckptkit.inspect(run).step, ckptkit.inspect(run).world_size) == (8, 2)
    done = ckptkit.consolidate(run, tmp_path / "hf", include=["model.embed*", "model.head*", "model.layers*"])
    whole = expect(made.truth, "skyrl")
    assert read(tmp_path / "hf") == {
        name: whole[name] for name in whole if name.startswith(("embed", "head", "layers"))
    }
    assert all(left.is_expected for left in done.left_behind)


@pytest.mark.parametrize("ranks", [2, 3])
def test_skyrl_goes_on_with_other_ranks(produce: Produce, tmp_path: Path, ranks: int) -> None:
    """The states of ranks say how many there are, and which one each is of."""
    run = produce(produced_rl.miles_and_skyrl).root / "skyrl"
    done = ckptkit.reshard(run, tmp_path / "global_step_8", to=ranks)
    assert {"data.pt", "trainer_state.pt", "fully_async_state.pt"} <= done.files.keys()
    for rank in range(ranks):
        state = torch.load(tmp_path / f"global_step_8/policy/extra_state_world_size_{ranks}_rank_{rank}.pt")
        assert state["world_size"] == ranks
        assert state.get("rank") == (rank if ranks == 2 else None)
        assert ("rng" in state) == (ranks == 2)


def test_a_policy_and_a_critic_are_two(produce: Produce, tmp_path: Path) -> None:
    step = shutil.copytree(produce(produced_rl.miles_and_skyrl).root / "skyrl" / "global_step_8", tmp_path / "step_8")
    shutil.copytree(step / "policy", step / "critic")
    with pytest.raises(Unsupported, match="several checkpoints are in this directory: critic, policy"):
        ckptkit.inspect(step)


def test_adapters_of_megatrons_ranks_are_refused(tmp_path: Path) -> None:
    """megatron_strategy.py, `_save_lora_adapters` of SkyRL: beside them are the optimizer's states alone."""
    policy = tmp_path / "global_step_4" / "policy"
    dcp.save({"optimizer.state.exp_avg.w": torch.ones(4)}, checkpoint_id=policy)
    for rank in range(2):
        weights = {"layers.0.adapter.linear_in.weight": torch.ones(2, 4)}
        torch.save({"model_state_dict": weights}, policy / f"adapter_tp{rank}_pp0_cp0_dp0_ep0_etp0.pt")
    with pytest.raises(Unsupported, match="adapters of Megatron's ranks") as caught:
        ckptkit.consolidate(tmp_path / "global_step_4", tmp_path / "out")
    assert caught.value.hint is not None
    assert "pass its file" in caught.value.hint


def test_slime_is_megatron_beside_a_rollout(tmp_path: Path) -> None:
    place = tmp_path / "iter_0000003"
    dcp.save({"decoder.final_layernorm.weight": torch.ones(4)}, checkpoint_id=place)
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert ckptkit.inspect(place).trainer == "Megatron"
    (tmp_path / "rollout").mkdir()
    torch.save({"sample_offset": 3}, tmp_path / "rollout" / "global_dataset_state_dict_2.pt")
    assert ckptkit.inspect(tmp_path).trainer == "slime or miles, by Megatron"
    assert [one.path.name for one in ls(tmp_path).checkpoints] == ["iter_0000003"]
