"""Pack token ids into sequences of one length. A sequence's place is global; ranks take shares of a batch.

Documents follow each other, and a sequence begins and ends where its length falls. Each document's part of a sequence
stands alone: positions count from 0 in it, attention sees nothing else, and no loss asks at its end for the next
document's first token. That takes a model that is told the positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ckptkit.training.data.tokens import TokenFile
from ckptkit.training.seeds import derive

IGNORED = -100  # a target that no loss counts: what cross_entropy skips by default


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and the ids that follow them, both int64 [sequences, length]; targets may be `IGNORED`.

    `positions`, int64 [sequences, length], count from 0 in each document; None if no sequence has parts of two.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Return the number of targets that count."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on `device`; to a GPU without waiting for it."""
        positions = None if self.positions is None else move(self.positions, device)
        return Batch(move(self.inputs, device), move(self.targets, device), positions)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`, by way of memory that the GPU reads itself."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Token ids, [n] with n > 1, cut into sequences of `length`, in an order that each epoch shuffles anew.

    An epoch asks once for every token that follows another in its document: the last token of a sequence predicts
    the first of the next. The id `end` ends a document.
    """

    ids: NDArray[np.integer]
    end: int
    length: int
    seed: int
    checksum: int = 0

    @property
    def sequences(self) -> int:
        """Return the number of sequences of one epoch; the last may be short, and is filled up."""
        return (len(self.ids) - 2) // self.length + 1

    def batch(self, places: range) -> Batch:
        """Return the sequences at `places` of the endless global order, the same ones on every rank.

        Of no places there is one sequence without a target: a rank without a share still takes part in the forward
        pass, for the others gather the weights with it.
        """
        windows = np.full((max(1, len(places)), self.length + 1), self.end, dtype=np.int64)
        sizes = np.zeros((len(windows), 1), dtype=np.int64)
        for row, place in enumerate(places):
            ids = self._window(place)
            windows[row, : len(ids)] = ids
            sizes[row] = len(ids)
        inputs, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        columns = np.arange(self.length)
        targets[(inputs == self.end) | (columns >= sizes - 1)] = IGNORED
        begins = columns == sizes  # what fills a short sequence up is like one more document
        begins[:, 1:] |= (inputs[:, :-1] == self.end) & (columns[1:] < sizes)
        positions = None
        if begins[:, 1:].any():
            starts = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
            positions = torch.from_numpy(columns - starts)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), positions)

    def _window(self, place: int) -> NDArray[np.integer]:
        epoch, index = divmod(place, self.sequences)
        start = int(epoch_order(self.sequences, self.seed, epoch)[index]) * self.length
        return self.ids[start : start + self.length + 1]


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order, int64 [count], in which an epoch visits its sequences."""
    generator = torch.Generator().manual_seed(derive("order", seed, epoch))
    return torch.randperm(count, generator=generator)


def share(places: range, rank: int, world_size: int) -> range:
    """Return the part of a batch that a rank takes: parts are disjoint, make up the whole, differ by one at most."""
    count = len(places)
    return places[count * rank // world_size : count * (rank + 1) // world_size]


def open_corpus(tokens: TokenFile, *, length: int, seed: int) -> Corpus:
    """Open the corpus of a token file in sequences of `length`."""
    return Corpus(tokens.open(), tokens.end, length, seed, tokens.checksum)
