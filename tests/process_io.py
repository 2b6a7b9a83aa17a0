"""What this process has done so far, as the kernel of Linux counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

_IO = Path("/proc/self/io")
needs_counts = pytest.mark.skipif(not _IO.exists(), reason="the kernel counts bytes on Linux")


def bytes_read() -> int:
    """Return the bytes that this process has read."""
    return int(_IO.read_text().partition("rchar:")[2].split()[0])
