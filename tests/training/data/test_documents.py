import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import Corrupt, IOFailure, Usage
from ckptkit.training.data import documents
from ckptkit.training.data.documents import Ids, Text, find_data_files, find_text_cut_offset, read_documents


def texts(path: Path) -> list[bytes]:
    """The documents of a file, put together from their parts."""
    found: list[bytes] = []
    for part in read_documents(path):
        assert isinstance(part, Text)
        if part.begins:
            found.append(b"")
        found[-1] += part.content
    return found


def test_a_text_file_is_documents_with_nul_between_them(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"one\ntwo\0\xff three\0")
    assert texts(path) == [b"one\ntwo", b"\xff three", b""]


@given(st.integers(0, 2**32), st.sampled_from([b"ab \n\0", b"a", "é".encode(), b"\x80", b"a\n", b" "]))
def test_long_documents_come_in_parts_and_whole(
    tmp_path_factory: pytest.TempPathFactory, seed: int, signs: bytes
) -> None:
    path = tmp_path_factory.mktemp("text") / "text"
    chance = random.Random(seed)
    content = bytes(chance.choice(signs) for _ in range(chance.randrange(300)))
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PART_BYTES", 16)
        parts = list(read_documents(path))
        assert texts(path) == content.split(b"\0")
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        assert isinstance(part, Text)
        assert part.ends == (after is None or (isinstance(after, Text) and after.begins))
        assert content[part.place :].startswith(part.content)
        assert len(part.content) <= 2 * 16


def test_a_text_is_cut_before_a_space_else_a_line_else_a_character() -> None:
    assert find_text_cut_offset(b"the cat sat") == len(b"the cat")
    assert find_text_cut_offset(b"the\ncat") == len(b"the")
    assert find_text_cut_offset(b" thecat") == len(b" theca"), "a cut at the start would be none"
    assert find_text_cut_offset("aé".encode()) == 1
    assert find_text_cut_offset("a€".encode()) == 1
    assert find_text_cut_offset("a😀".encode()) == 1
    assert find_text_cut_offset(b"\x80" * 9) == 9


def test_a_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(
        '{"text": "one\\ntwo", "id": 1}\n\n{"tokens": [1, 2]}\n{"input_ids": []}\n{"text": "é", "tokens": [3]}'
    )
    assert list(read_documents(path)) == [
        Text(path, 1, b"one\ntwo"),
        Ids(path, 3, [1, 2]),
        Ids(path, 4, []),
        Text(path, 5, "é".encode()),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "half', "line 2 cannot be read"),
        (b'{"text": "\xff"}', "line 2 cannot be read"),
        (b'{"text": "\\ud800"}', "line 2 cannot be read: .*surrogates"),
        (b"[" * 100_000, "line 2 cannot be read"),
        (b'{"body": "text"}', "line 2 has no text"),
        (b'{"text": null}', "line 2 has no text"),
        (b'{"text": ["a"]}', "line 2 has no text"),
        (b'{"tokens": "12"}', "line 2 has no text"),
        (b'{"tokens": [1, 2.0]}', "line 2 has no text"),
        (b'{"tokens": [1, true]}', "line 2 has no text"),
        (b'["text"]', "line 2 has no text"),
    ],
)
def test_a_line_that_holds_no_document_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(Corrupt, match=said) as raised:
        list(read_documents(path))
    assert raised.value.path == path


def test_what_is_not_utf8_is_named_by_its_byte() -> None:
    assert Text(Path("text"), 0, "é€".encode()).decode() == "é€"
    with pytest.raises(Corrupt, match="byte 105 is not UTF-8") as raised:
        Text(Path("text"), 100, b"fine \xff").decode()
    assert raised.value.path == Path("text")


def test_a_directory_is_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.py", "a/.git", ".hidden/x.txt", "c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_data_files(tmp_path) == [tmp_path / name for name in ("a/z.py", "b.txt", "c.jsonl")]
    assert find_data_files(tmp_path / ".hidden") == [tmp_path / ".hidden/x.txt"], "when asked for by name"
    (tmp_path / "d.npy").touch()
    with pytest.raises(Usage, match="found a file of token ids"):
        find_data_files(tmp_path)


def test_the_default_is_some_of_the_standard_library() -> None:
    files = find_data_files(None)
    assert files == sorted(files)
    assert len(files) > 10
    assert 2**20 < sum(path.stat().st_size for path in files) < 8 * 2**20


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(IOFailure, match="no such file") as raised:
        find_data_files(tmp_path / "absent")
    assert raised.value.path == tmp_path / "absent"
