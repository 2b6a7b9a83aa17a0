"""Checkpoints of torch_checkpointing, held against the live state; and metadata that must not be believed."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.errors import CkptError
from tests.conftest import Produce
from tests.formats.ranks.test_ranks import assert_is, of
from tests.trainers import produced_packages as produced

pytest.importorskip("torch_checkpointing", reason="torch_checkpointing is not installed")
KINDS = ("torch", "safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_holds_the_live_state(produce: Produce, kind: str) -> None:
    made = produce(produced.by_torch_checkpointing)
    checkpoint = Checkpoint.open(made.root / kind)
    assert checkpoint.layout.format == "torch_checkpointing"
    assert (checkpoint.world_size, checkpoint.problems()) == (2, [])
    assert "step" in checkpoint.layout.blobs
    assert_is(checkpoint.layout, of("any", made.truth))


def rewrite(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    metadata = pickle.loads((root / "metadata.pkl").read_bytes())
    change(metadata)
    (root / "metadata.pkl").write_bytes(pickle.dumps(metadata))


@pytest.fixture(params=KINDS)
def good(request: pytest.FixtureRequest, produce: Produce, tmp_path: Path) -> Path:
    """A sound checkpoint, to be spoilt."""
    root = produce(produced.by_torch_checkpointing).root / request.param
    return Path(shutil.copytree(root, tmp_path / request.param))


def test_reads_metadata_of_version_1(good: Path, produce: Produce) -> None:
    """Simulated: rewritten as the package's own reader of version 1.0 expects them."""

    def age(metadata: dict[str, Any]) -> None:
        import json

        items = metadata.pop("metadata")
        metadata["version"] = "1.0"
        metadata["metadata"] = {
            json.dumps([name, *json.loads(path)]): groups
            for name, item in items.items()
            for path, groups in item["nested_path_to_metadata"].items()
        }
        metadata["rank_to_layout_info_mappings"] = {
            str(rank): {name: item["rank_to_layout_info"][rank] for name, item in items.items()} for rank in range(2)
        }

    rewrite(good, age)
    from torch_checkpointing.distributed_metadata import DistributedMetadata

    DistributedMetadata.from_dict(pickle.loads((good / "metadata.pkl").read_bytes()))
    assert_is(open_layout(good), of("any", produce(produced.by_torch_checkpointing).truth))


def first_group(metadata: dict[str, Any]) -> dict[str, Any]:
    paths = metadata["metadata"]["model"]["nested_path_to_metadata"]
    group: dict[str, Any] = paths['["embed.weight"]'][0]["sharding_metadata"]
    return group


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "more ranks": (lambda m: m.update(world_size=3), "missing"),
    "no ranks": (lambda m: m.update(world_size=0), "ranks, found 0"),
    "a later version": (lambda m: m.update(version="3.0"), "version"),
    "a name that is called": (lambda m: m.update(version=Path("x")), "does not expect `pathlib.PosixPath`"),
    "another kind": (lambda m: first_group(m).update(type="Other"), "Other"),
    "a partial sum": (lambda m: first_group(m)["data"].update(placements=[{"type": "Partial"}]), "Partial"),
    "no such axis": (lambda m: first_group(m)["data"].update(placements=[{"type": "Shard", "dim": 7}]), "malformed"),
    "a mesh of one": (lambda m: first_group(m)["data"]["mesh_spec"].update(mesh_data=(0,)), "malformed"),
    "no items": (lambda m: m.update(metadata=None), "malformed"),
}


@pytest.mark.parametrize("spoil", BAD)
def test_refuses_metadata_that_do_not_fit(good: Path, spoil: str) -> None:
    change, words = BAD[spoil]
    rewrite(good, change)
    with pytest.raises(CkptError, match=words) as raised:
        open_layout(good)
    assert raised.value.exit_code in (3, 5)


@pytest.mark.parametrize("file", ["../model_0.pt", "/etc/passwd", "a/../../b", ""])
def test_no_file_is_looked_for_elsewhere(good: Path, file: str) -> None:
    def spoil(metadata: dict[str, Any]) -> None:
        info = {"file_path": file, "serialization_format": {"type": "TorchSerialization"}}
        metadata["metadata"]["model"]["rank_to_layout_info"][0] = info

    rewrite(good, spoil)
    with pytest.raises(CkptError) as raised:
        open_layout(good)
    assert raised.value.code == "unsafe"


def test_a_missing_file_is_named(good: Path) -> None:
    next(good.glob("model_1.*")).unlink()
    assert not Checkpoint.at(good).is_complete
    with pytest.raises(CkptError, match="the file is missing") as raised:
        open_layout(good)
    assert raised.value.path is not None
    assert raised.value.path.name.startswith("model_1.")


def test_without_metadata_dtensors_tell_the_format(produce: Produce, tmp_path: Path) -> None:
    """The package writes none where no item can be resharded; `step_0.pt` is no checkpoint of step 0."""
    made = produce(produced.by_torch_checkpointing)
    root = Path(shutil.copytree(made.root / "torch", tmp_path / "saved", ignore=shutil.ignore_patterns("metadata.pkl")))
    checkpoint = Checkpoint.open(root)
    assert checkpoint.layout.format == "torch_checkpointing"
    assert (checkpoint.world_size, checkpoint.problems()) == (2, [])
    assert "step" in checkpoint.layout.blobs
    assert_is(checkpoint.layout, of("any", made.truth))


def test_without_metadata_safetensors_are_refused(produce: Produce, tmp_path: Path) -> None:
    source = produce(produced.by_torch_checkpointing).root / "safetensors"
    root = Path(shutil.copytree(source, tmp_path / "saved", ignore=shutil.ignore_patterns("metadata.pkl")))
    with pytest.raises(CkptError, match=r"where the tensors in `model_0\.safetensors` belong") as raised:
        Checkpoint.open(root).layout  # noqa: B018 - it is read when it is asked for
    assert raised.value.path == root / "metadata.pkl"


def test_files_of_epochs_remain_a_run(tmp_path: Path) -> None:
    for epoch in range(2):
        torch.save({"weight": torch.full((3,), float(epoch))}, tmp_path / f"epoch_{epoch}.pt")
    assert Checkpoint.open(tmp_path).path == tmp_path / "epoch_1.pt"
