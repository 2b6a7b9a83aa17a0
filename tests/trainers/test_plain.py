"""Trainers whose optimizers number their parameters: named where that is certain, and numbered again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_state_dict

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint, RunAround
from ckptkit.errors import Corrupt, Mismatch, Unsupported, Usage
from ckptkit.runs.ls import ls
from tests.conftest import Produce
from tests.conversion.judges import raw
from tests.producers import Truth
from tests.trainers import produced_plain
from tests.trainers.produced_plain import STEPS, Gpt, train

pytestmark = pytest.mark.slow

UNPREFIXED = r"^_orig_mod\.=>"


def assert_is(found: Mapping[str, Any], truth: Truth) -> None:
    """The tensors are those of the live run, to the last bit."""
    assert found.keys() == truth.keys()
    assert [name for name, tensor in truth.items() if raw(found[name]) != raw(tensor)] == []


def read(path: Path) -> dict[str, Tensor]:
    return {name: lazy.torch() for name, lazy in ckptkit.open(path).items()}


def resumed(state: Mapping[str, Any]) -> list[float]:
    """The losses of a new process that goes on from a state dict with numbers."""
    model = Gpt()
    model.load_state_dict({name.removeprefix("_orig_mod."): tensor for name, tensor in state["model"].items()})
    optimizer = model.configure_optimizers()
    optimizer.load_state_dict(state["optimizer"])
    return train(model, optimizer, range(STEPS, 2 * STEPS))


def uninterrupted() -> list[float]:
    torch.manual_seed(1)
    model = Gpt()
    return train(model, model.configure_optimizers(), range(2 * STEPS))[STEPS:]


# -- transformers' Trainer ---------------------------------------------------------------------------------------------


def test_model_and_optimizer_of_a_trainer_are_one_checkpoint(produce: Produce) -> None:
    root = produce(produced_plain.trainer_ddp).root
    found = ckptkit.inspect(root)
    assert (found.whole.name, found.step, found.world_size, found.trainer) == (
        *("checkpoint-2", 2, 2),
        "transformers' Trainer",
    )
    assert found.optimizer_keys == "ids"
    assert set(found.groups) == {"model", "optimizer"}
    (listed,) = ls(root).checkpoints
    assert (listed.step, listed.world_size, listed.is_complete) == (2, 2, True)
    verified = ckptkit.verify(root)
    assert [part.path.name for part in verified] == ["checkpoint-2", "optimizer.pt"]
    assert all(part.is_ok for part in verified)


def test_a_trainer_goes_on_with_shards(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_plain.trainer_ddp)
    done = ckptkit.reshard(made.root, tmp_path / "dcp", to=2, optimizer_order="model")
    assert_is(read(tmp_path / "dcp"), made.truth)
    assert any("names for its 102 parameters" in note for note in done.notes)
    assert {"scheduler.pt", "trainer_state.json", "rng_state_1.pth"} <= done.files.keys()
    assert "optimizer.pt" not in done.files
    found = ckptkit.diff(made.root, tmp_path / "dcp", optimizer_order="model")
    assert (found.is_equal, found.tensors) == (True, len(made.truth))
    assert [note for note in found.notes if not note.startswith("not compared in ")] == [
        "`optimizer` got names for its 102 parameters: assumed, as --optimizer-order model says"
    ]


def test_torch_loads_the_shards_of_a_trainer(produce: Produce, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = produce(produced_plain.trainer_ddp)
    ckptkit.convert(made.root, tmp_path / "dcp", to="dcp", optimizer_order="model")
    model = AutoModelForCausalLM.from_pretrained(made.root / "checkpoint-2")
    torch.nn.init.zeros_(model.lm_head.weight)
    decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": others}])
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_is(produced_plain.live_state(model, optimizer), made.truth)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_a_trainers_optimizer_comes_back_as_it_was(produce: Produce, tmp_path: Path) -> None:
    checkpoint = produce(produced_plain.trainer_ddp).root / "checkpoint-2"
    ckptkit.convert(checkpoint, tmp_path / "dcp", to="dcp", world_size=3, optimizer_order="model")
    ckptkit.convert(tmp_path / "dcp", tmp_path / "one", to="pt", optimizer_keys="ids")
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    found = torch.load(tmp_path / "one" / "state.pt", weights_only=True)["optimizer"]
    assert found["param_groups"] == saved["param_groups"]
    torch.testing.assert_close(found["state"], saved["state"], rtol=0, atol=0)


def test_a_trainer_goes_on_with_deepspeed(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_plain.trainer_ddp)
    done = ckptkit.convert(made.root, tmp_path / "universal", to="universal", optimizer_order="model")
    assert any("names for its 102 parameters" in note for note in done.notes)
    found = read(tmp_path / "universal")
    for name, tensor in made.truth.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    (verified,) = ckptkit.verify(tmp_path / "universal")
    assert (verified.is_ok, verified.has_manifest) == (True, True)


def test_without_a_config_nothing_is_named(produce: Produce, tmp_path: Path) -> None:
    """Safetensors are sorted: their order says nothing of the model's."""
    checkpoint = shutil.copytree(produce(produced_plain.trainer_ddp).root / "checkpoint-2", tmp_path / "checkpoint-2")
    (checkpoint / "config.json").unlink()
    with pytest.raises(Unsupported, match="no file gives the order"):
        ckptkit.convert(checkpoint, tmp_path / "no", to="dcp", optimizer_order="model")
    ckptkit.convert(checkpoint, tmp_path / "pt", to="pt")
    with pytest.raises(Unsupported, match="no file gives the order"):
        ckptkit.convert(tmp_path / "pt", tmp_path / "no", to="dcp", optimizer_order="model")


