"""Read entries that are no tensors (step, learning rate, the state of a loader) safely, for torch to read once more.

torch's planner unpickles what it is given without any restriction. So it never gets the bytes of the checkpoint, but
what torch wrote again of the values that its restricted unpickler found in them.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.files.file import opening, read_at
from ckptkit.formats.archives.write_archive import make_envelope
from ckptkit.formats.archives.zip_entries import check_contents
from ckptkit.layout import Blob, Layout


def read_value(layout: Layout, name: str) -> BytesIO:
    """Return an entry's value as torch.save writes it.

    Raises `Unsupported` for more than `torch.load(weights_only=True)` admits and `io.BytesIO`, `Corrupt` where a
    checksum differs.
    """
    blob = layout.blobs[name]
    path = layout.root / blob.path
    written = BytesIO()
    try:
        torch.save(load_safely(find_archive(blob, path)), written)
    except CkptError as error:
        raise error.blame(path=path, tensor=name) from None
    written.seek(0)
    return written


def find_archive(blob: Blob, path: Path) -> bytes:
    """Return the archive of torch.save that a blob is, its checksums compared, or that is made of its pickle."""
    if blob.wrapper is not None:
        raise Unsupported(f"stored through the transform `{blob.wrapper}`", hint="save it again without `_extensions`")
    if blob.content is not None:
        ((_, archive),) = make_envelope(blob.content, {}).parts
        return archive
    with opening(path) as file:
        data = read_at(file, blob.length, blob.offset)
    check_contents(data)
    return data


def load_safely(data: bytes) -> Any:
    """Return the value in an archive, if it is made of plain values, bytes, containers and tensors."""
    try:
        with safe_globals([BytesIO]):  # which runs no code; it is what a module's `get_extra_state` may give
            return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unsupported(
            "the entry holds more than plain values: torch would run code of the checkpoint's to load it",
            hint="if you trust its producer, name the class to `torch.serialization.add_safe_globals`",
        ) from error
    except (RuntimeError, EOFError) as error:
        raise Corrupt(f"torch cannot load the entry: {str(error).splitlines()[0]}") from error
