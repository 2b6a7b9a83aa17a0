"""Adapters on tied tensors: the merged model computes what the model with the adapter beside it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.errors import Unsupported
from tests.adapters.test_merge import ADAPTER, MODEL, PLAIN, SAID, edit, tiny_gpt2

pytest.importorskip("peft", reason="PEFT is the judge of adapters")

from tests.trainers.produced_peft import adapted, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # the library's own

SIZES = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1}
IDS = torch.arange(6)[None]


def tiny_bert() -> Any:
    """A model whose head has a bias of its own, tied too."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES, num_attention_heads=4, max_position_embeddings=16))


def tiny_neox() -> Any:
    """A model whose head has another name in files than in memory."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    more = {"num_attention_heads": 4, "max_position_embeddings": 16, "tie_word_embeddings": True}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **more))


def tiny_t5() -> Any:
    """A model that has one embedding under four names."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 24, "d_kv": 8, "d_ff": 36, "num_layers": 1, "num_heads": 3}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def tied_llama() -> Any:
    """A model whose head is its embedding."""
    return tiny_llama(tie_word_embeddings=True)


def logits(model: Any) -> torch.Tensor:
    """What a model computes."""
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS, **more).logits
    return found


TIED, UNTIED = True, False
KEPT: dict[str, Any] = {"ensure_weight_tying": True}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], bool]] = {
    "the embedding, kept tied": (tied_llama, KEPT | {"target_modules": ["embed_tokens", "q_proj"]}, TIED),
    "the head, kept tied": (tied_llama, KEPT | {"target_modules": ["lm_head"]}, TIED),
    "by a pattern, kept tied": (tied_llama, KEPT | {"target_modules": ".*embed_tokens|.*q_proj"}, TIED),
    "whole, kept tied": (tied_llama, KEPT | {"modules_to_save": ["embed_tokens"]}, TIED),
    "both apart": (tied_llama, {"target_modules": ["embed_tokens", "lm_head"]}, UNTIED),
    "the same rows": (tied_llama, {"trainable_token_indices": {"embed_tokens": [3, 9], "lm_head": [3, 9]}}, TIED),
    "other rows": (tied_llama, {"trainable_token_indices": {"embed_tokens": [3, 9], "lm_head": [1]}}, UNTIED),
    "rows of the head": (tied_llama, {"trainable_token_indices": {"lm_head": [1]}}, UNTIED),
    "a head of another name": (tiny_bert, {"target_modules": ["query", "decoder"]}, UNTIED),
    "words of an encoder": (tiny_bert, {"target_modules": ["query", "word_embeddings"]}, UNTIED),
    "rows of an encoder": (tiny_bert, {"target_modules": ["query"], "trainable_token_indices": [1, 4]}, TIED),
    "names of files": (tiny_neox, {"target_modules": ["query_key_value", "embed_in"]}, UNTIED),
    "rows, names of files": (tiny_neox, {"target_modules": ["dense"], "trainable_token_indices": [1, 4]}, TIED),
    "GPT-2's": (tiny_gpt2, {"target_modules": ["wte", "c_fc"], "fan_in_fan_out": True}, UNTIED),
    "rows under four names": (tiny_t5, {"target_modules": ["q"], "trainable_token_indices": [1, 4]}, TIED),
}


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_adapter_beside_it_does(tmp_path: Path, name: str) -> None:
    """PEFT's own merge is no judge: it changes a tied tensor twice, or both where one was trained."""
    make, config, is_tied = CASES[name]
    base, saved, state = tmp_path / "base", tmp_path / "saved", tmp_path / "state"
    model = make()
    kind = type(model)
    model.save_pretrained(base)
    model = adapted(model, **(PLAIN | config))
    truth = logits(model)
    model.save_pretrained(saved)
    state.mkdir()
    torch.save({"model": model.state_dict()}, state / "state.pt")
    (state / SAID).write_bytes((saved / SAID).read_bytes())
    ckptkit.consolidate(state, tmp_path / "again")
    assert load_file(saved / ADAPTER).keys() <= load_file(tmp_path / "again" / ADAPTER).keys()
    ckptkit.merge(base, saved, tmp_path / "one")
    ckptkit.merge(base, tmp_path / "again", tmp_path / "two")
    ckptkit.consolidate(state, tmp_path / "three", merge=True, base=base)
    for out in ("one", "two", "three"):
        loaded, info = kind.from_pretrained(tmp_path / out, output_loading_info=True)
        assert not any(info.values()), info
        torch.testing.assert_close(logits(loaded), truth, rtol=1e-4, atol=1e-5)
        assert loaded.config.tie_word_embeddings is is_tied
        assert load_file(tmp_path / out / MODEL).keys() == load_file(tmp_path / "one" / MODEL).keys()


def test_what_the_class_ties_cannot_come_apart(tmp_path: Path) -> None:
    """The head of a T5 is its embedding, whatever config.json says."""
    tiny_t5().save_pretrained(tmp_path / "base")
    adapted(tiny_t5(), **(PLAIN | {"target_modules": ["lm_head"]})).save_pretrained(tmp_path / "saved")
    with pytest.raises(Unsupported, match="this model type stores both as one tensor") as raised:
        ckptkit.merge(tmp_path / "base", tmp_path / "saved", tmp_path / "out")
    assert raised.value.tensor == "lm_head.weight"


def test_a_switch_that_is_none(tmp_path: Path) -> None:
    tied_llama().save_pretrained(tmp_path / "base")
    adapted(tied_llama(), **PLAIN).save_pretrained(tmp_path / "saved")
    edit(tmp_path / "saved" / SAID, ensure_weight_tying="yes")
    with pytest.raises(ckptkit.CkptError, match="ensure_weight_tying"):
        ckptkit.merge(tmp_path / "base", tmp_path / "saved", tmp_path / "out")
