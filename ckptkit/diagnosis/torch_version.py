"""Find checkpoints that the installed torch is too old to read."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.commands import rewrite
from ckptkit.diagnosis.finding import Finding


def find_torch_version(case: Case) -> Iterator[Finding]:
    """Yield that metadata are those of a later torch, if the one that is installed here fails on them."""
    here = installed()
    for part in case.checkpoint.parts:
        needed = part.reader.least_torch(part.path)
        if needed is not None and here is not None and numbers(here) < numbers(needed):
            message = (
                f"the metadata are those of torch {needed} or later, and torch {here} ends with a ValueError on them"
            )
            yield Finding("torch_version", None, message, rewrite(case.checkpoint))
            return


def installed() -> str | None:
    """Return the version of torch that is installed, None if none is. Does not import it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("+", maxsplit=1)[0].split(".")[:2] if number.isdecimal())
