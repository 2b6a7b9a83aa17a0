"""Peers: what else converts and loads these checkpoints, each called as its users call it. Judges nothing.

A peer raises where a program would print; here its error is told in one line, as ckptkit tells its own, so that what
counts is whether the line names the culprit. Run in a child of the server.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

_POISON = -777


@contextmanager
def told() -> Iterator[None]:
    """An exception inside the block ends the process with one `error:` line; torch's log of it is not wanted too."""
    logging.disable()
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        line = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stderr.write(f"error: {line}\n")
        raise SystemExit(3) from None


def to_torch_save(src: str, out: str) -> None:
    """torch: a DCP directory as a file."""
    with told():
        dcp_to_torch_save(src, out)


def to_dcp(src: str, out: str) -> None:
    """torch: a file as a DCP directory."""
    with told():
        torch_save_to_dcp(str(Path(src, "state.pt")), out)


def merge(src: str, out: str) -> None:
    """accelerate: a DCP directory as a Hugging Face model."""
    with told():
        merge_fsdp_weights(src, out)


def consolidate(src: str, out: str) -> None:
    """torch: the safetensors shards of ranks as whole ones."""
    from tests.faults.originals import weights

    with told():
        Path(out).mkdir()
        consolidate_safetensors_files(src, out, dict.fromkeys(weights(), 1))


def load(src: str, out: str) -> None:
    """torch: `dcp.load` into the state dict of a model, which is then saved to be looked at."""
    with told():
        state = {"model": _poisoned()}
        dcp.load(state, checkpoint_id=src, no_dist=True)
        torch.save(state, out)


def load_safetensors(src: str, out: str) -> None:
    """torch: the same from safetensors."""
    with told():
        state = _poisoned()
        dcp.load(state, storage_reader=HuggingFaceStorageReader(src), no_dist=True)
        torch.save({"model": state}, out)


def load_pt(src: str, out: str) -> None:
    """torch: `torch.load` of a file."""
    with told():
        torch.save(torch.load(Path(src, "state.pt")), out)


def _poisoned() -> dict[str, Tensor]:
    from tests.faults.originals import weights

    return {name: torch.full_like(value, _POISON) for name, value in weights().items()}
