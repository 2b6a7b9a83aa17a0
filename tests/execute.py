"""Plans that are executed from end to end, as a conversion does it."""

from __future__ import annotations

from collections.abc import Callable

from ckptkit.engine.copy import Copied, check_complete, copy
from ckptkit.layout.plan import Plan


def execute(plan: Plan, *, jobs: int | None = None, progress: Callable[[int], None] | None = None) -> Copied:
    """Fill every chunk of the plan's destination, and check what was read and written."""
    return check_complete(plan, copy(plan, jobs=jobs, progress=progress), jobs=jobs)
