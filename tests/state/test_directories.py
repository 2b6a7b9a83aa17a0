"""Which files go with a checkpoint: all regular ones that hold none of its tensors."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.state.directories import files_of_format_in, files_to_copy_and_others
from tests import producers
from tests.conftest import Produce


def test_regular_files_at_any_depth(tmp_path: Path) -> None:
    regular = ["config.json", "sub/tokenizer.json", "sub/deep/x", "optimizer_0/note"]
    for name in (
        *regular,
        "ckptkit.json",
        "sub/ckptkit.json",
        ".hidden",
        ".cache/x",
        "mine/x",
        "optimizer_0/.metadata",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("config.json")
    (tmp_path / "sub" / "folder").symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "pipe")
    found, left = files_to_copy_and_others(
        tmp_path, frozenset({tmp_path / "mine", tmp_path / "optimizer_0" / ".metadata"})
    )
    assert found == {name: tmp_path / name for name in regular}
    assert left == ["link", "pipe", "sub/folder"]


def test_files_of_the_checkpoint_and_of_those_before_it(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(producers.leftovers).root, tmp_path / "in"))
    (root / "config.json").touch()
    names = {file.name for file in files_of_format_in(open_layout(root))}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
