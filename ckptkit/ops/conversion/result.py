"""What a conversion did, or would do: the one report of `consolidate`, `convert` and `reshard`. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.weights import LeftOut
from ckptkit.files.allocation import free_bytes
from ckptkit.ops.conversion.drafts import Drafts
from ckptkit.ops.conversion.key import Recipe, make_key
from ckptkit.ops.conversion.output import Output
from ckptkit.ops.conversion.pipeline import peak_rss_bytes, write


@dataclass(frozen=True, slots=True)
class Converted:
    """What was made of what. Names are the tensors' new ones; `dropped` is by the names they had.

    `wrapper` is the key that the model was under, if it was taken out of there; `world_size` the ranks that a sharded
    output is for. Of the source, `checked_bytes` were compared with a recorded CRC-32; `unchecked_bytes` have none.
    `is_finished` is false if this was only a share of the work; `plan` is a hash that all who share it have in common.
    """

    source: Path
    output: Path
    format: str
    files: Mapping[str, int]
    tensors: int
    nbytes: int
    renamed: Mapping[str, str]
    dropped: Sequence[LeftOut]
    cast: Mapping[str, str]
    notes: Sequence[str]
    wrapper: str = ""
    world_size: int | None = None
    seconds: float = 0.0
    copies: int = 0
    checked_bytes: int = 0
    unchecked_bytes: int = 0
    free_bytes: int = 0
    peak_rss_bytes: int = 0
    dry_run: bool = False
    is_finished: bool = True
    plan: str = ""


def carry_out(drafts: Drafts, output: Output, recipe: Recipe, report: Converted, began: float) -> Converted:
    """Write what was drafted, unless it is a dry run, and complete the report; `began` is of `time.perf_counter`."""
    key = make_key(recipe, drafts, output.workers.count)
    if report.dry_run:
        copies = sum(len(tensor.chunks) for part in drafts.parts for tensor in part.source.tensors.values())
        seconds = time.perf_counter() - began
        return replace(report, copies=copies, free_bytes=free_bytes(output.path), seconds=seconds, plan=key.plan)
    copied = write(drafts, output, key.text)
    return replace(
        report,
        seconds=time.perf_counter() - began,
        checked_bytes=copied.checked_bytes if copied else 0,
        unchecked_bytes=copied.unchecked_bytes if copied else 0,
        peak_rss_bytes=peak_rss_bytes(),
        is_finished=copied is not None,
        plan=key.plan,
    )
