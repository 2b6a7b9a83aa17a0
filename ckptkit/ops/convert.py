"""Converts: the pipeline that every command which writes a checkpoint is a preset of.

locate -> arrange -> stage -> plan -> execute -> manifest -> commit
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import Unsafe
from ckptkit.execute import Copied, execute
from ckptkit.formats import Writer, locate
from ckptkit.layout import Layout, NewFile, Options
from ckptkit.ops.manifest import NAME as MANIFEST
from ckptkit.ops.manifest import make_manifest
from ckptkit.plan import Plan, make_plan
from ckptkit.staging import check_room, create_file, staging

Progress = Callable[[int, int], None]  # (bytes just written, bytes in all)


@dataclass(frozen=True, slots=True)
class Output:
    """Where and how to write."""

    path: Path
    max_shard_size: int
    overwrite: bool = False
    sync: bool = True
    jobs: int | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversion thought through: the source with every byte found, and the files to be made of it."""

    source: Layout
    writer: Writer
    files: tuple[NewFile, ...]
    companions: Mapping[str, bytes]

    @property
    def file_sizes(self) -> dict[str, int]:
        """Bytes by file name, companions included."""
        sizes = {file.name: file.nbytes for file in self.files}
        return sizes | {name: len(content) for name, content in self.companions.items()}


def make_draft(src: Path, wanted: Layout, writer: Writer, output: Output, companions: Mapping[str, bytes]) -> Draft:
    """Find every byte of `wanted`, which is of the checkpoint `src`, and arrange the files.

    Nothing is written, so this is all of a dry run.
    """
    check_apart(src, output.path)
    files = writer.arrange(wanted, Options(output.max_shard_size))
    return Draft(locate(wanted), writer, files, companions)


def write(draft: Draft, output: Output) -> Copied:
    """Make the draft's files and fill them. The destination appears whole or not at all."""
    check_room(output.path, sum(draft.file_sizes.values()))
    with staging(output.path, overwrite=output.overwrite, sync=output.sync) as room:
        for file in draft.files:
            create_file(room / file.name, file.nbytes, file.parts)
        copies = make_plan(draft.source, draft.writer.read(room))
        total = copies.nbytes
        tell = output.progress
        copied = execute(copies, jobs=output.jobs, progress=tell and (lambda nbytes: tell(nbytes, total)))
        manifest = make_manifest(draft.source, draft.file_sizes, tensor_checksums(copies, copied))
        for name, content in {**draft.companions, MANIFEST: manifest}.items():
            create_file(room / name, len(content), [(0, content)])
    return copied


def tensor_checksums(plan: Plan, copied: Copied) -> dict[str, int]:
    """CRC-32 by name, of the tensors that lie in one chunk; an empty tensor has that of no bytes."""
    found: dict[str, int] = {}
    for name, tensor in plan.dst.tensors.items():
        if len(tensor.chunks) == 1:
            chunk = tensor.chunks[0]
            found[name] = copied.checksums.get((chunk.path, chunk.offset), 0) if chunk.length else 0
    return found


def check_apart(src: Path, dst: Path) -> None:
    """Raise `Unsafe` if the source lies in the destination or is it: replacing it would destroy what is being read."""
    source, target = src.resolve(), dst.resolve()
    if source == target or target in source.parents:
        raise Unsafe("the source is the destination, or lies inside it", path=dst, hint="choose another destination")
    if source in target.parents:
        raise Unsafe("the destination lies inside the source", path=dst, hint="choose another destination")


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
