"""Compare the memory of a smoke run with the estimate."""

from __future__ import annotations

from ckptkit.plugins.estimate.estimate import estimate
from ckptkit.training.smoke.run_check import CheckFailed
from ckptkit.training.smoke.runs import SmokeRuns


def check_bytes_as_estimated(runs: SmokeRuns) -> str:
    """Check that the largest rank has as many bytes of parameters and optimizer state as `ckptkit estimate` says."""
    ranks = runs.first_accounts
    precision = "bfloat16" if ranks[0].computes_in == "bfloat16" else "float32"
    size = runs.config.sequence_length, -(-runs.config.batch_size // runs.nproc)
    (budget,) = estimate(
        runs.config.run / "config.json", world_size=runs.nproc, strategy="full_shard", recompute_every=0,
        sequence_length=size[0], micro_batch_size=size[1], param_dtype=precision,
    ).budgets  # fmt: skip
    expected = budget.peak_bytes_by_component["parameters"], budget.peak_bytes_by_component["optimizer"]
    measured = max(rank.parameters for rank in ranks), max(rank.optimizer for rank in ranks)
    if measured != expected:
        wanted = f"{expected[0]:,} bytes of parameters and {expected[1]:,} of moments (estimate)"
        raise CheckFailed(f"expected {wanted}, found {measured[0]:,} and {measured[1]:,}")
    peak = ranks[0].peak and f"; peak {ranks[0].peak:,} bytes, estimated {budget.peak:,}"
    return f"{measured[0]:,} bytes of parameters, {measured[1]:,} of moments{peak or ''}"
