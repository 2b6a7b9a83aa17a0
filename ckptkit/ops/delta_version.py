"""Write what changed between two checkpoints as the next version of a policy, for engines that pull versions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.conversion.directories import require_separate_destination
from ckptkit.deltas import disk_delta
from ckptkit.deltas.byte_delta import OVERWRITE, XOR
from ckptkit.deltas.digests import best_algorithm, new_digest
from ckptkit.deltas.find import is_byte_delta
from ckptkit.deltas.write_version import EncodedTensor, VersionTerms, encode, is_written, write_version
from ckptkit.destinations.allocation import make_folder
from ckptkit.destinations.staging import Stage
from ckptkit.errors import Mismatch, Unsupported, Usage
from ckptkit.files.file import file_size
from ckptkit.files.origin import Origin
from ckptkit.files.path import to_local
from ckptkit.ops.as_consolidated import ConsolidatedView, both_consolidated
from ckptkit.ops.delta import LARGEST
from ckptkit.pictures.numbers import format_bytes, per_cent
from ckptkit.pictures.words import count
from ckptkit.progress import Progress, Told, telling
from ckptkit.summary import Summarized


@dataclass(frozen=True, slots=True)
class WrittenVersion(Summarized):
    """A version that was written to `output`, from checkpoint `base` to `new`, or would be.

    `is_new` is false if the newest version was this one already, and nothing was written.
    `changed_bytes` of the model's `whole_nbytes` differ, in `tensors` tensors; `nbytes` are those of the delta.
    """

    base: Path
    new: Path
    output: Path
    version: int
    encoding: str
    checksum: str
    tensors: int
    changed_bytes: int
    nbytes: int
    whole_nbytes: int
    files: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    is_new: bool = True

    @property
    def share(self) -> float:
        """Return the bytes of the delta as a fraction of those of the model."""
        return self.nbytes / self.whole_nbytes if self.whole_nbytes else 0.0

    def summary(self) -> Iterator[str]:
        verb = "wrote" if self.is_new else "was there already:"
        yield f"{verb} {self.output}: what changed from {self.base} to {self.new}"
        density = per_cent(self.changed_bytes / self.whole_nbytes) if self.whole_nbytes else "none"
        yield f"{density} of the bytes changed, in {count(self.tensors, 'tensor')}; {self.encoding}, {self.checksum}"
        yield f"{format_bytes(self.nbytes)}, {per_cent(self.share)} of the model's {format_bytes(self.whole_nbytes)}"


def delta_version(
    base: Source,
    new: Source,
    root: str | Path,
    *,
    encoding: str = XOR,
    version: int | None = None,
    dtype: str | Sequence[str] = (),
    force: bool = False,
    sync: bool = True,
    progress: Progress | None = None,
) -> WrittenVersion:
    """Write the changes from checkpoint `base` to `new` to `root` as the next version, such as `weight_v000007`.

    This is the format that the engines of slime and miles pull: `encoding` is "xor" or "overwrite", and zstd compresses
    each tensor. `version` is the number of the first version, by default 1; later versions count on from the newest
    one. Raises `Mismatch` if `base` is not the state after the newest version. For everything else see `delta`.
    """
    began = time.perf_counter()
    if encoding not in (XOR, OVERWRITE):
        raise Usage(f"--encoding: expected {XOR} or {OVERWRITE}, found `{encoding}`")
    place = to_local(root)
    number, algorithm, digests = next_version(place, version)
    new_digest(algorithm)
    output = place / disk_delta.name_of(number)
    sides = both_consolidated(base, new, (dtype,) if isinstance(dtype, str) else tuple(dtype), output)
    for side in sides:
        require_separate_destination(side.checkpoint, output, side.draft.writer)
    told = telling(progress, 2 * sides[0].layout.nbytes)
    terms = VersionTerms(number, encoding, algorithm, digests)
    made = write_staged(Stage(output, sync=sync), sides, terms, told, force=force)
    return replace(made, seconds=time.perf_counter() - began)


def write_staged(
    stage: Stage,
    sides: tuple[ConsolidatedView, ConsolidatedView],
    terms: VersionTerms,
    told: Told | None,
    *,
    force: bool,
) -> WrittenVersion:
    """Write a version on a stage, unless an earlier call wrote it already. It appears whole or not at all."""
    origins = [Origin.of(side.path) for side in sides]
    before, after = (side.layout for side in sides)
    try:
        stage.open()
        make_folder(stage.work)
        with (stage.work / "changes").open("w+b") as spool:
            encoded = encode(before, after, terms, spool, told)
            made = describe(sides, stage.dst, terms, encoded)
            if is_written_by(encoded, terms, made.base):
                stage.discard()
                older = stage.dst.with_name(disk_delta.name_of(terms.version - 1))
                return replace(made, output=older, version=terms.version - 1, is_new=False)
            if not force:
                require_small(made)
            changed = {name: tensor for name, tensor in encoded.items() if tensor.changed}
            files = write_version(stage.path, changed, terms, spool)
        for origin in origins:
            origin.check()
        sizes = {name: file_size(stage.path / name) for name in files}
        stage.commit()
    except BaseException:
        stage.discard()
        raise
    return replace(made, files=sizes)


def describe(
    sides: tuple[ConsolidatedView, ConsolidatedView],
    output: Path,
    terms: VersionTerms,
    encoded: Mapping[str, EncodedTensor],
) -> WrittenVersion:
    """Return what would be written."""
    changed = [tensor for tensor in encoded.values() if tensor.changed]
    return WrittenVersion(
        base=sides[0].path,
        new=sides[1].path,
        output=output,
        version=terms.version,
        encoding=terms.encoding,
        checksum=terms.algorithm,
        tensors=len(changed),
        changed_bytes=sum(tensor.changed for tensor in changed),
        nbytes=sum(tensor.length for tensor in changed),
        whole_nbytes=sides[0].layout.nbytes,
    )


def require_small(made: WrittenVersion) -> None:
    """Raise `Unsupported` for a delta that is not much smaller than the model."""
    if made.share > LARGEST:
        message = f"the delta would have {format_bytes(made.nbytes)}, {per_cent(made.share)} of the model"
        raise Unsupported(message, path=made.output, hint="copy the checkpoint instead, or pass --force")


def is_written_by(encoded: Mapping[str, EncodedTensor], terms: VersionTerms, base: Path) -> bool:
    """Return whether the newest version is NEW: an earlier call wrote it. Raises `Mismatch` for another base."""
    try:
        return is_written(encoded, terms)
    except Mismatch as error:
        raise error.blame(path=base) from None


def next_version(root: Path, asked: int | None) -> tuple[int, str, dict[str, str]]:
    """Return the number of the next version in a directory, the algorithm of its digests, and digests of its base.

    The digests are of the tensors that versions since the last whole one have changed.
    """
    versions = disk_delta.versions_in(root) if root.is_dir() else {}
    newest = max(versions, default=None)
    number = (asked or 1) if newest is None else newest + 1
    if asked not in (None, number):
        message = f"--version: expected {number}, which follows the newest version, found {asked}"
        raise Mismatch(message, path=root, hint="drop --version, or use another directory")
    digests: dict[str, str] = {}
    algorithm: str | None = None
    for path in reversed(versions.values()):
        if not is_byte_delta(path):
            break
        for name, tensor in disk_delta.open_version(path).tensors.items():
            algorithm = algorithm or tensor.algorithm
            if tensor.algorithm == algorithm:
                digests.setdefault(name, tensor.digest)
    return number, algorithm or best_algorithm(), digests
