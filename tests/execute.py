"""Plans that are executed from end to end, as a conversion does it."""

from __future__ import annotations

from collections.abc import Callable

from ckptkit.engine.copy import Copied, copy_by_plan, verify_copy
from ckptkit.layout.plan import Plan


def execute(plan: Plan, *, jobs: int | None = None, progress: Callable[[int], None] | None = None) -> Copied:
    """Fill every chunk of the plan's destination, and check what was read and written."""
    return verify_copy(plan, copy_by_plan(plan, jobs=jobs, progress=progress), jobs=jobs)
