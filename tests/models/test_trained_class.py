"""Heads that a training put on a base, judged by transformers: the class that loads every tensor of the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptkit
from ckptkit.errors import Mismatch, Unsupported

LLAMA: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
BERT: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


def save(tmp_path: Path, base: Any, state: dict[str, Any]) -> tuple[Path, Path]:
    """A base model, and the file of a training that has a head of its own."""
    base.save_pretrained(tmp_path / "base")
    torch.save({"model": state}, tmp_path / "state.pt")
    return tmp_path / "base", tmp_path / "state.pt"


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("base", "trained", "labels"),
    [
        ("LlamaForCausalLM", "LlamaForSequenceClassification", 1),  # a reward model
        ("LlamaForCausalLM", "LlamaForTokenClassification", 1),  # a critic
        ("LlamaForCausalLM", "LlamaForSequenceClassification", 5),
        ("BertForMaskedLM", "BertForSequenceClassification", 3),
        ("BertForMaskedLM", "BertForTokenClassification", 4),
        ("BertForMaskedLM", "BertForQuestionAnswering", 2),
    ],
)
def test_the_class_comes_from_the_tensors(tmp_path: Path, base: str, trained: str, labels: int, is_tied: bool) -> None:
    kind, sizes = (transformers.LlamaConfig, LLAMA) if base.startswith("Llama") else (transformers.BertConfig, BERT)
    torch.manual_seed(0)
    model = getattr(transformers, trained)(kind(**sizes, num_labels=labels, tie_word_embeddings=is_tied))
    whole = getattr(transformers, base)(kind(**sizes, tie_word_embeddings=is_tied))
    files, state = save(tmp_path, whole, model.state_dict())
    done = ckptkit.consolidate(state, tmp_path / "out", base=files)
    assert any(f"wrote {trained}" in note for note in done.notes)
    loaded, info = getattr(transformers, trained).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.architectures == [trained]
    assert loaded.config.num_labels == labels
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in loaded.state_dict().items())


def test_a_head_of_several_classes_is_refused(tmp_path: Path) -> None:
    """A classifier of one row is that of a sequence, or of a choice among several."""
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=1))
    base, state = save(tmp_path, transformers.BertForMaskedLM(transformers.BertConfig(**BERT)), model.state_dict())
    with pytest.raises(Mismatch, match="fits BertForSequenceClassification or BertForMultipleChoice") as raised:
        ckptkit.consolidate(state, tmp_path / "out", base=base)
    assert raised.value.tensor == "bert.pooler.dense.bias"
    model.save_pretrained(tmp_path / "named")
    ckptkit.consolidate(state, tmp_path / "out", base=tmp_path / "named")


def test_a_head_of_no_class_is_refused(tmp_path: Path) -> None:
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    heads = {"score.weight": torch.ones(1, 16), "classifier.dense.weight": torch.ones(16, 16)}
    base, state = save(tmp_path, llama, llama.state_dict() | heads)
    with pytest.raises(Mismatch, match="no class of this type"):
        ckptkit.consolidate(state, tmp_path / "out", base=base)
    ckptkit.consolidate(state, tmp_path / "kept", base=base, names="keep")


@pytest.mark.parametrize("trained", ["LlamaForSequenceClassification", "LlamaForTokenClassification"])
def test_two_heads_are_refused_and_either_may_be_chosen(tmp_path: Path, trained: str) -> None:
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    labels = 1 if trained.endswith("SequenceClassification") else 3
    other = getattr(transformers, trained)(transformers.LlamaConfig(**LLAMA, num_labels=labels))
    heads = {name: one for name, one in other.state_dict().items() if name.startswith("score.")}
    base, state = save(tmp_path, llama, llama.state_dict() | heads)
    with pytest.raises(Mismatch, match=r"`lm_head.weight` are those of two classes") as refused:
        ckptkit.consolidate(state, tmp_path / "out", base=base)
    for name in ("lm_head.weight", "score.*"):
        assert f"'*{name}'" in str(refused.value.hint)
        ckptkit.consolidate(state, tmp_path / name, base=base, exclude=[f"*{name.partition('.')[0]}.*"])
    config = json.loads((tmp_path / "score.*" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_tied_head_beside_another_head_is_dropped_if_it_is_the_embedding(tmp_path: Path, is_copy: bool) -> None:
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True))
    more = {"score.weight": torch.ones(1, 16)} | ({} if is_copy else {"lm_head.weight": torch.ones(48, 16)})
    base, state = save(tmp_path, llama, llama.state_dict() | more)
    if is_copy:
        done = ckptkit.consolidate(state, tmp_path / "out", base=base)
        assert any("lm_head.weight is tied to" in note for note in done.notes)
        assert "lm_head.weight" not in ckptkit.open(tmp_path / "out")
    else:
        with pytest.raises(Mismatch, match="but their bytes differ"):
            ckptkit.consolidate(state, tmp_path / "out", base=base)


@pytest.mark.parametrize("names", [("bad", "good", "best"), ("LABEL_0", "LABEL_1", "LABEL_2")])
def test_names_of_labels_are_not_replaced(tmp_path: Path, names: tuple[str, ...]) -> None:
    config = transformers.LlamaConfig(**LLAMA, id2label=dict(enumerate(names)))
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA, num_labels=5))
    base, state = save(tmp_path, transformers.LlamaForCausalLM(config), model.state_dict())
    if "bad" in names:
        with pytest.raises(Mismatch, match=r"expected 3 labels \(id2label of config.json\), found 5"):
            ckptkit.consolidate(state, tmp_path / "out", base=base)
    else:
        assert ckptkit.consolidate(state, tmp_path / "out", base=base).notes[0].endswith("with 5 labels")


@pytest.mark.parametrize("head", ["v_head.summary", "value_head"])
def test_a_value_head_is_kept_with_a_warning(tmp_path: Path, head: str) -> None:
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    base, state = save(tmp_path, llama, llama.state_dict() | {f"{head}.weight": torch.ones(1, 16)})
    done = ckptkit.consolidate(state, tmp_path / "out", base=base)
    assert any("is a value head, which LlamaForCausalLM of config.json does not have" in said for said in done.warnings)
    assert f"{head}.weight" in ckptkit.open(tmp_path / "out")


def test_doctor_names_the_class_and_drops_nothing(tmp_path: Path) -> None:
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA, num_labels=1))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True))
    base, state = save(tmp_path, llama, model.state_dict())
    found = ckptkit.doctor(state, model=base).findings
    (one,) = [one for one in found if one.code == "unexpected"]
    assert one.message.endswith("it belongs to the head of LlamaForSequenceClassification")
    assert one.fix is not None
    assert "--exclude" not in str(one.fix)
    assert "consolidate" in str(one.fix)


@pytest.mark.parametrize("is_trained", [True, False])
def test_modules_of_sentence_transformers(tmp_path: Path, is_trained: bool) -> None:
    """Pooling is a config, which goes along; a dense layer has weights, which a config.json does not describe.

    The files are those of `SentenceTransformer.save_pretrained`.
    """
    bert = transformers.BertModel(transformers.BertConfig(**BERT))
    base, state = save(tmp_path, bert, bert.state_dict())
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Dense", "Dense")] if is_trained else [])]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (base / "modules.json").write_text(json.dumps(listed))
    for path, _ in modules[1:]:
        (base / path).mkdir()
        (base / path / "config.json").write_text('{"pooling_mode_cls_token": true}')
    if is_trained:
        (base / "2_Dense" / "model.safetensors").write_bytes(b"")
        with pytest.raises(Unsupported, match="`2_Dense` has weights of its own"):
            ckptkit.consolidate(state, tmp_path / "out", base=base)
        return
    ckptkit.consolidate(state, tmp_path / "out", base=base)
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
