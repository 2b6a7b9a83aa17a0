"""Find a head that config.json ties to the embedding, and that is not there, or not the same."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.commands import export
from ckptkit.diagnosis.finding import Finding
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.files.path import RemotePath
from ckptkit.models.fit import check_equal, ties_of


def find_ties(case: Case) -> Iterator[Finding]:
    """Yield the tensors that the config ties to others: loaders take the other's numbers for both.

    Shards that lack one are no model's whole state dict, which has both names. Reads both tensors, where a disk is.
    """
    model, weights = case.model, case.weights
    if model is None or weights is None or not case.is_plain:
        return
    for name, source in ties_of(weights.layout, model.config, case.form).items():
        if name not in weights.layout.tensors:
            if source in weights.layout.tensors and case.checkpoint.model_part.reader.is_sharded and model.asked:
                message = f"it is tied to `{source}`, and a model in memory has it too: torch's load asks for it"
                yield Finding("tie", name, message, export(case.checkpoint, base=model.name))
        elif not isinstance(weights.layout.root, RemotePath) and differs(case, name, source):
            message = f"the config of {model.name} ties it to `{source}`, whose numbers are others: one of them is lost"
            yield Finding("tie", name, message)


def differs(case: Case, name: str, source: str) -> bool:
    """Return whether two tensors that should be the same are not."""
    if case.weights is None or source not in case.weights.layout.tensors:
        return False
    try:
        check_equal(case.weights.layout, name, source)
    except Mismatch:
        return True
    except Unsupported:
        pass
    return False
