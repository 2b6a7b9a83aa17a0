"""Read the directories that DeepSpeed saves: the states of models and optimizers in a file of torch.save for each rank.

Source: deepspeed/runtime/engine.py. The pickles say which tensors make up the ranks' flat buffers; every parameter is
given as the ranges of these files that it lies in. Nothing of DeepSpeed's is imported, and no tensor is read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Report, Unsupported, refuse
from ckptkit.formats.archives.state_files import entries_of, extents_of, is_torch_save, opened
from ckptkit.formats.protocols import FormatReader
from ckptkit.io.file import names_in
from ckptkit.layout import Extent, Layout
from ckptkit.plugins.deepspeed.assemble import NAME, assemble, names_of
from ckptkit.plugins.deepspeed.expert_states import read_optimizers
from ckptkit.plugins.deepspeed.experts import read_experts
from ckptkit.plugins.deepspeed.names import DeepSpeedFiles, is_ours, is_part_alone, rank_and_part, rank_of
from ckptkit.plugins.deepspeed.parts import read_part


class DeepSpeed(FormatReader):
    """The format of DeepSpeed: a directory with a file of each rank, or a file of one rank, which is refused."""

    name = NAME
    known_by = "DeepSpeed's `*_model_states.pt`"
    is_sharded = True
    resized_as = "universal"

    def owns(self, name: str) -> bool:
        """Return True for the names that DeepSpeed gives."""
        return is_ours(name)

    def rank_of(self, name: str) -> int | None:
        return rank_of(name)

    def ranks_in(self, names: Iterable[str]) -> set[Hashable]:
        """Return the ranks with files: of a pipeline each stage has its own of data parallelism."""
        return set(filter(None, map(rank_and_part, names)))

    def is_bound(self, path: Path) -> bool:
        """Return True if there are parts of an optimizer, of which each rank reads its own."""
        return any("zero_pp_rank_" in name for name in names_in(path))

    def detect(self, path: Path) -> bool:
        """Return True for a directory with a file of DeepSpeed's, or a file that is of no use without others."""
        if path.is_dir():
            return any(map(is_ours, names_in(path)))
        return is_part_alone(path.name) and is_torch_save(path)

    def check_names(self, path: Path, report: Report) -> None:
        """Report each file that is missing or breaks off."""
        files = files_at(path)
        for name in sorted(names_of(files)):
            try:
                with opened(path / name) as (read, length):
                    entries_of(read, length)
            except CkptError as error:
                report(error.blame(path=path / name))
        for part in files.parts:
            found = read_part(path, files, part)
            if read_experts(path, files, found.models[0]) is not None and not found.partitions:
                read_optimizers(path, files)

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout of a directory: under `model` the fp32 masters, and what was never partitioned.

        The optimizer lies under `optimizer`, by name; the 16-bit copies of the masters are `twins`. What was in files
        that are missing or cannot be read, which are reported, has unreadable chunks.
        """
        return assemble(path, files_at(path), report)

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return every entry of every file."""
        return extents_of(layout, layout.descriptions, report)


def files_at(path: Path) -> DeepSpeedFiles:
    """Return the files at `path`. Raises `Unsupported` for a file of one rank, and for what cannot be put together."""
    if not path.is_dir():
        hint = f"pass the directory {path.parent}"
        message = (
            "this is the file of one rank: it has a part of most tensors; the other parts are in the files beside it"
        )
        raise Unsupported(message, path=path, hint=hint)
    files = DeepSpeedFiles.of(names_in(path), path)
    if files.is_offloaded:
        raise Unsupported("offloaded tensors are in files of DeepSpeed's swapper", path=path)
    if not (files.models or files.optimizers):
        raise Corrupt("there are files of layers or experts, but no `mp_rank_*_model_states.pt`", path=path)
    return files
