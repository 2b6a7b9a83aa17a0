"""`ckptkit.cp` to local directories: the same files, compared on the way, whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.checkpoints.checkpoint import RunAround
from ckptkit.errors import Corrupt, Incomplete, NotACheckpoint, Occupied, Unsafe, Usage
from ckptkit.io.disk import staging_path
from tests import producers
from tests.conftest import Produce
from tests.directories import files_in


@pytest.mark.parametrize("producer", [producers.fsdp2, producers.hf_shards], ids=lambda producer: producer.__name__)
def test_a_copy_has_the_same_files(producer: producers.Producer, produce: Produce, tmp_path: Path) -> None:
    root = produce(producer).root
    done = ckptkit.cp(root, tmp_path / "copy")
    assert files_in(tmp_path / "copy") == files_in(root)
    assert done.nbytes == done.sent_bytes == sum(map(len, files_in(root).values()))
    assert done.checked_bytes + done.unchecked_bytes == done.nbytes
    assert done.checked_bytes >= sum(part.checked_bytes for part in ckptkit.verify(root))
    assert ckptkit.diff(root, tmp_path / "copy").is_equal


def make_model(root: Path) -> Path:
    root.mkdir()
    save_file({"w": torch.arange(1000.0)}, root / "model.safetensors")
    (root / "config.json").write_text("{}")
    ckptkit.make_manifest(root)
    return root


def test_what_is_not_copied_is_named(tmp_path: Path) -> None:
    root = make_model(tmp_path / "model")
    (root / "notes.txt").write_text("mine")
    (root / ".cache").mkdir()
    (root / "link").symlink_to(root / "notes.txt")
    make_model(root / "checkpoint-5")
    with pytest.warns(RunAround, match="checkpoint-5"):
        done = ckptkit.cp(root, tmp_path / "copy")
    assert set(files_in(tmp_path / "copy")) == {"model.safetensors", "config.json", "ckptkit.json", "notes.txt"}
    why = {left.name: left.why for left in done.left_behind}
    assert why == {".cache": "hidden", "link": "not a regular file", "checkpoint-5": "a checkpoint of its own"}


def test_an_empty_file_is_copied_too(tmp_path: Path) -> None:
    root = make_model(tmp_path / "model")
    (root / "notes.txt").touch()
    assert ckptkit.cp(root, tmp_path / "copy").files["notes.txt"] == 0
    assert files_in(tmp_path / "copy") == files_in(root)


def test_damage_leaves_nothing(tmp_path: Path) -> None:
    root = make_model(tmp_path / "model")
    content = bytearray((root / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (root / "model.safetensors").write_bytes(content)
    with pytest.raises(Corrupt, match="CRC-32"):
        ckptkit.cp(root, tmp_path / "copy")
    (root / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(Corrupt):
        ckptkit.cp(root, tmp_path / "copy")
    (root / "model.safetensors").unlink()
    with pytest.raises((Incomplete, NotACheckpoint)):
        ckptkit.cp(root, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_there_is_replaced_only_if_told(tmp_path: Path) -> None:
    root, other = make_model(tmp_path / "model"), make_model(tmp_path / "other")
    with pytest.raises(Occupied):
        ckptkit.cp(root, other)
    (root / "notes.txt").write_text("mine")
    ckptkit.cp(root, other, overwrite=True)
    assert files_in(root) == files_in(other)
    (other / "thesis.tex").write_text("years")
    with pytest.raises(Occupied, match="thesis"):
        ckptkit.cp(root, other, overwrite=True)
    for place in (root, root / "inside", tmp_path):
        with pytest.raises(Unsafe, match="contains the other"):
            ckptkit.cp(root, place, overwrite=True)


def test_a_file_is_copied_to_a_file(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(10)}, tmp_path / "model.pt")
    with pytest.raises(Usage, match=r"ends in `.pt`"):
        ckptkit.cp(tmp_path / "model.pt", tmp_path / "copy")
    ckptkit.cp(tmp_path / "model.pt", tmp_path / "copy.pt")
    assert (tmp_path / "copy.pt").read_bytes() == (tmp_path / "model.pt").read_bytes()


@pytest.mark.slow
def test_a_killed_copy_is_resumed(tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    save_file({f"w{i}": torch.full((1 << 24,), float(i)) for i in range(6)}, root / "model.safetensors")
    journal = staging_path(tmp_path / "copy") / ".ckptkit-work" / "pieces.jsonl"
    command = [sys.executable, "-m", "ckptkit", "cp", str(root), str(tmp_path / "copy"), "--jobs", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        while not (journal.exists() and journal.stat().st_size) and client.poll() is None:
            time.sleep(0.001)
        os.kill(client.pid, signal.SIGKILL)
    assert client.returncode == -signal.SIGKILL
    assert not (tmp_path / "copy").exists()
    done = ckptkit.cp(root, tmp_path / "copy")
    assert done.sent_bytes < done.nbytes
    assert files_in(root) == files_in(tmp_path / "copy")