def test_an_optimizer_that_breaks_off_is_said(produce: Produce, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(produce(produced_plain.trainer_ddp).root / "checkpoint-2", tmp_path / "checkpoint-2")
    whole = (checkpoint / "optimizer.pt").read_bytes()
    for content in (whole[:-200], b"", b"not a zip"):
        (checkpoint / "optimizer.pt").write_bytes(content)
        (listed,) = ls(tmp_path).checkpoints
        assert not listed.is_complete
        assert listed.problem is not None
        assert "optimizer.pt" in listed.problem
    ckptkit.consolidate(checkpoint, tmp_path / "model")


# -- nanoGPT, nanochat -------------------------------------------------------------------------------------------------


def test_nanogpt_says_its_step(produce: Produce) -> None:
    found = ckptkit.inspect(produce(produced_plain.nanogpt).root / "ckpt.pt")
    assert (found.trainer, found.step, found.optimizer_keys) == ("nanoGPT", STEPS, "ids")


def test_nanogpt_by_name_and_back(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_plain.nanogpt)
    options: Any = {"rename": UNPREFIXED, "world_size": 2, "optimizer_order": "model"}
    ckptkit.convert(made.root / "ckpt.pt", tmp_path / "dcp", to="dcp", **options)
    found = read(tmp_path / "dcp")
    assert found.pop("best_val_loss") == 1.5
    assert_is(found, made.truth)
    ckptkit.convert(tmp_path / "dcp", tmp_path / "back.pt", to="pt", optimizer_keys="ids")
    assert resumed(torch.load(tmp_path / "back.pt", weights_only=True)) == uninterrupted()


def test_nanogpt_in_one_file_keeps_its_numbers(produce: Produce, tmp_path: Path) -> None:
    checkpoint = produce(produced_plain.nanogpt).root / "ckpt.pt"
    ckptkit.convert(checkpoint, tmp_path / "same.pt", to="pt")
    assert resumed(torch.load(tmp_path / "same.pt", weights_only=True)) == uninterrupted()
    ckptkit.convert(checkpoint, tmp_path / "named.pt", to="pt", optimizer_order="model")
    named = torch.load(tmp_path / "named.pt", weights_only=True)["optimizer"]
    assert named["param_groups"][0]["params"][:2] == [
        "_orig_mod.transformer.wte.weight",
        "_orig_mod.transformer.wpe.weight",
    ]
    assert named["state"].keys() == {name for group in named["param_groups"] for name in group["params"]}


def test_nanochat_is_a_run_of_files(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_plain.nanochat)
    found = ckptkit.inspect(made.root)
    assert (found.whole.name, found.step, found.world_size, found.trainer) == ("model_000200.pt", 200, 2, "nanochat")
    assert {name: found.groups[name].under for name in found.groups} == {
        "model": (),
        "optimizer": ("optimizer_of_rank",),
    }
    assert [one.step for one in ls(made.root).checkpoints] == [100, 200]
    done = ckptkit.convert(made.root / "model_000100.pt", tmp_path / "dcp", to="dcp", world_size=1)
    assert any("state of 2 ranks, which 1 cannot use" in note for note in done.notes)
    assert_is(read(tmp_path / "dcp"), {f"model.{name}": tensor for name, tensor in made.truth.items()})
    ckptkit.convert(made.root / "model_000100.pt", tmp_path / "both", to="dcp", world_size=2)
    assert read(tmp_path / "both")["optimizer_of_rank.1.state.0.exp_avg"][0, 0] == 1


# -- what does not fit -------------------------------------------------------------------------------------------------


def save(path: Path, change: Any = None, model: torch.nn.Module | None = None) -> Path:
    """A plain checkpoint, with its optimizer changed."""
    model = model or Gpt()
    optimizer = model.configure_optimizers()  # type: ignore[operator]
    train(model, optimizer, range(1))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if change is not None:
        change(state["optimizer"])
    torch.save(state, path)
    return path


def duplicate(optimizer: dict[str, Any]) -> None:
    optimizer["param_groups"][0]["params"][3] = 2


def orphan(optimizer: dict[str, Any]) -> None:
    optimizer["state"][500] = optimizer["state"][0]


def empty_orphan(optimizer: dict[str, Any]) -> None:
    optimizer["state"][500] = {}


def mixed(optimizer: dict[str, Any]) -> None:
    optimizer["param_groups"][0]["params"][0] = "transformer.wte.weight"


def missing(optimizer: dict[str, Any]) -> None:
    del optimizer["state"][optimizer["param_groups"][1]["params"].pop()]


def other_shape(optimizer: dict[str, Any]) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer["state"][3][name] = torch.zeros(8, 9)


def swapped_groups(optimizer: dict[str, Any]) -> None:
    optimizer["state"][0], optimizer["state"][2] = optimizer["state"][2], optimizer["state"][0]


def by_layer(optimizer: dict[str, Any]) -> None:
    """Two groups of matrices with one shape: any could be in either."""
    first = optimizer["param_groups"][0]
    optimizer["param_groups"].append({**first, "params": first["params"][10:]})
    first["params"] = first["params"][:10]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (duplicate, Corrupt, "list parameter 2 twice"),
        (orphan, Corrupt, "a state for this parameter, but no group"),
        (empty_orphan, Corrupt, "a state for this parameter, but no group"),
        (mixed, Corrupt, "either parameter indices or names in the optimizer's groups, found both"),
        (missing, Unsupported, "139 parameters|of shape"),
        (other_shape, Unsupported, "of shape|has the shape"),
        (swapped_groups, Unsupported, "has the shape"),
        (by_layer, Unsupported, "fits several optimizer groups"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_not_certain_is_not_named(tmp_path: Path, change: Any, kind: type[Exception], message: str) -> None:
    saved = save(tmp_path / "saved.pt", change)
    with pytest.raises(kind, match=message):
        ckptkit.convert(saved, tmp_path / "out", to="dcp", optimizer_order="model")
    if kind is Unsupported:
        done = ckptkit.convert(saved, tmp_path / "out", to="dcp")
        assert any("keeps its parameter indices" in note for note in done.notes)
        assert ckptkit.inspect(tmp_path / "out").optimizer_keys == "ids"


def test_a_parameter_without_a_state_is_named_by_its_place(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    del saved["state"][3]
    saved["state"][4] = {}
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "saved.pt")
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "named.pt", to="pt", optimizer_order="model")
    named = torch.load(tmp_path / "named.pt", weights_only=True)["optimizer"]
    assert named["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert named["state"]["2.weight"] == {}
    assert named["state"].keys() == {"0.weight", "0.bias", "1.weight", "2.weight", "2.bias"}


def test_a_model_without_an_optimizer_has_none_to_name(tmp_path: Path) -> None:
    torch.save({"model": Gpt().state_dict()}, tmp_path / "saved.pt")
    with pytest.raises(Unsupported, match="no optimizer with parameter groups"):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "out", to="dcp", optimizer_keys="ids")
    with pytest.raises(Usage, match="optimizer_keys: expected names or ids, found `numbers`"):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "out", to="dcp", optimizer_keys="numbers")
    with pytest.raises(Usage, match="has no optimizer"):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "out", to="hf", optimizer_keys="ids")


