"""Read alike instances that follow one another in a pickle into the columns of a table, without an object for each.

The `.metadata` of thousands of ranks is millions of instances of three classes. They differ only in numbers, sizes and
names. The opcodes of one instance make a pattern, and the pattern finds the next ones. The unpickler gets one call of
`persistent_load` in the place of them all. Equal values are one object.

The unpickler memoizes what it makes, and later opcodes may fetch it by its place. So the places of the instances are
filled: with None, and with a text where a fetch may ask for one. The unpickler itself reads instances of which a fetch
may ask for anything else.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from ckptkit.formats.pickles.opcodes import SHORT, WITH_OPERANDS, counted

_WINDOW = 1 << 16  # bytes that are searched at once
_FEWEST = 8  # rows of a table
_MANY = 50  # instances a list
_MOST_VALUES = 1 << 17  # that are kept to be found equal
_MOST_FETCHES = 1000  # in as many bytes, if they are of different things
_FREQUENT = 16
_FEWEST_BEFORE = 256  # places in the memo, which may be fetched by one byte; nobody looks for that
_PROTOCOLS = (b"\x80\x04", b"\x80\x05")  # those in which the memo is filled in order
_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....|\x8a(?:\x03...|\x04....|\x05.{5}|\x06.{6}|\x07.{7}))"
_TEXT = counted(b"\x8c", 1, SHORT)
_KINDS = {  # the pattern of a value, which may be preceded by a fetch of torch.Size
    "number": b"(N|%b)" % _INT,
    "size": rb"(\)|%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\(%b{4,}t\x94)\x85\x94R\x94" % ((_INT,) * 4),
    "text": b"(%b\x94|%b)" % (_TEXT, _GET),
}
_ONE_ATTRIBUTE = b"(%b)(?:(%b)%b|%b|%b)" % (_GET, _GET, _KINDS["size"], _KINDS["number"], _KINDS["text"])
_OF = rb"(?:%b|[^()]+\x93\x94)\)\x81\x94" % _GET  # what makes an instance of a class, which is fetched or named

# with groups of its name, of what fetches torch.Size, and of its value of each kind
_ATTRIBUTE = re.compile(_ONE_ATTRIBUTE, re.DOTALL)
_INSTANCE = re.compile(rb"(%b)\)\x81\x94}\x94\(((?:%b)++)ub" % (_GET, _ONE_ATTRIBUTE), re.DOTALL)
# the opcodes before a state: maybe after a mark, or the tail of another instance; or cut off
_HEAD = re.compile(rb"(?:|(?P<mark>.*\()|(?P<tail>.*b))%b|\)?\x81?\x94?" % _OF, re.DOTALL)
_OPERANDS = re.compile(WITH_OPERANDS, re.DOTALL)
# what memoizes, with groups of the text before it, if there is one, and of itself
_MEMOIZED = re.compile(b"(%b)?(\x94)|%b" % (_TEXT, WITH_OPERANDS), re.DOTALL)
_WIDTHS = {0x4B: 1, 0x4D: 2, 0x4A: 4}  # bytes of the operands of BININT1, BININT2 and BININT


class Attribute(NamedTuple):
    """The opcodes that fetch the name of an attribute, and torch.Size if its value is one; and the kind of value."""

    name: bytes
    size: bytes
    kind: str


class InstanceShape(NamedTuple):
    """What alike instances have in common: the opcodes that fetch their class, and their attributes."""

    of: bytes
    attributes: tuple[Attribute, ...]

    @property
    def pattern(self) -> bytes:
        """Return the pattern of such an instance, with a group for each value."""
        values = (re.escape(one.name + one.size) + _KINDS[one.kind] for one in self.attributes)
        return b"".join((re.escape(self.of), rb"\)\x81\x94}\x94\(", *values, b"ub"))

    @property
    def fetches(self) -> Iterator[bytes]:
        """Yield what fetches the class, and then each name, and torch.Size or the class again."""
        yield self.of
        for one in self.attributes:
            yield from (one.name, one.size or self.of)


def has_long_runs(data: bytes, at: int) -> bool:
    """Return whether a pickle has many more instances than lists, so that many follow one another."""
    return data.count(b")\x81\x94}\x94(", at) >= _MANY * data.count(b"]\x94", at)


class Tables:
    """The tables of one pickle, which are made while it is rewritten and named when it is loaded."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._is_off = data[at : at + 2] not in _PROTOCOLS
        self._fetched = [] if self._is_off else fetched_places(data, at)
        self._texts: dict[int, str] = {}  # by their places in the memo, those that may be fetched
        self._values = _Values(self._texts)
        self._place = 0  # how much has been memoized
        self._is_key_next: bool | None = None  # if instances are keys and values; None if that is not known
        self._made: list[tuple[Sequence[InstanceShape], list[Sequence[Any]]]] = []

    def follow(self, heads: Iterable[bytes], start: int, at: int) -> Generator[bytes, None, int]:
        """Yield what stands for the alike instances at an offset. Returns the offset after them.

        `heads` are the opcodes before the state of each instance that was passed on since `start`.
        """
        self.pass_on(start, at)
        self._pass_instances(heads)
        while taken := self._take(at):
            piece, at = taken
            yield piece
        return at

    def pass_on(self, start: int, end: int) -> None:
        """Note what the opcodes between two offsets memoize, which the unpickler gets as they are."""
        if self._is_off:
            return
        piece = self._data[start:end]
        bare = _OPERANDS.sub(b"", piece)
        self._is_off = b"q" in bare or b"r" in bare + self._data[end : end + 1]  # which name the places that they fill
        before, self._place = self._place, self._place + bare.count(b"\x94")
        wanted = set(self._fetched_in(before, self._place))
        if wanted:
            memoized = enumerate((found[1] for found in _MEMOIZED.finditer(piece) if found[2]), before)
            self._note_texts((place, text) for place, text in memoized if text is not None and place in wanted)

    def _pass_instances(self, heads: Iterable[bytes]) -> None:
        """Note whether the next instance would be a key, from the opcodes before the state of each one passed on."""
        for head in heads:
            found = _HEAD.fullmatch(head)
            if found is None:
                self._is_key_next = None
            elif found["mark"]:
                self._is_key_next = False
            elif not found["tail"] and self._is_key_next is not None:  # else there were two
                self._is_key_next = not self._is_key_next

    def _take(self, at: int) -> tuple[bytes, int] | None:
        """Return what stands for the alike instances at an offset, and the offset after them. None for too few."""
        if self._is_off or self._place < _FEWEST_BEFORE:
            return None
        shapes = shapes_at(self._data, at)
        if not shapes or (len(shapes) > 1 and not self._is_key_next):
            return None
        end = min(at + _WINDOW, len(self._data))
        rows = _rows(shapes).findall(self._data, at, end)
        if rows and rows[-1][-1]:
            end -= len(rows.pop()[-1])
        if len(rows) < _FEWEST:
            return None
        filled = self._keep(shapes, rows)
        if filled is None:
            return None
        number = (len(self._made) - 1).to_bytes(4, "little")
        call = b"(J%b%btQ" % (number, b"".join(chain.from_iterable(shape.fetches for shape in shapes)))
        return filled + call + (b"N" if len(shapes) > 1 else b""), end

    def _keep(self, shapes: Sequence[InstanceShape], rows: Sequence[tuple[bytes, ...]]) -> bytes | None:
        """Keep the values of rows; return opcodes that fill their places in the memo. None for what no table can hold.

        That is what may be fetched and is no text, and what fetches something else than a text.
        """
        end = self._place + count_memoized(shapes, rows)
        wanted = self._fetched_in(self._place, end)
        texts = dict(memoized_texts(shapes, rows, self._place)) if wanted else {}
        if not all(place in texts for place in wanted):
            return None
        kept = [(place, texts[place]) for place in wanted]
        self._note_texts(kept)
        if len(self._values) > _MOST_VALUES:
            self._values.clear()
        *columns, _ = zip(*rows, strict=True)
        try:
            self._made.append((shapes, [tuple(map(self._values.__getitem__, column)) for column in columns]))
        except (KeyError, UnicodeDecodeError):
            return None
        before, self._place = self._place, end
        return b"".join(fillers(before, end, kept))

    def name_it(self, number: int, fetched: Sequence[Any], size: Any) -> list[dict[str, Sequence[Any]]] | None:
        """Return the columns of a table by name, of each side; None if what was fetched is not what a table needs.

        The unpickler has fetched what the instances have in common, and knows torch.Size.
        """
        shapes, values = self._made[number]
        self._made[number] = ((), [])
        left, columns = iter(fetched), iter(values)
        sides = []
        for shape in shapes:
            of = next(left)
            side = {}
            for attribute in shape.attributes:
                name, other = next(left), next(left)
                is_as_said = other is (size if attribute.kind == "size" else of)
                if type(name) is not str or not is_as_said or not isinstance(of, type):
                    return None
                side[name] = next(columns)
            sides.append(side)
        return sides

    def _fetched_in(self, start: int, end: int) -> Sequence[int]:
        return self._fetched[bisect_left(self._fetched, start) : bisect_left(self._fetched, end)]

    def _note_texts(self, found: Iterable[tuple[int, bytes]]) -> None:
        self._texts.update((place, decode_text(opcodes)) for place, opcodes in found)


