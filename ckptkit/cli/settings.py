"""Make options of a command out of the fields of a dataclass, and name the options of every command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.models import OptionInfo

from ckptkit.io.path import to_path
from ckptkit.settings import Setting
from ckptkit.words import parse_bytes

Command = Callable[..., None]
_SIZE = "SIZE"  # the placeholder of a number of bytes
_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def with_options(
    settings: Mapping[str, Setting], *, leave_out: Iterable[str] = (), over_a_file: bool = False
) -> Callable[[Command], Command]:
    """Return what gives a command an option for each setting in place of its `**options`, before its `quiet`.

    With `over_a_file` they override the settings of a file: those not given are None, and flags come with a `--no-`.
    """
    make = overriding if over_a_file else option
    options = [make(name, setting) for name, setting in settings.items() if name not in set(leave_out)]

    def change(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        at = next(i for i, parameter in enumerate(own) if parameter.name == "quiet")
        every = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own]
        return declare(command, [*every[:at], *options, *every[at:]])

    return change


def declare(command: Command, parameters: Sequence[inspect.Parameter]) -> Command:
    """Return the command; typer sees these parameters instead of its own."""
    command.__signature__ = inspect.signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def name_options(command: Command) -> Command:
    """Return the command; the name of each option is written out, and so is its placeholder.

    Versions of typer derive both differently: 0.27 names an option `--DTYPE` if `DTYPE` is its placeholder.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    return declare(command, [name_option(parameter) for parameter in parameters])


def name_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter. If it is an option, `dry_run` is named `--dry-run`.

    A flag that may also be None, so that a file can set it, is `--dry-run/--no-dry-run`.
    """
    kind, about = get_args(parameter.annotation)
    if not isinstance(about, OptionInfo):
        return parameter
    about = copy(about)  # several commands share it
    if about.default is ...:  # where typer keeps the first name of an option that an annotation describes
        name = parameter.name.replace("_", "-")
        about.default = f"--{name}/--no-{name}" if kind == bool | None else f"--{name}"
    about.metavar = about.metavar or placeholder_of(kind)
    return parameter.replace(annotation=Annotated[kind, about])


def placeholder_of(kind: Any) -> str | None:
    """Return the placeholder of an option of this type, or of a list of it; None for a flag."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return _PLACEHOLDERS.get(kind) or next(filter(None, map(placeholder_of, get_args(kind))), None)


def option(name: str, setting: Setting) -> inspect.Parameter:
    """Return the option of a setting: `--dry-run` for `dry_run`, and `--no-sync` for a `sync` that is on by default."""
    default: Any = None if setting.default in (MISSING, ()) else setting.default
    if setting.kind is bool:
        return parameter(f"no_{name}" if setting.default else name, bool, False, described(setting))
    if setting.placeholder == _SIZE:
        return parameter(name, int, spell_bytes(default), described(setting, parser=parse_bytes))
    kind = kind_of(setting)
    return parameter(name, kind if default is not None else kind | None, default, described(setting))


def described(setting: Setting, **more: Any) -> Any:
    """Return the option of a setting as typer wants it described."""
    return typer.Option(help=setting.text, metavar=setting.placeholder, min=setting.least, **more)


def overriding(name: str, setting: Setting) -> inspect.Parameter:
    """Return the option of a setting that a file may have too."""
    is_given = setting.default not in (MISSING, None, ())
    text = f"{setting.text} [{spell(setting.default)}]" if is_given else setting.text
    place: dict[str, Any] = {"parser": to_path} if setting.kind is Path else {}
    return parameter(
        name,
        kind_of(setting) | None,
        None,
        typer.Option(help=text, metavar=setting.placeholder, show_default=False, **place),
    )


def parameter(name: str, kind: Any, default: object, described: Any) -> inspect.Parameter:
    annotation = Annotated[kind, described]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def kind_of(setting: Setting) -> Any:
    return list[str] if get_origin(setting.kind) is tuple else setting.kind


def spell(value: object) -> str:
    """Return a default as a user would type it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def spell_bytes(size: int) -> str:
    return f"{size / 10**9:g}GB"


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings among `options` that the user gave, under the names that they have in the dataclass."""
    values = {name: value for name, value in options.items() if value is not None and value != []}
    off = {name.removeprefix("no_"): not values.pop(name) for name in list(values) if name.startswith("no_")}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()} | off
