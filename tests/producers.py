"""Checkpoints written by plain torch code that knows nothing of ckptkit: the fixtures of the whole suite.

A producer is a function `(root) -> truth`: it writes a checkpoint at `root` in real processes and returns, by the flat
key torch gives it, every tensor that must come out of it. The truth is gathered before or beside the saving, and never
read back.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion

Truth = dict[str, Tensor]
Producer = Callable[[Path], Truth]

# What the process has imported that ranks are forked from: else each rank of each test imports it anew, for a second.
PRELOADED = [
    "ckptkit.training.loop",
    "tests.conftest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
_TRANSFORMERS = "transformers.modeling_utils"  # which may look at a GPU; left out where it is missing

# -- processes ---------------------------------------------------------------------------------------------------------

# torch cannot send the error of a rank to the others there ("cannot pickle code objects"), so nobody learns it
needs_errors_of_ranks = pytest.mark.skipif(
    sys.version_info >= (3, 13) and TorchVersion(torch.__version__) < (2, 12),
    reason="torch before 2.12 loses errors of ranks under Python 3.13",
)


def spawn(world_size: int, function: Callable[..., None], *arguments: object, timeout: float = 120) -> None:
    """Run `function(*arguments)` as every rank of a gloo process group; end all ranks when one fails or time is up."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([*PRELOADED, _TRANSFORMERS])
    with tempfile.TemporaryDirectory() as meeting:
        ranks = [
            processes.Process(target=_be_rank, args=(rank, world_size, meeting, function, arguments), daemon=True)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            _wait_for_all(ranks, timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        failures = [path.read_text() for path in sorted(Path(meeting).glob("failure-*"))]
        if missing := re.search(r"^ModuleNotFoundError: No module named '(.+)'$", "\n".join(failures), re.MULTILINE):
            raise ModuleNotFoundError(missing[0], name=missing[1])
        if failures or any(rank.exitcode for rank in ranks):
            codes = [rank.exitcode for rank in ranks]
            raise ChildProcessError(f"ranks exited with {codes}\n" + "\n".join(failures))


def _wait_for_all(ranks: list[Any], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    running = list(ranks)
    while running and not any(rank.exitcode for rank in ranks):
        if not wait([rank.sentinel for rank in running], deadline - time.monotonic()):
            raise TimeoutError(f"{len(running)} of {len(ranks)} ranks still run after {timeout:g} s")
        running = [rank for rank in running if rank.is_alive()]


def _be_rank(rank: int, world_size: int, meeting: str, function: Callable[..., None], arguments: tuple[Any]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        torch.manual_seed(0)
        function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # not by the interpreter's way out, on which gloo's threads may abort what is done (torch 2.13)
    except BaseException:
        Path(meeting, f"failure-{rank}").write_text(traceback.format_exc())
        raise


def _on_ranks(world_size: int, function: Callable[..., Mapping[str, Any]], root: Path, *arguments: object) -> Truth:
    """The truth that `function(root, *arguments)` returns on each of its ranks, as rank 0 sees it."""
    with tempfile.TemporaryDirectory() as directory:
        truth = Path(directory, "truth.pt")
        spawn(world_size, _tell, truth, function, root, *arguments)
        loaded: Truth = torch.load(truth)
        return loaded


def _tell(truth: Path, function: Callable[..., Mapping[str, Any]], *arguments: object) -> None:
    whole = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in function(*arguments).items()
    }
    if dist.get_rank() == 0:
        torch.save(whole, truth)


def flatten(tree: object, prefix: str = "") -> dict[str, Any]:
    """The tensors of a nested dict by the dotted keys that torch's planner gives them."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    if not isinstance(tree, Mapping):
        return {}
    return {
        name: leaf
        for key, branch in tree.items()
        for name, leaf in flatten(branch, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of which every element says where it belongs."""
    size = torch.Size(shape)
    return torch.arange(size.numel(), dtype=torch.float64).reshape(size).to(dtype)


# -- FSDP --------------------------------------------------------------------------------------------------------------


class Oddments(nn.Module):
    """A model of what converters stumble on: odd sizes, few rows, ties, buffers of integers, booleans, scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.down = nn.Linear(7, 6, bias=False)
        self.pair = nn.Linear(6, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("logit_scale", torch.tensor(2.659))
        self.register_buffer("position_ids", torch.arange(9).reshape(1, 9))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(self.norm(self.up(hidden)).relu())
        return self.head(hidden).sum() + self.pair(hidden).square().sum() * self.logit_scale


def _train_one_step(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(11)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _trained(mesh: DeviceMesh) -> dict[str, Any]:
    model = Oddments()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = _train_one_step(model)
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "extra": {"step": 1, "note": "eleven rows on three ranks", "losses": [1.5, 0.5], "rate": 0.01, "none": None},
    }


def _save_fsdp2(root: Path, shape: tuple[int, ...], names: tuple[str, ...]) -> Mapping[str, Any]:
    state = _trained(init_device_mesh("cpu", shape, mesh_dim_names=names))
    dcp.save(state, checkpoint_id=root)
    return flatten(state)


def fsdp2(root: Path) -> Truth:
    """FSDP2 on 3 ranks after a real step of AdamW: uneven and empty chunks, ties, integer, boolean and 0-d buffers."""
    return _on_ranks(3, _save_fsdp2, root, (3,), ("shard",))


def hsdp(root: Path) -> Truth:
    """FSDP2 on 4 ranks, sharded over 2 and replicated over 2: every chunk is kept once."""
    return _on_ranks(4, _save_fsdp2, root, (2, 2), ("replicate", "shard"))


def _save_fsdp1(root: Path) -> Mapping[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    bare = Oddments()
    whole = {f"model.{name}": value.clone() for name, value in bare.state_dict().items()}
    model = FullyShardedDataParallel(bare, device_id=torch.device("cpu"), use_orig_params=True)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    dcp.save({"model": model.state_dict()}, checkpoint_id=root)
    return whole


def fsdp1(root: Path) -> Truth:
    """FSDP1 with SHARDED_STATE_DICT on 3 ranks: ShardedTensors, and no chunk at all from ranks past the end."""
    return _on_ranks(3, _save_fsdp1, root)


def _save_accelerate(root: Path) -> Mapping[str, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    model = Oddments()
    fully_shard(model)
    optimizer = _train_one_step(model)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    save_fsdp_model(plugin, accelerator, model, str(root))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(root))
    return flatten({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)})


def accelerate(root: Path) -> Truth:
    """What accelerate leaves in a `checkpoint-N`: `pytorch_model_fsdp_0` and `optimizer_0`, one DCP directory each."""
    return _on_ranks(2, _save_accelerate, root)


# -- geometry ----------------------------------------------------------------------------------------------------------


def _save_on_mesh(root: Path) -> Mapping[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns, both = counted(5, 3), counted(3, 5), counted(5, 7)
    state = {
        "model": {
            "rows": distribute_tensor(rows, mesh, [Replicate(), Shard(0)]),
            "columns": distribute_tensor(columns, mesh, [Shard(1), Replicate()]),
            "grid": distribute_tensor(both, mesh, [Shard(0), Shard(1)]),
            "grid.turned": distribute_tensor(both, mesh, [Shard(1), Shard(0)]),
            "twice": distribute_tensor(counted(7, 2), mesh, [Shard(0), Shard(0)]),
            "deep": distribute_tensor(counted(3, 4, 5), mesh, [Shard(2), Shard(1)]),
            "whole": distribute_tensor(counted(2, 2), mesh, [Replicate(), Replicate()]),
            "plain": counted(3),
            "column": distribute_tensor(counted(4, 1), mesh, [Shard(1), Replicate()]),
        }
    }
    dcp.save(state, checkpoint_id=root)
    return flatten(state)


def mesh(root: Path) -> Truth:
    """DTensors on a 2 x 2 mesh, sharded along other dimensions than 0 and along several, unevenly."""
    return _on_ranks(4, _save_on_mesh, root)


def _save_tensor_parallel(root: Path) -> Mapping[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = {"model": get_model_state_dict(model)}
    dcp.save(state, checkpoint_id=root)
    return flatten(state)


def tensor_parallel(root: Path) -> Truth:
    """FSDP2 over tensor parallelism on 4 ranks: strided shards, stored as boxes in two dimensions."""
    return _on_ranks(4, _save_tensor_parallel, root)


# -- ways to write -----------------------------------------------------------------------------------------------------


def _save_sharded(root: Path, options: dict[str, Any], collectives: bool = True) -> Mapping[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {
        f"layer.{layer}.{name}": distribute_tensor(counted(7 + layer, 3) + layer, mesh, [Shard(0)])
        for layer in range(4)
        for name in ("weight", "moment")
    }
    state = {"model": sharded | {"scale": torch.tensor(7.0), "count": torch.tensor(3)}, "step": 7}
    dcp.save(state, storage_writer=FileSystemWriter(root, **options), use_collectives=collectives)
    return flatten(state)


def many_files(root: Path) -> Truth:
    """Several files per rank (`thread_count=11`), some of them empty."""
    return _on_ranks(2, _save_sharded, root, {"thread_count": 11})


def file_per_item(root: Path) -> Truth:
    """One file per item (`single_file_per_rank=False`)."""
    return _on_ranks(2, _save_sharded, root, {"single_file_per_rank": False})


def _save_full(root: Path) -> Mapping[str, Any]:
    model = Oddments()
    fully_shard(model.up)
    fully_shard(model)
    optimizer = _train_one_step(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optim": moments, "run": {"step": 1, "note": "whole", "losses": [1.5, 0.5]}}
    if dist.get_rank() == 0:
        root.mkdir()
        torch.save(state, root / "state.pt")
    return flatten(state)


def full(root: Path) -> Truth:
    """FULL_STATE_DICT of FSDP2 on 2 ranks after a step of AdamW: one `state.pt`, saved by rank 0."""
    return _on_ranks(2, _save_full, root)


def no_collectives(root: Path) -> Truth:
    """Saved without talking to each other: one `__{rank}.metadata` per rank and no `.metadata`."""
    return _on_ranks(2, _save_sharded, root, {}, False)


def leftovers(root: Path) -> Truth:
    """A 2-rank checkpoint over a 4-rank one, whose last files still lie there."""
    _on_ranks(4, _save_sharded, root, {})
    return _on_ranks(2, _save_sharded, root, {})


def no_crc(root: Path) -> Truth:
    """Every CRC field is 0: `set_crc32_options(False)`."""
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        return save_alone({"model": {"weight": counted(4, 3), "scale": torch.tensor(2.0)}}, root)
    finally:
        torch.serialization.set_crc32_options(computes)


class Inverted(StreamTransformExtension):
    """A stream transform that torch applies to every item: all bits flipped."""

    @staticmethod
    def registry_name() -> str:
        return "stream.inverted"

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        return Inverted()

    def get_descriptor(self) -> str:
        return "stream.inverted/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _InvertedStream(output)

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's word
        return io.BytesIO(_invert(input.read()))


class _InvertedStream(io.BytesIO):
    def __init__(self, output: IO[bytes]) -> None:
        super().__init__()
        self.output = output

    def close(self) -> None:
        if not self.closed:
            self.output.write(_invert(self.getvalue()))
        super().close()


def _invert(raw: bytes) -> bytes:
    return bytes(255 - byte for byte in raw)


def transformed(root: Path) -> Truth:
    """Items behind a stream transform that nobody else knows: readable only by who wrote it."""
    return save_alone({"model": {"weight": counted(4, 3)}}, root, _extensions=[Inverted()])


def zstd(root: Path) -> Truth:
    """Items compressed by torch's own `stream.zstd` transform; torch needs `zstandard` or `pyzstd` for it."""
    return save_alone({"model": {"weight": counted(4, 3)}}, root, _extensions=[ZStandard()])


def safetensors_items(root: Path) -> Truth:
    """`SerializationFormat.SAFETENSORS`: a safetensors file inside each `.distcp`, which torch itself cannot load."""
    return save_alone({"model": {"weight": counted(4, 3)}}, root, serialization_format=SerializationFormat.SAFETENSORS)


def _save_hf_shards(root: Path, parts: int) -> Mapping[str, Any]:
    mesh = init_device_mesh("cpu", (3,))
    model = Oddments()
    model.head.weight = nn.Parameter(torch.randn(11, 6))  # torch's writer refuses ties
    fully_shard(model, mesh=mesh)
    state = get_model_state_dict(model) | {
        "columns": distribute_tensor(counted(2, 7, dtype=torch.bfloat16), mesh, [Shard(1)]),
        "no_rows": distribute_tensor(counted(0, 3), mesh, [Shard(0)]),
    }
    places = {name: 1 + i % parts for i, name in enumerate(state)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(root), places, save_distributed=True))
    return state


def hf_shards(root: Path) -> Truth:
    """`HuggingFaceStorageWriter(save_distributed=True)`: safetensors shards that carry their offsets, and no index."""
    return _on_ranks(3, _save_hf_shards, root, 1)


def hf_shards_in_parts(root: Path) -> Truth:
    """The same with several files per rank (`fqn_to_index_mapping`)."""
    return _on_ranks(3, _save_hf_shards, root, 3)


def _save_hf_shards_deduplicated(root: Path) -> Mapping[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {"w": distribute_tensor(counted(5, 3), mesh, [Shard(0), Replicate()])}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(root), save_distributed=True))
    return state


def hf_shards_deduplicated(root: Path) -> Truth:
    """The same of 4 ranks, of which the second and the fourth held copies alone and wrote no file."""
    return _on_ranks(4, _save_hf_shards_deduplicated, root)


def hf_alone(root: Path) -> Truth:
    """`HuggingFaceStorageWriter()` in one process: a sharded repository whose files note that all begins at 0."""
    state = {f"layers.{layer}.weight": counted(4, 3) + layer for layer in range(5)} | {"scale": torch.tensor(2.5)}
    writer = HuggingFaceStorageWriter(str(root), {name: 1 + i // 2 for i, name in enumerate(state)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, storage_writer=writer, no_dist=True)
    return state


# -- what may be stored ------------------------------------------------------------------------------------------------

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of the dtype whose bytes are random; of booleans, random truths."""
    if dtype is torch.bool:
        return torch.randint(2, shape).bool()
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (nbytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def dtypes(root: Path) -> Truth:
    """A plain dict of every dtype that torch can save, of shapes from 0-d over zero-size to odd."""
    torch.manual_seed(1)
    shapes = {"matrix": (3, 4), "one": (1,), "scalar": (), "no_rows": (0, 4), "no_columns": (3, 0)}
    state = {
        f"{str(dtype).removeprefix('torch.')}.{name}": bits(shape, dtype)
        for dtype in DTYPES
        for name, shape in shapes.items()
    }
    return save_alone(state, root)


def strided(root: Path) -> Truth:
    """Tensors whose items keep strides other than row-major."""
    image = counted(2, 3, 4, 5)
    state = {
        "transposed": counted(3, 4).t(),
        "channels_last": image.to(memory_format=torch.channels_last),
        "permuted": counted(2, 3, 4).permute(2, 0, 1),
        "sliced": counted(6, 6)[::2, 1:4],
        "expanded": counted(3, 1).expand(3, 4),
        "plain": counted(2, 2),
        "thin": counted(1, 5).t(),
    }
    return save_alone({"model": state}, root)


def lazy(root: Path) -> Truth:
    """Tensors whose stored bytes are not yet their values: conjugated and negated views."""
    values = torch.complex(counted(2, 3), counted(2, 3) + 1)
    return save_alone({"conjugated": values.conj(), "negated": torch._neg_view(counted(2, 3)), "plain": values}, root)


def quantized(root: Path) -> Truth:
    """A quantized tensor beside a plain one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated
        tensor = torch.quantize_per_tensor(counted(2, 3), 0.1, 10, torch.quint8)
        return save_alone({"quantized": tensor, "plain": counted(2)}, root)


def nothing(root: Path) -> Truth:
    """No tensor at all: a step and a note."""
    return save_alone({"step": 3, "note": "no tensors"}, root)


def strange_names(root: Path) -> Truth:
    """Names that break whatever splits, joins, prints or opens them."""
    names = ("a.b", "../up", "with space", "line\nbreak", "\x1b[31mred", "ünïcode", "", "/root", "__metadata__")
    return save_alone({"model": {name: counted(2) + index for index, name in enumerate(names)}}, root)


# -- wrappers ----------------------------------------------------------------------------------------------------------


def _weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()


def under_nothing(root: Path) -> Truth:
    """The bare state dict of a model."""
    return save_alone(_weights(), root)


def under_model(root: Path) -> Truth:
    """`{"model": ...}`, as accelerate and most loops save it."""
    return save_alone({"model": _weights(), "step": 3}, root)


def under_state_model(root: Path) -> Truth:
    """`{"state": {"model": ...}}`, as Composer saves it."""
    rng = counted(5, dtype=torch.uint8)
    state = {"model": _weights(), "timestamp": {"epoch": 1}, "rng": [rng]}
    return save_alone({"state": state}, root) | {"state.rng.0": rng}


def under_app(root: Path) -> Truth:
    """`{"app": {"model": ..., "optim": ...}}`, as torch's tutorial of stateful objects saves it."""
    optim = {"state": {name: {"exp_avg": value * 2} for name, value in _weights().items()}, "param_groups": [{"lr": 1}]}
    return save_alone({"app": {"model": _weights(), "optim": optim}}, root)


def under_odd_name(root: Path) -> Truth:
    """A wrapper that nobody could guess, beside an optimizer."""
    return save_alone({"my net.v2": _weights(), "opt": {"state": {"0.weight": {"exp_avg": counted(4, 3)}}}}, root)


def from_ddp(root: Path) -> Truth:
    """Names with DDP's `module.`."""
    return _on_ranks(2, _save_ddp, root)


def _save_ddp(root: Path) -> Mapping[str, Any]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 4))
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=root)
    return flatten(state)


