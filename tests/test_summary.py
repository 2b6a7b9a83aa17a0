"""The text of results: a few lines, as the command line prints them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.summary import Summarized
from tests import producers
from tests.conftest import Produce

NO_RESULTS = {"Checkpoint", "ConvertOptions", "Finding", "LazyCheckpoint", "LazyTensor"}


@pytest.mark.parametrize("name", [name for name in ckptkit.__all__ if name[0].isupper()])
def test_every_result_has_a_summary(name: str) -> None:
    kind = getattr(ckptkit, name)
    assert issubclass(kind, Summarized) or name in NO_RESULTS or not is_dataclass(kind)


def results(root: Path, tmp_path: Path) -> Iterator[tuple[Summarized, str]]:
    done = ckptkit.consolidate(root, tmp_path / "out", dtype=torch.bfloat16)
    yield done, f"converted {root} into {tmp_path / 'out'}"
    yield ckptkit.consolidate(root, tmp_path / "other", dry_run=True), "are free"
    yield ckptkit.verify(root)[0], f"{root}: ok; "
    yield ckptkit.diff(root, root), f"{root} and {root}: the same: "
    yield ckptkit.diff(root, tmp_path / "out"), "not the same: "
    yield ckptkit.inspect(root), "dcp checkpoint"
    yield ckptkit.doctor(root), f"{root}: "
    yield ckptkit.ls(root), "1 checkpoint"
    yield ckptkit.stats(root), "elements"
    yield ckptkit.stats(root, root), "together: change 0"
    yield ckptkit.estimate({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2}, world_size=2), "each GPU"


def test_a_result_prints_as_a_few_lines(produce: Produce, tmp_path: Path) -> None:
    for result, part in results(produce(producers.fsdp2).root, tmp_path):
        text = str(result)
        assert part in text
        assert type(result).__name__ not in text
        assert 1 <= len(text.splitlines()) <= 5, text
        page = result._repr_html_()
        assert page.startswith("<div>")


def test_problems_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    torch.save({f"w{i}": torch.full((100,), float(i + 2)) for i in range(20)}, tmp_path / "model.pt")
    content = bytearray((tmp_path / "model.pt").read_bytes())
    for i in range(6):
        content[content.index(torch.tensor(float(i + 2)).repeat(100).numpy().tobytes())] ^= 1
    (tmp_path / "model.pt").write_bytes(content)
    (found,) = ckptkit.verify(tmp_path)
    lines = str(found).splitlines()
    assert lines[0].startswith(f"{tmp_path}: 6 problems; ")
    assert "w0" in lines[1]
    assert lines[-1] == "  ... 3 more"


def test_what_a_checkpoint_calls_its_tensors_is_printed_as_text(tmp_path: Path) -> None:
    hostile = "<b>\x1b[31m"
    for name, number in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        torch.save({hostile: torch.full((2,), number)}, tmp_path / name / "model.pt")
    found = ckptkit.diff(tmp_path / "a", tmp_path / "b")
    assert r"<b>\x1b[31m: values" in str(found)
    assert r"&lt;b&gt;\x1b[31m: values" in found._repr_html_()


def test_the_command_line_prints_the_same_lines(produce: Produce) -> None:
    root = produce(producers.fsdp2).root
    command = [sys.executable, "-m", "ckptkit", "inspect", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(ckptkit.inspect(root)))
