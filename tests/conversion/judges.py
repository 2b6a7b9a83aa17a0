"""Judges: what torch makes of a checkpoint, in real processes, a rank each. ckptkit is not imported here."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.producers import Oddments, counted, flatten, spawn

Chunks = list[tuple[tuple[int, ...], tuple[int, ...], str]]  # start, size and, of one shard of several, its file

# -- what is in a directory --------------------------------------------------------------------------------------------


def structure(root: Path) -> dict[str, Chunks]:
    """Each tensor's chunks, in the order in which they are recorded."""
    metadata = FileSystemReader(root).read_metadata()
    files = {
        (index.fqn, tuple(index.offset or ())): info.relative_path for index, info in metadata.storage_data.items()
    }
    found = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            found[name] = [
                (start, size, files[name, start] if len(boxes) > 1 and 0 not in size else "") for start, size in boxes
            ]
    return found


def items(root: Path) -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of every item that the metadata knows."""
    for index, info in FileSystemReader(root).read_metadata().storage_data.items():
        with (root / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            yield index.fqn, file.read(info.length)


def assert_items_open(root: Path) -> None:
    """Every item is what `torch.load` and plain zip readers accept, with checksums that are true."""
    for name, raw in items(root):
        torch.load(io.BytesIO(raw), weights_only=True)
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            assert archive.testzip() is None, name
            assert all(entry.CRC or not entry.file_size for entry in archive.infolist()), name


# -- shards ------------------------------------------------------------------------------------------------------------


def judge_shards(world_size: int, cases: Iterable[tuple[Path, Path]]) -> None:
    """Let `dcp.load` read each directory into shards on `world_size` ranks, and hold them against its file of truth."""
    spawn(world_size, _load_shards, list(cases))


def judge_own_files(world_size: int, root: Path, truth: Path) -> None:
    """The same, where each rank has no other file of the directory than its own; of the tensors that are sharded."""
    spawn(world_size, _load_own_shards, root, truth)


def _load_shards(cases: list[tuple[Path, Path]]) -> None:
    for root, truth in cases:
        _compare(root, torch.load(truth))


def _load_own_shards(root: Path, truth: Path) -> None:
    rank = dist.get_rank()
    mine = root.with_name(f"{root.name}-rank-{rank}")
    mine.mkdir()
    for name in (".metadata", f"__{rank}_0.distcp"):
        (mine / name).hardlink_to(root / name)
    sharded = {name for name, chunks in structure(root).items() if len(chunks) > 1}
    assert sharded
    _compare(mine, {name: tensor for name, tensor in torch.load(truth).items() if name in sharded})


def _compare(root: Path, truth: Mapping[str, Tensor]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {name: _blank(tensor, mesh) for name, tensor in truth.items()}
    dcp.load(state, checkpoint_id=root)
    for name, tensor in truth.items():
        assert raw(_local(state[name])) == raw(_shard(tensor, mesh)), (root, name)


def _shard(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows, as FSDP2 deals them out."""
    if not tensor.ndim:
        return tensor
    shards = tensor.chunk(mesh.size())
    return shards[mesh.get_rank()] if mesh.get_rank() < len(shards) else tensor[:0]


