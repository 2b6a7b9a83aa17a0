"""Read the deltas that a trainer publishes with a `manifest.json` each, in directories such as `delta-00000007`.

Source: SkyRL's `delta_checkpoint.py`. Each tensor that changed is a zstd frame, in a safetensors file, of the bytes
before XOR those after.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.deltas.byte_delta import XOR, ByteChange, ByteDelta
from ckptkit.deltas.digests import SHA256, XXH3
from ckptkit.errors import CkptError, Corrupt
from ckptkit.files.file import check_name, names_in, read_small
from ckptkit.formats.change_marks import LIMIT, MANIFEST
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.safetensors_headers import read_header
from ckptkit.layout import Chunk

FORMAT = "skyrl"
_VERSION = re.compile(r"delta-([0-9]{8,})")


def deltas_in(root: Path) -> dict[int, Path]:
    """Return the directories of deltas in a directory by their numbers, in order."""
    found = {int(match[1]): root / name for name in names_in(root) if (match := _VERSION.fullmatch(name))}
    return dict(sorted(found.items()))


def open_manifest_delta(path: Path) -> ByteDelta:
    """Open the delta at `path`. Raises `Corrupt` for files that do not fit the manifest."""
    manifest = path / MANIFEST
    value = parse_json(read_small(manifest, LIMIT), manifest)
    chunks: dict[str, dict[str, Chunk]] = {}
    tensors: dict[str, ByteChange] = {}
    try:
        for entry in value["tensors"]:
            name, file, key = str(entry["name"]), str(entry["payload_file"]), str(entry["payload_key"])
            check_name(file, path)
            if file not in chunks:
                chunks[file] = read_header(path / file)
            digest = str(entry["checksum"] if "checksum" in entry else entry[SHA256])
            algorithm = str(entry.get("checksum_algorithm", XXH3 if "checksum" in entry else SHA256))
            if key not in chunks[file]:
                raise Corrupt(f"expected `{key}` in `{file}`", path=path, tensor=name)
            tensors[name] = ByteChange(chunks[file][key], algorithm, digest, int(entry["uncompressed_num_bytes"]))
        return ByteDelta(path, FORMAT, int(value["version"]), int(value["base_version"]), XOR, tensors)
    except CkptError as error:
        raise error.blame(path=manifest) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"expected a manifest of a delta ({error!r})", path=manifest) from error
