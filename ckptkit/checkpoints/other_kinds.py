"""Directories that are not checkpoints, such as a delta: a row in `OTHER_KINDS`, and a module that opens them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from ckptkit.entry_points import PluginTable
from ckptkit.formats import detect_format
from ckptkit.io.file import list_directories, names_in
from ckptkit.io.path import is_remote


class OtherKind(Protocol):
    """The interface of a module that opens another kind of directory."""

    def is_complete(self, path: Path, /) -> bool:
        """Return whether a directory contains everything that belongs to it."""

    def show_description(self, path: Path, /, *, tensors: bool, json: bool) -> None:
        """Print a description, for `ckptkit inspect`."""

    def verify_directory(self, path: Path, /, *, base: Path | None, jobs: int | None) -> Any:
        """Return the result as `ckptkit.checks.verify.Verified`, for `ckptkit verify`."""

    def list_contents(self, path: Path, /) -> Any:
        """Return its files as `ckptkit.runs.cp.Contents`, for `ckptkit cp`."""


class KnownKind(NamedTuple):
    """A row of the table: the module, and the pattern `files` of names that only this kind has, complete or not."""

    where: str
    files: str


OTHER_KINDS = PluginTable(
    "ckptkit.other_kinds",
    KnownKind,
    {"delta": KnownKind("ckptkit.plugins.deltas.kind", r"delta\.json|delta-[0-9]+-of-[0-9]+\.safetensors")},
)


def find_non_checkpoint_kind(path: Path) -> OtherKind | None:
    """Return the module for a directory of another kind, complete or not; None if no kind matches."""
    try:
        known = find_kind_by_files(names_in(path) if path.is_dir() else ())
    except PermissionError:  # opening the path as a checkpoint raises it
        return None
    return None if known is None else cast(OtherKind, import_module(known.where))


def find_kind_by_files(file_names: Iterable[str]) -> KnownKind | None:
    """Return the row for a directory with files of these names; None if no kind matches."""
    file_names = list(file_names)
    kinds = (known for known in OTHER_KINDS.values() if any(map(re.compile(known.files).fullmatch, file_names)))
    return next(kinds, None)


def expand_directory_group(path: Path) -> list[Path]:
    """Return the subdirectories of a local directory that groups directories of these kinds; else the path itself."""
    if is_remote(path) or not path.is_dir() or find_non_checkpoint_kind(path) or detect_format(path) is not None:
        return [path]
    subdirectories = [folder for folder in list_directories(path) if not folder.name.startswith(".")]
    return subdirectories if any(map(find_non_checkpoint_kind, subdirectories)) else [path]
