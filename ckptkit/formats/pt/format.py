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

from ckptkit.errors import CkptError, Report, Unsupported, refuse
from ckptkit.formats.archives.flatten import flatten, unflatten
from ckptkit.formats.archives.state_files import (
    HEAD,
    entries_in,
    extents_of,
    is_torch_save,
    places_in,
    read_state_file,
)
from ckptkit.formats.archives.write_archive import Storages, make_envelope
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatWriter
from ckptkit.formats.rank_names import find_set, not_joined
from ckptkit.io.file import is_there, names_in
from ckptkit.io.ranges import read_ahead
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

    def owns(self, name: str) -> bool:
        """Return True for the name that is always the model's."""
        return name == MAIN

    def detect(self, path: Path) -> bool:
        """Return True for a torch.save file of any name, or a directory with one under a usual name."""
        return bool(find_state_file(path))

    def check_names(self, path: Path, report: Report) -> None:  # noqa: ARG002 - with one file there is one problem
        """Raise `Unsupported` if several files are candidates, `Corrupt` if the file is truncated.

        An archive is complete if it has its directory, which torch writes last; an old file if it has all its storages.
        """
        entries_in(choose_file(path))

    def read(self, path: Path, report: Report = refuse) -> Layout:  # noqa: ARG002 - with one file there is one problem
        """Return the layout of the file. A non-tensor entry becomes a blob with its own pickle."""
        file = choose_file(path)
        state = read_state_file(file.parent, file.name)
        try:
            flat = flatten(state.value, state.entries, state.name)
        except CkptError as error:
            raise error.blame(path=file) from None
        return Layout(file.parent, self.name, flat.tensors, flat.blobs, flat.keys)

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        return extents_of(layout, layout.paths, report)

    def arrange(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:  # noqa: ARG002
        """Return the one file, with room for the data of all tensors. Tensors with the same chunks share bytes."""
        storages = Storages(wanted)
        state = unflatten((*wanted.tensors, *wanted.blobs), wanted.key, storages.value)
        # without other entries, `embed` may add some
        envelope = make_envelope(dump(state), storages.contents, is_ordered=bool(wanted.blobs))
        return (NewFile(MAIN, envelope.nbytes, envelope.parts),)

    def entries_file(self, rank: int) -> str:
        """Return the name of a temporary file: at the end the entries are in the pickle of `state.pt`."""
        return f"entries-{rank}"

    def embed(self, wanted: Layout, options: WriterOptions) -> Iterator[tuple[str, Patch]]:  # noqa: ARG002
        """Return a second pickle, and the archive's directory that lists it instead of the first."""
        storages = Storages(wanted)
        first = dump(unflatten(wanted.tensors, wanted.key, storages.value))
        state = unflatten((*wanted.tensors, *wanted.blobs), wanted.key, storages.value)
        yield MAIN, make_envelope(dump(state), storages.contents, instead_of=first).parts[-1]

    def checksum_places(self, made: Layout) -> Iterator[tuple[FileOffset, int]]:
        return places_in(made, [MAIN])


def find_state_file(path: Path) -> list[Path]:
    """Return `path` if it is a torch.save file; of a directory its `state.pt`, or else all candidates for the model."""
    if not path.is_dir():
        return [path] if is_torch_save(path) else []
    if is_there(path / MAIN):  # whatever it is: the error then names it
        return [path / MAIN]
    names = sorted(name for name in names_in(path) if name.endswith(_NAMES) and not _BESIDE.match(name))
    ahead = read_ahead(path, names, lambda name: [(name, 0, HEAD)])
    return [path / name for name in ahead if is_torch_save(path / name)]


def choose_file(path: Path) -> Path:
    """Return the one file at `path`. Raises `Unsupported` if there are several."""
    files = find_state_file(path)
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files[:8])
    if len(ranks := find_set(files[0].name, [file.name for file in files]) if files else []) > 1:
        raise not_joined(ranks, path)
    hint = "pass the file that you want"
    raise Unsupported(f"expected one torch.save file, or `{MAIN}`, found {len(files)}: {names}", path=path, hint=hint)
