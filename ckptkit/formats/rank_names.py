"""Recognize files or directories of one set by their names: `rank-0-of-2`, `sdp_00` beside `sdp_01`; read them all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ckptkit.errors import CkptError, Corrupt, Report, Unsupported, and_more

Key = TypeVar("Key")
Value = TypeVar("Value")

JOIN = "join them with the program that saved them"
_NAMED = 6  # names in a message

_OF = re.compile(r"(?<![0-9])(?P<number>[0-9]{1,8})[-_.]?of[-_.]?(?P<count>[0-9]{1,8})(?![0-9])")
_WORLD = re.compile(r"world_?size[-_.]?(?P<count>[0-9]{1,8})[-_.]rank[-_.]?(?P<number>[0-9]{1,8})(?![0-9])")
_AXES = "tp|pp|dp|mp|sdp"  # kinds of ranks; `ep` and `cp` are missing because they also mean epoch and checkpoint
# `fsdp_0` alone numbers models, not ranks, as in `pytorch_model_fsdp_0`
_AXIS = re.compile(
    rf"(?:(?<=[-_.])|^)(?:(?:(?:{_AXES}|fsdp)[-_.]?)?(?:rank|shard|part)|{_AXES})[-_.]?(?P<number>[0-9]{{1,8}})(?![0-9])"
)
_MAY_BE_AXIS = re.compile(r"(?:(?<=[-_.])|^)(?:stage[-_.]?|p)[0-9]{1,8}(?![0-9])")  # also a stage of a training
_PART = re.compile(r"(?:(?<=[-_.])|^)(?:shard|part)[-_.]?[0-9]{1,8}(?![0-9])")
_NUMBER = re.compile(r"(?:(?<=[-_.])|^)(?P<number>[0-9]{1,8})(?![0-9])")


def names_differing_in_rank(name: str, names: Iterable[str]) -> list[str]:
    """Return the `names` that form a set with `name`: equal except for a rank or number; [] if it stands alone.

    A single name forms a set if it says "I of N", or if it has a rank other than 0 that cannot mean anything else.
    """
    for match in (*_OF.finditer(name), *_WORLD.finditer(name)):
        if int(match["count"]) > 1:
            return sorted(set(sibling_names(name, match, names)) | {name})
    for match in _AXIS.finditer(name):
        alike = sibling_names(name, match, names)
        text, is_whole_stem = match["number"], match[0] == name.partition(".")[0]
        is_later = int(text) > 0 and (0 in alike.values() or text.startswith("0") or is_whole_stem)
        if is_later or (0 in alike.values() and len(alike) > 1):
            return sorted(alike.keys() | {name})
    return []


def names_counting_from_zero(name: str, names: Sequence[str]) -> list[str]:
    """Return the `names` that differ from `name` in a number and count from 0: `model_0`, `model_1`; else []."""
    for match in _NUMBER.finditer(name):
        alike = sibling_names(name, match, names)
        if len(alike) > 1 and sorted(alike.values()) == list(range(len(alike))):
            return sorted(alike, key=alike.__getitem__)
    return []


def has_number(name: str, number: int) -> bool:
    """Return whether a name contains a number, such as the 2 of `model_0_2`."""
    return any(int(match["number"]) == number for match in _NUMBER.finditer(name))


def has_shard_or_part_number(name: str) -> bool:
    """Return whether a file name says that the file is a part: `shard_0`, `model_part_1`."""
    return _PART.search(name) is not None


def not_joined_error(siblings: Sequence[str], path: Path) -> Unsupported:
    """Return the error for files or directories of several ranks that no rule joins."""
    names = ", ".join(siblings[:_NAMED]) + and_more(len(siblings) - _NAMED)
    message = f"{len(siblings)} ranks saved a part of the model each, and no rule joins them: {names}"
    return Unsupported(message, path=path, hint=JOIN)


def may_have_rank_or_part_number(name: str) -> bool:
    """Return whether a name may contain the number of a rank or part: `stage_0`, `ckpt_p0`."""
    return has_rank_number(name) or _MAY_BE_AXIS.search(name) is not None


def has_rank_number(name: str) -> bool:
    """Return whether a name contains the number of a rank or part."""
    return any(pattern.search(name) for pattern in (_AXIS, _OF, _WORLD))


def sibling_names(name: str, match: re.Match[str], names: Iterable[str]) -> dict[str, int]:
    """Return the names that differ from `name` only in the number of `match`, each with its number."""
    start, end = match.span("number")
    pattern = re.compile(re.escape(name[:start]) + "([0-9]{1,8})" + re.escape(name[end:]))
    return {other[0]: int(other[1]) for other in map(pattern.fullmatch, names) if other}


def read_each_file(
    root: Path, files: Mapping[Key, str], read: Callable[[Key, str], Value], report: Report, *, needs_one: bool = False
) -> dict[Key, Value]:
    """Return the result of `read` for each file in `root`, by its key, in order. Reports those that cannot be read.

    With `needs_one`, raises the error of the last file if no file can be read, and `Corrupt` if there are no files.
    """
    if needs_one and not files:
        raise Corrupt("no rank's file is here", path=root)
    results: dict[Key, Value] = {}
    for number, (key, name) in enumerate(files.items(), 1):
        try:
            results[key] = read(key, name)
        except CkptError as error:
            error.blame(path=root / name)
            if needs_one and number == len(files) and not results:
                raise
            report(error)
    return results
