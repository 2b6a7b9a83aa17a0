"""Other people's converters, as single modules: their packages would import what no test here needs."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# is imported by them, and called by nothing that is needed here
_UNUSED = ("cached_path", "dataclass_extensions")


class Anything(ModuleType):
    """A module with everything in it, which is nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def one_module(module: str, *packages: str) -> ModuleType:
    """A module of these packages, without what is in their `__init__`; skip where the first is not installed."""
    top = packages[0]
    spec = find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{top} is not installed")
    place = Path(next(iter(spec.submodule_search_locations)))
    before = dict(sys.modules)
    try:
        for name in packages:
            package = ModuleType(name)
            package.__path__ = [str(place.joinpath(*name.split(".")[1:]))]
            package.__dict__["Config"] = None
            sys.modules[name] = package
        for name in _UNUSED:
            if name.partition(".")[0] not in before and find_spec(name.partition(".")[0]) is None:
                sys.modules[name] = Anything(name)
        return import_module(module)
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in (top, *_UNUSED):
                del sys.modules[name]
