"""Adapters merged into their base, judged by PEFT's `merge_and_unload`: to the last bit, but for DoRA's quotient."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ckptkit
from ckptkit.errors import Corrupt, Mismatch, Occupied, Unsafe, Unsupported, Usage
from tests.conftest import Produce
from tests.hub_server import Hub

pytest.importorskip("peft", reason="PEFT is the judge of adapters")

from tests.trainers.produced_peft import adapted, fill, lora, tiny_llama

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore:The following"
)  # the library's own

SAID, MODEL, ADAPTER = "adapter_config.json", "model.safetensors", "adapter_model.safetensors"
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]}


def tiny_gpt2() -> Any:
    """A GPT-2 with layers that store their weights the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 36}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def tiny_mixtral() -> Any:
    """A model of three experts, of which all weights of a kind are one parameter."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 3}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


class Convolutions(nn.Module):
    """Kernels of one and two axes, and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.two, self.point, self.one = nn.Conv2d(5, 7, 3), nn.Conv2d(7, 6, 1), nn.Conv1d(6, 4, 3)
        self.last = nn.Linear(6, 9)


class Attentions(nn.Module):
    """Two layers of torch's attention: PEFT adapts its `in_proj_weight` and `out_proj` as one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24) for _ in range(2))


class OutProjInside(nn.Module):
    """A module with a parameter and an `out_proj` that is no attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixer = nn.Module()
        self.mixer.in_proj, self.mixer.out_proj = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PARAMETER: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight"]}
