"""Find the commands. Each is loaded when it is asked for, and its options are made then."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from ckptkit.cli.guesses import OPTION_SYNONYMS, SYNONYMS, hint_on_command, hint_on_format, hint_on_option
from ckptkit.cli.settings import name_options
from ckptkit.cli.values import PlainCommand, PlainGroup, UsageError, print_help
from ckptkit.errors import Usage
from ckptkit.version import __version__

# What pydantic says of a value that an option cannot take, in our words.
_PYDANTIC = (
    ("Value error, ", ""),
    ("Input should be a valid integer, unable to parse string as an integer", "expected a whole number"),
    ("Input should be a valid number, unable to parse string as a number", "expected a number"),
    (r"Input should be greater than or equal to (\S+)", r"expected \1 or more"),
    (r"Input should be greater than (\S+)", r"expected more than \1"),
    (r"Input should be less than or equal to (\S+)", r"expected at most \1"),
)

# As `ckptkit --help` groups and orders them; a command is the function of its name in this module of `ckptkit.cli`.
GROUPS = {
    "Convert": {
        "consolidate": "consolidate",
        "reshard": "reshard",
        "convert": "convert",
        "merge": "merge",
        "average": "average",
        "finalize": "finalize",
    },
    "Look": {"inspect": "inspect", "stats": "stats", "diff": "diff", "report": "report"},
    "Check and fix": {"verify": "verify", "manifest": "verify", "doctor": "doctor", "prove": "prove"},
    "Manage runs": {"ls": "ls", "pin": "pin", "unpin": "pin", "prune": "prune", "watch": "watch"},
    "Train": {"estimate": "estimate", "train": "train", "smoke": "train"},
    "Send what changed": {"delta": "delta", "apply": "apply"},
    "Share": {"cp": "cp", "push": "push", "pull": "pull"},
}
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}


def load(name: str) -> Any:
    """Return a command, made out of its function."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    function = getattr(import_module(f"ckptkit.cli.{COMMANDS[name]}"), name)
    # Every argument of `train` has a default: alone it would train.
    app.command(name, cls=PlainCommand, no_args_is_help=name == "train")(name_options(function))
    command: Any = get_command(app)
    command.synonyms = OPTION_SYNONYMS.get(name, {})
    for argument in command.params:
        if argument.param_type_name == "argument":
            argument.display_type_rich = lambda ctx: None  # noqa: ARG005 - typer 0.29 would print `SRC <Path>`
    return command


class Commands(PlainGroup):
    """All commands, of which only the names are known at first."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a command, None if there is none of this name."""
        return load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of a command, the command and its arguments. Raises `Usage` for an unknown one."""
        name = SYNONYMS.get(args[0], args[0])
        if name not in COMMANDS and not name.startswith("-"):
            raise Usage(f"no such command '{name}'", hint=hint_on_command(name, COMMANDS))
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write a section of the help for each group, with the whole summary of each command."""
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), load(name).help.partition("\n")[0]) for name in group])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command line as far as the command; print the help if there is none."""
        if not args and not ctx.resilient_parsing:  # as a shell asks for completions
            print_help(ctx)
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run a command. Raises `Usage` where click found an error in the command line."""
        try:
            return super().main(*args, **settings)
        except UsageError as error:
            raise usage(error) from error


def usage(error: Any) -> Usage:
    """Return an error of click as one of ours."""
    is_unknown = hasattr(error, "possibilities")  # an option, with click's guesses; ours are better
    text = error.message if is_unknown else error.format_message()
    message = " ".join(text.removesuffix(".").split())
    for theirs, ours in _PYDANTIC:
        message = re.sub(theirs, ours, message)
    return Usage(message[:1].lower() + message[1:], hint=hint_on(error, message))


def hint_on(error: Any, message: str) -> str:
    """Return what to type instead."""
    command = error.ctx.command_path if error.ctx else "ckptkit"
    if hasattr(error, "possibilities") and error.ctx and error.ctx.parent:
        shown = error.ctx.command
        options = [name for param in shown.params for name in param.opts if name.startswith("--")]
        arguments = " ".join(shown.collect_usage_pieces(error.ctx)[1:])
        return hint_on_option(command, arguments, error.option_name, options)
    choice = re.search(r"'--to': '(\S+)' is not one of", message)
    return (hint_on_format(choice[1]) if choice else None) or f"run `{command} --help`"


app = typer.Typer(
    name="ckptkit",
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    """Answer `--version`."""
    if wanted:
        typer.echo(f"ckptkit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Convert and check checkpoints of PyTorch distributed training: consolidate, reshard, inspect, verify, train.

    Exit codes: 0 done; 1 a check found something; 2 usage; 3 the input is not a checkpoint, is damaged, or is not
    supported; 4 an I/O failure; 5 refused: the destination exists or a path is unsafe; 130 interrupted; 143 terminated.
    """
