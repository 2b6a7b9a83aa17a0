"""What a newcomer meets first: results at a prompt, sizes, a damaged latest checkpoint, a salvaged one, a smoke run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Corrupt, Occupied
from ckptkit.plugins.watch.run_commands import Final, WatchCommand
from ckptkit.training.smoke.smoke import MARK, create_smoke_run, require_free_paths

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path: Path) -> None:
    dcp.save({"model": {"w": torch.arange(4096.0), "b": torch.ones(4)}}, checkpoint_id=str(path), no_dist=True)


def damage(path: Path) -> None:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[8000] ^= 1
    file.write_bytes(content)


def test_results_are_a_few_lines_at_a_prompt(tmp_path: Path) -> None:
    save(tmp_path / "ckpt-1")
    for result in (ckptkit.inspect(tmp_path / "ckpt-1"), ckptkit.ls(tmp_path), ckptkit.estimate("8b", world_size=8)):
        assert repr(result) == str(result)
        assert 0 < len(repr(result).splitlines()) < 7


def test_a_damaged_latest_checkpoint_offers_the_one_before_it(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "run" / f"ckpt-{step}")
    damage(tmp_path / "run" / "ckpt-2")
    with pytest.raises(Corrupt) as refused:
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out", names="keep")
    assert f"pass {tmp_path / 'run' / 'ckpt-1'}, the checkpoint before it" in str(refused.value.hint)
    with pytest.raises(Corrupt) as refused:
        ckptkit.consolidate(tmp_path / "run" / "ckpt-2", tmp_path / "out", names="keep")
    assert "before it" not in str(refused.value.hint)


def test_a_salvaged_checkpoint_keeps_its_step(tmp_path: Path) -> None:
    save(tmp_path / "run" / "ckpt-7")
    damage(tmp_path / "run" / "ckpt-7")
    ckptkit.convert(tmp_path / "run" / "ckpt-7", tmp_path / "saved", to="dcp", salvage=True)
    assert Checkpoint.open(tmp_path / "saved").step == 7


def clear(run: Path, out: Path, *, overwrite: bool) -> None:
    require_free_paths(run, out, overwrite=overwrite)
    create_smoke_run(run)


def test_smoke_replaces_only_what_it_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = ("ckpt-4", "ckpt-8")
    for name in (*made, "ckpt-8-to4", "notes"):
        (run / name).mkdir(parents=True)
        (run / name / "x").write_text("x")
    for name in (MARK, "metrics.jsonl", "train.toml", "readme.md"):
        (run / name).write_text("x")
    with pytest.raises(Occupied, match="the run exists"):
        clear(run, tmp_path / "out", overwrite=False)
    clear(run, tmp_path / "out", overwrite=True)
    assert {path.name for path in run.iterdir()} == {"ckpt-8-to4", "notes", "readme.md", MARK}
    (run / "ckpt-300").mkdir()
    with pytest.raises(Occupied, match="checkpoints that the smoke test did not make: ckpt-300"):
        clear(run, tmp_path / "out", overwrite=True)
    assert (run / "ckpt-300").is_dir()


def test_a_watch_knows_what_cannot_change() -> None:
    for line, is_final in (("ckptkit inspect {ckpt} --no-such-option", True), ("ckptkit inspect {ckpt}", False)):
        failure = WatchCommand.parse(line.removeprefix("ckptkit "), is_ours=True).run_command(
            {"ckpt": "/no/such/path"}, 2, 60
        )
        assert isinstance(failure, Final) == is_final
