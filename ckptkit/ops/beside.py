"""Beside: the files of a checkpoint that hold none of its tensors, and go with it: schedulers, configs, tokenizers."""

from __future__ import annotations

import os
from pathlib import Path

from ckptkit.errors import translate_os_errors
from ckptkit.formats import get_format
from ckptkit.layout import Layout
from ckptkit.ops.manifest import NAME as MANIFEST
from ckptkit.staging import fail


def files_beside(root: Path, taken: frozenset[Path]) -> tuple[dict[str, Path], list[str]]:
    """Regular files anywhere in a checkpoint directory, by their names in it; and those that are none, which stay.

    What is in `taken`, files and directories, is not among them, nor are manifests, which are true of what they
    describe only. Nothing that begins with a dot is.
    """
    found: dict[str, Path] = {}
    left: list[str] = []
    with translate_os_errors(root):
        for directory, directories, names in os.walk(root, onerror=fail):
            here = Path(directory)
            links = [name for name in directories if (here / name).is_symlink()]
            directories[:] = sorted(name for name in directories if name[0] != "." and here / name not in taken)
            for name in sorted(names + links):
                path = here / name
                if path in taken or name == MANIFEST or name.startswith("."):
                    continue
                if path.is_symlink() or not path.is_file():
                    left.append(str(path.relative_to(root)))
                else:
                    found[str(path.relative_to(root))] = path
    return found, left


def own_files(layout: Layout) -> list[Path]:
    """The files that a part consists of, and others of its format: what an earlier save left there is not of it."""
    used = {chunk.path for tensor in layout.tensors.values() for chunk in tensor.chunks}
    used |= {blob.path for blob in layout.blobs.values()}
    reader = get_format(layout.format)
    return [file for file in layout.root.iterdir() if file.name in used or reader.owns(file.name)]
