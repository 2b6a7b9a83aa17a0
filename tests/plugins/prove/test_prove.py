"""Whether `prove` tells an export that computes what its source does from one that does not, in transformers."""

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
from torch import Tensor

from ckptkit.conversion.convert import consolidate, convert
from ckptkit.errors import Mismatch, Unsupported, Usage
from ckptkit.plugins.prove.prove import prove
from tests.producers import save_alone

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

LAYERS = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES: dict[str, Any] = LAYERS | HEADS | {"tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama tied": lambda: transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_positions=128, n_embd=32, n_layer=2, n_head=4),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
# with buffers, or uses of weights, of their own
OTHERS: dict[str, Callable[[], Any]] = {
    "llama yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES),
    "mamba": lambda: transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
}


def train(kind: str, place: Path) -> Path:
    """Save a model as a training does, by the names that it has in memory; give the checkpoint."""
    torch.manual_seed(0)
    config = MODELS[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    state = {"model": dict(model.state_dict()), "optimizer": {"step": torch.tensor(3)}}
    save_alone(state, place / "ckpt-3")
    config.architectures = [type(model).__name__]
    config.save_pretrained(place / "ckpt-3")
    return place / "ckpt-3"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("kind", MODELS)
def test_an_export_is_proved(kind: str, tmp_path: Path) -> None:
    source = train(kind, tmp_path)
    consolidate(source, tmp_path / "out")
    found = prove(tmp_path / "out", against=source)
    assert found.is_ok
    assert (found.logits.max_abs, found.logits.first, found.logits.tokens) == (0, None, 64)
    rounded = tmp_path / "rounded"
    consolidate(source, rounded, dtype="bf16")
    found = prove(rounded, against=source)
    assert found.is_ok
    assert found.logits.rounded
    assert 0 < found.logits.kl < 0.005
    assert found.logits.max_abs > 0


@pytest.mark.parametrize("kind", [*MODELS, *OTHERS])
def test_the_logits_are_those_of_transformers_itself(kind: str, tmp_path: Path) -> None:
    from ckptkit.checkpoints.checkpoint import Checkpoint
    from ckptkit.plugins.prove.forward import Forward
    from ckptkit.plugins.prove.model import Runnable

    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config((MODELS | OTHERS)[kind](), dtype=torch.float32)
    made.save_pretrained(tmp_path)
    ids = torch.arange(40)[None]
    config = json.loads((tmp_path / "config.json").read_text())
    ours = Forward(Runnable.of(Checkpoint.open(tmp_path), config)).compute_outputs(ids)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        theirs = model(input_ids=ids).logits[0]
    torch.testing.assert_close(ours.logits, theirs)
    if kind == "llama":
        layers = [f"model.layers.{number}" for number in range(3)]
        assert list(ours.outputs) == ["model.embed_tokens", *layers, "model.norm", "lm_head"]


def test_names_of_another_family_are_followed(llama: Path, tmp_path: Path) -> None:
    """A checkpoint with torchtitan's names, q and k in its order of rows, was made of the model; and a model of it."""
    shutil.copy(llama / "config.json", tmp_path / "config.json")
    consolidate(llama, tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "titan", to="dcp", under="model", names="torchtitan")
    shutil.copy(llama / "config.json", tmp_path / "titan" / "config.json")
    consolidate(tmp_path / "titan", tmp_path / "out")
    found = prove(tmp_path / "out", against=tmp_path / "titan")
    assert found.is_ok
    assert found.logits.max_abs == 0


def permute_heads(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        rows = tensors[name].reshape(-1, 2, 4, 32)
        tensors[name] = rows.transpose(1, 2).reshape(-1, 32).contiguous()


def swap_layers(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        other = name.replace(".1.", ".2.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def flip_sign(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] *= -1


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = torch.nan


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (permute_heads, "model.layers.0"),
        (swap_layers, "model.layers.1"),
        (flip_sign, "model.layers.1"),
        (spoil, "model.layers.2"),
    ],
)
def test_a_wrong_export_is_found(
    llama: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], first: str
) -> None:
    consolidate(llama, tmp_path / "out")
    rewrite(tmp_path / "out", change)
    found = prove(tmp_path / "out", against=llama)
    assert not found.is_ok
    assert found.tensors[0].different
    assert not found.logits.is_ok
    assert found.logits.first == first


def rewrite(place: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a model as another exporter would have written them: without a manifest."""
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "ckptkit.json").unlink()


def change_config(place: Path, change: Mapping[str, Any]) -> None:
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_equal_tensors_under_a_wrong_config_are_found(llama: Path, tmp_path: Path) -> None:
    consolidate(llama, tmp_path / "out")
    change_config(tmp_path / "out", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})
    found = prove(tmp_path / "out", against=llama)
    assert found.tensors[0].is_equal
    assert not found.logits.is_ok
    assert found.logits.first == "model.layers.0"
    assert prove(tmp_path / "out", against=llama, base=tmp_path / "out").is_ok


def test_rounding_hides_no_wrong_config(llama: Path, tmp_path: Path) -> None:
    """A little other, by far less than what bfloat16 may cost."""
    consolidate(llama, tmp_path / "out", dtype="bf16")
    change_config(tmp_path / "out", {"rms_norm_eps": 1e-4})
    found = prove(tmp_path / "out", against=llama)
    assert found.tensors[0].is_equal
    assert found.logits.kl < 0.001
    assert found.logits.unexplained > 0
    assert not found.is_ok
    assert found.logits.first == "model.layers.0"


def test_what_is_not_proved_is_said(llama: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare" / "ckpt-3"
    shutil.copytree(llama, bare)
    (bare / "tokenizer.json").write_text("{}")
    consolidate(bare, tmp_path / "out")
    assert prove(tmp_path / "out", against=bare).notes == ()
    (bare / "tokenizer.json").write_text("[]")
    (note,) = prove(tmp_path / "out", against=bare).notes
    assert note.startswith("tokenizer.json: differs from")
    (bare / "config.json").unlink()
    (note,) = prove(tmp_path / "out", against=bare).notes
    assert "the export's config.json, which this run does not prove" in note


def test_a_tie_of_what_differs_is_an_error(llama: Path, tmp_path: Path) -> None:
    """In transformers 5 both stay as they are; other programs lose the head."""
    consolidate(llama, tmp_path / "out")
    change_config(tmp_path / "out", {"tie_word_embeddings": True})
    with pytest.raises(Mismatch, match=r"ties it to `model\.embed_tokens\.weight`") as raised:
        prove(tmp_path / "out", against=llama)
    assert raised.value.tensor == "lm_head.weight"


def test_an_adapter_is_no_model_to_prove_against(llama: Path, tmp_path: Path) -> None:
    consolidate(llama, tmp_path / "out")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    save_alone({"model": {name: torch.ones(2, 32)}}, tmp_path / "ckpt-1")
    with pytest.raises(Unsupported, match="an adapter that is not merged"):
        prove(tmp_path / "out", against=tmp_path / "ckpt-1")


def test_tokens_may_be_given(llama: Path, tmp_path: Path) -> None:
    consolidate(llama, tmp_path / "out")
    (tmp_path / "tokens.json").write_text("[1, 2,\n 95]")
    for tokens in ("1,2,95", [1, 2, 95], tmp_path / "tokens.json", str(tmp_path / "tokens.json")):
        assert prove(tmp_path / "out", against=llama, tokens=tokens).logits.tokens == 3
    with pytest.raises(Usage, match="expected tokens below 96, the size of the vocabulary, found 96"):
        prove(tmp_path / "out", against=llama, tokens="1,96")
    with pytest.raises(Usage, match=r"expected a file or a list of token ids .*found `absent`"):
        prove(tmp_path / "out", against=llama, tokens="absent")
    (tmp_path / "tokens.json").write_text("one two")
    with pytest.raises(Usage, match="contains no tokens"):
        prove(tmp_path / "out", against=llama, tokens=tmp_path / "tokens.json")


def test_what_is_missing_is_named(llama: Path, tmp_path: Path) -> None:
    consolidate(llama, tmp_path / "out")
    rewrite(tmp_path / "out", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(Mismatch, match="describes it") as raised:
        prove(tmp_path / "out", against=llama)
    assert raised.value.tensor == "model.layers.1.mlp.up_proj.weight"


def test_a_model_that_transformers_does_not_know_is_refused(llama: Path, tmp_path: Path) -> None:
    consolidate(llama, tmp_path / "out")
    change_config(tmp_path / "out", {"model_type": "of_their_own", "architectures": ["OfTheirOwn"]})
    with pytest.raises(Unsupported, match="of_their_own"):
        prove(tmp_path / "out", against=llama)


def test_no_more_than_a_block_is_in_memory(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptkit.plugins.prove import forward

    there: dict[tuple[int, str], int] = {}
    most: list[int] = []
    fill, empty = forward.load_into_module, forward.free_in_module

    def note_fill(owner: Any, name: str, stored: Tensor, rounded_to: Any) -> None:
        fill(owner, name, stored, rounded_to)
        there[id(owner), name] = stored.numel()
        most.append(sum(there.values()))

    def note_empty(owner: Any, name: str) -> None:
        empty(owner, name)
        del there[id(owner), name]

    monkeypatch.setattr(forward, "load_into_module", note_fill)
    monkeypatch.setattr(forward, "free_in_module", note_empty)
    consolidate(llama, tmp_path / "out")
    assert prove(tmp_path / "out", against=llama).is_ok
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    block = sum(tensor.numel() for name, tensor in tensors.items() if ".layers.0." in name)
    assert max(most) == block
    assert there == {}


def test_without_transformers_there_is_a_hint(llama: Path) -> None:
    code = "import sys; sys.modules['transformers'] = None; from ckptkit import prove; prove('.', against='.')"
    done = subprocess.run([sys.executable, "-c", code], cwd=llama, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert "prove runs models with transformers, which is not installed (hint: pip install" in last


@pytest.mark.parametrize("kind", ["gpt2", "opt", "roberta", "distilbert"])
def test_a_model_of_few_positions_runs_with_fewer_tokens(kind: str, tmp_path: Path) -> None:
    from transformers import (
        AutoModelForMaskedLM,
        DistilBertConfig,
        GPT2Config,
        GPT2LMHeadModel,
        OPTConfig,
        OPTForCausalLM,
        RobertaConfig,
    )

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    of = {"intermediate_size": 48, "max_position_embeddings": 16}
    models = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)),
        "opt": lambda: OPTForCausalLM(OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32, **of)),
        "roberta": lambda: AutoModelForMaskedLM.from_config(RobertaConfig(**sizes, **of)),
        "distilbert": lambda: AutoModelForMaskedLM.from_config(
            DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=48, **of, vocab_size=64)
        ),
    }
    models[kind]().save_pretrained(tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "source")
    done = prove(tmp_path / "out", against=tmp_path / "source")
    assert done.is_ok
    assert done.logits.tokens == 14
    with pytest.raises(Usage, match=r"^tokens: expected at most 16 tokens, the model's positions"):
        prove(tmp_path / "out", against=tmp_path / "source", tokens=[5] * 17)
