"""A bucket for each test, on one S3 server for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it needs s3fs, which is not installed everywhere
    from tests.s3 import S3

_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket: its name, the directory that is it, and the server, whose requests are counted from the first on."""

    name: str
    root: Path
    server: S3

    @property
    def url(self) -> str:
        return f"s3://{self.name}"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    from tests.s3 import serve_s3

    with serve_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    from tests.s3 import forget

    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{next(_NUMBERS)}"
    (s3.root / name).mkdir()
    forget()
    s3.requests.clear()
    s3.most = 0
    s3.faults.clear()
    yield Bucket(name, s3.root / name, s3)
    forget()
