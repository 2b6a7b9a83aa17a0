"""The table of commands, with synonyms for guessed names; imports the module of a command only when it runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ckptkit.cli.options import PlainCommand, UsageError, as_typer_command, exit_with_help, install_plain_value_parser
from ckptkit.entry_points import PluginTable, import_object
from ckptkit.errors import SALVAGE, SALVAGE_HERE, Usage
from ckptkit.version import __version__
from ckptkit.words import join_with_or

# Synonyms that ckptkit accepts, of commands and of options.
SYNONYMS = {
    "export": "consolidate",
    **dict.fromkeys(("info", "show"), "inspect"),
    **dict.fromkeys(("check", "validate"), "verify"),
    "compare": "diff",
    "list": "ls",
    "copy": "cp",
    "upload": "push",
    "download": "pull",
}
OPTION_SYNONYMS = {
    "average": {"--weights": "--factors"},  # the name before 0.2
    "merge": {"--weights": "--factors"},
    "consolidate": dict.fromkeys(("--model", "--config"), "--base"),
    "reshard": dict.fromkeys(("--world-size", "--ranks", "--gpus", "--nproc"), "--to"),
    "convert": {**dict.fromkeys(("--ranks", "--gpus"), "--world-size"), "--format": "--to"},
    "estimate": {**dict.fromkeys(("--ranks", "--gpus", "--nproc"), "--world-size"), "--seq-len": "--sequence-length"},
    "train": {
        **dict.fromkeys(("--world-size", "--ranks", "--gpus", "--nproc-per-node"), "--nproc"),
        "--learning-rate": "--lr",
        "--max-steps": "--steps",
        "--seq-len": "--sequence-length",
        **dict.fromkeys(("--save-steps", "--save-interval"), "--save-every"),
    },
    "smoke": dict.fromkeys(("--world-size", "--ranks", "--gpus"), "--nproc"),
}

# Guessed commands that ckptkit does not run, with the command line that the hint suggests: they need other options,
# or they delete something.
_COMMANDS = {
    **dict.fromkeys(("fix", "repair"), "doctor CKPT --fix OUT"),
    **dict.fromkeys(("salvage", "recover", "rescue"), "consolidate SRC OUT --salvage"),
    **dict.fromkeys(("delete", "remove", "rm", "clean"), "prune RUN"),
    **dict.fromkeys(("split", "shard"), "reshard SRC OUT --to N"),
    **dict.fromkeys(("unshard", "gather", "to-hf", "hf", "safetensors"), "consolidate SRC OUT"),
    "quantize": "consolidate SRC OUT --quantize fp8-block",
    "resume": "train RUN --resume auto",
    "status": "ls RUN",
    "version": "--version",
}
# Guessed options, with candidates for the hint: it suggests the first that the command has.
_OPTIONS = {
    **dict.fromkeys(("--force", "-f"), ("--overwrite", "--yes")),
    **dict.fromkeys(("--key", "--prefix"), ("--under", "--include")),
    **dict.fromkeys(("--keys", "--verbose", "-v"), ("--tensors", "--all")),
    "--map": ("--shards",),
    "--quick": ("--fast",),
    "--repair": ("--fix",),
    "--tolerance": ("--rtol",),
    **dict.fromkeys(("--workers", "--threads"), ("--jobs",)),
    **dict.fromkeys(("--checkpoint", "--ckpt"), ("--resume",)),
}
_ARGUMENTS = {"--out", "--output", "--output-dir", "-o", "--dst", "--input", "-i", "--src", "--checkpoint", "--run"}
_FORMATS = {  # other tools' names of formats
    **dict.fromkeys(("safetensors", "huggingface", "transformers"), "hf"),
    **dict.fromkeys(("fsdp", "sharded", "distcp"), "dcp"),
    **dict.fromkeys(("torch", "pth", "bin"), "pt"),
    "lora": "adapter",
}


def hint_on_command(name: str, commands: Iterable[str]) -> str:
    near = get_close_matches(name, commands, n=1, cutoff=0.75)
    return f"run `ckptkit {_COMMANDS.get(name, near[0] if near else '--help')}`"


def hint_on_option(command: str, usage: str, guess: str, options: Iterable[str]) -> str:
    """Return the hint for an unknown option of a command: what to pass instead. `usage` shows its arguments."""
    known = list(options)
    suggestions = [name for name in _OPTIONS.get(guess, ()) if name in known][:1]
    if not suggestions:  # the options that share the most words with the guess, or else have a similar spelling
        words = set(guess.strip("-").split("-"))
        shared = {name: len(words & set(name.strip("-").split("-"))) for name in known}
        most = max(shared.values(), default=0)
        suggestions = [name for name in shared if shared[name] == most]
        suggestions = suggestions if most else get_close_matches(guess, shared, cutoff=0.8)
    if suggestions:
        return f"pass {join_with_or(suggestions)}"
    if guess in _ARGUMENTS:
        return f"pass it without an option: `{command} {usage}`"
    if guess in ("--to", "--format"):
        own = "pass --json for JSON, or " if guess == "--format" and "--json" in known else ""
        return f"{own}run `ckptkit convert SRC OUT --to FORMAT` for another format"
    return f"run `{command} --help`"


def fit_hint_to_command(hint: str, arguments: Sequence[str]) -> str | None:
    """Return a hint for the command line `arguments` without the clauses on options that the command does not have.

    A clause with a command line of its own, such as `ckptkit convert SRC OUT --to pt` or `pip install`, stays. Returns
    None if no clause is left.
    """
    name = next((known for word in arguments if (known := SYNONYMS.get(word, word)) in COMMANDS), None)
    if name is None or "--" not in hint:
        return hint
    options = {
        option for parameter in make_command(name).params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    if "--salvage" in options:
        hint = hint.replace(SALVAGE, SALVAGE_HERE)
    first, *more = re.split(r"((?:; |, or |, and |: or | or (?=pass |drop |run )))", hint)
    pairs = [("", first), *zip(more[::2], more[1::2], strict=True)]
    kept = [
        (joint, clause)
        for joint, clause in pairs
        if re.search(r"\b(ckptkit|pip) ", clause) or options.issuperset(re.findall(r"(?<![\w-])--[a-z][a-z-]+", clause))
    ]
    fitting = "".join(joint * bool(i) + clause for i, (joint, clause) in enumerate(kept))
    return f"pass {fitting}" if fitting.startswith("--") else fitting or None


# Regular expressions for messages of click and pydantic, and their replacements, in this order.
_MESSAGES = (
    ("Value error, ", ""),
    ("Input should be a valid integer, unable to parse string as an integer", "expected a whole number"),
    ("Input should be a valid number, unable to parse string as a number", "expected a number"),
    (r"Input should be greater than or equal to (\S+)", r"expected \1 or more"),
    (r"Input should be greater than (\S+)", r"expected more than \1"),
    (r"Input should be less than or equal to (\S+)", r"expected at most \1"),
    (r"'(--[^']+)'", r"\1"),
    (r"'([^'`]+)'", r"`\1`"),
    (r"^Invalid value for (--\S+): ", r"\1: "),
    (r"`[^`]*` is not one of (.*), ([^,]+)$", r"expected \1 or \2"),
    (r"(`[^`]*`) is not a valid integer(?: range)?", r"expected a whole number, found \1"),  # as in typer 0.26
    (r"(`[^`]*`) is not a valid float(?: range)?", r"expected a number, found \1"),
    (r"(-?[\d.]+) is not in the range x>=([\d.]+)", r"expected \2 or more, found `\1`"),
    (r"^Option (--\S+) requires an argument", r"\1: expected a value, found none"),
    (r"^Option (--\S+) does not take a value", r"\1: expected no value, found one"),
    (r"^Got unexpected extra argument(?:s|\(s\))? \((.*)\)$", r"too many arguments: `\1`"),
)


class KnownCommand(NamedTuple):
    """An entry of `COMMANDS`: the command's heading in `ckptkit --help`, and its `module:function`."""

    heading: str
    where: str


