"""What engines and trainers do with versions of a policy, restated from their rules with numpy alone.

The receiver of slime's and miles' `/pull_weights`, the publisher beside it, and the publisher of SkyRL. ckptkit is not
imported here.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    data = path.read_bytes()[:8]
    length = int.from_bytes(data, "little")
    return json.loads(path.read_bytes()[8 : 8 + length]), 8 + length


def locations(root: Path) -> dict[str, tuple[Path, int, int]]:
    """File, offset and bytes of each tensor, by the headers of all safetensors files."""
    found = {}
    for path in root.glob("*.safetensors"):
        header, start = header_of(path)
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (path, start + begin, end - begin)
    return found


def tensors_in(root: Path) -> dict[str, bytes]:
    return {n: path.read_bytes()[at : at + length] for n, (path, at, length) in locations(root).items()}


def adler(data: bytes) -> str:
    return f"{zlib.adler32(data):08x}"


def pull(local: Path, version_dir: Path) -> None:
    """Apply one version in place, as an engine does: it raises for another base version, and for other digests."""
    meta = json.loads((version_dir / "model.safetensors.index.json").read_text())["metadata"]
    state = local / ".weight_sync" / "state.json"
    applied = int(json.loads(state.read_text())["version"]) if state.exists() else 0
    assert applied == int(meta["base_version"]), f"out of order: {applied}"
    assert meta["compression_format"] == "zstd"
    assert meta["checksum_format"] == "adler32"
    here = locations(local)
    for path in sorted(version_dir.glob("*.safetensors")):
        header, start = header_of(path)
        digests = header.pop("__metadata__")
        data = path.read_bytes()
        for name, entry in header.items():
            assert entry["dtype"] == "U8"
            begin, end = entry["data_offsets"]
            assert entry["shape"] == [end - begin]
            frame = data[start + begin : start + end]
            file, offset, nbytes = here[name]
            region = np.memmap(file, np.uint8, "r+", offset, (nbytes,))
            if meta["delta_encoding"] == "xor":
                stream = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frame))
                at = 0
                while at < nbytes and (block := stream.read(min(2 << 20, nbytes - at))):
                    region[at : at + len(block)] ^= np.frombuffer(block, np.uint8)
                    at += len(block)
            else:
                delta = zstandard.ZstdDecompressor().decompress(frame)  # needs the size in the frame
                count = int.from_bytes(delta[:4], "little")
                positions = np.frombuffer(delta[4 : 4 + 4 * count], "<u4")
                region[positions] = np.frombuffer(delta[4 + 4 * count :], np.uint8)
            assert adler(region.tobytes()) == digests[name], name
            region.flush()
    state.parent.mkdir(exist_ok=True)
    state.write_text(json.dumps({"version": f"{int(meta['version']):06d}"}))


def safetensors_of(tensors: Mapping[str, bytes], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def differing(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, tuple[Bytes, Bytes]]:
    pairs = {n: (np.frombuffer(before[n], np.uint8), np.frombuffer(after[n], np.uint8)) for n in before}
    return {name: (old, new) for name, (old, new) in pairs.items() if (old != new).any()}


def publish(root: Path, version: int, before: Mapping[str, bytes], after: Mapping[str, bytes], encoding: str) -> Path:
    """Publish a version as slime's trainer does: a file for each of two ranks, and the index."""
    frames, digests = {}, {}
    for name, (old, new) in differing(before, after).items():
        mask = old != new
        positions = np.flatnonzero(mask).astype("<u4")
        parts = [np.array([positions.size], "<u4").view(np.uint8), positions.view(np.uint8), new[mask]]
        body = old ^ new if encoding == "xor" else np.concatenate(parts)
        frames[name] = zstandard.ZstdCompressor(level=1).compress(body.tobytes())
        digests[name] = adler(new.tobytes())
    place = root / f"weight_v{version:06d}"
    place.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    names = sorted(frames)
    for i, share in enumerate((names[::2], names[1::2])):
        file = f"model-{i:05d}-of-00002.safetensors"
        data = safetensors_of({n: frames[n] for n in share}, {n: digests[n] for n in share})
        (place / file).write_bytes(data)
        weight_map |= dict.fromkeys(share, file)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    index = {"metadata": metadata, "weight_map": weight_map}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


def publish_manifest(root: Path, version: int, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Path:
    """Publish a delta as SkyRL's trainer does, with digests of SHA-256, which it reads too."""
    import hashlib

    place = root / f"delta-{version:08d}"
    place.mkdir(parents=True)
    file = "delta-rank00000-file000000.safetensors"
    frames, records = {}, []
    for i, (name, (old, new)) in enumerate(differing(before, after).items()):
        frames[f"tensor_{i}"] = zstandard.ZstdCompressor(level=3).compress((old ^ new).tobytes())
        records.append(
            {
                "name": name,
                "dtype": "bfloat16",
                "shape": [],
                "uncompressed_num_bytes": len(new),
                "compressed_num_bytes": len(frames[f"tensor_{i}"]),
                "payload_file": file,
                "payload_key": f"tensor_{i}",
                "checksum": hashlib.sha256(new.tobytes()).hexdigest(),
                "checksum_algorithm": "sha256",
            }
        )
    (place / file).write_bytes(safetensors_of(frames, {}))
    manifest = {"version": version, "base_version": version - 1, "tensors": records, "payload_files": [file]}
    (place / "manifest.json").write_text(json.dumps(manifest))
    return place
