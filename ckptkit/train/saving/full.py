"""Full: a state as one file of torch.save, gathered to rank 0 and given out by it. Chooses no place for it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptkit.errors import Corrupt, translate_os_errors
from ckptkit.files.system import close
from ckptkit.ops.verify import verify_part
from ckptkit.train.saving.gather import Gatherer, scatter
from ckptkit.train.saving.peers import Peers
from ckptkit.train.saving.sharded import unwrap
from ckptkit.train.saving.trees import Tree, outlined

FILE = "state.pt"


class FullForm:
    """States written whole by rank 0, and read by it for all."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._stored: Tree = {}  # on rank 0 from `outline` to `read`; its tensors are the file, mapped to memory

    def hold(self, state: Tree, *, copy: bool) -> Tree:  # noqa: ARG002 - what is gathered is a copy anyhow
        """The state as it will be written: whole tensors on the CPU of rank 0."""
        return Gatherer(self._peers).gather(state)

    def write(self, room: Path, held: Tree) -> None:
        """Write what `hold` gave, on rank 0; what goes wrong there is raised on all."""
        self._peers.on_first(lambda: write_file(room / FILE, held))

    def outline(self, path: Path) -> Tree:
        """The stored state without the data of its tensors."""
        return self._peers.on_first(lambda: self._open(path))

    def _open(self, path: Path) -> Tree:
        # a sharded checkpoint that was made into one file has its dicts wrapped still
        self._stored = {name: unwrap(part) for name, part in read_file(path / FILE).items()}
        outline: Tree = outlined(self._stored)
        return outline

    def read(self, path: Path, wanted: Tree) -> None:  # noqa: ARG002 - the file is open since `outline`
        """Read into `wanted`, which is all or some of the outline: each tensor is sent by rank 0, and cut by all."""
        self._fill(wanted, self._stored)
        self._stored = {}

    def _fill(self, wanted: Any, stored: Any) -> None:
        if isinstance(wanted, Tensor):
            whole = stored if self._peers.rank == 0 else torch.empty(wanted.shape, dtype=wanted.dtype)
            scatter(self._peers.broadcast(whole), wanted)
        elif isinstance(wanted, dict):
            for key, value in wanted.items():
                self._fill(value, stored[key] if self._peers.rank == 0 else None)
        elif isinstance(wanted, list):
            for index, value in enumerate(wanted):
                self._fill(value, stored[index] if self._peers.rank == 0 else None)


def write_file(path: Path, state: Tree) -> None:
    """Write a state by torch.save."""
    with translate_os_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with open(fd, "wb", closefd=False) as file:
                torch.save(state, file)
        except RuntimeError as error:  # torch's writer, which was interrupted by what the disk said
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        finally:
            close(fd)


def read_file(path: Path) -> Tree:
    """The state in a file of torch.save: its tensors stay on the disk until they are used, and no code of it runs.

    torch compares no checksums, so that is done before.
    """
    problem = next(iter(verify_part(path).problems), None)
    if problem is not None:
        raise problem
    with translate_os_errors(path):
        try:
            state: Tree = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise Corrupt(f"torch cannot load it: {str(error).splitlines()[0]}", path=path) from error
    return state
