"""Pack token ids into sequences of equal length, in one global order. Each rank takes a share of every batch.

Documents are concatenated and cut every `length` tokens. Documents in one sequence are independent: positions count
from 0 in each, attention is limited to the document, and no loss predicts the first token of the next document. The
model must accept positions for this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ckptkit.training.data.tokens import TokenFile
from ckptkit.training.seeds import derive_seed

IGNORED = -100  # a target without a loss: the default `ignore_index` of cross_entropy


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and the next token ids (targets), both int64 [sequences, length]; a target may be `IGNORED`.

    `positions`, int64 [sequences, length], count from 0 in each document; None if each sequence has one document.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None

    @property
    def loss_token_count(self) -> int:
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on `device`; a copy to a GPU is asynchronous."""
        positions = None if self.positions is None else to_device(self.positions, device)
        return Batch(to_device(self.inputs, device), to_device(self.targets, device), positions)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`, copied to a GPU asynchronously through pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Token ids, [n] with n > 1, cut into sequences of `length`, in an order that is shuffled in each epoch.

    In an epoch every token after the first of a document is a target once: the last token of a sequence predicts the
    first token of the next sequence. The id `end` ends a document.
    """

    ids: NDArray[np.integer]
    end: int
    length: int
    seed: int
    checksum: int = 0

    @property
    def sequences_per_epoch(self) -> int:
        return (len(self.ids) - 2) // self.length + 1

    def batch_at(self, indices: range) -> Batch:
        """Return the sequences at these indices of the endless global order, which is the same on every rank.

        An empty range gives one sequence without targets: a rank without data must still run the forward pass, because
        the other ranks gather weights together with it.
        """
        windows = np.full((max(1, len(indices)), self.length + 1), self.end, dtype=np.int64)
        sizes = np.zeros((len(windows), 1), dtype=np.int64)
        for row, index in enumerate(indices):
            epoch, index_in_epoch = divmod(index, self.sequences_per_epoch)
            start = int(epoch_order(self.sequences_per_epoch, self.seed, epoch)[index_in_epoch]) * self.length
            ids = self.ids[start : start + self.length + 1]
            windows[row, : len(ids)] = ids
            sizes[row] = len(ids)
        inputs, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        columns = np.arange(self.length)
        targets[(inputs == self.end) | (columns >= sizes - 1)] = IGNORED
        begins = columns == sizes  # the padding of a short sequence counts as one more document
        begins[:, 1:] |= (inputs[:, :-1] == self.end) & (columns[1:] < sizes)
        positions = None
        if begins[:, 1:].any():
            starts = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
            positions = torch.from_numpy(columns - starts)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), positions)


@lru_cache(maxsize=2)
def epoch_order(sequence_count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the sequences in an epoch: a permutation, int64 [count]."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(sequence_count, generator=generator)


def indices_of_rank(indices: range, rank: int, world_size: int) -> range:
    """Return the share of a rank. Shares are disjoint, cover all indices, and differ in size by at most one."""
    count = len(indices)
    return indices[count * rank // world_size : count * (rank + 1) // world_size]


def open_corpus(tokens: TokenFile, *, length: int, seed: int) -> Corpus:
    return Corpus(tokens.mmap_ids(), tokens.end, length, seed, tokens.checksum)
