"""`ckptkit report` and the shard map of `ckptkit inspect` on the command line."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import producers
from tests.command import ckptkit
from tests.conftest import Produce
from tests.plugins.report.runs import make_run


def on_terminal(*arguments: object, columns: int = 80, **environment: str) -> str:
    """What a command shows on a terminal of so many columns."""
    command = [sys.executable, "-m", "ckptkit", *map(str, arguments)]
    main, side = pty.openpty()
    os.set_inheritable(side, True)
    known = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables = {**known, "COLUMNS": str(columns), **environment}
    with subprocess.Popen(command, stdout=side, stderr=subprocess.DEVNULL, env=variables) as running:
        os.close(side)
        shown = b""
        while block := read(main):
            shown += block
    os.close(main)
    assert running.returncode == 0
    return shown.decode().replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side is closed
        return b""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "run")


def test_report(run: Path, tmp_path: Path) -> None:
    ran = ckptkit("report", run)
    assert ran.returncode == 0
    assert ran.stdout.startswith(f"{run}/report.html: ")
    assert ran.stderr == ""
    told = json.loads(ckptkit("report", run, tmp_path / "out.html", "--fast", "--json").stdout)
    assert told == {
        "output": str(tmp_path / "out.html"),
        "nbytes": (tmp_path / "out.html").stat().st_size,
        "checkpoint": str(run / "ckpt-60"),
    }


def test_report_refuses_what_is_not_its_own(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("mine")
    ran = ckptkit("report", run, tmp_path / "mine.html", "--fast")
    assert ran.returncode == 5
    assert "--overwrite" in ran.stderr
    assert ckptkit("report", tmp_path).returncode == 3
    assert ckptkit("report", run / "ckpt-60").returncode == 2


def test_the_map_needs_no_colors(produce: Produce) -> None:
    shown = ckptkit("inspect", produce(producers.mesh).root, "--shards").stdout
    assert "\x1b" not in shown
    assert re.search(r"^0░+1▒+ +140 B +4 +grid  \(uneven, by axes 0 and 1\)\n2░+3▒+$", shown, re.MULTILINE)
    assert "4 ranks, 185 B each on average; rank 0 has the most, 1.19 times the average" in shown
    assert re.search(r"^3 +140 B +█+", shown, re.MULTILINE)


def test_the_map_on_a_terminal(run: Path) -> None:
    colored = on_terminal("inspect", run, "--shards")
    assert "\x1b[" in colored
    plain = on_terminal("inspect", run, "--shards", NO_COLOR="1")
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored).translate({ord("░"): " ", ord("▒"): " "}) == plain.translate(
        {ord("░"): " ", ord("▒"): " "}
    )
    assert max(map(len, plain.partition("\nrank ")[2].splitlines())) <= 80
    assert "layers.0-3.attn.weight  x4" in plain


def test_the_map_as_a_file(run: Path, tmp_path: Path) -> None:
    ran = ckptkit("inspect", run, "--svg", tmp_path / "map.svg")
    assert ran.returncode == 0
    assert "map.svg" in ran.stderr
    made = (tmp_path / "map.svg").read_text()
    assert made.startswith("<svg xmlns=")
    again = ckptkit("inspect", run, "--svg", tmp_path / "map.svg", "--json")
    assert again.returncode == 5
    assert json.loads(again.stdout)["error"]["code"] == "occupied"
    assert (tmp_path / "map.svg").read_text() == made
