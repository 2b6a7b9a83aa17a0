"""Tables that other installed packages can extend with entry points."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

Line = TypeVar("Line")


class PluginSkipped(UserWarning):
    """An installed plugin that is not used."""


class PluginTable(Mapping[str, Line], Generic[Line]):
    """A table of ckptkit's `own` rows, followed by the rows that plugins add (`added`).

    A plugin adds a row with an entry point of `group` whose object has the type `kind`.

    Plugins are imported when a name is not in `own`, or when a loop has passed all rows of `own`.
    """

    def __init__(self, group: str, kind: type[Line], own: dict[str, Line]) -> None:
        self.group = group
        self.kind = kind
        self.own = own

    @cached_property
    def added(self) -> dict[str, Line]:
        """Return the rows of other packages. Warns `PluginSkipped` for each that cannot be used."""
        added: dict[str, Line] = {}
        for name, package, load in declared_entry_points(self.group):
            try:
                if name in self.own or name in added:
                    raise ValueError(f"the name `{name}` is already in use")
                line = load()
                if not isinstance(line, self.kind):
                    raise TypeError(f"expected a {self.kind.__name__}, found a {type(line).__name__}")
            except Exception as error:  # noqa: BLE001 - another package's module may raise anything
                what = f"{self.group} `{name}` of {package}"
                warnings.warn(f"skipped {what}: {type(error).__name__}: {error}", PluginSkipped, stacklevel=2)
            else:
                added[name] = line
        return added

    def __getitem__(self, name: str) -> Line:
        return self.own[name] if name in self.own else self.added[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self.added

    def __len__(self) -> int:
        return len(self.own) + len(self.added)


def import_object(location: str) -> Any:
    """Import the object that `location` names as `module:attribute`."""
    module, _, attribute = location.partition(":")
    return getattr(import_module(module), attribute)


def declared_entry_points(group: str) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield the entry points of a group: name, package with version, and a function that imports the object."""
    if not has_declared_plugins():
        return
    from importlib.metadata import entry_points  # deferred: slow, and most environments have no plugin

    for entry_point in sorted(entry_points(group=group), key=lambda entry_point: entry_point.name):
        package = (
            f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "a package without a name"
        )
        yield entry_point.name, package, entry_point.load


@cache
def has_declared_plugins() -> bool:
    """Return whether any installed package declares an entry point in one of ckptkit's groups."""
    return any("[ckptkit." in text for directory in sys.path for text in entry_point_texts_in(Path(directory)))


def entry_point_texts_in(directory: Path) -> Iterator[str]:
    """Yield the text of `entry_points.txt` of every package installed in a directory."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:  # a zip archive, or a missing directory
        return
    for name in names:
        try:
            yield Path(directory, name, "entry_points.txt").read_text("utf-8", "replace")
        except OSError:  # most packages have no entry points
            continue
