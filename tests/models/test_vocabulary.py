"""Rows for a vocabulary: cropped or padded with zeros, in the file, in moments, in shards, in shares, in the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

import ckptkit
from ckptkit.conversion.combine import average
from ckptkit.conversion.finalize import finalize
from ckptkit.errors import Mismatch, Usage
from ckptkit.models.vocabulary import with_vocabulary_size
from tests.models.names.hub_models import HIDDEN, VOCABULARY, config_of, saved
from tests.tiers import slow_but

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Tensor]:
    return saved(config_of("llama"), tmp_path / "hub")


def resized(arrays: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """What is wanted, by torch."""
    zeros = torch.zeros(max(rows - VOCABULARY, 0), HIDDEN)
    return arrays | {name: torch.cat([arrays[name][:rows], zeros.to(arrays[name].dtype)]) for name in EMBEDDINGS}


def check(place: Path, wanted: dict[str, Tensor]) -> None:
    made = ckptkit.open(place)
    assert sorted(made) == sorted(wanted)
    assert all(torch.equal(made[name].torch(), tensor) for name, tensor in wanted.items())
    assert not any(part.problems for part in ckptkit.verify(place))


@pytest.mark.parametrize("rows", [37, 40, 64])
def test_a_model(rows: int, model: dict[str, Tensor], tmp_path: Path) -> None:
    """Transformers opens what comes out, and computes what it did."""
    transformers = pytest.importorskip("transformers")
    done = ckptkit.consolidate(tmp_path / "hub", tmp_path / "out", vocab_size=rows)
    check(tmp_path / "out", resized(model, rows))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == rows
    assert any("no tokenizer was found" in note for note in done.notes)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        after, before = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)(tokens).logits for name in ("out", "hub")
        )
    assert torch.allclose(after[..., :37], before[..., :37], atol=1e-5)
    assert not after[..., VOCABULARY:].any()


def test_other_dtypes_and_other_files(model: dict[str, Tensor], tmp_path: Path) -> None:
    ckptkit.consolidate(tmp_path / "hub", tmp_path / "out", vocab_size=64, dtype="bf16", max_shard_size=3000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    check(tmp_path / "out", {name: tensor.bfloat16() for name, tensor in resized(model, 64).items()})


def test_shares_of_the_work(model: dict[str, Tensor], tmp_path: Path) -> None:
    for part in ("1/2", "2/2"):
        ckptkit.consolidate(tmp_path / "hub", tmp_path / "out", vocab_size=64, part=part)
    finalize(tmp_path / "out")
    check(tmp_path / "out", resized(model, 64))


def test_what_was_read_is_counted_and_zeros_are_not(model: dict[str, Tensor], tmp_path: Path) -> None:
    """DCP has checksums: all that is read is compared, of the embedding too where it is padded."""
    dcp.save({"model": model}, checkpoint_id=tmp_path / "step-1")
    (tmp_path / "step-1" / "config.json").write_bytes((tmp_path / "hub" / "config.json").read_bytes())
    done = ckptkit.consolidate(tmp_path / "step-1", tmp_path / "out", vocab_size=64)
    check(tmp_path / "out", resized(model, 64))
    assert done.unchecked_bytes == 0
    assert done.checked_bytes == sum(tensor.nbytes for tensor in model.values())


def test_a_training(model: dict[str, Tensor], tmp_path: Path) -> None:
    """Moments are cropped and padded as their weights are; steps stay."""
    moments = {name: torch.randn(tensor.shape) for name, tensor in model.items()}
    states = {name: {"exp_avg": moments[name], "step": torch.tensor(3.0)} for name in model}
    state = {"model": model, "optimizer": {"state": states, "param_groups": [{"params": list(model), "lr": 0.1}]}}
    dcp.save(state, checkpoint_id=tmp_path / "step-1")
    (tmp_path / "step-1" / "config.json").write_bytes((tmp_path / "hub" / "config.json").read_bytes())
    for rows in (37, 64):
        options: dict[str, Any] = {"to": "dcp", "vocab_size": rows, "world_size": 3}
        ckptkit.convert(tmp_path / "step-1", tmp_path / f"to-{rows}", **options)
        wanted, wanted_moments = resized(model, rows), resized(moments, rows)
        again: dict[str, Any] = {
            "model": {name: torch.empty_like(tensor) for name, tensor in wanted.items()},
            "optimizer": {"state": {name: {"exp_avg": torch.empty_like(t)} for name, t in wanted.items()}},
        }
        dcp.load(again, checkpoint_id=tmp_path / f"to-{rows}")
        assert all(torch.equal(again["model"][name], tensor) for name, tensor in wanted.items())
        assert json.loads((tmp_path / f"to-{rows}" / "config.json").read_text())["vocab_size"] == rows
        for name, tensor in wanted_moments.items():
            assert torch.equal(again["optimizer"]["state"][name]["exp_avg"], tensor)


def test_a_token_would_have_no_row(model: dict[str, Tensor], tmp_path: Path) -> None:
    vocabulary = {f"t{i}": i for i in range(39)}
    (tmp_path / "hub" / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(Mismatch, match="the tokenizer has token 38, but vocab_size keeps only 38 rows"):
        ckptkit.consolidate(tmp_path / "hub", tmp_path / "out", vocab_size=38)
    assert not (tmp_path / "out").exists()
    done = ckptkit.consolidate(tmp_path / "hub", tmp_path / "out", vocab_size=39)
    check(tmp_path / "out", resized(model, 39))
    assert not any("tokenizer" in note and "not known" in note for note in done.notes)


def test_what_has_no_vocabulary(tmp_path: Path) -> None:
    torch.save({"linear.weight": torch.ones(4, 3)}, tmp_path / "a.pt")
    with pytest.raises(Mismatch, match="there is no embedding"):
        ckptkit.convert(tmp_path / "a.pt", tmp_path / "b", to="hf", vocab_size=8)
    torch.save({"wte.weight": torch.ones(4, 3), "lm_head.weight": torch.ones(5, 3)}, tmp_path / "a.pt")
    with pytest.raises(Mismatch, match=r"expected 4 rows as in `wte\.weight`, found 5"):
        ckptkit.convert(tmp_path / "a.pt", tmp_path / "b", to="hf", vocab_size=8)
    with pytest.raises(Usage, match="expected 1 or more, found 0"):
        ckptkit.convert(tmp_path / "a.pt", tmp_path / "b", to="hf", vocab_size=0)


def test_a_mean_keeps_its_rows(model: dict[str, Tensor], tmp_path: Path) -> None:
    assert model
    with pytest.raises(Usage, match="vocab_size cannot change an average in `"):
        average([tmp_path / "hub", tmp_path / "hub"], tmp_path / "out", to="dcp", vocab_size=64)
    average([tmp_path / "hub", tmp_path / "hub"], tmp_path / "out", to="hf", vocab_size=64)
    check(tmp_path / "out", resized(model, 64))


def test_configs_of_several_models() -> None:
    nested = {"model_type": "llava", "text_config": {"vocab_size": 5, "hidden_size": 2}}
    assert with_vocabulary_size(nested, 7) == {
        "model_type": "llava",
        "text_config": {"vocab_size": 7, "hidden_size": 2},
    }
    assert with_vocabulary_size({"vocab_size": 5}, 7) == {"vocab_size": 7}


TEXT = {
    "vocab_size": 40,
    **dict.fromkeys(("hidden_size", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("begin_suppress_tokens", "suppress_tokens"), None),
    **dict.fromkeys(("d_kv", "state_size"), 8),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 0),
    "pad_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
WITH_HEADS = [
    *("T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel", "WhisperForConditionalGeneration"),
    *("BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "DebertaForMaskedLM", "DebertaV2ForMaskedLM"),
    *("ElectraForMaskedLM", "MambaForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel", "PhiForCausalLM"),
    *("AlbertForMaskedLM", "MBartForConditionalGeneration", "XLMRobertaForMaskedLM", "BertForSequenceClassification"),
]


@pytest.mark.parametrize(
    "named", slow_but(["T5ForConditionalGeneration", "BertForMaskedLM", "OPTForCausalLM"], WITH_HEADS)
)
def test_all_that_follows_the_vocabulary(named: str, tmp_path: Path) -> None:
    """Embeddings, heads and biases, tied or not, as transformers itself resizes them."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, named)
    torch.manual_seed(0)
    model = kind(kind.config_class(**TEXT))
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "embed_positions" not in name:  # these are computed
            tensor.normal_()
    model.save_pretrained(tmp_path / "hub")
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dcp.save({"model": whole}, checkpoint_id=tmp_path / "step-1")
    (tmp_path / "step-1" / "config.json").write_bytes((tmp_path / "hub" / "config.json").read_bytes())
    assert kind.from_pretrained(tmp_path / "hub").state_dict().keys() == whole.keys()
    for rows in (37, 64):
        out = tmp_path / str(rows)
        ckptkit.consolidate(tmp_path / "hub", out / "hub", vocab_size=rows)
        ckptkit.consolidate(tmp_path / "step-1", out / "from-step", vocab_size=rows)
        ckptkit.convert(tmp_path / "step-1", out / "step-1", to="dcp", vocab_size=rows)
        model.resize_token_embeddings(rows, mean_resizing=False)
        wanted = model.state_dict()
        for place in ("hub", "from-step"):
            loaded, info = kind.from_pretrained(out / place, output_loading_info=True)
            assert not any(info.values()), info
            check_rows_of(loaded.state_dict(), wanted, whole)
        again = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
        dcp.load({"model": again}, checkpoint_id=out / "step-1")
        check_rows_of(again, wanted, whole)


