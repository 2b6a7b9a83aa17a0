"""Read Meta's `consolidated.NN.pth`: a file of torch.save for each tensor-parallel rank, as one model.

Source: meta-llama/llama-models, models/llama3/generation.py. Each file holds a plain dict with the same names; the rank
is in the file's name. Names stay Meta's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Report, Unsupported, refuse
from ckptkit.files.file import names_in
from ckptkit.formats.consolidated.rules import PARAMS, join, read_params
from ckptkit.formats.protocols import Reader
from ckptkit.formats.torchfile.extents import extents_of
from ckptkit.formats.torchfile.flatten import Flat, flatten
from ckptkit.formats.torchfile.state_files import entries_of, is_torch_save, opened, read_state_file
from ckptkit.layout import Extent, Layout

_RANK = re.compile(r"consolidated\.([0-9]{2})\.pth")


class Consolidated(Reader):
    """The format of Meta's releases, which is only read."""

    name = "consolidated"
    known_by = "Meta's `consolidated.00.pth`"
    is_sharded = True

    def owns(self, name: str) -> bool:
        """Return True for a rank's file."""
        return bool(_RANK.fullmatch(name))

    def rank_of(self, name: str) -> int | None:
        """Return the rank in the name of a file."""
        match = _RANK.fullmatch(name)
        return int(match[1]) if match else None

    def detect(self, path: Path) -> bool:
        """Return True for a rank's file, or a directory with one."""
        files = [path / name for name in names_in(path) if self.owns(name)] if path.is_dir() else [path]
        return any(self.owns(file.name) and is_torch_save(file) for file in files)

    def check_names(self, path: Path, report: Report) -> None:
        """Report each file that breaks off; raise if a rank's is missing."""
        root, files = find_files(path)
        for name in files:
            try:
                with opened(root / name) as (read, length):
                    entries_of(read, length)
            except CkptError as error:
                report(error.blame(path=root / name))

    def read(self, path: Path, report: Report = refuse) -> Layout:  # noqa: ARG002 - what does not fit is one error
        """Return the layout of the whole model.

        Raises `Corrupt` if a rank is missing or the ranks do not make up the model of params.json, `Unsupported` for a
        tensor of which no rule says how it is split.
        """
        root, files = find_files(path)
        ranks = [read_rank(root, name) for name in files]
        for name, rank in zip(files, ranks, strict=True):
            missing = ranks[0].tensors.keys() ^ rank.tensors.keys()
            if missing:
                raise Corrupt(f"not in both this and `{files[0]}`", path=root / name, tensor=min(missing))
        params = read_params(root)
        try:
            tensors = {name: join(name, [rank.tensors[name] for rank in ranks], params) for name in ranks[0].tensors}
        except CkptError as error:
            raise error.blame(path=root) from None
        described = (*files, PARAMS) if params else tuple(files)
        return Layout(root, self.name, tensors, ranks[0].blobs, ranks[0].keys, len(files), described)

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return every entry of the files: storages, pickles and what torch puts beside them."""
        return extents_of(layout, filter(self.owns, layout.descriptions), report)


def read_rank(root: Path, name: str) -> Flat:
    """Return what is in a rank's file."""
    state = read_state_file(root, name)
    try:
        return flatten(state.value, state.entries, name)
    except CkptError as error:
        raise error.blame(path=root / name) from None


def find_files(path: Path) -> tuple[Path, list[str]]:
    """Return the directory of a model, and the names of all ranks' files, in order; of a file those beside it.

    Raises `Corrupt` if one before the last is missing, `Unsupported` for one file of several.
    """
    root = path if path.is_dir() else path.parent
    found = {int(match[1]): name for name in names_in(root) if (match := _RANK.fullmatch(name))}
    missing = [f"consolidated.{rank:02d}.pth" for rank in range(max(found)) if rank not in found]
    if missing:
        hint = "a download that did not end? every rank has a part of every tensor"
        raise Corrupt(
            f"{len(missing)} of {1 + max(found)} files are missing: {', '.join(missing)}", path=root, hint=hint
        )
    if path != root and len(found) > 1:
        message = f"this is one of {len(found)} ranks' files, of which each has a part of every tensor"
        raise Unsupported(message, path=path, hint=f"name the directory {root}")
    return root, [found[rank] for rank in sorted(found)]
