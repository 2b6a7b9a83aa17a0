"""Format counts and numbers, parse sizes, sort names, sanitize text for printing, and wrap it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

from ckptkit.errors import Usage

_SUFFIXES = ("", "k", "M", "G", "T", "P")
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_DIGITS, _without_zeros = re.compile("([0-9]+)"), methodcaller("lstrip", "0")
_PLURALS = {"index": "indices", "axis": "axes", "is": "are", "was": "were", "has": "have", "does": "do"}


def count(number: int, noun: str, verb: str = "") -> str:
    """Return a number with its noun, and verb: `1 tensor is`, `2 tensors are`, `3 entries`."""
    if number != 1:
        plural = noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"
        noun, verb = _PLURALS.get(noun, plural), _PLURALS.get(verb) or verb.removesuffix("s")
    return " ".join(filter(None, (f"{number:,}", noun, verb)))


def command_line(*words: object) -> str:
    """Return a command of ckptkit to type, in backticks, with quotes where a shell needs them."""
    texts = (f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in words)
    return f"`ckptkit {shlex.join(texts)}`"


def join_with_or(words: Iterable[str]) -> str:
    """Return words as a choice: `a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def format_number_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ranges: `0-3,5`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, bounds)) for bounds in ranges)


def natural_sort_key(name: str) -> list[Any]:
    """Return a sort key that puts `layers.9` before `layers.10`."""
    parts: list[Any] = _DIGITS.split(name)  # alternates text and digits
    parts[1::2] = [(len(part), part) for part in map(_without_zeros, parts[1::2])]  # fewer digits sort first
    return parts


def escape_control_characters(text: str) -> str:
    """Return text with control characters escaped, because tensor names in a checkpoint are not trusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def fold_lines(text: str, width: int) -> list[str]:
    """Break text into lines of at most `width` characters; each further line is indented by two more.

    Breaks after a space, or else after a dot or slash, or else after other punctuation. Only a word that is longer than
    a line breaks inside.
    """
    indent = " " * min(len(text) - len(text.lstrip(" ")) + 2, width // 2)
    lines = []
    while len(text) > width:
        end = find_break(text, width)
        lines.append(text[:end].rstrip(" "))
        text = indent + text[end:].lstrip(" ")
    return [*lines, text]


def find_break(text: str, width: int) -> int:
    """Return the end of the first line of a text, at most `width` characters and not nearly empty."""
    least = max(width // 3, len(text) - len(text.lstrip(" ")) + 1)
    for signs in (" ", "./", ",_-:="):
        # a space at the end of the line is stripped, so it may exceed the width
        end = max(text.rfind(sign, least, width + (sign == " ")) for sign in signs) + 1
        if end:
            return end
    return width


_FACTORS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("B", 1000), ("", 1000), ("iB", 1024))
}


def format_brief(number: float) -> str:
    """Return a number with at most four digits: `0.00012`, `3.412`, `31.64k`, `2e-07`."""
    size = abs(number)
    if size < 999.95 or not size < 1e18:
        return f"{number:.4g}"
    power = min(int(math.log10(size * 1.0001) / 3), len(_SUFFIXES) - 1)
    return f"{number / 1000**power:.4g}{_SUFFIXES[power]}"


def format_bytes(nbytes: float) -> str:
    """Return bytes as `1.6 GB`: three digits, decimal units, as disks use."""
    power = 0
    while round(nbytes) >= 1000 and power < len(_UNITS) - 1:
        nbytes /= 1000
        power += 1
    return f"{nbytes:.0f} {_UNITS[power]}" if power == 0 or nbytes >= 100 else f"{nbytes:.3g} {_UNITS[power]}"


def describe_checksums(checked_bytes: int, unchecked_bytes: int) -> str:
    """Return a line on the bytes of a source that were compared with a recorded checksum, and those without one."""
    if not unchecked_bytes:
        return f"checksums verified for all {format_bytes(checked_bytes)} that were read"
    if not checked_bytes:
        return f"no checksums verified: the source has none for the {format_bytes(unchecked_bytes)} that were read"
    return f"checksums verified for {format_bytes(checked_bytes)}; {format_bytes(unchecked_bytes)} have no checksum"


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes, which may be text: `5GB`, `512MiB`, `1000`. Raises `Usage` for anything else."""
    nbytes = 0 if isinstance(size, str) else size
    if isinstance(size, str):
        number = size.rstrip("BiKMGTPbkmgtp").strip()
        unit = size[len(number) :].strip()
        factor = _FACTORS.get(unit) or _FACTORS.get(unit.upper().replace("IB", "iB")) or 0
        with suppress(ValueError, OverflowError):
            nbytes = int(float(number) * factor)
    if nbytes <= 0:
        raise Usage(f"expected a size, found `{size}`", hint="write it like 5GB or 512MiB")
    return nbytes


def format_count(number: int) -> str:
    """Return a count as text: `8.03 billion`, `218 million`, `1,234`."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def format_parameter_count(number: int) -> str:
    """Return a number of parameters as text: `8.03 billion parameters`."""
    return "1 parameter" if number == 1 else f"{format_count(number)} parameters"


def per_cent(part: float) -> str:
    """Return a fraction as `99.03%`, never rounded to 0% or 100%."""
    if part in (0, 1):
        return f"{part:.0%}"
    return f"{part if part > 1 else min(max(part, 0.0001), 0.9999):.2%}"
