"""Problems of one file are folded to one, which counts only what is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.checkpoints.problems import merge_file_problems
from ckptkit.errors import Corrupt


@pytest.mark.parametrize(
    ("entries", "words"), [({}, "16 entries differ"), ({Path("a"): 20}, "16 of 20 entries differ")]
)
def test_entries_are_counted_as_far_as_they_are_known(entries: dict[Path | None, int], words: str) -> None:
    problems = [Corrupt("expected 8 bytes, found 4", path=Path("a"), tensor=f"w{i}") for i in range(16)]
    (found,) = merge_file_problems(problems, entries)
    assert found.message.startswith(words)
