"""Read consecutive instances of one class in a pickle into columns of a table, without creating an object for each.

The `.metadata` of thousands of ranks has millions of instances of three classes. They differ only in numbers, sizes and
names. The opcodes of one instance give a pattern, and the pattern finds the next ones. The unpickler gets one call of
`persistent_load` in place of them all. Equal values become one object.

The unpickler memoizes every object, and later opcodes may fetch it by its memo index. So the memo entries of the
instances are filled: with None, or with a string if an opcode may fetch it. If an opcode may fetch any other value of
an instance, the unpickler reads the instance itself.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from ckptkit.formats.pickles.opcodes import APPENDS, SHORT, WITH_OPERANDS, length_prefixed_pattern

_WINDOW = 1 << 16  # bytes per search
_FEWEST = 8  # rows; shorter tables are not worth it
_MANY = 50  # instances per list
_MOST_VALUES = 1 << 17  # cached values
_MOST_FETCHES = 1000  # per window; more means that few objects are fetched often
_FREQUENT = 16  # objects that are skipped then
_FEWEST_BEFORE = 256  # memo entries below this index may be fetched with one byte, which is not searched for
_PROTOCOLS = (b"\x80\x04", b"\x80\x05")  # protocols that fill the memo in order
_GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....|\x8a(?:\x03...|\x04....|\x05.{5}|\x06.{6}|\x07.{7}))"
_TEXT = length_prefixed_pattern(b"\x8c", 1, SHORT)
_KINDS = {  # patterns of values; a fetch of torch.Size comes before a size
    "number": b"(N|%b)" % _INT,
    "size": rb"(\)|%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\(%b{4,}t\x94)\x85\x94R\x94" % ((_INT,) * 4),
    "text": b"(%b\x94|%b)" % (_TEXT, _GET),
}
_ONE_ATTRIBUTE = b"(%b)(?:(%b)%b|%b|%b)" % (_GET, _GET, _KINDS["size"], _KINDS["number"], _KINDS["text"])
# creates an instance of a class, which is fetched from the memo or named
_OF = rb"(?:%b|[^()]+\x93\x94)\)\x81\x94" % _GET

# groups: the name, the fetch of torch.Size, and the value of each kind
_ATTRIBUTE = re.compile(_ONE_ATTRIBUTE, re.DOTALL)
_INSTANCE = re.compile(rb"(%b)\)\x81\x94}\x94\(((?:%b)++)ub" % (_GET, _ONE_ATTRIBUTE), re.DOTALL)
# the opcodes before a state: after a mark, or after the tail of another instance, or truncated
_HEAD = re.compile(rb"(?:|(?P<mark>.*\()|(?P<tail>.*b))%b|\)?\x81?\x94?" % _OF, re.DOTALL)
_OPERANDS = re.compile(WITH_OPERANDS, re.DOTALL)
# MEMOIZE opcodes; groups: the string before it, if there is one, and the opcode
_MEMOIZED = re.compile(b"(%b)?(\x94)|%b" % (_TEXT, WITH_OPERANDS), re.DOTALL)
_WIDTHS = {0x4B: 1, 0x4D: 2, 0x4A: 4}  # widths of the operands of BININT1, BININT2 and BININT in bytes


class Attribute(NamedTuple):
    """The opcodes that fetch an attribute's name, and torch.Size if its value is a size; and the kind of value."""

    name: bytes
    size: bytes
    kind: str


class InstanceShape(NamedTuple):
    """The common part of instances: the opcodes that fetch their class, and their attributes."""

    of: bytes
    attributes: tuple[Attribute, ...]

    @property
    def class_and_attribute_opcodes(self) -> Iterator[bytes]:
        """Yield the opcodes that fetch the class, then each attribute's name and torch.Size, or the class again."""
        yield self.of
        for attribute in self.attributes:
            yield from (attribute.name, attribute.size or self.of)


def has_many_instances(data: bytes, at: int) -> bool:
    """Return whether a pickle has many more instances than lists, so that many instances are consecutive."""
    return data.count(b")\x81\x94}\x94(", at) >= _MANY * data.count(b"]\x94", at)


