"""Writings to a store: the commands and saves that send a checkpoint to S3, of ckptkit and of torch.

Knows how each is called, and what reads its output; neither faults nor verdicts.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit.io import pieces
from ckptkit.storage import Writer
from ckptkit.training.saving.run import Run
from tests.faults.writings import saying
from tests.verbs import modules_of

_HERE = "tests.faults.store_writings"
MODULES = (  # what a server imports so that its children need not
    _HERE,
    *modules_of("cp", "consolidate", "convert", "reshard", "verify"),
    *("ckptkit.conversion.finalize", "ckptkit.state.to_store"),
    *(
        "ckptkit.io.stores.s3_destination",
        "ckptkit.io.stores.s3",
        "ckptkit.formats.dcp.format",
        "ckptkit.formats.hf",
    ),
    *("ckptkit.formats.pt", "s3fs", "aiobotocore.session", "tests.faults.peers", "torch._dynamo"),
)
PART = 1 << 20  # bytes of a part, so that a small checkpoint has some: the smallest that `pieces` makes
_THEIR_PART = 5 << 20  # the smallest of s3fs
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class StoreWriting:
    """Something that writes a checkpoint to the URL `{out}`, of the source at `{src}`, by a target of `Server.run`.

    With `over` words it replaces what is there; with `again` words it is called once more after a fault. `format` is of
    its output, `suffix` at the end of the URL. One that `resumes` sends only what is missing when it is called again.
    `{seed}` is 1 for the old output, 2 for the new one.
    """

    subject: str
    target: str
    words: tuple[str, ...]
    over: tuple[str, ...] = ("--overwrite",)
    again: tuple[str, ...] = ()
    format: str = "dcp"
    suffix: str = ""
    is_ours: bool = True
    resumes: bool = True


def _command(subject: str, *words: str, **more: Any) -> StoreWriting:
    return StoreWriting(subject, f"{_HERE}:run_command", (*words, "{src}", "{out}", "--jobs", "1"), **more)


COMMANDS = (
    _command("ckptkit cp", "cp"),
    _command("ckptkit consolidate", "consolidate", format="hf"),
    _command("ckptkit convert", "convert", "--to", "pt", format="pt", suffix=".pt"),
)
PARTS = StoreWriting("ckptkit reshard --part", f"{_HERE}:reshard_in_parts", ("{src}", "{out}"))
SAVES = (
    StoreWriting(
        *("ckptkit Writer", f"{_HERE}:save_on_ranks", ("{room}", "{seed}", "{out}")),
        over=("over",),
        again=("over",),
        resumes=False,
    ),
    StoreWriting("ckptkit Run", f"{_HERE}:save_run", ("{out}", "{seed}"), over=("over",), resumes=False),
)
PEERS = (
    StoreWriting(
        *("torch FsspecWriter", f"{_HERE}:save_by_torch", ("{out}", "{seed}")), over=(), is_ours=False, resumes=False
    ),
)


def make_state(seed: int) -> dict[str, Tensor]:
    """The weights of a Llama."""
    torch.manual_seed(seed)
    vocab, width = 4096, 64
    square = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    state = {"model.embed_tokens.weight": torch.randn(vocab, width)}
    state |= {f"model.layers.0.{name}.weight": torch.randn(width, width) for name in square}
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    state |= {f"model.{name}.weight": torch.randn(width) for name in norms}
    return state | {"lm_head.weight": torch.randn(vocab, width)}


def make_source(root: str, seed: str) -> None:
    """Write the source of the commands to directory `root`: a DCP checkpoint of a Llama, with its config."""
    warnings.simplefilter("ignore")  # that there is no process group
    dcp.save({"model": make_state(int(seed))}, storage_writer=FileSystemWriter(root), no_dist=True)
    Path(root, "config.json").write_text(json.dumps(LLAMA))


def begin(pid_file: str) -> None:
    """Say who writes, and write in small parts."""
    warnings.simplefilter("ignore")
    Path(pid_file).write_text(str(os.getpid()))
    pieces.PART_BYTES = PART


def run_command(pid_file: str, *words: str) -> None:
    """Be the command line."""
    from ckptkit.cli import main

    begin(pid_file)
    sys.argv = ["ckptkit", *words]
    main()


def reshard_in_parts(pid_file: str, src: str, out: str, *options: str) -> None:
    """Let three processes in turn make the first part of two, the second, and what is left to do."""
    begin(pid_file)
    share = ["reshard", src, out, "--to", "2", "--jobs", "1", *options]
    for words in ([*share, "--part", "1/2"], [*share, "--part", "2/2"], ["finalize", out]):
        in_child(partial(run_command, pid_file, *words))


def in_child(work: Callable[[], None]) -> None:
    """Do some work in a child of this process, and exit as it does if it fails."""
    child = os.fork()
    if child == 0:
        os._exit(code_of(work))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        sys.exit(code)


def code_of(work: Callable[[], None]) -> int:
    """Return the exit status that some work asks for."""
    try:
        work()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def save_on_ranks(pid_file: str, room: str, seed: str, out: str, over: str = "") -> None:
    """Save on two ranks, of which the first tells what goes wrong."""
    begin(pid_file)
    meeting = Path(room, f"meeting-{os.getpid()}")
    meeting.unlink(missing_ok=True)  # of an earlier process that had this number
    rank = int(os.fork() == 0)
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=2)
    if rank:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in make_state(int(seed)).items()}
    writer = Writer(out, files={"config.json": json.dumps(LLAMA).encode()}, overwrite=bool(over))
    code = code_of(lambda: saying(lambda: dcp.save({"model": state}, storage_writer=writer)))
    os._exit(code)  # gloo's threads may abort an interpreter's way out


class Weights(nn.Module):
    """A module that has only parameters."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor))


def save_run(pid_file: str, out: str, seed: str, over: str = "") -> None:
    """Save a checkpoint to a run."""
    begin(pid_file)
    run = Run(out.rpartition("/")[0], files={"config.json": b"{}"})
    if over:
        run.replace(run.checkpoint(5))
    saying(lambda: run.save(5, Weights(make_state(int(seed)))))


def save_by_torch(pid_file: str, out: str, seed: str) -> None:
    """Save through torch's own writer to any store, in parts."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    from tests.faults.peers import told

    begin(pid_file)
    state: dict[str, Any] = make_state(int(seed))
    state |= {f"rest.{i}": torch.randn(1 << 20) for i in range(3)}
    with told():
        writer = FsspecWriter(out, default_block_size=_THEIR_PART)
        dcp.save({"model": state}, storage_writer=writer, no_dist=True)
