"""Shards of fairscale, held against the live state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.errors import CkptError
from tests.conftest import Produce
from tests.formats.ranks.test_ranks import assert_is
from tests.trainers import produced_packages as produced

pytest.importorskip("fairscale", reason="fairscale is not installed")


def test_holds_the_live_state(produce: Produce) -> None:
    made = produce(produced.by_fairscale)
    checkpoint = Checkpoint.open(made.root)
    assert (checkpoint.layout.format, checkpoint.world_size, checkpoint.problems()) == ("fairscale", 3, [])
    assert "num_updates" in checkpoint.layout.blobs
    assert_is(checkpoint.layout, made.truth)


@pytest.mark.parametrize(("rank", "words"), [(1, "shard1.pt` is missing"), (2, "numbers of a flat parameter")])
def test_a_missing_shard_is_never_overlooked(produce: Produce, tmp_path: Path, rank: int, words: str) -> None:
    root = Path(shutil.copytree(produce(produced.by_fairscale).root, tmp_path / "there"))
    (root / f"checkpoint_best-shard{rank}.pt").unlink()
    with pytest.raises(CkptError, match=words) as raised:
        open_layout(root)
    assert raised.value.code == "corrupt"


def test_shards_of_two_checkpoints_are_refused(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced.by_fairscale).root, tmp_path / "there"))
    shutil.copy(root / "checkpoint_best-shard0.pt", root / "checkpoint_last-shard0.pt")
    with pytest.raises(CkptError, match="2 checkpoints"):
        open_layout(root)