class Tables:
    """The tables of one pickle: created while it is rewritten, named when it is loaded."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._is_off = data[at : at + 2] not in _PROTOCOLS
        self._fetched = [] if self._is_off else fetched_memo_indices(data, at)
        self._texts: dict[int, str] = {}  # strings that may be fetched, by memo index
        self._values = _Values(self._texts)
        self._memo_size = 0  # the number of memo entries so far
        self._is_key_next: bool | None = None  # if instances are keys and values of a dict; None if unknown
        self._made: list[tuple[Sequence[InstanceShape], list[Sequence[Any]]]] = []

    def instance_replacements_at(self, heads: Iterable[bytes], start: int, at: int) -> Generator[bytes, None, int]:
        """Yield replacements for the instances at an offset, and return the offset after them; `heads` came before."""
        self.record_unchanged_opcodes(start, at)
        # the opcodes before the state of each instance passed on tell whether the next instance is a key
        for match in map(_HEAD.fullmatch, heads):
            if match is None:
                self._is_key_next = None
            elif match["mark"]:
                self._is_key_next = False
            # a tail means that there were two instances, so nothing changes
            elif not match["tail"] and self._is_key_next is not None:
                self._is_key_next = not self._is_key_next
        while taken := self._replace_instances(at):
            piece, at = taken
            yield piece
        return at

    def record_unchanged_opcodes(self, start: int, end: int) -> None:
        """Record the memo entries of the opcodes between two offsets, which the unpickler gets unchanged."""
        if self._is_off:
            return
        piece = self._data[start:end]
        bare = _OPERANDS.sub(b"", piece)
        # they name the memo index that they fill
        self._is_off = b"q" in bare or b"r" in bare + self._data[end : end + 1]
        before, self._memo_size = self._memo_size, self._memo_size + bare.count(b"\x94")
        wanted = set(self._fetched_memo_indices_between(before, self._memo_size))
        if wanted:
            memoized = enumerate((match[1] for match in _MEMOIZED.finditer(piece) if match[2]), before)
            texts = ((index, text) for index, text in memoized if text is not None and index in wanted)
            self._texts.update((index, decode_text(text)) for index, text in texts)

    def _replace_instances(self, at: int) -> tuple[bytes, int] | None:
        """Return the replacement for the instances at an offset, and the offset after them; None for too few."""
        is_on = not self._is_off and self._memo_size >= _FEWEST_BEFORE
        first = find_instance_shape_at(self._data, at) if is_on else None
        if first is None:
            return None
        shapes: tuple[InstanceShape, ...] = (first[0],)
        second = find_instance_shape_at(self._data, first[1])
        if second is not None and second[0].of != first[0].of:
            if self._is_key_next is False:  # pass on the value, as a flat instance: a table begins with a key
                self.record_unchanged_opcodes(at, first[1])
                self._is_key_next, state = True, at + len(first[0].of) + len(b")\x81\x94")
                return self._data[at:state] + self._data[state + 1 : first[1] - 2] + APPENDS, first[1]
            if not self._is_key_next:
                return None
            shapes = (first[0], second[0])
        end = min(at + _WINDOW, len(self._data))
        rows = _rows_pattern(shapes).findall(self._data, at, end)
        if rows and rows[-1][-1]:
            end -= len(rows.pop()[-1])
        if len(rows) < _FEWEST:
            return None
        filled = self._store_rows(shapes, rows)
        if filled is None:
            return None
        number = (len(self._made) - 1).to_bytes(4, "little")
        call = b"(J%b%btQ" % (
            number,
            b"".join(chain.from_iterable(shape.class_and_attribute_opcodes for shape in shapes)),
        )
        return filled + call + (b"N" if len(shapes) > 1 else b""), end

    def _store_rows(self, shapes: Sequence[InstanceShape], rows: Sequence[tuple[bytes, ...]]) -> bytes | None:
        """Store the values of rows; return opcodes that fill their memo entries.

        Returns None if the rows do not fit a table. They do not if an opcode may fetch something else than a string
        from them, or they fetch something else.
        """
        end = self._memo_size + count_memoized(shapes, rows)
        wanted = self._fetched_memo_indices_between(self._memo_size, end)
        texts = dict(memoized_texts(shapes, rows, self._memo_size)) if wanted else {}
        if not all(index in texts for index in wanted):
            return None
        kept = [(index, texts[index]) for index in wanted]
        self._texts.update((index, decode_text(text)) for index, text in kept)
        if len(self._values) > _MOST_VALUES:
            self._values.clear()
        *columns, _ = zip(*rows, strict=True)
        try:
            self._made.append((shapes, [tuple(map(self._values.__getitem__, column)) for column in columns]))
        except (KeyError, UnicodeDecodeError):
            # an unknown memo index or invalid string: leave the instances to the unpickler
            return None
        before, self._memo_size = self._memo_size, end
        filled = []
        for index, text in kept:
            filled.append(b"N%b0%b\x940" % (b"\x94" * (index - before), text))
            before = index + 1
        return b"".join((*filled, b"N%b0" % (b"\x94" * (end - before))))

    def table_columns(
        self, table_number: int, fetched: Sequence[Any], torch_size: Any
    ) -> list[dict[str, Sequence[Any]]] | None:
        """Return the columns of a table by name, for keys and values; None if the fetched values do not fit a table.

        The unpickler has `fetched` the common part of the instances; `torch_size` is its object for torch.Size.
        """
        shapes, values = self._made[table_number]
        # a table is used once; free its memory
        self._made[table_number] = ((), [])
        remaining, columns = iter(fetched), iter(values)
        sides = []
        for shape in shapes:
            of = next(remaining)
            side = {}
            for attribute in shape.attributes:
                name, other = next(remaining), next(remaining)
                is_expected = other is (torch_size if attribute.kind == "size" else of)
                if type(name) is not str or not is_expected or not isinstance(of, type):
                    return None
                side[name] = next(columns)
            sides.append(side)
        return sides

    def _fetched_memo_indices_between(self, start: int, end: int) -> Sequence[int]:
        return self._fetched[bisect_left(self._fetched, start) : bisect_left(self._fetched, end)]


class _Values(dict[bytes, Any]):
    """The values of opcodes: an integer or several, a string, None. Raises `KeyError` for an unknown memo index."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, opcodes: bytes) -> Any:
        value = self._texts[int.from_bytes(opcodes[1:], "little")] if opcodes[0] in b"hj" else decode_opcodes(opcodes)
        self[opcodes] = value
        return value


