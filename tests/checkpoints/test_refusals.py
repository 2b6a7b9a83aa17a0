"""What other programs save that cannot be a source: refused by name, with what to do instead."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import CkptError, NotACheckpoint
from ckptkit.trainers import FOREIGN
from tests.producers import save_alone


def save_vllm(root: Path) -> list[Path]:
    for rank in range(2):
        tensors = {"model.layers.0.self_attn.qkv_proj.weight": torch.ones(2, 2)}
        save_file(tensors, root / f"model-rank-{rank}-part-0.safetensors")
    return [root, root / "model-rank-0-part-0.safetensors"]


def save_tensorrt_llm(root: Path) -> list[Path]:
    save_file({"transformer.layers.0.attention.qkv.weight": torch.ones(2, 2)}, root / "rank0.safetensors")
    assert ckptkit.inspect(root)
    said = {"architecture": "LlamaForCausalLM", "dtype": "float16", "mapping": {"world_size": 1, "tp_size": 1}}
    (root / "config.json").write_text(json.dumps(said))
    return [root, root / "rank0.safetensors"]


def save_zarr(root: Path) -> list[Path]:
    place = root / "iter_0000010"
    (place / "decoder.layers.mlp.linear_fc1.weight").mkdir(parents=True)
    (place / "decoder.layers.mlp.linear_fc1.weight" / ".zarray").write_text("{}")
    (place / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    torch.save({"iteration": 10}, place / "common.pt")
    return [root, place]


def save_datastates(root: Path) -> list[Path]:
    """The files of DeepSpeed as DataStates writes them: a size, a header in JSON, tensors and a pickle behind it."""
    place = root / "global_step10"
    place.mkdir()
    (root / "latest").write_text(place.name)
    state = pickle.dumps({"module": {"w": "TENSOR|module|w"}}, protocol=pickle.HIGHEST_PROTOCOL)
    tensor = {"dtype": "torch.float32", "shape": [2], "offsets": [0, 8]}
    header = json.dumps({"module|w": tensor, "datastates_metadata": {"offsets": [8, 8 + len(state)]}}).encode()
    size = len(header).to_bytes(8, "little")
    for name, at in (("mp_rank_00_model_states.pt", 8), ("zero_pp_rank_0_mp_rank_00_optim_states.pt", 4096)):
        (place / name).write_bytes(size.ljust(at, b"\0") + header + b"\0" * 8 + state)
    return [root, place, place / "mp_rank_00_model_states.pt"]


def save_disk_delta(root: Path) -> list[Path]:
    """A version that slime or miles published: compressed updates under the names of tensors."""
    file = "model-00000-of-00001.safetensors"
    save_file({"w": torch.zeros(5, dtype=torch.uint8)}, root / file)
    index = {"metadata": {"delta_encoding": "xor"}, "weight_map": {"w": file}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return [root, root / file]


def save_manifest_delta(root: Path) -> list[Path]:
    """SkyRL's updates, which a manifest describes."""
    save_file({"w": torch.zeros(5, dtype=torch.uint8)}, root / "payload.safetensors")
    (root / "manifest.json").write_text('{"version": 2, "base_version": 1, "tensors": []}')
    return [root, root / "payload.safetensors"]


def save_pipeline(root: Path) -> list[Path]:
    """A pipeline of diffusers with two models. ckptkit opens each of them alone."""
    said = {"_class_name": "DDPMPipeline", "_diffusers_version": "0.42.0", "unet": ["diffusers", "UNet2DModel"]}
    (root / "model_index.json").write_text(json.dumps(said))
    for part in ("unet", "vae"):
        (root / part).mkdir()
        (root / part / "config.json").write_text('{"_class_name": "UNet2DModel", "_diffusers_version": "0.42.0"}')
        save_file({"w": torch.ones(2)}, root / part / "diffusion_pytorch_model.safetensors")
        assert list(ckptkit.open(root / part)) == ["w"]
    return [root]


