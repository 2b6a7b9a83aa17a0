"""The core works without its plugins: their folders and lines in tables are deleted in a copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import producers
from tests.conftest import Produce
from tests.entry_points.without_plugins import PLUGINS, copy_without

# tests of the core that ask for no plugin's format, names or command
CORE = (
    *("adapters/test_config.py", "adapters/test_merge.py", "adapters/test_names.py"),
    *("checks/test_diff.py", "checks/test_inspect.py"),
    *("conversion/test_consolidate.py", "conversion/test_convert.py"),
    *(
        "engine",
        "formats/pickles",
        "formats/ranks",
        "formats/shards",
        "io/test_file.py",
        "io/test_staging.py",
        "layout",
    ),
    *("models/test_config_differences.py", "models/test_expected.py", "runs/test_latest.py", "runs/test_retention.py"),
    *("state/quantized", "storage", "training/saving/test_run.py", "training/test_config.py"),
)
EVERY_MODULE = """
import pathlib
from importlib import import_module
for path in sorted(pathlib.Path("ckptkit").rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if not name.startswith(("ckptkit.integrations.lightning", "ckptkit.__main__")):
        import_module(name)
"""


def run(*words: object, at: Path) -> str:
    """Run Python at a copy of the project, and return what it printed."""
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(at)}
    done = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project without any plugin."""
    copy = tmp_path_factory.mktemp("bare")
    copy_without(frozenset(PLUGINS), copy)
    return copy


@pytest.mark.slow
def test_without_any_the_main_jobs_are_done(bare: Path, produce: Produce, tmp_path: Path) -> None:
    root = produce(producers.fsdp2).root
    assert "prove" not in run("-m", "ckptkit", "--help", at=bare)
    for words in (
        ("inspect", root),
        ("verify", root),
        ("consolidate", root, tmp_path / "out", "--names", "keep"),
        ("reshard", root, tmp_path / "shards", "--to", "3"),
        ("diff", root, tmp_path / "shards"),
    ):
        run("-m", "ckptkit", *words, at=bare)


@pytest.mark.slow
def test_without_any_every_module_can_be_imported(bare: Path) -> None:
    run("-c", EVERY_MODULE, at=bare)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["all", *PLUGINS])
def test_the_core_passes_its_tests_without(name: str, tmp_path: Path) -> None:
    copy_without(frozenset(PLUGINS if name == "all" else [name]), tmp_path)
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not nightly", "--few")
    run("-m", "pytest", *options, *(f"tests/{one}" for one in CORE), at=tmp_path)
