"""Find files of another save, which are undamaged and differ from the manifest."""

from __future__ import annotations

from dataclasses import replace

from ckptkit.engine.whole_files import compare_archives
from ckptkit.errors import ignore
from ckptkit.formats import locate
from ckptkit.formats.archives.locate import ENVELOPE
from ckptkit.io.path import is_remote
from ckptkit.layout import Layout


def require_one_save(layout: Layout) -> None:
    """Compare each file of archives with the CRC-32 in its manifest. Reads the ends of the archives, and no tensors.

    An archive that is damaged is not compared here: what a conversion reads of it is compared with its own CRC-32.

    Raises `Corrupt` for a file that another save, or another rank, wrote.
    """
    archives = {
        name: tensor
        for name, tensor in layout.tensors.items()
        if any(chunk.wrapper == ENVELOPE and chunk.path in layout.file_sums for chunk in tensor.chunks)
    }
    if not archives or is_remote(layout.root):
        return
    compare_archives(locate(replace(layout, tensors=archives, blobs={}), ignore))
