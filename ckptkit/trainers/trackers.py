"""Read trackers: files and links that name one checkpoint of a run, the latest or the best.

A file contains the name of a checkpoint or its step, in JSON if its trainer stores more in it. A link, whatever its
name, names the checkpoint that it leads to or into; a link out of the run names none. Trainers resume from the
checkpoint in some of the trackers; others name the best one.

A small text or JSON file under any other name counts too if it names exactly one of the checkpoints beside it, or its
step under a key such as `global_step`.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from ckptkit import trainers
from ckptkit.errors import Corrupt, IOFailure, Unsafe, translate_os_errors
from ckptkit.io.file import find_link_target_entry, list_children, read_small
from ckptkit.trainers import find_step_of_path, is_like_checkpoint, name_without_suffixes

_LIMIT = 1 << 10  # bytes
_LIMIT_OF_JSON = 1 << 24  # bytes: it may have the metrics of all checkpoints
_OF_STORES = ".symlink"  # a file that replaces a link in a store without links, and contains a full path
# the name of a link to the latest checkpoint
_LATEST = re.compile(r"(?:.*[-_.])?(?:last|latest)(?:[-_.].*)?", re.IGNORECASE | re.DOTALL)
_TENSORFLOW = "checkpoint"  # tf.train.update_checkpoint_state writes it: `model_checkpoint_path: "ckpt-100"`
_LIMIT_OF_NOTES = 1 << 14  # bytes of a file with any other name
_OF_LATEST = re.compile(r".*(last|latest|current|resume).*|model_checkpoint_path", re.IGNORECASE)
_OF_BEST = re.compile(r".*(best|lowest|top).*", re.IGNORECASE)
_OF_STEP = re.compile(
    r"((global|current|last|latest|best|resume|from|at)[-_]?)*(step|iter|iteration|checkpoint|ckpt)?", re.IGNORECASE
)
_PAIR = re.compile(r"\s*[\"']?([\w.-]*)[\"']?\s*[:=]\s*(.+)")
_SECTION = re.compile(r"(\s*)(?:[\"']?([\w.-]+)[\"']?\s*:|\[+([\w.-]+)\]+)\s*")  # `best:` of YAML, `[best]` of TOML
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # the `>` of PowerShell 5 writes it
Keys = tuple[str, ...]  # the keys that lead to a value, from the outermost; "" for a line of text without a key
_TOKEN = re.compile(r"[^\s/\\\"'`,;()\[\]{}<>]+")


@dataclass(frozen=True, slots=True)
class Tracker:
    """A file or link called `name` that names a checkpoint: `target` is the name of the checkpoint, or its step.

    `target` is "" for a tracker of a known trainer whose content is neither, such as a file that was cut short.
    With `is_latest`, it names the checkpoint to resume from. With `is_guess`, no known trainer writes such a file, so
    it only may name that.
    """

    name: str
    target: str
    is_latest: bool = False
    is_guess: bool = False

    def is_naming(self, checkpoint: Path) -> bool:
        """Return whether the tracker names this checkpoint of the run."""
        if checkpoint.name == self.target:
            return True
        step = int(checkpoint.name) if checkpoint.name.isdecimal() else find_step_of_path(checkpoint)
        return self.target.isdecimal() and step == int(self.target)


def trackers_in(root: Path) -> list[Tracker]:
    """Return the trackers of the run in directory `root`, by name.

    A tracker of a known trainer that names nothing is among them; any other file must name a checkpoint.
    """
    visible = []
    for path in list_children(root):
        says_which = any(pattern.fullmatch(path.name) for pattern in (_LATEST, _OF_BEST))
        if not path.name.startswith(".") or (says_which and not path.is_symlink()):  # a hidden file such as `.best`
            visible.append(path)
    named = {name_without_suffixes(path.name): path.name for path in visible if is_like_checkpoint(path)}
    trackers_found: list[Tracker] = []
    for path in visible:
        target = find_tracker_target(path)
        may_mention = not target and named and path.name not in named.values()
        found = list(checkpoints_mentioned_in(path, named)) if may_mention else []
        if not found and target is not None:
            is_link = path.is_symlink()
            is_latest = (
                _LATEST.fullmatch(path.name) is not None if is_link else path.name not in trainers.best_trackers()
            )
            found = [Tracker(path.name, target, is_latest)]
        trackers_found += found
    return trackers_found


def checkpoints_mentioned_in(path: Path, names_by_stem: Mapping[str, str]) -> Iterator[Tracker]:
    """Yield the checkpoint that a small file of any name mentions as the latest or the best.

    `names_by_stem` are the checkpoints beside it by their names without suffix. A kind of key with several checkpoints
    counts for none of them. Neither does the highest step, which is kept anyway. A file with the step in its own name
    belongs to that checkpoint.
    """
    if path.is_symlink() or not path.is_file() or trainers.is_progress_file(path.name):
        return
    with translate_os_errors(path):
        status = path.stat()
    pairs = keys_and_values_in(path, status.st_size, status.st_mtime_ns) if status.st_size <= _LIMIT_OF_NOTES else ()
    mentioned: dict[str, set[str]] = {}
    for keys, value in pairs:
        mentioned.setdefault(tracker_kind_of_keys(keys), set()).update(
            checkpoint_names_in_value(keys[-1], value, names_by_stem)
        )
    highest = max(names_by_stem.values(), key=lambda name: find_step_of_path(Path(name_without_suffixes(name))) or 0)
    for kind, names in mentioned.items():
        own = {int(number) for number in re.findall(r"[0-9]{1,18}", path.name)}
        if (
            len(names) == 1
            and names != {highest}
            and find_step_of_path(Path(name_without_suffixes(min(names)))) not in own
        ):
            is_best = kind == "best" or _OF_BEST.fullmatch(path.name) is not None
            is_latest = path.name == _TENSORFLOW or _LATEST.fullmatch(path.name) is not None
            is_latest &= not is_best and not (kind == "" and mentioned.get("latest"))
            yield Tracker(path.name, min(names), is_latest, is_guess=not is_best)


def tracker_kind_of_keys(keys: Keys) -> str:
    """Return "best" or "latest" by the innermost key that says either, "" without one."""
    kinds = ("best" if _OF_BEST.fullmatch(key) else "latest" if _OF_LATEST.fullmatch(key) else "" for key in keys[::-1])
    return next(filter(None, kinds), "")


def checkpoint_names_in_value(key: str, value: object, names_by_stem: Mapping[str, str]) -> Iterator[str]:
    """Yield the checkpoints whose name or step is the value of a key."""
    if isinstance(value, str):
        tokens = {token.rstrip(".:") for token in (*_TOKEN.findall(value), *_TOKEN.findall(value.partition("=")[2]))}
        yield from (name for stem, name in names_by_stem.items() if tokens & {stem, name})
    text = value.strip() if isinstance(value, str) else str(value)
    if type(value) in (int, str) and text.isascii() and text.isdecimal() and _OF_STEP.fullmatch(key):
        yield from (name for stem, name in names_by_stem.items() if find_step_of_path(Path(stem)) == int(text))


@lru_cache(maxsize=4096)  # every checkpoint that may be deleted needs the pairs of all files
def keys_and_values_in(path: Path, size: int, modified_ns: int) -> tuple[tuple[Keys, object], ...]:  # noqa: ARG001
    """Return the keys and values in a small file of JSON, CSV or text."""
    try:
        text = decode_utf_text(read_small(path, size))
    except (Corrupt, IOFailure, Unsafe, ValueError):
        # the file may have any contents; one that is not text mentions nothing
        return ()
    try:
        return tuple(json_leaves_of(json.loads(text), ("",)))
    except (ValueError, RecursionError):
        pass
    if "\0" in text:
        return ()
    if path.suffix == ".csv":
        rows = csv.DictReader(text.splitlines(), restkey="", restval="")
        return tuple(leaf for row in rows for leaf in json_leaves_of(row, ("",)))
    return tuple(keys_and_values_of_text(text))


def decode_utf_text(content: bytes) -> str:
    """Return text in UTF-8, or in UTF-16 with a byte order mark. Raises `ValueError` for other content."""
    return content.decode("utf-16" if content.startswith(_UTF16) else "utf-8-sig")


def keys_and_values_of_text(text: str) -> Iterator[tuple[Keys, object]]:
    """Yield the keys and values of lines such as `key: value`, also below a section.

    A line without a key has the key "", and so has the only line of a text, also if it has a key.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    sections: list[tuple[int, str]] = []  # with the indentation
    for line in lines:
        indentation = len(line) - len(line.lstrip())
        section = _SECTION.fullmatch(line)
        while sections and indentation <= sections[-1][0] and (section or sections[-1][0] >= 0):
            sections.pop()
        keys = tuple(name for _, name in sections)
        match = _PAIR.fullmatch(line)
        if section:
            sections.append((indentation, section[2]) if section[2] else (-1, section[3]))
        elif match:
            yield (*keys, match[1]), match[2]
        if not match or len(lines) == 1:
            yield (*keys, ""), line


