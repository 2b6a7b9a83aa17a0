import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptkit.errors import CkptError, Corrupt, IOFailure, Unsupported, Usage
from ckptkit.training.data import documents, tokens
from ckptkit.training.data.documents import Text
from ckptkit.training.data.tokenizer import Bytes, choose_tokenizer
from ckptkit.training.data.tokens import TokenFile, prepare_tokens
from tests.training.data.hugging_face import END, save_tokenizer


class Large(Bytes):
    """Bytes with a vocabulary of a size of choice, which ends documents with its last id."""

    name = "large"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.end = vocab_size - 1


def save(path: Path, array: NDArray[np.generic]) -> Path:
    np.save(path, array)
    return path


@pytest.mark.parametrize("name", ["data", "data.bin"])
def test_documents_follow_each_other_each_ended_once(tmp_path: Path, name: str) -> None:
    data = tmp_path / name
    data.mkdir()
    (data / "a.txt").write_bytes(b"one\0two\0\0")
    (data / "b.txt").touch()
    (data / "c.jsonl").write_text('{"text": "three"}\n{"tokens": [52]}\n{"text": ""}\n{"tokens": [53, 0]}\n')
    (data / "d.bytes").write_bytes(b"\xff")
    found = prepare_tokens(data, Bytes(), tmp_path / "run")
    assert bytes(found.mmap_ids().tolist()) == b"one\0two\0three\x004\x005\0\xff\0"
    assert found.path == tmp_path / "run" / "tokens.bin"


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_ids_are_stored_as_narrow_as_the_vocabulary_lets(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    (tmp_path / "text").write_bytes(b"abc")
    found = prepare_tokens(tmp_path / "text", Large(vocab_size), tmp_path)
    assert found.mmap_ids().tolist() == [97, 98, 99, vocab_size - 1]
    assert found.path.stat().st_size == 4 * itemsize
    assert found.checksum == zlib.crc32(found.path.read_bytes())


def test_a_hugging_face_document_has_its_start_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = choose_tokenizer(save_tokenizer(tmp_path / "tokenizer"))
    story = b"the cat sat on the mat " * 50
    (tmp_path / "text").write_bytes(b"the cat\0" + story + b"\0")
    whole = prepare_tokens(tmp_path / "text", tokenizer, tmp_path / "whole").mmap_ids().tolist()
    (first, second) = (ids.tolist() for ids in tokenizer.encode([Text(tmp_path, 0, t) for t in (b"the cat", story)]))
    assert whole == [0, *first, 1, 0, *second, 1]
    monkeypatch.setattr(documents, "PART_BYTES", 64)
    monkeypatch.setattr(tokens, "BATCH_BYTES", 200)
    assert prepare_tokens(tmp_path / "text", tokenizer, tmp_path / "parts").mmap_ids().tolist() == whole


def test_an_end_that_the_text_brings_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = choose_tokenizer(save_tokenizer(tmp_path / "tokenizer"))
    (tmp_path / "text").write_text(f"the{END}cat{END}")
    ids = prepare_tokens(tmp_path / "text", tokenizer, tmp_path).mmap_ids().tolist()
    assert ids.count(1) == 2
    assert ids[-2:] != [1, 1]


def test_tokens_are_made_once_and_again_when_anything_changes(tmp_path: Path) -> None:
    text, run = tmp_path / "text", tmp_path / "run"
    text.write_bytes(b"first")
    os.utime(text, ns=(0, 10**18))

    def made_again(vocab_size: int = 256) -> bool:
        before = (run / "tokens.bin").stat().st_ino
        found = prepare_tokens(text, Large(vocab_size), run)
        assert bytes(found.mmap_ids()[:-1].tolist()) == text.read_bytes()
        return before != (run / "tokens.bin").stat().st_ino

    first = prepare_tokens(text, Large(256), run)
    assert prepare_tokens(text, Large(256), run) == first
    assert not made_again()
    text.write_bytes(b"other")
    assert made_again(), "another time of change"
    os.utime(text, ns=(0, 10**18))
    assert made_again()
    text.write_bytes(b"longer")
    os.utime(text, ns=(0, 10**18))
    assert made_again(), "another size"
    assert not made_again()
    assert made_again(300), "another vocabulary"
    with (run / "tokens.bin").open("ab") as file:
        file.write(b"x")
    assert made_again(300), "the file is not as it was left"
    (run / "tokens.json").write_text("{")
    assert made_again(300), "nothing is known of it"
    assert not made_again(300)


def test_another_tokenizer_makes_tokens_again(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the cat sat")
    counts = [
        prepare_tokens(tmp_path / "text", choose_tokenizer(save_tokenizer(tmp_path / "tokenizer", text=text)), tmp_path)
        for text in ("the cat sat ", "dogs do not ")
    ]
    assert counts[0].count < counts[1].count


def test_a_moved_run_knows_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"some text")
    prepare_tokens(tmp_path / "text", Bytes(), tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    found = prepare_tokens(tmp_path / "text", Bytes(), tmp_path / "moved")
    assert bytes(found.mmap_ids().tolist()) == b"some text\0"


def test_a_failure_leaves_no_tokens_that_could_be_taken_for_whole(tmp_path: Path) -> None:
    path, run = tmp_path / "some.jsonl", tmp_path / "run"
    path.write_text('{"text": "fine"}\n')
    prepare_tokens(path, Bytes(), run)
    good = path.read_text()
    path.write_text(good + '{"text": "half')
    with pytest.raises(Corrupt):
        prepare_tokens(path, Bytes(), run)
    assert [found.name for found in run.iterdir()] == ["tokens.bin"]
    path.write_text(good + '{"text": "more"}')
    assert bytes(prepare_tokens(path, Bytes(), run).mmap_ids().tolist()) == b"fine\0more\0"
    assert sorted(found.name for found in run.iterdir()) == ["tokens.bin", "tokens.json"]


@pytest.mark.parametrize("name", ["a.npy", "big.npy", "signed.npy", "a.bin", "a.u32.bin"])
def test_token_files_are_mapped_where_they_lie(tmp_path: Path, name: str) -> None:
    ids, path = [1, 2, 0, 3, 4], tmp_path / name
    if path.suffix == ".npy":
        save(path, np.array(ids).astype({"big.npy": ">u2", "signed.npy": "<i8"}.get(name, "<u2")))
    else:
        path.write_bytes(struct.pack("<5I" if "u32" in name else "<5H", *ids))
    found = prepare_tokens(path, Bytes(), tmp_path / "run")
    assert found.path == path
    assert found.mmap_ids().tolist() == ids
    assert [made.name for made in (tmp_path / "run").iterdir()] == ["tokens.json"]
    assert prepare_tokens(path, Bytes(), tmp_path / "run") == found


@pytest.mark.parametrize(
    ("array", "error", "said"),
    [
        (np.array([5, 256, 7]), Usage, "the tokens of tokenizer `bytes`; found id 256 at place 1"),
        (np.array([5, 6, -1]), Usage, "id -1 at place 2"),
        (np.array([1.0, 2.0]), Unsupported, "found float64 in 1"),
        (np.array([[1, 2]]), Unsupported, "found int64 in 2"),
        (np.array([True, False]), Unsupported, "bool"),
        (np.array([], dtype=np.uint16), Usage, "no text to train on"),
        (np.array([5]), Usage, "no text to train on"),
        (np.array([0, 0, 0, 5]), Usage, "no text to train on"),
        (np.array([{}]), Corrupt, "not an array"),
    ],
)
def test_token_files_that_do_not_fit_are_refused(
    tmp_path: Path, array: NDArray[np.generic], error: type[CkptError], said: str
) -> None:
    path = save(tmp_path / "a.npy", array)
    with pytest.raises(error, match=said) as raised:
        prepare_tokens(path, Bytes(), tmp_path / "run")
    assert raised.value.path == path


def test_a_stray_id_beyond_the_first_block_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "BLOCK_TOKENS", 16)
    ids = np.arange(100) % 250
    path = save(tmp_path / "a.npy", ids)
    assert prepare_tokens(path, Bytes(), tmp_path).checksum == zlib.crc32(ids.tobytes())
    ids[77] = 300
    save(path, ids)
    with pytest.raises(Usage, match="id 300 at place 77"):
        prepare_tokens(path, Bytes(), tmp_path)


def test_damaged_token_files_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npy", np.arange(100))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(Corrupt, match="not an array"):
        prepare_tokens(path, Bytes(), tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\1\0\2\0\3")
    with pytest.raises(Corrupt, match="expected a multiple of 2 bytes, one token each, found 1 more after 2 tokens"):
        prepare_tokens(tmp_path / "a.bin", Bytes(), tmp_path)


def test_a_stray_id_in_a_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    for stray in (256, -1, 2**70):
        path.write_text('{"text": "fine"}\n' + json.dumps({"tokens": [1, 2, stray]}))
        with pytest.raises(Usage, match=f"id {stray} at place 2 of line 2") as raised:
            prepare_tokens(path, Bytes(), tmp_path)
        assert raised.value.path == path


@pytest.mark.parametrize("content", [b"", b"\0\0\0"])
def test_nothing_to_train_on_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(Usage, match="no text to train on"):
        prepare_tokens(tmp_path / "text", Bytes(), tmp_path)


def test_a_token_file_that_is_gone_or_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    with pytest.raises(IOFailure):
        TokenFile(path, "|u1", 0, 4, 0, 256).mmap_ids()
    path.write_bytes(b"abc")
    with pytest.raises(Corrupt, match="too short for 4 tokens"):
        TokenFile(path, "|u1", 0, 4, 0, 256).mmap_ids()
