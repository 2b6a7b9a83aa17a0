"""Recognize an adapter that was saved without its elements, as PEFT under ZeRO 3 did: its tensors have shape [0].

Source: transformers' pull request 41416. Before it, `Trainer.save_model` did not gather the parameters of an adapter.
"""

from __future__ import annotations

from ckptkit.errors import Corrupt
from ckptkit.layout import Layout

EMPTY = "empty_adapter"  # the code of the error
_WHY = "ZeRO 3 saved it without gathering the parameters"


def find_empty_adapter_error(layout: Layout) -> Corrupt | None:
    """Return the error for an adapter file without tensors, or with tensors of size 0; None for any other."""
    empty = sorted(name for name, tensor in layout.tensors.items() if not tensor.spec.numel)
    if layout.tensors and not empty:
        return None
    what = f"{len(empty)} of {len(layout.tensors)} tensors have size 0" if empty else "the file contains no tensors"
    hint = "pass the training's checkpoint, whose `global_step` directory has the weights"
    error = Corrupt(
        f"the adapter is empty, {what}: {_WHY}", path=layout.path, tensor=next(iter(empty), None), hint=hint
    )
    error.code = EMPTY
    return error
