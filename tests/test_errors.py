"""What an error says as text: one line in plain English, whatever the numbers are."""

from __future__ import annotations

import pickle
import re
import traceback
from pathlib import Path

import pytest

import ckptkit
from ckptkit.errors import DAMAGED, Corrupt, Incomplete, Mismatch, Usage, and_more

PACKAGE = Path(ckptkit.__file__).parent


@pytest.mark.parametrize(
    ("number", "words"), [(-2, ""), (0, ""), (1, " and 1 more"), (2, " and 2 more"), (1234, " and 1,234 more")]
)
def test_there_may_be_no_more(number: int, words: str) -> None:
    assert and_more(number) == words


def test_no_message_counts_the_rest_by_itself() -> None:
    """`it and 0 more`, `nor 0 others`, `1 others`."""
    counted = re.compile(r"(and|nor|with|do) \{(?!count\()[^{}]* - [^{}]*\} (more|others?)\b")
    found = {path.name: counted.findall(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}


def test_an_error_as_text_has_path_tensor_message_and_hint() -> None:
    error = Corrupt("expected 4 bytes, found 2", path="run/a.pt", tensor="w", hint="copy it again")
    assert str(error) == "run/a.pt: tensor `w`: expected 4 bytes, found 2 (hint: copy it again)"
    assert str(Usage("no steps")) == "no steps"
    assert str(Incomplete("no file", files=["x"], hint="pass --also")) == "no file (hint: pass also)"


def test_an_error_that_learns_its_place_says_it() -> None:
    assert str(Mismatch("a gap").blame(path="a.pt", tensor="w")) == "a.pt: tensor `w`: a gap"


def test_damage_of_a_tensor_has_one_hint() -> None:
    error = Corrupt("a gap")
    assert error.hint is None
    assert error.blame(tensor="w").hint == DAMAGED
    assert str(error).endswith("or run `ckptkit consolidate SRC OUT --salvage` to keep the other tensors)")
    assert Corrupt("a gap", tensor="w", hint="use another").hint == "use another"
    assert pickle.loads(pickle.dumps(error)).hint == DAMAGED


def test_a_traceback_shows_path_and_hint(tmp_path: Path) -> None:
    with pytest.raises(ckptkit.CkptError) as raised:
        ckptkit.convert(tmp_path / "absent", tmp_path / "out", to="hf", dtype="bf61")
    last = traceback.format_exception_only(raised.value)[-1]
    assert raised.value.message in last
    assert raised.value.hint is None or raised.value.hint in last
    assert raised.value.path is None or str(raised.value.path) in last
