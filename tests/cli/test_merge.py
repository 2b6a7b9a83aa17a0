"""Command `merge`, and what `inspect` and `consolidate` say of adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Produce

pytest.importorskip("peft", reason="PEFT makes the adapters")

from tests.command import ckptkit
from tests.trainers.produced_peft import lora


@pytest.fixture
def home(produce: Produce) -> Path:
    return produce(lora).root


def test_merging_is_reported(home: Path, tmp_path: Path) -> None:
    both = ("merge", home / "base", home / "run", home / "saved", tmp_path / "out", "--dry-run")
    for words, said_of_it in (
        ((), "two adapters contain `lm_head.weight`, trained in full"),
        (("--factors", "1,0.5"), "--factors: expected 1 for `lm_head.weight`, which was trained in full, found 0.5"),
    ):
        done = ckptkit(*both, *words)
        assert done.returncode == 3
        assert said_of_it in done.stderr
    done = ckptkit("merge", home / "base", home / "run", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["output"], said["tensors"]) == (str(tmp_path / "out"), 21)
    assert any("LoRA of ranks 2 to 4" in note for note in said["notes"])


def test_adapters_are_inspected(home: Path) -> None:
    said = ckptkit("inspect", home / "run").stdout
    line = next(line for line in said.splitlines() if line.startswith("adapter default: "))
    for words in (
        "LoRA of rank 2 to 4",
        "alpha 7",
        "q_proj",
        "(4 modules)",
        "a trained lm_head.weight",
        "with its base",
    ):
        assert words in line
    (adapter,) = json.loads(ckptkit("inspect", home / "run", "--json").stdout)["adapters"]
    assert (adapter["rows"], adapter["alpha"], adapter["has_base"], adapter["modules"]) == ([2, 4], 7, True, 4)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["consolidate", "run", "OUT", "--names", "litgpt"], 2),
        (["consolidate", "run", "OUT", "--merge", "--vocab-size", "99"], 2),
        (["convert", "run", "OUT", "--to", "dcp", "--adapter-config", "saved/adapter_config.json"], 2),
        (["consolidate", "base", "OUT", "--merge"], 2),
        (["merge", "base", "nothing", "OUT"], 3),
        (["consolidate", "run", "OUT", "--adapter-config", "nothing.json"], 3),
    ],
)
def test_exit_codes(home: Path, tmp_path: Path, words: list[str], code: int) -> None:
    there = {"run", "base", "saved/adapter_config.json"}
    command = [
        str(home / word) if word in there else str(tmp_path / "out") if word == "OUT" else word for word in words
    ]
    done = ckptkit(*command)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()
