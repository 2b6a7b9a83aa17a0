"""Masters of weights in an optimizer: whole ones, and remainders that complete weights in bfloat16."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

import ckptkit
from ckptkit.errors import Mismatch, Unsupported, Usage

FC, NORM = "decoder.layers.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"
TIE = 0x3F808000  # in the middle between two numbers of bfloat16, of which the lower one is even


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """What TransformerEngine keeps of a master in fp32: the weight in bfloat16, and the remainder in int16.

    As the kernel does it (transformer_engine/common/multi_tensor/adam.cu, AdamFunctorMasterParamRemainder): the halves
    of the bits as int16, and `if (local_p_rem < 0) local_p++;  // Round up`.
    """
    lower, upper = master.contiguous().view(torch.int16).reshape(*master.shape, 2).unbind(-1)
    return torch.where(lower < 0, upper + 1, upper).view(torch.bfloat16), lower.clone()


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The master again, as the kernel does it: `if (local_p_rem < 0) local_p--;  // Undo rounding`."""
    upper = weight.view(torch.int16)
    upper = torch.where(remainder < 0, upper - 1, upper)
    return torch.stack([remainder, upper], -1).view(torch.float32).squeeze(-1)


def some_masters() -> dict[str, Tensor]:
    """Masters with all that is special about their bits."""
    bits = [TIE, TIE + 1, TIE - 1, TIE + 0x10000, 0, -(2**31), -(2**31) + 1, 1, 0x7FFF, 0x8000, 0xFFFF, 0x10000]
    special = torch.tensor([*bits, *(bit - 2**31 for bit in bits if bit >= 0)], dtype=torch.int32).view(torch.float32)
    generator = torch.Generator().manual_seed(1)
    return {FC: torch.randn(2, 6, 5, generator=generator), NORM: special}


