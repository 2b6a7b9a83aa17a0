"""nanoGPT's models in transformers: equal logits, masks left out, padded rows refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.errors import Mismatch
from tests.plugins.nanogpt.gpt_model import GPT, Widths

transformers = pytest.importorskip("transformers")

PADDED, VOCABULARY = 48, 41


def config(**changes: Any) -> Any:
    of = Widths()
    sizes = {"n_layer": of.n_layer, "n_head": of.n_head, "n_embd": of.n_embd, "n_positions": of.block_size}
    same = {"activation_function": "gelu", "bos_token_id": 40, "eos_token_id": 40}
    return transformers.GPT2Config(**(sizes | same | {"vocab_size": PADDED} | changes))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    config().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def train(of: Widths, place: Path) -> GPT:
    """A model and what nanoGPT saves of it."""
    torch.manual_seed(0)
    model = GPT(of)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    notes = {"model_args": asdict(of), "iter_num": 1, "best_val_loss": 1.0, "config": {}}
    torch.save({"model": state, "optimizer": optimizer.state_dict(), **notes}, place)
    return model.eval()


def logits_of(place: Path, tokens: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    with torch.no_grad():
        logits: Tensor = model(tokens).logits
    return logits


def test_the_same_logits(base: Path, tmp_path: Path) -> None:
    model = train(Widths(), tmp_path / "ckpt.pt")
    done = ckptkit.consolidate(tmp_path / "ckpt.pt", tmp_path / "out", base=base)
    assert any("dropped 2" in note and "attn.bias" in note for note in done.notes)
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.allclose(logits_of(tmp_path / "out", tokens), model(tokens), atol=1e-5)


def test_and_back(base: Path, tmp_path: Path) -> None:
    """What the Hub has becomes what nanoGPT loads, the tied head too."""
    model = train(Widths(), tmp_path / "ckpt.pt")
    ckptkit.consolidate(tmp_path / "ckpt.pt", tmp_path / "out", base=base)
    ckptkit.convert(tmp_path / "out", tmp_path / "start.pt", to="pt", names="nanogpt")
    start = torch.load(tmp_path / "start.pt")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(".attn.bias")}
    assert start.keys() == state.keys()
    assert all(torch.equal(start[name], tensor) for name, tensor in state.items())


def test_padded_rows(tmp_path: Path) -> None:
    """A vocabulary of 48 rows, where GPT-2 has 41: an error, and with --vocab-size the first 41."""
    config(vocab_size=VOCABULARY).save_pretrained(tmp_path / "base")
    model = train(Widths(), tmp_path / "ckpt.pt")
    with pytest.raises(Mismatch, match=r"expected 41 rows \(vocab_size in config\.json\), found 48"):
        ckptkit.consolidate(tmp_path / "ckpt.pt", tmp_path / "out", base=tmp_path / "base")
    options: dict[str, Any] = {"base": tmp_path / "base", "vocab_size": VOCABULARY}
    done = ckptkit.consolidate(tmp_path / "ckpt.pt", tmp_path / "out", **options)
    assert any("dropped the last 7" in note for note in done.notes)
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        wanted = model(tokens)[..., :VOCABULARY]
    assert torch.allclose(logits_of(tmp_path / "out", tokens), wanted, atol=1e-5)


def test_no_biases(base: Path, tmp_path: Path) -> None:
    train(Widths(bias=False), tmp_path / "ckpt.pt")
    with pytest.raises(Mismatch, match="every `gpt2` has this tensor") as caught:
        ckptkit.consolidate(tmp_path / "ckpt.pt", tmp_path / "out", base=base)
    assert caught.value.tensor == "transformer.h.0.attn.c_attn.bias"


def test_a_gpt2_of_the_hub_is_none_of_nanogpts(tmp_path: Path) -> None:
    """The same names, and the other way round: told by the shape of `c_attn`."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config())
    model.config.save_pretrained(tmp_path / "base")
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    ckptkit.consolidate(tmp_path / "model.pt", tmp_path / "out", base=tmp_path / "base")
    made = ckptkit.open(tmp_path / "out")
    assert torch.equal(made["transformer.h.0.attn.c_attn.weight"].torch(), model.transformer.h[0].attn.c_attn.weight)
