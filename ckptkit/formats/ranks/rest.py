"""Join the rest of the ranks' files: common entries once, and each rank's own entries by rank."""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.errors import Corrupt
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.shards.rank_tensor import RankFile
from ckptkit.layout import StoredTensor

_OWN = ("rng",)  # what is each rank's own also where all have the same


def join_rest(files: Sequence[RankFile], taken: Sequence[str]) -> FlatState:
    """Return what is in the files: entries of a key under it, or under the ranks below it if they are not all the same.

    The keys that are `taken` are those of model and optimizer.
    """
    joined = FlatState()
    for top in dict.fromkeys(key[0] for file in files for key in file.flat.keys.values()):
        if top in taken:
            raise Corrupt(
                f"an entry is called `{top}`, which is the name of the contents of other files", path=files[0].name
            )
        shared = top not in _OWN and all(seen(file, top) == seen(files[0], top) for file in files)
        for file in files[:1] if shared else files:
            add(joined, file, top, () if shared else (f"rank_{file.rank}",))
    return joined


def seen(file: RankFile, top: str | int) -> list[tuple[object, ...]]:
    """Return what can be compared of a rank's entries below a key: values, and the checksums of tensors."""
    found: list[tuple[object, ...]] = []
    for name, key in file.flat.keys.items():
        if key[0] == top and name in file.flat.blobs:
            found.append((name, file.flat.blobs[name].content))
        elif key[0] == top:
            tensor = file.flat.tensors[name]
            found.append((name, tensor.spec, *(chunk.crc32 for chunk in tensor.chunks)))
    return found


def add(joined: FlatState, file: RankFile, top: str | int, rank: tuple[str, ...]) -> None:
    """Add a rank's entries below a key, under its rank if one is given."""
    for old, key in file.flat.keys.items():
        if key[0] != top:
            continue
        new = (top, *rank, *key[1:])
        name = ".".join(map(str, new))
        joined.keys[name] = new
        if old in file.flat.blobs:
            joined.blobs[name] = file.flat.blobs[old]
        else:
            tensor = file.flat.tensors[old]
            joined.tensors[name] = StoredTensor(tensor.spec, tensor.chunks)
