"""The largest token of tokenizers that libraries wrote."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import Mismatch
from ckptkit.models.companions import Companions
from ckptkit.models.token_ids import check_tokens_have_rows, count_sentencepiece_tokens, find_largest_token_id

tokenizers = pytest.importorskip("tokenizers")


def field(number: int, content: bytes) -> bytes:
    """A message of protobuf's, which is shorter than 128 bytes."""
    return bytes((number << 3 | 2, len(content))) + content


def test_a_fast_tokenizer() -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    made.add_special_tokens(["<s>", "</s>"])
    assert find_largest_token_id({"tokenizer.json": made.to_str().encode()}, {}) == (4, "tokenizer.json")
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", -1.0), ("b", -2.0)], unk_id=0))
    assert find_largest_token_id({"tokenizer.json": unigram.to_str().encode()}, {}) == (1, "tokenizer.json")


def test_older_files() -> None:
    files = {
        "vocab.json": json.dumps({"a": 0, "b": 7}).encode(),
        "added_tokens.json": json.dumps({"<pad>": 9}).encode(),
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": {"8": {"content": "x"}}}).encode(),
        "merges.txt": b"a b\n",
    }
    assert find_largest_token_id(files, {}) == (9, "added_tokens.json")
    assert find_largest_token_id({"vocab.txt": b"a\nb\nc\n"}, {}) == (2, "vocab.txt")
    assert find_largest_token_id(files, {"pad_token_id": 11, "eos_token_id": [2, 3]}) == (11, "config.json")


def test_sentencepiece_and_tiktoken() -> None:
    piece = field(1, b"a") + b"\x15\x00\x00\x80\xbf"
    model = field(1, piece) * 5 + field(2, b"settings") + field(3, b"more")
    assert count_sentencepiece_tokens(model) == 5
    assert find_largest_token_id({"tokenizer.model": model}, {}) == (4, "tokenizer.model")
    lines = b"\n".join(base64.b64encode(bytes([i])) + b" %d" % i for i in range(6))
    assert find_largest_token_id({"tokenizer.model": lines + b"\n"}, {}) == (5, "tokenizer.model")


@pytest.mark.parametrize("content", [b"", b"\n", b"\x0a\xff\xff\xff", b"{", b"[" * 100000, b"\xff" * 50])
def test_files_that_are_none(content: bytes) -> None:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "added_tokens.json", "tokenizer_config.json")
    assert find_largest_token_id(dict.fromkeys(names, content), {}) is None


def test_a_token_without_a_row() -> None:
    companions = Companions(files={"vocab.json": json.dumps({"a": 0, "b": 40}).encode()}, config={})
    assert check_tokens_have_rows(companions, 41) == []
    with pytest.raises(Mismatch, match="the tokenizer has token 40, but vocab_size keeps only 40 rows") as caught:
        check_tokens_have_rows(companions, 40)
    assert "--vocab-size 41" in str(caught.value.hint)
    assert "no tokenizer" in check_tokens_have_rows(Companions(), 4)[0]


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("file", ["tokenizer.json", "unigram", "tokenizer_config.json", "vocab.txt", "tokenizer.model"])
def test_a_token_without_a_row_is_a_warning(tmp_path: Path, file: str, rows: int) -> None:
    """Five tokens, in each kind of file, beside an embedding of so many rows."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    bpe.add_tokens(["x", "y"])
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([(word, -1.0) for word in "abcde"], unk_id=0))
    contents = {
        "tokenizer.json": bpe.to_str(pretty=True),
        "unigram": unigram.to_str(),
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": {"4": {"content": "x"}}}),
        "vocab.txt": "a\nb\nc\nd\ne\n",
        "tokenizer.model": "".join(f"{word} {number}\n" for number, word in enumerate("abcde")),
    }
    save_file({"model.embed_tokens.weight": torch.zeros(rows, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange", "vocab_size": rows}))
    name = "tokenizer.json" if file == "unigram" else file
    (tmp_path / name).write_text(contents[file])
    done = ckptkit.consolidate(tmp_path, tmp_path / "out")
    said = [f"{name} has token 4, but the embedding has only 4 rows"] if rows == 4 else []
    assert [text.partition(";")[0] for text in done.warnings] == said
    assert (done.output / name).exists()
