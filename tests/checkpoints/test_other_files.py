"""Files that are no state dict are named for what is in them, and files of torch.save are read under any name."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.errors import CkptError, Unsupported

WEIGHT = torch.arange(6.0).reshape(3, 2)


def script(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


def empty_script(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.ReLU()), path)


def exported(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), path)


def module(path: Path) -> None:
    torch.save(nn.Linear(2, 2), path)


def module_in_dict(path: Path) -> None:
    torch.save({"epoch": 1, "model": nn.Sequential(nn.Linear(2, 2))}, path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("suffix", [".pt", ".pt2", ".ckpt"])
@pytest.mark.parametrize(
    ("save", "words", "hint"),
    [
        (script, "found a TorchScript program", "torch.jit.load"),
        (empty_script, "found a TorchScript program", "torch.jit.load"),
        (exported, "found an ExportedProgram of torch.export", "torch.export.load"),
        (module, "found a pickled module, `torch.nn.modules.linear.Linear`", "weights_only=False"),
        (module_in_dict, "found a pickled module, `torch.nn.modules.container.Sequential`", "weights_only=False"),
    ],
)
def test_a_program_is_named_with_what_to_do(tmp_path: Path, save: object, words: str, hint: str, suffix: str) -> None:
    assert callable(save)
    path = tmp_path / f"model{suffix}"
    save(path)
    for source in (path, tmp_path):
        if source == tmp_path and suffix == ".pt2" and save in (module, module_in_dict):
            continue  # torch.save under a name that nobody gives to that
        with pytest.raises(Unsupported, match=words) as refused:
            ckptkit.inspect(source)
        assert "state_dict()" in str(refused.value.hint)
        assert hint in str(refused.value.hint)


@pytest.mark.parametrize("name", ["checkpoint.pth.tar", "model_best.pth.tar", "ckpt.tar", "checkpoint_0010.pth.tar"])
def test_torch_save_is_no_archive_whatever_its_name(tmp_path: Path, name: str) -> None:
    torch.save({"epoch": 3, "state_dict": {"module.w": WEIGHT}}, tmp_path / name)
    for source in (tmp_path, tmp_path / name):
        assert ckptkit.inspect(source).parameters == 6
    assert all(one.problem is None for one in ckptkit.ls(tmp_path).checkpoints)


def test_two_files_of_torch_save_are_both_named(tmp_path: Path) -> None:
    for name in ("checkpoint.pth.tar", "model_best.pth.tar"):
        torch.save({"state_dict": {"w": WEIGHT}}, tmp_path / name)
    with pytest.raises(Unsupported, match=r"checkpoint\.pth\.tar, model_best\.pth\.tar"):
        ckptkit.inspect(tmp_path)


def test_steps_in_names_that_end_in_tar(tmp_path: Path) -> None:
    for step in (9, 10):
        torch.save({"state_dict": {"w": WEIGHT + step}}, tmp_path / f"checkpoint_{step:04d}.pth.tar")
    assert ckptkit.inspect(tmp_path).step == 10
    assert [one.step for one in ckptkit.ls(tmp_path).checkpoints] == [9, 10]


def test_an_archive_of_tar_is_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with tarfile.open(tmp_path / "adapter.tar", "w") as archive:
        archive.add(tmp_path / "notes.txt", "notes.txt")
    with pytest.raises(CkptError, match="an archive"):
        ckptkit.inspect(tmp_path)
