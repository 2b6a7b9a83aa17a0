"""What must not be read as a whole checkpoint: files that are missing, of another run, or that do not fit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError
from ckptkit.formats.archives.torch_save import read_state_file
from ckptkit.formats.archives.write_archive import make_zip_template
from ckptkit.formats.pickles.inert_pickle import Global, Record, walk_members
from ckptkit.formats.pickles.write_pickle import dump
from tests.conftest import Produce
from tests.faults.damage import flip_bit
from tests.trainers import produced_ranks as produced

FILE = "model_world_size_2_rank_1.pt"


@pytest.fixture
def good(produce: Produce, tmp_path: Path) -> Path:
    """A sound checkpoint of two ranks, to be spoilt."""
    root = produce(produced.two_ranks).root / "fsdp2" / "global_step_2" / "actor"
    return Path(shutil.copytree(root, tmp_path / "actor"))


def error_of(root: Path) -> CkptError:
    with pytest.raises(CkptError) as raised:
        open_layout(root)
    assert raised.value.exit_code == 3
    return raised.value


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Change what is pickled in a file of torch.save, and leave its storages."""
    state = read_state_file(path.parent, path.name)
    data = path.read_bytes()
    storages = {
        name.removeprefix("data/"): data[entry.offset : entry.offset + entry.length]
        for name, entry in state.entries.items()
        if name.startswith("data/")
    }
    change(state.value)
    envelope = make_zip_template(dump(state.value), storages)
    (known,) = envelope.parts
    path.write_bytes(known[1])


def records(value: Any, name: str) -> list[Record]:
    return [p for p in walk_members(value) if isinstance(p, Record) and isinstance(p.of, Global) and p.of.name == name]


@pytest.mark.slow
def test_a_missing_file_is_named_by_its_rank(good: Path) -> None:
    (good / FILE).unlink()
    assert "for rank 1" in error_of(good).message


def test_an_optimizer_of_fewer_ranks_is_refused(good: Path) -> None:
    (good / "optim_world_size_2_rank_0.pt").unlink()
    assert "for rank 0" in error_of(good).message


def test_files_of_two_runs_are_refused(good: Path, produce: Produce) -> None:
    other = produce(produced.three_ranks).root / "orig" / "model_world_size_3_rank_0.pt"
    shutil.copy(other, good)
    assert "2 and 3 ranks" in error_of(good).message


def test_a_renamed_file_is_refused(good: Path, produce: Produce) -> None:
    shutil.copy(good / "model_world_size_2_rank_0.pt", good / FILE)
    assert re.search("mesh of rank 1|on the rank at .* of a mesh", error_of(good).message)


def test_a_file_of_another_mesh_is_refused(good: Path, produce: Produce) -> None:
    shutil.copy(produce(produced.three_ranks).root / "groups" / "model_world_size_3_rank_1.pt", good / FILE)
    assert "mesh" in error_of(good).message


def test_a_last_rank_without_a_file_shows_in_the_tensors(produce: Produce, tmp_path: Path) -> None:
    """Accelerate's names do not say how many ranks there were."""
    root = shutil.copytree(produce(produced.by_accelerate).root / "fsdp2" / "checkpoint-7", tmp_path / "there")
    for kind in ("pytorch_model_fsdp", "optimizer"):
        (root / f"{kind}_0_rank1.bin").unlink()
    assert "found none from rank 1" in error_of(root).message


def test_the_config_must_say_the_same_number(good: Path) -> None:
    (good / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 8}))
    assert "8 ranks" in error_of(good).message


def test_a_flipped_bit_in_a_part_of_a_padded_storage_is_found(good: Path, tmp_path: Path) -> None:
    cut = [(name, c) for name, t in open_layout(good).tensors.items() for c in t.chunks if c.run is not None]
    assert cut
    name, chunk = next((name, chunk) for name, chunk in cut if name.startswith("model.") and chunk.box.numel)
    flip_bit(good / chunk.path, chunk.offset, 3)
    with pytest.raises(CkptError, match="CRC-32") as raised:
        ckptkit.convert(good, tmp_path / "out", to="dcp")
    assert (raised.value.path, raised.value.tensor) == (good / chunk.path, name)


def test_a_partial_sum_is_refused(good: Path) -> None:
    def spoil(value: Any) -> None:
        for record in records(value, "Shard"):
            record.of = Global("torch.distributed.tensor.placement_types", "Partial")

    rewrite(good / FILE, spoil)
    assert "partial sum" in error_of(good).message


def test_an_unknown_subclass_is_refused(good: Path) -> None:
    def spoil(value: Any) -> None:
        for record in records(value, "_rebuild_from_type_v2"):
            record.args = (record.args[0], Global("somewhere", "Float8Tensor"), *record.args[2:])

    rewrite(good / FILE, spoil)
    error = error_of(good)
    assert error.code == "unsupported"
    assert "subclass" in error.message


def test_a_part_of_another_size_is_refused(good: Path) -> None:
    def spoil(value: Any) -> None:
        for record in records(value, "TensorMeta"):
            record.args = (Record(Global("torch", "Size"), ((99, 6),)), *record.args[1:])

    rewrite(good / FILE, spoil)
    assert error_of(good).code == "corrupt"


