"""Make a temporary file that goes with the last object that refers to it."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path


class TemporaryFile:
    """An empty file among the system's temporary ones, there as long as this object, or until `remove` is called."""

    def __init__(self) -> None:
        fd, name = tempfile.mkstemp(prefix="ckptkit-")
        os.close(fd)
        self.path = Path(name)
        self.remove = weakref.finalize(self, self.path.unlink, missing_ok=True)
