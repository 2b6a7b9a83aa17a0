"""dcp.load through us: the names, entries and errors of any checkpoint, for models under every wrapper."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import Corrupt, Mismatch, NotACheckpoint, Unsupported, Usage
from ckptkit.layout.box import Box
from ckptkit.layout.plan import restrict_to_needed
from ckptkit.models.names.weights import find_weights
from ckptkit.storage import LayoutReader, Reader
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from tests import producers
from tests.conftest import Produce
from tests.producers import counted
from tests.storage.states import assert_same_bits, blank, cause_of, flip, of_a_model, write_hf, write_pt
from tests.training.saving.networks import Network, differing, whole, wrap

pytestmark = pytest.mark.usefixtures("alone")


def test_a_training_state_is_loaded_nested(produce: Produce) -> None:
    saved = produce(producers.fsdp2)
    found = {"model": blank(of_a_model(saved.truth)), "optim": {"state": {"up.weight": {"exp_avg": torch.ones(7, 6)}}}}
    dcp.load(found, storage_reader=Reader(saved.root))
    assert_same_bits(found["model"], of_a_model(saved.truth))  # type: ignore[arg-type]
    moment = found["optim"]["state"]["up.weight"]["exp_avg"]  # type: ignore[index]
    assert torch.equal(moment, saved.truth["optim.state.up.weight.exp_avg"])


def test_torch_can_make_the_tensors_itself(tmp_path: Path) -> None:
    path = write_pt(tmp_path / "f.pt", {"a.b": counted(3, 2), "s": torch.tensor(2.5)})
    state = _load_state_dict_from_keys({"model"}, storage_reader=Reader(path))
    assert_same_bits(state["model"], {"a.b": counted(3, 2), "s": torch.tensor(2.5)})


def test_every_name_can_be_read_under_a_key(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", {"a.b": counted(3, 2), "c": counted(2)})
    found = {"model": {"a.b": torch.ones(3, 2), "c": torch.ones(2)}}
    dcp.load(found, storage_reader=Reader(path, under="model"))
    assert_same_bits(found["model"], {"a.b": counted(3, 2), "c": counted(2)})
    made = _load_state_dict_from_keys(storage_reader=Reader(path, under="app.model"))
    assert_same_bits(made["app"]["model"], {"a.b": counted(3, 2), "c": counted(2)})


def test_a_head_that_was_left_out_is_there_again(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", {"model.embed_tokens.weight": counted(5, 3)})
    for ties in (True, False):
        (path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": ties}))
        found = {"lm_head.weight": torch.ones(5, 3), "model.embed_tokens.weight": torch.ones(5, 3)}
        if ties:
            dcp.load(found, storage_reader=Reader(path))
            assert torch.equal(found["lm_head.weight"], counted(5, 3))
        else:
            with pytest.raises(CheckpointException) as caught:
                dcp.load(found, storage_reader=Reader(path))
            assert isinstance(cause_of(caught), Mismatch)
            assert cause_of(caught).tensor == "lm_head.weight"


ENTRIES: dict[str, Any] = {
    "step": 7,
    "rates": [0.1, 0.2],
    "place": ({"epoch": 3, 7: {}, "seen": [1, (2, "two")], "none": None, "tensor": torch.arange(3)},),
}


def compare_entries(found: dict[str, Any]) -> None:
    (place,) = found["place"]
    assert torch.equal(place.pop("tensor"), torch.arange(3))
    assert (found["step"], found["rates"]) == (7, [0.1, 0.2])
    assert place == {"epoch": 3, 7: {}, "seen": [1, (2, "two")], "none": None}


def test_entries_that_are_no_tensors_are_read(tmp_path: Path) -> None:
    dcp.save({"w": counted(3), **ENTRIES}, checkpoint_id=tmp_path / "dcp")
    found: dict[str, Any] = {"w": torch.ones(3), "step": 0, "rates": None, "place": None}
    dcp.load(found, storage_reader=Reader(tmp_path / "dcp"))
    assert torch.equal(found["w"], counted(3))
    compare_entries(found)


def test_entries_of_a_file_of_torch_save_are_read(tmp_path: Path) -> None:
    torch.save({"w": counted(3), "step": 7, "rates": [0.1, 0.2], "name": "x"}, tmp_path / "f.pt")
    found: dict[str, Any] = {"w": torch.ones(3), "step": 0, "rates": None, "name": None}
    dcp.load(found, storage_reader=Reader(tmp_path / "f.pt"))
    assert torch.equal(found.pop("w"), counted(3))
    assert found == {"step": 7, "rates": [0.1, 0.2], "name": "x"}


class Trap:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_code_of_an_entry_is_run(tmp_path: Path) -> None:
    dcp.save({"w": counted(3), "trap": Trap(tmp_path / "sprung")}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.ones(3), "trap": None}, storage_reader=Reader(tmp_path / "dcp"))
    cause = cause_of(caught)
    assert isinstance(cause, Unsupported)
    assert (cause.tensor, cause.path) == ("trap", tmp_path / "dcp" / "__0_0.distcp")
    assert not (tmp_path / "sprung").exists()
    dcp.load({"w": torch.ones(3)}, storage_reader=Reader(tmp_path / "dcp"))


def test_a_damaged_entry_is_an_error_that_names_it(tmp_path: Path) -> None:
    dcp.save({"text": "x" * 50}, checkpoint_id=tmp_path)
    blob = open_layout(tmp_path).blobs["text"]
    flip(tmp_path / blob.path, (tmp_path / blob.path).read_bytes().index(b"x" * 50) + 20)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"text": None}, storage_reader=Reader(tmp_path))
    cause = cause_of(caught)
    assert isinstance(cause, Corrupt)
    assert cause.tensor == "text"


def test_what_cannot_be_opened_is_an_error_of_ours(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "absent")
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.ones(3)}, storage_reader=reader)
    assert isinstance(cause_of(caught), NotACheckpoint)
    found = {"w": torch.ones(3)}
    dcp.load(found, checkpoint_id=write_hf(tmp_path / "hf", {"w": counted(3)}), storage_reader=reader)
    assert torch.equal(found["w"], counted(3))


def test_what_was_changed_is_read_anew(tmp_path: Path) -> None:
    path = write_pt(tmp_path / "f.pt", {"w": counted(3)})
    reader, found = Reader(path), {"model": {"w": torch.ones(3)}}
    dcp.load(found, storage_reader=reader)
    write_pt(path, {"other": counted(7), "w": counted(3) + 1})
    dcp.load(found, storage_reader=reader)
    assert torch.equal(found["model"]["w"], counted(3) + 1)


def test_a_reader_belongs_to_its_layout(tmp_path: Path) -> None:
    reader = LayoutReader(open_layout(write_hf(tmp_path / "hf", {"w": counted(2)})))
    reader.reset()
    with pytest.raises(Usage):
        reader.reset(tmp_path)
    assert not reader.validate_checkpoint_id(tmp_path)


def test_no_chunk_is_looked_for_that_is_not_needed(produce: Produce) -> None:
    layout = find_weights(open_layout(produce(producers.fsdp2).root)).layout
    stored = layout.tensors["up.weight"]
    assert [chunk.size for chunk in stored.chunks] == [(3, 6), (3, 6), (1, 6)]
    rows = stored.chunks[0]._replace(box=Box((4, 0), (3, 6)))
    wanted = replace(layout, tensors={"up.weight": replace(stored, chunks=(rows,))})
    assert {name: t.chunks for name, t in restrict_to_needed(layout, wanted).tensors.items()} == {
        "up.weight": stored.chunks[1:]
    }


# -- together ----------------------------------------------------------------------------------------------------------

WRAPPERS = {
    1: ("fsdp2", "fsdp1 FULL_SHARD", "fsdp1 NO_SHARD"),
    4: ("fsdp2", "hsdp2", "fsdp1 FULL_SHARD", "fsdp1 FULL_SHARD bare", "fsdp1 HYBRID_SHARD", "fsdp1 SHARD_GRAD_OP"),
}


def load_under_wrappers(paths: dict[str, Path], place: RankPlace, report: Report) -> None:
    """Load the same weights from each path into a model under each wrapper, and compare them whole."""
    warnings.simplefilter("ignore")  # of FSDP1
    with process_group(place, "cpu"):
        expected = dict(Network(1).state_dict())
        for wrapper in WRAPPERS[place.world_size]:
            for under, path in paths.items():
                state: dict[str, Any] = get_model_state_dict(wrap(Network(0), wrapper))
                # else a rank without a shard of one of FSDP1's takes the checkpoint for one of torch 2.3 (2.13)
                planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
                dcp.load({"model": state}, storage_reader=Reader(path, under=under), planner=planner)
                report((wrapper, differing({name: whole(t) for name, t in state.items()}, expected)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_model_under_any_wrapper_is_loaded(ranks: int, tmp_path: Path) -> None:
    weights = {name: t.clone() for name, t in Network(1).state_dict().items()}  # tied: safetensors want two
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp")
    paths = {"model": write_hf(tmp_path / "hf", weights), "": tmp_path / "dcp"}
    heard: list[tuple[str, list[str]]] = []
    launch(partial(load_under_wrappers, paths), ranks, heard.append)
    assert [what for what in heard if what[1]] == []
    assert len(heard) == 2 * ranks * len(WRAPPERS[ranks])


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (torch.zeros(3, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(2).expand(3, 2), "an expanded tensor, whose elements share memory"),
    ],
    ids=["sparse", "expanded"],
)
def test_a_tensor_without_bytes_of_its_own_is_refused_by_name(tmp_path: Path, place: torch.Tensor, words: str) -> None:
    path = write_hf(tmp_path / "hf", {"a.b": counted(3, 2), "c": counted(2)})
    ours = torch.ones(2)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"a.b": place, "c": ours}, storage_reader=Reader(path))
    error = cause_of(raised)
    assert isinstance(error, Unsupported)
    assert (error.path, error.tensor) == (path, "a.b")
    assert error.message.startswith("cannot load into ")
    assert error.message.endswith(words)
    assert torch.equal(ours, torch.ones(2))
