"""Originals: sound checkpoints by plain torch, each made once for a process, and the tensors that are in them."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.models.expected import expected_model
from tests import producers
from tests.faults.few_bits import FEW_BITS, config_of
from tests.faults.run_trees import MAKERS
from tests.faults.trained import named
from tests.producers import Truth

ANYTHING = object()  # stands for a value that is nobody's business
QUANTIZED_CONFIG: dict[str, Any] = {
    "model_type": "unheard_of",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}
LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 9,
}
ADAPTER_CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["up"]}
MODEL = "model"  # under which every nested original has its weights
_SHAPES = {
    "embed.weight": (96, 32),
    "layers.0.up.weight": (64, 32),
    "layers.0.up.bias": (64,),
    "layers.0.down.weight": (32, 64),
    "layers.0.down.bias": (32,),
    "layers.1.up.weight": (64, 32),
    "layers.1.up.bias": (64,),
    "layers.1.down.weight": (32, 64),
    "layers.1.down.bias": (32,),
    "norm.weight": (32,),
    "norm.bias": (32,),
    "head.weight": (95, 32),
}


@dataclass(frozen=True, slots=True)
class Original:
    """A checkpoint that is only read, and what is in it by torch's flat keys: tensors, and other values."""

    name: str
    root: Path
    truth: Mapping[str, Any]


def weights(step: int = 1) -> Truth:
    """The model at a step: random numbers, of which every bit counts; in bf16 for the embedding."""
    torch.manual_seed(step)
    state = {name: torch.randn(shape) for name, shape in _SHAPES.items()}
    return state | {"embed.weight": state["embed.weight"].bfloat16()}


def _shards(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in weights(step).items()}


def _save_dcp(places: Mapping[int, Path]) -> None:
    for step, root in places.items():
        dcp.save({MODEL: _shards(step)}, checkpoint_id=root)


def _save_training(root: Path) -> None:
    moments = {name: {"exp_avg": value} for name, value in _shards(3).items()}
    dcp.save({MODEL: _shards(1), "optim": {"state": moments}, "step": 7, "note": "a note"}, checkpoint_id=root)


def with_scalar(state: dict[str, Any]) -> dict[str, Any]:
    """The model with a tensor of no dimensions in place of one."""
    return state | {"norm.bias": torch.tensor(4.605)}


def _save_shards(places: Mapping[Path, dict[str, Any]]) -> None:
    for root, state in places.items():
        writer = HuggingFaceStorageWriter(str(root), dict.fromkeys(state, 1), save_distributed=True)
        dcp.save(state, storage_writer=writer)


def _save_all(home: Path) -> None:
    """Everything that takes two ranks, at two steps where a mixture is to be made of them."""
    _save_dcp({1: home / "dcp", 2: home / "dcp-2"})
    _save_training(home / "training")
    _save_shards(
        {home / "shards": _shards(1), home / "shards-2": _shards(2), home / "scalars": with_scalar(_shards(1))}
    )


