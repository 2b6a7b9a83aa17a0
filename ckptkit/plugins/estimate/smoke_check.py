"""Compare the memory of a smoke run with the estimate."""

from __future__ import annotations

from ckptkit.plugins.estimate.estimate import estimate
from ckptkit.training.smoke.runs import Failed, SmokeRuns


def holds_what_was_estimated(runs: SmokeRuns) -> str:
    """Check that the largest rank has as many bytes of parameters and optimizer state as `ckptkit estimate` says."""
    held = runs.first
    precision = "bfloat16" if held[0].computes_in == "bfloat16" else "float32"
    size = runs.config.sequence_length, -(-runs.config.batch_size // runs.nproc)
    (budget,) = estimate(
        runs.config.run / "config.json", world_size=runs.nproc, strategy="full_shard", recompute_every=0,
        sequence_length=size[0], micro_batch_size=size[1], param_dtype=precision,
    ).budgets  # fmt: skip
    expected = budget.parts["parameters"], budget.parts["optimizer"]
    found = max(rank.parameters for rank in held), max(rank.optimizer for rank in held)
    if found != expected:
        raise Failed(f"{found[0]:,} bytes of parameters and {found[1]:,} of moments; estimated {expected}")
    peak = held[0].peak and f"; at most {held[0].peak:,} bytes, estimated {budget.peak:,}"
    return f"{found[0]:,} bytes of parameters, {found[1]:,} of moments{peak or ''}"
