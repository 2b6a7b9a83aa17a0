"""Know the releases of Meta's Llama models.

Source: meta-llama/llama-models: `consolidated.NN.pth` for each rank, `params.json` and `tokenizer.model` beside them.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Evidence, Trainer

_FILE = r"consolidated\.([0-9]{2})\.pth"


def wrote(seen: Evidence) -> str | None:
    return "Meta, or in its format" if seen.has_file(_FILE) else None


META_LLAMA = Trainer(name="meta_llama", wrote=wrote, ranks=(_FILE,))
