"""Find checkpoints in which there is no model, or more than one."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.commands import export
from ckptkit.diagnosis.finding import Finding
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.names.weights import find_weights


def find_model(case: Case) -> Iterator[Finding]:
    """Yield that it cannot be told which tensors are the model, where one is asked for."""
    if not case.is_asked or case.model is None:
        return
    try:
        find_weights(case.checkpoint.model_part.layout)
    except Mismatch as error:
        yield Finding("no_model", None, error.message)
    except Unsupported as error:
        glob = (error.hint or "").partition("'")[2].partition("'")[0]
        fix = export(case.checkpoint, "--include", glob, base=case.model.name) if glob else None
        yield Finding("no_model", None, error.message, fix)
