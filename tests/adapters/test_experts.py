"""Adapters of fused experts, whose lora_B PEFT and unsloth pack differently. PEFT's own merge is the judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.errors import Mismatch, Unsupported, Usage
from tests.adapters.test_merge import ADAPTER, EXPERTS, MODEL, SAID, Made, assert_merged, edit, tiny_mixtral

pytest.importorskip("peft", reason="PEFT is the judge of adapters")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # the library's own

COUNT = 3
BLOCKS = ("grouped_by_expert", "grouped_by_expert")
# what `fix_lora_auto_mapping` and `write_fused_expert_lora_layout` of unsloth_zoo 2026.10.9 leave in the config
CLASS = {"base_model_class": "MixtralForCausalLM", "parent_library": "transformers.models.mixtral.modeling_mixtral"}
FIXED = {"auto_mapping": {**CLASS, "unsloth_fixed": True}}


def record(*layouts: str) -> dict[str, Any]:
    """What unsloth records: for each parameter, and once more if all have the same layout."""
    names = [name.rpartition(".")[2] for name in EXPERTS]
    entries = {
        name: {"lora_B_layout": layout, "num_experts": COUNT} for name, layout in zip(names, layouts, strict=True)
    }
    flat = {"lora_B_layout": layouts[0]} if len(set(layouts)) == 1 else {}
    detail = {"lora_A_layout": "grouped_by_expert", "parameters": entries, **flat}
    return {**FIXED, "unsloth_fused_expert_lora": detail, **flat}


def tiny_gpt_oss() -> Any:
    """A model whose experts store their weights as [in, out], with biases beside them."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return GptOssForCausalLM(GptOssConfig(**sizes, **heads, num_local_experts=COUNT, num_experts_per_tok=2))


def of_experts(make: Callable[[], Any], home: Path, **config: Any) -> Made:
    """A base, an adapter of its experts, and what PEFT merges, under the names of the Hub."""
    made = Made(home, make(), target_modules=["q_proj"], **config)
    merged = make()
    merged.load_state_dict(made.truth)
    merged.save_pretrained(home / "truth")
    made.truth = load_file(home / "truth" / MODEL)
    return made


@pytest.fixture(scope="module", params=[tiny_mixtral, tiny_gpt_oss])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return of_experts(request.param, tmp_path_factory.mktemp("experts"), target_parameters=EXPERTS)


def in_blocks(made: Made, home: Path, parameters: tuple[str, ...] = ("gate_up_proj", "down_proj")) -> Path:
    """The adapter that means the same to a training which keeps the columns of each expert together."""
    shutil.copytree(made.saved, home)
    tensors = load_file(home / ADAPTER)
    for name, tensor in tensors.items():
        # PEFT nests the wrappers of a module's parameters: the inner one is that of the first parameter
        parameter = "gate_up_proj" if ".base_layer." in name else "down_proj"
        if name.endswith("lora_B.weight") and ".experts." in name and parameter in parameters:
            by_rank = tensor.reshape(len(tensor), -1, COUNT)
            tensors[name] = by_rank.transpose(1, 2).reshape(tensor.shape).contiguous()
    save_file(tensors, home / ADAPTER)
    return home


def test_the_record_in_the_config_tells(made: Made, tmp_path: Path) -> None:
    """In the config itself, or in the copy that unsloth puts into `auto_mapping`."""
    both, one = in_blocks(made, tmp_path / "both"), in_blocks(made, tmp_path / "one", ("down_proj",))
    blocks = record(*BLOCKS)
    moved = {"auto_mapping": {**FIXED["auto_mapping"], **{key: blocks[key] for key in blocks if key != "auto_mapping"}}}
    cases = [
        (both, blocks),
        (both, {"lora_B_layout": "grouped_by_expert"}),
        (both, moved),
        (one, record("rank_major", "grouped_by_expert")),
        (made.saved, record("rank_major", "rank_major")),
    ]
    for number, (adapter, said) in enumerate(cases):
        shutil.copytree(adapter, tmp_path / f"case-{number}")
        edit(tmp_path / f"case-{number}" / SAID, **said)
        done = ckptkit.merge(made.base, tmp_path / f"case-{number}", tmp_path / f"out-{number}")
        assert_merged(tmp_path / f"out-{number}", made.truth)
        assert not any("lora_B" in note for note in done.notes)


