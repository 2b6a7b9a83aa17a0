"""Create the manifest of a checkpoint without one: read every byte, then record the checksums."""

from __future__ import annotations

from dataclasses import replace

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, local_path_of_source
from ckptkit.checkpoints.finalize_files import file_checksums, regular_files_in, replace_manifest
from ckptkit.checkpoints.manifest import NAME, Manifest
from ckptkit.checks.verify import Verified, bytes_at_path, require_no_problems, verify_component
from ckptkit.errors import Occupied, Usage
from ckptkit.io.progress import Progress, make_progress_reporter


def make_manifest(
    source: Source, *, overwrite: bool = False, jobs: int | None = None, progress: Progress | None = None
) -> list[Verified]:
    """Write the manifest `ckptkit.json` of the checkpoint at `source`, or of the latest checkpoint of a run.

    Each component, such as a model and its optimizer, gets a manifest in its own directory. A component that is
    spread over several disks gets one, in the first directory.

    The first result lists the files in the checkpoint's directory that no manifest covers. Raises `Corrupt` if
    verifying finds a problem, and `Occupied` if a manifest exists. With `overwrite`, replaces the old manifest without
    reading it.
    """
    checkpoint = Checkpoint.open(local_path_of_source(source))
    if not checkpoint.path.is_dir():
        hint = "pass the directory that the file is in"
        raise Usage("expected a directory: a manifest lists the files of one", path=checkpoint.path, hint=hint)
    # a file beside a model is listed in the model's manifest
    parts = [directory for directory in checkpoint.component_paths if directory.is_dir()]
    known = [part for part in parts if (part / NAME).exists()]
    if known and not overwrite:
        hint = "pass --overwrite to replace it, or run `ckptkit verify` to compare the files with it"
        raise Occupied("the checkpoint already has a manifest", path=known[0] / NAME, hint=hint)
    report = make_progress_reporter(progress, sum(map(bytes_at_path, parts)))
    results = []
    for part in parts:
        result = verify_component(part, with_manifest=False, jobs=jobs, progress=report)
        require_no_problems(result, "fix the problems that `ckptkit verify` lists, then run this again")
        others = regular_files_in(part) - result.sums.keys()
        replace_manifest(part, Manifest({**result.sums, **file_checksums(part, others, ())}))
        results.append(result)
    seen = {part.path / name for part in results for name in (*part.sums, *regular_files_in(part.path))}
    return [replace(results[0], left_behind=tuple(checkpoint.list_not_copied_files(seen))), *results[1:]]
