"""The small files that make weights a model are carried, whatever the tokenizer; those of a stranger with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import consolidate, verify
from ckptkit.errors import Unsafe
from ckptkit.models.companions import own_code_files
from tests.producers import save_alone

CONTENT = b"of a tokenizer"
PLAIN = (
    "video_preprocessor_config.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "additional_chat_templates/tool_use.jinja",
)


def write_config(place: Path, **more: Any) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps({"model_type": "strange", **more}))


def write(place: Path, name: str, content: bytes = CONTENT) -> Path:
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_bytes(content)
    return place / name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_alone({"model": {"w": torch.arange(6.0)}}, tmp_path / "ckpt")
    write_config(tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.mark.parametrize("name", PLAIN)
def test_files_of_tokenizers_come_along_and_are_verified(checkpoint: Path, tmp_path: Path, name: str) -> None:
    write(checkpoint, name)
    consolidate(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == CONTENT
    (found,) = verify(tmp_path / "out")
    assert (found.problems, found.notes, found.has_manifest) == ((), (), True)
    if "/" in name:
        return  # a manifest is of the files of one directory
    (tmp_path / "out" / name).write_bytes(b"of another one")
    (found,) = verify(tmp_path / "out")
    assert [problem.path for problem in found.problems] == [tmp_path / "out" / name]


@pytest.mark.parametrize("name", PLAIN)
def test_a_strangers_link_is_not_followed(checkpoint: Path, tmp_path: Path, name: str) -> None:
    secret = write(tmp_path, "secret", b"ours")
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).symlink_to(secret)
    with pytest.raises(Unsafe):
        consolidate(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_strangers_folder_of_templates_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "secret.jinja", b"ours")
    (checkpoint / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    consolidate(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out" / "additional_chat_templates").exists()


@pytest.mark.parametrize("name", [*PLAIN, "modeling.py"])
def test_links_in_a_base_are_followed(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """The Hub's cache is made of them."""
    write_config(tmp_path / "base", auto_map={"AutoModel": "modeling.Strange"})
    target = write(tmp_path / "blobs", "blob")
    (tmp_path / "base" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "base" / name).symlink_to(target)
    consolidate(checkpoint, tmp_path / "out", base=str(tmp_path / "base"))
    assert (tmp_path / "out" / name).read_bytes() == CONTENT
    assert not (tmp_path / "out" / name).is_symlink()


def test_code_that_the_config_names_comes_along(checkpoint: Path, tmp_path: Path) -> None:
    """With what it imports from beside it."""
    write_config(checkpoint, auto_map={"AutoModel": "modeling.Strange", "AutoTokenizer": ["tokens.Slow", None]})
    for name in ("modeling.py", "tokens.py", "layers.py"):
        write(checkpoint, name)
    notes = consolidate(checkpoint, tmp_path / "out").notes
    assert sorted(path.name for path in (tmp_path / "out").glob("*.py")) == ["layers.py", "modeling.py", "tokens.py"]
    assert not any("trust_remote_code" in note for note in notes)
    assert [found.problems for found in verify(tmp_path / "out")] == [()]


def test_code_that_is_not_there_is_said(checkpoint: Path, tmp_path: Path) -> None:
    write_config(checkpoint, auto_map={"AutoConfig": "configuring.Config", "AutoModel": "modeling.Strange"})
    write(checkpoint, "modeling.py")
    (said,) = consolidate(checkpoint, tmp_path / "out").warnings
    assert "trust_remote_code" in said
    assert "configuring.py" in said
    assert "modeling.py" not in said


def test_code_stays_where_no_config_asks_for_it(checkpoint: Path, tmp_path: Path) -> None:
    write(checkpoint, "train.py")
    consolidate(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out" / "train.py").exists()


@pytest.mark.parametrize(
    ("auto_map", "files"),
    [
        ({"AutoModel": "modeling.Strange"}, {"modeling.py"}),
        ({"AutoModel": "org/model--modeling.Strange"}, set()),
        ({"AutoTokenizer": ["tokens.Slow", "tokens.Fast"]}, {"tokens.py"}),
        ({"AutoTokenizer": [None, "org/model--tokens.Fast"]}, set()),
        ({"AutoModel": 5}, set()),
        ("modeling.Strange", set()),
        (None, set()),
    ],
)
def test_which_files_have_the_code(auto_map: Any, files: set[str]) -> None:
    assert own_code_files({"auto_map": auto_map}) == files
