"""What `inspect` says of checkpoints of many producers: who wrote them, how many parameters, which bytes are whose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ckptkit import consolidate, inspect, make_manifest
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.training.saving.run import Run
from tests import producers
from tests.conftest import Produce
from tests.producers import save_alone

ONES = torch.ones(3, 4)
TIED = {"model_type": "llama", "tie_word_embeddings": True}


def numel(truth: Mapping[str, Tensor], under: str) -> int:
    return sum(tensor.numel() for name, tensor in truth.items() if name.startswith(under))


def test_a_sharded_checkpoint_at_a_glance(produce: Produce, tmp_path: Path) -> None:
    produced = produce(producers.fsdp2)
    shutil.copytree(produced.root, tmp_path / "ckpt-7")
    found = inspect(tmp_path)
    assert (found.whole, found.step, found.world_size) == (tmp_path / "ckpt-7", 7, 3)
    assert found.trainer == "torch.distributed.checkpoint"
    assert found.parameters == numel(produced.truth, "model.")
    assert {kind: group.under for kind, group in found.groups.items()} == {
        "model": ("model",),
        "optimizer": ("optim",),
        "rest": ("extra",),
    }
    of_model = [tensor for name, tensor in produced.truth.items() if name.startswith("model.")]
    assert found.groups["model"].nbytes == sum(tensor.nbytes for tensor in of_model)
    of_integers = [tensor for tensor in of_model if tensor.dtype == torch.int64]
    assert found.groups["model"].bytes_by_dtype["int64"] == sum(tensor.nbytes for tensor in of_integers)
    tensors, blobs = len(found.layout.tensors), len(found.layout.blobs)
    assert sum(group.entries for group in found.groups.values()) == tensors + blobs
    assert (found.has_manifest, found.ties, found.unread) == (False, (), ())
    make_manifest(tmp_path / "ckpt-7")
    assert inspect(tmp_path).has_manifest
    assert inspect(tmp_path).trainer == "torch.distributed.checkpoint"  # the manifest is ours, the checkpoint is not


def test_a_checkpoint_in_parts_is_one(produce: Produce, tmp_path: Path) -> None:
    produced = produce(producers.accelerate)
    shutil.copytree(produced.root, tmp_path / "checkpoint-4")
    found = inspect(tmp_path / "checkpoint-4")
    assert (found.trainer, found.step, found.world_size) == ("Accelerate", 4, 2)
    assert (found.layout.root.name, found.model.root.name) == ("checkpoint-4", "pytorch_model_fsdp_0")
    assert found.layout.names == (*found.model.names, *open_layout(produced.root / "optimizer_0").names)
    assert found.parameters == numel(produced.truth, "model.")
    assert {kind: group.under for kind, group in found.groups.items()} == {
        "model": ("model",),
        "optimizer": ("optimizer",),
    }
    part = inspect(tmp_path / "checkpoint-4" / "optimizer_0")
    assert (part.trainer, part.step, part.parameters, list(part.groups)) == ("Accelerate", 4, None, ["optimizer"])
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("{}")
    assert inspect(tmp_path / "checkpoint-4").trainer == "Accelerate, by transformers' Trainer"
    (tmp_path / "checkpoint-4" / "optimizer_0" / "__1_0.distcp").unlink()
    torn = inspect(tmp_path / "checkpoint-4")
    assert list(torn.groups) == ["model"]
    assert torn.unread == ("optimizer_0: 1 of 2 files are missing: __1_0.distcp",)


@pytest.mark.parametrize("form", ["sharded", "full", "hf"])
def test_what_our_own_training_saves(tmp_path: Path, form: str) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    Run(tmp_path, state_dict=form).save(5, model, optimizer, scheduler=scheduler, progress={"tokens": 1})
    found = inspect(tmp_path / "ckpt-5")
    assert (found.trainer, found.parameters, found.has_manifest) == ("ckptkit train (FSDP)", 16, True)
    assert list(found.groups) == ["model", "optimizer", "rest"]
    assert set(found.groups["rest"].under) == {"step", "scheduler", "progress"}
    assert found.world_size == (None if form == "full" else 1)
    consolidate(tmp_path / "ckpt-5", tmp_path / "out")
    made = inspect(tmp_path / "out")
    assert made.trainer == f"ckptkit, converted from a `{found.layout.format}` checkpoint"
    assert (made.parameters, made.step, list(made.groups)) == (16, None, ["model"])
    assert inspect(tmp_path / "out" / "model.safetensors").trainer is None


STATE: dict[str, dict[str, Any]] = {
    "Composer": {"state": {"model": {"w": ONES}, "optimizers": {"Adam": {"w": ONES}}}, "rng": {"cpu": ONES}},
    "torchtitan": {"tok_embeddings.weight": ONES, "optimizer": {"w": ONES}, "train_state": {"step": ONES}},
    "torchtune": {"model": {"w": ONES}, "optimizer": {"w": ONES}, "epochs_run": 1},
}


@pytest.mark.parametrize("producer", STATE)
def test_trainers_that_their_keys_tell(tmp_path: Path, producer: str) -> None:
    """Laid out as they do; the libraries themselves are not here."""
    save_alone(STATE[producer], tmp_path / "step-1")
    found = inspect(tmp_path / "step-1")
    assert (found.trainer, found.parameters) == (producer, 12)
    assert found.groups["optimizer"].nbytes >= 48


@pytest.mark.parametrize(
    ("file", "text", "producer"),
    [
        ("meta.pt", "", "Lightning"),
        ("metadata.json", '{"sharded_backend": "torch_dist"}', "Megatron"),
        ("metadata.json", '{"other": 1}', "torch.distributed.checkpoint"),
        ("metadata.json", "{", "torch.distributed.checkpoint"),
        ("notes.txt", "", "torch.distributed.checkpoint"),
    ],
)
def test_trainers_that_their_files_tell(tmp_path: Path, file: str, text: str, producer: str) -> None:
    save_alone({"model": {"w": ONES}}, tmp_path / "step-1")
    (tmp_path / "step-1" / file).write_text(text)
    assert inspect(tmp_path / "step-1").trainer == producer


@pytest.mark.parametrize(
    ("file", "text", "producer"),
    [
        ("config.json", '{"model_type": "llama", "transformers_version": "5.0"}', "transformers"),
        ("config.json", '{"model_type": "llama"}', None),
        ("adapter_config.json", "{}", "PEFT"),
        ("trainer_state.json", "{}", "transformers' Trainer"),
        ("notes.txt", "", None),
    ],
)
def test_libraries_that_wrote_safetensors(tmp_path: Path, file: str, text: str, producer: str | None) -> None:
    save_file({"w": ONES}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / file).write_text(text)
    assert inspect(tmp_path).trainer == producer


def test_what_torch_itself_writes(produce: Produce, tmp_path: Path) -> None:
    assert inspect(produce(producers.hf_shards).root).trainer == "torch.distributed.checkpoint, as safetensors"
    torch.save({"w": ONES}, tmp_path / "model.pt")
    assert inspect(tmp_path / "model.pt").trainer == "torch.save"
    torch.save({"state_dict": {"w": ONES}, "pytorch-lightning_version": "2"}, tmp_path / "step=1.ckpt")
    assert inspect(tmp_path / "step=1.ckpt").trainer == "Lightning"


def test_one_storage_under_two_names_is_a_tie(tmp_path: Path) -> None:
    state = {"a": ONES, "b": ONES, "c": ONES[:2], "d": torch.ones(2), "e": ONES[:0], "f": ONES[:0]}
    torch.save(state, tmp_path / "m.pt")
    found = inspect(tmp_path / "m.pt")
    assert found.ties == (("a", "b"),)
    assert found.parameters == 12 + 8 + 2


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_that_config_ties_counts_once(tmp_path: Path, has_head: bool, is_tied: bool) -> None:
    names = ["model.embed_tokens.weight", *(["lm_head.weight"] if has_head else [])]
    save_alone({"model": {name: ONES.clone() for name in names}}, tmp_path / "ckpt-1")
    config = {**TIED, "tie_word_embeddings": is_tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect(tmp_path)
    head = "model.lm_head.weight" if has_head else "lm_head.weight"
    assert found.ties == (((head, "model.model.embed_tokens.weight"),) if is_tied else ())
    assert found.parameters == (12 if is_tied or not has_head else 24)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 5000])
def test_a_config_that_is_none_says_nothing(tmp_path: Path, text: str) -> None:
    save_file({"model.embed_tokens.weight": ONES}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    assert inspect(tmp_path).ties == ()


def test_where_the_model_cannot_be_told_its_size_is_not(tmp_path: Path) -> None:
    save_alone({"actor": {"w": ONES}, "critic": {"w": ONES}}, tmp_path / "ckpt-1")
    found = inspect(tmp_path)
    assert (found.parameters, list(found.groups)) == (None, ["rest"])
    assert found.groups["rest"].under == ("actor", "critic")
