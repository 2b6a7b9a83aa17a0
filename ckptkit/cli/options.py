"""Create the options and arguments of a command, many from the fields of a dataclass, and parse plain values.

typer passes every value through pydantic, even None, which doubles the start-up time. Values of other types and invalid
values are left to typer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, replace
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption
from typer.models import OptionInfo

from ckptkit.cli.output import QUIET, print_note
from ckptkit.errors import Usage
from ckptkit.io.path import to_path
from ckptkit.settings import Setting, option_name
from ckptkit.words import parse_bytes

Command = Callable[..., None]
_SIZE = "SIZE"  # placeholder of options that take a number of bytes
_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
UsageError: Any = typer.BadParameter.__base__  # from click, or from the copy of click in newer versions of typer
Parameter = TyperArgument | TyperOption
_PLAIN = (bool, int, float, str)
_COMMON = ("also", "jobs", "no_sync", "quiet", "json", "help")  # parameters of most commands


def with_options(
    settings: Mapping[str, Setting],
    *,
    leave_out: Iterable[str] = (),
    insert_before: str = "",
    overrides_file: bool = False,
) -> Callable[[Command], Command]:
    """Return a decorator that adds an option for each setting to a command, in place of `**options`.

    The help shows them after the other options, or in front of the option `insert_before`.

    With `overrides_file` the options override settings of a file: an option that is not given is None, and each flag
    also has a `--no-` form.
    """
    make = option_overriding_file if overrides_file else option_of_setting
    options = [make(name, setting) for name, setting in settings.items() if name not in set(leave_out)]

    def change(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        at = next((i for i, parameter in enumerate(own) if parameter.name == insert_before), len(own))
        every = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own]
        return with_signature(command, [*every[:at], *options, *every[at:]])

    return change


def with_signature(command: Command, parameters: Sequence[inspect.Parameter]) -> Command:
    """Set the parameters that typer sees, and return the command."""
    command.__signature__ = inspect.signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def as_typer_command(command: Command) -> Command:
    """Return a command with the option --quiet, and with the name and the placeholder of each option set explicitly.

    Versions of typer derive them differently: 0.27 names an option `--DTYPE` if its placeholder is `DTYPE`.
    """
    own = inspect.signature(command, eval_str=True).parameters

    @wraps(command)
    def run(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if name in own})  # the callback of --quiet has acted

    parameters = [*own.values(), keyword_only_parameter("quiet", bool, False, QUIET)]
    return with_signature(run, [with_option_name(each.replace(kind=each.KEYWORD_ONLY)) for each in parameters])


def with_option_name(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter with the name of its option: `--dry-run` for `dry_run`. Arguments are unchanged.

    A flag that may be None, so that a file can set it, is named `--dry-run/--no-dry-run`.
    """
    kind, about = get_args(parameter.annotation)
    if not isinstance(about, OptionInfo):
        return parameter
    about = copy(about)  # because several commands share it
    if about.default is ...:  # in an annotation, typer stores the first option name in `default`
        name = option_name(parameter.name)
        about.default = f"{name}/{option_name(f'no_{parameter.name}')}" if kind == bool | None else name
    about.metavar = about.metavar or placeholder_of(kind)
    return parameter.replace(annotation=Annotated[kind, about])


def placeholder_of(kind: Any) -> str | None:
    """Return the placeholder of an option of this type, or of a list of this type; None for a flag."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return _PLACEHOLDERS.get(kind) or next(filter(None, map(placeholder_of, get_args(kind))), None)


def option_of_setting(name: str, setting: Setting) -> inspect.Parameter:
    """Return the option of a setting: `--dry-run` for `dry_run`, and `--no-sync` for a `sync` that defaults to True."""
    default: Any = None if setting.default in (MISSING, ()) else setting.default
    if setting.kind is bool:
        return keyword_only_parameter(f"no_{name}" if setting.default else name, bool, False, typer_option_of(setting))
    if setting.placeholder == _SIZE:
        return keyword_only_parameter(name, int, f"{default / 10**9:g}GB", typer_option_of(setting, parser=parse_bytes))
    kind = option_type_of(setting)
    return keyword_only_parameter(name, kind if default is not None else kind | None, default, typer_option_of(setting))


def typer_option_of(setting: Setting, **more: Any) -> Any:
    if setting.kind is Path:
        more["parser"] = to_path
    return typer.Option(help=setting.text, metavar=setting.placeholder, min=setting.least, **more)


def option_overriding_file(name: str, setting: Setting) -> inspect.Parameter:
    """Return the option of a setting that overrides a file. Its default is None; the help shows the setting's."""
    shown = ("yes" if setting.default else "no") if isinstance(setting.default, bool) else setting.default
    text = setting.text if setting.default in (MISSING, None, ()) else f"{setting.text} [{shown}]"
    described = typer_option_of(replace(setting, text=text, least=None), show_default=False)
    return keyword_only_parameter(name, option_type_of(setting) | None, None, described)


def keyword_only_parameter(name: str, kind: Any, default: object, described: Any) -> inspect.Parameter:
    annotation = Annotated[kind, described]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option_type_of(setting: Setting) -> Any:
    return list[str] if get_origin(setting.kind) is tuple else setting.kind


def given_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the user gave, by their field names: `no_sync=True` becomes `sync=False`."""
    values = {name: value for name, value in options.items() if value is not None and value != []}
    off = {name.removeprefix("no_"): not values.pop(name) for name in list(values) if name.startswith("no_")}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()} | off


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
        install_plain_value_parser(self.get_params(ctx))
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


def install_plain_value_parser(parameters: Any) -> None:
    """Let parameters parse their simple values themselves."""
    for parameter in parameters:
        parameter.process_value = partial(parse_value, parameter, parameter.process_value)


def parse_value(parameter: Parameter, parse_with_typer: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """Return the parsed value of a parameter, from the command line or its default."""
    try:
        parsed = parse_one_or_many(parameter, value)
    except (AttributeError, ValueError):  # older versions of typer have no `type_descriptor`, and do not use pydantic
        return parse_with_typer(ctx, value)
    return parsed if parameter.callback is None else parameter.callback(ctx, parameter, parsed)


def parse_one_or_many(parameter: Parameter, value: Any) -> Any:
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


def checkpoint_argument(metavar: str) -> Any:
    help_text = "A checkpoint, or a run (its latest complete checkpoint)."
    return typer.Argument(parser=to_path, metavar=metavar, help=help_text)


Also = Annotated[
    list[Path] | None,
    typer.Option(
        parser=to_path,
        metavar="DIR",
        help="Another directory with files of the same checkpoint, such as another node's; repeatable.",
    ),
]


def join_also_directories(src: Path, also: Sequence[Path] | None) -> Path:
    """Return `src`, joined with the directories of --also, and print a note about them."""
    if not also:
        return src
    from ckptkit.checkpoints.several_disks import join_directories

    print_note(f"together with the files in {', '.join(map(str, also))}")
    return join_directories(src, also)


def join_also_if_single(sources: Sequence[Path], also: Sequence[Path] | None, hint: str) -> list[Path]:
    """Return the sources of a command that takes several. Raises `Usage` for --also with more than one of them."""
    if also and len(sources) > 1:
        raise Usage("--also: expected one checkpoint, found several", hint=hint)
    return [join_also_directories(source, also) for source in sources]
