"""Read the plain values of options and arguments. Typer has pydantic read every one, None too, which doubles its start.

What is not plain, or is wrong, is left to typer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, get_args

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy of it that newer versions of typer contain
Parameter = TyperArgument | TyperOption
_PLAIN = (bool, int, float, str)


class PlainCommand(TyperCommand):
    """A command that reads the plain values of its parameters itself. `synonyms` of its options are not in its help."""

    synonyms: Mapping[str, str] = MappingProxyType({})

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser of a command line. It knows each option by its synonyms too."""
        parser = super().make_parser(ctx)
        for synonym, name in self.synonyms.items():
            (option,) = (copy(param) for param in self.params if name in param.opts)
            option.opts = [synonym]
            option.add_to_parser(parser, ctx)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command line; print the help if there is none, where the command asks for that."""
        if self.no_args_is_help and not args and not ctx.resilient_parsing:
            print_help(ctx)
        take_over(self.get_params(ctx))
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = error.ctx or ctx  # click does not say which command lacks the value of an option
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the words of the usage: `SRC`, `SRC...` for one or more, `[OUT]` for what may be left out."""
        pieces = ["[OPTIONS]"]
        for argument in self.params:
            if isinstance(argument, TyperArgument):
                name = f"{argument.metavar}{'...' if argument.nargs == -1 else ''}"
                pieces.append(name if argument.required else f"[{name}]")
        return pieces


class PlainGroup(TyperGroup):
    """A group of commands that does so with the options that it has beside them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command line as far as the command."""
        take_over(self.get_params(ctx))
        return super().parse_args(ctx, args)


def print_help(ctx: Any) -> NoReturn:
    """Print the help of a command to stderr, and exit as after a wrong use."""
    typer.echo(ctx.get_help(), err=True)
    raise typer.Exit(2)


def take_over(parameters: Any) -> None:
    for parameter in parameters:
        parameter.process_value = partial(process, parameter, parameter.process_value)


def process(parameter: Parameter, leave_to_typer: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """Return the value of a parameter from what was typed, or from its default."""
    try:
        found = read(parameter, value)
    except (AttributeError, ValueError):  # an older typer has no descriptor, and no pydantic
        return leave_to_typer(ctx, value)
    return found if parameter.callback is None else parameter.callback(ctx, parameter, found)


def read(parameter: Parameter, value: Any) -> Any:
    """Return a plain value, or several. Raises `ValueError` where typer has something to say."""
    is_many = parameter.multiple or parameter.nargs == -1
    if parameter.required and not value:
        raise ValueError("missing")
    if value is None:
        return () if is_many else None
    return [read_one(parameter, one) for one in value] if is_many else read_one(parameter, value)


def read_one(parameter: Parameter, value: Any) -> Any:
    """Return a plain value. Raises `ValueError` for any other."""
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
