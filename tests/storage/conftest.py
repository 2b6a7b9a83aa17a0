"""What tests of states without a process group may ask for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def alone() -> Iterator[None]:
    """Torch warns that there is no process group, and about its own storages."""
    with warnings.catch_warnings(action="ignore"):
        yield
