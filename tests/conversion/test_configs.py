"""What config.json says of the computation, in each command that has two of them."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.errors import Mismatch
from tests.checkpoints.examination.inconsistent import save_dcp
from tests.faults.meaning_sources import CONFIG, FORMATS, add_of, model
from tests.faults.meaning_things import _base_with

EPS = {"rms_norm_eps": 0.125}


def write_model(root: Path, change: dict[str, Any]) -> Path:
    root.mkdir(parents=True)
    _base_with(model(), {"rms_norm_eps": 1e-6, **change})(root)
    return root


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_model(tmp_path / "a", {}), write_model(tmp_path / "b", EPS)


def test_diff_does_not_call_them_the_same(pair: tuple[Path, Path]) -> None:
    found = ckptkit.diff(*pair)
    assert found.has_same_entries
    assert not found.is_equal
    assert [(one.key, one.here, one.there) for one in found.configs] == [("rms_norm_eps", 1e-6, 0.125)]
    assert "the tensors are equal, but the configs differ in rms_norm_eps" in "\n".join(found.summary())
    shutil.copy(pair[0] / "config.json", pair[1])
    assert ckptkit.diff(*pair).is_equal
    (pair[1] / "config.json").unlink()
    assert any("so ckptkit did not compare how the models compute" in note for note in ckptkit.diff(*pair).notes)


@pytest.mark.parametrize(
    ("key", "one", "two"), [("lora_alpha", 8, 64), ("use_rslora", False, True), ("alpha_pattern", {}, {"q_proj": 2})]
)
def test_adapters_with_other_configs_are_not_the_same(key: str, one: object, two: object, tmp_path: Path) -> None:
    matrices = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{kind}.weight": torch.ones(4, 4) for kind in "AB"
    }
    for root, value in ((tmp_path / "a", one), (tmp_path / "b", two)):
        root.mkdir()
        save_file(matrices, root / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], key: value}
        (root / "adapter_config.json").write_text(json.dumps(config))
    found = ckptkit.diff(tmp_path / "a", tmp_path / "b")
    assert not found.is_equal
    assert [different.key for different in found.configs] == [key]


def test_classifiers_with_other_labels_are_not_the_same(tmp_path: Path) -> None:
    labels = [{"0": "no", "1": "yes"}, {"0": "yes", "1": "no"}, {"0": "LABEL_0", "1": "LABEL_1"}]
    one, two, unnamed = (write_model(tmp_path / str(i), {"id2label": names}) for i, names in enumerate(labels))
    assert [different.key for different in ckptkit.diff(one, two).configs] == ["id2label"]
    assert ckptkit.diff(one, unnamed).is_equal
    with pytest.raises(Mismatch, match="id2label"):
        ckptkit.average([one, two], tmp_path / "out")


def test_verify_against(pair: tuple[Path, Path]) -> None:
    (found,) = ckptkit.verify(pair[0], against=pair[1])
    assert "rms_norm_eps (1e-06, in" in found.problems[0].message
    shutil.copy(pair[0] / "config.json", pair[1])
    (found,) = ckptkit.verify(pair[0], against=pair[1])
    assert found.is_ok


def test_average_asks_for_a_base(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match=r"`rms_norm_eps` in config\.json: expected 1e-06") as raised:
        ckptkit.average(pair, tmp_path / "out")
    assert "--base MODEL" in str(raised.value.hint)
    done = ckptkit.average(pair, tmp_path / "out", base=str(pair[0]))
    assert any("rms_norm_eps" in warning for warning in done.warnings)


def test_delta_says_what_it_does_not_contain(pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = ckptkit.delta(*pair, tmp_path / "delta")
    assert any("a delta does not contain config.json" in note and "rms_norm_eps" in note for note in made.notes)


def test_an_export_with_another_base(pair: tuple[Path, Path], tmp_path: Path) -> None:
    done = ckptkit.consolidate(pair[0], tmp_path / "out", base=str(pair[1]))
    assert any("rms_norm_eps (1e-06, in" in warning for warning in done.warnings)


def test_doctor_with_another_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (found,) = ckptkit.doctor(pair[0], model=pair[1]).findings
    assert (found.code, found.fix) == ("config", None)
    assert "rms_norm_eps 0.125, not 1e-06" in found.message
    (tmp_path / "wrong").mkdir()
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 24}
    (tmp_path / "wrong" / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    (found,) = ckptkit.doctor(pair[0], model=tmp_path / "wrong").findings
    assert found.code == "config"
    assert "2 layers of width 8 here, 3 layers of width 16 in its config; 21 of 21 tensors" in found.message


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({}, None),
        ({"rotary_base": 500000}, "rope_theta"),
        ({"norm_epsilon": 1e-6}, "rms_norm_eps"),
        ({"rotary_percent": 0.5}, "partial_rotary_factor"),
        ({"use_rope_scaling": True}, "rope_type"),
        ({"position_embedding_type": "none"}, "position_embedding_type"),
        ({"window_size": (8, 0)}, "sliding_window"),
    ],
)
def test_arguments_of_megatron(args: dict[str, Any], key: str | None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    hidden, layers = 8, 2
    fused = torch.randn(layers, 3 * hidden, hidden)
    weights = {
        "embedding.word_embeddings.weight": torch.randn(16, hidden),
        "decoder.layers.self_attention.linear_qkv.weight": fused,
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": torch.ones(layers, hidden),
        "decoder.layers.self_attention.linear_proj.weight": torch.randn(layers, hidden, hidden),
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(layers, 24, hidden),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": torch.ones(layers, hidden),
        "decoder.layers.mlp.linear_fc2.weight": torch.randn(layers, hidden, 12),
        "decoder.final_layernorm.weight": torch.ones(hidden),
        "output_layer.weight": torch.randn(16, hidden),
    }
    root = tmp_path / "run" / "iter_0000005"
    save_dcp(weights, root)
    common: dict[str, Any] = {
        "swiglu": True,
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "norm_epsilon": 1e-5,
        "window_size": None,
    }
    common |= {"position_embedding_type": "rope", "use_rope_scaling": False, "moe_router_topk": 2}
    torch.save({"args": Namespace(**{**common, **args}), "iteration": 5}, root / "common.pt")
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-5, "rope_theta": 1e4}))
    done = ckptkit.consolidate(root, tmp_path / "out", base=str(base))
    said = [one for one in done.warnings if "differs from what" in one]
    assert bool(said) is (key is not None)
    assert key is None or f"{key} (" in said[0]


def test_the_widest_dtype_where_you_ask_for_several(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for rules, dtype in (("model.layers.*=bf16", "float32"), ("bf16", "bfloat16")):
        out = tmp_path / dtype
        ckptkit.consolidate(pair[0], out, dtype=rules)
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("name", FORMATS)
def test_ls_sees_a_file_that_was_cut(name: str, tmp_path: Path) -> None:
    root = tmp_path / "run" / add_of(name)
    root.parent.mkdir()
    FORMATS[name].make(root, {})
    assert ckptkit.ls(root.parent).checkpoints[0].is_complete
    files = [root] if root.is_file() else [one for one in root.rglob("*") if one.is_file()]
    largest = max((one for one in files if one.suffix not in (".json", ".pkl")), key=lambda one: one.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    assert not ckptkit.ls(root.parent).checkpoints[0].is_complete


def test_a_file_of_another_save_is_one_problem(tmp_path: Path) -> None:
    save_dcp({"model": model()}, tmp_path / "step-1")
    save_dcp({"model": {name: one[:3].clone() for name, one in model(1).items()}}, tmp_path / "step-2")
    shutil.copy(tmp_path / "step-2" / "__0_0.distcp", tmp_path / "step-1")
    for fast in (True, False):
        (found,) = ckptkit.verify(tmp_path / "step-1", fast=fast)
        (problem,) = found.problems
        assert "entries differ from the metadata" in problem.message
        assert "another save" in str(problem.hint)
    diagnosis = ckptkit.doctor(tmp_path / "step-1")
    assert [one.code for one in diagnosis.findings] == ["corrupt"]
    assert diagnosis.not_read == f"tensors were not read: run `ckptkit verify {tmp_path / 'step-1'}` to check them"


def test_a_small_file_that_differs_from_the_manifest(tmp_path: Path) -> None:
    root = write_model(tmp_path / "step-1", {})
    (root / "tokenizer_config.json").write_text("{}")
    ckptkit.make_manifest(root)
    assert not ckptkit.consolidate(root, tmp_path / "unchanged").warnings
    for name in ("config.json", "tokenizer_config.json"):
        (root / name).write_text(json.dumps(json.loads((root / name).read_text()) | {"use_cache": False}))
    assert ckptkit.consolidate(root, tmp_path / "base", base=tmp_path / "unchanged").warnings == []
    for done in (ckptkit.consolidate(root, tmp_path / "hf"), ckptkit.convert(root, tmp_path / "dcp", to="dcp")):
        found = [words for words in done.warnings if "(manifest), found" in words]
        assert [words.partition(":")[0] for words in found] == [
            str(root / name) for name in ("config.json", "tokenizer_config.json")
        ]


@pytest.mark.parametrize("name", ["other.safetensors", "other.safetensors.index.json"])
def test_the_file_that_config_json_names(name: str, tmp_path: Path) -> None:
    """Loaders open `transformers_weights`; the `save_pretrained` of transformers leaves that key out, as we do."""
    named = write_model(tmp_path / "named", {"transformers_weights": name})
    weights = {key: tensor + 1 for key, tensor in load_file(named / "model.safetensors").items()}
    save_file(weights, named / "other.safetensors")
    if name.endswith(".json"):
        (named / name).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "other.safetensors")}))
    save_dcp({"model": model()}, tmp_path / "step-1")
    for source, base in ((named, None), (tmp_path / "step-1", named)):
        out = tmp_path / "out" / source.name
        ckptkit.consolidate(source, out, base=base)
        assert "transformers_weights" not in json.loads((out / "config.json").read_text())
    written = load_file(tmp_path / "out" / "named" / "model.safetensors")
    assert all(torch.equal(written[key], tensor) for key, tensor in weights.items())
