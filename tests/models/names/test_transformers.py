"""What consolidate makes of the names that transformers has in memory, judged by `save_pretrained` and its like."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ckptkit import consolidate, convert, diff, prune
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.storage import Reader, load_weights
from tests.conftest import Produce
from tests.models.names.produced_transformers import TRAINED, trained
from tests.models.names.tiny_models import CONFIGS, EXPERTS, TEXT, class_of, make_model
from tests.producers import Truth, flatten, save_alone
from tests.tiers import nightly_but

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
WEIGHTS = "model.safetensors"
OTHERWISE = ["mixtral", "qwen3_moe", "granitemoe", "gpt_neox", "gemma3", "qwen2_vl", "qwen3_vl_moe", "jamba"]


def save_run(model: PreTrainedModel, run: Path, **change: Any) -> Path:
    """A run with its config.json and one checkpoint of the model as it is in memory."""
    state = {name: tensor for name, tensor in (model.state_dict() | change).items() if tensor is not None}
    save_alone({"model": state, "step": 1}, run / "ckpt-1")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(run)
    return run


def assert_same(found: Truth, expected: Truth) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model_type", nightly_but(["bert", "gemma3", "mixtral", "qwen2_vl", "t5"], CONFIGS))
def test_a_model_is_what_save_pretrained_writes(model_type: str, tmp_path: Path) -> None:
    model = make_model(model_type)
    run = save_run(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "theirs")
    done = consolidate(run, tmp_path / "ours", strict=True)
    assert_same(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))
    assert not any("not compared" in note for note in done.notes)
    loaded = type(model).from_pretrained(tmp_path / "ours", dtype="auto")
    assert_same(loaded.state_dict(), model.state_dict())


def test_a_known_type_with_another_head(tmp_path: Path) -> None:
    """A reward model: its class, not its type, says which tensors it has."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1, "num_labels": 1}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_attention_heads=4))
    run = save_run(model, tmp_path / "run")
    consolidate(run, tmp_path / "out", strict=True)
    assert_same(load_file(tmp_path / "out" / WEIGHTS), model.state_dict())
    save_run(model, tmp_path / "less", **{"score.weight": None})
    with pytest.raises(Mismatch) as raised:
        consolidate(tmp_path / "less", tmp_path / "none")
    assert raised.value.tensor == "score.weight"