def decode_opcodes(opcodes: bytes) -> int | str | tuple[int, ...] | None:
    """Return the value of opcodes that are not a fetch."""
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
    """Return the string of SHORT_BINUNICODE, whatever follows it."""
    return opcodes[2 : 2 + opcodes[1]].decode("utf-8", "surrogatepass")


def find_instance_shape_at(data: bytes, at: int) -> tuple[InstanceShape, int] | None:
    """Return the shape of the instance at an offset and the offset after it; None if it does not fit a table."""
    match = _INSTANCE.match(data, at)
    if match is None:
        return None
    attributes = []
    for name, size, _, _, text in _ATTRIBUTE.findall(match[2]):
        attributes.append(Attribute(name, size, "size" if size else "text" if text else "number"))
    return InstanceShape(match[1], tuple(attributes)), match.end()


def count_memoized(shapes: Sequence[InstanceShape], rows: Sequence[tuple[bytes, ...]]) -> int:
    """Return the number of memo entries of rows: two per instance, three per size, one per string."""
    kinds = [attribute.kind for shape in shapes for attribute in shape.attributes]
    count = len(rows) * (2 * len(shapes) + 3 * kinds.count("size"))
    for kind, column in zip(kinds, zip(*rows, strict=True), strict=False):  # the last column has no kind
        if kind == "size":
            count -= column.count(b")")
        if kind == "text":
            count += [opcodes[0] for opcodes in column].count(0x8C)
    return count


def memoized_texts(
    shapes: Sequence[InstanceShape], rows: Iterable[tuple[bytes, ...]], memo_index: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the memo index of each string in rows of instances, and the opcodes of the string."""
    for row in rows:
        values = iter(row)
        for shape in shapes:
            memo_index += 2
            for attribute in shape.attributes:
                opcodes = next(values)
                if attribute.kind == "size":
                    memo_index += 2 if opcodes == b")" else 3
                elif attribute.kind == "text" and opcodes[0] == 0x8C:
                    yield memo_index, opcodes[:-1]
                    memo_index += 1


def fetched_memo_indices(data: bytes, at: int) -> list[int]:
    """Return the memo indices fetched with four bytes, and maybe more. Skips the few frequent ones once known."""
    fetched: set[bytes] = set()
    highest = min(len(data) >> 24, 255)  # byte of a place
    fetch = memo_get_pattern((), highest)
    for start in range(at, len(data), _WINDOW):
        in_window = fetch.findall(data, start, start + _WINDOW + 4)
        fetched.update(in_window)
        if len(in_window) > _MOST_FETCHES:
            fetch = memo_get_pattern([one for one, _ in Counter(in_window).most_common(_FREQUENT)], highest)
    return sorted(index for index in (int.from_bytes(one, "little") for one in fetched) if index < len(data))


def memo_get_pattern(excluded_indices: Sequence[bytes], highest_byte: int) -> re.Pattern[bytes]:
    """Return the pattern of LONG_BINGET of an index outside `excluded_indices`, its last byte up to `highest_byte`."""
    not_known = b"(?!%b)" % b"|".join(map(re.escape, excluded_indices)) if excluded_indices else b""
    return re.compile(rb"j%b(?=(...[\0-%b]))" % (not_known, re.escape(bytes([highest_byte]))), re.DOTALL)


@lru_cache(maxsize=8)
def _rows_pattern(shapes: tuple[InstanceShape, ...]) -> re.Pattern[bytes]:
    """Return the pattern of instances of these shapes in turn. Its groups are the values, then the remaining bytes."""
    pattern = b""
    for shape in shapes:
        values = (re.escape(attribute.name + attribute.size) + _KINDS[attribute.kind] for attribute in shape.attributes)
        pattern += b"".join((re.escape(shape.of), rb"\)\x81\x94}\x94\(", *values, b"ub"))
    return re.compile(b"%b|(.+)" % pattern, re.DOTALL)
