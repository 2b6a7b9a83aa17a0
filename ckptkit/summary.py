"""Give results a text of a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from ckptkit.markup import element
from ckptkit.words import escape_control_characters

_MAX_LINES = 3  # lines


class Summarized:
    """A result that `print`, the Python prompt and notebooks show in a few lines, like the command line does."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        cls.__repr__ = Summarized.__str__  # type: ignore[assignment]  # else a dataclass lists every field

    def summary(self) -> Iterator[str]:
        """Yield one to five lines."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(escape_control_characters, self.summary()))

    def _repr_html_(self) -> str:
        return element("div", *(element("div", line) for line in self.summary()))


def format_call(instance: object, first_argument: object, **options: object) -> str:
    """Return the call that creates an object, such as `Run('run', keep_last=2)`; leaves out empty options."""
    given = [f"{name}={value!r}" for name, value in options.items() if value not in (None, False, "", ())]
    return f"{type(instance).__name__}({', '.join([repr(str(first_argument)), *given])})"


def first_lines_and_more(lines: Iterable[str], total: int) -> Iterator[str]:
    """Yield the first of `total` lines, and the number of further lines."""
    yield from (f"  {line}" for line in islice(lines, _MAX_LINES))
    if total > _MAX_LINES:
        yield f"  ... {total - _MAX_LINES:,} more"
