"""Find what modules keep beside their weights, which a model of other modules does not know."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.commands import export
from ckptkit.diagnosis.finding import Finding

_NAME = "_extra_state"


def find_extra_state(case: Case) -> Iterator[Finding]:
    """Yield the `_extra_state` of modules, where a model is to be loaded that is not of their kind."""
    if not case.is_asked or case.model is None:
        return
    layout = case.checkpoint.model_part.layout
    names = tuple(name for name in layout.names if _NAME in str(layout.key(name)[-1]).split("/")[0].split("."))
    if names:
        message = f"a module's own state, such as the scales of fp8: {case.model.name} has modules of another kind"
        yield Finding("extra_state", names[0], message, export(case.checkpoint, base=case.model.name), names)
