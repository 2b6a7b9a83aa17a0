"""The wheel: built from the tree, installed where that is not seen, it trains, converts, checks and draws a model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHERE = "import ckptkit; print(ckptkit.__file__)"


def run(*command: object, cwd: Path) -> str:
    """What a command prints that sees no tree by way of PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def see_packages_of_this_environment(site: Path) -> None:
    """Make all that is installed here importable there, but for ckptkit, whose editable install is a file and a finder.

    A directory on a path file becomes part of `sys.path`, and no path file in it is read: that alone keeps an editable
    install from being seen.
    """
    inherited = [path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages")]
    (site / "inherited.pth").write_text("".join(f"{path}\n" for path in inherited))


@pytest.mark.nightly
def test_the_wheel_works_by_itself(tmp_path: Path) -> None:
    wheels, room, work = tmp_path / "wheels", tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, copy_source(tmp_path / "source"), cwd=work)
    (wheel,) = wheels.glob("ckptkit_fsdp-*.whl")
    venv.create(room)
    python = room / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=work).strip())
    run(*pip, "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=work)
    see_packages_of_this_environment(site)

    found = Path(run(python, "-c", WHERE, cwd=work).strip())
    assert found.is_relative_to(site)
    assert (found.parent / "py.typed").exists()
    modules = [path.relative_to(ROOT) for path in (ROOT / "ckptkit").rglob("*.py")]
    assert [path for path in modules if not (site / path).exists()] == []

    ckptkit = room / "bin" / "ckptkit"
    run(ckptkit, "train", "--steps", 1, "--nproc", 1, "--sequence-length", 32, "--device", "cpu", cwd=work)
    run(ckptkit, "consolidate", "run", "out", cwd=work)
    run(ckptkit, "verify", "out", "--against", "run", cwd=work)
    run(ckptkit, "report", "run", cwd=work)
    assert (work / "out" / "model.safetensors").exists()


def copy_source(place: Path) -> Path:
    """Copy what a wheel is built from: a build leaves files in its tree, and takes up those of an older one."""
    shutil.copytree(ROOT / "ckptkit", place / "ckptkit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    return place
