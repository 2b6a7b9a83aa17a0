"""Know the checkpoints of llm.c.

Source: karpathy/llm.c, train_gpt2.cu: `model_00001000.bin` with the states of the ranks and `DONE_00001000` beside it.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer


def wrote(seen: Evidence) -> str | None:
    """Return the name by the format, which is of no other."""
    return "llm.c" if seen.format == "llmc" else None


LLMC = Trainer(
    name="llmc",
    wrote=wrote,
    steps=("model_([0-9]{8})",),
    own_state=(r"state_[0-9]{8}_([0-9]{5})\.bin",),
)
