"""Read and write torch.save files: a nested dict of tensors in one file.

FULL_STATE_DICT and plain training scripts save this format. Source: torch/serialization.py. A pickle nests dicts and
lists down to tensors. Each tensor is a view of a storage that is uncompressed in the same file: an archive, or the
format before torch 1.6. The pickle is read and written inertly: imports and calls are only names, so any name may
occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ckptkit.errors import Report, Unsupported, errors_at, raise_problem
from ckptkit.formats.archives.flatten import flatten, unflatten
from ckptkit.formats.archives.torch_save import (
    HEAD,
    archive_extents_of,
    checksum_offsets_in,
    entry_locations_in_file,
    is_torch_save,
    read_state_file,
)
from ckptkit.formats.archives.write_archive import Storages, make_zip_template
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatWriter
from ckptkit.formats.rank_names import names_differing_in_rank, not_joined_error
from ckptkit.io.file import is_existing_path, names_in
from ckptkit.io.remote_file import iterate_with_prefetch
from ckptkit.layout import Extent, FileOffset, Layout, NewFile, Patch, WriterOptions

MAIN = "state.pt"
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_NAMES = (*_SUFFIXES, ".tar")  # many scripts call files of torch.save `.pth.tar`
# files that trainers write beside the model
_BESIDE = re.compile(
    r"(optim|distrib_optim|(lr_)?scheduler|scaler|sampler|rng_state|random_states|training_args|dl_state_dict|meta\."
    r"|(latest_)?train_state|(trainer|fully_async)_state\.pt$|(common|data|rng)\.pt$|global_dataset_state_dict"
    r"|(adapter_megatron|training_state)_rank)"
)


class Pt(FormatWriter):
    """The format of torch.save: read from a file or from the directory that contains it; written as `state.pt`.

    In a directory ckptkit reads `state.pt`, or else the only candidate: the names of optimizers, schedulers, samplers
    and random states are excluded.
    """

    name = "pt"
    known_by = "a file of torch.save"
    suffixes = _SUFFIXES
    ties = True

    def owns_file(self, name: str) -> bool:
        """Return True for the name that is always the model's."""
        return name == MAIN

    def detect(self, path: Path) -> bool:
        """Return True for a torch.save file of any name, or a directory with one under a usual name."""
        return bool(find_state_files(path))

    def check_files_complete(self, path: Path, report: Report) -> None:  # noqa: ARG002 - with one file there is one problem
        """Raise `Unsupported` if several files are candidates, `Corrupt` if the file is truncated.

        An archive is complete if it has its directory, which torch writes last; an old file if it has all its storages.
        """
        entry_locations_in_file(require_single_file(path))

    def read(self, path: Path, report: Report = raise_problem) -> Layout:  # noqa: ARG002 - with one file there is one problem
        """Return the layout of the file. A non-tensor entry becomes a blob with its own pickle."""
        file = require_single_file(path)
        state = read_state_file(file.parent, file.name)
        with errors_at(path=file):
            flat = flatten(state.value, state.entries, state.name)
        return Layout(file.parent, self.name, flat.tensors, flat.blobs, flat.keys)

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        return archive_extents_of(layout, layout.paths, report)

    def lay_out_files(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:  # noqa: ARG002
        """Return the one file, with room for the data of all tensors. Tensors with the same chunks share bytes."""
        storages = Storages(wanted)
        state = unflatten((*wanted.tensors, *wanted.blobs), wanted.key, storages.picklable_value_of)
        # without other entries, `patches_for_non_tensors` may add some
        envelope = make_zip_template(dump(state), storages.contents, is_ordered=bool(wanted.blobs))
        return (NewFile(MAIN, envelope.nbytes, envelope.parts),)

    def entries_file_name(self, rank: int) -> str:
        """Return the name of a temporary file: at the end the entries are in the pickle of `state.pt`."""
        return f"entries-{rank}"

    def patches_for_non_tensors(self, wanted: Layout, options: WriterOptions) -> Iterator[tuple[str, Patch]]:  # noqa: ARG002
        """Return a second pickle, and the archive's directory that lists it instead of the first."""
        storages = Storages(wanted)
        first = dump(unflatten(wanted.tensors, wanted.key, storages.picklable_value_of))
        state = unflatten((*wanted.tensors, *wanted.blobs), wanted.key, storages.picklable_value_of)
        yield MAIN, make_zip_template(dump(state), storages.contents, superseded_pickle=first).parts[-1]

    def checksum_offsets(self, written: Layout) -> Iterator[tuple[FileOffset, int]]:
        return checksum_offsets_in(written, [MAIN])


def find_state_files(path: Path) -> list[Path]:
    """Return `path` if it is a torch.save file; of a directory its `state.pt`, or else all candidates for the model."""
    if not path.is_dir():
        return [path] if is_torch_save(path) else []
    if is_existing_path(path / MAIN):  # whatever it is: the error then names it
        return [path / MAIN]
    names = sorted(name for name in names_in(path) if name.endswith(_NAMES) and not _BESIDE.match(name))
    ahead = iterate_with_prefetch(path, names, lambda name: [(name, 0, HEAD)])
    return [path / name for name in ahead if is_torch_save(path / name)]


def require_single_file(path: Path) -> Path:
    """Return the one file at `path`. Raises `Unsupported` if there are several."""
    files = find_state_files(path)
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files[:8])
    if len(ranks := names_differing_in_rank(files[0].name, [file.name for file in files]) if files else []) > 1:
        raise not_joined_error(ranks, path)
    hint = "pass the file that you want"
    raise Unsupported(f"expected one torch.save file, or `{MAIN}`, found {len(files)}: {names}", path=path, hint=hint)
