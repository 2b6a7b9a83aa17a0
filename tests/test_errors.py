"""What an error says as text."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

import ckptkit
from ckptkit.errors import Corrupt, Incomplete, Usage


def test_an_error_as_text_has_path_tensor_message_and_hint() -> None:
    error = Corrupt("expected 4 bytes, found 2", path="run/a.pt", tensor="w", hint="copy it again")
    assert str(error) == "run/a.pt: tensor `w`: expected 4 bytes, found 2 (hint: copy it again)"
    assert str(Usage("no steps")) == "no steps"
    assert str(Incomplete("no file", files=["x"], hint="pass --also")) == "no file (hint: pass --also)"


def test_an_error_that_learns_its_place_says_it() -> None:
    assert str(Corrupt("a gap").blame(path="a.pt", tensor="w")) == "a.pt: tensor `w`: a gap"


def test_a_traceback_shows_path_and_hint(tmp_path: Path) -> None:
    with pytest.raises(ckptkit.CkptError) as raised:
        ckptkit.convert(tmp_path / "absent", tmp_path / "out", to="hf", dtype="bf61")
    last = traceback.format_exception_only(raised.value)[-1]
    assert raised.value.message in last
    assert raised.value.hint is None or raised.value.hint in last
    assert raised.value.path is None or str(raised.value.path) in last
