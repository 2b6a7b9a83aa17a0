"""Apply deltas to the checkpoint that they were made from, and write the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.conversion.convert import with_not_copied_files
from ckptkit.errors import Corrupt, Usage
from ckptkit.io.destination import to_destination
from ckptkit.io.origin import Origin
from ckptkit.io.path import to_path
from ckptkit.io.progress import Progress
from ckptkit.layout import Layout, WriterOptions
from ckptkit.layout.plan import Operand
from ckptkit.plugins.deltas.as_consolidated import ConsolidatedView, open_as_consolidated
from ckptkit.state.directories import (
    require_free_or_replaceable,
    require_outside_destination,
    require_separate_destination,
)
from ckptkit.state.draft import Conversion
from ckptkit.state.options import Keywords
from ckptkit.state.report import Converted, complete_result, predict_result
from ckptkit.state.write_output import write_output

if TYPE_CHECKING:
    from ckptkit.plugins.deltas.chain import DeltaChain, Patched
    from ckptkit.plugins.deltas.changes import Changes

_KEPT = 4  # tensors whose changes stay in memory; threads work on neighboring tensors


def apply(
    base: Source,
    deltas: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    dtype: str | Sequence[str] = (),
    overwrite: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    sync: bool = True,
    progress: Progress | None = None,
) -> Converted:
    """Apply one or more deltas to checkpoint `base`, and write the resulting Hugging Face model to directory `out`.

    `base` may have any format: ckptkit uses it as `consolidate` would write it, in `dtype` if you pass one. The result
    has the config and tokenizer of `base`, and its shards if `base` is a Hugging Face model. Its weights equal those
    that `consolidate` makes of the checkpoint that the last delta leads to. Raises `Mismatch` for another base and for
    deltas that do not follow each other, and `Corrupt` for a damaged delta, before it writes anything.
    """
    began = time.perf_counter()
    given = [deltas] if isinstance(deltas, str | Path) else list(deltas)
    if not given:
        raise Usage("expected at least one delta to apply, found none", hint="run `ckptkit apply BASE DELTA OUT`")
    output = to_destination(out)
    require_free_or_replaceable(output, overwrite=overwrite, is_file=False)
    options: Keywords = {"overwrite": overwrite, "dry_run": dry_run, "jobs": jobs, "sync": sync, "progress": progress}
    if dtype:
        options["dtype"] = dtype
    opened = open_as_consolidated(base, options, output)
    require_separate_destination(opened.checkpoint, output, opened.draft.writer)
    paths = [to_path(path) for path in given]
    for path in paths:
        require_outside_destination(path, output)
    from ckptkit.plugins.deltas.chain import DeltaChain  # imports numpy
    from ckptkit.plugins.deltas.open_delta import open_delta

    chain = DeltaChain.of(map(open_delta, paths))
    conversion = draft_apply(opened, chain, jobs)
    prospect = predict_result(conversion, time.perf_counter() - began)
    if dry_run:
        return prospect
    try:
        written = write_output(conversion)
    except Corrupt as error:  # the CRC-32 of a result differs: blame the delta for changed tensors, else the base
        is_changed = error.tensor in chain.specs
        raise error.blame(
            path=chain.last_payload_path_of(str(error.tensor)) if is_changed else opened.path
        ) from error.__cause__
    return complete_result(conversion, prospect, written, time.perf_counter() - began)


def draft_apply(base: ConsolidatedView, chain: DeltaChain, jobs: int | None) -> Conversion:
    """Return the conversion that applies the deltas to `base`, after it has read and checked every delta.

    Raises `Mismatch` if `base` is not the base of the first delta.
    """
    from ckptkit.plugins.deltas.chain import checksum_by_tensor
    from ckptkit.plugins.deltas.verify_delta import check_and_count_nan

    chain.check_specs(base.layout)
    for delta in chain.deltas:
        check_and_count_nan(delta)
    sums = checksum_by_tensor(base.layout, jobs=jobs)
    chain.check_base(base.layout, sums)
    draft, wanted = base.draft, base.draft.wanted
    places: Mapping[str, str] | None = None
    # if the base is a Hugging Face model, its tensors stay in their files
    if wanted.format == draft.writer.name and wanted.world_size is None and base.path.is_dir():
        file_of_tensor = {name: tensor.chunks[0].path for name, tensor in wanted.tensors.items()}
        files = set(file_of_tensor.values())
        places = file_of_tensor if len(files) > 1 or files <= {file.name for file in draft.files} else None
    options = WriterOptions(base.conversion.options.max_shard_size, places=places)
    changed = replace(
        draft,
        sources=(*draft.sources, *(delta.layout for delta in chain.deltas)),
        read=(*draft.read, *(delta.path / name for delta in chain.deltas for name in sorted(delta.layout.files))),
        files=draft.writer.lay_out_files(wanted, options),
        recipes=patch_recipes_by_name(chain, wanted),
        sums={**sums, **chain.final_checksums},
    )
    conversion = replace(
        base.conversion,
        drafts=[changed],
        origins=[*base.conversion.origins, *(Origin.of(delta.path) for delta in chain.deltas)],
    )
    return with_not_copied_files(conversion, [base.checkpoint])


def patch_recipes_by_name(chain: DeltaChain, base: Layout) -> dict[str, Patched]:
    """Return a recipe for each changed tensor, which starts from the base or from a full tensor in a delta."""
    from ckptkit.plugins.deltas.chain import Patched
    from ckptkit.plugins.deltas.open_delta import WHOLE

    lock, load_changes = Lock(), lru_cache(_KEPT)(chain.find_changes_since_full)

    def find_changes(name: str) -> Changes | None:
        with lock:  # so that only one thread loads the changes of a tensor
            return load_changes(name)

    recipes = {}
    for name, spec in chain.specs.items():
        last = chain.find_last_full_delta(name)
        operand = Operand(0, name, spec.dtype) if last is None else Operand(last + 1, name + WHOLE, spec.dtype)
        shape = base.tensors[name].shape_tiled_by_chunks if last is None else spec.shape
        recipes[name] = Patched(operand, name, shape, find_changes)
    return recipes
