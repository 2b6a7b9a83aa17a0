"""Read the weights of the model that a training began with, on first use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, NotACheckpoint, Unsupported, Usage
from ckptkit.io.path import to_model_path
from ckptkit.layout import Layout


@dataclass(frozen=True, eq=False)
class BaseWeights:
    """The weights of a base: a directory, a URL or a Hub id. Calling it returns their names, None without weights.

    The first use opens the base. A base that cannot be reached counts as a base without weights, because the Hub's
    cache may contain only the config.
    """

    base: str

    @property
    def layout(self) -> Layout | None:
        """Return the weights under their names in the base; None without weights."""
        return self._found if isinstance(self._found, Layout) else None

    @property
    def problem(self) -> CkptError | None:
        """Return why existing weights cannot be read, for example Git LFS pointers or an unknown format; else None."""
        return self._found if isinstance(self._found, CkptError) else None

    @cached_property
    def _found(self) -> Layout | CkptError | None:
        try:
            return self.open().weights.layout
        except (Corrupt, Mismatch, Unsupported) as error:
            return error
        except (IOFailure, NotACheckpoint, Usage):
            return None

    def open(self) -> Checkpoint:
        """Return the base as a checkpoint. Raises a `CkptError` if it has no readable weights."""
        return Checkpoint.open(to_model_path(self.base))

    def __call__(self) -> frozenset[str] | None:
        return None if self.layout is None else frozenset(self.layout.tensors)
