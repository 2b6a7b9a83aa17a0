"""Data: text as bytes, packed into sequences of one length. A sequence's place is global; ranks take shares of a batch.

Documents follow each other within a sequence with a NUL byte between them; attention may look across it.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ckptkit.errors import Usage, translate_os_errors
from ckptkit.train.model_config import END_OF_TEXT

IGNORED = -100  # a target that no loss counts: what cross_entropy skips by default
STDLIB_LIMIT = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and the ids that follow them, both int64 [sequences, length]; targets may be `IGNORED`."""

    inputs: Tensor
    targets: Tensor

    @property
    def tokens(self) -> int:
        """How many targets count."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return Batch(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text of bytes (uint8 [n]) cut into sequences of `length`, in an order that each epoch shuffles anew."""

    text: Tensor
    length: int
    seed: int

    @property
    def sequences(self) -> int:
        """How many sequences one epoch has; the last may be short, and is filled with `IGNORED` targets."""
        return (len(self.text) - 2) // self.length + 1

    def batch(self, places: range) -> Batch:
        """The sequences at `places` of the endless global order: the same ones whoever asks."""
        windows = [self._window(place) for place in places]
        return Batch(torch.stack([inputs for inputs, _ in windows]), torch.stack([targets for _, targets in windows]))

    def _window(self, place: int) -> tuple[Tensor, Tensor]:
        epoch, index = divmod(place, self.sequences)
        start = int(epoch_order(self.sequences, self.seed, epoch)[index]) * self.length
        window = self.text[start : start + self.length + 1].long()
        inputs = torch.full((self.length,), END_OF_TEXT)
        targets = torch.full((self.length,), IGNORED)
        inputs[: len(window) - 1] = window[:-1]
        targets[: len(window) - 1] = window[1:]
        return inputs, targets


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order, int64 [count], in which an epoch visits its sequences."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


def share(places: range, rank: int, world_size: int) -> range:
    """The part of a batch that a rank takes: the parts are disjoint, make up the whole, and differ by one at most."""
    count = len(places)
    return places[count * rank // world_size : count * (rank + 1) // world_size]


def read_text(path: Path | None) -> Tensor:
    """The bytes of a file, or of the Python standard library's sources, which every machine has; uint8 [n], n > 1."""
    if path is None:
        text = stdlib_sources()
    else:
        with translate_os_errors(path):
            text = bytearray(path.read_bytes())
    if len(text) < 2:
        raise Usage("there is no text to train on: a next byte needs two", path=path, hint="give a file with --data")
    return torch.frombuffer(text, dtype=torch.uint8)


def stdlib_sources() -> bytearray:
    """The top-level modules of the standard library in the order of their names, each ended by a NUL, 4 MiB at most."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    with translate_os_errors(root):
        for path in sorted(root.glob("*.py")):
            if len(text) < STDLIB_LIMIT:
                text += path.read_bytes() + bytes([END_OF_TEXT])
    return text[:STDLIB_LIMIT]
