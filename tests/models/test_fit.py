"""Names, shapes and ties held against config.json, judged by transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ckptkit import consolidate
from ckptkit.errors import IOFailure, Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage
from ckptkit.layout.renames import find_prefix_rule
from ckptkit.models.architectures import find_table, has_tied_head
from ckptkit.models.expected import expected_model
from tests.producers import save_alone
from tests.tiers import pairs

FAMILIES = [
    *("llama", "mistral", "granite", "smollm3", "qwen2", "qwen3"),
    *("gemma", "gemma2", "gemma3_text", "olmo2", "phi3"),
]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(model_type: str = "llama", **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **options)).eval()


def save_run(model: PreTrainedModel, run: Path, state: dict[str, Any] | None = None) -> Path:
    """A run with its config.json and one checkpoint of the model."""
    save_alone({"model": model.state_dict() if state is None else state, "step": 1}, run / "ckpt-1")
    model.config.save_pretrained(run)
    return run / "ckpt-1"


def same_logits(model: PreTrainedModel, out: Path) -> bool:
    tokens = torch.arange(24).reshape(2, 12)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        return torch.equal(model(tokens).logits, loaded(tokens).logits)


@pytest.mark.parametrize("options", [{}, {"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 16}], ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_expected_shapes_are_transformers(model_type: str, options: dict[str, Any]) -> None:
    try:
        config = AutoConfig.for_model(model_type, **SIZES, **options)
    except Exception:  # noqa: BLE001 - this family has no such option
        pytest.skip("no such option")
    if not all(hasattr(config, name) for name in options):
        pytest.skip("no such option")
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    assert list(expected_model(config.to_dict()).shapes.items()) == [
        (name, tuple(tensor.shape)) for name, tensor in state.items()
    ]
    assert has_tied_head(config.to_dict()) == config.tie_word_embeddings


def test_other_models_are_unknown_and_said(tmp_path: Path) -> None:
    assert find_table({"model_type": "t5"}) is None
    with pytest.raises(Unsupported, match="lacks a size"):
        expected_model({"model_type": "llama", "hidden_size": "wide"})
    source = save_run(make_model(), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"model_type": "llama_of_my_own"}))
    done = consolidate(source, tmp_path / "out")
    assert any("not compared" in note and "llama_of_my_own" in note for note in done.notes)


@pytest.mark.parametrize(("model_type", "tied"), pairs(["llama", "qwen3", "gemma2"], (True, False)))
def test_the_export_gives_the_same_logits(model_type: str, tied: bool, tmp_path: Path) -> None:
    model = make_model(model_type, tie_word_embeddings=tied)
    source = save_run(model, tmp_path / "run")
    done = consolidate(tmp_path / "run", tmp_path / "out")
    assert done.source == source
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) != tied
    assert same_logits(model, tmp_path / "out")


def test_sharded_export_loads(tmp_path: Path) -> None:
    model = make_model()
    consolidate(save_run(model, tmp_path / "run"), tmp_path / "out", max_shard_size=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert same_logits(model, tmp_path / "out")


def test_config_says_what_is_true(tmp_path: Path) -> None:
    model = make_model()
    model.config.architectures = ["FSDPLlamaForCausalLM"]
    run = save_run(model, tmp_path / "run").parent
    (run / "tokenizer.json").write_text("{}")
    (run / "chat_template.jinja").write_text("{{ messages }}")
    (run / "training_args.bin").write_bytes(b"no companion")
    consolidate(run, tmp_path / "out", dtype="bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"tokenizer.json", "chat_template.jinja"}
    assert "training_args.bin" not in names
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_no_config_is_said(tmp_path: Path) -> None:
    save_alone({"model": make_model().state_dict()}, tmp_path / "ckpt")
    done = consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert any("no config.json" in text for text in done.warnings)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "ckptkit.json"}


def test_a_config_of_somebody_else_is_not_taken(tmp_path: Path) -> None:
    """The directory above the run may hold anything; only from a part of a checkpoint is the run two levels up."""
    model = make_model()
    model.config.save_pretrained(tmp_path)
    save_alone({"model": model.state_dict()}, tmp_path / "runs" / "ckpt-1")
    assert any("no config.json" in text for text in consolidate(tmp_path / "runs", tmp_path / "one").warnings)
    save_alone({"model": model.state_dict()}, tmp_path / "checkpoint-1" / "pytorch_model_fsdp_0")
    consolidate(tmp_path / "checkpoint-1", tmp_path / "two")
    assert same_logits(model, tmp_path / "two")


def test_base_gives_config_and_tokenizer(tmp_path: Path) -> None:
    model = make_model()
    save_alone({"model": model.state_dict()}, tmp_path / "ckpt")
    model.save_pretrained(tmp_path / "base")
    consolidate(tmp_path / "ckpt", tmp_path / "out", base=str(tmp_path / "base"))
    assert same_logits(model, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpoint, match=r"config\.json"):
        consolidate(tmp_path / "ckpt", tmp_path / "none", base=str(tmp_path / "empty"))
    with pytest.raises(Usage, match="expected a directory or a Hub id"):
        consolidate(tmp_path / "ckpt", tmp_path / "none", base=str(tmp_path / "absent"))


def test_base_can_be_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the Hub's own cache, as after a download; the Hub itself is out of a test's reach."""
    model = make_model()
    save_alone({"model": model.state_dict()}, tmp_path / "ckpt")
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    model.config.save_pretrained(tmp_path / "downloaded")
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (tmp_path / "downloaded").iterdir():  # as the cache keeps them: links to blobs
        file.rename(blobs / f"blob-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    consolidate(tmp_path / "ckpt", tmp_path / "out", base="org/model")
    assert same_logits(model, tmp_path / "out")
    with pytest.raises(IOFailure, match="org/other"):
        consolidate(tmp_path / "ckpt", tmp_path / "none", base="org/other")


def test_links_in_a_strangers_checkpoint_are_not_followed(tmp_path: Path) -> None:
    model = make_model()
    (tmp_path / "secret").write_text("{}")
    run = save_run(model, tmp_path / "run").parent
    (run / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(Unsafe, match="symbolic link"):
        consolidate(run, tmp_path / "out")


def test_ties_that_came_apart(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"][3, 5] += 1
    with pytest.raises(Mismatch, match="bytes differ") as caught:
        consolidate(save_run(model, tmp_path / "run", state), tmp_path / "out")
    assert caught.value.tensor == "lm_head.weight"


def test_a_missing_tensor(tmp_path: Path) -> None:
    model = make_model()
    state = dict(model.state_dict())
    del state["model.norm.weight"]
    with pytest.raises(Mismatch, match="missing") as caught:
        consolidate(save_run(model, tmp_path / "run", state), tmp_path / "out")
    assert caught.value.tensor == "model.norm.weight"


@pytest.mark.parametrize(
    "change",
    [lambda name: f"backbone.{name}", lambda name: name.removeprefix("model.")],
    ids=["prefix too many", "prefix too few"],
)
def test_the_hint_of_a_missing_tensor_mends_it(change: Any, tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    state = {change(name): tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    source = save_run(model, tmp_path / "run", state | {"loss.scale": torch.ones(1)})
    with pytest.raises(Mismatch, match="missing") as caught:
        consolidate(source, tmp_path / "out")
    assert caught.value.hint is not None
    rule = caught.value.hint.removeprefix("--rename '").removesuffix("'")
    consolidate(source, tmp_path / "out", rename=[rule], exclude="*loss.scale")
    assert same_logits(model, tmp_path / "out")


def test_no_rename_is_found_where_none_helps() -> None:
    assert find_prefix_rule(["a.b", "a.c"], ["x.a.b", "y.a.c"]) is None
    assert find_prefix_rule(["a.b", "a.c"], ["x.a.b", "x.a.c", "z"]) == r"^x\.=>"


def test_another_shape(tmp_path: Path) -> None:
    model = make_model()
    state = dict(model.state_dict())
    state["model.norm.weight"] = torch.ones(31)
    with pytest.raises(Mismatch, match=r"\[32\].*\[31\]"):
        consolidate(save_run(model, tmp_path / "run", state), tmp_path / "out")


def test_a_tensor_too_many_is_kept_and_said(tmp_path: Path) -> None:
    model = make_model()
    source = save_run(model, tmp_path / "run", {**model.state_dict(), "steps_seen": torch.tensor(7)})
    done = consolidate(source, tmp_path / "out")
    assert any("steps_seen" in note for note in done.notes)
    assert load_file(tmp_path / "out" / "model.safetensors")["steps_seen"] == 7
    assert same_logits(model, tmp_path / "out")
    with pytest.raises(Mismatch, match="does not describe"):
        consolidate(source, tmp_path / "strict", strict=True)


def test_rows_that_config_json_describes_are_no_warning(tmp_path: Path) -> None:
    """Moshi's embedding has one row more than its head."""
    checkpoint = save_run(make_model("moshi", ffn_dim=48), tmp_path)
    assert consolidate(checkpoint, tmp_path / "out").warnings == []
    (tmp_path / "config.json").unlink()
    assert any("expected 65 rows" in warning for warning in consolidate(checkpoint, tmp_path / "bare").warnings)