@pytest.mark.parametrize("model_type", nightly_but(["qwen3_moe"], ["flint", "qwen2_moe", "qwen3_moe"]))
def test_experts_that_no_layer_has(model_type: str, tmp_path: Path) -> None:
    """A config counts experts, and keeps all layers dense: by `mlp_only_layers`, which flint has by default."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = CONFIG_MAPPING[model_type](**TEXT, **EXPERTS, mlp_only_layers=[0, 1])
    model = class_of(type(config))(config)
    run = save_run(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "theirs")
    consolidate(run, tmp_path / "ours", strict=True)
    assert_same(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))


@pytest.mark.parametrize("model_type", nightly_but(["gemma3", "mixtral"], OTHERWISE))
def test_a_model_on_disk_stays_as_it_is(model_type: str, tmp_path: Path) -> None:
    make_model(model_type).save_pretrained(tmp_path / "theirs")
    done = consolidate(tmp_path / "theirs", tmp_path / "ours", strict=True)
    assert_same(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))
    assert not any("became" in note for note in done.notes)


@pytest.mark.parametrize("model_type", nightly_but(["gpt2", "mixtral"], [*OTHERWISE, "gpt2", "t5", "whisper"]))
def test_a_training_starts_from_the_disk(model_type: str, tmp_path: Path) -> None:
    model = make_model(model_type)
    model.save_pretrained(tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "start", to="dcp", under="model", names="transformers")
    fresh = make_model(model_type)
    for reader, place in (
        (None, tmp_path / "start"),
        (Reader(tmp_path / "hub", under="model", names="transformers"), None),
    ):
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        state = {"model": fresh.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            dcp.load(state, checkpoint_id=place, storage_reader=reader, no_dist=True)
        assert_same(state["model"], model.state_dict())


@pytest.mark.parametrize("model_type", nightly_but(["qwen3_moe", "t5"], [*OTHERWISE, "t5"]))
def test_weights_are_loaded_by_either_names(model_type: str, tmp_path: Path) -> None:
    model = make_model(model_type)
    model.save_pretrained(tmp_path / "hub")
    for place in (tmp_path / "hub", save_run(model, tmp_path / "run")):
        fresh = make_model(model_type)
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        assert load_weights(place, fresh.state_dict()) == ()
        assert_same(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("model_type", nightly_but(["mixtral"], TRAINED))
def test_moments_follow_their_weights(model_type: str, produce: Produce, tmp_path: Path) -> None:
    """What transformers makes of a copy of the moments in the place of the weights is what they have to become."""
    made = produce(trained)
    truth = {
        name.removeprefix(f"{model_type}:"): one for name, one in made.truth.items() if name.startswith(model_type)
    }
    model = make_model(model_type)
    run = made.root / model_type
    consolidate(run, tmp_path / "hf", strict=True)
    assert_same(load_file(tmp_path / "hf" / WEIGHTS), reverted(model, truth, "model.{}"))
    convert(run, tmp_path / "dcp", to="dcp", names="hub")
    found = load_all(tmp_path / "dcp")
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        expected = reverted(model, truth, f"optimizer.state.{{}}.{kind}")
        names = {name: f"optimizer.state.{name}.{kind}" for name in reverted(model, truth, "model.{}")}
        assert_same({name: found[key] for name, key in names.items()}, expected | steps_of(kind, names))
    convert(tmp_path / "dcp", tmp_path / "back", to="dcp", names="transformers", base=str(run))
    back = load_all(tmp_path / "back")
    assert_same({name: back[name] for name in truth}, truth)


def reverted(model: PreTrainedModel, truth: Truth, place: str) -> Truth:
    """What `save_pretrained` would write of the tensors in a place."""
    there = {name: truth[key] for name in model.state_dict() if (key := place.format(name)) in truth}
    if not all(one.ndim for one in there.values()):
        return {}
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, there).items()}


def steps_of(kind: str, names: Iterable[str]) -> Truth:
    return dict.fromkeys(names, torch.tensor(2.0)) if kind == "step" else {}


def load_all(root: Path) -> Truth:
    dcp_to_torch_save(root, root / "all.pt")
    return {name: one for name, one in flatten(torch.load(root / "all.pt")).items() if isinstance(one, torch.Tensor)}


def test_what_a_trainer_puts_before_all_names(tmp_path: Path) -> None:
    """Also where it is what a part of the model is called: a module has the model as its `model`."""
    model = make_model("qwen3_moe")
    for prefix in ("net.", "model."):
        run = save_run(model, tmp_path / prefix)
        shutil.rmtree(run / "ckpt-1")
        save_alone({"model": {prefix + name: one for name, one in model.state_dict().items()}}, run / "ckpt-1")
        consolidate(run, tmp_path / f"of-{prefix}", strict=True)
        model.save_pretrained(tmp_path / "theirs")
        assert_same(load_file(tmp_path / f"of-{prefix}" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))


def test_the_form_is_that_of_the_base(tmp_path: Path) -> None:
    """Fused experts are legal on disk too: a training that began with them ends with them."""
    model = make_model("qwen3_moe")
    run = save_run(model, tmp_path / "run")
    for name, original in (("fused", False), ("single", True)):
        model.save_pretrained(tmp_path / name, save_original_format=original)
        consolidate(run, tmp_path / f"of-{name}", base=tmp_path / name, strict=True)
        assert_same(load_file(tmp_path / f"of-{name}" / WEIGHTS), load_file(tmp_path / name / WEIGHTS))
    assert load_file(tmp_path / "of-fused" / WEIGHTS).keys() != load_file(tmp_path / "of-single" / WEIGHTS).keys()


def test_what_does_not_belong(tmp_path: Path) -> None:
    model = make_model("mixtral")
    down = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(Mismatch, match=r"missing: layer 0 has this tensor") as caught:
        consolidate(save_run(model, tmp_path / "a", **{down: None}), tmp_path / "out")
    assert caught.value.tensor == "model.layers.1.block_sparse_moe.experts.0.w2.weight"
    with pytest.raises(Mismatch, match=r"expected shape \[12, 32, 24\] .*, found \[11, 32, 24\]") as caught:
        consolidate(save_run(model, tmp_path / "b", **{down: torch.zeros(11, 32, 24)}), tmp_path / "out")
    assert caught.value.tensor == down
    extra = save_run(model, tmp_path / "c", **{"model.layers.1.mlp.experts.side_proj": torch.zeros(3)})
    with pytest.raises(Mismatch, match="no rule") as caught:
        consolidate(extra, tmp_path / "out")
    assert caught.value.tensor == "model.layers.1.mlp.experts.side_proj"
    consolidate(extra, tmp_path / "out", exclude="*side_proj")


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / WEIGHTS)
    del tensors["model.layers.1.block_sparse_moe.experts.10.w1.weight"]
    save_file(tensors, tmp_path / "hub" / WEIGHTS, {"format": "pt"})
    with pytest.raises(Mismatch, match="the two become one tensor") as caught:
        convert(tmp_path / "hub", tmp_path / "start", to="dcp", names="transformers")
    assert caught.value.tensor == "model.layers.1.block_sparse_moe.experts.10.w1.weight"


def test_a_config_that_no_model_can_be_built_of(tmp_path: Path) -> None:
    run = save_run(make_model("mixtral"), tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 10**9}, "1e.09 layers"),
        ({"hidden_size": "wide"}, "cannot build a model"),
    ):
        (run / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(Unsupported, match=message) as caught:
            consolidate(run, tmp_path / "out")
        assert "--names keep" in str(caught.value.hint)
    (run / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    consolidate(run, tmp_path / "out")  # the weights are plain: the config is that of the model it started from
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


EYES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize("model_type", nightly_but(["beit"], ["dinov2", "beit", "dinov3_vit"]))
def test_stages_that_a_model_does_not_have(model_type: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[model_type](**EYES, image_size=28, patch_size=14)
    model = transformers.AutoModel.from_config(config)
    run = save_run(model, tmp_path / "run")
    written = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(written | {"out_features": ["stage9"], "out_indices": None}))
    with pytest.raises(Unsupported, match="out_features must be a subset") as caught:
        consolidate(run, tmp_path / "out")
    assert "--names keep" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    consolidate(run, tmp_path / "out", names="keep")
    assert_same(load_file(tmp_path / "out" / WEIGHTS), model.state_dict())


@pytest.mark.parametrize(
    "model_type", [one for one in ("kimi_k25_vision", "muse_spark_vision") if one in CONFIG_MAPPING]
)
def test_names_that_look_like_another_familys(model_type: str, tmp_path: Path) -> None:
    model = transformers.AutoModel.from_config(CONFIG_MAPPING[model_type](**EYES))
    run = save_run(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "theirs")
    consolidate(run, tmp_path / "ours", strict=True)
    assert_same(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("__version__ = '5.5.4'", "expected transformers 5.16 or newer, found 5.5.4"),
        ("raise ImportError('huggingface-hub<2.0 is required')", "cannot be imported: huggingface-hub<2.0 is required"),
    ],
)
def test_a_transformers_that_ckptkit_cannot_use(found: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "transformers.py").write_text(found)
    run = save_run(make_model("qwen2_moe"), tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-m", "ckptkit", "consolidate", run, tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'old'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert reason in done.stderr
    assert "hint: pip install --upgrade 'ckptkit-fsdp[hf]', or keep the names with --names keep" in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_transformers(tmp_path: Path) -> None:
    code = "import sys; sys.modules['transformers'] = None; from ckptkit.cli import main; main()"

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
        )

    moe = save_run(make_model("qwen2_moe"), tmp_path / "moe")
    refused = run("consolidate", moe, tmp_path / "out")
    assert refused.returncode == 3
    assert "--names keep" in refused.stderr
    assert not (tmp_path / "out").exists()
    kept = run("consolidate", moe, tmp_path / "out", "--names", "keep")
    assert kept.returncode == 0, kept.stderr
    other = run("consolidate", save_run(make_model("starcoder2"), tmp_path / "dense"), tmp_path / "dense-out")
    assert other.returncode == 0, other.stderr
    assert "not compared" in other.stdout + other.stderr
    assert "not installed" in other.stdout + other.stderr
    for known in ("mixtral", "qwen3_moe"):
        model = make_model(known)
        done = run("consolidate", save_run(model, tmp_path / known), tmp_path / f"of-{known}", "--strict")
        assert done.returncode == 0, done.stderr
        model.save_pretrained(tmp_path / f"theirs-{known}")
        assert_same(load_file(tmp_path / f"of-{known}" / WEIGHTS), load_file(tmp_path / f"theirs-{known}" / WEIGHTS))
        back = run(
            "convert", tmp_path / f"of-{known}", tmp_path / f"back-{known}", "--to", "dcp", "--names", "transformers"
        )
        assert back.returncode == 0, back.stderr
        assert_same(load_all(tmp_path / f"back-{known}"), model.state_dict())


def test_state_of_modules_is_left_out(tmp_path: Path) -> None:
    model = make_model("qwen3")
    run = save_run(model, tmp_path / "run", **{"model.layers.0.mlp._extra_state": torch.zeros(5, dtype=torch.uint8)})
    model.save_pretrained(tmp_path / "theirs")
    done = consolidate(run, tmp_path / "out", strict=True)
    assert_same(load_file(tmp_path / "out" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))
    assert any("_extra_state" in note for note in done.notes)


def kept_in_fp32(model: PreTrainedModel) -> set[str]:
    """The weights that the installed transformers keeps in fp32: 5.24 has more of DeepSeek V3 than 5.23."""
    modules = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    found = {name for name in model.state_dict() if any(f".{module}." in f".{name}." for module in modules)}
    assert found
    return found


@pytest.mark.parametrize(("model_type", "part"), [("deepseek_v3", "e_score_correction_bias"), ("t5", "wo.weight")])
def test_what_loaders_keep_in_fp32_stays_so(model_type: str, part: str, tmp_path: Path) -> None:
    run = save_run(make_model(model_type), tmp_path / "run")
    dtype = {"deepseek_v3": "bf16", "t5": "fp16"}[model_type]
    done = consolidate(run, tmp_path / "out", dtype=dtype)
    wide = {name for name, tensor in load_file(tmp_path / "out" / WEIGHTS).items() if tensor.dtype == torch.float32}
    assert wide == kept_in_fp32(make_model(model_type))
    assert any("kept in fp32" in note and part in note for note in done.notes)
    consolidate(run, tmp_path / "narrow", dtype=[dtype, *(f"{name}={dtype}" for name in wide)])
    assert all(one.dtype != torch.float32 for one in load_file(tmp_path / "narrow" / WEIGHTS).values())


def test_a_demoted_checkpoint_keeps_them_too(tmp_path: Path) -> None:
    model = make_model("deepseek_v3")
    run = save_run(model, tmp_path / "run")
    save_alone({"model": model.state_dict()}, run / "ckpt-2")
    plan = prune(run, keep_last=1, demote=True)
    done = prune(run, keep_last=1, demote=True, yes=True)
    assert [entry.freed_bytes for entry in plan.demote] == [entry.freed_bytes for entry in done.demote]
    wide = {name for name, one in load_file(run / "ckpt-1" / WEIGHTS).items() if one.dtype == torch.float32}
    assert wide == kept_in_fp32(model)
    assert [entry.reason.rpartition("; ")[2] for entry in done.demote] == [f"tensors kept in fp32: {len(wide)}"]


def test_dtypes_like_those_of_another_model(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    run = save_run(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "like")
    mixed = {
        name: t.bfloat16() if "experts" in name else t for name, t in load_file(tmp_path / "like" / WEIGHTS).items()
    }
    save_file(mixed, tmp_path / "like" / WEIGHTS)
    consolidate(run, tmp_path / "out", dtype=f"like:{tmp_path / 'like'}")
    assert_same(load_file(tmp_path / "out" / WEIGHTS), mixed)
    save_file({name: t for name, t in mixed.items() if "norm" not in name}, tmp_path / "like" / WEIGHTS)
    with pytest.raises(Mismatch, match="does not have this tensor"):
        consolidate(run, tmp_path / "none", dtype=f"like:{tmp_path / 'like'}")
    consolidate(run, tmp_path / "some", dtype=[f"like:{tmp_path / 'like'}", "*norm*=fp16"])
    assert load_file(tmp_path / "some" / WEIGHTS)["model.norm.weight"].dtype == torch.float16


@pytest.mark.parametrize("model_type", nightly_but(["mixtral"], ["mixtral", "gemma3", "gpt_neox"]))
def test_a_diff_sees_through_the_names(model_type: str, tmp_path: Path) -> None:
    model = make_model(model_type)
    run = save_run(model, tmp_path / "run")
    consolidate(run, tmp_path / "out")
    assert diff(run, tmp_path / "out").is_equal


def test_globs_of_dtypes_match_names_of_either_side(tmp_path: Path) -> None:
    source = save_run(make_model("qwen3_moe"), tmp_path / "run")
    ours = consolidate(source, tmp_path / "out", dtype="*.0.mlp.experts.gate_up_proj=bf16")
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    halves = {name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    wanted = {name for name in tensors if ".0.mlp.experts." in name and "down_proj" not in name}
    assert halves == wanted
    assert wanted
    assert not any("--dtype" in note for note in ours.notes)
    glob = "*.0.mlp.experts.*.gate_proj.weight"
    theirs = consolidate(source, tmp_path / "other", dtype=f"{glob}=bf16")
    assert f"--dtype '{glob}' matches names in the output, but none in the source" in theirs.notes
    tensors = load_file(tmp_path / "other" / WEIGHTS)
    halves = {name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    assert halves == {name for name in wanted if "gate_proj" in name}
