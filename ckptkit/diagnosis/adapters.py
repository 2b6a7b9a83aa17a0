"""Find adapters where a model is looked for."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.commands import beside, command, export
from ckptkit.diagnosis.finding import Finding


def find_adapters(case: Case) -> Iterator[Finding]:
    """Yield that there is an adapter, and the command that merges it into its base."""
    if not case.is_asked or case.adapted is None or case.model is None:
        return
    adapter = case.adapted.adapters[0]
    names = tuple(adapter.entries)
    what = f"{adapter.method} `{adapter.name}` on {', '.join(adapter.targets[:4])}"
    if case.adapted.base:
        message = f"an adapter that is not merged, {what}, lies in the weights: {case.model.name} has other names"
        fix = export(case.checkpoint, "--merge", base=case.model.name)
    elif case.adapted.is_saved:
        message = f"it is an adapter, {what}, and no model"
        path = case.checkpoint.path
        fix = command("merge", case.model.name, path, beside(path, "model"))
    else:
        message = f"it is an adapter, {what}, and no model"
        fix = export(case.checkpoint, "--merge", base=case.model.name)
    yield Finding("adapter", names[0], message, fix, names)
