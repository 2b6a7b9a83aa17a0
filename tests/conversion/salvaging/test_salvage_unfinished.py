"""What is saved of a DCP save that never wrote its `.metadata`, by the metadata of another step of the same run."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit import inspect, reshard, verify
from ckptkit.errors import CkptError, Corrupt, Mismatch
from ckptkit.state.report import Converted
from tests import producers
from tests.conftest import Produce
from tests.conversion.salvaging.damage import assert_truth, bytes_of_tensors, cut, flip, items_of_tensors, load_dcp

State = dict[str, Any]


def state_at(step: int) -> State:
    """What one rank saves: two tensors that look alike, others, and entries that are not tensors."""
    torch.manual_seed(step)
    model = {"a": torch.randn(6, 4), "b": torch.randn(6, 4), "c": torch.randn(5).bfloat16(), "empty": torch.empty(0, 3)}
    return {"model": model, "step": step, "seen": {"tokens": step * 70_000, "name": "x" * (step % 7)}}


def save(state: State, root: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(state, checkpoint_id=root, no_dist=True)
    return root


def unfinished(root: Path) -> Path:
    """The files of a save without what is written last."""
    (root / ".metadata").unlink()
    return root


def salvage(root: Path, other: Path, out: Path) -> Converted:
    return reshard(root, out, to=1, salvage=True, fill_from=other, sync=False)


def test_metadata_of_another_step_describes_the_files(tmp_path: Path) -> None:
    other, now = save(state_at(3), tmp_path / "ckpt-3"), state_at(300)
    done = salvage(unfinished(save(now, tmp_path / "ckpt-300")), other, tmp_path / "out")
    assert done.salvaged is not None
    assert not done.salvaged.lost
    assert not done.salvaged.filled
    assert not done.salvaged.is_fully_from_source  # the names come from elsewhere
    assert any(str(other) in note and "every item" in note for note in done.notes)
    found: State = {**{name: torch.empty_like(value) for name, value in now["model"].items()}}
    loaded: State = {"model": found, "step": 0, "seen": {"tokens": 0, "name": ""}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_truth(loaded.pop("model"), now["model"])
    assert loaded == {"step": now["step"], "seen": now["seen"]}
    assert json.loads((tmp_path / "out" / "salvage.json").read_text())["described_by"] == str(other)
    assert inspect(tmp_path / "out").salvaged is not None
    assert all(part.is_ok for part in verify(tmp_path / "out"))


def test_files_of_real_ranks_with_no_byte_of_the_other(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = unfinished(Path(shutil.copytree(made.root, tmp_path / "damaged")))
    other = Path(shutil.copytree(made.root, tmp_path / "other"))
    for runs in bytes_of_tensors(other).values():
        for file, start, _ in runs:
            flip(other / file, start)
    done = salvage(root, other, tmp_path / "out")
    assert done.salvaged is not None
    assert not done.salvaged.lost
    assert not done.salvaged.filled
    found = load_dcp(tmp_path / "out")
    assert found.keys() == made.truth.keys()
    assert_truth(found, made.truth)


def test_a_file_that_ends_early_is_matched_as_far_as_it_goes(tmp_path: Path) -> None:
    before, now = state_at(3), state_at(4)
    other, root = save(before, tmp_path / "ckpt-3"), save(now, tmp_path / "ckpt-4")
    ((file, start, stop),) = items_of_tensors(root)["model.b"]
    cut(unfinished(root) / file, (start + stop) // 2)
    done = salvage(root, other, tmp_path / "out")
    assert done.salvaged is not None
    filled = {one.name for one in done.salvaged.filled}
    assert "model.b" in filled
    assert "model.a" not in filled
    truth = {f"model.{name}": (before if f"model.{name}" in filled else now)["model"][name] for name in now["model"]}
    assert_truth(load_dcp(tmp_path / "out"), truth)


def test_a_file_of_a_rank_that_is_missing(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = unfinished(Path(shutil.copytree(made.root, tmp_path / "damaged")))
    (root / "__1_0.distcp").unlink()
    done = salvage(root, made.root, tmp_path / "out")
    assert done.salvaged is not None
    assert done.salvaged.filled
    assert not done.salvaged.lost
    assert_truth(load_dcp(tmp_path / "out"), made.truth)


def change(state: State, name: str, value: torch.Tensor) -> State:
    return {**state, "model": {**state["model"], name: value}}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (change(state_at(3), "b", torch.randn(4, 6)), r"expected float32\[4,6\] in \d+ bytes, found float32\[6,4\]"),
        (change(state_at(3), "c", torch.randn(5).half()), r"expected float16\[5\] in \d+ bytes, found bfloat16\[5\]"),
        (change(state_at(3), "a", torch.randn(600, 4)), r"item \d of 7: expected float32\[600,4\] in \d+ bytes, found"),
        ({**state_at(3), "step": torch.tensor(3)}, r"item \d of 7: expected"),
        ({**state_at(3), "model": dict(reversed(state_at(3)["model"].items()))}, r"item \d of 7: expected"),
    ],
)
def test_an_item_that_differs_is_named(other: State, message: str, tmp_path: Path) -> None:
    root = unfinished(save(state_at(4), tmp_path / "ckpt-4"))
    with pytest.raises(Mismatch, match=message) as caught:
        salvage(root, save(other, tmp_path / "ckpt-3"), tmp_path / "out")
    assert caught.value.path == root / "__0_0.distcp"
    assert str(caught.value.hint).startswith("pass --fill-from")
    assert not (tmp_path / "out").exists()


def test_a_file_that_ends_with_an_item_lacks_the_items_behind_it(tmp_path: Path) -> None:
    """Whether it was cut there or planned so nothing says: they are not in the file, and the account says so."""
    other = save(change(state_at(3), "z", torch.randn(1, 1)), tmp_path / "ckpt-3")
    done = salvage(unfinished(save(state_at(4), tmp_path / "ckpt-4")), other, tmp_path / "out")
    assert done.salvaged is not None
    assert [one.name for one in done.salvaged.filled] == ["model.z"]


def test_bytes_behind_the_last_item(tmp_path: Path) -> None:
    other, root = save(state_at(3), tmp_path / "ckpt-3"), unfinished(save(state_at(4), tmp_path / "ckpt-4"))
    with (root / "__0_0.distcp").open("ab") as file:
        file.write(bytes(64))
    with pytest.raises(Mismatch, match=r"expected \d+ bytes in 7 items, found \d+"):
        salvage(root, other, tmp_path / "out")


def test_a_file_that_the_other_does_not_have(tmp_path: Path) -> None:
    other, root = save(state_at(3), tmp_path / "ckpt-3"), unfinished(save(state_at(4), tmp_path / "ckpt-4"))
    shutil.copy(root / "__0_0.distcp", root / "__1_0.distcp")
    with pytest.raises(Mismatch, match="expected no file of this name") as caught:
        salvage(root, other, tmp_path / "out")
    assert caught.value.path == root / "__1_0.distcp"


def test_without_another_checkpoint_the_hint_names_one(tmp_path: Path) -> None:
    root = unfinished(save(state_at(4), tmp_path / "ckpt-4"))
    with pytest.raises(Corrupt, match="did not finish") as caught:
        reshard(root, tmp_path / "out", to=1, salvage=True)
    assert "--fill-from OLDER" in str(caught.value.hint)


def test_a_damaged_checkpoint_with_metadata_keeps_its_own(tmp_path: Path) -> None:
    other, root = (
        save(change(state_at(3), "b", torch.randn(4, 6)), tmp_path / "ckpt-3"),
        save(state_at(4), tmp_path / "ckpt-4"),
    )
    done = salvage(root, other, tmp_path / "out")
    assert done.salvaged is not None
    assert done.salvaged.is_fully_from_source


def test_weights_of_another_format_describe_nothing(tmp_path: Path) -> None:
    root = unfinished(save(state_at(4), tmp_path / "ckpt-4"))
    torch.save(state_at(3)["model"], tmp_path / "model.pt")
    with pytest.raises(CkptError, match="did not finish"):
        salvage(root, tmp_path / "model.pt", tmp_path / "out")


def test_a_file_that_ends_early_in_an_item_that_differs(tmp_path: Path) -> None:
    """However little is left of it, as long as something before its numbers is."""
    other = save(change(state_at(3), "b", torch.randn(600, 4)), tmp_path / "ckpt-3")
    whole = save(state_at(4), tmp_path / "ckpt-4")
    ((file, start, stop),) = items_of_tensors(whole)["model.b"]
    for keep in (stop, stop - 1, start + 600):
        root = unfinished(Path(shutil.copytree(whole, tmp_path / f"cut-{keep}")))
        cut(root / file, keep)
        with pytest.raises(Mismatch, match=r"expected float32\[600,4\]"):
            salvage(root, other, tmp_path / "out")
