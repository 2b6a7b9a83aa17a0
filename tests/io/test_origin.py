"""Whether what is being read is still there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import IOFailure
from ckptkit.io.origin import Origin


def test_what_stays_or_changes_inside_is_the_same(tmp_path: Path) -> None:
    origin = Origin.of(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    origin.require_unchanged()


def test_what_is_replaced_or_gone_is_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    origin = Origin.of(source)
    source.rename(tmp_path / "old")
    with pytest.raises(IOFailure, match="was deleted") as raised:
        origin.require_unchanged()
    assert raised.value.hint == "pass another checkpoint"
    source.mkdir()
    with pytest.raises(IOFailure, match="was replaced"):
        origin.require_unchanged()


def test_what_was_absent_may_stay_so(tmp_path: Path) -> None:
    Origin.of(tmp_path / "absent").require_unchanged()
