"""Inspects: what a checkpoint is, from its metadata alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ckptkit.formats import locate, open_layout
from ckptkit.layout import Layout
from ckptkit.runs import find_checkpoint, step_of


@dataclass(frozen=True, slots=True)
class Inspected:
    """A checkpoint at a glance. `step` and `world_size` are None where nothing tells them."""

    layout: Layout
    step: int | None

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of the tensors of each dtype, most first."""
        found: Counter[str] = Counter()
        for tensor in self.layout.tensors.values():
            found[tensor.spec.dtype.name] += tensor.spec.nbytes
        return dict(found.most_common())

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Entries and bytes under each first step of the recorded key paths: model, optimizer and so on."""
        entries: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for name, tensor in self.layout.tensors.items():
            entries[self._group(name)] += 1
            nbytes[self._group(name)] += tensor.spec.nbytes
        for name, blob in self.layout.blobs.items():
            entries[self._group(name)] += 1
            nbytes[self._group(name)] += blob.length
        return {group: (entries[group], nbytes[group]) for group in entries}

    def _group(self, name: str) -> str:
        key = self.layout.key(name)
        return str(key[0]) if len(key) > 1 else ""


def inspect(path: str | Path, *, with_places: bool = False) -> Inspected:
    """Look at the checkpoint at `path`, or the latest of the run at `path`. Reads no tensor data.

    With `with_places` each chunk's bytes are found inside its envelope, which costs two small reads a chunk.
    """
    source = find_checkpoint(Path(path))
    layout = open_layout(source)
    steps = (step_of(place) for place in (source.absolute(), source.absolute().parent))
    return Inspected(
        locate(layout) if with_places else layout, next((step for step in steps if step is not None), None)
    )
