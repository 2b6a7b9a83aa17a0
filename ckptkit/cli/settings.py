"""Settings as options: the parameters of a command that each field of `TrainConfig` becomes. Runs nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_origin

import typer

from ckptkit.train.config import Setting, settings


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for every setting in place of its `**settings`; those not given are None."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    options = [option(name, setting) for name, setting in settings().items()]
    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own] + options
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def option(name: str, setting: Setting) -> inspect.Parameter:
    """The option of a setting: `--micro-batch-size` for `micro_batch_size`; flags come with a `--no-`."""
    kind: Any = list[str] if get_origin(setting.kind) is tuple else setting.kind
    is_given = setting.default not in (None, ())
    shown = f"{setting.text} [{spell(setting.default)}]" if is_given else setting.text
    annotation = Annotated[kind | None, typer.Option(help=shown, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def spell(value: object) -> str:
    """A default as a user would type it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The settings among `options` that the user gave."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if value is not None and value != []
    }
