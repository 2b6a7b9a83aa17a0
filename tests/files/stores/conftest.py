"""A bucket for each test, on one S3 server for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it needs s3fs, which is not installed everywhere
    from tests.s3 import S3


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket: its name, the directory that is it, and the server, whose requests are counted from the first on."""

    name: str
    root: Path
    server: S3

    @property
    def url(self) -> str:
        return f"s3://{self.name}"


@pytest.fixture
def bucket(rclone: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    from tests.s3 import forget, make_place

    place = make_place(rclone, monkeypatch)
    rclone.most = 0
    yield Bucket(place.name, rclone.root / place.name, rclone)
    forget()