def save(root: Path, state: dict[str, Any], *, by_torch: bool = False) -> Path:
    """Save a state dict as Megatron does, or nested as torch does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=root, planner=dcp.DefaultSavePlanner(flatten_state_dict=by_torch), no_dist=True)
    if not by_torch:
        (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return root


def save_megatron(root: Path, kind: str, masters: dict[str, Tensor], *, as_floats: bool = False) -> Path:
    """A checkpoint of Megatron with remainders under the name of the master."""
    state: dict[str, Any] = {}
    for name, master in masters.items():
        weight, remainder = split(master)
        state |= {name: weight, f"optimizer.state.{kind}.{name}": remainder.float() if as_floats else remainder}
        state[f"optimizer.state.exp_avg.{name}"] = torch.zeros_like(master)
    return save(root, state)


def consolidated(root: Path, out: Path, **options: Any) -> dict[str, Tensor]:
    ckptkit.consolidate(root, out, names="keep", **options)
    return load_file(out / "model.safetensors")


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def test_the_oracle_is_its_own_inverse() -> None:
    for master in some_masters().values():
        assert torch.equal(join(*split(master)).view(torch.int32), master.view(torch.int32))


@pytest.mark.parametrize(
    ("kind", "as_floats"), [("fp32_param", False), ("param", False), ("param", True)], ids=["int16", "param", "floats"]
)
def test_remainders_of_megatron_complete_the_weights(tmp_path: Path, kind: str, as_floats: bool) -> None:
    masters = some_masters()
    root = save_megatron(tmp_path / "iter_0000003", kind, masters, as_floats=as_floats)
    assert_same_bits(consolidated(root, tmp_path / "out", weights_from="master"), masters)
    found = consolidated(root, tmp_path / "fp16", weights_from="master", dtype="fp16", exclude=f"*{NORM}")
    assert torch.equal(found[FC], masters[FC].half())


def test_a_tie_is_rounded_up_by_the_kernel_and_not_to_even() -> None:
    master = torch.tensor([TIE], dtype=torch.int32).view(torch.float32)
    weight, remainder = split(master)
    assert (weight != master.bfloat16()).all()
    assert torch.equal(join(weight, remainder), master)


def test_whole_masters_are_taken_and_those_that_do_not_fit_are_not(tmp_path: Path) -> None:
    masters = some_masters()
    masters[NORM] = masters[NORM].bfloat16().float()  # as frozen weights are
    state = {name: master.bfloat16() for name, master in masters.items()}
    root = save(
        tmp_path / "run", {**state, **{f"optimizer.state.fp32_param.{name}": masters[name] for name in masters}}
    )
    assert_same_bits(consolidated(root, tmp_path / "out", weights_from="master"), masters)
    (found,) = ckptkit.verify(root)
    assert found.is_ok
    assert found.notes[-1] == "2 tensors equal their rounded copies"
    masters[FC][1, 2, 3] += 4
    other = {f"optimizer.state.fp32_param.{name}": masters[name] for name in masters}
    wrong = save(tmp_path / "wrong", {**state, **other})
    (found,) = ckptkit.verify(wrong)
    (problem,) = found.problems
    assert problem.tensor == f"optimizer.state.fp32_param.{FC}"
    assert problem.message == "1 of 60 elements differ from the copy in bfloat16, by up to 4"
    with pytest.raises(Mismatch, match="differ from the master"):
        consolidated(wrong, tmp_path / "never", weights_from="master")
    assert not (tmp_path / "never").exists()


def test_verify_knows_remainders_however_they_are_saved(tmp_path: Path) -> None:
    (found,) = ckptkit.verify(save_megatron(tmp_path / "int16", "param", some_masters()))
    assert found.is_ok
    assert "2 weights" in found.notes[-1]
    assert "int16" in found.notes[-1]
    (found,) = ckptkit.verify(save_megatron(tmp_path / "floats", "param", some_masters(), as_floats=True))
    assert found.is_ok
    assert "remainders, saved as floats: 2 masters" in found.notes[-1]


@pytest.mark.parametrize("by_torch", [True, False], ids=["nested", "flattened"])
def test_remainders_by_the_names_of_torch_with_a_frozen_weight(tmp_path: Path, by_torch: bool) -> None:
    masters = some_masters()
    parts = {name: split(master) for name, master in masters.items()}
    model = {name: weight for name, (weight, _) in parts.items()}
    states = {FC: {"master_param": parts[FC][1], "exp_avg": torch.zeros(2, 6, 5), "step": torch.tensor(1.0)}}
    optimizer: dict[str, Any] = {"state": states, "param_groups": [{"params": [FC], "lr": 0.1}]}
    if not by_torch:
        optimizer = {f"state.{FC}.{key}": value for key, value in states[FC].items()}
        optimizer[f"param_groups.{FC}.lr"] = 0.1
    root = save(tmp_path / "run", {"model": model, "optimizer": optimizer}, by_torch=True)
    out = tmp_path / "out"
    done = ckptkit.consolidate(root, out, names="keep", weights_from="master")
    assert_same_bits(load_file(out / "model.safetensors"), {FC: masters[FC], NORM: model[NORM]})
    assert "1 weight taken from masters, 1 of them from remainders in int16" in done.notes
    assert f"no master: 1 weight, such as `{NORM}`" in done.notes
    assert any("remainders of the masters of 1 weight in int16" in note for note in ckptkit.doctor(root).notes)
    # without the option they stay what they are, and are named
    done = ckptkit.consolidate(root, tmp_path / "plain", names="keep")
    assert_same_bits(load_file(tmp_path / "plain" / "model.safetensors"), model)
    assert any("--weights-from master adds them" in note for note in done.notes)
    ckptkit.reshard(root, tmp_path / "resharded", to=2)
    assert ckptkit.diff(root, tmp_path / "resharded").is_equal


def test_masters_in_another_part_and_the_work_in_parts(tmp_path: Path) -> None:
    masters = some_masters()
    parts = {name: split(master) for name, master in masters.items()}
    root = tmp_path / "epoch_0_step_3"
    save(root / "model", {name: weight for name, (weight, _) in parts.items()}, by_torch=True)
    states = {name: {"master_param": remainder} for name, (_, remainder) in parts.items()}
    groups = [{"params": list(masters), "lr": 0.1}]
    save(root / "optim", {"optim": {"state": states, "param_groups": groups}}, by_torch=True)
    (root / "losses.json").write_text("{}")
    for number in (1, 2):
        ckptkit.consolidate(root, tmp_path / "out", names="keep", weights_from="master", part=f"{number}/2")
    ckptkit.finalize(tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), masters)
    found = ckptkit.verify(root)
    assert all(part.is_ok for part in found)
    assert any("2 weights" in note for note in found[0].notes)
    wrong = {"optim": {"state": {NORM: {"master_param": masters[NORM] + 1}}, "param_groups": groups}}
    save(root / "optim", wrong, by_torch=True)
    assert [problem.tensor for part in ckptkit.verify(root) for problem in part.problems] == [
        f"optim.state.{NORM}.master_param"
    ]


def test_masters_follow_their_weights_to_the_names_of_the_hub(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=2, tie_word_embeddings=False, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hub")
    ckptkit.convert(tmp_path / "hub", tmp_path / "megatron", to="dcp", names="megatron")
    masters = {name: tensor.torch() for name, tensor in ckptkit.open(tmp_path / "megatron").items()}
    root = save_megatron(tmp_path / "run", "fp32_param", masters)
    ckptkit.consolidate(root, tmp_path / "out", base=tmp_path / "hub", weights_from="master")
    wanted = load_file(tmp_path / "hub" / "model.safetensors")
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), wanted)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    masters = some_masters()
    root = save_megatron(tmp_path / "run", "param", masters)
    weights = {name: split(master)[0] for name, master in masters.items()}
    bare = save(tmp_path / "bare", dict(weights))
    with pytest.raises(Mismatch, match="no optimizer in the checkpoint lists master weights"):
        consolidated(bare, tmp_path / "out", weights_from="master")
    with pytest.raises(Usage, match="needs an output that is a model"):
        ckptkit.convert(root, tmp_path / "out", to="dcp", weights_from="master")
    with pytest.raises(Usage, match="does not work with `average`"):
        consolidated(root, tmp_path / "out", weights_from="master", salvage=True)
    with pytest.raises(Unsupported, match="which the optimizer completes by remainders in int16"):
        ckptkit.convert(root, tmp_path / "out", to="dcp", dtype="fp16")
    ckptkit.convert(root, tmp_path / "alone", to="dcp", dtype="fp16", exclude="optimizer.*")
    state = {**weights, f"optimizer.state.param.{FC}": torch.zeros(7, dtype=torch.int16)}
    odd = save(tmp_path / "odd", state)
    with pytest.raises(Mismatch, match="expected an fp32 master for"):
        consolidated(odd, tmp_path / "out", weights_from="master")
    half = save(tmp_path / "half", {FC: weights[FC].half(), f"optimizer.state.param.{FC}": split(masters[FC])[1]})
    with pytest.raises(Mismatch, match="float16"):
        consolidated(half, tmp_path / "out", weights_from="master")
    assert not (tmp_path / "out").exists()