@pytest.mark.parametrize("factor", [0, -1, 1 << 60, "2"])
def test_an_absurd_stride_is_refused(good: Path, factor: Any) -> None:
    def spoil(value: Any) -> None:
        for record in records(value, "Shard"):
            record.of = Global("torch.distributed.tensor.placement_types", "_StridedShard")
            record.state = {"dim": 0, "split_factor": factor}

    rewrite(good / FILE, spoil)
    assert error_of(good).code == "unsupported"


def test_a_mesh_that_lists_a_rank_twice_is_refused(good: Path) -> None:
    def spoil(value: Any) -> None:
        for record in records(value, "DeviceMesh"):
            record.state["_flatten_rank_map"] = (1, 1)

    rewrite(good / FILE, spoil)
    assert "different ranks" in error_of(good).message


def test_plain_tensors_that_differ_by_rank_are_refused(good: Path) -> None:
    """Parameters that each rank cuts for itself, as some do for experts, look like buffers."""
    path = good / FILE
    state = torch.load(path, weights_only=False)
    state["freqs"] += 1
    torch.save(state, path)
    assert "the values differ between ranks" in error_of(good).message


def test_many_models_in_one_directory_are_refused(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced.by_accelerate).root / "fsdp2" / "checkpoint-7", tmp_path / "there"))
    shutil.copy(root / "pytorch_model_fsdp_0_rank0.bin", root / "pytorch_model_fsdp_1_rank0.bin")
    assert "files of one model, found 2" in error_of(root).message


@pytest.mark.parametrize("state", [{"w": {"exp_avg": torch.ones(2, 3)}}, {7: {"step": torch.tensor(1.0)}}])
def test_a_state_of_what_is_in_no_group_keeps_its_number(tmp_path: Path, state: dict[Any, Any]) -> None:
    optimizer = {"state": {1: {"exp_avg": torch.ones(2)}, **state}, "param_groups": [{"params": [0, 1]}]}
    torch.save({"w": torch.ones(2, 3), "b": torch.ones(2)}, tmp_path / "model_world_size_1_rank_0.pt")
    torch.save(optimizer, tmp_path / "optim_world_size_1_rank_0.pt")
    found = {name for name in open_layout(tmp_path).tensors if name.startswith("optimizer.")}
    (stray,) = state
    assert found == {"optimizer.state.1.exp_avg", f"optimizer.state.{stray}.{next(iter(state[stray]))}"}


def test_groups_of_which_some_have_no_state_are_named_if_the_others_tell(tmp_path: Path) -> None:
    optimizer = {
        "state": {0: {"exp_avg": torch.ones(2, 3)}, 2: {"exp_avg": torch.ones(2)}},
        "param_groups": [{"params": [0]}, {"params": [1, 2]}],
    }
    model = {"norm": torch.ones(2), "w": torch.ones(2, 3), "b": torch.ones(2)}
    torch.save(model, tmp_path / "model_world_size_1_rank_0.pt")
    torch.save(optimizer, tmp_path / "optim_world_size_1_rank_0.pt")
    found = {name for name in open_layout(tmp_path).tensors if name.startswith("optimizer.")}
    assert found == {"optimizer.state.w.exp_avg", "optimizer.state.b.exp_avg"}


OLD = {"torch.distributed.tensor": "torch.distributed._tensor"}


@pytest.mark.parametrize("with_list", [True, False])
def test_reads_what_older_torch_pickled(good: Path, produce: Produce, with_list: bool) -> None:
    """Simulated: names and attributes are rewritten to those of torch 2.4, which is not at hand.

    Classes in `torch.distributed._tensor`, a mesh that is an integer tensor, no order of cuts.
    """

    def age(value: Any) -> None:
        for part in walk_members(value):
            if isinstance(part, Record) and isinstance(part.of, Global):
                part.of = Global(part.of.module.replace(*next(iter(OLD.items()))), part.of.name)
        for record in records(value, "_rebuild_from_type_v2"):
            kind = Global("torch.distributed._tensor.api", "DTensor")
            record.args = (record.args[0], kind, (kind, *record.args[2][1:]), record.args[3])
        for record in records(value, "DeviceMesh"):
            state = record.state
            record.state = {"device_type": "cpu", "mesh": state["_rank_map"], "mesh_dim_names": ("fsdp",)}
            if with_list:
                record.state["_flatten_mesh_list"] = (0, 1)
        for record in records(value, "DTensorSpec"):
            record.state.pop("shard_order", None)  # torch 2.10 has not both
            record.state.pop("use_strided_shard_as_shard_order", None)

    new = open_layout(good)
    for path in good.glob("*_world_size_*.pt"):
        if not path.name.startswith("extra"):
            rewrite(path, age)
    old = open_layout(good)
    assert old.specs == new.specs
    boxes = {name: [chunk.box for chunk in tensor.chunks] for name, tensor in new.tensors.items()}
    assert {name: [chunk.box for chunk in tensor.chunks] for name, tensor in old.tensors.items()} == boxes
