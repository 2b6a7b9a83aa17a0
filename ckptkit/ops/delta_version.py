"""Write what changed between two checkpoints as the next version of a policy, for engines that pull versions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.conversion.directories import check_apart
from ckptkit.deltas import disk_delta
from ckptkit.deltas.byte_delta import OVERWRITE, XOR
from ckptkit.deltas.digests import best_algorithm, new_digest
from ckptkit.deltas.write_version import VersionTerms, encode, write_version
from ckptkit.destinations.allocation import make_folder
from ckptkit.destinations.staging import Stage
from ckptkit.errors import Mismatch, Unsupported, Usage
from ckptkit.files.file import file_size
from ckptkit.files.origin import Origin
from ckptkit.files.path import to_local
from ckptkit.ops.as_consolidated import both_consolidated
from ckptkit.pictures.numbers import format_bytes, per_cent
from ckptkit.pictures.words import count
from ckptkit.progress import Progress, telling
from ckptkit.summary import Summarized

_LARGEST = 0.6  # of the model, unless it is forced


@dataclass(frozen=True, slots=True)
class WrittenVersion(Summarized):
    """A version that was written to `output`, from checkpoint `base` to `new`, or would be.

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

    @property
    def share(self) -> float:
        """Return the bytes of the delta as a fraction of those of the model."""
        return self.nbytes / self.whole_nbytes if self.whole_nbytes else 0.0

    def summary(self) -> Iterator[str]:
        yield f"wrote {self.output}: what changed from {self.base} to {self.new}"
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
    """Write what changed from checkpoint `base` to `new` into `root` as the next version, such as `weight_v000007`.

    That is the format of slime and miles, which their engines pull: `xor` or `overwrite` in `encoding`, each tensor
    compressed with zstd. `version` is the number of the first, if not 1; after that it is one more than the newest
    there. Raises `Mismatch` if `base` is not what the newest version makes; for all else see `delta`.
    """
    began = time.perf_counter()
    if encoding not in (XOR, OVERWRITE):
        raise Usage(f"--encoding: expected {XOR} or {OVERWRITE}, found `{encoding}`")
    place = to_local(root)
    number, algorithm, digests = next_version(place, version)
    output = place / disk_delta.name_of(number)
    one, two = both_consolidated(base, new, (dtype,) if isinstance(dtype, str) else tuple(dtype), output)
    for side in (one, two):
        check_apart(side.checkpoint, output, side.draft.writer)
    new_digest(algorithm)
    terms = VersionTerms(number, encoding, algorithm, digests)
    origins = [Origin.of(side.path) for side in (one, two)]
    stage = Stage(output, sync=sync)
    try:
        stage.open()
        make_folder(stage.work)
        with (stage.work / "changes").open("w+b") as spool:
            found = encode(one.layout, two.layout, terms, spool, telling(progress, 2 * one.layout.nbytes))
            nbytes = sum(tensor.length for tensor in found.values())
            if nbytes > _LARGEST * one.layout.nbytes and not force:
                share = per_cent(nbytes / one.layout.nbytes)
                message = f"the delta would have {format_bytes(nbytes)}, {share} of the model"
                raise Unsupported(message, path=output, hint="copy the checkpoint instead, or pass --force")
            files = write_version(stage.path, found, terms, spool)
        for origin in origins:
            origin.check()
        sizes = {name: file_size(stage.path / name) for name in files}
        stage.commit()
    except BaseException:
        stage.discard()
        raise
    return WrittenVersion(
        base=one.path,
        new=two.path,
        output=output,
        version=number,
        encoding=encoding,
        checksum=algorithm,
        tensors=len(found),
        changed_bytes=sum(tensor.changed for tensor in found.values()),
        nbytes=nbytes,
        whole_nbytes=one.layout.nbytes,
        files=sizes,
        seconds=time.perf_counter() - began,
    )


def next_version(root: Path, asked: int | None) -> tuple[int, str, dict[str, str]]:
    """Return the number of the next version in a directory, the algorithm of its digests, and digests of its base.

    The digests are of the tensors that versions since the last whole one have changed.
    """
    versions = disk_delta.versions_in(root) if root.is_dir() else {}
    newest = max(versions, default=None)
    number = (asked or 1) if newest is None else newest + 1
    if asked not in (None, number):
        message = f"--version: expected {number}, which follows the newest version, found {asked}"
        raise Mismatch(message, path=root, hint="leave --version out, or use another directory")
    digests: dict[str, str] = {}
    algorithm: str | None = None
    for path in reversed(versions.values()):
        if not disk_delta.is_byte_delta(path):
            break
        for name, tensor in disk_delta.open_version(path).tensors.items():
            algorithm = algorithm or tensor.algorithm
            if tensor.algorithm == algorithm:
                digests.setdefault(name, tensor.digest)
    return number, algorithm or best_algorithm(), digests