@pytest.mark.parametrize(
    ("save", "message", "hint"),
    [
        (save_pipeline, "a diffusers pipeline, which", "pass the directory of one model"),
        (save_disk_delta, "weight updates of slime or miles, which", "apply them with slime or miles"),
        (save_manifest_delta, "weight updates of SkyRL, which", "apply them with SkyRL"),
        (save_vllm, "a sharded_state of vLLM or SGLang", "the model that it was made of"),
        (save_tensorrt_llm, "weights of TensorRT-LLM", "the model that they were made of"),
        (save_datastates, "in the format of DataStates", "save it with the default one"),
        (save_zarr, "arrays of zarr, as Megatron saved", "load and save it with a Megatron-LM"),
    ],
)
def test_it_is_refused_by_name(tmp_path: Path, save: Callable[[Path], list[Path]], message: str, hint: str) -> None:
    for path in save(tmp_path):
        for command in (ckptkit.open, ckptkit.inspect, lambda path: ckptkit.consolidate(path, tmp_path / "out")):
            with pytest.raises(CkptError, match=message) as raised:
                command(path)
            assert (raised.value.exit_code, hint in str(raised.value.hint)) == (3, True)
    assert not (tmp_path / "out").exists()


FOREIGN_FILES = [
    ("model-Q4_K_M.gguf", b"GGUF\x03\0\0\0", "a model of llama.cpp", "save_pretrained"),
    ("megatron.nemo", b"\0" * 1024, "an archive of NeMo 1", "tar xf"),
    ("model.keras", b"PK\x05\x06" + b"\0" * 18, "a model of Keras", "as safetensors"),
    ("model-00001-rank-000,001.safetensor", b"\2\0\0\0\0\0\0\0{}", "weights as SGLang's ranks hold them", "made of"),
    ("DeepSeek-V4.expert-pack", b"SGLANG-EXPERTPACK-v1\0\0\0\0", "experts as SGLang reads them", "model in GGUF"),
    ("model.weights.h5", b"\x89HDF\r\n\x1a\n", "weights of Keras", "as safetensors"),
    ("model.tensors", b"|TZR|\0", "CoreWeave's tensorizer", "TensorDeserializer"),
    ("rank0.engine", b"ftrt", "an engine of TensorRT", "that it was built from"),
    (".snapshot_metadata", b'{"version": "0.1.0"}', "a snapshot of torchsnapshot, which", "save it again"),
    ("model_00001000.bin", (20240326).to_bytes(4, "little"), "a model of llm.c, which", "export_hf.py"),
    ("0.tar.gz", b"\x1f\x8b\x08", "a Tinker server", "tar xf"),
]


@pytest.mark.parametrize(("name", "data", "message", "hint"), FOREIGN_FILES, ids=[row[0] for row in FOREIGN_FILES])
def test_files_of_other_programs_are_named(tmp_path: Path, name: str, data: bytes, message: str, hint: str) -> None:
    """As a file, and as all that a directory has of a model; beside a checkpoint they are files like any other."""
    root = tmp_path / "model"
    root.mkdir()
    (root / name).write_bytes(data)
    (root / "config.json").write_text("{}")
    for path in (root, root / name):
        for command in (ckptkit.inspect, ckptkit.verify, lambda path: ckptkit.consolidate(path, tmp_path / "out")):
            with pytest.raises(CkptError, match=message) as raised:
                command(path)
            assert (raised.value.exit_code, hint in str(raised.value.hint)) == (3, True)
    save_alone({"w": torch.ones(3)}, root / "part")
    assert ckptkit.inspect(root / "part")
    save_file({"w": torch.ones(3)}, root / "model.safetensors")
    assert list(ckptkit.open(root)) == ["w"]


def test_every_foreign_file_is_tried() -> None:
    assert len(FOREIGN_FILES) == len(FOREIGN)


@pytest.mark.parametrize(("name", "kind"), [("__0_0.distcp", "one shard"), (".metadata", "the metadata")])
def test_one_file_of_a_dcp_directory_is_not_a_checkpoint(name: str, kind: str, tmp_path: Path) -> None:
    """With one tensor its only shard has the layout of a torch.save file."""
    root = tmp_path / "ckpt-1"
    save_alone({"w": torch.ones(3)}, root)
    for command in (Checkpoint.open, ckptkit.verify, lambda path: ckptkit.consolidate(path, tmp_path / "out")):
        with pytest.raises(NotACheckpoint, match=f"{kind} of a DCP directory") as raised:
            command(root / name)
        assert raised.value.hint == f"pass the directory {root}"