def test_without_a_record_you_say_it(made: Made, tmp_path: Path) -> None:
    adapter = in_blocks(made, tmp_path / "adapter")
    original = (adapter / SAID).read_text()
    for marks in (FIXED, record("mixed", "mixed"), {"lora_B_layout": "new"}, {"peft_version": None}, "tag"):
        (adapter / SAID).write_text(original)
        if marks == "tag":
            (adapter / "README.md").write_text("---\ntags:\n- lora\n- unsloth\n---\n")
        else:
            edit(adapter / SAID, **marks)  # type: ignore[arg-type]
        if marks == {"peft_version": None}:
            values = json.loads(original)
            del values["peft_version"]
            (adapter / SAID).write_text(json.dumps(values))
        with pytest.raises(Unsupported, match="3 experts of rank 4") as caught:
            ckptkit.merge(made.base, adapter, tmp_path / "out")
        assert "--experts-layout blocks" in str(caught.value.hint)
        assert not (tmp_path / "out").exists()
    ckptkit.merge(made.base, adapter, tmp_path / "out", experts_layout="blocks")
    assert_merged(tmp_path / "out", made.truth)


def test_a_copy_says_that_loaders_expect_another_layout(made: Made, tmp_path: Path) -> None:
    for number, (marks, found) in enumerate([({}, None), (FIXED, "unknown"), (record(*BLOCKS), "blocks")]):
        adapter = in_blocks(made, tmp_path / f"adapter-{number}")
        edit(adapter / SAID, **marks)
        done = ckptkit.consolidate(adapter, tmp_path / f"out-{number}")
        notes = [note for note in done.notes if "expect lora_B" in note]
        assert [all(f"{name} ({found})" in note for name in EXPERTS) for note in notes] == [True] * (found is not None)
        copied, original = load_file(tmp_path / f"out-{number}" / ADAPTER), load_file(adapter / ADAPTER)
        assert all(torch.equal(copied[name], tensor) for name, tensor in original.items())


def test_what_you_say_counts_more_than_the_files(made: Made, tmp_path: Path) -> None:
    adapter = in_blocks(made, tmp_path / "adapter")
    done = ckptkit.merge(made.base, adapter, tmp_path / "out", experts_layout="blocks")
    assert_merged(tmp_path / "out", made.truth)
    assert sum("as blocks (--experts-layout), but" in note for note in done.notes) == 1
    done = ckptkit.merge(made.base, made.saved, tmp_path / "same", experts_layout="peft")
    assert_merged(tmp_path / "same", made.truth)
    assert not any("(--experts-layout), but" in note for note in done.notes)


def test_of_rank_one_both_layouts_are_the_same(tmp_path: Path) -> None:
    made = of_experts(tiny_mixtral, tmp_path, r=1, target_parameters=EXPERTS)
    edit(made.saved / SAID, **FIXED)
    ckptkit.merge(made.base, made.saved, tmp_path / "out")
    assert_merged(tmp_path / "out", made.truth)


def test_an_option_that_would_do_nothing_is_refused(made: Made, tmp_path: Path) -> None:
    dense = of_experts(tiny_mixtral, tmp_path / "dense")
    with pytest.raises(Usage, match="no fused experts"):
        ckptkit.merge(dense.base, dense.saved, tmp_path / "out", experts_layout="peft")
    with pytest.raises(Usage, match="expected one adapter, found 2"):
        ckptkit.merge(made.base, [made.saved, made.saved], tmp_path / "out", experts_layout="peft")
    with pytest.raises(Usage, match="experts_layout: expected peft or blocks, found `unsloth`"):
        ckptkit.merge(made.base, made.saved, tmp_path / "out", experts_layout="unsloth")
    with pytest.raises(Usage, match="experts_layout has no effect without merge or experts"):
        ckptkit.consolidate(made.saved, tmp_path / "out", experts_layout="peft")


def test_experts_that_cannot_be_merged_say_what_helps(tmp_path: Path) -> None:
    def square() -> Any:
        from transformers import MixtralConfig, MixtralForCausalLM

        sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": COUNT}
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads))

    even = Made(tmp_path / "even", square(), target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(Unsupported, match=r"equal sides \[24, 24\]") as refused:
        ckptkit.merge(even.base, even.saved, tmp_path / "out")
    # PEFT decides by the model's class, which earlier versions of PEFT did not
    assert "of the PEFT that trained it" in str(refused.value.hint)
    ckptkit.consolidate(even.base, tmp_path / "fp8", quantize="fp8-channel")
    with pytest.raises(Mismatch) as other:
        ckptkit.merge(tmp_path / "fp8", even.saved, tmp_path / "out")
    assert "dequantize the base first" in str(other.value.hint)
