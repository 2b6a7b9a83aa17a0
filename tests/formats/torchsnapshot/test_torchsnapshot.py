"""Snapshots of torchsnapshot, held against the live state; and manifests that must not be believed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.errors import CkptError
from ckptkit.formats import locate
from ckptkit.formats.archives.values import load_value
from ckptkit.formats.torchsnapshot.plain_lists import join_lists
from tests.conftest import Produce
from tests.formats.contract import raw_bytes
from tests.raw import contents
from tests.trainers import produced_packages as produced

torchsnapshot = pytest.importorskip("torchsnapshot", reason="torchsnapshot is not installed")
KINDS = ("batched", "plain")


@pytest.mark.parametrize("kind", KINDS)
def test_holds_the_live_state(produce: Produce, kind: str) -> None:
    made = produce(produced.by_torchsnapshot)
    checkpoint = Checkpoint.open(made.root / kind)
    layout = locate(checkpoint.layout)
    assert (layout.format, checkpoint.world_size or layout.world_size, checkpoint.problems()) == (
        "torchsnapshot",
        2,
        [],
    )
    own = {f"own_state.rank_{rank}.progress.own": made.truth[f"own {rank}"] for rank in range(2)}
    expected = {name: tensor for name, tensor in made.truth.items() if " " not in name} | own
    assert layout.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert contents(layout, name) == raw_bytes(tensor), name
    values = {name: load_value(layout.root, layout.blobs[name]) for name in ("progress.step", "progress.lr")}
    assert values == {"progress.step": 3, "progress.lr": 0.1}
    assert layout.key("progress.told.who") == ("progress", "told", "who")
    assert load_value(layout.root, layout.blobs["progress.told.who"]) == ["me", 2]


def test_keys_that_are_numbers_stay_so(tmp_path: Path) -> None:
    state = torchsnapshot.StateDict(keyed={1: torch.ones(2), "2": {3: torch.zeros(1)}}, listed=[torch.ones(1)])
    torchsnapshot.Snapshot.take(str(tmp_path / "taken"), {"own": state})
    ckptkit.convert(tmp_path / "taken", tmp_path / "state.pt", to="pt")
    found = torch.load(tmp_path / "state.pt")["own"]
    assert list(found["keyed"]) == [1, "2"]
    assert list(found["keyed"]["2"]) == [3]
    assert isinstance(found["listed"], list)


def test_lists_of_plain_values_are_one_value() -> None:
    values = {("a", 0): 1, ("a", 1): 2, ("b", 0, 0): 1, ("b", 1): 2, ("c", 0): 1, ("d", 0): 1, ("d", 1, "e"): 2}
    whole = {("a",): [1, 2], ("b",): [[1], 2], ("c", 0): 1, ("d", 0): 1, ("d", 1, "e"): 2, ("f", 1): 1}
    assert join_lists({**values, ("f", 1): 1}, [("c", 1)]) == whole
    assert join_lists({}, []) == {}


@pytest.fixture
def good(produce: Produce, tmp_path: Path) -> Path:
    """A sound snapshot, to be spoilt."""
    return Path(shutil.copytree(produce(produced.by_torchsnapshot).root / "batched", tmp_path / "there"))


def shard(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["manifest"]["1/model/embed.weight"]["shards"][0]
    return found


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file elsewhere": (lambda m: shard(m)["tensor"].update(location="../x"), "plain file name"),
    "an absolute one": (lambda m: shard(m)["tensor"].update(location="/etc/passwd"), "plain file name"),
    "no such file": (lambda m: shard(m)["tensor"].update(location="batched/gone"), "no such|missing|not"),
    "bytes past the end": (lambda m: shard(m)["tensor"].update(byte_range=[0, 1 << 50]), "expected at least"),
    "too few bytes": (lambda m: shard(m)["tensor"].update(byte_range=[0, 4]), "found 4 in the manifest"),
    "bytes backwards": (lambda m: shard(m)["tensor"].update(byte_range=[9, 4]), "impossible range of bytes"),
    "a gap": (lambda m: shard(m).update(offsets=[9, 0]), "gap|cover"),
    "an overlap": (lambda m: shard(m).update(offsets=[1, 0]), "overlap"),
    "other sizes": (lambda m: shard(m).update(sizes=[1, 1]), "another shape"),
    "a negative shape": (lambda m: shard(m)["tensor"].update(shape=[-1, 6]), "malformed"),
    "an unknown format": (lambda m: shard(m)["tensor"].update(serializer="zip"), "zip"),
    "an unknown dtype": (lambda m: shard(m)["tensor"].update(dtype="torch.int3"), "int3"),
    "an unknown kind": (lambda m: m["manifest"]["0/progress/step"].update(type="complex"), "complex"),
    "a dict without its keys": (lambda m: m["manifest"]["0/progress"].pop("keys"), "malformed"),
    "a float of three bytes": (lambda m: m["manifest"]["0/progress/lr"].update(serialized_value="AAAA"), "malformed"),
    "no manifest": (lambda m: m.pop("manifest"), "malformed"),
}


@pytest.mark.parametrize("spoil", BAD)
def test_refuses_a_manifest_that_does_not_fit(good: Path, spoil: str) -> None:
    change, words = BAD[spoil]
    path = good / ".snapshot_metadata"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CkptError, match=words) as raised:
        open_layout(good)
    assert raised.value.exit_code in (3, 5)


def test_a_manifest_in_yaml_is_refused(good: Path) -> None:
    (good / ".snapshot_metadata").write_text("version: 0.0.1\nworld_size: 2\nmanifest: {}\n")
    with pytest.raises(CkptError, match="not JSON"):
        open_layout(good)
