"""Flips: single bits of a checkpoint's files, many at random and one of every byte of what describes it. Cases 8, 9.

Ours are tried many to a process, the peers each in its own.
"""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import unpack_from

from tests.faults.bad_inputs import CHECKED, DESCRIBED, INDEX, METADATA, SAVED, UNCHECKED, Files
from tests.faults.cases import Case, Seen
from tests.faults.damage import flip
from tests.faults.originals import original
from tests.faults.subjects import PEERS
from tests.faults.tables import UNTOLD
from tests.faults.trials import Bad, server, takes, try_all
from tests.faults.verdicts import Verdict

Flip = tuple[int, int]  # byte and bit

_MANY, _FEW = 500, 25  # flips of a file
_PEERS = 60
_OF_RANKS = 100  # of a file of a trainer's rank
_BATCH = 125
_EVERY, _SOME = 1, 80  # of how many bytes one is flipped
_MANIFEST = "ckptkit.json"
HEADERS: Files = UNCHECKED[:1]  # of shards, which say twice what they hold
DESCRIPTIONS: Files = (("dcp", METADATA), ("indexed", INDEX), *HEADERS)


def at_random(size: int, count: int) -> list[Flip]:
    """Flips anywhere in a file."""
    chance = random.Random(size)
    return [(chance.randrange(size), chance.randrange(8)) for _ in range(count)]


def of_bytes(offsets: Sequence[int], step: int) -> list[Flip]:
    """A flip of each of these bytes, or of every so many."""
    chance = random.Random(len(offsets))
    return [(offset, chance.randrange(8)) for offset in offsets[::step]]


def in_batches(name: str, root: Path, out: Path, file: str, flips: list[Flip]) -> Iterator[Seen]:
    """What one of our calls makes of flips in a file."""
    for start in range(0, len(flips), _BATCH):
        batch = flips[start : start + _BATCH]
        arguments = [name, str(root), str(out), file, json.dumps(batch)]
        ended = server(is_ours=True).run("tests.faults.batches:flip_each", arguments, timeout=240)
        if ended.code != 0:
            raise ChildProcessError(f"{name} of {file}: exit {ended.code}\n{ended.err}")
        for (offset, bit), verdict in zip(batch, json.loads(ended.out), strict=True):
            yield Seen(f"ckptkit {name}", Verdict(verdict), f"bit {bit} of byte {offset} of {file} ({root.name})")


def copy(kind: str, place: Path) -> Path:
    """A copy of an original."""
    return Path(shutil.copytree(original(kind).root, place / kind))


def of_peers(kind: str, file: str, flips: list[Flip], place: Path) -> Iterator[Seen]:
    """What the peers make of some of the same flips."""
    subjects = [subject for subject in PEERS if takes(subject, kind)]
    for offset, bit in flips[:: max(1, len(flips) // _PEERS)]:
        bad = Bad(f"bit {bit} of byte {offset} of {file}", kind, flip(file, offset, bit), (file,))
        yield from try_all(bad, subjects, place / "peers")


def in_data(place: Path, whole: bool) -> Iterator[Seen]:
    """Flips anywhere in files whose content has checksums."""
    for kind, file in CHECKED:
        root = copy(kind, place)
        flips = at_random((root / file).stat().st_size, _MANY if whole else _FEW)
        for name in ("consolidate", "convert" if kind == "dcp" else "reshard", "verify"):
            yield from in_batches(name, root, place / "out", file, flips)
        if whole:
            yield from of_peers(kind, file, flips, place)


def in_files_of_ranks(place: Path, whole: bool) -> Iterator[Seen]:
    """Flips anywhere in trainers' files that have checksums, and in what lies about the storages in them."""
    yield from in_each_of([*SAVED, *DESCRIBED[:-2]], place, whole)


def in_each_of(files: Files, place: Path, whole: bool) -> Iterator[Seen]:
    """What is made of flips in each of some files."""
    for i, (kind, file) in enumerate(files):
        root = copy(kind, place / str(i))
        about = outside_storages(root / file)
        flips = at_random((root / file).stat().st_size, _OF_RANKS if whole else 2)
        flips += of_bytes(about, max(1, len(about) // (_OF_RANKS if whole else 2)))
        for name in ("consolidate", "verify"):
            yield from in_batches(name, root, place / "out", file, flips)


def outside_storages(path: Path) -> list[int]:
    """Where the bytes of a file are that belong to no storage of torch's."""
    content, taken = path.read_bytes(), set[int]()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                lengths = unpack_from("<HH", content, entry.header_offset + 26)  # of the name, and of what pads it
                begin = entry.header_offset + 30 + sum(lengths)
                taken.update(range(begin, begin + entry.file_size) if "/data/" in entry.filename else ())
    return [offset for offset in range(len(content)) if offset not in taken]


def in_files_with_a_manifest(place: Path, whole: bool) -> Iterator[Seen]:
    """Flips anywhere in files of which a manifest has the checksums, and in every byte of their headers."""
    for kind, file in UNCHECKED:
        root = copy(kind, place)
        server(is_ours=True).run("ckptkit", ["manifest", str(root)])
        flips = at_random((root / file).stat().st_size, _MANY if whole else _FEW)
        flips += of_bytes(range(described(root / file)), _EVERY if whole else _SOME)
        for seen in in_batches("verify", root, place / "out", file, flips):
            yield Seen(seen.subject, Verdict.SILENT if seen.verdict is Verdict.RIGHT else seen.verdict, seen.what)


def in_a_manifest(place: Path, whole: bool) -> Iterator[Seen]:
    """A flip of every byte of a manifest."""
    root = copy("hf", place)
    server(is_ours=True).run("ckptkit", ["manifest", str(root)])
    flips = of_bytes(range(described(root / _MANIFEST)), _EVERY if whole else _SOME)
    yield from in_batches("verify", root, place / "out", _MANIFEST, flips)


def in_descriptions(place: Path, whole: bool) -> Iterator[Seen]:
    """A flip of every byte of metadata, index and header."""
    for kind, file in DESCRIPTIONS:
        root = copy(kind, place)
        flips = of_bytes(range(described(root / file)), _EVERY if whole else _SOME)
        yield from in_batches("consolidate", root, place / "out", file, flips)
        if whole:
            yield from in_batches("reshard", root, place / "out", file, flips[::4])
            yield from of_peers(kind, file, flips, place)


def described(path: Path) -> int:
    """Bytes at the start of a file that describe the rest: the header of safetensors, all of what is no safetensors."""
    content = path.read_bytes()
    return 8 + int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else len(content)


def in_unchecked(place: Path, whole: bool) -> Iterator[Seen]:
    """Flips anywhere in safetensors without a manifest; of the peers all of them count."""
    for kind, file in UNCHECKED:
        root = copy(kind, place)
        flips = at_random((root / file).stat().st_size, _MANY if whole else _FEW)
        yield from in_batches("consolidate", root, place / "out", file, flips)
        if whole:
            yield from of_peers(kind, file, flips, place)


CASES: tuple[Case, ...] = (
    Case("8", "flips", "random bits of files with checksums", in_data),
    Case("8, 9", "flips", "bits of trainers' files, and of what lies about the storages in them", in_files_of_ranks),
    Case(
        "8",
        "flips",
        "random bits of safetensors with a manifest, and one of every byte of their headers",
        in_files_with_a_manifest,
    ),
    Case("9", "flips", "a bit of every byte of a manifest", in_a_manifest),
    Case("9", "flips", "a bit of every byte of metadata, index and header", in_descriptions),
    Case("8", UNTOLD, "random bits of safetensors, without a manifest", in_unchecked),
)
