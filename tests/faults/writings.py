"""Writings: the commands and functions that make an output, of ckptkit and of others, as faults come to them.

Knows how each is called; neither faults nor verdicts.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter, filesystem
from torch.distributed.checkpoint.api import CheckpointException

from ckptkit.cli.output import print_error
from ckptkit.errors import CkptError
from ckptkit.storage import Writer, find_cause
from ckptkit.training.saving.run import Run
from tests.verbs import FORMAT_MODULES, modules_of

_HERE = "tests.faults.writings"
# what a server imports so that its children need not
MODULES = (
    _HERE,
    *modules_of("consolidate", "reshard", "convert", "finalize", "apply", "verify"),
    "ckptkit.plugins.deltas.apply_in_place",
    *FORMAT_MODULES,
    *("torch._dynamo", "fsspec.core", "accelerate.utils"),
    "torch.distributed.checkpoint._consolidate_hf_safetensors",
)


@dataclass(frozen=True, slots=True)
class Writing:
    """Something that makes an output at `{out}`, in the otherwise empty directory `{place}`, of the source at `{src}`.

    `target` and `words` are for `Server.run`; with `over` words it replaces an output that is there, and with `after`
    it is called when its output is there already. `{step}` is 1 for the old output, 2 for the new one.
    """

    subject: str
    target: str
    words: tuple[str, ...]
    over: tuple[str, ...] = ("--overwrite",)
    after: tuple[str, ...] = ("--overwrite",)
    is_ours: bool = True
    source: str = "dcp"


COMMANDS = (
    Writing("ckptkit consolidate", "ckptkit", ("consolidate", "{src}", "{out}", "--names", "keep", "--jobs", "1")),
    Writing("ckptkit reshard", "ckptkit", ("reshard", "{src}", "{out}", "--to", "2", "--jobs", "1")),
    Writing("ckptkit convert", "ckptkit", ("convert", "{src}", "{out}.pt", "--to", "pt", "--jobs", "1")),
)
OWN_FORMATS = (  # that are written in a way of their own
    Writing(
        *("ckptkit reshard, ranks", "ckptkit"),
        ("reshard", "{src}", "{out}", "--to", "3", "--jobs", "1"),
        source="ranks",
    ),
    Writing(
        *("ckptkit convert, universal", "ckptkit"),
        ("convert", "{src}", "{out}", "--to", "universal", "--jobs", "1"),
        source="zero2",
    ),
)
SAVES = (
    Writing("ckptkit train", f"{_HERE}:save_run", ("{place}", "sharded", "{step}"), over=(), after=("3",)),
    Writing("ckptkit train, full", f"{_HERE}:save_run", ("{place}", "full", "{step}"), over=(), after=("3",)),
    Writing("ckptkit train, hf", f"{_HERE}:save_run", ("{place}", "hf", "{step}"), over=(), after=("3",)),
    Writing("ckptkit Writer", f"{_HERE}:save_through_writer", ("{out}", "{step}"), over=("over",), after=("over",)),
)
PEERS = (
    Writing("torch dcp_to_torch_save", f"{_HERE}:dcp_to_torch_save", ("{src}", "{out}"), (), (), is_ours=False),
    Writing(
        "torch consolidate_safetensors", f"{_HERE}:consolidate", ("{src}", "{out}"), (), (), is_ours=False, source="hf"
    ),
    Writing("accelerate merge-weights", f"{_HERE}:merge", ("{src}", "{out}"), (), (), is_ours=False),
)


def make_state(seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a small model; one of them is written in several blocks."""
    torch.manual_seed(seed)
    return {
        "embed.weight": torch.randn(300, 64),
        "up.weight": torch.randn(7, 64).bfloat16(),
        "mask": torch.tensor([True, False, True]),
        "scale": torch.tensor(float(seed)),
        "nothing": torch.empty(0, 3),
    }


def make_sources(root: Path, seed: int) -> None:
    """Write the sources of all writings into directory `root`: `dcp`, and `hf`."""
    warnings.simplefilter("ignore")  # that there is no process group
    state = make_state(seed)
    dcp.save({"model": state}, storage_writer=FileSystemWriter(root / "dcp", thread_count=2), no_dist=True)
    (root / "dcp" / "config.json").write_text(json.dumps({"model_type": "odd", "seed": seed}))
    (root / "dcp" / "tokenizer.json").write_text(json.dumps({"version": seed}))
    (root / "hf").mkdir()
    floats = {name: tensor for name, tensor in state.items() if tensor.dim() and tensor.dtype.is_floating_point}
    dcp.save(floats, storage_writer=HuggingFaceStorageWriter(str(root / "hf"), save_distributed=True), no_dist=True)


def make(root: str, seed: str) -> None:
    """`make_sources` by strings."""
    make_sources(Path(root), int(seed))


def saying(save: Callable[[], Any]) -> None:
    """Save, and say what went wrong as the command line says it."""
    warnings.simplefilter("ignore")
    try:
        save()
    except CkptError as error:
        print_error(error, as_json=False)
        sys.exit(error.exit_code)
    except CheckpointException as error:
        cause = find_cause(error)
        if not isinstance(cause, CkptError):
            raise
        print_error(cause, as_json=False)
        sys.exit(cause.exit_code)


def save_run(run: str, form: str, *steps: str) -> None:
    """Save the last of `steps` to a run that keeps one checkpoint."""
    step = int(steps[-1])
    filesystem._generate_uuid = lambda: f"save {step}"  # bits can be compared so
    torch.manual_seed(step)
    model = nn.Linear(8, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    files = {"config.json": b"{}"}
    saying(lambda: Run(run, state_dict=form, keep_last=1, files=files).save(step, model, optimizer, rest={"a": step}))


def save_through_writer(out: str, step: str, over: str = "") -> None:
    """Save through torch with ckptkit's writer."""
    writer = Writer(out, files={"config.json": b"{}"}, overwrite=bool(over))
    saying(lambda: dcp.save(make_state(int(step)), storage_writer=writer, no_dist=True))


def dcp_to_torch_save(src: str, out: str) -> None:
    """Torch's own."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert

    convert(src, out)


def consolidate(src: str, out: str) -> None:
    """Torch's own."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    Path(out).mkdir(exist_ok=True)
    consolidate_safetensors_files(src, out, {"embed.weight": 1, "up.weight": 2})


def merge(src: str, out: str) -> None:
    """Accelerate's."""
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(src, out)
