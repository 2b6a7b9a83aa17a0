"""What every test may ask for: the checkpoints of the producers, made once for all tests and all xdist workers."""

from __future__ import annotations

import fcntl
import gc
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from ckptkit.training import launch
from tests.producers import PRELOADED, Producer, Truth

if TYPE_CHECKING:
    from tests.s3 import S3, Bucket, Place

launch.PRELOADED[:] = PRELOADED  # one server is for the ranks of ckptkit's and of the producers

_SOME = 4  # of the points at which something may fail

settings.register_profile("few", deadline=None, max_examples=5)  # a test never asserts a time
settings.register_profile("some", deadline=None, max_examples=25)
settings.register_profile("whole", deadline=None, max_examples=200)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that say how much is tried, and where a library may be missing."""
    parser.addoption("--few", action="store_true", help="try 5 examples of a property")
    parser.addoption("--whole", action="store_true", help="try every point of failure, and 200 examples of a property")
    parser.addoption("--skip-missing", action="store_true", help="skip what imports a library that is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples hypothesis tries, and what is skipped."""
    settings.load_profile(next((name for name in ("whole", "few") if config.getoption(name)), "some"))
    if config.getoption("skip_missing"):
        config.pluginmanager.import_plugin("tests.missing")


@dataclass(frozen=True, slots=True)
class Produced:
    """A checkpoint directory that tests only read, and the tensors that are in it."""

    root: Path
    truth: Truth


Produce = Callable[[Producer], Produced]
Some = Callable[[int], Sequence[int]]


@pytest.fixture(scope="session")
def some(pytestconfig: pytest.Config) -> Some:
    """Choose of the numbers below a total: the first, the last and some between them, or with `--whole` all."""

    def choose(total: int) -> Sequence[int]:
        is_whole = pytestconfig.getoption("whole") or total <= _SOME
        return range(total) if is_whole else [i * (total - 1) // (_SOME - 1) for i in range(_SOME)]

    return choose


@pytest.fixture(scope="session")
def produce(tmp_path_factory: pytest.TempPathFactory) -> Produce:
    """Give the checkpoint of a producer, written when it is first asked for."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made: dict[str, Produced] = {}

    def get(producer: Producer) -> Produced:
        name = f"{producer.__module__}.{producer.__name__}"  # two may have one name
        if name not in made:
            made[name] = _make_once(producer, shared / f"produced-{name}")
        return made[name]

    return get


def _make_once(producer: Producer, home: Path) -> Produced:
    home.mkdir(exist_ok=True)
    root, truth = home / "checkpoint", home / "truth.pt"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantized tensors are deprecated
            if not truth.exists():
                torch.save(producer(root), truth)
            return Produced(root, torch.load(truth))


# These servers import s3fs, which is not installed everywhere.


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """An S3 server that knows conditions and checksums."""
    from tests.s3 import serve_moto

    with serve_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_of_small_parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """The same, of which parts may be smaller than S3 allows."""
    from tests.s3 import serve_moto

    with serve_moto(tmp_path_factory.mktemp("moto"), least_part=1) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """An S3 server that knows neither."""
    from tests.s3 import serve_s3

    with serve_s3(tmp_path_factory.mktemp("rclone") / "root") as server:
        yield server


@pytest.fixture
def bucket(rclone: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket of `rclone`, and the directory that it is."""
    from tests.s3 import Bucket, forget, make_place

    place = make_place(rclone, monkeypatch)
    rclone.most = 0
    yield Bucket(place.name, rclone.root / place.name, rclone)
    forget()


@pytest.fixture
def place(moto: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A bucket of `moto` that is empty at first."""
    from tests.s3 import forget, make_place

    yield make_place(moto, monkeypatch)
    forget()


def pytest_collection_finish() -> None:
    """Spare each test the search for garbage among all that was imported and collected."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