def _blank(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor to load into, sharded and full of other bits."""
    shard = _shard(tensor, mesh)
    blank = torch.full((shard.nbytes,), 0xEE, dtype=torch.uint8).view(tensor.dtype).reshape(shard.shape)
    if not tensor.ndim:
        return blank
    plain = torch.empty(tensor.shape, device="meta")
    return DTensor.from_local(blank, mesh, [Shard(0)], run_check=False, shape=plain.shape, stride=plain.stride())


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def raw(tensor: Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


# -- training ----------------------------------------------------------------------------------------------------------


class Everything(Oddments):
    """And frozen parameters, fewer rows than ranks, and a buffer of 8-bit floats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.tiny = nn.Parameter(torch.randn(1, 6))
        self.register_buffer("scales", counted(5).to(torch.float8_e4m3fn))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + (self.embed(tokens) * self.tiny).square().sum()


class Trained:
    """A model under FSDP2 with its optimizer, which has taken a step if it is `warm`."""

    def __init__(self, *, warm: bool) -> None:
        self.model = Everything()
        for module in (self.model.up, self.model):
            fully_shard(module)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.extra: dict[str, Any] = {"step": 0, "note": "", "losses": [], "none": 1}
        if warm:
            self.step()
            self.extra = {"step": 1, "note": "one", "losses": [1.5, 0.5], "none": None}

    def step(self) -> float:
        """Take a step; its loss."""
        loss = self.model(torch.arange(11))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def state(self) -> dict[str, Any]:
        """All of it, sharded."""
        weights, moments = get_model_state_dict(self.model), get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": moments, "extra": self.extra}

    def load(self, root: Path) -> None:
        """Go on from a checkpoint."""
        state = self.state()
        dcp.load(state, checkpoint_id=root)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.extra = state["extra"]


def train(root: Path, world_size: int) -> None:
    """Save a checkpoint of a short training by torch."""
    spawn(world_size, _train, root)


def _train(root: Path) -> None:
    dcp.save(Trained(warm=True).state(), checkpoint_id=root)


def judge_resumed(world_size: int, original: Path, resharded: Path, again: Path) -> None:
    """Go on from two checkpoints that are to be the same, and save the second as torch does to `again`."""
    spawn(world_size, _resume, original, resharded, again)


def _resume(original: Path, resharded: Path, again: Path) -> None:
    ours, theirs = Trained(warm=False), Trained(warm=False)
    theirs.load(original)
    ours.load(resharded)
    assert ours.extra == theirs.extra == {"step": 1, "note": "one", "losses": [1.5, 0.5], "none": None}
    dcp.save(ours.state(), checkpoint_id=again)
    _assert_same_state(ours, theirs)
    assert ours.step() == theirs.step()
    _assert_same_state(ours, theirs)
    assert ours.model.head.weight is ours.model.embed.weight


def _assert_same_state(ours: Trained, theirs: Trained) -> None:
    found, expected = flatten(ours.state()), flatten(theirs.state())
    assert found.keys() == expected.keys()
    assert "optim.state.norm.weight.exp_avg" not in expected
    assert found["model.scales"].dtype is torch.float8_e4m3fn
    for name, tensor in expected.items():
        assert raw(_local(found[name])) == raw(_local(tensor)), name


# -- renamed -----------------------------------------------------------------------------------------------------------


class Called(nn.Module):
    """A model whose layers are called as one likes, with an optimizer of two groups of parameters."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for i, name in enumerate(names):
            self.add_module(name, nn.Linear(3 + i, 4 + i))
        fully_shard(self)
        groups = [{"params": layer.parameters(), "lr": 0.1 / (1 + i)} for i, layer in enumerate(self.children())]
        self.optimizer = torch.optim.AdamW(groups)

    def forward(self, numbers: Tensor) -> Tensor:
        for layer in self.children():
            numbers = layer(numbers)
        return numbers.square().sum()

    def step(self) -> None:
        """Take a step."""
        self(torch.ones(2, 3)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, options: StateDictOptions) -> dict[str, Any]:
        """Weights and optimizer."""
        weights, moments = get_state_dict(self, self.optimizer, options=options)
        return {"model": weights, "optim": moments}

    def load(self, root: Path, options: StateDictOptions) -> None:
        """Take over a checkpoint."""
        state = self.state(options)
        dcp.load(state, checkpoint_id=root)
        set_state_dict(
            self,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=options,
        )


NESTED, FLATTENED = StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)


def save_called(names: tuple[str, ...], nested: Path, flattened: Path) -> None:
    """Save a model by its names, its optimizer as it is and flattened."""
    spawn(2, _save_called, names, nested, flattened)


def _save_called(names: tuple[str, ...], nested: Path, flattened: Path) -> None:
    model = Called(*names)
    model.step()
    dcp.save(model.state(NESTED), checkpoint_id=nested)
    dcp.save(model.state(FLATTENED), checkpoint_id=flattened)


def judge_renamed(
    before: tuple[str, ...], root: Path, after: tuple[str, ...], renamed: list[tuple[Path, bool]]
) -> None:
    """Load checkpoints, each with whether its optimizer is flattened, by the new names; all is as by the old."""
    spawn(3, _load_renamed, before, root, after, renamed)


def _load_renamed(
    before: tuple[str, ...], root: Path, after: tuple[str, ...], renamed: list[tuple[Path, bool]]
) -> None:
    old = Called(*before)
    old.load(root, NESTED)
    for path, is_flattened in renamed:
        torch.manual_seed(1)
        new = Called(*after)
        new.load(path, FLATTENED if is_flattened else NESTED)
        for model in (old, new):
            assert len(model.optimizer.state) == 2 * len(before)
        for mine, other in zip(new.parameters(), old.parameters(), strict=True):
            assert raw(_local(mine)) == raw(_local(other))
            found, expected = new.optimizer.state[mine], old.optimizer.state[other]
            assert found["step"].item() == expected["step"].item() == 1
            assert all(raw(_local(found[key])) == raw(_local(expected[key])) for key in ("exp_avg", "exp_avg_sq"))
        rates = [[group["lr"] for group in model.optimizer.param_groups] for model in (old, new)]
        assert rates[0] == rates[1] == [0.1 / (1 + i) for i in range(len(before))]
