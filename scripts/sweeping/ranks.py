"""Be the ranks of `scripts/sweep`: save a small model as DCP, consolidate it, and compare it with `save_pretrained`."""

from __future__ import annotations

import re
import shutil
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ckptkit import consolidate
from ckptkit.errors import CkptError
from scripts.sweeping.result import BROKEN, DIFFERENT, EQUAL, FAILED, NOT_BUILT, REFUSED, Result
from scripts.sweeping.shrink import NoClass, TooLarge, make_small

MOST = 120_000_000  # elements of a model
PATIENCE = timedelta(hours=6)  # of ranks that wait for the first one's next model
KINDS = {TooLarge: "too large", NoClass: "transformers has no model class for the type"}
_LIBRARY = re.compile(r"requires the (\w+) library")  # what transformers says if one is missing

Tensors = dict[str, Tensor]


def serve(rank: int, ranks: int, home: Path, asked: Connection | None) -> None:
    """Be a rank until the process is ended. The first one is `asked` for types; the others save with it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    meeting = f"file://{home}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (ranks,))
    while True:
        if asked:
            asked.send(attempt(asked.recv(), home / "work", mesh))
        else:
            save_sharded(None, home / "work", mesh)


def attempt(model_type: str, work: Path, mesh: DeviceMesh) -> Result:
    """Return what came of a type. Leaves nothing behind in `work`."""
    work.mkdir()
    try:
        try:
            model = make_small(model_type, MOST)
        except Exception as error:  # noqa: BLE001 - transformers' own model code may raise anything
            return Result(NOT_BUILT, reason_of(error))
        try:
            model.save_pretrained(work / "theirs")
        except Exception as error:  # noqa: BLE001 - as above
            return Result(NOT_BUILT, f"{BROKEN}: `save_pretrained` fails: {said(error)}")
        save_sharded(model, work, mesh)
        return judge(work)
    except Exception as error:  # noqa: BLE001 - whatever it is belongs to this type
        return Result(FAILED, said(error))
    finally:
        shutil.rmtree(work)


def reason_of(error: Exception) -> str:
    """Return why a type was not tried: a kind of reasons, and after a colon what an error says."""
    if isinstance(error, ImportError) and (library := _LIBRARY.search(str(error))):
        return f"without {library[1]}: {said(error)}"
    kind = next((kind for one, kind in KINDS.items() if isinstance(error, one)), BROKEN)
    return f"{kind}: {said(error)}"


def said(error: Exception) -> str:
    """Return the class of an error and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}".removesuffix(": ")


def save_sharded(model: PreTrainedModel | None, work: Path, mesh: DeviceMesh) -> None:
    """Save a model that the first rank has, as all ranks do that hold a part of each tensor."""
    told: list[Any] = [None if model is None else model.state_dict()]
    dist.broadcast_object_list(told)
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) if tensor.ndim else tensor
        for name, tensor in told[0].items()
    }
    dcp.save({"model": state}, checkpoint_id=work / "run" / "step-1")


def judge(work: Path) -> Result:
    """Consolidate the run with the config.json of transformers' own directory, and compare the two."""
    shutil.copy(work / "theirs" / "config.json", work / "run" / "config.json")
    try:
        consolidate(work / "run", work / "ours")
    except CkptError as error:
        return Result(REFUSED, str(error).replace(str(work), "").splitlines()[0])
    difference = first_difference(tensors_of(work / "ours"), tensors_of(work / "theirs"))
    return Result(DIFFERENT, difference) if difference else Result(EQUAL)


def tensors_of(directory: Path) -> Tensors:
    """Return all tensors of a Hugging Face model."""
    return {name: one for path in directory.glob("*.safetensors") for name, one in load_file(path).items()}


def first_difference(ours: Tensors, theirs: Tensors) -> str:
    """Return in words the first difference of two models, by name; nothing if there is none."""
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            where = "ckptkit's" if name in ours else "transformers'"
            number = len(ours.keys() ^ theirs.keys())
            found = f"`{name}` is only in {where} output"
            return f"{found}; names in only one output: {number}, names in transformers' output: {len(theirs)}"
        found, expected = (f"{one.dtype} {list(one.shape)}" for one in (ours[name], theirs[name]))
        if found != expected:
            return f"`{name}`: expected {expected}, found {found}"
        if not torch.equal(bits(ours[name]), bits(theirs[name])):
            return f"`{name}`: other bytes"
    return ""


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
