"""What the commands say about inputs that people have: each line explains itself, and each hint can be followed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.command import ckptkit
from tests.faults.damage import LFS_POINTER

Make = Callable[[Path], object]


def model_in(directory: Path) -> Path:
    directory.mkdir()
    save_file({"w": torch.ones(256, 4)}, directory / "model.safetensors")
    return directory


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("name", "content", "words", "hint"),
    [
        ("model.safetensors", LFS_POINTER, "expected the file itself, found a Git LFS pointer to it", "git lfs pull"),
        ("pytorch_model.bin", LFS_POINTER, "expected the file itself, found a Git LFS pointer to it", "git lfs pull"),
        ("model.safetensors", b"", "the file is empty", "restore the file from a copy"),
        ("x.pt", b"", "the file is empty", "restore the file from a copy"),
        (".metadata", b"\x80\x02}q", "expected a pickle at byte 0, found 4 bytes", "restore the file from a copy"),
        ("model.safetensors.index.json", b"{", "not valid JSON", "restore the file from a copy"),
    ],
)
def test_a_file_that_is_no_checkpoint_says_what_it_is(
    name: str, content: bytes, words: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    ran = ckptkit("inspect", tmp_path)
    error, advice = ran.stderr.splitlines()
    assert (ran.returncode, words in error) == (3, True)
    assert hint in advice


def test_doctor_names_a_pointer_of_git_lfs_first(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(LFS_POINTER)
    (finding,) = (line for line in ckptkit("doctor", tmp_path).stdout.splitlines() if line.startswith("1 "))
    assert "model.safetensors: expected the file itself, found a Git LFS pointer" in finding


def test_a_truncated_file_belongs_to_its_checkpoint_and_has_a_size(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model")
    cut(model / "model.safetensors", 1000)
    ran = ckptkit("verify", model)
    assert "do not belong to this checkpoint" not in ran.stderr
    assert ran.stdout.splitlines()[1].split()[2:4] == ["1", "KB"]
    assert "found 1000: the file is truncated" in ran.stdout


def test_files_of_everybodys_scripts_are_training_state(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model")
    for name in ("extra_0.pt", "scheduler.pt", "tokens.bin"):
        torch.save({"a": 1}, model / name)
    torch.save({"v": torch.ones(3)}, model / "mine.pt")
    ran = ckptkit("consolidate", model, tmp_path / "out")
    assert "not copied: extra_0.pt, scheduler.pt, tokens.bin (training state)" in ran.stdout
    assert "warning: not copied: mine.pt (unknown, perhaps weights)" in ran.stderr


@pytest.mark.parametrize("command", [("prune", "--keep-last", "1"), ("watch", "--once", "--do", "verify {ckpt}")])
def test_one_checkpoint_is_not_called_unknown_where_a_run_is_expected(command: tuple[str, ...], tmp_path: Path) -> None:
    ran = ckptkit(command[0], model_in(tmp_path / "model"), *command[1:])
    assert ran.returncode == 3
    assert "this is one checkpoint, not a run" in ran.stderr


def test_unpin_of_a_missing_checkpoint_points_to_the_list(tmp_path: Path) -> None:
    ran = ckptkit("unpin", tmp_path / "run/ckpt-7")
    assert ran.returncode == 3
    assert "neither pinned nor a complete checkpoint" in ran.stderr
    assert f"hint: run `ckptkit ls {tmp_path / 'run'}`" in ran.stderr


def test_paths_are_relative_as_they_were_typed(tmp_path: Path) -> None:
    for typed in ("run/ckpt-7", tmp_path / "run/ckpt-7"):
        ran = ckptkit("unpin", typed, cwd=tmp_path)
        assert ran.stderr.startswith(f"error: {typed}: ")
        assert f"`ckptkit ls {Path(typed).parent}`" in ran.stderr


@pytest.mark.parametrize("words", ["consolidate run out --base org/none", "merge org/none run out", "cp hf://org/a x"])
def test_without_a_network_every_command_says_so_alike(words: str, tmp_path: Path) -> None:
    model_in(tmp_path / "run")
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    ran = ckptkit(*words.split(), cwd=tmp_path, env=env)
    assert ran.returncode == 4
    assert "no answer from http://127.0.0.1:9" in ran.stderr
    assert "hint: check the network and HF_ENDPOINT, then run the same command again\n" in ran.stderr


@pytest.mark.parametrize("command", ["consolidate", "stats", "ls", "train"])
def test_common_options_are_in_a_section_of_their_own(command: str) -> None:
    own, common = ckptkit(command, "--help").stdout.split("\nCommon options:\n")
    assert "--quiet" in common
    assert "--help" in common
    assert "--quiet" not in own
