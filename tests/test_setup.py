"""scripts/setup: what it asks pip for, what it shows of pip's work, and that it does nothing twice.

A stand-in for the Python of .venv prints what pip 23.2 and 26.0 print, and installs nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PURPOSES = ("demo", "check", "test", "nightly")
PIP = """#!/usr/bin/env bash
echo "$@" >>asked
cat <<'END'
Obtaining file:///home/user/ckptkit
  Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)
  Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (191.8 MB)
     ---------------------------------------- 191.8/191.8 MB 9.1 MB/s eta 0:00:00
Downloading numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (500 kB)
Using cached https://download.example/whl/transformers-5.23.0-py3-none-any.whl (13.3 MB)
Building wheels for collected packages: ckptkit-fsdp
  Building editable for ckptkit-fsdp (pyproject.toml): started
  Building editable for ckptkit-fsdp (pyproject.toml): finished with status 'done'
Installing collected packages: numpy, torch, transformers, ckptkit-fsdp
END
"""
SHOWN = """  resolving versions
  torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (191.8 MB)
  numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (500 kB)
  transformers-5.23.0-py3-none-any.whl (13.3 MB), from the cache of pip
  building ckptkit-fsdp
  installing 4 packages
  192 MB downloaded, 13 MB from the cache
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with the files that scripts/setup reads, and the stand-in in its .venv."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/setup", "scripts/constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP)
    python.chmod(0o755)
    return tmp_path


def setup(clone: Path, purpose: str) -> tuple[str, list[str]]:
    """What scripts/setup prints, and the extras that it asks pip for."""
    (clone / "asked").write_text("")
    command: list[str | Path] = ["bash", clone / "scripts" / "setup", purpose]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout, re.findall(r"--editable \.\[(\w+)\]", (clone / "asked").read_text())


def test_the_work_of_pip_is_shown(clone: Path) -> None:
    shown, extras = setup(clone, "demo")
    assert extras == ["hf"]
    assert SHOWN in shown
    assert re.search(r"^  \.venv has 0 packages, \d", shown, re.MULTILINE)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_what_is_installed_is_not_installed_again(purpose: str, clone: Path) -> None:
    assert setup(clone, purpose)[1] == ["hf" if purpose == "demo" else purpose]
    at = PURPOSES.index(purpose)
    assert all(setup(clone, smaller) == ("", []) for smaller in PURPOSES[: at + 1])
    assert all(setup(clone, larger)[1] == [larger] for larger in PURPOSES[at + 1 :])


@pytest.mark.parametrize(
    ("name", "change", "is_installed"),
    [
        ("pyproject.toml", ("line-length = 120", "line-length = 100"), True),
        ("pyproject.toml", ("tqdm>=", "tqdm!=0,>="), False),
        ("scripts/constraints.txt", ("tqdm==", "tqdm<="), False),
    ],
)
def test_it_is_installed_again_when_packages_change(
    name: str, change: tuple[str, str], is_installed: bool, clone: Path
) -> None:
    setup(clone, "check")
    text = (clone / name).read_text()
    assert change[0] in text
    (clone / name).write_text(text.replace(*change))
    assert setup(clone, "check")[1] == ([] if is_installed else ["check"])


def test_an_unknown_purpose_is_refused() -> None:
    done = subprocess.run(["bash", ROOT / "scripts" / "setup", "all"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: expected one of demo check test nightly, found all\n"


def test_each_purpose_is_an_extra_that_contains_the_one_before() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for smaller, larger in zip(("hf", *PURPOSES[1:]), PURPOSES[1:], strict=False):
        (contained,) = re.findall(r"ckptkit-fsdp\[(.*?)\]", " ".join(extras[larger]))
        assert smaller in contained.split(",")


def test_each_script_sources_it_with_a_purpose() -> None:
    sourced = {
        path.name: re.findall(r'^source .*/setup" (\w+)$', text, re.MULTILINE)
        for path in (ROOT / "scripts").iterdir()
        if path.is_file() and '/setup"' in (text := path.read_text())
    }
    assert sourced.keys() >= {"demo", "check", "test", "nightly"}
    assert all(len(purposes) == 1 and purposes[0] in PURPOSES for purposes in sourced.values()), sourced