def _save_safetensors(home: Path, step: int, suffix: str = "") -> None:
    state = weights(step)
    single, several = home / f"hf{suffix}", home / f"indexed{suffix}"
    single.mkdir()
    several.mkdir()
    save_file(state, single / "model.safetensors", metadata={"format": "pt"})
    names = list(state)
    parts = {f"model-0000{i + 1}-of-00003.safetensors": names[4 * i : 4 * i + 4] for i in range(3)}
    for file, members in parts.items():
        save_file({name: state[name] for name in members}, several / file, metadata={"format": "pt"})
    places = {name: file for file, members in parts.items() for name in members}
    size = sum(value.nbytes for value in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (several / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _save_pt(home: Path, step: int, suffix: str = "") -> None:
    root = home / f"pt{suffix}"
    root.mkdir()
    torch.save({MODEL: weights(step), "step": step}, root / "state.pt")


def _save_ranks(root: Path, state: Truth, step: int) -> None:
    MAKERS["ranks"](root, state, step, dist.get_world_size())


@cache
def home() -> Path:
    """Where the originals of this process lie, until it ends."""
    place = Path(tempfile.mkdtemp(prefix="originals-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's writers
        producers.spawn(2, _save_all, place)
    for step, suffix in ((1, ""), (2, "-2")):
        _save_safetensors(place, step, suffix)
        _save_pt(place, step, suffix)
    return place


@cache
def adapter() -> Original:
    """An adapter of one layer as PEFT saves it, its base in a folder there, and the sum of both."""
    root = home() / "adapter"
    (root / "base").mkdir(parents=True)
    torch.manual_seed(0)
    a, b, w = torch.randn(4, 32), torch.randn(24, 4), torch.randn(24, 32)
    save_file({"up.weight": w, "up.bias": torch.ones(24)}, root / "base" / "model.safetensors")
    names = (f"base_model.model.up.lora_{which}.weight" for which in "AB")
    save_file(dict(zip(names, (a, b), strict=True)), root / "adapter_model.safetensors")
    (root / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    return Original("adapter", root, {"up.weight": w + 1.5 * (b @ a), "up.bias": torch.ones(24)})


@cache
def quantized() -> Original:
    """A model of which one matrix is in fp8 with a scale for each 128 x 128, and what that is in fp32."""
    root = home() / "quantized"
    root.mkdir()
    torch.manual_seed(0)
    numbers = (torch.randn(200, 130) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) + 0.5
    plain = {"up.bias": torch.ones(24)}
    save_file({"up.weight": numbers, "up.weight_scale_inv": scales, **plain}, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps(QUANTIZED_CONFIG))
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    return Original("quantized", root, {"up.weight": numbers.float() * spread, **plain})


@cache
def llama() -> Original:
    """A model of a known type, and what it is with a scale for each 128 x 128 of its linear layers."""
    root = home() / "llama"
    root.mkdir()
    torch.manual_seed(0)
    state = {name: torch.randn(shape) for name, shape in expected_model(LLAMA_CONFIG).shapes.items()}
    save_file(state, root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    truth = dict(state)
    for name, tensor in state.items():
        if name.endswith("_proj.weight"):
            factor = 448 / tensor.abs().max()
            truth[name] = (tensor * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
            truth[f"{name}_scale_inv"] = (1 / factor).reshape(1, 1)
    return Original("llama", root, truth)


@cache
def few_bits(kind: str) -> Original:
    """A model in which one matrix has few bits, and that matrix in fp32."""
    root = home() / kind
    root.mkdir()
    stored = FEW_BITS[kind]()
    save_file(dict(stored.tensors), root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps(config_of(stored)))
    return Original(kind, root, {stored.name: stored.truth})


_OF_MODELS: dict[str, Callable[[], Original]] = {"adapter": adapter, "quantized": quantized, "llama": llama}
_OF_MODELS |= {kind: partial(few_bits, kind) for kind in FEW_BITS}


def original(name: str) -> Original:
    """The sound checkpoint `name`: dcp, training, shards (of ranks), scalars, hf, indexed, pt, or a `trained`.

    Or one with a verb of its own: adapter, quantized, llama, weights of few bits. "-2" after it is a later step.
    """
    kind, _, later = name.partition("-")
    step = int(later or 1)
    if kind in _OF_MODELS:
        return _OF_MODELS[kind]()
    if kind in MAKERS:
        return trained(kind, step)
    truth: dict[str, Any] = weights(step)
    if kind in ("dcp", "training", "pt"):
        truth = {f"{MODEL}.{key}": value for key, value in truth.items()}
    if kind == "training":
        moments = {f"optim.state.{key}.exp_avg": value for key, value in weights(3).items()}
        truth |= {**moments, "step": 7, "note": "a note"}
    if kind == "pt":
        truth["step"] = step
    if kind == "scalars":
        truth = with_scalar(truth)
    return Original(name, home() / name, truth)


@cache
def trained(kind: str, step: int = 1, ranks: int = 2) -> Original:
    """A checkpoint as so many ranks of a trainer leave it."""
    root = home() / f"{kind}-{step}-of-{ranks}"
    state = {name: value.float() for name, value in weights(step).items()}
    if kind == "ranks":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            producers.spawn(ranks, _save_ranks, root, state, step)
        made = named(state)
    else:
        made = MAKERS[kind](root, state, step, ranks)
    others = dict.fromkeys(open_layout(root).names, ANYTHING)
    return Original(kind if step == 1 else f"{kind}-{step}", root, {**others, **made})


def produced(producer: Callable[[Path], Truth]) -> Original:
    """The DCP directory of one of the suite's producers, of which the tensors are known."""
    place = home() / f"produced-{producer.__name__}"
    truth = place.with_suffix(".truth")
    if not truth.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(producer(place), truth)
    others = dict.fromkeys(FileSystemReader(place).read_metadata().state_dict_metadata, ANYTHING)
    return Original(place.name, place, {**others, **torch.load(truth)})


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that there is to compare of a tensor."""
    return tensor.dtype, tuple(tensor.shape), raw(tensor)


def raw(tensor: Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