def test_an_optimizer_without_its_model_keeps_its_numbers(tmp_path: Path) -> None:
    saved = torch.load(save(tmp_path / "saved.pt"), weights_only=True)
    torch.save({"optimizer": saved["optimizer"]}, tmp_path / "optimizer.pt")
    ckptkit.convert(tmp_path / "optimizer.pt", tmp_path / "out", to="dcp")
    assert ckptkit.inspect(tmp_path / "out").optimizer_keys == "ids"
    with pytest.raises(Mismatch, match="expected model weights"):
        ckptkit.convert(tmp_path / "optimizer.pt", tmp_path / "no", to="dcp", optimizer_keys="names")


def test_a_step_that_is_no_number_is_none(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "iter_num": "many"}, tmp_path / "state.pt")
    assert Checkpoint.open(tmp_path).step is None


# -- the order of a model's parameters, by its config -----------------------------------------------------------------


def save_hugging_face(root: Path, model_type: str, **options: Any) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """A model as transformers saves it, with the optimizer of its parameters after a step beside it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(model_type, vocab_size=32, **options)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(8)[None]).logits.square().sum().backward()
    optimizer.step()
    model.save_pretrained(root)
    torch.save(optimizer.state_dict(), root / "optimizer.pt")
    return model, optimizer


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 11}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen2": {**SIZES, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 11, "n_head": 2, "n_positions": 8},  # which only transformers knows
}


@pytest.mark.parametrize("model_type", MODELS)
def test_the_config_tells_the_order(tmp_path: Path, model_type: str) -> None:
    model, optimizer = save_hugging_face(tmp_path / "checkpoint-1", model_type, **MODELS[model_type])
    ckptkit.convert(tmp_path / "checkpoint-1", tmp_path / "dcp", to="dcp", optimizer_order="model")
    found = {name: tensor for name, tensor in read(tmp_path / "dcp").items() if name.startswith("optimizer.")}
    truth = produced_plain.live_state(model, optimizer)
    assert_is(found, {name: tensor for name, tensor in truth.items() if name.startswith("optimizer.")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 10**9}, "1e\\+09 layers"),
        ({"n_layer": 10}, "describes other tensors"),
        ({"architectures": ["pipeline"]}, "does not have class `pipeline`"),
        ({"model_type": "unheard-of"}, "does not have models of type `unheard-of`"),
        ({"n_embd": "wide"}, "cannot build a model"),
    ],
)
def test_a_config_that_does_not_fit_names_nothing(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_hugging_face(tmp_path / "checkpoint-1", "gpt2", **MODELS["gpt2"])
    config = tmp_path / "checkpoint-1" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(Unsupported, match=message):
        ckptkit.convert(tmp_path / "checkpoint-1", tmp_path / "dcp", to="dcp", optimizer_order="model")


def test_the_order_of_a_distributed_checkpoint_is_no_evidence(tmp_path: Path) -> None:
    """Ranks share out what they all have, and metadata lists it rank by rank."""
    save(tmp_path / "saved.pt")
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "dcp", to="dcp", optimizer_keys="ids")
    assert ckptkit.inspect(tmp_path / "dcp").optimizer_keys == "ids"
    with pytest.raises(Unsupported, match="no file gives the order"):
        ckptkit.convert(tmp_path / "dcp", tmp_path / "no", to="dcp", optimizer_order="model")


def test_names_that_contradict_their_groups_get_no_numbers(tmp_path: Path) -> None:
    state = {"a": {"exp_avg": torch.ones(2)}, "b": {"exp_avg": torch.ones(2)}}
    for params, message in ((["a", "a", "b"], "twice"), (["a"], "but no group contains")):
        torch.save({"optimizer": {"state": state, "param_groups": [{"params": params}]}}, tmp_path / "x.pt")
        with pytest.raises(Corrupt, match=message):
            ckptkit.convert(tmp_path / "x.pt", tmp_path / "no", to="pt", optimizer_keys="ids")


@pytest.mark.parametrize("params", [[None], "ab", [1.5], [True]])
def test_groups_that_list_no_parameters_are_damaged(tmp_path: Path, params: Any) -> None:
    torch.save({"optimizer": {"state": {}, "param_groups": [{"params": params}]}}, tmp_path / "x.pt")
    with pytest.raises(Corrupt, match="expected a list of the group's parameters"):
        ckptkit.convert(tmp_path / "x.pt", tmp_path / "no", to="pt", optimizer_keys="ids")


def test_adafactors_factors_show_the_shape(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    states = {
        i: {{"row_var": "exp_avg_sq_row", "col_var": "exp_avg_sq_col"}.get(k, k): v for k, v in state.items()}
        for i, state in optimizer.state_dict()["state"].items()
    }
    for state in states.values():  # transformers' has no axis of one
        state.update({k: v.squeeze() for k, v in state.items() if k.startswith("exp_avg_sq_")})
    groups = optimizer.state_dict()["param_groups"]
    torch.save({"model": model.state_dict(), "optimizer": {"state": states, "param_groups": groups}}, tmp_path / "x.pt")
    ckptkit.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", optimizer_keys="names")
    assert "optimizer.state.1.weight.exp_avg_sq_row" in read(tmp_path / "dcp")


def test_a_file_with_a_step_beside_a_model_makes_it_no_run(tmp_path: Path) -> None:
    save_hugging_face(tmp_path, "llama", **MODELS["llama"])
    save(tmp_path / "step-5.pt")
    with pytest.warns(RunAround, match=r"using the model in this directory, not step-5\.pt, the latest"):
        opened = Checkpoint.open(tmp_path)
    assert [part.place for part in opened.components] == ["", "optimizer.pt"]
    assert Checkpoint.open(tmp_path / "step-5.pt").step == 5
