"""Find files of another save, which are undamaged and differ from the manifest."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ckptkit.engine.whole_files import compare_archives
from ckptkit.errors import ignore
from ckptkit.files.path import RemotePath
from ckptkit.formats import locate
from ckptkit.formats.archives.locate import ENVELOPE
from ckptkit.layout import Chunk, Layout, StoredTensor


def require_one_save(layout: Layout, found: Iterable[Layout] = ()) -> None:
    """Compare each file of archives with the CRC-32 in its manifest. Reads the ends of the archives, and no tensors.

    The chunks of the layouts in `found` have been found in their archives already. An archive that is damaged is not
    compared here: what a conversion reads of it is compared with its own CRC-32.

    Raises `Corrupt` for a file that another save, or another rank, wrote.
    """
    archives = {
        name: tensor
        for name, tensor in layout.tensors.items()
        if any(chunk.wrapper == ENVELOPE and chunk.path in layout.file_sums for chunk in tensor.chunks)
    }
    if not archives or isinstance(layout.root, RemotePath):
        return
    known = Known(layout, found)
    tensors = {name: known.put_into(tensor) for name, tensor in archives.items()}
    compare_archives(locate(replace(layout, tensors=tensors, blobs={}), ignore))


class Known:
    """The chunks of other layouts that lie in the files of a layout, each found in its archive."""

    def __init__(self, layout: Layout, found: Iterable[Layout]) -> None:
        places: dict[str, dict[int, Chunk]] = defaultdict(dict)
        for one in found:
            for _, chunk in one.stored if one.root == layout.root else ():
                if isinstance(chunk, Chunk) and chunk.where is None:
                    places[chunk.path][chunk.bytes[0]] = chunk
        self._places = {path: sorted(chunks.items()) for path, chunks in places.items()}

    def put_into(self, tensor: StoredTensor) -> StoredTensor:
        """Return a tensor with those of its chunks that are known in the place of their archives."""
        return replace(tensor, chunks=tuple(self._inside(chunk) or chunk for chunk in tensor.chunks))

    def _inside(self, archive: Chunk) -> Chunk | None:
        places = self._places.get(archive.path, [])
        at = bisect_left(places, (archive.offset,))
        if at == len(places):
            return None
        offset, chunk = places[at]
        return chunk if offset < archive.offset + archive.length else None
