"""Name the states of an optimizer that numbers flat parameters, and cut them as these are.

Source: fairscale/nn/data_parallel/fsdp_optim_utils.py and fairseq/trainer.py. Each rank saves its own `state_dict()`:
the number of a state is that of the flat parameter in the model's order, which is that of the descriptions, and each
moment has as many elements as the rank's piece of it, padding included. Without a match of all sizes, every rank's
optimizer is copied unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.formats.archives.flatten import FlatState, pairs_of
from ckptkit.formats.archives.values import numbers_of, with_value
from ckptkit.formats.fairscale.shards import FlatParameter, cut_flat
from ckptkit.formats.shards.rank_tensor import RankFile
from ckptkit.layout import OWN, Blob, KeyPath, StoredTensor
from ckptkit.layout.matching import is_counted_through, match_if_certain
from ckptkit.tensors.box import Shape

OPTIMIZER, STATE = "optimizer", "state"
_FLAT = "flat_param_"
_AT = 2  # where in a key path the number is: `("last_optimizer_state", "state", "0", "exp_avg")`

Described = Sequence[Mapping[str, FlatParameter]]  # of each rank, the flat parameters by name


def keys_of_optimizers(value: Any) -> list[str]:
    """Return the keys under which a rank's file has the state of an optimizer."""
    pairs = pairs_of(value) or ()
    return [str(key) for key, one in pairs if {STATE, "param_groups"} <= dict(pairs_of(one) or ()).keys()]


def join_optimizer(files: Sequence[RankFile], described: Described, above: str, names: Sequence[str]) -> FlatState:
    """Return the model's optimizer by name; or each rank's own as it is, if the order of its numbers is not certain.

    `above` is the key that the optimizer has, and that all names of flat parameters in the files begin with; `names`
    are the files of all ranks.
    """
    keys = [keys_of_optimizers(file.value) for file in files]
    joined = FlatState()
    if all(len(found) == 1 and found == keys[0] for found in keys) and is_certain(files, described, keys[0][0], above):
        add_named(joined, files, described, keys[0][0], names)
        return joined
    for file, found in zip(files, keys, strict=True):
        for name, key in file.flat.keys.items():
            if key[0] in found:
                add(joined, (OWN, f"rank_{file.rank}", *key), file.flat.tensors.get(name) or file.flat.blobs[name])
    return joined


def is_certain(files: Sequence[RankFile], described: Described, key: str, above: str) -> bool:
    """Return whether the numbers of all ranks' optimizers are those of the flat parameters, by their sizes."""
    flats = list(described[0])
    if not all(name.rpartition(".")[2].startswith(_FLAT) for name in flats):
        return False
    moments = [moments_of(file, key) for file in files]
    for file, found in zip(files, moments, strict=True):
        groups = numbers_of(dict(pairs_of(file.value) or ())[key])
        if groups is None or len(groups) != 1 or not is_counted_through(groups):
            return False
        if found.keys() != moments[0].keys() or {number for number, _ in found} != set(map(str, range(len(flats)))):
            return False
        values = [name for name in found.values() if name not in file.flat.tensors]
        if any(content_of(file, name) != content_of(files[0], name) for name in values):
            return False
        shapes = shapes_of(file, found)
        pieces = {flat: (file.tensors[f"{above}.{flat}"].spec.numel,) for flat in flats}
        if shapes is None or match_if_certain(groups, shapes, pieces) is None:
            return False
    return True


def shapes_of(file: RankFile, moments: Mapping[tuple[str, str], str]) -> dict[int, Shape] | None:
    """Return the shape of each number's moments in a rank's file, None if a number has moments of several shapes."""
    found: dict[int, Shape] = {}
    for (number, _), name in moments.items():
        held = file.flat.tensors.get(name)
        if held is not None and held.spec.shape and found.setdefault(int(number), held.spec.shape) != held.spec.shape:
            return None
    return found


def moments_of(file: RankFile, key: str) -> dict[tuple[str, str], str]:
    """Return the names of what a rank's optimizer has for each parameter, by number and moment."""
    keys = ((name, path) for name, path in file.flat.keys.items() if path[:_AT] == (key, STATE))
    return {(str(path[_AT]), ".".join(map(str, path[_AT + 1 :]))): name for name, path in keys if len(path) > _AT + 1}


def content_of(file: RankFile, name: str) -> bytes | None:
    """Return the pickle of an entry that is not a tensor, None for a tensor."""
    blob = file.flat.blobs.get(name)
    return blob.content if blob else None


def add_named(
    joined: FlatState, files: Sequence[RankFile], described: Described, key: str, names: Sequence[str]
) -> None:
    """Add an optimizer by the names of what is in the flat parameters."""
    first, flats = files[0], list(described[0])
    for (number, moment), name in moments_of(first, key).items():
        flat = flats[int(number)]
        held = first.flat.tensors.get(name)
        members = [member for member, _ in described[0][flat].members]
        if held is None or not held.spec.shape:  # a step, which is that of every member
            entry = held or first.flat.blobs[name]
            parts: list[tuple[str, StoredTensor | Blob]] = [(member, entry) for member in members]
        else:
            parts = list(cut_flat(name, [flats_of[flat] for flats_of in described], files, names))
        for member, part in parts:
            add(joined, (OPTIMIZER, STATE, member, moment), part)
    every = [member for flat in flats for member, _ in described[0][flat].members]
    for name, path in first.flat.keys.items():
        if path[0] == key and path[1] != STATE:
            entry = first.flat.tensors.get(name) or first.flat.blobs[name]
            if path[1] == "param_groups" and path[-1] == "params" and isinstance(entry, Blob):
                entry = with_value(entry, every)
            add(joined, (OPTIMIZER, *path[1:]), entry)


def add(joined: FlatState, key: KeyPath, entry: StoredTensor | Blob) -> None:
    """Add one entry by its key path."""
    name = ".".join(map(str, key))
    joined.keys[name] = key
    if isinstance(entry, Blob):
        joined.blobs[name] = entry
    else:
        joined.tensors[name] = StoredTensor(entry.spec, entry.chunks)
