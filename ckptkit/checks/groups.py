"""Sum up how much of a checkpoint is the model, how much the optimizer and how much the rest. By names only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptkit.layout import Layout
from ckptkit.models.names.weights import OF_ONE


@dataclass(frozen=True, slots=True)
class Group:
    """The entries of one kind: how many, their bytes, those of tensors by dtype, and the keys that they lie under."""

    entries: int
    nbytes: int
    bytes_by_dtype: Mapping[str, int]
    under: tuple[str, ...]


def group(parts: Iterable[Layout], weights: Mapping[str, str]) -> dict[str, Group]:
    """Return the entries of all parts by kind, the model's, the optimizer's and the rest, but for kinds without any.

    `weights` are those of the first part that are the model's.
    """
    found: dict[str, list[tuple[Layout, list[str]]]] = {"model": [], "optimizer": [], "rest": []}
    for i, part in enumerate(parts):
        ours = set(weights.values()) if i == 0 else set()
        names: dict[str, list[str]] = {kind: [] for kind in found}
        for name in part.names:
            names["model" if name in ours else "optimizer" if is_optimizer(part, name) else "rest"].append(name)
        for kind, chosen in names.items():
            if chosen:
                found[kind].append((part, chosen))
    return {kind: sum_up(parts) for kind, parts in found.items() if parts}


def is_optimizer(layout: Layout, name: str) -> bool:
    """Return True for an entry of an optimizer, by the way to it or by the directory that it lies in."""
    return layout.root.name.startswith("optim") or any(str(step).startswith("optim") for step in layout.key(name)[:3])


def sum_up(parts: Iterable[tuple[Layout, list[str]]]) -> Group:
    """Sum up entries of several parts as one group."""
    entries, nbytes = 0, 0
    dtypes: Counter[str] = Counter()
    under: dict[str, None] = {}
    for layout, names in parts:
        entries += len(names)
        dtypes.update(bytes_by_dtype(layout, names))
        nbytes += sum(layout.blobs[name].length for name in names if name in layout.blobs)
        under |= {
            str(key[0]).partition(OF_ONE)[0]: None
            for name in names
            if len(key := layout.key(name)) > 1 or name in layout.blobs
        }
    return Group(entries, nbytes + sum(dtypes.values()), dict(dtypes.most_common()), tuple(under))


def bytes_by_dtype(layout: Layout, names: Iterable[str]) -> dict[str, int]:
    """Return bytes of the tensors of each dtype, most first."""
    found: Counter[str] = Counter()
    for name in names:
        if name in layout.tensors:
            spec = layout.tensors[name].spec
            found[spec.dtype.name] += spec.nbytes
    return dict(found.most_common())