COMMANDS = PluginTable(
    "ckptkit.commands",
    KnownCommand,
    {
        "consolidate": KnownCommand("Convert", "ckptkit.cli.convert:consolidate"),
        "reshard": KnownCommand("Convert", "ckptkit.cli.convert:reshard"),
        "convert": KnownCommand("Convert", "ckptkit.cli.convert:convert"),
        "merge": KnownCommand("Convert", "ckptkit.cli.convert:merge"),
        "average": KnownCommand("Convert", "ckptkit.cli.convert:average"),
        "finalize": KnownCommand("Convert", "ckptkit.cli.convert:finalize"),
        "inspect": KnownCommand("Look", "ckptkit.cli.inspect:inspect"),
        "stats": KnownCommand("Look", "ckptkit.cli.stats:stats"),
        "diff": KnownCommand("Look", "ckptkit.cli.diff:diff"),
        "report": KnownCommand("Look", "ckptkit.plugins.report.command:report"),
        "verify": KnownCommand("Check and fix", "ckptkit.cli.verify:verify"),
        "manifest": KnownCommand("Check and fix", "ckptkit.cli.verify:manifest"),
        "doctor": KnownCommand("Check and fix", "ckptkit.plugins.doctor.command:doctor"),
        "prove": KnownCommand("Check and fix", "ckptkit.plugins.prove.command:prove"),
        "ls": KnownCommand("Manage runs", "ckptkit.cli.ls:ls"),
        "pin": KnownCommand("Manage runs", "ckptkit.cli.prune:pin"),
        "unpin": KnownCommand("Manage runs", "ckptkit.cli.prune:unpin"),
        "prune": KnownCommand("Manage runs", "ckptkit.cli.prune:prune"),
        "watch": KnownCommand("Manage runs", "ckptkit.plugins.watch.command:watch"),
        "estimate": KnownCommand("Train", "ckptkit.plugins.estimate.command:estimate"),
        "train": KnownCommand("Train", "ckptkit.cli.train:train"),
        "smoke": KnownCommand("Train", "ckptkit.cli.train:smoke"),
        "delta": KnownCommand("Send what changed", "ckptkit.plugins.deltas.command:delta"),
        "apply": KnownCommand("Send what changed", "ckptkit.plugins.deltas.command:apply"),
        "cp": KnownCommand("Share", "ckptkit.cli.cp:cp"),
        "push": KnownCommand("Share", "ckptkit.plugins.hub.command:push"),
        "pull": KnownCommand("Share", "ckptkit.plugins.hub.command:pull"),
    },
)


