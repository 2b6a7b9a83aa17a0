"""Pins lie in the run, by name: they go where it goes, and not with a checkpoint that leaves it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptkit.errors import Unsafe
from ckptkit.runs.deletion import PINS, clear_pin, is_pinned, pinned_names_in, set_pin


def test_a_pin_is_an_empty_file_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "ckpt-1").mkdir(parents=True)
    assert pinned_names_in(tmp_path / "run") == frozenset()
    clear_pin(tmp_path / "run" / "ckpt-1")
    for _ in range(2):
        set_pin(tmp_path / "run" / "ckpt-1")
        assert [(path.name, path.stat().st_size) for path in (tmp_path / "run" / PINS).iterdir()] == [("ckpt-1", 0)]
    assert is_pinned(tmp_path / "run" / "ckpt-1")
    assert not is_pinned(tmp_path / "run" / "ckpt-2")
    shutil.copytree(tmp_path / "run" / "ckpt-1", tmp_path / "elsewhere" / "ckpt-1")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert is_pinned(tmp_path / "moved" / "ckpt-1")
    assert not is_pinned(tmp_path / "elsewhere" / "ckpt-1")
    shutil.rmtree(tmp_path / "moved" / "ckpt-1")
    for _ in range(2):
        clear_pin(tmp_path / "moved" / "ckpt-1")
        assert pinned_names_in(tmp_path / "moved") == frozenset()
        assert not (tmp_path / "moved" / PINS).exists()


def test_the_folder_stays_for_other_pins(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"ckpt-{step}").mkdir()
        set_pin(tmp_path / f"ckpt-{step}")
    clear_pin(tmp_path / "ckpt-1")
    assert pinned_names_in(tmp_path) == {"ckpt-2"}


def test_an_unpin_may_remove_the_folder_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    assert pinned_names_in(tmp_path) == frozenset()
    clear_pin(tmp_path / "ckpt-1")


def test_no_link_is_followed_to_set_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / PINS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unsafe, match="symbolic link"):
        set_pin(tmp_path / "run" / "ckpt-1")
    assert list((tmp_path / "elsewhere").iterdir()) == []
