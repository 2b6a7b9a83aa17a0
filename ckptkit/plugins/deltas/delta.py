"""Write the changes between two checkpoints of one model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.checkpoints.manifest import source_record_of
from ckptkit.checkpoints.model_facts import ModelFacts
from ckptkit.conversion.convert import warn_of_inconsistent_weights
from ckptkit.errors import Occupied, Unsupported, translate_os_errors
from ckptkit.io.allocation import make_directory
from ckptkit.io.destination import is_on_hub, to_destination
from ckptkit.io.file import file_size, names_in
from ckptkit.io.origin import Origin
from ckptkit.io.path import is_remote
from ckptkit.io.progress import BytesDone, Progress, make_progress_reporter
from ckptkit.io.staging import Stage
from ckptkit.models.config_differences import describe_differences
from ckptkit.plugins.deltas.as_consolidated import ConsolidatedView, open_both_as_consolidated
from ckptkit.plugins.deltas.record import DeltaRecord
from ckptkit.state.directories import require_separate_destination
from ckptkit.summary import Summarized
from ckptkit.words import format_bytes, per_cent

if TYPE_CHECKING:
    from ckptkit.plugins.deltas.write_delta import FoundChanges, Spool

LARGEST = 0.6  # fraction of the model size; `force` allows more


@dataclass(frozen=True, slots=True)
class WrittenDelta(Summarized):
    """A delta from checkpoint `base` to `new`, written to `output`, or planned with `dry_run`.

    `record` lists the changes, `nbytes` is the size of the new values and positions, `files` maps the files of the
    delta to their sizes in bytes. `checked_bytes` is the number of source bytes with a verified checksum.
    """

    base: Path
    new: Path
    output: Path
    record: DeltaRecord
    nbytes: int
    files: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checked_bytes: int = 0
    seconds: float = 0.0
    dry_run: bool = False

    @property
    def density(self) -> float:
        """Return the fraction of all elements that changed."""
        return self.record.density

    @property
    def share(self) -> float:
        """Return the size of the delta as a fraction of the size of the model."""
        return self.nbytes / self.record.nbytes if self.record.nbytes else 0.0

    def summary(self) -> Iterator[str]:
        verb = "would write" if self.dry_run else "wrote"
        yield f"{verb} {self.output}: the changes from {self.base} to {self.new}"
        yield from self.record.summary(self.nbytes)


def delta(
    base: Source,
    new: Source,
    out: str | Path,
    *,
    dtype: str | Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    sync: bool = True,
    progress: Progress | None = None,
) -> WrittenDelta:
    """Write the changes from the model in checkpoint `base` to the model in `new` to the directory `out`.

    Both may have any format and world size. ckptkit compares their bits as `consolidate` would write them, in the
    dtypes of `base`, or in `dtype`. `out` may be in S3, Google Cloud Storage or Azure. The delta contains the new
    values and their positions. Raises `Mismatch` if the two do not belong to one model, and `Unsupported` if the delta
    is larger than 60% of the model, unless you pass `force`. After an error nothing is written.
    """
    began = time.perf_counter()
    output = to_destination(out)
    if is_on_hub(output):
        hint = "write to a local directory, then `ckptkit cp` it there with --yes"
        raise Unsupported("a delta cannot be written to hf:// directly", path=output, hint=hint)
    with translate_os_errors(output):
        if output.exists() and not (output.is_dir() and not names_in(output)):
            raise Occupied("the destination exists", path=output, hint="choose another directory")
    sides = open_both_as_consolidated(base, new, (dtype,) if isinstance(dtype, str) else tuple(dtype), output)
    for side in sides:
        require_separate_destination(side.checkpoint, output, side.draft.writer)
    pair = ComparedPair(sides, jobs, make_progress_reporter(progress, 2 * sides[0].layout.nbytes))
    if dry_run:
        from ckptkit.plugins.deltas.write_delta import Spool

        with Spool(None, sides[0].layout.specs) as spool:
            written = pair.make_written_delta(output, *pair.find_changes(spool))
        if not force:
            require_smaller_than_model(written)
    elif is_remote(output):  # the copy to an object store is atomic
        from ckptkit.runs.cp import cp

        with TemporaryDirectory(prefix="ckptkit-") as temporary:
            written = pair.write_to_directory(output, Path(temporary, "delta"), force=force, sync=False)
            cp(Path(temporary, "delta"), output, jobs=jobs)
    else:
        written = pair.write_to_directory(output, output, force=force, sync=sync)
    return replace(written, seconds=time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Two checkpoints of one model, compared to write their differences."""

    sides: tuple[ConsolidatedView, ConsolidatedView]
    jobs: int | None
    told: BytesDone | None

    def write_to_directory(self, output: Path, staging: Path, *, force: bool, sync: bool) -> WrittenDelta:
        """Write the delta to `output` by way of directory `staging`. The result is atomic."""
        from ckptkit.plugins.deltas.write_delta import Spool, write_delta

        origins = [Origin.of(side.path) for side in self.sides]
        with Stage(staging, sync=sync).opened() as stage:
            make_directory(stage.notes_directory)
            with Spool(stage.notes_directory / "changes", self.sides[0].layout.specs) as spool:
                changes, checked = self.find_changes(spool)
                written = self.make_written_delta(output, changes, checked)
                if not force:
                    require_smaller_than_model(written)
                source = {**source_record_of(self.sides[1].layout), "base": str(self.sides[0].path.absolute())}
                record = write_delta(stage.path, changes, source)
            for origin in origins:
                origin.require_unchanged()
            files = {name: file_size(stage.path / name) for name in sorted(names_in(stage.path)) if "." in name[1:]}
            stage.commit()
        return replace(written, record=record, files=files, dry_run=False)

    def find_changes(self, spool: Spool) -> tuple[FoundChanges, int]:
        """Compare all elements. Returns the changes, and the number of source bytes with a verified checksum."""
        from ckptkit.plugins.deltas.changes import pass_changes_to
        from ckptkit.plugins.deltas.write_delta import FoundChanges, filler_from_model

        before, after = (side.layout for side in self.sides)
        sink = spool.add_block_changes
        old, new, checked = pass_changes_to(before, after, sink, jobs=self.jobs, progress=self.told)
        return FoundChanges(after.specs, old, new, spool, filler_from_model(after, self.jobs)), checked

    def make_written_delta(self, output: Path, changes: FoundChanges, checked: int) -> WrittenDelta:
        from ckptkit.plugins.deltas.changes import nan_warnings

        checkpoints = [side.checkpoint for side in self.sides]
        notes = list(nan_warnings(changes.spool.nan)) if changes.spool.changed else ["no tensor changed"]
        before, after = map(ModelFacts.of, checkpoints)
        compared = before.compare(after)
        if compared.differences:  # of a config or a tokenizer
            differences = describe_differences(compared.differences, str(self.sides[1].path))
            files = compared.described_in
            notes.append(f"a delta does not contain {files}, and the new model differs: {differences}; copy it too")
        notes += before.notes_on_different_inputs(after)
        return WrittenDelta(
            base=self.sides[0].path,
            new=self.sides[1].path,
            output=output,
            record=changes.make_record(dict.fromkeys(changes.payload_specs_by_tensor, "")),
            nbytes=changes.payload_bytes,
            notes=(*notes, *chain(*map(warn_of_inconsistent_weights, checkpoints))),
            checked_bytes=checked,
            dry_run=True,
        )


def require_smaller_than_model(written: WrittenDelta) -> None:
    """Raise `Unsupported` for a delta that is not much smaller than the model."""
    if written.share > LARGEST:
        message = (
            f"expected a delta of at most {LARGEST:.0%} of the model, found {per_cent(written.share)} "
            f"({format_bytes(written.nbytes)}): {per_cent(written.density)} of the elements changed"
        )
        raise Unsupported(message, path=written.output, hint="copy the checkpoint instead, or pass --force")
