"""`--overwrite` replaces one checkpoint, and refuses a directory with anything else in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

import ckptkit
from ckptkit import consolidate, convert, reshard
from ckptkit.errors import Occupied
from ckptkit.storage import Writer
from tests.producers import counted, save_alone


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in shards, with another file beside them."""
    state = {"model": {"w": counted(7, 3)}, "optim": {"state": {"w": {"exp_avg": counted(7, 3)}}}}
    save_alone(state, tmp_path / "source")
    (tmp_path / "source" / "data").mkdir()
    (tmp_path / "source" / "data" / "order.txt").write_text("3 1 2")
    return tmp_path / "source"


@pytest.mark.parametrize("to", ["dcp", "pt", "hf"])
def test_a_folder_of_notes_is_not_replaced(source: Path, tmp_path: Path, to: str) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "ideas.txt").write_text("one")
    with pytest.raises(Occupied, match=r"does not know: ideas\.txt") as caught:
        convert(source, notes, to=to, overwrite=True)
    assert caught.value.path == notes
    assert caught.value.exit_code == 5
    assert (notes / "ideas.txt").read_text() == "one"


def test_a_run_with_a_pinned_checkpoint_is_not_replaced(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(source, run / "ckpt-3")
    ckptkit.pin(run / "ckpt-3")
    with pytest.raises(Occupied, match="ckpt-3"):
        consolidate(source, run, overwrite=True)
    assert (run / "ckpt-3" / ".metadata").exists()


def test_several_models_side_by_side_are_not_replaced(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        consolidate(source, tmp_path / "models" / name)
    with pytest.raises(Occupied, match="a, b"):
        consolidate(source, tmp_path / "models", overwrite=True)
    assert (tmp_path / "models" / "a" / "model.safetensors").exists()


@pytest.mark.parametrize("to", ["dcp", "pt", "hf"])
def test_an_output_is_replaced_unless_a_file_was_added_to_it(source: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        convert(source, out, to=to, overwrite=True)
    for other in ("hf", "pt", "dcp"):
        shutil.rmtree(out / "data", ignore_errors=True)
        convert(source, out, to=other, overwrite=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(Occupied, match=r"notes\.txt"):
        convert(source, out, to=to, overwrite=True)
    assert (out / "notes.txt").exists()


def test_a_checkpoint_of_torch_is_replaced(source: Path, tmp_path: Path) -> None:
    save_alone({"w": counted(3)}, tmp_path / "out")
    assert reshard(source, tmp_path / "out", to=2, overwrite=True).world_size == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_writer_does_not_replace_files_of_other_people(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "out", overwrite=True)
    for number in range(2):
        dcp.save({"w": counted(3) + number}, storage_writer=writer, no_dist=True)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises((Occupied, CheckpointException), match=r"notes\.txt"):
        dcp.save({"w": counted(3)}, storage_writer=writer, no_dist=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def shards(root: Path) -> None:
    state = {"model": {"w": counted(7, 3)}, "optim": {"state": {"w": {"exp_avg": counted(7, 3)}}}}
    save_alone(state, root)


def trainer(root: Path) -> None:
    root.mkdir()
    save_file({"w": counted(7, 3)}, root / "model.safetensors")
    state = {0: {"step": torch.tensor(1.0), "exp_avg": counted(7, 3)}}
    torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}, root / "optimizer.pt")


def parts(root: Path) -> None:
    save_alone({"w": counted(7, 3)}, root / "pytorch_model_fsdp_0")
    save_alone({"state": {"w": {"exp_avg": counted(7, 3)}}}, root / "optimizer_0")


def one_file(root: Path) -> None:
    root.mkdir()
    torch.save({"model": {"w": counted(7, 3)}, "optimizer": {"state": {0: {"exp_avg": counted(7, 3)}}}}, root / "a.pt")


TRAININGS = {"shards": shards, "trainer": trainer, "parts": parts, "file": one_file}


@pytest.mark.parametrize("make", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize("to", ["hf", "dcp", "pt", "average"])
def test_a_checkpoint_of_a_training_is_not_replaced(
    source: Path, tmp_path: Path, make: Callable[[Path], None], to: str
) -> None:
    make(tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(Occupied, match="the destination is a checkpoint of a training, which cannot be made again"):
        if to == "average":
            ckptkit.average([source, source], tmp_path / "out", names="keep", overwrite=True)
        else:
            convert(source, tmp_path / "out", to=to, overwrite=True)
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_training_replaces_its_own_checkpoint(source: Path, tmp_path: Path) -> None:
    """A later save, a copy of another step, and a file of all states: each is of the kind that it replaces."""
    shards(tmp_path / "out")
    dcp.save({"w": counted(3)}, storage_writer=Writer(tmp_path / "out", overwrite=True), no_dist=True)
    shards(tmp_path / "copy")
    ckptkit.cp(source, tmp_path / "copy", overwrite=True)
    for _ in range(2):
        convert(source, tmp_path / "all.pt", to="pt", overwrite=True)
    consolidate(source, tmp_path / "weights", names="keep")
    shards(tmp_path / "other")
    with pytest.raises(Occupied, match="a checkpoint of a training"):
        ckptkit.cp(tmp_path / "weights", tmp_path / "other", overwrite=True)


def test_a_model_replaces_an_adapter_with_its_config(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 4)}, out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    consolidate(source, out, overwrite=True)
    assert not list(out.glob("adapter*"))


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize(
    "place",
    [
        *("hf", "huggingface", "consolidated", "lora_adapter", "tokenizer", "trainer", "optimizer_0", "global_step5"),
        *("adapter_model.safetensors", "model_1.safetensors", "consolidated.safetensors", "consolidated.00.pth"),
        *("model.fp16.safetensors", "pytorch_model.bin", "training_state.pt", "rank0.pt", "extra_state.pt"),
    ],
)
def test_another_model_in_an_output_is_not_replaced(
    source: Path, tmp_path: Path, place: str, has_manifest: bool
) -> None:
    """Its directory or file may have a name that trainers give to parts of a checkpoint."""
    out, other = tmp_path / "out", tmp_path / "out" / place
    consolidate(source, out, names="keep")
    if not has_manifest:
        (out / "ckptkit.json").unlink()
    if "." not in place:
        other.mkdir()
        other /= "model.safetensors"
    tensors = {"w": counted(7, 3) + 1}
    save_file(tensors, other) if other.suffix == ".safetensors" else torch.save(tensors, other)
    with pytest.raises(Occupied):
        consolidate(source, out, names="keep", overwrite=True)
    assert other.exists()


@pytest.mark.parametrize("add", [trainer, shards])
def test_a_training_that_was_saved_into_an_output_is_not_replaced(
    source: Path, tmp_path: Path, add: Callable[[Path], None]
) -> None:
    consolidate(source, tmp_path / "out", names="keep")
    add(tmp_path / "training")
    shutil.copytree(tmp_path / "training", tmp_path / "out", dirs_exist_ok=True)
    with pytest.raises(Occupied, match=r"a checkpoint of a training|does not know"):
        consolidate(source, tmp_path / "out", names="keep", overwrite=True)


@pytest.mark.parametrize("damage", [b"", b"{", b"{}"])
def test_a_damaged_output_is_replaced(source: Path, tmp_path: Path, damage: bytes) -> None:
    consolidate(source, tmp_path / "out", names="keep", max_shard_size=40)
    (tmp_path / "out" / "model.safetensors.index.json").write_bytes(damage)
    (tmp_path / "out" / "ckptkit.json").unlink()
    consolidate(source, tmp_path / "out", names="keep", overwrite=True)
    assert len(ckptkit.open(tmp_path / "out")) == 1


def test_a_file_of_all_states_is_not_replaced_by_a_model(tmp_path: Path) -> None:
    one_file(tmp_path / "training")
    file, before = tmp_path / "training" / "a.pt", (tmp_path / "training" / "a.pt").read_bytes()
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(Occupied, match="the destination is a checkpoint of a training"):
        convert(tmp_path / "model.safetensors", file, to="pt", overwrite=True)
    assert file.read_bytes() == before


def test_a_delta_is_replaced_by_a_delta_only(source: Path, tmp_path: Path) -> None:
    for name in ("old", "new"):
        ckptkit.consolidate(source, tmp_path / name)
    ckptkit.delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    with pytest.raises(Occupied, match="the destination is no checkpoint, such as a delta"):
        ckptkit.consolidate(source, tmp_path / "delta", overwrite=True)
    with pytest.raises(Occupied, match="the destination is no checkpoint, such as a delta"):
        ckptkit.cp(source, tmp_path / "delta", overwrite=True)
    assert (tmp_path / "delta/delta.json").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "trainer_state.json", "latest", "random_states_0.pkl", "common.pt"])
def test_a_file_that_was_added_to_an_export_stays(source: Path, tmp_path: Path, name: str) -> None:
    """Whatever its name: the manifest lists what ckptkit wrote. A model without a manifest may have a tokenizer."""
    for manifest in (True, False):
        out = tmp_path / f"out-{manifest}"
        consolidate(source, out)
        (out / name).write_text("{}")
        if manifest:
            with pytest.raises(Occupied, match=f"entries that ckptkit does not know: {name}"):
                consolidate(source, out, overwrite=True)
        elif name == "tokenizer.json":
            (out / "ckptkit.json").unlink()
            consolidate(source, out, overwrite=True)
