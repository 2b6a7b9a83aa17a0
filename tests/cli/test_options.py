"""The options of every command have the names that we give them, whatever the version of typer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from typer.main import get_command

from ckptkit.cli.commands import (
    _COMMANDS,
    COMMANDS,
    OPTION_SYNONYMS,
    SYNONYMS,
    app,
    fit_hint_to_command,
    hint_on_command,
    make_command,
)
from ckptkit.errors import Usage
from ckptkit.settings import Setting, settings_of
from ckptkit.state.options import ConvertOptions
from ckptkit.training.config import train_settings as settings_of_training

COMMAND: Any = get_command(app)


def help_of(capsys: pytest.CaptureFixture[str], command: str, *options: str) -> str:
    """The help of a command, given with other options. An option that the command does not have is an error."""
    COMMAND.main([command, "--help", *options], standalone_mode=False)
    return capsys.readouterr().out


def whole_help(capsys: pytest.CaptureFixture[str]) -> str:
    COMMAND.main(["--help"], standalone_mode=False)
    return capsys.readouterr().out


def options_in(text: str) -> dict[str, str]:
    """The names of options in a help, each with its placeholder."""
    lines = re.findall(r"^  ((?:-[\w-]+(?:, | / )?)+) ?(\S*)", text[text.index("ptions:\n") :], re.MULTILINE)
    return {name: placeholder for names, placeholder in lines for name in re.split(", | / ", names)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_the_help_shows_is_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, command)
    options = options_in(text)
    assert options.keys() >= {"-q", "--quiet", "-h", "--help"}
    line = [word for name, placeholder in options.items() for word in [name, *["x"] * bool(placeholder)]]
    assert help_of(capsys, command, *line) == text
    assert not [name for name in options if name != name.lower()]  # as typer 0.27 makes of a placeholder
    assert not re.search(r"<[\w\[\]]+>", text)  # a type of Python, as `list[Path]`


@pytest.mark.parametrize(
    ("command", "settings"), [("convert", settings_of(ConvertOptions)), ("train", settings_of_training())]
)
def test_every_setting_is_an_option(
    command: str, settings: Mapping[str, Setting], capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_in(help_of(capsys, command)).keys()
    names = [name.replace("_", "-") for name in settings]
    assert not [name for name in names if not options & {f"--{name}", f"--no-{name}"}]


@pytest.mark.parametrize(("synonym", "name"), SYNONYMS.items())
def test_synonyms_of_commands_are_accepted(synonym: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(capsys, synonym) == help_of(capsys, name)
    assert synonym not in [line.split()[0] for line in whole_help(capsys).splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("command", "synonym", "name"),
    [(command, *pair) for command, pairs in OPTION_SYNONYMS.items() for pair in pairs.items()],
)
def test_synonyms_of_options_are_accepted(
    command: str, synonym: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"train": ["a"], "smoke": [], "estimate": ["8b", "--world-size", "8"], "merge": ["a", "b", "c"]}.get(
        command, ["a", "b"]
    )
    value = "hf" if (command, name) == ("convert", "--to") else "7"
    make = make_command(command).make_context
    read = [make(command, [*arguments, option, value]).params for option in (synonym, name)]
    assert read[0] == read[1]
    assert float(read[0][name.removeprefix("--").replace("-", "_")]) == 7 if value == "7" else read[0]["to"] == value
    assert synonym not in options_in(help_of(capsys, command))


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("fix run", "run `ckptkit doctor CKPT --fix OUT`"),
        ("salvage run out", "run `ckptkit consolidate SRC OUT --salvage`"),
        ("delete run", "run `ckptkit prune RUN`"),
        ("shard run", "run `ckptkit reshard SRC OUT --to N`"),
        ("verfy run", "run `ckptkit verify`"),
        ("nonsense", "run `ckptkit --help`"),
        ("convert run out --key model", "pass --under"),
        ("consolidate run out --key model", "pass --include"),
        ("consolidate run out --force", "pass --overwrite"),
        ("prune run --force", "pass --yes"),
        ("prune run --keep 3", "pass --keep-last, --keep-every or --keep-best"),
        ("estimate 8b --batch-size 3", "pass --micro-batch-size"),
        ("verify run --quick", "pass --fast"),
        ("inspect run --map", "pass --shards"),
        ("doctor run --fix", "pass --fix OUT"),
        ("consolidate run --output out", "pass it without an option: `ckptkit consolidate SRC OUT`"),
        ("consolidate run out --to dcp", "run `ckptkit convert SRC OUT --to FORMAT` for another format"),
        ("convert run out --to safetensors", "pass --to hf"),
        ("convert run out --to FSDP", "pass --to dcp"),
        ("convert run out --to zip", "run `ckptkit convert --help`"),
    ],
)
def test_guesses_are_answered_with_the_right_name(line: str, hint: str) -> None:
    with pytest.raises(Usage) as raised:
        COMMAND.main(line.split(), prog_name="ckptkit", standalone_mode=False)
    assert raised.value.hint == hint


def test_every_hint_on_a_command_is_a_command_line() -> None:
    for name in _COMMANDS:
        verb, *options = hint_on_command(name, COMMANDS).removeprefix("run `ckptkit ").strip("`").split()
        assert verb in (*COMMANDS, "--version")
        known = {one for param in make_command(verb).params for one in param.opts} if verb in COMMANDS else set()
        assert {word for word in options if word.startswith("--")} <= known


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    whole = whole_help(capsys)
    COMMAND.main(["help"], standalone_mode=False)
    assert capsys.readouterr().out == whole
    COMMAND.main(["help", "reshard"], standalone_mode=False)
    assert capsys.readouterr().out == help_of(capsys, "reshard")


@pytest.mark.parametrize(
    ("words", "hint", "fitting"),
    [
        ("consolidate a b", "pass --base MODEL, or keep the names with --names keep", None),
        ("diff a b", "pass --base MODEL, or keep the names with --names keep", "pass --base MODEL"),
        ("stats a", "pass --base MODEL, or keep the names with --names keep", ""),
        ("merge a b c", "drop --merge, or pass --to hf", "pass --to hf"),
        ("prove a --against b", "pass --optimizer-order, or --base MODEL", "pass --base MODEL"),
        ("stats a", "run `ckptkit convert SRC OUT --to pt` first", None),
        ("stats a", "use an older checkpoint", None),
        ("stats a", "pip install --upgrade x, or keep the names with --names keep", "pip install --upgrade x"),
        ("help", "pass --whatever", None),
        (
            "-q stats a",
            "pass --to hf; `ckptkit inspect --tensors` shows all names",
            "`ckptkit inspect --tensors` shows all names",
        ),
    ],
)
def test_a_hint_names_no_option_that_the_command_lacks(words: str, hint: str, fitting: str | None) -> None:
    assert (fit_hint_to_command(hint, words.split()) or "") == (hint if fitting is None else fitting)
