"""Text in lines, where names break as a reader would break them; and numbers with their nouns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.words import count, fold_lines

NAME = "model.layers.0.post_attention_layernorm.weight"


def test_a_name_breaks_after_a_dot_or_a_slash() -> None:
    assert fold_lines(NAME, 46) == [NAME]
    assert fold_lines(NAME, 44) == ["model.layers.0.post_attention_layernorm.", "  weight"]
    assert fold_lines(NAME, 33) == ["model.layers.0.", "  post_attention_layernorm.weight"]
    assert fold_lines("/scratch/experiments/llama-8b/ckpt-500", 24) == ["/scratch/experiments/", "  llama-8b/ckpt-500"]


def test_further_lines_are_indented_by_two_more() -> None:
    assert fold_lines(f"    {NAME}  x2", 50) == [f"    {NAME}", "      x2"]
    assert fold_lines("    self_attn.q_proj.weight", 24) == ["    self_attn.q_proj.", "      weight"]


def test_a_sentence_breaks_at_spaces_and_a_long_word_at_another_sign() -> None:
    assert fold_lines(f"`{NAME}` is not in the checkpoint", 60) == [f"`{NAME}` is not in", "  the checkpoint"]
    assert fold_lines("of post_attention_layernorm", 20) == ["of post_attention_", "  layernorm"]
    assert fold_lines("x" * 30, 20) == ["x" * 20, "  " + "x" * 10]


@given(st.text(" ./_,abcdefgh", max_size=120), st.integers(4, 60))
def test_nothing_is_lost_and_every_line_fits(text: str, width: int) -> None:
    lines = fold_lines(text, width)
    assert all(len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("number", "words", "counted"),
    [
        (0, ("tensor",), "0 tensors"),
        (1, ("tensor", "lacks"), "1 tensor lacks"),
        (2, ("tensor", "lacks"), "2 tensors lack"),
        (1, ("entry", "is"), "1 entry is"),
        (1234, ("entry", "is"), "1,234 entries are"),
        (2, ("key",), "2 keys"),
        (2, ("axis", "has"), "2 axes have"),
    ],
)
def test_a_noun_and_a_verb_agree_with_their_number(number: int, words: tuple[str, ...], counted: str) -> None:
    assert count(number, *words) == counted
