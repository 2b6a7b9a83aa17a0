"""`ckptkit estimate`: what it says, and by which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ckptkit

LLAMA_70B = ("70b", "--vocab-size", "128256", "--untied")


def test_all_strategies_in_a_table() -> None:
    ran = ckptkit("estimate", "8b", "--vocab-size", "128256", "--untied", "--world-size", "8")
    assert ran.returncode == 0
    lines = [line.split("  ")[0] for line in ran.stdout.splitlines()]
    assert [line for line in lines if line in {"full_shard", "shard_grad_op", "hybrid_shard 2 x 4", "ddp"}] == [
        "full_shard", "shard_grad_op", "hybrid_shard 2 x 4", "ddp",
    ]  # fmt: skip
    for words in (
        "8.03 billion parameters with a vocabulary of 128,256",
        "32 blocks of 218 million",
        "16.1 GB",
        "export in bfloat16",
        "1 sequence",
    ):
        assert words in ran.stdout
    assert "fit" not in ran.stdout
    assert "not counted: the CUDA context" in ran.stderr
    assert max(map(len, ran.stdout.splitlines())) <= 100


def test_what_does_not_fit_is_said_plainly() -> None:
    ran = ckptkit("estimate", *LLAMA_70B, "--world-size", 4, "--gpu-memory", "24GB")
    assert ran.returncode == 1
    assert "full_shard does not fit: needs" in ran.stdout
    assert "each GPU has 24 GB; it would fit on" in ran.stdout
    assert "ddp does not fit" in ran.stdout
    assert "more GPUs do not help" in ran.stdout


def test_one_that_fits_is_enough_unless_another_was_asked_for() -> None:
    few = ("estimate", *LLAMA_70B, "--world-size", 64, "--gpu-memory", "80GB")
    assert ckptkit(*few).returncode == 0
    assert "full_shard fits: needs" in ckptkit(*few, "--strategy", "full_shard").stdout
    assert ckptkit(*few, "--strategy", "ddp").returncode == 1


def test_one_strategy_in_detail() -> None:
    ran = ckptkit("estimate", "tiny", "--world-size", 2, "--strategy", "full_shard", "--cpu-offload")
    assert ran.returncode == 0
    rows = {line.split("  ")[0]: line for line in ran.stdout.splitlines()}
    assert rows.keys() >= {"gathered", "reduced", "activations", "logits", "in all"}
    assert not rows.keys() & {"parameters", "optimizer"}
    assert "█" in ran.stdout
    assert any(line.startswith("host: ") for line in rows)


def test_json() -> None:
    arguments = ("estimate", *LLAMA_70B, "--world-size", 8, "--json", "--gpu-memory", "80GB", "--master-dtype", "bf16")
    ran = ckptkit(*arguments)
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    assert found.keys() == {
        *("model", "setup", "largest_unit_bytes", "gpu_memory_bytes", "strategies", "disk_bytes", "notes"),
    }
    assert found["setup"]["master_dtype"] == "bfloat16"
    assert found["model"]["parameters"] == 70_553_706_496
    first = found["strategies"][0]
    assert (first["strategy"], first["shards"], first["fits"], first["fits_at"]) == ("full_shard", 8, False, 16)
    assert first["peak_bytes"] == sum(first["moments"][first["peak_at"]].values())
    assert any("lose small updates" in note for note in found["notes"])


def test_a_config_file_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    ran = ckptkit("estimate", path, "--world-size", 8, "--json")
    assert ran.returncode == 3
    assert json.loads(ran.stdout)["error"]["code"] == "unsupported"
    assert ckptkit("estimate", path, "--world-size", 8, "--untied").returncode == 2
    assert ckptkit("estimate", "none-such", "--world-size", 8).returncode == 2
    assert ckptkit("estimate", "tiny").returncode == 2


@pytest.mark.parametrize("arguments", [["--help"], ["tiny", "--world-size", "2"]])
def test_no_torch_is_imported(arguments: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckptkit", "estimate", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "transformers", "huggingface_hub"}
    if "--help" in arguments:
        assert "Example: ckptkit estimate" in ran.stdout
        assert "Exit codes:" in ran.stdout
