"""List the entries of torch.save's files with the CRC-32 of each. Reads no tensor data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptkit.errors import CkptError, Report
from ckptkit.formats.archives.state_files import entries_of, opened
from ckptkit.layout import Extent, Layout


def extents_of(layout: Layout, paths: Iterable[str], report: Report) -> Iterator[Extent]:
    """Yield every entry of the files at `paths` in the layout's directory: storages, pickles and what lies beside.

    An entry is said to be of the tensor that begins where it does. Reports each file that cannot be read.
    """
    places = {(chunk.path, chunk.offset): name for name, t in layout.tensors.items() for chunk in t.chunks}
    for path in sorted(set(paths)):
        try:
            with opened(layout.root / path) as (read, length):
                for entry in entries_of(read, length).values():
                    name = places.get((path, entry.offset), "")
                    yield Extent(path, entry.offset, entry.length, entry.crc32 or None, name)
        except CkptError as error:
            report(error.blame(path=layout.root / path))
