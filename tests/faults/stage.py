"""The stage of the cases of I/O: one server for all of a process, and the sources that writings read."""

from __future__ import annotations

import atexit
import shutil
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


def make_sources(root: Path) -> None:
    """Make the old and the new source of all writings below directory `root`, unless they are there."""
    for number in (OLD, NEW):
        home = root / "sources" / str(number)
        if not home.exists():
            home.mkdir(parents=True)
            ended = serve().run("tests.faults.writings:make", [str(home), str(number)])
            assert ended.code == 0, ended
            for kind in ("ranks", "zero2"):
                shutil.copytree(trained(kind, number).root, home / kind)


def scenes(root: Path, writings: Sequence[Writing], kinds: Sequence[bool] = (False, True)) -> Iterator[Scene]:
    """A scene for each of the writings: fresh, and over an old output."""
    make_sources(root)
    for writing in writings:
        for is_over in kinds:
            scene = Scene(serve(), writing, root, is_over)
            scene.rehearse()
            yield scene
