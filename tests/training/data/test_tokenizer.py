import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ckptkit.errors import Corrupt, Usage
from ckptkit.training.data.documents import Text
from ckptkit.training.data.tokenizer import Bytes, choose_tokenizer
from tests.training.data.hugging_face import END, save_tokenizer

STORY = "the cat sat on the mat, été 😀\n\n" * 20


def text(content: str | bytes) -> Text:
    return Text(Path("some.txt"), 0, content.encode() if isinstance(content, str) else content)


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = choose_tokenizer(None)
    assert isinstance(tokenizer, Bytes)
    assert (tokenizer.vocab_size, tokenizer.start, tokenizer.end) == (256, (), 0)
    assert [ids.tolist() for ids in tokenizer.encode([text(b"a\xff"), text(b"")])] == [[97, 255], []]


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_hugging_face_tokenizer_gives_the_ids_of_the_text_alone(tmp_path: Path, name: str) -> None:
    tokenizer = choose_tokenizer(str(Path(save_tokenizer(tmp_path)) / name))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids, none = tokenizer.encode([text(STORY), text("")])
    assert len(ids) > 100, "what it was told to cut texts at is not for us"
    assert not len(none)
    assert ids.tolist() == theirs.convert_tokens_to_ids(theirs.tokenize(STORY))
    assert theirs.decode(ids.tolist(), clean_up_tokenization_spaces=False) == STORY
    assert tokenizer.vocab_size == len(theirs)
    assert not tokenizer.encode([])


def test_documents_start_as_the_tokenizer_starts_texts(tmp_path: Path) -> None:
    starting, other = (choose_tokenizer(save_tokenizer(tmp_path / str(n), starts=n == 0)) for n in (0, 1))
    assert starting.start == (0,)
    assert other.start == ()
    assert starting.end == other.end == 1


def test_the_token_that_ends_documents_does_not_start_them(tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path))
    theirs.eos_token = theirs.bos_token
    theirs.save_pretrained(tmp_path)
    tokenizer = choose_tokenizer(str(tmp_path))
    assert (tokenizer.start, tokenizer.end) == ((), 0)


def test_the_vocabulary_holds_every_added_token(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path))
    before = len(tokenizer)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    ours = choose_tokenizer(str(tmp_path))
    assert ours.vocab_size == before + 1
    assert ours.encode([text("<extra>")])[0].tolist() == [before]


def test_an_end_spelled_out_ends_a_document(tmp_path: Path) -> None:
    tokenizer = choose_tokenizer(save_tokenizer(tmp_path))
    assert tokenizer.encode([text(f"a{END}b")])[0].tolist().count(tokenizer.end) == 1


def test_its_files_are_what_makes_its_ids(tmp_path: Path) -> None:
    one = choose_tokenizer(save_tokenizer(tmp_path / "one"))
    other = choose_tokenizer(save_tokenizer(tmp_path / "other", text="dogs do not "))
    files = one.files()
    ids = one.encode([text(STORY)])[0].tolist()
    assert files == one.files() == choose_tokenizer(save_tokenizer(tmp_path / "same")).files()
    assert files != other.files()
    (tmp_path / "saved").mkdir()
    for name, content in files.items():
        (tmp_path / "saved" / name).write_bytes(content)
    assert choose_tokenizer(str(tmp_path / "saved")).encode([text(STORY)])[0].tolist() == ids
    assert Bytes().files() == {}


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    tokenizer = choose_tokenizer(save_tokenizer(tmp_path))
    with pytest.raises(Corrupt, match="byte 5 is not UTF-8"):
        tokenizer.encode([text("fine"), text(b"fine \xff")])


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="does not have an end-of-text token"):
        choose_tokenizer(save_tokenizer(tmp_path, ends=False))


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Usage, match=r"no tokenizer `.*absent`"):
        choose_tokenizer(str(tmp_path / "absent"))
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": 5}')
    with pytest.raises(Usage, match="no tokenizer"):
        choose_tokenizer(str(tmp_path))


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Usage, match="needs the package transformers") as raised:
        choose_tokenizer("gpt2")
    assert raised.value.hint is not None
    assert "pip install" in raised.value.hint
