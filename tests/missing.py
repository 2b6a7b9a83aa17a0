"""The plugin of `pytest --skip-missing`: tests that need a library which is not installed are skipped.

Where ckptkit itself imports one, they fail.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from traceback import walk_tb

import pytest

_HERE = Path(__file__).parent
_ALWAYS_THERE = ("ckptkit", "scripts", "tests", "torch")  # a module of these that is missing is a bug


class Skippable(pytest.Module):
    """A test module that is skipped, and not an error, if a library that it imports is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except (self.CollectError, pytest.skip.Exception) as error:
            # pytest leaves the half-imported module here, and another test module may import names from it
            name = ".".join(self.path.relative_to(self.config.rootpath).with_suffix("").parts)
            sys.modules.pop(name, None)
            skip_if_missing(error.__cause__)
            raise


def skip_if_missing(error: BaseException | None) -> None:
    """Skip what is being collected or run if the tests, or transformers for them, need a library that is missing.

    transformers raises an ImportError that says what to install, such as accelerate.
    """
    if isinstance(error, ImportError) and (asked := re.search(r"pip install '?([\w-]+)", str(error))):
        pytest.skip(f"{asked[1]} is not installed")
    if isinstance(error, ModuleNotFoundError) and error.__traceback__ is not None:
        library = str(error.name).partition(".")[0]
        *_, (last, _) = walk_tb(error.__traceback__)
        if library not in _ALWAYS_THERE and Path(last.f_code.co_filename).is_relative_to(_HERE):
            pytest.skip(f"{library} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Skippable.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    try:
        return (yield)
    except ImportError as error:
        skip_if_missing(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except ImportError as error:
        skip_if_missing(error)
        raise
