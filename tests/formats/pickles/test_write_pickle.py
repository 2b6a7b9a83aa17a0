"""What is written is what pickle reads, and what was read is written as it was; by a program that calls nothing."""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import Unsupported
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.write_pickle import dump

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


class Anything:
    def __contains__(self, name: object) -> bool:
        return True


def again(data: bytes) -> bytes:
    """A pickle read and written again."""
    value, _ = inert_pickle.load(data, Anything())
    return dump(value)


class Point:
    """Pickled by its class and its state."""

    def __init__(self, x: int) -> None:
        self.x = x


class Names(list[str]):
    """Pickled as a call, with members."""


class Places(dict[str, int]):
    """Pickled as a call, with pairs."""


@given(plain)
def test_pickle_reads_what_we_write(value: Any) -> None:
    assert pickle.loads(dump(value)) == value


@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_what_pickle_wrote_survives(value: Any, protocol: int) -> None:
    assert pickle.loads(again(pickle.dumps(value, protocol))) == value


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(a=1, b=[2]),
        {1, 2, 3},
        PurePosixPath("a/b"),
        timedelta(days=2),
        torch.Size([2, 3]),
        torch.float8_e4m3fn,
        Names(["a", "b"]),
        Places(a=1),
        1j,
        math.inf,
        list(range(3000)),
        {f"name {i}": i for i in range(3000)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_calls_survive(value: Any, protocol: int) -> None:
    found = pickle.loads(again(pickle.dumps(value, protocol)))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_instance_is_made_without_its_init(protocol: int) -> None:
    found = pickle.loads(again(pickle.dumps(Point(3), protocol)))
    assert isinstance(found, Point)
    assert found.x == 3


def test_what_is_shared_stays_shared() -> None:
    shared = [1, "two"]
    one, other, both = pickle.loads(again(pickle.dumps([shared, shared, (shared, shared)])))
    assert one is other is both[0] is both[1]


def test_a_list_in_itself_stays_so() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    found = pickle.loads(again(pickle.dumps(loop)))
    assert found[1] is found


def test_sharing_does_not_blow_up() -> None:
    value: Any = ["leaf"]
    for _ in range(200):
        value = [value, value]
    data = pickle.dumps(value)
    assert len(again(data)) < 3 * len(data)


def test_torch_reads_what_torch_wrote_and_we_wrote_again() -> None:
    file = io.BytesIO()
    torch.save({"betas": (0.9, 0.999), "rng": b"\x00\xff", "size": torch.Size([3]), "none": None}, file)
    record = next(part for part in zip_parts(file) if part.startswith(b"\x80\x02}"))
    assert pickle.loads(again(record)) == {"betas": (0.9, 0.999), "rng": b"\x00\xff", "size": (3,), "none": None}


def zip_parts(file: io.BytesIO) -> list[bytes]:
    from zipfile import ZipFile

    with ZipFile(file) as archive:
        return [archive.read(name) for name in archive.namelist()]


def test_nothing_runs_on_the_way() -> None:
    evil = b"cos\nsystem\n(S'touch /tmp/never'\ntR."
    value, _ = inert_pickle.load(b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00a\x85R.", Anything())
    assert isinstance(value, Record)
    assert value.of == Global("os", "system")
    assert b"cos\nsystem\n" in dump(value)
    with pytest.raises(Unsupported):
        inert_pickle.load(evil, Anything())  # strings of protocol 0 are none of torch's


@pytest.mark.parametrize("value", [object(), {1}, bytearray(b"x"), 1 << 3000], ids=["object", "set", "array", "int"])
def test_what_no_pickle_gave_is_unsupported(value: object) -> None:
    with pytest.raises(Unsupported):
        dump(value)


def test_endless_nesting_is_unsupported() -> None:
    value: Any = ()
    for _ in range(100_000):
        value = (value,)
    with pytest.raises(Unsupported, match="nested too deep"):
        dump(value)
