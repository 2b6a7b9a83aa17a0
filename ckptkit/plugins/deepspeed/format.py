"""Read the directories that DeepSpeed saves: one torch.save file of model and optimizer states per rank.

Source: deepspeed/runtime/engine.py. The pickles list the tensors in the flat buffers of the ranks, and each parameter
becomes a set of byte ranges in these files.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

from ckptkit.errors import Corrupt, Report, Unsupported, raise_problem
from ckptkit.formats.archives.state_files import archive_extents_of, check_files, is_torch_save
from ckptkit.formats.protocols import FormatReader
from ckptkit.io.file import names_in
from ckptkit.layout import Extent, Layout
from ckptkit.plugins.deepspeed.assemble import NAME, read_directory_layout, source_file_names
from ckptkit.plugins.deepspeed.expert_states import read_optimizers
from ckptkit.plugins.deepspeed.experts import find_expert_files
from ckptkit.plugins.deepspeed.names import (
    OFFLOADED,
    DeepSpeedFiles,
    find_rank_and_part,
    is_deepspeed_file,
    is_useless_alone,
)
from ckptkit.plugins.deepspeed.partitions import read_model_part


class DeepSpeed(FormatReader):
    """The DeepSpeed format: a directory with files of every rank. The file of a single rank is refused."""

    name = NAME
    known_by = "DeepSpeed's `*_model_states.pt`"
    is_sharded = True
    resized_as = "universal"

    def owns_file(self, name: str) -> bool:
        return is_deepspeed_file(name)

    def rank_of(self, name: str) -> int | None:
        rank = find_rank_and_part(name)
        return rank[1] if rank else None

    def ranks_in(self, names: Iterable[str]) -> set[Hashable]:
        """Return the (part, data-parallel rank) pairs that have files; each pipeline stage has its own ranks."""
        return set(filter(None, map(find_rank_and_part, names)))

    def is_bound_to_world_size(self, path: Path) -> bool:
        """Return True if there are optimizer partitions: a rank can only read its own partition."""
        return any("zero_pp_rank_" in name for name in names_in(path))

    def detect(self, path: Path) -> bool:
        """Return True for a directory with DeepSpeed files, or for a file that cannot be read without other files."""
        if path.is_dir():
            return any(map(is_deepspeed_file, names_in(path)))
        return is_useless_alone(path.name) and is_torch_save(path)

    def check_files_complete(self, path: Path, report: Report) -> None:
        files = files_at(path)
        check_files(path, sorted(source_file_names(files)), report)
        for part in files.parts:
            states = read_model_part(path, files, part)
            if find_expert_files(path, files, states.models[0]) is not None and not states.partitions:
                read_optimizers(path, files)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout of a directory.

        `model` has the fp32 master weights and all tensors that ZeRO did not partition; `optimizer` has the states by
        name. Low-precision copies of the master weights are in `twins`. Files that are missing or unreadable are
        reported, and their tensors get unreadable chunks.
        """
        return read_directory_layout(path, files_at(path), report)

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        return archive_extents_of(layout, layout.descriptions, report)


def files_at(path: Path) -> DeepSpeedFiles:
    """Return the files at `path`.

    Raises `Unsupported` for the file of a single rank, and for runs with offloaded tensors.
    """
    if not path.is_dir():
        message = "this is the file of one rank: it has a part of most tensors; the other parts are in files beside it"
        raise Unsupported(message, path=path, hint=f"pass the directory {path.parent}")
    names = names_in(path)
    if OFFLOADED in names:
        raise Unsupported("offloaded tensors are in files of DeepSpeed's swapper", path=path)
    files = DeepSpeedFiles.of(names, path)
    if not (files.models or files.optimizers):
        raise Corrupt("there are files of layers or experts, but no `mp_rank_*_model_states.pt`", path=path)
    return files
