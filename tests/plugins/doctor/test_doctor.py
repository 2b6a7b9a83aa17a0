"""Checkpoints that do not load: the real load fails, `doctor` says why, and the command that it names fixes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ckptkit
from ckptkit import Checkpoint, Finding, doctor
from ckptkit.errors import NotACheckpoint, Usage
from tests import producers
from tests.cli.test_salvage import lacks_a_rank
from tests.command import ckptkit as cli
from tests.conftest import Produce
from tests.conversion.test_bad_input import DAMAGES
from tests.models.names.tiny_models import make_model
from tests.plugins.doctor import situations
from tests.plugins.doctor.situations import blank, config_alone, from_pretrained, llama, load_into, run, saved, write_hf
from tests.producers import Producer, save_alone, spawn

pytestmark = pytest.mark.slow

UNSEEN = {"shard all zeros", "shard of another rank", "everything missing", "shard a socket"}  # or errors as such
Refused = (dcp.api.CheckpointException, RuntimeError, ValueError)


def the_one(path: Path, code: str, **where: Any) -> Finding:
    """The only finding of a kind, of a checkpoint of which nothing else is found."""
    found = doctor(path, **where)
    assert {one.code for one in found.findings} == {code}, found
    return found.findings[0]


def is_ok(path: Path | Checkpoint, **where: Any) -> bool:
    found = doctor(path, **where)
    assert found.findings == ()
    return found.is_ok


@pytest.mark.parametrize("producer", producers.READABLE, ids=lambda producer: producer.__name__)
def test_nothing_is_found_in_what_loads(produce: Produce, producer: Producer) -> None:
    root = produce(producer).root
    assert is_ok(root)
    assert is_ok(root, like=root)


def test_a_model_of_transformers_is_one(tmp_path: Path) -> None:
    for tied in (False, True):
        model = saved(tmp_path / f"{tied}", tie_word_embeddings=tied)
        assert is_ok(model)
        assert is_ok(model, model=model)
        assert is_ok(model, model=model / "config.json", world_size=8)
        state = {"model": llama(tie_word_embeddings=tied).state_dict()}
        save_alone(state, tmp_path / "run" / f"ckpt-{int(tied)}")
        assert is_ok(tmp_path / "run" / f"ckpt-{int(tied)}", model=model, world_size=4)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "qwen3_moe", "mixtral", "qwen2_5_vl"])
def test_models_of_other_types_are_whole(tmp_path: Path, kind: str) -> None:
    model = make_model(kind)
    model.save_pretrained(tmp_path / "hf")
    save_alone({"model": model.state_dict()}, tmp_path / "ckpt-1")
    assert is_ok(tmp_path / "hf")
    assert is_ok(tmp_path / "hf", model=tmp_path / "hf" / "config.json")
    assert is_ok(tmp_path / "ckpt-1", model=tmp_path / "hf")


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["_orig_mod", "module"])
def test_words_of_wrappers(tmp_path: Path, word: str) -> None:
    wrapped = {f"{word}.{name}": tensor for name, tensor in llama().state_dict().items()}
    root = tmp_path / "ckpt-3"
    save_alone({"model": wrapped}, root)
    model = config_alone(tmp_path / "model")
    with pytest.raises(Refused, match=r"Missing key in checkpoint state_dict: model\.model\.embed_tokens"):
        load_into({"model": blank(llama().state_dict())}, root)
    assert is_ok(root)
    found = the_one(root, "wrapper", model=model)
    assert found.count == len(wrapped)
    fixed = run(found.fix)
    load_into({"model": blank(llama().state_dict())}, fixed)
    assert is_ok(fixed, model=model)


def test_a_prefix_of_its_trainer(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()
            self.scale = nn.Parameter(torch.ones(3))

    root = tmp_path / "ckpt-3"
    save_alone({"model": Wrapped().state_dict()}, root)
    model = config_alone(tmp_path / "model")
    with pytest.raises(Refused, match="Unexpected key"):
        llama().load_state_dict(Wrapped().state_dict())
    found = {one.code: one for one in doctor(root, model=model).findings}
    assert found.keys() == {"renamed", "unexpected"}
    assert found["renamed"].tensor == "net.*"
    assert found["renamed"].message.endswith("uses the name `*`")
    assert found["unexpected"].tensor == "scale"
    assert found["unexpected"].fix is None  # it may be trained
    fixed = run(found["renamed"].fix)
    state = load_into({"model": blank(llama().state_dict())}, fixed)
    llama().load_state_dict(state["model"])
    assert the_one(fixed, "unexpected", model=model).tensor == "scale"


def test_names_of_another_family(tmp_path: Path) -> None:
    from tests.models.names.titan_model import Titan, Widths

    root = tmp_path / "step-20"
    save_alone(dict(Titan(Widths()).state_dict()), root)
    model = config_alone(tmp_path / "model")
    shutil.copy(model / "config.json", root)
    with pytest.raises(Refused, match="Missing key"):
        load_into(blank(llama().state_dict()), root)
    assert is_ok(root)
    found = the_one(root, "family", model=model)
    assert "torchtitan" in found.message
    fixed = run(found.fix)
    _, info = from_pretrained(fixed)
    assert not info["missing_keys"]
    assert is_ok(fixed, model=model)


def test_names_of_files_where_those_in_memory_are_wanted(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path / "hf")
    save_alone({"model": load_file(tmp_path / "hf" / "model.safetensors")}, tmp_path / "ckpt-1")
    with pytest.raises(Refused, match=r"Missing key in checkpoint state_dict: model\..*experts"):
        load_into({"model": blank(model.state_dict())}, tmp_path / "ckpt-1")
    fixed = run(the_one(tmp_path / "ckpt-1", "family", model=tmp_path / "hf").fix)
    found = load_into({"model": blank(model.state_dict())}, fixed)["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert is_ok(fixed, model=tmp_path / "hf")


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    state = llama().state_dict()
    del state["model.layers.1.mlp.up_proj.weight"], state["model.layers.0.mlp.up_proj.weight"]
    root = write_hf(tmp_path / "hf", state, llama().config.to_dict())
    _, info = from_pretrained(root)
    assert info["missing_keys"]
    found = the_one(root, "missing")
    assert found.tensor == "model.layers.*.mlp.up_proj.weight"
    assert found.count == 2


def test_another_model(tmp_path: Path) -> None:
    save_alone({"model": nn.Linear(3, 4).state_dict()}, tmp_path / "ckpt-1")
    found = the_one(tmp_path / "ckpt-1", "other_model", model=config_alone(tmp_path / "model"))
    assert "expected the 21 tensors of" in found.message


def test_no_model_or_two(tmp_path: Path) -> None:
    weights = llama().state_dict()
    save_alone({"student": weights, "teacher": weights}, tmp_path / "ckpt-1")
    model = config_alone(tmp_path / "model")
    fixed = run(the_one(tmp_path / "ckpt-1", "no_model", model=model).fix)
    assert is_ok(fixed, model=model)
    save_alone({"optim": {"state": {"w": {"exp_avg": torch.ones(2)}}}}, tmp_path / "ckpt-2")
    assert the_one(tmp_path / "ckpt-2", "no_model", model=model).fix is None


def test_two_models_of_any_name(tmp_path: Path) -> None:
    weights, model = llama().state_dict(), config_alone(tmp_path / "model")
    save_alone({"Ann's [1]": weights, "teacher": weights}, tmp_path / "ckpt-1")
    assert is_ok(run(the_one(tmp_path / "ckpt-1", "no_model", model=model).fix), model=model)


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_a_model_with_another_head(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    save_alone({"model": llama().state_dict()}, tmp_path / "ckpt-1")
    other = LlamaForSequenceClassification(llama().config)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(llama().state_dict())
    found = doctor(tmp_path / "ckpt-1", model=tmp_path / "other").findings
    assert [(one.code, one.tensor) for one in found] == [("missing", "score.weight"), ("unexpected", "lm_head.weight")]
    assert is_ok(tmp_path / "other")
    assert is_ok(tmp_path / "other", model=tmp_path / "other")


def test_a_padded_vocabulary(tmp_path: Path) -> None:
    model = config_alone(tmp_path / "model")
    root = write_hf(tmp_path / "hf", llama(vocab_size=64).state_dict(), llama().config.to_dict())
    with pytest.raises(RuntimeError, match="size"):
        from_pretrained(root)
    found = doctor(root, model=model)
    assert [(one.code, one.tensor) for one in found.findings] == [
        ("vocabulary", "lm_head.weight"),
        ("vocabulary", "model.embed_tokens.weight"),
    ]
    fixed = run(found.findings[0].fix)
    loaded, _ = from_pretrained(fixed)
    assert torch.equal(loaded.lm_head.weight, llama(vocab_size=64).lm_head.weight[:40])
    save_alone({"model": llama(vocab_size=64).state_dict()}, tmp_path / "ckpt-1")
    with pytest.raises(Refused, match="Size mismatch between saved"):
        load_into({"model": blank(llama().state_dict())}, tmp_path / "ckpt-1")
    fixed = run(doctor(tmp_path / "ckpt-1", model=model).findings[0].fix)
    load_into({"model": blank(llama().state_dict())}, fixed)


def test_a_config_of_another_model(tmp_path: Path) -> None:
    root, other = saved(tmp_path / "hf"), config_alone(tmp_path / "other", intermediate_size=48)
    shutil.copy(other / "config.json", tmp_path / "kept.json")
    found = doctor(root, model=other)
    assert [one.code for one in found.findings] == ["config", "shape", "shape", "shape"]
    assert "intermediate_size 48, not 24" in found.findings[0].message
    assert found.findings[1].tensor == "model.layers.*.mlp.down_proj.weight"
    assert found.findings[0].fix is None  # it has its own config: an export would be the same model again
    from_pretrained(root)
    assert is_ok(root)


def test_one_command_fixes_all(tmp_path: Path) -> None:
    weights = {f"net.{name}": tensor for name, tensor in llama(vocab_size=64).state_dict().items()}
    weights["odd[0].inv_freq"] = torch.ones(2)  # a buffer: it may go
    model = config_alone(tmp_path / "my model's")
    root = write_hf(tmp_path / "hf", weights, llama().config.to_dict())
    found = doctor(root, model=model).findings
    assert sorted({one.code for one in found}) == ["renamed", "unexpected", "vocabulary"]
    assert len({one.fix for one in found}) == 1
    fixed = run(found[0].fix)
    _, info = from_pretrained(fixed)
    assert not info["missing_keys"]
    assert is_ok(fixed, model=model)

    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
    trained = {name: one for name, one in wrapped.items() if "inv_freq" not in name}
    save_alone({"model": wrapped, "optim": situations.half_trained(trained)}, tmp_path / "run" / "ckpt-1")
    found = doctor(tmp_path / "run", model=model, world_size=3).findings
    codes = ["optimizer_state", "renamed", "unexpected", "vocabulary", "wrapper"]
    assert sorted({one.code for one in found}) == codes
    assert len({one.fix for one in found}) == 1
    fixed = run(found[0].fix)
    assert is_ok(fixed, model=model, world_size=3)
    load_into({"model": blank(llama().state_dict())}, fixed)


def test_no_command_takes_what_may_be_trained(tmp_path: Path) -> None:
    save_alone({"model": llama(num_hidden_layers=3).state_dict()}, tmp_path / "ckpt-1")
    found = doctor(tmp_path / "ckpt-1", model=config_alone(tmp_path / "model")).findings
    assert {(one.code, one.fix) for one in found} == {("config", None), ("unexpected", None)}
    assert "2 layers of width 32 in its config, 3 layers of width 32 here" in found[0].message


def test_no_command_takes_what_the_model_calls_for(tmp_path: Path) -> None:
    """Buffers in one layer: what lies there is left out, and not the like in all layers."""
    state = llama().state_dict()
    state["model.layers.1.mlp.odd.mask"] = torch.ones(2, dtype=torch.int64)
    save_alone({"model": state}, tmp_path / "ckpt-1")
    model = config_alone(tmp_path / "model")
    found = doctor(tmp_path / "ckpt-1", model=model).findings
    assert {one.code for one in found} == {"unexpected"}
    assert str(found[0].fix).endswith("--exclude model.model.layers.1.mlp.odd.mask")
    fixed = run(found[0].fix)
    load_into({"model": blank(llama().state_dict())}, fixed)
    assert is_ok(fixed, model=model)


def test_what_a_command_fixes_while_more_is_missing(tmp_path: Path) -> None:
    """The model without its head: a rule gives it its names, and a config would refuse it."""
    llama().model.save_pretrained(tmp_path / "hf")
    model = config_alone(tmp_path / "model")
    found = {one.code: one for one in doctor(tmp_path / "hf", model=model).findings}
    assert found.keys() == {"renamed", "missing"}
    assert the_one(run(found["renamed"].fix), "missing", model=model).tensor == "lm_head.weight"


def test_wrappers_in_files_that_from_pretrained_reads(tmp_path: Path) -> None:
    root = config_alone(tmp_path / "hf")
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in llama().state_dict().items()}
    torch.save(wrapped, root / "pytorch_model.bin")
    _, info = from_pretrained(root)
    assert len(info["missing_keys"]) == len(wrapped)
    fixed = run(the_one(root, "wrapper").fix)
    _, info = from_pretrained(fixed)
    assert not info["missing_keys"]


# -- what is no plain model --------------------------------------------------------------------------------------------


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    base, adapted = saved(tmp_path / "base"), situations.adapted()
    save_alone({"model": adapted.state_dict()}, tmp_path / "ckpt-3")
    adapted.peft_config["default"].save_pretrained(tmp_path / "ckpt-3")
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    with pytest.raises(Refused, match="Missing key"):
        load_into({"model": blank(llama().state_dict())}, tmp_path / "ckpt-3")
    for place in ("ckpt-3", "adapter"):
        assert is_ok(tmp_path / place)
        fixed = run(the_one(tmp_path / place, "adapter", model=base).fix)
        loaded, info = from_pretrained(fixed)
        assert not info["missing_keys"]
        key = "model.layers.0.self_attn.q_proj.weight"
        torch.testing.assert_close(loaded.state_dict()[key], merged.state_dict()[key])


def test_quantized_weights(tmp_path: Path) -> None:
    from tests.state.quantized.quantized_models import deepseek

    root, _ = deepseek(tmp_path / "quantized")
    assert is_ok(root)
    said = json.loads((root / "config.json").read_text())
    del said["quantization_config"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(said))
    found = the_one(root, "quantized", model=tmp_path / "model")
    assert is_ok(run(found.fix), model=tmp_path / "model")


def test_state_of_modules(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def get_extra_state(self) -> torch.Tensor:
            return torch.ones(3)

        def set_extra_state(self, state: torch.Tensor) -> None:
            pass

    bare = llama()
    bare.lm_head = Scaled(32, 40, bias=False)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"lm_head._extra_state\""):
        llama().load_state_dict(bare.state_dict())
    root, model = tmp_path / "ckpt-2", config_alone(tmp_path / "model")
    save_alone({"model": bare.state_dict()}, root)
    found = the_one(root, "extra_state", model=model)
    assert found.tensor == "model.lm_head._extra_state"
    assert is_ok(run(found.fix), model=model)


# -- ties --------------------------------------------------------------------------------------------------------------


def test_a_head_that_was_trained_apart(tmp_path: Path) -> None:
    config = llama(tie_word_embeddings=True).config.to_dict()
    root = write_hf(tmp_path / "hf", llama().state_dict(), config)
    found = the_one(root, "tie")
    assert found.tensor == "lm_head.weight"


def test_a_head_that_shards_lack(tmp_path: Path) -> None:
    model = config_alone(tmp_path / "model", tie_word_embeddings=True)
    state = llama(tie_word_embeddings=True).state_dict()
    del state["lm_head.weight"]
    save_alone({"model": state}, tmp_path / "ckpt-1")
    with pytest.raises(Refused, match=r"Missing key in checkpoint state_dict: model.lm_head.weight"):
        load_into({"model": blank(llama(tie_word_embeddings=True).state_dict())}, tmp_path / "ckpt-1")
    fixed = run(the_one(tmp_path / "ckpt-1", "tie", model=model).fix)
    _, info = from_pretrained(fixed)
    assert not info["missing_keys"]


# -- the optimizer -----------------------------------------------------------------------------------------------------


def test_lbfgs_keeps_the_state_of_all_parameters_in_the_first(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(3)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    save_alone(state, tmp_path / "ckpt-1")
    assert doctor(tmp_path / "ckpt-1").findings == ()


def test_parameters_that_never_had_a_gradient(produce: Produce, tmp_path: Path) -> None:
    made = produce(situations.never_trained).root
    assert "Missing key in checkpoint state_dict: optim.state.idle.0.weight." in (made / "said").read_text()
    shutil.copytree(made / "ckpt-1", tmp_path / "ckpt-1")
    findings = doctor(tmp_path / "ckpt-1").findings
    assert [(one.code, one.tensor, one.count) for one in findings] == [
        ("optimizer_state", "optim.state.idle.*.weight", 2),
        ("optimizer_state", "optim.state.idle.*.bias", 2),
    ]
    fixed = run(findings[0].fix)
    assert is_ok(fixed, world_size=2)
    spawn(2, situations.load_idle, fixed, tmp_path / "said")
    assert (tmp_path / "said").read_text() == "loaded"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_map_of_groups_that_does_not_fit_the_states(tmp_path: Path) -> None:
    """As Megatron-FSDP saves an optimizer: `distrib_optimizer.py` of megatron-core 0.20, which needs a GPU to run.

    Weights and states are in pieces, or have the names of another version; `fsdp_dtensor_checkpoint.py` makes these.
    """
    weights = {f"module.{name}.weight": torch.ones(2) for name in "abc"}
    pieces = {
        "mlp.experts.linear_fc1.weight1": ("mlp.experts.linear_fc1.weight1_w", "mlp.experts.linear_fc1.weight1_v"),
        "in_proj.weight": tuple(f"in_proj.weight.{name}" for name in ("query", "key", "value", "z", "beta", "alpha")),
        "linear_qkv_down_proj.weight": ("linear_q_down_proj.weight", "linear_kv_down_proj.weight"),
        "self_attention.linear_qkv_down_proj.layer_norm_weight": ("input_layernorm.weight",),
        "mtp.layers.0.mtp_model_layer.weight": ("mtp.layers.0.transformer_layer.weight",),
    }
    saved = [f"module.{piece}" for several in pieces.values() for piece in several]
    states = {name: {"exp_avg": torch.ones(2)} for name in (*weights, *saved)}
    groups = {name: {"lr": 1e-3, "step": 7} for name in (*weights, *(f"module.{name}" for name in pieces))}
    good = {"state": states, "param_to_group_meta": groups}
    dcp.save({"model": weights, "optimizer": good}, checkpoint_id=tmp_path / "good", no_dist=True)
    assert "group_map" not in {one.code for one in doctor(tmp_path / "good").findings}
    groups["module.d.weight"] = groups.pop("module.a.weight")
    dcp.save({"model": weights, "optimizer": good}, checkpoint_id=tmp_path / "bad", no_dist=True)
    found = [one.tensor for one in doctor(tmp_path / "bad").findings if one.code == "group_map"]
    assert found == [
        "optimizer.state.module.a.weight",
        "optimizer.param_to_group_meta.module.d.weight",
    ]


def groups_of(*lists: list[str]) -> dict[str, Any]:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    optimizer = torch.optim.AdamW([{"params": [model[name].weight for name in names]} for names in lists])
    sum(layer(torch.ones(2)).sum() for layer in model.values()).backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("other", "words"),
    [((["a", "b", "c"],), "different number of parameter groups"), ((["a"], ["b", "c"]), "doesn't match the size")],
)
def test_groups_of_another_optimizer(tmp_path: Path, other: tuple[list[str], ...], words: str) -> None:
    torch.save(groups_of(["a", "b"], ["c"]), tmp_path / "one.pt")
    torch.save(groups_of(*other), tmp_path / "two.pt")
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    optimizer = torch.optim.AdamW([{"params": [model[name].weight for name in names]} for names in other])
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(torch.load(tmp_path / "one.pt")["optimizer"])
    found = the_one(tmp_path / "one.pt", "groups", like=tmp_path / "two.pt")
    assert words in found.message
    assert is_ok(tmp_path / "two.pt", like=tmp_path / "two.pt")


# -- another checkpoint that loads -------------------------------------------------------------------------------------


def test_dtypes_that_a_load_converts_in_silence(tmp_path: Path) -> None:
    wide = {f"layers.{i}.w": torch.randn(3, 2) for i in range(3)}
    narrow = {name: tensor.bfloat16() for name, tensor in wide.items()}
    save_alone({"model": wide, "optim": {"lr": 0.1}}, tmp_path / "ckpt-1")
    save_alone({"model": narrow, "optim": {"lr": 0.1}}, tmp_path / "ckpt-2")
    loaded = load_into({"model": blank(narrow)}, tmp_path / "ckpt-1")
    assert torch.equal(loaded["model"]["layers.0.w"], narrow["layers.0.w"])  # rounded, and nothing was said
    found = the_one(tmp_path / "ckpt-1", "dtype", like=tmp_path / "ckpt-2")
    assert (found.tensor, found.count) == ("model.layers.*.w", 3)
    assert is_ok(run(found.fix), like=tmp_path / "ckpt-2")


def test_dtypes_of_moments(tmp_path: Path) -> None:
    weights = llama().state_dict()
    moments = {name: {"exp_avg": torch.ones_like(one), "step": torch.tensor(1.0)} for name, one in weights.items()}
    save_alone({"model": weights, "optim": {"state": moments}}, tmp_path / "ckpt-1")
    for one in moments.values():
        one["exp_avg"] = one["exp_avg"].bfloat16()
    save_alone({"model": weights, "optim": {"state": moments}}, tmp_path / "ckpt-2")
    found = the_one(tmp_path / "ckpt-1", "dtype", like=tmp_path / "ckpt-2")
    assert str(found.fix).endswith("--dtype '*.exp_avg=bfloat16'")
    assert is_ok(run(found.fix), like=tmp_path / "ckpt-2")


def test_what_another_checkpoint_has_more_of(tmp_path: Path) -> None:
    a, b = ({"model": {"w": torch.ones(2)}, "optim": {"lr": 1, **more}} for more in ({}, {"amsgrad": False}))
    save_alone(a, tmp_path / "ckpt-1")
    save_alone(b, tmp_path / "ckpt-2")
    with pytest.raises(Refused, match=r"Missing key in checkpoint state_dict: optim\.amsgrad"):
        load_into({"optim": {"lr": 0, "amsgrad": True}}, tmp_path / "ckpt-1")
    assert the_one(tmp_path / "ckpt-1", "missing", like=tmp_path / "ckpt-2").tensor == "optim.amsgrad"
    assert is_ok(tmp_path / "ckpt-2", like=tmp_path / "ckpt-1")


def test_another_key_and_other_names(tmp_path: Path) -> None:
    layers = {f"layers.{i}.{kind}": torch.randn(2, 2) for i in range(3) for kind in ("up", "down")}
    save_alone({f"net.{name}": tensor for name, tensor in layers.items()}, tmp_path / "ckpt-1")
    save_alone({"model": layers}, tmp_path / "ckpt-2")
    found = {one.code: one for one in doctor(tmp_path / "ckpt-1", like=tmp_path / "ckpt-2").findings}
    assert found.keys() == {"key", "renamed"}
    assert found["renamed"].fix == found["key"].fix
    fixed = run(found["key"].fix)
    load_into({"model": blank(layers)}, fixed)
    assert is_ok(fixed, like=tmp_path / "ckpt-2")


def test_a_rate_that_became_a_tensor(tmp_path: Path) -> None:
    rate, tensor = ({"optim": {"param_groups": [{"lr": lr}]}} for lr in (0.1, torch.tensor(0.1)))
    save_alone({"w": torch.ones(2), **rate}, tmp_path / "ckpt-1")
    save_alone({"w": torch.ones(2), **tensor}, tmp_path / "ckpt-2")
    load_into(tensor, tmp_path / "ckpt-1")
    assert is_ok(tmp_path / "ckpt-1", like=tmp_path / "ckpt-2")
    with pytest.raises(Refused, match=r"Invalid checkpoint metadata for optim.param_groups.0.lr") as raised:
        load_into(rate, tmp_path / "ckpt-2")
    found = the_one(tmp_path / "ckpt-2", "kind", like=tmp_path / "ckpt-1")
    (said,) = ckptkit.explain(raised.value, tmp_path / "ckpt-2")
    assert (said.code, said.tensor) == (found.code, found.tensor) == ("kind", "optim.param_groups.0.lr")


# -- ranks and files ---------------------------------------------------------------------------------------------------


def test_files_of_another_number_of_ranks(produce: Produce, tmp_path: Path) -> None:
    from tests.trainers.produced_ranks import three_ranks

    made = produce(three_ranks).root
    source = next(path.parent for path in sorted(made.rglob("model_world_size_3_rank_0.pt")))
    root = tmp_path / "global_step_3"
    shutil.copytree(source, root)
    assert is_ok(root, world_size=3)
    found = doctor(root, world_size=2)
    assert {one.code for one in found.findings} <= {"world_size", "rank_state"}
    fixed = run(found.findings[0].fix)
    assert (fixed / "model_world_size_2_rank_1.pt").exists()
    assert is_ok(fixed, world_size=2)


def test_shards_of_another_node(produce: Produce, tmp_path: Path) -> None:
    root = tmp_path / "ckpt-9"
    shutil.copytree(produce(producers.fsdp2).root, root)
    (root / "__1_0.distcp").unlink()
    weights = {"model": {"up.weight": torch.zeros(7, 6)}}
    with pytest.raises((*Refused, FileNotFoundError), match=r"__1_0\.distcp"):
        load_into(weights, root)
    found = the_one(root, "incomplete")
    assert "__1_0.distcp" in found.message
    assert "--also" in found.message
    other = tmp_path / "other" / "ckpt-9"
    other.mkdir(parents=True)
    shutil.copy(produce(producers.fsdp2).root / "__1_0.distcp", other)
    assert is_ok(Checkpoint.open(root, also=[other]))
    assert cli("doctor", root, "--also", other).returncode == 0
    ckptkit.reshard(Checkpoint.open(root, also=[other]), tmp_path / "whole", to=2)
    load_into(weights, tmp_path / "whole")


def test_commands_name_all_directories(produce: Produce, tmp_path: Path) -> None:
    shutil.copytree(produce(situations.never_trained).root / "ckpt-1", tmp_path / "one" / "ckpt-1")
    (tmp_path / "two" / "ckpt-1").mkdir(parents=True)
    shutil.move(tmp_path / "one" / "ckpt-1" / "__1_0.distcp", tmp_path / "two" / "ckpt-1")
    alone = the_one(tmp_path / "one" / "ckpt-1", "incomplete")
    assert alone.fix is None  # a part of every tensor is lost, and there is nothing to take it from
    both = Checkpoint.open(tmp_path / "one" / "ckpt-1", also=[tmp_path / "two" / "ckpt-1"])
    assert is_ok(run(doctor(both).findings[0].fix))


def test_a_command_that_would_be_refused_is_not_named(produce: Produce, tmp_path: Path) -> None:
    from tests.trainers.produced_ranks import flat_by_config

    shutil.copytree(produce(flat_by_config).root / "by-hand", tmp_path / "run")
    fixed = run(the_one(tmp_path / "run", "world_size", world_size=5).fix)  # its own names are not written
    assert (fixed / ".metadata").is_file()
    assert is_ok(fixed, world_size=5)
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from tests.trainers.produced_experts import experts

    found = doctor(produce(experts).root / "zero1", world_size=5)
    assert [(one.code, one.fix) for one in found.findings] == [("world_size", None)]
    assert any("would fail with: this is an expert" in note for note in found.notes)


def test_a_lost_shard_is_taken_from_an_earlier_step(produce: Produce, tmp_path: Path) -> None:
    root, earlier = tmp_path / "ckpt-9", tmp_path / "ckpt-8"
    for path in (root, earlier):
        shutil.copytree(produce(producers.fsdp2).root, path)
    (root / "__1_0.distcp").unlink()
    found = the_one(root, "incomplete")
    assert "ckpt-8 beside it is complete" in found.message
    (remark,) = (note for note in doctor(root).notes if "keeps" in note)
    assert (
        "keeps 5 of 15 weights (71 B, 6.1% of the bytes), takes 10 of 15 weights (1.08 KB, 93.8% of the bytes) from"
        in remark
    )
    fixed = run(found.fix)
    assert (fixed / "salvage.json").is_file()
    assert is_ok(fixed, like=earlier)
    load_into({"model": {"up.weight": torch.zeros(7, 6)}}, fixed)


def test_a_salvage_without_weights_is_not_suggested(tmp_path: Path) -> None:
    """Of FSDP2 every rank has rows of every weight: what is whole without one of them are counters of steps."""
    root = lacks_a_rank(tmp_path)
    found = doctor(root)
    assert [(one.code, one.fix) for one in found.findings] == [("incomplete", None)]
    assert any("all 3 weights lost some data" in note and "--fill-from OTHER" in note for note in found.notes)
    earlier = Path(shutil.copytree(tmp_path / "whole", root.with_name("ckpt-8")))
    assert doctor(root).findings[0].fix == f"ckptkit doctor {earlier}"  # all weights would be those of this one


@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - UNSEEN))
def test_damage_is_found(produce: Produce, tmp_path: Path, damage: str) -> None:
    root = tmp_path / "ckpt-9"
    shutil.copytree(produce(producers.fsdp2).root, root)
    make, _, words = DAMAGES[damage]
    make(root)
    found = doctor(root)
    assert any(words in one.message for one in found.findings), found
    assert {one.code for one in found.findings} <= {"incomplete", "corrupt", "unsafe", "unsupported"}


def test_a_save_that_did_not_finish(produce: Produce, tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(produce(producers.fsdp2).root, tmp_path / "run" / f"ckpt-{step}")
    (tmp_path / "run" / "ckpt-2" / ".metadata").unlink()
    with pytest.raises((*Refused, FileNotFoundError)):
        load_into({"model": {"up.weight": torch.zeros(7, 6)}}, tmp_path / "run" / "ckpt-2")
    found = doctor(tmp_path / "run" / "ckpt-2")
    assert [one.code for one in found.findings] == ["incomplete"]
    assert "did not finish" in found.findings[0].message
    fixed = run(found.findings[0].fix)  # by the metadata of the earlier step
    assert is_ok(fixed, like=tmp_path / "run" / "ckpt-1")
    assert "ckpt-2" in doctor(tmp_path / "run").notes[0]
    assert is_ok(tmp_path / "run")


def test_metadata_of_a_later_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.15 writes them: a sixth item, the strides."""
    get_state = TensorProperties.__getstate__
    weights = {"model": {"w": torch.arange(6.0)}}
    with monkeypatch.context() as later:
        later.setattr(TensorProperties, "__getstate__", lambda properties: (*get_state(properties), None))
        save_alone(weights, tmp_path / "ckpt-1")
    try:
        load_into({"model": {"w": torch.zeros(6)}}, tmp_path / "ckpt-1")
    except Refused:
        found = the_one(tmp_path / "ckpt-1", "torch_version")
        state = load_into({"model": {"w": torch.zeros(6)}}, run(found.fix))
        assert torch.equal(state["model"]["w"], weights["model"]["w"])
    else:  # the torch that runs this test is as late as that
        assert is_ok(tmp_path / "ckpt-1")


