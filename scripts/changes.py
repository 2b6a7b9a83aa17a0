"""Join the entries in docs/changes/ into CHANGELOG.md, for `scripts/docs --release`.

Each file there is one entry for the next version: `- ` and its text. The first word of its name is the section, as in
`fixed-option-names.md`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ckptkit.version import __version__
from scripts.markdown import ROOT

CHANGELOG, CHANGES = ROOT / "CHANGELOG.md", ROOT / "docs" / "changes"
SECTIONS = ("added", "changed", "removed", "fixed")


def release() -> None:
    """Write the entries into CHANGELOG.md, under the version and today's date, and delete their files."""
    files = sorted(CHANGES.glob("*.md"))
    entries = {file: file.read_text() for file in files}
    CHANGELOG.write_text(join(CHANGELOG.read_text(), entries, __version__, f"{datetime.now(UTC):%Y-%m-%d}"))
    for file in files:
        file.unlink()


def section_of(entry: Path) -> str:
    """Return the section of the changelog that the name of a file says. Raises ValueError if it says none."""
    section = entry.name.partition("-")[0]
    if section not in SECTIONS:
        raise ValueError(f"{entry}: expected a name that begins with one of {', '.join(SECTIONS)}")
    return section


def join(changelog: str, entries: Mapping[Path, str], version: str, day: str) -> str:
    """Return the changelog with a version that is released on a day, and with the texts of entries in its sections."""
    head, *versions = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    unreleased = f"## {version} (unreleased)\n"
    body = versions.pop(0).removeprefix(unreleased) if versions and versions[0].startswith(unreleased) else ""
    newest = f"## {version} ({day})\n{body}".rstrip() + "\n"
    for section in SECTIONS:
        texts = [text for entry, text in entries.items() if section_of(entry) == section]
        if texts:
            heading = f"\n### {section.capitalize()}\n\n"
            before, _, after = newest.partition(heading)
            newest = f"{before}{heading}{''.join(texts)}{chr(10) if after.startswith('#') else ''}{after}"
    return head + "\n".join([newest, *versions])
