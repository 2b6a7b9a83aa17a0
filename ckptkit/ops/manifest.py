"""Manifests: what a conversion wrote, from what, with a checksum for each tensor; `ckptkit.json` beside the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit import __version__
from ckptkit.layout import Layout

NAME = "ckptkit.json"


def make_manifest(source: Layout | None, files: Mapping[str, int], checksums: Mapping[str, int]) -> bytes:
    """The manifest: where the tensors came from, bytes per file, CRC-32 (of the row-major bytes) per tensor.

    `source` is None for tensors that were saved by those who had them in memory.
    """
    manifest: dict[str, Any] = {
        "ckptkit": __version__,
        "source": source and {"path": str(Path(source.root).absolute()), "format": source.format},
        "files": {name: {"nbytes": nbytes} for name, nbytes in sorted(files.items())},
        "tensors": {name: {"crc32": f"{crc:08x}"} for name, crc in sorted(checksums.items())},
    }
    return (json.dumps(manifest, indent=1) + "\n").encode()