ATTENTION: dict[str, Any] = {"target_modules": ["self_attn", "linear1"]}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (tiny_llama, {}),
    "rank-stabilised": (tiny_llama, {"use_rslora": True}),
    "patterns": (tiny_llama, {"rank_pattern": {"layers.1.*q_proj": 2}, "alpha_pattern": {"down_proj": 3}}),
    "parameter": (tiny_llama, PARAMETER),
    "parameter, other rank": (tiny_llama, PARAMETER | {"rank_pattern": {r"down_proj\.weight": 2}}),
    "parameter, a module's rank": (tiny_llama, PARAMETER | {"rank_pattern": {"down_proj": 2, "q_proj": 3}}),
    "parameter, a module's alpha": (tiny_llama, PARAMETER | {"alpha_pattern": {"down_proj": 64, "q_proj": 5}}),
    "parameter, both, full names": (
        tiny_llama,
        PARAMETER
        | {"rank_pattern": {"model.layers.0.mlp.down_proj.weight": 2}, "alpha_pattern": {r"0.*down_proj\.weight": 3}},
    ),
    "parameter, rank-stabilised": (
        tiny_llama,
        PARAMETER | {"rank_pattern": {r"down_proj\.weight": 9}, "use_rslora": True},
    ),
    "parameter, by its last name": (tiny_llama, PARAMETER | {"target_parameters": ["down_proj.weight"]}),
    "parameter, of more layers than the modules": (tiny_llama, PARAMETER | {"layers_to_transform": [1]}),
    "all linear": (tiny_llama, {"target_modules": "all-linear"}),
    "by a pattern": (tiny_llama, {"target_modules": r".*\.(q|v)_proj"}),
    "head": (tiny_llama, {"target_modules": ["lm_head", "o_proj"]}),
    "embedding": (tiny_llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "all biases": (lambda: tiny_llama(attention_bias=True), {"bias": "all"}),
    "own biases": (lambda: tiny_llama(attention_bias=True), {"bias": "lora_only"}),
    "bias of B": (lambda: tiny_llama(attention_bias=True), {"target_modules": ["q_proj"], "lora_bias": True}),
    "whole modules": (tiny_llama, {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "whole modules, by the end of a name": (tiny_llama, {"modules_to_save": ["head"]}),
    "tokens, by the end of a name": (tiny_llama, {"trainable_token_indices": {"tokens": [3, 39, 7]}}),
    "tokens": (tiny_llama, {"trainable_token_indices": [3, 39, 7]}),
    "transposed": (tiny_gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "convolutions": (Convolutions, {"r": 3, "target_modules": ["two", "point", "one", "last"]}),
    "attention": (Attentions, ATTENTION),
    "attention, alpha": (Attentions, ATTENTION | {"alpha_pattern": {"self_attn": 64}}),
    "attention, rank": (Attentions, ATTENTION | {"rank_pattern": {"self_attn": 2}}),
    "attention, of one layer": (
        Attentions,
        ATTENTION | {"rank_pattern": {r"layers\.0\.self_attn": 2}, "alpha_pattern": {r"layers\.1\.self_attn": 64}},
    ),
    "attention, patterns that PEFT never looks up": (
        Attentions,
        ATTENTION | {"rank_pattern": {"out_proj": 2}, "alpha_pattern": {"in_proj_weight": 64, "out_proj": 32}},
    ),
    "attention, rank-stabilised": (Attentions, ATTENTION | {"use_rslora": True, "rank_pattern": {"self_attn": 3}}),
    "attention by a pattern": (
        Attentions,
        {"target_modules": r".*(self_attn|linear1)", "alpha_pattern": {"self_attn": 64}},
    ),
    "attention beside a parameter": (
        Attentions,
        {
            "target_modules": ["self_attn"],
            "target_parameters": ["linear1.weight"],
            "alpha_pattern": {"self_attn": 64, "linear1": 32, r"linear1\.weight": 5},
        },
    ),
    "out_proj of attention alone": (
        Attentions,
        {"target_modules": ["out_proj"], "alpha_pattern": {"self_attn": 64, "out_proj": 32}},
    ),
    "DoRA": (tiny_llama, {"use_dora": True}),
    "DoRA, embedding": (tiny_llama, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "DoRA, transposed": (tiny_gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "DoRA, convolutions": (Convolutions, {"target_modules": ["two", "last"], "use_dora": True}),
}


class Made:
    """A base, an adapter as PEFT saves it and in the state of a training, and the merged model."""

    def __init__(self, home: Path, base: Any, **config: Any) -> None:
        self.base, self.saved, self.state = home / "base", home / "saved", home / "state"
        for path in (self.base, self.state):
            path.mkdir(parents=True)
        save_file({name: tensor.clone() for name, tensor in base.state_dict().items()}, self.base / MODEL)
        if hasattr(base, "config"):
            (self.base / "config.json").write_text(base.config.to_json_string())
        model = adapted(base, **(PLAIN | config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and name.endswith("bias") and "lora_" not in name:
                    parameter.add_(0.5)
        model.save_pretrained(self.saved)
        torch.save({"model": model.state_dict()}, self.state / "state.pt")
        shutil.copy(self.saved / SAID, self.state)
        self.truth = {name: tensor.clone() for name, tensor in model.merge_and_unload().state_dict().items()}


def assert_merged(out: Path, truth: Mapping[str, Tensor], *, is_exact: bool = True) -> None:
    """Assert that all is there, in the dtypes and bits that it should have; a tied head may be left out."""
    found = load_file(out / MODEL)
    assert found.keys() - truth.keys() == set()
    assert truth.keys() - found.keys() <= {"lm_head.weight"}
    for name, tensor in found.items():
        assert tensor.dtype == truth[name].dtype, name
        if is_exact:
            assert torch.equal(tensor, truth[name]), name
        else:
            torch.testing.assert_close(tensor, truth[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_the_library_merges(tmp_path: Path, name: str) -> None:
    make, config = CASES[name]
    made = Made(tmp_path, make(), **config)
    # some CPUs round products of odd sizes, such as rank 9, another way
    is_exact = "DoRA" not in name and name not in ("convolutions", "parameter, rank-stabilised")
    done = ckptkit.merge(made.base, made.saved, tmp_path / "out")
    assert_merged(tmp_path / "out", made.truth, is_exact=is_exact)
    assert not any("no matrices for" in warning for warning in done.warnings)
    assert done.tensors == len(load_file(tmp_path / "out" / MODEL))
    ckptkit.consolidate(made.state, tmp_path / "beside", merge=True)
    assert_merged(tmp_path / "beside", made.truth, is_exact=is_exact)
    ckptkit.consolidate(made.state, tmp_path / "again")
    theirs, ours = (
        load_file(made.saved / ADAPTER),
        load_file(tmp_path / "again" / ADAPTER),
    )
    assert theirs.keys() <= ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


def test_a_second_pair_that_peft_never_uses(tmp_path: Path) -> None:
    config = {"target_modules": ["self_attn", "out_proj"], "alpha_pattern": {"self_attn": 64}}
    made = Made(tmp_path, Attentions(), **config)
    assert "base_model.model.layers.0.self_attn.out_proj.lora_A.weight" in load_file(made.saved / ADAPTER)
    done = ckptkit.merge(made.base, made.saved, tmp_path / "out")
    assert_merged(tmp_path / "out", made.truth)
    assert sum("ignored `out_proj` matrices of nn.MultiheadAttention" in note for note in done.notes) == 1


def test_an_out_proj_beside_a_target_parameter_is_no_attentions(tmp_path: Path) -> None:
    """The names are those of an attention, and PEFT looks up the layer itself; its own merge keeps other names."""
    both = {"target_modules": ["out_proj"], "target_parameters": ["mixer.in_proj"]}
    made = Made(tmp_path, OutProjInside(), **both, alpha_pattern={"mixer": 64, "out_proj": 32})
    ckptkit.merge(made.base, made.saved, tmp_path / "out")
    before, after, lora = (
        load_file(path) for path in (made.base / MODEL, tmp_path / "out" / MODEL, made.saved / ADAPTER)
    )
    a, b = (lora[f"base_model.model.mixer.base_layer.out_proj.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(after["mixer.out_proj.weight"], before["mixer.out_proj.weight"] + 32 / 4 * b @ a)


@pytest.mark.parametrize("version", ["0.22.0", "1.0.0.dev0"])
def test_attention_of_a_peft_that_is_not_known_is_refused(tmp_path: Path, version: str) -> None:
    """Known versions add the product for `out_proj` twice in a forward pass, so the weights are trained for that."""
    made = Made(tmp_path, Attentions(), **ATTENTION)
    edit(made.saved / SAID, peft_version=version)
    with pytest.raises(Unsupported, match=f"PEFT {version}") as raised:
        ckptkit.merge(made.base, made.saved, tmp_path / "out")
    assert "out_proj" in str(raised.value)


@pytest.mark.parametrize("config", [{"r": 3}, {"rank_pattern": {"self_attn": 2}}, {"rank_pattern": {"linear1": 2}}])
def test_a_rank_that_is_not_the_configs(tmp_path: Path, config: dict[str, Any]) -> None:
    made = Made(tmp_path, Attentions(), **ATTENTION)
    edit(made.saved / SAID, **config)
    with pytest.raises(Mismatch, match=r"expected rank [23] as in .*, found rank 4"):
        ckptkit.merge(made.base, made.saved, tmp_path / "out")


def tiny_qwen_moe() -> Any:
    """A model of three experts beside one that all tokens share, and of a layer without any."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mlp_only_layers": [1]}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **heads, **experts, shared_expert_intermediate_size=28))


@pytest.mark.parametrize("make", [tiny_mixtral, tiny_qwen_moe])
@pytest.mark.parametrize("parameters", [EXPERTS, EXPERTS[:1], EXPERTS[1:], ["gate_up_proj", "down_proj"]])
def test_experts_that_lie_apart_in_files(tmp_path: Path, make: Callable[[], Any], parameters: list[str]) -> None:
    """In memory all of a layer are one parameter; the files have the names that they had, and one has each matrix."""
    make().save_pretrained(tmp_path / "hub")
    named = load_file(tmp_path / "hub" / MODEL)
    assert any(".experts.2." in name for name in named)
    made = Made(tmp_path, make(), target_modules=["q_proj"], target_parameters=parameters)
    merged = make()
    merged.load_state_dict(made.truth)
    merged.save_pretrained(tmp_path / "truth")
    ckptkit.merge(tmp_path / "hub", made.saved, tmp_path / "out")
    ckptkit.consolidate(made.state, tmp_path / "beside", merge=True, base=tmp_path / "hub")
    truth = load_file(tmp_path / "truth" / MODEL)
    for out in ("out", "beside"):
        found = load_file(tmp_path / out / MODEL)
        assert found.keys() == truth.keys() == named.keys()
        assert [name for name, tensor in truth.items() if not torch.equal(found[name], tensor)] == []
    assert any(".experts.2." in name and not torch.equal(named[name], found[name]) for name in named)
    ckptkit.consolidate(made.state, tmp_path / "again")
    assert (tmp_path / "again" / ADAPTER).read_bytes() == (made.saved / ADAPTER).read_bytes()


@pytest.mark.parametrize("config", [PLAIN, PARAMETER], ids=["module", "parameter"])
def test_another_rank_than_the_config_gives_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    """Of a parameter too: a config with other patterns than the training's would scale the product in silence."""
    made = Made(tmp_path, tiny_llama(), **config)
    said = json.loads((made.saved / SAID).read_text())
    key = r"down_proj\.weight" if "target_parameters" in config else "down_proj"
    (made.saved / SAID).write_text(json.dumps(said | {"rank_pattern": {key: 3}}))
    with pytest.raises(Mismatch, match=r"expected rank 3 as in .* found rank 4"):
        ckptkit.merge(made.base, made.saved, tmp_path / "out")
    with pytest.raises(Mismatch, match=r"expected rank 3 as in .* found rank 4"):
        ckptkit.consolidate(made.saved, tmp_path / "alone")


@pytest.mark.parametrize("run", ["run", "only/checkpoint-3", "ranks", "full", "saved"])
def test_of_real_trainings(produce: Produce, tmp_path: Path, run: str) -> None:
    made = produce(lora)
    ckptkit.merge(made.root / "base", made.root / run, tmp_path / "out")
    assert_merged(tmp_path / "out", made.truth)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_base_is_loaded_as_a_model(produce: Produce, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = produce(lora)
    done = ckptkit.consolidate(made.root / "run", tmp_path / "out", merge=True, base=made.root / "base")
    assert made.root / "run" in done.source.parents
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, made.truth[name]) for name, tensor in model.state_dict().items())
    assert [problem for part in ckptkit.verify(tmp_path / "out") for problem in part.problems] == []


@pytest.mark.parametrize("to", ["dcp", "pt"])
def test_from_and_to_other_formats(produce: Produce, tmp_path: Path, to: str) -> None:
    made = produce(lora)
    ckptkit.convert(made.root / "base", tmp_path / "base", to=to)
    ckptkit.merge(tmp_path / "base", made.root / "saved", tmp_path / "out", to=to)
    ckptkit.consolidate(tmp_path / "out", tmp_path / "hf")
    assert_merged(tmp_path / "hf", made.truth)


def test_parts_make_the_whole(produce: Produce, tmp_path: Path) -> None:
    """Processes that share the work, and the one that ends it, which learns from their words alone what it is."""
    made = produce(lora)
    for part in ("2/3", "1/3", "3/3"):
        ckptkit.merge(made.root / "base", made.root / "saved", tmp_path / "out", part=part, weights=[1.0])
    ckptkit.finalize(tmp_path / "out")
    assert_merged(tmp_path / "out", made.truth)


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_halves_are_rounded_once(tmp_path: Path, adapters: torch.dtype) -> None:
    """With adapters of float32 as PEFT does it; of halves PEFT rounds the product first, and then the sum again."""
    made = Made(tmp_path, tiny_llama().to(torch.bfloat16))
    saved = {name: tensor.to(adapters) for name, tensor in load_file(made.saved / ADAPTER).items()}
    save_file(saved, made.saved / ADAPTER)
    base = load_file(made.base / MODEL)
    ckptkit.merge(made.base, made.saved, tmp_path / "out")
    found = load_file(tmp_path / "out" / MODEL)
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        a, b = (saved.get(f"base_model.model.{module}.lora_{which}.weight") for which in "AB")
        expected = tensor if a is None or b is None else (tensor.float() + 1.75 * (b.float() @ a.float())).bfloat16()
        assert torch.equal(found[name], expected), name
    if adapters == torch.float32:
        assert_merged(tmp_path / "out", made.truth)
    ckptkit.merge(made.base, made.saved, tmp_path / "wide", dtype="fp32")
    assert {tensor.dtype for tensor in load_file(tmp_path / "wide" / MODEL).values()} == {torch.float32}


def test_several_adapters_add_up(tmp_path: Path) -> None:
    one, two = Made(tmp_path / "1", tiny_llama()), tmp_path / "2" / "saved"
    other = adapted(tiny_llama(), **(PLAIN | {"r": 2, "target_modules": ["q_proj", "up_proj"]}))
    fill(other)
    other.save_pretrained(two)
    ckptkit.merge(one.base, [one.saved, two], tmp_path / "out", weights=[0.5, 2])
    found, base = load_file(tmp_path / "out" / MODEL), load_file(one.base / MODEL)
    for name, tensor in base.items():
        expected = tensor.clone()
        for path, scale in ((one.saved, 0.5 * 7 / 4), (two, 2 * 7 / 2)):
            saved = load_file(path / ADAPTER)
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{key}A.weight" in saved:
                expected += scale * (saved[f"{key}B.weight"] @ saved[f"{key}A.weight"])
        torch.testing.assert_close(found[name], expected)


class Tied(Made):
    """A model whose head is its embedding, which is left out of the base."""

    def __init__(self, home: Path, **config: Any) -> None:
        super().__init__(home, tiny_llama(tie_word_embeddings=True), **config)
        base = load_file(self.base / MODEL)
        self.embedding = base["model.embed_tokens.weight"]
        save_file({name: tensor for name, tensor in base.items() if name != "lm_head.weight"}, self.base / MODEL)


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        ({"target_modules": ["embed_tokens"]}, "model.embed_tokens.weight"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight"),
        ({"target_modules": ["lm_head"]}, "lm_head.weight"),
    ],
)
def test_a_change_of_one_side_unties(tmp_path: Path, config: dict[str, Any], changed: str) -> None:
    made = Tied(tmp_path, **config)
    done = ckptkit.merge(made.base, made.saved, tmp_path / "out")
    found = load_file(tmp_path / "out" / MODEL)
    other = ({"lm_head.weight", "model.embed_tokens.weight"} - {changed}).pop()
    assert torch.equal(found[other], made.embedding)
    assert not torch.equal(found[changed], made.embedding)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert any(f"are no longer tied, because training changed {changed}" in note for note in done.notes)


def test_a_tied_head_follows_trained_rows(tmp_path: Path) -> None:
    made = Tied(tmp_path, trainable_token_indices=[3, 39])
    ckptkit.merge(made.base, made.saved, tmp_path / "out")
    ckptkit.consolidate(made.state, tmp_path / "beside", merge=True, base=made.base)
    for out in ("out", "beside"):
        assert_merged(tmp_path / out, made.truth)
        assert json.loads((tmp_path / out / "config.json").read_text())["tie_word_embeddings"] is True
        assert "lm_head.weight" not in load_file(tmp_path / out / MODEL)


def edit(path: Path, **values: Any) -> None:
    """Say something else in a config."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "kind", "word"),
    [
        ({"peft_type": "LOHA"}, Mismatch, "LOHA"),
        ({"use_qalora": True}, Unsupported, "use_qalora"),
        ({"alora_invocation_tokens": [1]}, Unsupported, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_16"}, Unsupported, "pissa"),
        ({"layer_replication": [[0, 2]]}, Unsupported, "layer_replication"),
        ({"r": 2**40}, Corrupt, "rank"),
        ({"r": 5}, Mismatch, "found rank 4"),
        ({"lora_alpha": float("nan")}, Corrupt, "alpha"),
        ({"lora_alpha": 10**40}, Corrupt, "alpha"),
    ],
)
def test_configs_that_do_not_fit(
    produce: Produce, tmp_path: Path, values: dict[str, Any], kind: Any, word: str
) -> None:
    made = produce(lora)
    shutil.copytree(made.root / "saved", tmp_path / "saved")
    edit(tmp_path / "saved" / SAID, **({"alpha_pattern": {}} | values))
    with pytest.raises(kind, match=word):
        ckptkit.merge(made.root / "base", tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_the_base(produce: Produce, tmp_path: Path) -> None:
    """A module that is not there, another width, and quantized weights."""
    made = produce(lora)
    base = load_file(made.root / "base" / MODEL)
    name = "model.layers.1.self_attn.q_proj.weight"
    others = {
        "not have a `model.layers.1.self_attn.q_proj`": {key: tensor for key, tensor in base.items() if key != name},
        "expected a weight update of shape": base | {name: torch.ones(32, 25)},
        "float8": base | {name: base[name].to(torch.float8_e4m3fn)},
    }
    for i, (word, tensors) in enumerate(others.items()):
        (tmp_path / f"{i}").mkdir()
        save_file(tensors, tmp_path / f"{i}" / MODEL)
        with pytest.raises((Mismatch, Unsupported), match=word) as raised:
            ckptkit.merge(tmp_path / f"{i}", made.root / "saved", tmp_path / "out")
        assert "q_proj.lora_A" in (raised.value.tensor or "")


def test_a_square_weight_may_be_stored_either_way(tmp_path: Path) -> None:
    """The switch that tells is that of the last layer which PEFT met; the shapes of others contradict it."""
    made = Made(tmp_path, tiny_gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    edit(made.saved / SAID, fan_in_fan_out=False)
    with pytest.raises(Unsupported, match="square") as raised:
        ckptkit.merge(made.base, made.saved, tmp_path / "out")
    assert "attn.c_proj" in (raised.value.tensor or "")


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (tiny_llama, ["q_proj", "o_proj"]),
        (tiny_llama, ["q_proj", "k_proj"]),
        (tiny_gpt2, ["attn.c_proj"]),
    ],
)
def test_the_type_of_the_layer_decides_and_not_the_switch(
    make: Callable[[], Any], targets: list[str], says: bool, tmp_path: Path
) -> None:
    """PEFT corrects the switch by the type of each layer."""
    made = Made(tmp_path, make(), target_modules=targets, fan_in_fan_out=make is tiny_gpt2)
    edit(made.saved / SAID, fan_in_fan_out=says)
    ckptkit.merge(made.base, made.saved, tmp_path / "out")
    assert_merged(tmp_path / "out", made.truth)


def test_numbers_that_are_none(produce: Produce, tmp_path: Path) -> None:
    made = produce(lora)
    shutil.copytree(made.root / "saved", tmp_path / "saved")
    file = tmp_path / "saved" / ADAPTER
    tensors = load_file(file)
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"][3, 1] = torch.nan
    save_file(tensors, file)
    with pytest.raises(Corrupt, match="NaN") as raised:
        ckptkit.merge(made.root / "base", tmp_path / "saved", tmp_path / "out")
    assert raised.value.tensor == "model.layers.0.self_attn.q_proj.weight"


def test_requests_that_make_no_sense(produce: Produce, tmp_path: Path) -> None:
    made = produce(lora)
    base, saved, out = made.root / "base", made.root / "saved", tmp_path / "out"
    for words, hint in (((base, base), "pass a directory with"), ((saved, base), "pass the base first")):
        with pytest.raises(Usage, match="no adapter") as caught:
            ckptkit.merge(*words, out)
        assert caught.value.path == base
        assert str(caught.value.hint).startswith(hint)
    with pytest.raises(Usage, match="no adapter") as caught:
        ckptkit.consolidate(base, out, merge=True)
    assert caught.value.hint == "drop --merge"
    with pytest.raises(Usage, match="base of the adapter"):
        ckptkit.consolidate(saved, out, merge=True)
    with pytest.raises(Usage, match="expected 1 factor, one for each adapter, found 2"):
        ckptkit.merge(base, saved, out, weights=[1, 2])
    with pytest.raises(Usage, match="finite"):
        ckptkit.merge(base, saved, out, weights=[float("nan")])
    shutil.copytree(base, tmp_path / "base")
    with pytest.raises(Occupied):
        ckptkit.merge(base, saved, tmp_path / "base")
    with pytest.raises(Unsafe):
        ckptkit.consolidate(saved, tmp_path / "base", merge=True, base=tmp_path / "base", overwrite=True)


def test_renamed_and_selected(produce: Produce, tmp_path: Path) -> None:
    made = produce(lora)
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(made.root / "base" / MODEL, base)
    ckptkit.merge(base, made.root / "saved", tmp_path / "out", rename="^model\\.=>", exclude="lm_head.*")
    found = load_file(tmp_path / "out" / MODEL)
    wanted = {name.removeprefix("model."): tensor for name, tensor in made.truth.items() if name != "lm_head.weight"}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_globs_are_of_the_merged_names(produce: Produce, tmp_path: Path) -> None:
    """Of one that has none of them nothing was left, and that was called a model."""
    made = produce(lora)
    ckptkit.merge(made.root / "base", made.root / "saved", tmp_path / "out", include=["model.norm.*", "*.q_proj.*"])
    found = load_file(tmp_path / "out" / MODEL)
    assert len(found) == 3
    assert all(torch.equal(tensor, made.truth[name]) for name, tensor in found.items())
    with pytest.raises(Usage, match="matches no tensor"):
        ckptkit.consolidate(made.root / "run", tmp_path / "none", merge=True, include="*.default.*")


def test_what_takes_the_place_of_the_bases_has_no_half(produce: Produce, tmp_path: Path) -> None:
    made = produce(lora)
    with pytest.raises(Unsupported, match=r"expected 1 for `lm_head\.weight`") as raised:
        ckptkit.merge(made.root / "base", made.root / "saved", tmp_path / "out", weights=[0.5])
    assert raised.value.tensor == "base_model.model.lm_head.weight"


def test_a_base_of_another_name_is_said(produce: Produce, tmp_path: Path) -> None:
    made = produce(lora)
    shutil.copytree(made.root / "saved", tmp_path / "saved")
    for said, is_noted in (("org/Llama-3.1-8B", True), ("org/Base", False)):
        edit(tmp_path / "saved" / SAID, base_model_name_or_path=said)
        done = ckptkit.merge(made.root / "base", tmp_path / "saved", tmp_path / "out", dry_run=True)
        assert any(said in note for note in done.notes) is is_noted


@pytest.mark.slow
def test_a_base_on_the_hub_is_read_where_it_lies(produce: Produce, tmp_path: Path) -> None:
    """By its id, of a server that speaks the Hub's calls: only what is needed, and nothing is downloaded first."""
    made = produce(lora)
    saved, only = made.root / "saved", made.root / "only" / "checkpoint-3"
    with Hub(tmp_path / "hub") as hub:
        hub.put("org/base", {path.name: path for path in (made.root / "base").iterdir()})
        for i, words in enumerate(
            (["merge", "org/base", saved], ["consolidate", only, "--merge", "--base", "org/base"])
        ):
            out = tmp_path / f"out{i}"
            command = [sys.executable, "-m", "ckptkit", *map(str, words), str(out)]
            done = subprocess.run(command, env=hub.env, cwd=hub.root, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert_merged(out, made.truth)
            assert (out / "config.json").exists()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("whole", [["lm_head", "embed_tokens"], ["embed_tokens"], None])
def test_a_vocabulary_that_was_resized(tmp_path: Path, whole: list[str] | None, *, is_tied: bool) -> None:
    """PEFT saves embeddings up to three times then; the state of a training has them with its base."""
    from transformers import AutoModelForCausalLM

    tiny_llama(tie_word_embeddings=is_tied).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(44)
    model = adapted(base, **PLAIN, modules_to_save=whole)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / ADAPTER)
    assert any(".modules_to_save." in name for name in saved) == (whole is not None)
    (tmp_path / "state").mkdir()
    torch.save({"model": model.state_dict()}, tmp_path / "state" / "state.pt")
    for path in (tmp_path / "saved" / SAID, tmp_path / "base" / "config.json"):
        shutil.copy(path, tmp_path / "state")
    truth = {name: tensor.clone() for name, tensor in model.merge_and_unload().state_dict().items()}
    ckptkit.merge(tmp_path / "base", tmp_path / "saved", tmp_path / "merged")
    ckptkit.merge(tmp_path / "base", tmp_path / "state", tmp_path / "with-state")
    ckptkit.consolidate(tmp_path / "saved", tmp_path / "named", merge=True, base=tmp_path / "base")
    ckptkit.consolidate(tmp_path / "state", tmp_path / "beside", merge=True)
    for name in ("merged", "with-state", "named", "beside"):
        assert_merged(tmp_path / name, truth)
        assert json.loads((tmp_path / name / "config.json").read_text())["vocab_size"] == 44
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values()), info
    done = ckptkit.consolidate(tmp_path / "saved", tmp_path / "again")
    again = load_file(tmp_path / "again" / ADAPTER)
    assert again.keys() <= saved.keys()
    assert sum(one.entries for one in done.dropped) == len(saved) - len(again)
    assert not any(".modules_to_save." in name or ".original_module." in name for name in again)