# -- asking ------------------------------------------------------------------------------------------------------------


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        doctor(tmp_path / "nothing")
    save_alone({"model": {"w": torch.ones(2)}}, tmp_path / "ckpt-1")
    with pytest.raises((NotACheckpoint, Usage)):
        doctor(tmp_path / "ckpt-1", model=tmp_path / "nothing")
    with pytest.raises(Usage):
        doctor(tmp_path / "ckpt-1", world_size=0)


def test_the_command(tmp_path: Path) -> None:
    model = config_alone(tmp_path / "model", num_hidden_layers=4)
    save_alone({"model": llama(vocab_size=64).state_dict()}, tmp_path / "ckpt-1")
    words = ["doctor", tmp_path / "ckpt-1", "--model", model]
    done = cli(*words)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["finding", "tensor:", "problem"]
    assert any(f"expected 4 layers as in {model}, found 2; missing: 2, 3 (18 tensors)" in line for line in lines)
    assert any(line.startswith("fixes ") and "--vocab-size 40" in line for line in lines)
    assert lines[-1].endswith("findings")
    found = json.loads(cli(*words, "--json").stdout)
    assert found["ok"] is False
    assert {"code", "tensor", "message", "fix"} <= found["findings"][0].keys()
    healthy = cli(*words[:2])
    verdict = f"{tmp_path / 'ckpt-1'}: no problem found in names, shapes and metadata\n"
    assert (healthy.returncode, healthy.stdout) == (0, verdict)


