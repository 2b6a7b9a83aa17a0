"""The commands `delta` and `apply`, and what `inspect` and `verify` say of a delta."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.command import ckptkit
from tests.plugins.deltas.models import as_dcp, as_hf, files, policy, step
from tests.plugins.deltas.test_in_place import contents, raws


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return as_hf(tmp_path / "base", policy()), as_dcp(tmp_path / "new", step(policy()))


def test_there_and_back(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta, out = tmp_path / "delta", tmp_path / "out"
    done = ckptkit("delta", *pair, delta)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"wrote {delta}: the changes from {pair[0]} to {pair[1]}"
    assert lines[-2:] == [
        "2.54% of the elements changed, in 4 of 7 tensors",
        "122 B, 4.19% of the model's 2.91 KB",
    ]
    looked = ckptkit("inspect", delta, "--tensors").stdout.splitlines()
    assert looked[0].startswith(f"{delta}: ckptkit-delta, from ")
    assert [line.split()[-1] for line in looked[4:]] == [
        "embed.weight",
        "layers.0.up.weight",
        "layers.1.up.bias",
        "scale",
    ]
    verified = ckptkit("verify", delta, "--base", pair[0])
    assert (verified.returncode, verified.stdout.splitlines()[1].split()[0]) == (0, "ok")
    assert ckptkit("verify", delta, "--base", pair[1]).returncode == 1
    applied = ckptkit("apply", pair[0], delta, out)
    assert applied.returncode == 0
    assert applied.stdout.splitlines()[0] == f"patched a copy of {pair[0]} into {out}"
    assert contents(out) == raws(step(policy()))
    again = ckptkit("apply", pair[0], delta, out)
    assert (again.returncode, "the destination exists" in again.stderr) == (5, True)
    assert ckptkit("apply", pair[0], delta, out, "--overwrite", "--quiet").returncode == 0


def test_json(pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = json.loads(ckptkit("delta", *pair, tmp_path / "delta", "--json").stdout)
    assert made["nbytes"] == 122
    assert (made["changed"], made["unchanged"], made["dry_run"]) == (4, 3, False)
    looked = json.loads(ckptkit("inspect", tmp_path / "delta", "--json").stdout)
    assert (looked["base"], looked["new"]) == (made["base_id"], made["new_id"])
    assert json.loads(ckptkit("verify", tmp_path / "delta", "--json").stdout)["ok"]
    applied = json.loads(ckptkit("apply", pair[0], tmp_path / "delta", tmp_path / "out", "--json").stdout)
    assert applied["format"] == "hf"
    changed = json.loads(ckptkit("apply", pair[0], tmp_path / "delta", "--in-place", "--json").stdout)
    assert changed["elements"] == 37
    assert files(pair[0]) == files(tmp_path / "out")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("apply", "a", "b"), "expected BASE, at least one DELTA, and OUT, found 2"),
        (("apply", "a", "b", "c", "--in-place"), "--in-place: expected LOCAL and ROOT, found 3 paths"),
        (("apply", "a", "b", "--in-place", "--overwrite"), "--in-place takes no other options"),
        (("verify", ".", "--base", "."), "--base: expected a delta, found ."),
    ],
)
def test_usage(args: tuple[str, ...], words: str) -> None:
    done = ckptkit(*args)
    assert done.returncode == 2
    assert words in done.stderr


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda _, delta: (delta / "delta.json").unlink(), ("`delta.json` is missing",) * 2),
        (lambda _, delta: truncate(delta / "delta-00001-of-00001.safetensors"), ("bytes (header), found",) * 2),
        (lambda base, _: save_file(policy(seed=5), base / "model.safetensors"), ("expected base",) * 2),
    ],
)
def test_exit_codes(pair: tuple[Path, Path], tmp_path: Path, harm: Callable[[Path, Path], object], words: str) -> None:
    """Status 3 and one line, whether the result goes elsewhere or in place; nothing is written."""
    base, delta = pair[0], tmp_path / "delta"
    assert ckptkit("delta", *pair, delta).returncode == 0
    harm(base, delta)
    before = files(base)
    for place, said in zip((tmp_path / "out", "--in-place"), words, strict=True):
        done = ckptkit("apply", base, delta, place)
        assert done.returncode == 3
        assert [said in line for line in done.stderr.splitlines() if line.startswith("error:")] == [True]
    assert not (tmp_path / "out").exists()
    assert files(base) == before
    assert {path.name for path in base.iterdir()} == {"model.safetensors"}


def test_much_changed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    new = as_hf(tmp_path / "other", policy(seed=5))
    done = ckptkit("delta", pair[0], new, tmp_path / "out")
    assert (done.returncode, "% of the model" in done.stderr, "--force" in done.stderr) == (3, True, True)
    assert not list(tmp_path.glob("out/*"))
    tried = ckptkit("delta", pair[0], new, tmp_path / "out", "--dry-run")
    assert (tried.returncode, tried.stdout, tried.stderr) == (3, "", done.stderr)
    tried = ckptkit("delta", pair[0], new, tmp_path / "out", "--dry-run", "--force")
    assert (tried.returncode, len(tried.stdout.splitlines())) == (0, 3)


def test_a_directory_of_deltas(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Each of them is verified, and one that is unfinished is found; whole versions among them are checkpoints."""
    root = tmp_path / "root"
    for name in ("a", "b"):
        assert ckptkit("delta", *pair, root / name).returncode == 0
    as_hf(root / "weight_v000001", policy())
    done = ckptkit("verify", root)
    assert (done.returncode, [line.split()[0] for line in done.stdout.splitlines()[1:]]) == (0, ["ok"] * 3)
    (root / "b" / "delta.json").unlink()
    for place in (root, root / "b"):
        done = ckptkit("verify", place)
        assert (done.returncode, "b: `delta.json` is missing" in done.stdout) == (1, True)
    done = ckptkit("inspect", root / "b")
    assert (done.returncode, "b: `delta.json` is missing" in done.stderr) == (3, True)
    for words in (("verify", root / "a", "--base", tmp_path / "none"), ("verify", tmp_path / "none", "--base", root)):
        done = ckptkit(*words)
        assert (done.returncode, "none: no such file or directory" in done.stderr) == (3, True)