def from_compile(root: Path) -> Truth:
    """Names with torch.compile's `_orig_mod.`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the compiler's own imports warn of
        model: Any = torch.compile(nn.Linear(3, 4))
    return save_alone({"model": model.state_dict()}, root)


def from_checkpoint_wrapper(root: Path) -> Truth:
    """Names with activation checkpointing's `_checkpoint_wrapped_module.`, as `named_parameters` gives them raw."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 4)), nn.Linear(4, 2))
    return save_alone({"model": dict(model.named_parameters())}, root)


def save_alone(state: dict[str, Any], root: Path, **options: Any) -> Truth:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, storage_writer=FileSystemWriter(root, **options), no_dist=True)
    return {name: tensor.detach().resolve_conj().resolve_neg().clone() for name, tensor in flatten(state).items()}


# -- the lists ---------------------------------------------------------------------------------------------------------

# DCP directories: every tensor of the truth must come out of them bit for bit.
READABLE: tuple[Producer, ...] = (
    *(fsdp2, fsdp1, hsdp, mesh, tensor_parallel),
    *(many_files, file_per_item, no_collectives, leftovers, no_crc),
    *(dtypes, strided, nothing, strange_names, zstd),
    *(under_nothing, under_model, under_state_model, under_app, under_odd_name),
    *(from_ddp, from_compile, from_checkpoint_wrapper),
)

# Valid DCP directories with something in them that is not raw bytes in some order: refused by name.
ENCODED: tuple[Producer, ...] = (transformed, safetensors_items, lazy, quantized)
