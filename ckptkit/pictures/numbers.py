"""Format numbers for people, read what they write, and choose the round ones that label an axis."""

from __future__ import annotations

import math

from ckptkit.errors import Usage

_SUFFIXES = ("", "k", "M", "G", "T", "P")
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_FACTORS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("B", 1000), ("", 1000), ("iB", 1024))
}


def brief(number: float) -> str:
    """Return a number in at most four digits: `0.00012`, `3.412`, `31.64k`, `2e-07`."""
    size = abs(number)
    if size < 999.95 or not size < 1e18:
        return f"{number:.4g}"
    power = min(int(math.log10(size * 1.0001) / 3), len(_SUFFIXES) - 1)
    return f"{number / 1000**power:.4g}{_SUFFIXES[power]}"


def format_bytes(nbytes: float) -> str:
    """Return bytes as `1.6 GB`: three digits, decimal units as disks count them."""
    power = 0
    while round(nbytes) >= 1000 and power < len(_UNITS) - 1:
        nbytes /= 1000
        power += 1
    return f"{nbytes:.0f} {_UNITS[power]}" if power == 0 or nbytes >= 100 else f"{nbytes:.3g} {_UNITS[power]}"


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes, which may be text: `5GB`, `512MiB`, `1000`. Raises `Usage` for any other text."""
    if not isinstance(size, str):
        return size
    number = size.rstrip("BiKMGTPbkmgtp").strip()
    unit = size[len(number) :].strip()
    factor = _FACTORS.get(unit) or _FACTORS.get(unit.upper().replace("IB", "iB"))
    try:
        nbytes = int(float(number) * (factor or 0))
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes <= 0:
        raise Usage(f"expected a size, found `{size}`", hint="write it like 5GB or 512MiB")
    return nbytes


def format_count(number: int) -> str:
    """Return a count in words: `8.03 billion`, `218 million`, `1,234`."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def per_cent(part: float) -> str:
    """Return a part of a whole as `99.03%`, never rounded to all or nothing."""
    if part in (0, 1):
        return f"{part:.0%}"
    return f"{part if part > 1 else min(max(part, 0.0001), 0.9999):.2%}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers between two others."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * max(factor for factor in (1, 2, 5, 10) if factor * power <= rough * 1.3)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def powers(low: float, high: float) -> list[float]:
    """Return round numbers between two positive ones, by powers of ten: all of 1, 2 and 5 where these are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    every = max(1, (last - first) // 4)
    found = (factor * 10.0**power for power in range(first, last + 1, every) for factor in factors)
    return [number for number in found if low * 0.999 <= number <= high * 1.001]
