"""The start of the command line: what an answer needs is imported, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.cli.commands import COMMANDS
from ckptkit.version import __version__
from tests import producers
from tests.conftest import Produce
from tests.tiers import slow_but

CODE = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from ckptkit.cli import main
main()
"""
HEAVY = {"torch", "numpy", "pydantic", "rich", "tqdm", "asyncio", "ssl", "fsspec", "huggingface_hub", "safetensors"}


def start(*arguments: object) -> tuple[str, set[str]]:
    """What `ckptkit` with these arguments prints, and the modules that it imports."""
    command = [sys.executable, "-c", CODE, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stdout, set(ran.stderr.split())


def imported_by(*arguments: object) -> set[str]:
    return start(*arguments)[1]


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_needs_nothing(option: str) -> None:
    printed, imported = start(option)
    assert printed == f"ckptkit {__version__}\n"
    assert "ckptkit.cli" in imported
    assert not imported & {"typer", "click", "json", "ckptkit.cli.commands", *HEAVY}


@pytest.mark.parametrize("command", slow_but(["consolidate", "inspect", "train", "push"], COMMANDS))
def test_help_has_an_example_and_exit_codes_and_loads_no_other_command(command: str) -> None:
    printed, imported = start(command, "--help")
    assert f"Example: ckptkit {command}" in printed
    assert "Exit codes:" in printed
    modules = {name: known.where.partition(":")[0] for name, known in COMMANDS.items()}
    own = modules[command]
    others = {*modules.values()} - {own}
    assert own in imported
    assert not imported & (others | HEAVY)


@pytest.mark.parametrize("producer", [producers.fsdp2, producers.hf_shards], ids=lambda producer: producer.__name__)
def test_a_small_checkpoint_is_inspected_with_little(producer: producers.Producer, produce: Produce) -> None:
    imported = imported_by("inspect", produce(producer).root, "--tensors")
    assert "ckptkit.checks.inspect" in imported
    assert not imported & {
        "ckptkit.layout.plan",
        "ckptkit.io.staging",
        "ckptkit.plugins.report.shard_map",
        "ckptkit.plugins.report.shards",
    }
    assert not imported & HEAVY
    beyond = [name for name in imported if name.startswith(("ckptkit.engine.", "ckptkit.state."))]
    assert all(name.startswith("ckptkit.state.quantized") for name in beyond), beyond


def test_options_with_values_need_no_pydantic(produce: Produce, tmp_path: Path) -> None:
    options = ["--jobs", "2", "--include", "model.*", "--max-shard-size", "1GB", "--to", "hf"]
    imported = imported_by("convert", produce(producers.fsdp2).root, tmp_path / "out", *options, "--dry-run")
    assert "ckptkit.conversion.convert" in imported
    assert "pydantic" not in imported