class _Values(dict[bytes, Any]):
    """What opcodes make: a number, a tuple of numbers, a text, None. Raises `KeyError` for a place without a text."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, opcodes: bytes) -> Any:
        value = self._texts[int.from_bytes(opcodes[1:], "little")] if opcodes[0] in b"hj" else decode(opcodes)
        self[opcodes] = value
        return value


def decode(opcodes: bytes) -> int | str | tuple[int, ...] | None:
    """Return the value that opcodes make which are no fetch."""
    if opcodes == b"N":
        return None
    if opcodes[0] == 0x8C:
        return decode_text(opcodes)
    at, numbers = int(opcodes[0] == 0x28), []
    while at < len(opcodes) and opcodes[at] in b"KMJ\x8a":
        opcode, width = opcodes[at], _WIDTHS.get(opcodes[at])
        if width is None:
            at, width = at + 1, opcodes[at + 1]
        operand = opcodes[at + 1 : at + 1 + width]
        numbers.append(int.from_bytes(operand, "little", signed=opcode not in b"KM"))
        at += 1 + width
    return numbers[0] if at == len(opcodes) else tuple(numbers)


def decode_text(opcodes: bytes) -> str:
    """Return the text that SHORT_BINUNICODE makes, whatever follows it."""
    return opcodes[2 : 2 + opcodes[1]].decode("utf-8", "surrogatepass")


def shapes_at(data: bytes, at: int) -> tuple[InstanceShape, ...]:
    """Return the shape of the instance at an offset, and of the next one if that is of another class; () for others."""
    first = shape_at(data, at)
    if first is None:
        return ()
    shape, end = first
    second = shape_at(data, end)
    return (shape,) if second is None or second[0].of == shape.of else (shape, second[0])


def shape_at(data: bytes, at: int) -> tuple[InstanceShape, int] | None:
    """Return the shape of the instance at an offset and the offset past it, None for what no table can hold."""
    found = _INSTANCE.match(data, at)
    if found is None:
        return None
    attributes = []
    for name, size, _, _, text in _ATTRIBUTE.findall(found[2]):
        attributes.append(Attribute(name, size, "size" if size else "text" if text else "number"))
    return InstanceShape(found[1], tuple(attributes)), found.end()


def count_memoized(shapes: Sequence[InstanceShape], rows: Sequence[tuple[bytes, ...]]) -> int:
    """Return how much rows of instances memoize: each of them and its state, three for a size, and texts."""
    kinds = [one.kind for shape in shapes for one in shape.attributes]
    count = len(rows) * (2 * len(shapes) + 3 * kinds.count("size"))
    for kind, column in zip(kinds, zip(*rows, strict=True), strict=False):  # the last column is of no kind
        if kind == "size":
            count -= column.count(b")")
        if kind == "text":
            count += [opcodes[0] for opcodes in column].count(0x8C)
    return count


def memoized_texts(
    shapes: Sequence[InstanceShape], rows: Iterable[tuple[bytes, ...]], place: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the place in the memo of each text in rows of instances, and the opcodes that make it."""
    for row in rows:
        values = iter(row)
        for shape in shapes:
            place += 2
            for attribute in shape.attributes:
                opcodes = next(values)
                if attribute.kind == "size":
                    place += 2 if opcodes == b")" else 3
                elif attribute.kind == "text" and opcodes[0] == 0x8C:
                    yield place, opcodes[:-1]
                    place += 1


