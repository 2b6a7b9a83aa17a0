"""The values of options: plain ones are read by us, and typer says what is wrong with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from ckptkit.cli.options import PlainCommand
from tests.command import ckptkit


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect"], "missing argument `PATH`"),
        (["reshard", "a", "b"], "missing option --to"),
        (["reshard", "a", "b", "--to", "many"], "--to: expected a whole number, found `many`"),
        (["consolidate", "a", "b", "--jobs", "0"], "--jobs: expected 1 or more, found `0`"),
        (["consolidate", "a", "b", "--jobs", "-1"], "--jobs: expected 1 or more, found `-1`"),
        (
            ["convert", "a", "b", "--to", "zip"],
            "--to: expected `dcp`, `torch_checkpointing`, `hf`, `universal`, `ranks`, `pt` or `adapter`, found `zip`",
        ),
        (["diff", "a", "b", "--rtol", "-0.5"], "--rtol: expected 0 or more, found `-0.5`"),
        (["consolidat"], "hint: run `ckptkit consolidate`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_is_wrong_is_said(arguments: list[str], said: str) -> None:
    ran = ckptkit(*arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr


def every_kind(
    number: int = 3,
    share: float = 0.5,
    text: str | None = None,
    names: list[str] | None = None,
    file: Path | None = None,
    is_on: bool = False,
) -> dict[str, Any]:
    return locals()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--number 7 --text a --names b --names c --is-on",
        "--number +7 --share 1e-3 --file d",
        "--number 007 --share 2",
    ],
)
def test_values_are_those_that_typer_reads(line: str) -> None:
    read = []
    for kind in (None, PlainCommand):
        app = typer.Typer(add_completion=False)
        app.command(cls=kind)(every_kind)
        read.append(get_command(app).main(line.split(), standalone_mode=False))
    assert read[0] == read[1]
