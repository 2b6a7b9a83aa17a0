"""What the tracker files of other trainers mean, and that those that mean nothing of use harm nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptkit.checkpoints.checkpoint import find_latest
from ckptkit.trainers.trackers import Tracker, trackers_in


def found(root: Path) -> list[tuple[str, str]]:
    return [(tracker.name, tracker.target) for tracker in trackers_in(root)]


@pytest.mark.parametrize(
    ("name", "content", "target"),
    [
        ("latest", b"global_step20", "global_step20"),
        ("latest", b"global_step20\n", "global_step20"),
        ("latest_checkpointed_iteration.txt", b"100", "100"),
        ("latest_checkpointed_iteration.txt", b"release\n", "release"),
        ("dlrover_latest.txt", b"100\n", "100"),
        ("latest.txt", b" 7 ", "7"),
    ],
)
def test_files_hold_a_name_or_a_step(tmp_path: Path, name: str, content: bytes, target: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert found(tmp_path) == [(name, target)]


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"../evil", b"/etc", b"..", b".", b"a\\b", b"a\0b", b"a\nb", b"\xff\xfe", b"\xd9\xa1", b"7" * 2000],
)
def test_files_that_hold_anything_else_mean_nothing_and_are_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    assert found(tmp_path) == [("latest", "")]
    (tmp_path / "ckpt-7").mkdir()
    assert not any(tracker.is_naming(tmp_path / name) for tracker in trackers_in(tmp_path) for name in ("", "ckpt-7"))
    assert "`latest` names no checkpoint" in find_latest(tmp_path).remarks


def test_what_is_no_file_means_nothing(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    os.mkfifo(tmp_path / "latest.txt")
    (tmp_path / "other").write_bytes(b"ckpt-1")
    (tmp_path / ".latest").symlink_to("ckpt-1")
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("ckpt-5", "ckpt-5"),
        ("./ckpt-5/", "ckpt-5"),
        ("ep0-ba5/__0_0.distcp", "ep0-ba5"),
        ("{root}/ckpt-5", "ckpt-5"),
        ("absent", "absent"),
        ("../elsewhere/ckpt-5", None),
        ("/etc/passwd", None),
        (".", None),
        ("..", None),
    ],
)
def test_links_mean_what_they_lead_to_in_the_run(tmp_path: Path, target: str, name: str | None) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "best").symlink_to(target.format(root=root))
    assert found(root) == ([] if name is None else [("best", name)])


def test_a_step_is_meant_by_any_name(tmp_path: Path) -> None:
    tracker = Tracker("latest_checkpointed_iteration.txt", "100")
    assert all(tracker.is_naming(Path(name)) for name in ("iter_0000100", "global_step_100", "100"))
    assert not tracker.is_naming(Path("iter_0001000"))
    assert not Tracker("latest", "release").is_naming(Path("iter_0000100"))
