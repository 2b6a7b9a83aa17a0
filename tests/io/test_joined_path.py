"""Several directories as one: a path in them is a path, and what is in two of them must be the same."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import fsspec
import pytest

from ckptkit.errors import Corrupt, IOFailure, Unsupported
from ckptkit.io.file import (
    file_size,
    is_existing_path,
    list_children,
    list_directories,
    names_in,
    open_file,
    opening,
    read_at,
    read_small,
)
from ckptkit.io.joined_path import JoinedPath, join_paths, local_paths_of
from ckptkit.io.origin import Origin
from ckptkit.io.path import drop_cached_listing, to_path


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """Two directories, and what lies in them: `a` and `both/x` in one, `b` and `both/y` in the other, `c` in each."""
    for root, name, inner in (("one", "a", "x"), ("two", "b", "y")):
        (tmp_path / root / "both").mkdir(parents=True)
        (tmp_path / root / name).write_text(name)
        (tmp_path / root / "c").write_text("the same")
        (tmp_path / root / "both" / inner).write_text(inner)
    (tmp_path / "two" / "apart").mkdir()
    return join_paths([tmp_path / "one", tmp_path / "two"])


def test_all_is_listed_once(both: Path) -> None:
    assert sorted(names_in(both)) == ["a", "apart", "b", "both", "c"]
    assert [path.name for path in list_children(both / "both")] == ["x", "y"]
    assert [path.name for path in list_directories(both)] == ["apart", "both"]
    assert sorted(path.name for path in both.iterdir()) == ["a", "apart", "b", "both", "c"]


def test_a_path_in_them_is_a_path(both: Path, tmp_path: Path) -> None:
    assert (both.name, both.parent) == ("one", tmp_path)
    assert both.with_name("three") == tmp_path / "three"
    assert both / "both" / "y" == both.joinpath("both", "y") == (both / "both") / "y"
    assert ((both / "b").parent, (both / "b").name, (both / "b.pt").suffix) == (both, "b", ".pt")
    assert str((both / "both" / "y").relative_to(both)) == "both/y"
    assert join_paths([tmp_path / "one", tmp_path / "two"]) == both
    assert join_paths([tmp_path / "two", tmp_path / "one"]) != both
    assert join_paths([tmp_path]) == tmp_path
    assert local_paths_of(both) == (tmp_path / "one", tmp_path / "two")
    assert local_paths_of(both / "b") == (tmp_path / "two" / "b",)


def test_a_file_is_said_to_lie_where_it_lies(both: Path, tmp_path: Path) -> None:
    assert str(both / "b") == str(tmp_path / "two" / "b")
    assert str(both / "none") == str(tmp_path / "one" / "none")
    assert os.fspath(both / "b") == str(tmp_path / "two" / "b")
    assert (both / "both" / "y").resolve() == (tmp_path / "two" / "both" / "y").resolve()
    assert pickle.loads(pickle.dumps(both / "b")) == tmp_path / "two" / "b"
    with pytest.raises(Unsupported, match="several directories"):
        os.fspath(both / "both")
    assert os.fspath(both / "apart") == str(tmp_path / "two" / "apart")


def test_what_there_is_is_known(both: Path) -> None:
    assert both.is_dir()
    assert (both / "apart").is_dir()
    assert (both / "b").is_file()
    assert is_existing_path(both / "b")
    assert not is_existing_path(both / "none")
    assert not (both / "none").exists()
    assert file_size(both / "c") == 8
    assert read_small(both / "both" / "y", 10) == b"y"
    with pytest.raises(Corrupt, match="the file is missing"):
        open_file(both / "none")
    with pytest.raises(IOFailure):
        list_children(both / "none")


def test_what_is_in_both_must_be_the_same(both: Path, tmp_path: Path) -> None:
    with opening(both / "c") as file:
        assert read_at(file, 8, 0) == b"the same"
    for text, words in (
        ("the name", "differs: other bytes"),
        ("more than that", "differs: 8 bytes here, 14 there"),
    ):
        (tmp_path / "two" / "c").write_text(text)
        for ask in (file_size, open_file):
            with pytest.raises(Corrupt, match=words) as caught:
                ask(both / "c")
            assert caught.value.path == tmp_path / "one" / "c"
            assert str(tmp_path / "two") in caught.value.message
    (tmp_path / "two" / "c").write_text("the same")
    assert file_size(both / "c") == 8


def test_paths_are_relative_until_asked(both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    near = join_paths([Path("one"), Path("two")])
    assert str(near / "b") == "two/b"
    assert near.absolute() == both
    assert str((near / "b").absolute()) == str(tmp_path / "two" / "b")


def test_a_directory_that_is_exchanged_is_noticed(both: Path, tmp_path: Path) -> None:
    origin = Origin.of(both)
    origin.require_unchanged()
    (tmp_path / "two").rename(tmp_path / "old")
    (tmp_path / "two").mkdir()
    with pytest.raises(IOFailure, match="was replaced"):
        origin.require_unchanged()


def test_one_of_them_may_be_remote(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/joined-test/b", b"far")
    (tmp_path / "a").write_text("near")
    both = join_paths([tmp_path, drop_cached_listing(to_path("memory://joined-test"))])
    assert sorted(names_in(both)) == ["a", "b"]
    assert read_small(both / "b", 10) == b"far"
    assert file_size(both / "b") == 3
    assert str(both / "b") == "memory://joined-test/b"
    assert isinstance(both, JoinedPath)
