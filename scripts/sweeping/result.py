"""Say what came of a type of models."""

from __future__ import annotations

from dataclasses import dataclass

EQUAL, DIFFERENT, REFUSED, FAILED, NOT_BUILT = "equal", "different", "refused", "failed", "not built"
BROKEN = "an error of transformers"  # a kind of reasons why a type is not built, of which each is told
MEANINGS = {
    EQUAL: "every name, dtype, shape and byte is as `save_pretrained` writes it",
    DIFFERENT: "something differs",
    REFUSED: "ckptkit ends with an error",
    FAILED: "something else fails, or takes too long",
    NOT_BUILT: "transformers could not build or save a small model of this type",
}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a type, one of `MEANINGS`, and why."""

    outcome: str
    reason: str = ""
