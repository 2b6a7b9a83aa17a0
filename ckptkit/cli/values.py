"""Parse simple option and argument values without pydantic.

typer passes every value through pydantic, even None, which doubles the start-up time. Values of other types and invalid
values are left to typer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

UsageError: Any = typer.BadParameter.__base__  # from click, or from the copy of click in newer versions of typer
Parameter = TyperArgument | TyperOption
_PLAIN = (bool, int, float, str)
_COMMON = ("also", "jobs", "no_sync", "quiet", "json", "help")  # parameters of most commands


class PlainCommand(TyperCommand):
    """A command that parses simple values itself. `synonyms` maps names of options that the help does not show."""

    synonyms: Mapping[str, str] = MappingProxyType({})

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser of the command line, which also accepts the synonyms of options."""
        parser = super().make_parser(ctx)
        for synonym, name in self.synonyms.items():
            (option,) = (copy(param) for param in self.params if name in param.opts)
            option.opts = [synonym]
            option.add_to_parser(parser, ctx)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line; print the help if it is empty and the command has `no_args_is_help`."""
        if self.no_args_is_help and not args and not ctx.resilient_parsing:
            exit_with_help(ctx)
        parse_plain_values(self.get_params(ctx))
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = error.ctx or ctx  # click does not set the command if an option lacks its value
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options of this command, and the options that most commands have."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Common options": []}
        params = {param.name: param for param in self.get_params(ctx)}
        last = [params.pop(name) for name in _COMMON if name in params]
        for param in (*params.values(), *last):
            kind = "Arguments" if isinstance(param, TyperArgument) else "Common options" if param in last else "Options"
            if record := param.get_help_record(ctx):
                sections[kind].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the words of the usage line: `SRC`, `SRC...` if repeatable, `[OUT]` if optional."""
        pieces = ["[OPTIONS]"]
        for argument in self.params:
            if isinstance(argument, TyperArgument):
                is_repeatable = argument.nargs == -1 and "..." not in str(argument.metavar)
                name = f"{argument.metavar}{'...' if is_repeatable else ''}"
                pieces.append(name if argument.required else f"[{name}]")
        return pieces


def exit_with_help(ctx: Any) -> NoReturn:
    """Print the help of a command to stderr, and exit with code 2 (usage)."""
    typer.echo(ctx.get_help(), err=True)
    raise typer.Exit(2)


def parse_plain_values(parameters: Any) -> None:
    """Let parameters parse their simple values themselves."""
    for parameter in parameters:
        parameter.process_value = partial(parse_value, parameter, parameter.process_value)


def parse_value(parameter: Parameter, leave_to_typer: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """Return the parsed value of a parameter, from the command line or its default."""
    try:
        parsed = parse_values(parameter, value)
    except (AttributeError, ValueError):  # older versions of typer have no `type_descriptor`, and do not use pydantic
        return leave_to_typer(ctx, value)
    return parsed if parameter.callback is None else parameter.callback(ctx, parameter, parsed)


def parse_values(parameter: Parameter, value: Any) -> Any:
    """Return a parsed value, or a list of them. Raises `ValueError` for values that typer must handle."""
    is_many = parameter.multiple or parameter.nargs == -1
    if parameter.required and not value:
        raise ValueError("missing")
    if value is None:
        return () if is_many else None
    return [parse_single_value(parameter, item) for item in value] if is_many else parse_single_value(parameter, value)


def parse_single_value(parameter: Parameter, value: Any) -> Any:
    """Return a single parsed value. Raises `ValueError` for values that typer must handle."""
    described = parameter.type_descriptor
    kind = get_args(described.annotation)[0] if described.is_list else described.annotation
    about = described.parameter_info
    if about.parser is not None:
        return about.parser(value)
    if value in (described.choices or ()) or (kind in _PLAIN and isinstance(value, kind)):
        return value
    if kind is int and value.isascii() and value.isdecimal() and int(value) >= (about.min or 0):
        return int(value)
    raise ValueError("not plain")