def make_command(name: str) -> Any:
    """Return the click command of a function."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # All arguments of `train` have defaults: without this, `ckptkit train` would start a training.
    app.command(name, cls=PlainCommand, no_args_is_help=name == "train")(
        as_typer_command(import_object(COMMANDS[name].where))
    )
    command: Any = get_command(app)
    command.synonyms = OPTION_SYNONYMS.get(name, {})
    for argument in command.params:
        if argument.param_type_name == "argument":
            argument.display_type_rich = lambda ctx: None  # noqa: ARG005 - typer 0.29 would print `SRC <Path>`
    return command


class Commands(TyperGroup):
    """The group of all commands, which creates a command only when it is needed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": dict.fromkeys(COMMANDS.own)})

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of all commands, including commands of other packages (entry points)."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        return make_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of a command, the command and its arguments. Raises `Usage` for an unknown command."""
        name = SYNONYMS.get(args[0], args[0])
        if name not in COMMANDS and not name.startswith("-"):
            raise Usage(f"no such command `{name}`", hint=hint_on_command(name, COMMANDS))
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write a section of the help for each heading, with the full first line of each command's help."""
        width = max(map(len, COMMANDS))
        for heading in dict.fromkeys(known.heading for known in COMMANDS.values()):
            with formatter.section(heading):
                group = [name for name, known in COMMANDS.items() if known.heading == heading]
                formatter.write_dl([(name.ljust(width), make_command(name).help.partition("\n")[0]) for name in group])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line up to the command; print the help if there is no command."""
        if not args and not ctx.resilient_parsing:  # a shell that asks for completions parses resiliently
            exit_with_help(ctx)
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        install_plain_value_parser(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run a command. Raises `Usage` for an error that click finds in the command line."""
        try:
            return super().main(*args, **settings)
        except UsageError as error:
            raise to_usage_error(error) from error


def to_usage_error(error: Any) -> Usage:
    """Return an error of click as a `Usage`, in the wording of ckptkit."""
    is_unknown = hasattr(
        error, "possibilities"
    )  # unknown option: drop click's suggestions, `hint_on_click_error` has better ones
    text = error.message if is_unknown else error.format_message()
    message = " ".join(text.removesuffix(".").split())
    # if too few arguments are given, click reports the repeatable argument, not the last one, as missing
    if message.startswith("Missing argument") and error.param.nargs == -1:
        message = f"missing argument: expected {' '.join(error.ctx.command.collect_usage_pieces(error.ctx)[1:])}"
    raw = message
    for theirs, ours in _MESSAGES:
        message = re.sub(theirs, ours, message)
    if option := re.match(r"(--\S+): expected (?!.*found)", message):
        pairs = [*pairwise(sys.argv), *(word.split("=", 1) for word in sys.argv if "=" in word)]
        if value := next((value for name, value in reversed(pairs) if name == option[1]), None):  # the last one counts
            message += f", found `{value}`"
    return Usage(message[:1].lower() + message[1:], hint=hint_on_click_error(error, raw))


def hint_on_click_error(error: Any, message: str) -> str:
    """Return the hint for an error of click: what to type instead."""
    command = error.ctx.command_path if error.ctx else "ckptkit"
    if not (error.ctx and error.ctx.parent):
        return f"run `{command} --help`"
    click_command = error.ctx.command
    arguments = " ".join(click_command.collect_usage_pieces(error.ctx)[1:])
    if hasattr(error, "possibilities"):
        options = [name for param in click_command.params for name in param.opts if name.startswith("--")]
        return hint_on_option(command, arguments, error.option_name, options)
    choice = re.search(r"'--to': (?:Value error, )?'(\S+)' is not one of", message)
    if choice and choice[1].lower() in _FORMATS:
        return f"pass --to {_FORMATS[choice[1].lower()]}"
    if re.search("(?i)argument", message) and not message.startswith("Option"):
        return f"type `{command} {arguments}`; `{command} --help` describes the arguments"
    missing = re.search(r"(?:Missing option|Option) '(--\S+)'", message)
    option = next((param for param in click_command.params if missing and missing[1] in param.opts), None)
    return f"pass {missing[1]} {option.metavar}" if missing and option and option.metavar else f"run `{command} --help`"


app = typer.Typer(
    name="ckptkit",
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
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
