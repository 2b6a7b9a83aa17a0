"""Zips: archives of torch.save that lie about what is in them. Case 37."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from struct import pack

from tests.faults.cases import Case
from tests.faults.damage import Damage, overwrite
from tests.faults.trials import Bad, case_of

MEMORY = 256 << 20  # bytes
SECONDS = 10.0

_END = 22  # bytes of the record at an archive's end
_COUNT, _SIZE, _OFFSET = 10, 12, 16  # where in it are the entries' number, their directory's size and offset
_PACKED, _UNPACKED, _METHOD, _HEADER = 20, 24, 10, 42  # where in an entry of the directory


def be_archive(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive as torch.save makes it, or compressed."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", content)
    return made.getvalue()


@cache
def bomb() -> bytes:
    """An archive of a megabyte that would be a gigabyte."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        with archive.open("archive/data/0", "w", force_zip64=True) as record:
            for _ in range(64):
                record.write(bytes(1 << 24))
    return made.getvalue()


def compress(root: Path) -> None:
    """Deflate every entry, which torch reads and never writes."""
    with zipfile.ZipFile(root / "state.pt") as archive:
        entries = {entry.filename.partition("/")[2]: archive.read(entry) for entry in archive.infolist()}
    (root / "state.pt").write_bytes(be_archive(entries, zipfile.ZIP_DEFLATED))


def repeat_entry(root: Path) -> None:
    """Have two entries of one name, with different content."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(root / "state.pt", "a") as archive:
            name = next(entry.filename for entry in archive.infolist() if entry.filename.endswith("data/0"))
            archive.writestr(name, bytes(archive.getinfo(name).file_size))


def in_end(field: int, value: bytes) -> Damage:
    """Change the record at the end of an archive."""
    return overwrite("state.pt", field - _END, value)


def in_directory(field: int, value: bytes) -> Damage:
    """Change what the directory of an archive says of the storage of the first tensor."""

    def damage(root: Path) -> None:
        content = (root / "state.pt").read_bytes()
        name = content.rindex(b"/data/0")
        overwrite("state.pt", content.rindex(b"PK\x01\x02", 0, name) + field, value)(root)

    return damage


def in_descriptor(root: Path) -> None:
    """Change what follows the storage of the first tensor: its CRC-32 and sizes once more."""
    content = (root / "state.pt").read_bytes()
    overwrite("state.pt", content.index(b"PK\x07\x08", content.index(b"/data/0")) + 4, b"\xff" * 12)(root)


def zips() -> Iterator[Bad]:
    """Archives in place of the file of torch.save."""
    many = b"\xff" * 4
    damages: dict[str, Damage] = {
        "a gigabyte in a megabyte": lambda root: (root / "state.pt").write_bytes(bomb()),
        "compressed": compress,
        "two of one name": repeat_entry,
        "65,535 entries": in_end(_COUNT, b"\xff\xff"),
        "60,000 entries": in_end(_COUNT, pack("<H", 60_000)),
        "a directory of 2 GiB": in_end(_SIZE, pack("<I", 1 << 31)),
        "a directory past the end": in_end(_OFFSET, pack("<I", 1 << 31)),
        "zip64 that is not there": in_end(_OFFSET, many),
        "packed size": in_directory(_PACKED, pack("<I", 1 << 30)),
        "sizes": in_directory(_PACKED, pack("<II", 1 << 30, 1 << 30)),
        "sizes in zip64 that is not there": in_directory(_PACKED, many + many),
        "smaller": in_directory(_PACKED, pack("<II", 8, 8)),
        "deflated": in_directory(_METHOD, pack("<H", 8)),
        "the place of another": in_directory(_HEADER, pack("<I", 0)),
        "past the end": in_directory(_HEADER, pack("<I", 1 << 31)),
        "descriptor": in_descriptor,
    }
    for name, damage in damages.items():
        yield Bad(name, "pt", damage, ("state.pt",), seconds=SECONDS, memory=MEMORY)


CASES: tuple[Case, ...] = (case_of("37", "hostile", "archives that lie", zips),)