@pytest.mark.parametrize("fault", ["rank", "alone"])
def test_an_adapter_that_no_base_can_be_merged_with(fault: str, tmp_path: Path) -> None:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    matrices = {f"{module}.lora_{kind}.weight": torch.ones(4, 4) for kind in ("A" if fault == "alone" else "AB")}
    save_file(matrices, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8 if fault == "rank" else 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (finding,) = doctor(tmp_path).findings
    assert finding.code == "adapter_misfit"
    assert ("expected rank 8" if fault == "rank" else "the matching lora_B") in finding.message


@pytest.mark.parametrize("above", ["optim", ""])
def test_states_under_another_prefix_are_not_missing(tmp_path: Path, above: str) -> None:
    optimizer = {
        "state": {"policy.a": {"exp_avg": torch.ones(4, 4), "step": torch.tensor(3.0)}},
        "param_groups": [{"params": ["policy.a", "policy.b"], "lr": 0.1}],
    }
    model = {name: torch.ones(4, 4) for name in ("a", "b")}
    save_alone({"model": model, **({above: optimizer} if above else optimizer)}, tmp_path / "ckpt-3")
    assert [finding.code for finding in ckptkit.doctor(tmp_path / "ckpt-3").findings] == ["prefixed_state"]


def test_layers_that_the_model_does_not_have_are_not_expected(tmp_path: Path) -> None:
    state = {
        name: tensor for name, tensor in llama(num_hidden_layers=6).state_dict().items() if ".layers.2." not in name
    }
    save_alone({"model": state}, tmp_path / "ckpt-1")
    model = config_alone(tmp_path / "model", num_hidden_layers=4)
    (layers,) = [one for one in doctor(tmp_path / "ckpt-1", model=model).findings if one.code == "layers"]
    assert layers.message == f"expected 4 layers as in {model}, found 3; missing: 2 (9 tensors)"


@pytest.mark.parametrize(("lost", "numbers"), [("12", "found 2; missing: 1, 2"), ("3", "found 3; missing: 3")])
def test_missing_layers_are_one_line_with_their_numbers(tmp_path: Path, lost: str, numbers: str) -> None:
    state = llama(num_hidden_layers=4).state_dict()
    for name in list(state):
        if any(f".layers.{number}." in name for number in lost):
            del state[name]
    del state["model.layers.0.mlp.up_proj.weight"]
    save_alone({"model": state}, tmp_path / "ckpt-1")
    model = config_alone(tmp_path / "model", num_hidden_layers=4)
    found = doctor(tmp_path / "ckpt-1", model=model).findings
    (layers,) = [finding for finding in found if finding.code == "layers"]
    assert layers.message == f"expected 4 layers as in {model}, {numbers} ({9 * len(lost)} tensors)"
    names = [finding.tensor for finding in found if finding.code == "missing"]
    assert names == ["model.layers.0.mlp.up_proj.weight"]


def test_a_config_with_fewer_layers_than_the_checkpoint(tmp_path: Path) -> None:
    root = config_alone(tmp_path / "ckpt-1", num_hidden_layers=1)
    save_alone({"model": llama(num_hidden_layers=3).state_dict()}, root)
    found = the_one(root, "unexpected")
    assert found.message.startswith(f"{root}/config.json has fewer layers")
    assert len(found.names) == 18
    done = ckptkit.consolidate(root, tmp_path / "out")
    assert any("kept 18 tensors" in words and "loaders skip them" in words for words in done.warnings)
