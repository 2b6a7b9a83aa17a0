"""Mutations: sound input changed in a few places, as hypothesis draws them. Knows JSON, pickle's opcodes and bytes."""

from __future__ import annotations

import json
import pickletools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

_ODD_BYTES = st.sampled_from(
    [
        b"[" * 5000,
        b'{"a":' * 5000,
        b"",
        b"\0",
        b"\xff",
        b"\xff" * 4,
        b"\xff" * 8,
        b"\0" * 8,
        b"\x7f\xff\xff\xff",
        b"PK\x01\x02",
    ]
)
_ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from([[], {}, [[]], "../x", "\ud800", "\0", 1 << 63, -1, 10**400, "a" * 300]),
)
_OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


@st.composite
def changed(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds with changes that suit it, or bytes that are like none of them."""
    kind = draw(st.sampled_from(["bytes", "spliced", "opcodes", "json", "raw"]))
    seed = draw(st.sampled_from(seeds))
    if kind == "raw":
        return draw(st.binary(max_size=64))
    if kind == "json":
        return changed_json(draw, seed)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(seed)))
        gone = draw(st.integers(0, 8 if kind == "bytes" else len(seed) - at))
        new = _ODD_BYTES if kind == "bytes" else st.binary(max_size=9)
        if kind == "opcodes":
            gone, new = draw(st.integers(0, 2)), st.lists(st.sampled_from(_OPCODES), max_size=3).map(b"".join)
        seed = seed[:at] + draw(new) + seed[at + gone :]
    return seed


def changed_json(draw: st.DrawFn, seed: bytes) -> bytes:
    """A seed with some values of the JSON in it replaced, also of a header behind its length; or the seed itself."""
    start, end = (8, 8 + int.from_bytes(seed[:8], "little")) if seed[8:9] == b"{" else (0, len(seed))
    try:
        value = json.loads(seed[start:end])
    except ValueError:
        return seed
    for _ in range(draw(st.integers(1, 3))):
        value = replaced(draw, value)
    text = json.dumps(value).encode()
    return (len(text).to_bytes(8, "little") if start else b"") + text + seed[end:]


def replaced(draw: st.DrawFn, value: Any) -> Any:
    """A value of which something is another value, gone, or there under another key."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(list(value)))
        change = draw(st.sampled_from(["within", "within", "gone", "renamed"]))
        rest = {name: member for name, member in value.items() if name != key}
        if change == "gone":
            return rest
        new = draw(st.text(max_size=3)) if change == "renamed" else key
        return {**rest, new: replaced(draw, value[key]) if change == "within" else value[key]}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], replaced(draw, value[at]), *value[at + 1 :]]
    return draw(_ODD_VALUES)
