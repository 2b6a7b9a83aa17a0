"""The keys of `--json` that docs/results.md lists are the keys that the commands print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit.cli.commands import COMMANDS
from scripts.results import Shape, load_function, printed_by


def unlisted(value: Any, shape: Shape, where: str = "") -> list[str]:
    """Return the keys of a JSON value that a shape does not have."""
    if isinstance(value, dict) and isinstance(shape, dict):
        found = []
        for key, inside in value.items():
            known = key in shape or "..." in shape
            found += (
                unlisted(inside, shape.get(key, shape.get("...")), f"{where}.{key}") if known else [f"{where}.{key}"]
            )
        return found
    if isinstance(value, list) and isinstance(shape, list):
        return [key for inside in value for key in unlisted(inside, shape[0], f"{where}[]")]
    return []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("inspect a --chunks", 0),
        ("verify a --stats", 0),
        ("stats a", 0),
        ("stats a b", 0),
        ("diff a b", 1),
        ("doctor a", 0),
        ("convert a state.pt", 0),
        ("average a b mean --dry-run --names keep", 0),
        ("delta a b delta --force", 0),
        ("cp a copy", 0),
        ("verify nothing", 3),
    ],
)
def test_keys_of_the_json_are_listed(tmp_path: Path, line: str, code: int) -> None:
    for seed, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        tensor = np.random.default_rng(seed).standard_normal((4, 3), dtype=np.float32)
        save_file({"w": tensor, "same": np.ones(3, np.float32)}, tmp_path / name / "model.safetensors")
    words = [sys.executable, "-m", "ckptkit", *line.split(), "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    printed = json.loads(done.stdout)
    shapes = [*printed_by(load_function(COMMANDS[line.split(maxsplit=1)[0]].where)), {"error": None}]
    assert [] in [unlisted(printed, shape) for shape in shapes], [unlisted(printed, shape) for shape in shapes]
