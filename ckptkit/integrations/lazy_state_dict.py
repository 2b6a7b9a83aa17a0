"""The weights of a checkpoint as a state dict of slices, as `safetensors.safe_open` gives them to loaders of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.errors import CkptError
from ckptkit.formats.safetensors_headers import SPELLINGS
from ckptkit.layout.views import Index
from ckptkit.storage.hub_model import HubModel
from ckptkit.storage.open import LazyTensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """A tensor that is read when it is indexed, and no more of it; `[...]` reads all of it and compares its CRC-32."""

    tensor: LazyTensor
    owner: LazyStateDict

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors spells it, such as BF16."""
        return SPELLINGS[self.tensor.dtype]

    @property
    def shape(self) -> torch.Size:
        import torch

        return torch.Size(self.tensor.shape)

    @cached_property
    def dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.tensor.dtype)
        return found

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Read the part of the tensor that integers, slices without a step, and an ellipsis choose."""
        try:
            return self.tensor[index].torch()
        except CkptError as error:
            self.owner.error = self.owner.error or error  # loaders may report another one
            raise


class LazyStateDict(Mapping[str, TensorSlice]):
    """The weights of a model under the Hub's names. `error` is the first one that a slice met."""

    def __init__(self, model: HubModel) -> None:
        self.model = model
        self.error: CkptError | None = None

    def __getitem__(self, name: str) -> TensorSlice:
        return TensorSlice(self.model.tensors[name], self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.model.tensors)

    def __len__(self) -> int:
        return len(self.model.tensors)


def lazy_state_dict(source: Source, *, base: str | Path | None = None) -> LazyStateDict:
    """Return the weights of the model in a checkpoint, or in the latest of a run, under the names of the Hub.

    A read-only mapping. Its values have `get_shape`, `get_dtype`, `dtype` and `shape`, and indexing reads a part as a
    tensor on the CPU. They are what `consolidate` would write: names and layout of the Hub, tied weights once, an
    adapter merged into `base`. `base` names the model that has config.json, if the checkpoint does not have it.
    """
    return LazyStateDict(HubModel.open(source, base=base))