def json_leaves_of(value: Any, keys: Keys) -> Iterator[tuple[Keys, object]]:
    """Yield the values in JSON that are neither dicts nor lists, each with its keys."""
    if isinstance(value, dict):
        for own, member in value.items():
            yield from json_leaves_of(member, (*keys, own))
    elif isinstance(value, list):
        for member in value:
            yield from json_leaves_of(member, keys)
    else:
        yield keys, value


def find_tracker_target(path: Path) -> str | None:
    """Return the name or step in a tracker, "" for other content, None for any other file.

    The JSON of a trainer's state may name no checkpoint, and is no tracker then.
    """
    with translate_os_errors(path):
        if path.is_symlink():
            return find_link_target_entry(path.parent, os.readlink(path))
        if not trainers.is_tracker(path.name) or not path.is_file():
            return None
    keys = trainers.json_trackers().get(path.name)
    try:
        if keys is None:
            text: Any = decode_utf_text(read_small(path, _LIMIT)).strip()
        else:
            text = json.loads(read_small(path, _LIMIT_OF_JSON))
            for key in keys:
                text = text.get(key) if isinstance(text, dict) else None
    except (Corrupt, Unsafe, ValueError, RecursionError):
        return ""  # an invalid tracker protects no checkpoint; a failed read (IOFailure) must not look like one
    if not isinstance(text, str):
        return None
    if keys is None and not text.isascii():
        return ""
    if path.suffix == _OF_STORES:
        text = PurePosixPath(text).name
    is_name = text.isprintable() and text not in (".", "..") and not set(text) & set("/\\")
    return text if is_name else ""
