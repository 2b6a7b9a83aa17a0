"""Chromium, without a window: what it makes of a page, and what it says while it does."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=5000", "--dump-dom"),
)


@dataclass(frozen=True, slots=True)
class Visit:
    """The document that a page became, and the lines that came to the console."""

    document: str
    console: list[str]

    def find(self, name: str) -> str:
        """The text of the element `name`."""
        _, _, rest = self.document.partition(f'id="{name}">')
        return unescape(rest.partition("</")[0])


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def visit(page: Path, profile: Path) -> Visit:
    """Open a file as a user does, with a profile of its own."""
    chromium = find_chromium()
    assert chromium is not None
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", page.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Visit(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line])
