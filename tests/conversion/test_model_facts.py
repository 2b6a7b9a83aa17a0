"""What other files than config.json say of the computation, in each command that has two models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptkit
from ckptkit.errors import Mismatch
from tests.faults.meaning_sources import CONFIG, model

SIZES = {"n_layer": 1, "n_embd": 8, "vocab_size": 16, "bias": True}
ARGS = {**SIZES, "n_head": 2, "block_size": 4, "dropout": 0.0}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 4, **SIZES}
PARAMS = {"dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 16, "norm_eps": 1e-5, "rope_theta": 1e4}
YAML = (
    "name: tiny\nn_layer: 2\nn_head: 1\nn_query_groups: 1\nrope_base: {}\nnorm_eps: 1.0e-06\nrotary_percentage: 1.0\n"
)


def write_nanogpt(path: Path, heads: int) -> Path:
    shapes = {
        "wte.weight": (16, 8),
        "wpe.weight": (4, 8),
        "ln_f.weight": (8,),
        "ln_f.bias": (8,),
        **{f"h.0.ln_{i}.{kind}": (8,) for i in (1, 2) for kind in ("weight", "bias")},
        "h.0.attn.c_attn.weight": (24, 8),
        "h.0.attn.c_attn.bias": (24,),
        "h.0.attn.c_proj.bias": (8,),
        "h.0.attn.c_proj.weight": (8, 8),
        "h.0.mlp.c_fc.weight": (32, 8),
        "h.0.mlp.c_fc.bias": (32,),
        "h.0.mlp.c_proj.weight": (8, 32),
        "h.0.mlp.c_proj.bias": (8,),
    }
    source = torch.Generator().manual_seed(0)
    weights = {f"transformer.{name}": torch.randn(shape, generator=source) for name, shape in shapes.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    args = {**ARGS, "n_head": heads}
    torch.save({"model": weights, "model_args": args, "iter_num": 5, "best_val_loss": 2.0, "config": {}}, path)
    return path


def write_config(root: Path, config: dict[str, Any]) -> Path:
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config))
    return root


def test_the_heads_of_nanogpt(tmp_path: Path) -> None:
    two, four = (write_nanogpt(tmp_path / f"{heads}.pt", heads) for heads in (2, 4))
    right, wrong = (write_config(tmp_path / f"base{heads}", {**GPT2, "n_head": heads}) for heads in (2, 4))
    done = ckptkit.consolidate(two, tmp_path / "good", base=str(right))
    assert not any("n_head" in warning for warning in done.warnings)
    done = ckptkit.consolidate(two, tmp_path / "bad", base=str(wrong))
    assert any("n_head (2, in config.json 4)" in warning for warning in done.warnings)
    (found,) = ckptkit.verify(tmp_path / "good", against=two)
    assert found.is_ok
    (found,) = ckptkit.verify(tmp_path / "bad", against=two)
    assert "n_head (4, in" in found.problems[0].message
    assert [one.key for one in ckptkit.diff(two, four).configs] == ["n_head"]
    done = ckptkit.average([two, four], tmp_path / "mean", base=str(right))
    assert any("n_head (2, in" in warning for warning in done.warnings)


def test_doctor_says_that_nanogpt_transposes(tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path / "ckpt.pt", 2)
    right, wrong = (write_config(tmp_path / f"base{heads}", {**GPT2, "n_head": heads}) for heads in (2, 4))
    (found,) = ckptkit.doctor(path, model=right).findings
    assert found.code == "family"
    assert "nanogpt stores this tensor as [24, 8]" in found.message
    assert found.fix is not None
    assert found.fix.startswith("ckptkit consolidate ")
    heads, _ = ckptkit.doctor(path, model=wrong).findings
    assert heads.code == "config"
    assert "n_head 4, not 2" in heads.message


def write_meta(root: Path, change: dict[str, Any]) -> Path:
    root.mkdir()
    matrices = {f"attention.w{kind}": (8, 8) for kind in "qkvo"}
    matrices |= {"feed_forward.w1": (12, 8), "feed_forward.w3": (12, 8), "feed_forward.w2": (8, 12)}
    shapes = {f"layers.0.{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {"tok_embeddings.weight": (16, 8), "output.weight": (16, 8)}
    shapes_of_norms = ("norm", "layers.0.attention_norm", "layers.0.ffn_norm")
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    torch.save(
        {**weights, **{f"{name}.weight": torch.ones(8) for name in shapes_of_norms}}, root / "consolidated.00.pth"
    )
    (root / "params.json").write_text(json.dumps({**PARAMS, **change}))
    return root


@pytest.mark.parametrize(("key", "value", "name"), [("rope_theta", 5e5, "rope_theta"), ("softcap", 30.0, "softcap")])
def test_two_params_json(key: str, value: object, name: str, tmp_path: Path) -> None:
    one, two = write_meta(tmp_path / "a", {"softcap": 50.0}), write_meta(tmp_path / "b", {"softcap": 50.0, key: value})
    assert [(found.key, found.there) for found in ckptkit.diff(one, two).configs] == [(name, value)]
    (found,) = ckptkit.verify(one, against=two)
    assert f"{name} (" in found.problems[0].message
    made = ckptkit.delta(one, two, tmp_path / "delta")
    assert any("does not contain params.json" in note and name in note for note in made.notes)
    with pytest.raises(Mismatch, match=rf"`{name}` in params\.json: expected"):
        ckptkit.average([one, two], tmp_path / "mean")
    shutil.copy(one / "params.json", two)
    assert ckptkit.diff(one, two).is_equal
    assert not any("config.json" in note for note in ckptkit.average([one, two], tmp_path / "mean").notes)


def test_the_settings_of_litgpt(tmp_path: Path) -> None:
    base = write_config(tmp_path / "hub", CONFIG)
    save_file(model(), base / "model.safetensors")
    ckptkit.convert(base, tmp_path / "lit", to="pt", names="litgpt")
    weights = torch.load(tmp_path / "lit" / "state.pt")
    roots = []
    for theta in (10000, 500000):
        roots.append(tmp_path / str(theta))
        roots[-1].mkdir()
        torch.save({"model": weights.get("model", weights)}, roots[-1] / "lit_model.pth")
        (roots[-1] / "model_config.yaml").write_text(YAML.format(theta))
    warned = [ckptkit.consolidate(root, tmp_path / f"{root.name}-out", base=str(base)).warnings for root in roots]
    found = ["rope_theta (" in "\n".join(map(str, warnings)) for warnings in warned]
    assert found == [False, True]
    assert [one.key for one in ckptkit.diff(*roots).configs] == ["rope_theta"]


def test_salvage_from_another_model(tmp_path: Path) -> None:
    roots = [write_config(tmp_path / name, {**CONFIG, "rope_theta": theta}) for name, theta in (("a", 1e4), ("b", 5e5))]
    for root in roots:
        save_file(model(), root / "model.safetensors")
    whole = (roots[0] / "model.safetensors").read_bytes()
    (roots[0] / "model.safetensors").write_bytes(whole[:-300])
    done = ckptkit.consolidate(roots[0], tmp_path / "out", salvage=True, fill_from=roots[1])
    assert any(
        "--fill-from took tensors of a model whose config.json differs: rope_theta" in one for one in done.warnings
    )
    shutil.copy(roots[0] / "config.json", roots[1])
    done = ckptkit.consolidate(roots[0], tmp_path / "out2", salvage=True, fill_from=roots[1])
    assert not any("differs: " in one for one in done.warnings)


def with_pooling(root: Path, mode: str) -> None:
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    modules = [{"path": "", "type": "st.models.Transformer"}, {"path": "1_Pooling", "type": "st.models.Pooling"}]
    (root / "modules.json").write_text(json.dumps(modules))


def with_normalize(root: Path, kind: str) -> None:
    modules = [{"path": "", "type": "st.models.Transformer"}, {"path": "1_Last", "type": f"st.models.{kind}"}]
    (root / "modules.json").write_text(json.dumps(modules))
    (root / "1_Last").mkdir()


def with_code(root: Path, text: str) -> None:
    (root / "modeling_my.py").write_text(text)
    config = {**CONFIG, "model_type": "my", "auto_map": {"AutoModelForCausalLM": "modeling_my.My"}}
    (root / "config.json").write_text(json.dumps(config))


def with_class(root: Path, name: str) -> None:
    with_code(root, "")
    config = {**CONFIG, "model_type": "my", "auto_map": {"AutoModelForCausalLM": f"modeling_my.{name}"}}
    (root / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("write", "values", "key", "is_certain"),
    [
        (with_pooling, ("mean_tokens", "cls_token"), "1_Pooling.pooling_mode_cls_token", False),
        (with_normalize, ("Normalize", "Dense"), "modules.json", True),
        (with_code, ("a = 1", "a = 2"), "modeling_my.py", False),
        (with_class, ("A", "B"), "auto_map.AutoModelForCausalLM", True),
    ],
)
def test_other_files_of_a_model(
    write: Callable[[Path, str], None], values: tuple[str, str], key: str, is_certain: bool, tmp_path: Path
) -> None:
    roots = [write_config(tmp_path / name, CONFIG) for name in "ab"]
    for root, value in zip(roots, values, strict=True):
        save_file(model(), root / "model.safetensors")
        write(root, value)
    found = ckptkit.diff(*roots)
    assert (found.configs[0].key, found.configs[0].is_certain) == (key, is_certain)
    assert not any("modules.json" in note or "modeling_my.py" in note for note in found.notes)
    (verified,) = ckptkit.verify(roots[0], against=roots[1])
    assert any(key in line for line in ([verified.problems[0].message] if is_certain else verified.notes))
    if is_certain:
        with pytest.raises(Mismatch, match=key):
            ckptkit.average(roots, tmp_path / "mean")
    else:
        done = ckptkit.average(roots, tmp_path / "mean")
        words = f"and {roots[1]} differ in keys that may change the computation: {key}"
        assert any(words in warning for warning in done.warnings)
    assert ckptkit.diff(roots[0], roots[0]).is_equal


TIMM = {"architecture": "vit_tiny", "pretrained_cfg": {"tag": "x", "hf_hub_id": "a/b"}, "global_pool": "token"}
DIFFUSERS = {"_class_name": "UNet2DModel", "_diffusers_version": "0.30", "act_fn": "silu"}


@pytest.mark.parametrize(
    ("config", "file", "change", "key"),
    [
        (TIMM, "model.safetensors", {"global_pool": "avg"}, "global_pool"),
        (TIMM, "model.safetensors", {"model_args": {"act_layer": "relu"}}, "model_args.act_layer"),
        (TIMM, "model.safetensors", {"pretrained_cfg": {"tag": "x", "hf_hub_id": "c/d"}}, ""),
        (DIFFUSERS, "diffusion_pytorch_model.safetensors", {"act_fn": "gelu"}, "act_fn"),
        (DIFFUSERS, "diffusion_pytorch_model.safetensors", {"_class_name": "UNet1DModel"}, "_class_name"),
        (DIFFUSERS, "diffusion_pytorch_model.safetensors", {"_diffusers_version": "0.31"}, ""),
        ({"d_model": 4, "n_layer": 1, "rms_norm": True}, "model.safetensors", {"rms_norm": False}, "rms_norm"),
        ({"of": "nobody we know", "act": "silu"}, "model.safetensors", {"act": "gelu"}, "act"),
    ],
)
def test_the_config_of_another_library(
    config: dict[str, Any], file: str, change: dict[str, Any], key: str, tmp_path: Path
) -> None:
    base = {**config, "model_args": {"act_layer": "gelu"}} if config is TIMM else config
    roots = [write_config(tmp_path / name, one) for name, one in (("a", base), ("b", {**base, **change}))]
    for root in roots:
        save_file(model(), root / file)
    assert [one.key for one in ckptkit.diff(*roots).configs] == ([key] if key else [])
    (verified,) = ckptkit.verify(roots[0], against=roots[1])
    assert [key in problem.message for problem in verified.problems] == ([True] if key else [])
    if key:
        with pytest.raises(Mismatch, match=key):
            ckptkit.average(roots, tmp_path / "mean")
    else:
        ckptkit.average(roots, tmp_path / "mean")


def test_configs_of_two_libraries_are_not_compared(tmp_path: Path) -> None:
    roots = [write_config(tmp_path / name, one) for name, one in (("a", CONFIG), ("b", TIMM))]
    for root in roots:
        save_file(model(), root / "model.safetensors")
    found = ckptkit.diff(*roots)
    assert any("config.json is of transformers in" in note and "of timm in" in note for note in found.notes)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "preprocessor_config.json", "chat_template.jinja"])
def test_other_inputs_are_said(name: str, tmp_path: Path) -> None:
    roots = [write_config(tmp_path / one, CONFIG) for one in "ab"]
    for root, text in zip(roots, ('{"a": 1}', '{"a": 2}'), strict=True):
        save_file(model(), root / "model.safetensors")
        (root / name).write_text(text)
    note = f"{name}: differs from {roots[1]}, so the models may get other inputs"
    assert note in ckptkit.diff(*roots).notes
    (verified,) = ckptkit.verify(roots[0], against=roots[1])
    assert verified.compared is not None
    assert note in verified.compared.notes
    assert note in ckptkit.average(roots, tmp_path / "mean").notes
    assert not any("inputs" in one for one in ckptkit.diff(roots[0], roots[0]).notes)


def write_adapter(root: Path, change: dict[str, Any]) -> Path:
    root.mkdir()
    matrices: dict[str, Tensor] = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{kind}.weight": torch.ones(4, 4) for kind in "AB"
    }
    save_file(matrices, root / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": True}
    (root / "adapter_config.json").write_text(json.dumps({**config, **change}))
    return root


def test_an_adapter_that_changes_its_base(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "zeros": {"init_lora_weights": False},
        "gaussian": {"init_lora_weights": "gaussian"},
        "pissa": {"init_lora_weights": "pissa"},
        "other": {"base_model_name_or_path": "org/other"},
    }
    plain, *others = (write_adapter(tmp_path / name, change) for name, change in changes.items())
    keys = {root.name: [one.key for one in ckptkit.diff(plain, root).configs] for root in others}
    assert keys == {"zeros": [], "gaussian": [], "pissa": ["init_lora_weights"], "other": []}
    notes = ckptkit.diff(plain, tmp_path / "other").notes
    assert [note for note in notes if "base" in note] == [
        f"the adapters name different bases: ``, in {tmp_path / 'other'} `org/other`"
    ]
    assert not any("adapter_config.json" in note for note in notes)
    (found,) = ckptkit.verify(plain, against=tmp_path / "pissa")
    assert "init_lora_weights" in found.problems[0].message
