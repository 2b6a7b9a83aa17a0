"""Recipes: what was asked for, in words that another process can follow, and what is known by them while it is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ckptkit.errors import translate_os_errors
from ckptkit.files.path import RemotePath
from ckptkit.ops.conversion.carried import own_files
from ckptkit.ops.conversion.drafts import Drafts
from ckptkit.version import __version__

_OF_THIS_PROCESS = ("dry_run", "jobs", "progress", "sync", "workers")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The call of a command, but for what concerns one process alone."""

    command: str
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, command: str, arguments: Mapping[str, Any], **settled: object) -> Recipe:
        """The recipe of a call with these `arguments`, of which some were `settled` meanwhile."""
        kept = {name: value for name, value in arguments.items() if name not in _OF_THIS_PROCESS} | settled
        return cls(command, {name: plain(value) for name, value in kept.items()})


@dataclass(frozen=True, slots=True)
class Key:
    """What all processes that make one thing have in common: recipe, number of processes, and a hash of the plan."""

    text: bytes
    plan: str


def plain(value: object) -> Any:
    """A value as JSON holds it; paths are absolute."""
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, (tuple, list)) else value


def make_key(recipe: Recipe, drafts: Drafts, count: int) -> Key:
    """The key of what is drafted, if `count` processes are to make it."""
    plan = fingerprint(drafts)
    words = {"command": recipe.command, "arguments": recipe.arguments, "parts": count, "plan": plan}
    return Key(json.dumps(words, indent=1, sort_keys=True).encode(), plan)


def fingerprint(drafts: Drafts) -> str:
    """A hash of what goes where: by the recipe, and the files that are read as they are now, all else is settled."""
    digest = blake2b(__version__.encode(), digest_size=16)
    for part in drafts.parts:
        files = [(file.name, file.nbytes) for file in part.files]
        stamps = [(path.name, *stamp(path)) for path in sorted(own_files(part.source))]
        digest.update(repr((part.place, part.writer.name, files, stamps)).encode())
    return digest.hexdigest()


def stamp(path: Path) -> tuple[int, int, int]:
    """Size of a file in bytes, the time of its last change in nanoseconds, and of a remote one what else tells it."""
    with translate_os_errors(path):
        status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino if isinstance(path, RemotePath) else 0