def fillers(start: int, end: int, texts: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield opcodes that fill the places of the memo from `start` to `end`: with texts, and None."""
    for place, text in texts:
        yield b"N%b0%b\x940" % (b"\x94" * (place - start), text)
        start = place + 1
    yield b"N%b0" % (b"\x94" * (end - start))


def fetched_places(data: bytes, at: int) -> list[int]:
    """Return the places of the memo that a pickle fetches from by four bytes, in order; and others that look like it.

    Most fetches are of a few names and classes, which are not looked at again.
    """
    found: set[bytes] = set()
    highest = min(len(data) >> 24, 255)  # byte of a place
    fetch = memo_get_pattern((), highest)
    for start in range(at, len(data), _WINDOW):
        some = fetch.findall(data, start, start + _WINDOW + 4)
        found.update(some)
        if len(some) > _MOST_FETCHES:
            fetch = memo_get_pattern([one for one, _ in Counter(some).most_common(_FREQUENT)], highest)
    return sorted(place for place in (int.from_bytes(one, "little") for one in found) if place < len(data))


def memo_get_pattern(places: Sequence[bytes], highest: int) -> re.Pattern[bytes]:
    """Return the pattern of LONG_BINGET with a group for the place, whose last byte is not above `highest`.

    None of these places is found.
    """
    but = b"(?!%b)" % b"|".join(map(re.escape, places)) if places else b""
    return re.compile(rb"j%b(?=(...[\0-%b]))" % (but, re.escape(bytes([highest]))), re.DOTALL)


@lru_cache(maxsize=8)
def _rows(shapes: tuple[InstanceShape, ...]) -> re.Pattern[bytes]:
    """Return the pattern of instances of these shapes in turn, with a group for each value; else of the rest."""
    return re.compile(b"%b|(.+)" % b"".join(shape.pattern for shape in shapes), re.DOTALL)