def check_rows_of(found: dict[str, Tensor], wanted: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Every tensor has the shape that is wanted: what there was, and zeros behind it."""
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.shape == wanted[name].shape, name
        kept = tuple(slice(0, min(pair)) for pair in zip(tensor.shape, before[name].shape, strict=True))
        assert torch.equal(tensor[kept], before[name][kept]), name
        assert tensor.double().abs().sum().isclose(tensor[kept].double().abs().sum()), name


@pytest.mark.parametrize("named", ["T5ForConditionalGeneration", "BartForConditionalGeneration", "BertForMaskedLM"])
def test_doctor_recommends_what_works(named: str, tmp_path: Path) -> None:
    """Every tensor of a padded vocabulary is a finding of one kind, with the one command that fixes all of them."""
    kind = getattr(pytest.importorskip("transformers"), named)
    model = kind(kind.config_class(**TEXT))
    model.save_pretrained(tmp_path / "hub")
    (tmp_path / "hub" / "config.json").write_text(json.dumps({**model.config.to_dict(), "vocab_size": 37}))
    found = ckptkit.doctor(tmp_path / "hub").findings
    assert {one.code for one in found} == {"vocabulary"}
    assert len({one.fix for one in found}) == 1
    assert "--vocab-size 37" in str(found[0].fix)
    ckptkit.consolidate(tmp_path / "hub", tmp_path / "out", vocab_size=37)
    assert not ckptkit.doctor(tmp_path / "out").findings


def test_rows_that_the_model_cannot_have(tmp_path: Path) -> None:
    """The token for padding is 1: transformers cannot build a model of one row."""
    kind = pytest.importorskip("transformers").RobertaForMaskedLM
    kind(kind.config_class(**TEXT)).save_pretrained(tmp_path / "hub")
    with pytest.raises(Mismatch, match="cannot describe a model with 1 rows"):
        ckptkit.consolidate(tmp_path / "hub", tmp_path / "out", vocab_size=1)
    assert not (tmp_path / "out").exists()
