"""A wrong command is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.errors import Usage
from ckptkit.plugins.resume_proof.options import ScriptOptions

RIGHT: dict[str, Any] = {"command": "train --out {run} --steps {steps}"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": "train --out {run} --lr {lr}"}, "--command: expected a placeholder of"),
        ({"command": "train --steps {steps}"}, "--command: expected the placeholder {run}, found none"),
        ({"resume_with": "--from {ckpt}"}, "--resume-with: expected a placeholder of"),
        ({"loss": "loss [0-9.]+"}, "--loss: expected a pattern with one group, found 0"),
        ({"loss": "(loss) ([0-9.]+)"}, "--loss: expected a pattern with one group, found 2"),
        ({"loss": "loss ([0-9.]+"}, "--loss: expected a regular expression"),
        ({"steps": 7}, "--steps: expected a multiple of 4 (--save-every) above it, found 7"),
        ({"steps": 4}, "--steps: expected a multiple of 4 (--save-every) above it, found 4"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Usage) as caught:
        ScriptOptions(**{**RIGHT, **options})
    assert message in caught.value.message


def test_an_option_of_a_script_needs_the_command(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="loss needs command"):
        ckptkit.smoke(tmp_path / "run", tmp_path / "out", loss="loss ([0-9.]+)")
    with pytest.raises(Usage, match="optimizer does not go with command"):
        ckptkit.smoke(tmp_path / "run", tmp_path / "out", **RIGHT, optimizer="adam")
    assert not (tmp_path / "run").exists()


def test_placeholders_are_quoted_and_the_shell_keeps_its_own() -> None:
    proof = ScriptOptions("echo ${HOME} {run} {nproc}", resume_with="--from {checkpoint}")
    line = proof.command_line(Path("/a b"), 2, Path("/c"))
    assert line == "echo ${HOME} '/a b' 2 --from /c"
    assert proof.command_line(Path("/a"), 2, None) == "echo ${HOME} /a 2"
    assert not proof.is_resuming_by_itself
    assert proof.has_nproc_placeholder


def test_losses_are_in_a_file_or_in_the_output() -> None:
    assert ScriptOptions("x {run}", loss="metrics.jsonl:loss").find_loss_file_and_key == ("metrics.jsonl", "loss")
    assert ScriptOptions("x {run}", loss="loss: ([0-9.]+)").find_loss_file_and_key is None
