"""Adapters of experts in the forms of each library. PEFT's merge is the judge of what it loads, else its formula is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptkit
from ckptkit.errors import CkptError
from ckptkit.models.names.sizes import expert_names_of_type
from ckptkit.plugins.expert_adapters.convert import SEPARATE
from tests.adapters.test_experts import BLOCKS, COUNT, FIXED, in_blocks, of_experts, record
from tests.adapters.test_merge import ADAPTER, EXPERTS, MODEL, SAID, Made, assert_merged, edit, tiny_mixtral

peft = pytest.importorskip("peft", reason="PEFT is the judge of adapters")

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

HOME = "base_model.model.model.layers.0.mlp.experts"
RANK, HIDDEN, WIDTH = 4, 24, 36
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return of_experts(tiny_mixtral, tmp_path_factory.mktemp("forms"), target_parameters=EXPERTS)


def convert(source: Path, out: Path, form: str, **more: Any) -> Weights:
    ckptkit.convert(source, out, to="adapter", experts=form, **more)
    return load_file(out / ADAPTER)


def merged_by_peft(adapter: Path) -> Weights:
    model = peft.PeftModel.from_pretrained(tiny_mixtral(), adapter)
    return {name: tensor.clone() for name, tensor in model.merge_and_unload().state_dict().items()}


def assert_same(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def apart(weights: Weights) -> Weights:
    """A `[E, r, in]` and B `[E, out, r]`, as `ParamWrapper.get_delta_factors` of PEFT has them."""
    found = {}
    for inner, leaf in ((".base_layer", "gate_up_proj"), ("", "down_proj")):
        a, b = (weights[f"{HOME}{inner}.lora_{kind}.weight"] for kind in "AB")
        found[f"{leaf}.lora_A.weight"] = a.reshape(COUNT, -1, a.shape[-1])
        found[f"{leaf}.lora_B.weight"] = b.reshape(len(b), -1, COUNT).permute(2, 0, 1)
    return found


def as_adapter(made: Made, home: Path, weights: Weights, **said: Any) -> Path:
    """An adapter with other matrices of experts."""
    shutil.copytree(made.saved, home)
    others = {name: tensor for name, tensor in load_file(home / ADAPTER).items() if ".experts." not in name}
    save_file({**others, **{name: tensor.contiguous() for name, tensor in weights.items()}}, home / ADAPTER)
    edit(home / SAID, **said)
    return home


def test_every_form_means_the_same(made: Made, tmp_path: Path) -> None:
    original = load_file(made.saved / ADAPTER)
    three = convert(made.saved, tmp_path / "3d", "3d")
    assert_same({name: three[f"{HOME}.{name}"] for name in apart(original)}, apart(original))
    assert_same(convert(tmp_path / "3d", tmp_path / "flat", "flat"), original)
    each = convert(made.saved, tmp_path / "each", "per-expert", base=made.base)
    place = HOME.replace("mlp", "block_sparse_moe")
    for name, whole in apart(original).items():
        leaf, _, rest = name.partition(".")
        for expert in range(COUNT):
            rows = whole[expert].chunk(2) if leaf == "gate_up_proj" and "lora_B" in name else [whole[expert]] * 2
            for own, tensor in zip(("w1", "w3") if leaf == "gate_up_proj" else ("w2",), rows, strict=False):
                assert torch.equal(each[f"{place}.{expert}.{own}.{rest}"], tensor)
    assert len(each) == 2 + 2 * 3 * COUNT
    fused = convert(tmp_path / "each", tmp_path / "fused", "flat")
    assert fused[f"{HOME}.base_layer.lora_A.weight"].shape == (COUNT * 2 * RANK, HIDDEN)
    truth = merged_by_peft(made.saved)
    for form in ("flat", "each", "fused"):
        assert_same(merged_by_peft(tmp_path / form), truth)
    for form in ("flat", "3d", "each", "fused"):  # two ranks in one matrix are summed in another order
        ckptkit.merge(made.base, tmp_path / form, tmp_path / f"of-{form}")
        found = load_file(tmp_path / f"of-{form}" / MODEL)
        for name, tensor in load_file(made.saved.parent / "truth" / MODEL).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


def test_the_stacks_that_megatron_bridge_makes_for_vllm(made: Made, tmp_path: Path) -> None:
    """`stack_3d_moe`: what vLLM's own reshape of PEFT's matrices gives, with the experts last in B."""
    original = load_file(made.saved / ADAPTER)
    stacked = {}
    for name, tensor in original.items():
        if ".experts." in name:
            shape = (COUNT, -1, tensor.shape[-1]) if "lora_A" in name else (len(tensor), -1, COUNT)
            stacked[name] = tensor.reshape(shape)
    adapter = as_adapter(made, tmp_path / "stacked", stacked)
    assert_same(convert(adapter, tmp_path / "flat", "flat"), original)
    assert_same(convert(adapter, tmp_path / "3d", "3d"), convert(made.saved, tmp_path / "other", "3d"))
    ckptkit.merge(made.base, adapter, tmp_path / "out")
    assert_merged(tmp_path / "out", load_file(made.saved.parent / "truth" / MODEL))


def test_blocks_of_unsloth_become_what_peft_loads(made: Made, tmp_path: Path) -> None:
    """With its record, or as you say it; the output says by itself which layout it has."""
    original, adapter = load_file(made.saved / ADAPTER), in_blocks(made, tmp_path / "blocks")
    edit(adapter / SAID, **FIXED)
    for form, base in (("flat", None), ("3d", None), ("per-expert", made.base)):
        with pytest.raises(CkptError, match="no file records the layout of lora_B for 3 experts of rank 4"):
            convert(adapter, tmp_path / "never", form, base=base)
    assert_same(convert(adapter, tmp_path / "asked", "flat", experts_layout="blocks"), original)
    edit(adapter / SAID, **record(*BLOCKS))
    assert_same(convert(adapter, tmp_path / "recorded", "flat"), original)
    assert_same(merged_by_peft(tmp_path / "recorded"), merged_by_peft(made.saved))
    for name in ("asked", "recorded"):
        ckptkit.merge(made.base, tmp_path / name, tmp_path / f"of-{name}")
        assert_merged(tmp_path / f"of-{name}", load_file(made.saved.parent / "truth" / MODEL))


def test_peft_018_took_weights_the_other_way_round(made: Made, tmp_path: Path) -> None:
    """Then A has the columns of the outputs: `einsum("o r e, e r i -> e i o", B, A)` for a weight `[out, in]`."""
    original, turned = load_file(made.saved / ADAPTER), {}
    for name, tensor in apart(original).items():
        inner = ".base_layer" if "gate_up" in name else ""
        if "lora_A" in name:  # [E, r, in] becomes B [in, r*E]
            turned[f"{HOME}{inner}.lora_B.weight"] = tensor.permute(2, 1, 0).reshape(tensor.shape[2], -1)
        else:
            turned[f"{HOME}{inner}.lora_A.weight"] = tensor.permute(0, 2, 1).reshape(-1, tensor.shape[1])
    adapter = as_adapter(made, tmp_path / "old", turned, peft_version="0.18.0")
    assert_same(convert(adapter, tmp_path / "flat", "flat"), original)
    one = {name: tensor for name, tensor in turned.items() if "base_layer" not in name}
    alone = as_adapter(made, tmp_path / "alone", one, target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(CkptError, match=r"`down_proj` \[\d+, \d+\]: only the base shows which side"):
        convert(alone, tmp_path / "never", "flat")
    found = convert(alone, tmp_path / "one", "flat", base=made.base)
    assert_same({name: found[name] for name in one}, {name: original[name] for name in one})


@pytest.mark.parametrize("shared", ["A", "B", "none"])
def test_matrices_that_all_experts_share(made: Made, tmp_path: Path, shared: str) -> None:
    """As Tinker names and saves them: one matrix for all experts on one side, and gate and up apart."""
    torch.manual_seed(1)
    weights: Weights = {}
    sums: Weights = {}
    for own, (rows, columns) in {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}.items():
        a = torch.randn(1 if shared == "A" else COUNT, RANK, columns)
        b = torch.randn(1 if shared == "B" else COUNT, rows, RANK)
        weights |= {f"{HOME}.{own}.lora_A.weight": a, f"{HOME}.{own}.lora_B.weight": b}
        sums[own] = 7 / RANK * (b @ a).expand(COUNT, rows, columns)
    targets = ["q_proj", "w1", "w2", "w3"]
    adapter = as_adapter(made, tmp_path / "tinker", weights, target_modules=targets, target_parameters=None)
    base = tiny_mixtral().state_dict()
    convert(adapter, tmp_path / "flat", "flat")
    convert(adapter, tmp_path / "each", "per-expert", base=made.base)
    wanted = {"gate_up_proj": torch.cat([sums["w1"], sums["w3"]], 1), "down_proj": sums["w2"]}
    for form in ("flat", "each"):
        found = merged_by_peft(tmp_path / form)
        for leaf, change in wanted.items():
            name = f"model.layers.0.mlp.experts.{leaf}"
            torch.testing.assert_close(found[name], base[name] + change, rtol=1e-5, atol=1e-5)
    inspected = ckptkit.inspect(adapter).adapters[0]
    assert inspected.rows == (RANK,)


def test_scalings_stay_what_they_are(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate_up_proj": 5}, "use_rslora": True}
    made = of_experts(tiny_mixtral, tmp_path, target_parameters=EXPERTS, **patterns)
    truth = merged_by_peft(made.saved)
    convert(made.saved, tmp_path / "3d", "3d")
    convert(tmp_path / "3d", tmp_path / "flat", "flat")
    assert_same(merged_by_peft(tmp_path / "flat"), truth)
    ckptkit.convert(made.saved, tmp_path / "each", to="adapter", experts="per-expert", base=made.base)
    ckptkit.merge(made.base, tmp_path / "each", tmp_path / "out")
    found = load_file(tmp_path / "out" / MODEL)
    for name, tensor in load_file(tmp_path / "truth" / MODEL).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


def test_the_adapter_in_a_training_state_in_parts(made: Made, tmp_path: Path) -> None:
    """Its base lies beside it, and tells what it calls experts; also as shards, whose items are archives."""
    wanted = convert(made.saved, tmp_path / "each", "per-expert", base=made.base)
    shutil.copy(made.base / "config.json", made.state)
    for number in (1, 2):
        ckptkit.convert(made.state, tmp_path / "out", to="adapter", experts="per-expert", part=f"{number}/2")
    ckptkit.finalize(tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / ADAPTER), wanted)
    ckptkit.convert(made.state, tmp_path / "dcp", to="dcp", world_size=3)
    for name in (SAID, "config.json"):
        shutil.copy(made.state / name, tmp_path / "dcp" / name)
    assert_same(convert(tmp_path / "dcp", tmp_path / "of-shards", "per-expert"), wanted)


def test_what_cannot_be_is_refused(made: Made, tmp_path: Path) -> None:
    each = convert(made.saved, tmp_path / "each", "per-expert", base=made.base)
    three = {name: tensor for name, tensor in convert(made.saved, tmp_path / "3d", "3d").items() if "experts" in name}
    dense = of_experts(tiny_mixtral, tmp_path / "dense")

    def changed(name: str, weights: Weights, **said: Any) -> Path:
        return as_adapter(made, tmp_path / name, weights, **said)

    first = next(name for name in each if ".experts.1.w1.lora_A" in name)
    place = {"target_modules": ["q_proj", "w1", "w2", "w3", "gate_up_proj", "down_proj"], "target_parameters": None}
    experts = {name: tensor for name, tensor in each.items() if "experts" in name}
    some = {name: tensor for name, tensor in experts.items() if ".experts.1." not in name}
    gates = {name: tensor for name, tensor in experts.items() if ".w3." not in name}
    narrow = {**three, f"{HOME}.down_proj.lora_B.weight": torch.zeros(COUNT, HIDDEN, RANK + 1)}
    fewer = {**three, f"{HOME}.down_proj.lora_B.weight": torch.zeros(COUNT - 1, HIDDEN, RANK)}
    gpt_oss = tmp_path / "gpt-oss"
    gpt_oss.mkdir()
    (gpt_oss / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "hidden_size": HIDDEN}))
    more = tmp_path / "more"
    shutil.copytree(made.base, more)
    edit(more / "config.json", num_local_experts=4)
    up_down = {"target_parameters": ["mlp.experts.up_proj", "mlp.experts.down_proj"]}
    flat = {name: tensor for name, tensor in load_file(made.saved / ADAPTER).items() if "experts" in name}
    cases: list[tuple[Path, str, dict[str, Any], str]] = [
        (made.saved, "per-expert", {}, "no config.json of the base was found"),
        (made.saved, "per-expert", {"base": gpt_oss}, "a model of type `gpt_oss` with a tensor for each expert"),
        (made.saved, "3d", {"base": more}, "expected 4 experts, found 3"),
        (made.saved, "rows", {}, "experts: expected flat, per-expert or 3d, found `rows`"),
        (dense.saved, "3d", {}, "the adapter has no matrices of experts"),
        (made.base, "3d", {}, "the checkpoint contains no adapter"),
        (changed("some", some, **place), "flat", {}, "expected experts 0 to 2 of `w1`, found 2"),
        (changed("gates", gates, **place), "flat", {}, "has gate_proj without up_proj"),
        (changed("odd", {**experts, first: torch.zeros(RANK, 7)}, **place), "3d", {}, "as the other experts have"),
        (changed("narrow", narrow, **place), "flat", {}, "expected a shape that fits"),
        (changed("fewer", fewer, **place), "flat", {}, "matrices of 3 experts, or one for all"),
        (changed("both", {**three, **experts}, **place), "flat", {}, "stores experts as 3d and per-expert"),
        (changed("other", flat, **up_down), "flat", {}, "expected experts with gate_up_proj and down_proj"),
        (tmp_path / "3d", "flat", {"experts_layout": "peft"}, "this adapter stores them as 3d"),
        (made.saved, "3d", {"merge": True, "base": made.base}, "a merged model is not an adapter"),
    ]
    for source, form, more_options, message in cases:
        with pytest.raises(CkptError, match=message):
            convert(source, tmp_path / "never", form, **more_options)
        assert not (tmp_path / "never").exists()
    with pytest.raises(CkptError, match="contains no adapter"):
        ckptkit.convert(made.base, tmp_path / "never", to="adapter")
    with pytest.raises(CkptError, match="experts has no effect: the output is not an adapter"):
        ckptkit.convert(made.saved, tmp_path / "never", to="dcp", experts="flat")


def test_files_of_these_types_have_a_tensor_for_each_expert() -> None:
    """By transformers' own table: gates above up projections, each of one expert."""
    mapping = pytest.importorskip("transformers.conversion_mapping", reason="transformers knows the types")
    from transformers.core_model_loading import Concatenate, MergeModulelist

    for model_type in SEPARATE:
        found = mapping.get_checkpoint_conversion_mapping(model_type) or []
        fusions = [one for one in found if any("gate_up_proj" in name for name in one.target_patterns)]
        names = expert_names_of_type(model_type)
        ends = [name.rpartition(".")[2] for name in (names.gate, names.up)]
        (fusion,) = fusions
        assert [name.split(".")[-2] for name in fusion.source_patterns] == ends, model_type
        assert [type(step) for step in fusion.operations] == [MergeModulelist, Concatenate], model_type
        assert fusion.operations[1].dim == 1
