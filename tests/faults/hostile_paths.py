"""Hostile paths: names that lead out of a checkpoint, and what is no file in place of one. Cases 33 and 34."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from tests.faults.bad_inputs import DATA, DIRECTORIES, WORDS, Files
from tests.faults.cases import Case, Seen
from tests.faults.damage import Damage, directory, link_to, listen, pipe
from tests.faults.forged import forge, reindex
from tests.faults.originals import original
from tests.faults.subjects import CONSOLIDATE, INSPECT, OURS
from tests.faults.trials import Bad, case, case_of, start
from tests.faults.verdicts import Verdict, judge_error

MEMORY, SECONDS = 512 << 20, 5.0  # bytes, and what a pipe is waited for
OUTSIDE = "elsewhere"  # a directory beside the checkpoint, which no name in it may lead to


# -- names -------------------------------------------------------------------------------------------------------------


def lead_away(file: str, name: str) -> Callable[[Path], str]:
    """Move a file out of the checkpoint, and give the name that leads to it."""

    def move(root: Path) -> str:
        place = root.parent / OUTSIDE
        place.mkdir()
        (root / file).rename(place / file)
        return name.format(place=place, file=file)

    return move


NAMES = (
    *("../elsewhere/{file}", "{place}/{file}", "./../elsewhere/{file}", "C:\\{file}", "..\\elsewhere\\{file}"),
    *("{file}\0", "", ".", "..", "/dev/zero", "/proc/self/environ", "\x1b[2J{file}"),
)


def rename_in_metadata(file: str, name: str) -> Damage:
    """Let `.metadata` call a file otherwise."""

    def damage(root: Path) -> None:
        new = lead_away(file, name)(root)

        def change(metadata: Metadata) -> None:
            for place in metadata.storage_data.values():
                if place.relative_path == file:
                    place.relative_path = new

        forge(change)(root)

    return damage


def rename_in_index(file: str, name: str) -> Damage:
    """Let the index call a file otherwise."""

    def damage(root: Path) -> None:
        new = lead_away(file, name)(root)
        reindex(lambda places: places.update({key: new for key, old in places.items() if old == file}))(root)

    return damage


def names() -> Iterator[Bad]:
    """Each in the metadata and in the index."""
    for name in NAMES:
        away: dict[str, Any] = {"refused": True, "seconds": SECONDS, "memory": MEMORY}
        yield Bad(repr(name), "dcp", rename_in_metadata("__1_0.distcp", name), ("checkpoint",), **away)
        file = "model-00002-of-00003.safetensors"
        yield Bad(repr(name), "indexed", rename_in_index(file, name), ("checkpoint",), **away)


# -- what is no file ---------------------------------------------------------------------------------------------------


def device(name: str) -> Damage:
    """Let a file be a device that never ends; a link to it, where none may be made."""

    def damage(root: Path) -> None:
        (root / name).unlink()
        try:
            os.mknod(root / name, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        except PermissionError:
            (root / name).symlink_to("/dev/zero")

    return damage


def replace_by_link(path: Path, target: str) -> None:
    """Let a file be a link."""
    path.unlink()
    path.symlink_to(target)


_ODD: dict[str, Callable[[str], Damage]] = {
    "a link beside": lambda name: link_to(name, f"{name}.moved"),
    "a link out": lambda name: link_to(name, f"../{name}"),
    "a link to itself": lambda name: lambda root: replace_by_link(root / name, name),
    "a pipe": pipe,
    "a socket": listen,
    "a directory": directory,
    "a device": device,
}


def no_files(files: Files) -> list[Bad]:
    """Each in place of a file."""
    return [
        Bad(
            f"{what}: {file}",
            kind,
            odd(file),
            (file, *WORDS.get(kind, ())),
            refused=True,
            seconds=SECONDS,
            memory=MEMORY,
        )
        for what, odd in _ODD.items()
        for kind, file in files
    ]


# -- outputs that are links, and what is opened ------------------------------------------------------------------------


def linked_output(place: Path, _: bool) -> Iterator[Seen]:
    """OUT is a link to somewhere else, which must stay as it is."""
    for i, subject in enumerate(subject for subject in OURS if subject.makes):
        for is_there in (True, False):
            home, away = place / f"{i}-{is_there}", place / f"{i}-{is_there}" / OUTSIDE
            (away if is_there else home).mkdir(parents=True)
            (home / "out").symlink_to(away)
            ended = start(subject, original("dcp").root, home / "out", 20)
            is_same = not away.exists() or not any(away.iterdir())
            verdict = judge_error(ended, ("out",)) if ended.code and is_same else Verdict.ACCEPTED
            yield Seen(subject.name, verdict, "OUT is a link" if is_there else "OUT is a link to nothing")


def opened(place: Path, whole: bool) -> Iterator[Seen]:
    """Of names that lead elsewhere nothing is opened: seen from outside, by strace."""
    if shutil.which("strace") is None or not whole:
        return
    for i, bad in enumerate(names()):
        src = place / str(i) / "checkpoint"
        shutil.copytree(original(bad.original).root, src)
        bad.damage(src)
        for subject in (CONSOLIDATE, INSPECT):
            trace = src.parent / f"{subject.name}.trace"
            ckptkit = [sys.executable, "-m", "ckptkit", *subject.arguments(src, src.parent / "out")]
            subprocess.run(
                ["strace", "-f", "-e", "trace=%file", "-o", trace, *ckptkit], capture_output=True, check=False
            )
            seen = trace.read_text(errors="replace")
            is_opened = any(name in seen for name in (f"/{OUTSIDE}", "/dev/zero", "/proc/self/environ"))
            fired = str(src) in seen
            verdict = Verdict.ACCEPTED if is_opened else Verdict.CLEAN if fired else Verdict.UNFIRED
            yield Seen(subject.name, verdict, f"{bad.name}, traced")


CASES: tuple[Case, ...] = (
    case_of("33", "hostile", "names that lead elsewhere", names),
    Case("33", "hostile", "names that lead elsewhere: what is opened", opened),
    case("34", "hostile", "links, pipes, sockets, devices and directories", no_files((*DATA, *DIRECTORIES))),
    Case("34", "hostile", "the output is a link", linked_output),
)
