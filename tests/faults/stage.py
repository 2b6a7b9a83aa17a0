"""The stage of the cases of I/O: for all of a process one server, the sources that writings read, and each scene."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.faults.originals import trained
from tests.faults.scenes import NEW, OLD, Scene
from tests.faults.server import Server
from tests.faults.writings import MODULES, Writing


@cache
def serve() -> Server:
    """A server with a shim that has imported all that the writings need; it ends with this process."""
    server = Server(*MODULES, shim=True)
    server.__enter__()
    atexit.register(server.__exit__, None, None, None)
    return server


@cache
def home() -> Path:
    """A directory with the old and the new source of all writings, until this process ends."""
    root = Path(tempfile.mkdtemp(prefix="scenes-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for number in (OLD, NEW):
        sources = root / "sources" / str(number)
        sources.mkdir(parents=True)
        ended = serve().run("tests.faults.writings:make", [str(sources), str(number)])
        assert ended.code == 0, ended
        for kind in ("ranks", "zero2"):
            shutil.copytree(trained(kind, number).root, sources / kind)
    return root


@cache
def rehearsed(writing: Writing, is_over: bool) -> Scene:
    """The scene of a writing, which leaves it as it finds it; all scenes have one place."""
    scene = Scene(serve(), writing, home(), is_over)
    scene.load_noop_patch()
    return scene


def scenes(writings: Sequence[Writing], kinds: Sequence[bool] = (False, True)) -> Iterator[Scene]:
    """A scene for each of the writings: fresh, and over an old output."""
    return (rehearsed(writing, is_over) for writing in writings for is_over in kinds)
