"""`reshard` and `convert` as a contract: where they find SRC, what they print, and how they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import producers
from tests.command import ckptkit
from tests.conftest import Produce

KEYS = {
    "warnings",
    *("source", "output", "format", "world_size", "files", "tensors", "nbytes", "seconds", "renamed", "dropped"),
    *("entries", "left_behind"),
    *("cast", "completed", "notes", "plan", "finished"),
}
WRITTEN = {"checked_bytes", "unchecked_bytes", "peak_rss_bytes", "resumed_bytes"}


@pytest.fixture
def run(produce: Produce, tmp_path: Path) -> Path:
    """A run with two checkpoints, and one that was never finished."""
    root = tmp_path / "run"
    for step in (1, 2):
        shutil.copytree(produce(producers.fsdp2).root, root / f"ckpt-{step}")
    shutil.copytree(root / "ckpt-1", root / "ckpt-3")
    (root / "ckpt-3" / ".metadata").unlink()
    return root


def files(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_reshard_in_a_run_and_above_it(run: Path) -> None:
    ran = ckptkit("reshard", "--to", 16, cwd=run)
    assert (ran.returncode, ran.stderr) == (0, "using ckpt-2, the latest complete checkpoint\n")
    assert ran.stdout.startswith("resharded ckpt-2 into ckpt-2-to16 for 16 ranks\n")
    assert files(run / "ckpt-2-to16") == {".metadata", "ckptkit.json", *(f"__{rank}_0.distcp" for rank in range(16))}
    shutil.rmtree(run / "ckpt-2-to16")
    ran = ckptkit("reshard", "--to", 2, cwd=run.parent)
    assert (ran.returncode, ran.stderr) == (0, "using run/ckpt-2, the latest complete checkpoint\n")
    assert ran.stdout.startswith("resharded run/ckpt-2 into run/ckpt-2-to2 for 2 ranks\n")
    ran = ckptkit("reshard", "--to", 1, "-q", cwd=run / "ckpt-1")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert files(run / "ckpt-1-to1") == {".metadata", "ckptkit.json", "__0_0.distcp"}


def test_reshard_twice_in_a_run(run: Path) -> None:
    for size in (16, 2):
        ran = ckptkit("reshard", "--to", size, cwd=run)
        assert ran.stdout.startswith(f"resharded ckpt-2 into ckpt-2-to{size} for")


def test_where_there_is_no_run(tmp_path: Path) -> None:
    ran = ckptkit("reshard", "--to", 16, cwd=tmp_path)
    assert ran.returncode == 3
    assert ran.stderr.startswith("error: .: no checkpoint in any known format, and no run with checkpoints\nhint: ")


def test_json(run: Path, tmp_path: Path) -> None:
    ran = ckptkit("reshard", run / "ckpt-1", tmp_path / "out", "--to", 5, "--dtype", "bf16", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    done = json.loads(ran.stdout)
    assert done.keys() == KEYS | WRITTEN
    assert (done["output"], done["format"], done["world_size"]) == (str(tmp_path / "out"), "dcp", 5)
    assert {file["name"]: file["nbytes"] for file in done["files"]} == {
        path.name: path.stat().st_size for path in (tmp_path / "out").iterdir() if path.name != "ckptkit.json"
    }
    assert set(done["cast"].values()) == {"float32 => bfloat16"}
    assert done["checked_bytes"] > done["nbytes"]
    ran = ckptkit("convert", run / "ckpt-1", tmp_path / "pt", "--to", "pt", "--rename", "^up=>upper", "--json")
    done = json.loads(ran.stdout)
    assert (done["format"], done["world_size"]) == ("pt", None)
    assert done["renamed"]["optim.state.up.weight.step"] == "optim.state.upper.weight.step"


def test_a_dry_run(run: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for command in (["reshard", run, "--to", "7"], ["convert", run, tmp_path / "out", "--to", "pt"]):
        ran = ckptkit(*command, "--dry-run", "--json")
        assert ran.returncode == 0
        done = json.loads(ran.stdout)
        assert done.keys() == KEYS | {"copies", "free_bytes"}
        assert done["source"] == str(run / "ckpt-2")
        said = ckptkit(*command, "--dry-run").stdout
        assert said.startswith(f"would write {done['output']} from {run / 'ckpt-2'}")
        assert f"{done['copies']} chunks to read" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_reader_is_told(run: Path, tmp_path: Path) -> None:
    (run / "ckpt-2" / "rng_state_2.pth").touch()
    edits = ["--exclude", "extra.*", "--rename", "^up=>upper", "--dtype", "fp16", "--dtype", "*.exp*=bf16"]
    said = ckptkit("reshard", run, tmp_path / "out", "--to", 2, *edits).stdout
    for line in (
        "not copied: `extra`, 5 entries, ",
        "renamed 8 entries, such as model.up.weight => model.upper.weight\n",
        " tensors: float32 => bfloat16\n",
        " tensors: float32 => float16\n",
        "note: skipped `rng_state_2.pth` and similar files: state of 3 ranks, which 2 cannot use\n",
        "; peak memory ",
        " that were read\n",
    ):
        assert line in said
    said = ckptkit("convert", tmp_path / "out", tmp_path / "hf", "--to", "hf").stdout
    assert "found the model under the key `model`\n" in said
    (tmp_path / "hf" / "ckptkit.json").unlink()
    said = ckptkit("convert", tmp_path / "hf", tmp_path / "back", "--to", "dcp", "--under", "model").stdout
    assert "no checksums verified: the source has none for the " in said


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["reshard", "{tmp}/absent", "--to", "2"], 3, "not_a_checkpoint"),
        (["reshard", "{tmp}/text", "{tmp}/out", "--to", "2"], 3, "not_a_checkpoint"),
        (["convert", "{tmp}/text", "{tmp}/out", "--to", "dcp"], 3, "not_a_checkpoint"),
        (["convert", "{run}/ckpt-3", "{tmp}/out", "--to", "dcp"], 3, "incomplete"),
        (["reshard", "{run}/ckpt-1", "{run}/ckpt-2", "--to", "2"], 5, "occupied"),
        (["reshard", "{run}/ckpt-1", "{run}", "--to", "2", "--overwrite"], 5, "unsafe"),
        (["reshard", "{run}/ckpt-1", "{run}/ckpt-1/training", "--to", "2"], 5, "unsafe"),
        (["reshard", "{run}/ckpt-1", "{tmp}/out", "--to", "2", "--dtype", "float7"], 2, "usage"),
        (["reshard", "{run}/ckpt-1", "{tmp}/out", "--to", "2", "--rename", "x"], 2, "usage"),
        (["reshard", "{run}/ckpt-1", "{tmp}/out", "--to", "2", "--include", "x"], 2, "usage"),
        (["reshard", "{run}/ckpt-1", "{tmp}/out", "--to", "2", "--exclude", "*"], 2, "usage"),
        (["convert", "{run}/ckpt-1", "{tmp}/out", "--to", "pt", "--world-size", "2"], 2, "usage"),
        (["convert", "{run}/ckpt-1", "{tmp}/out", "--to", "hf", "--under", "model"], 2, "usage"),
        (["convert", "{run}/ckpt-1", "{tmp}/text/out", "--to", "pt"], 4, "io"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_errors(arguments: list[str], code: int, kind: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    before = sorted(tmp_path.rglob("*"))
    given = [argument.format(run=run, tmp=tmp_path) for argument in arguments]
    ran = ckptkit(*given)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert ran.stderr.startswith("error: ")
    told = ckptkit(*given, "--json")
    assert (told.returncode, told.stderr) == (code, "")
    assert json.loads(told.stdout)["error"]["code"] == kind
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["reshard", "x"],
        ["reshard", "x", "--to", "0"],
        ["reshard", "x", "--to", "many"],
        ["reshard", "x", "--to", "2", "--jobs", "0"],
        ["convert", "x", "--to", "pt"],
        ["convert", "x", "y"],
        ["convert", "x", "y", "--to", "zip"],
        ["convert", "x", "y", "--to", "dcp", "--world-size", "0"],
    ],
    ids=" ".join,
)
def test_bad_options(arguments: list[str], tmp_path: Path) -> None:
    ran = ckptkit(*arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_warning_stands_last(run: Path) -> None:
    ran = ckptkit("consolidate", "ckpt-2", "out", cwd=run)
    last = ran.stderr.splitlines()[-1]
    assert ran.returncode == 0
    assert last.startswith("warning: no config.json found: ")
    assert "--base MODEL --overwrite" in last
    assert "config.json" not in ran.stdout
    assert json.loads(ckptkit("consolidate", "ckpt-2", "other", "--json", cwd=run).stdout)["warnings"] == [last[9:]]
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text('{"model_type": "strange"}')
    ran = ckptkit("consolidate", "ckpt-2", "out", "--base", "model", "--overwrite", cwd=run)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_missing_config_is_an_error_where_you_are_strict(run: Path) -> None:
    ran = ckptkit("consolidate", "ckpt-2", "out", "--strict", cwd=run)
    assert (ran.returncode, ran.stderr.splitlines()[0]) == (
        3,
        "error: ckpt-2: no config.json found: loaders of Hugging Face models cannot open the output",
    )
    assert not (run / "out").exists()
    ran = ckptkit("consolidate", "ckpt-2", "out", "--strict", "--names", "keep", cwd=run)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin"])
def test_a_file_says_its_format(name: str, run: Path) -> None:
    ran = ckptkit("convert", run, name, "--json", cwd=run.parent)
    assert json.loads(ran.stdout)["format"] == "pt"
    assert (run.parent / name).is_file()


@pytest.mark.parametrize(
    ("name", "to"), [("x.safetensors", []), ("x.safetensors", ["--to", "hf"]), ("x.pt", ["--to", "dcp"])]
)
def test_no_directory_is_named_like_a_file(name: str, to: list[str], run: Path) -> None:
    ran = ckptkit("convert", run, name, *to, cwd=run.parent)
    assert (ran.returncode, ran.stdout) == (2, "")
    wanted = to[1] if to else "hf"
    assert ran.stderr == (
        f"error: {name}: `{wanted}` writes a directory, but this is the name of a file\n"
        "hint: name a directory, such as `x`\n"
    )
    assert files(run.parent) == {"run"}
