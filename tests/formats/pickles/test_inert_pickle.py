"""Pickles from friends and foes: always a value or an error of ours, and never anything run."""

from __future__ import annotations

import io
import os
import pickle
import resource
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.pickles.inert_pickle import FlatInstance, Global, Record, attribute_columns, load, walk_members
from tests import producers
from tests.conftest import Produce
from tests.tiers import nightly_but


class Everything(Container[tuple[str, str]]):
    """An allow-list on which every name stands: the machine must be safe without one."""

    def __contains__(self, name: object) -> bool:
        return True


EVERYTHING = Everything()
PROTOCOLS = (2, 3, 4, 5)

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(st.characters(codec="utf-8")) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(value=plain)
def test_plain_values_come_back(protocol: int, value: Any) -> None:
    data = pickle.dumps(value, protocol)
    assert load(b"before" + data + b"after", (), at=6) == (value, 6 + len(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_and_shared_values_come_back(protocol: int) -> None:
    shared = ["x" * 300, "y" * 200_000, 2**31, 2**40, *([b"y" * 300, b"z"] if protocol > 2 else [])]
    value = {"list": list(range(3000)), "again": [shared, shared], "map": {str(i): i for i in range(3000)}}
    found, _ = load(pickle.dumps(value, protocol), ())
    assert found == value
    assert found["again"][0] is found["again"][1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_become_records(protocol: int) -> None:
    value, _ = load(pickle.dumps([torch.Size([2, 3]), OrderedDict(a=1, b=2), torch.bfloat16], protocol), EVERYTHING)
    size, ordered, dtype = value
    assert isinstance(size, Record)
    assert (size.of, size.args) == (Global("torch", "Size"), ((2, 3),))
    assert isinstance(ordered, Record)
    assert ordered.of == Global("collections", "OrderedDict")
    assert ordered.items == [("a", 1), ("b", 2)]
    assert dtype == Global("torch", "bfloat16")


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"collections\.OrderedDict"):
        load(pickle.dumps(OrderedDict()), {("torch", "Size")})


class Runs:
    """An object whose unpickling runs a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, *PROTOCOLS])
def test_nothing_runs(tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "canary"
    data = pickle.dumps({"model": Runs(os.system, f"touch {canary}"), "step": Runs(eval, "1 / 0")}, protocol)
    for names in ((), EVERYTHING):
        value_or_error(data, names)
    assert not canary.exists()
    with pytest.raises(ZeroDivisionError):
        pickle.loads(data)
    assert canary.exists(), "the payload should have been a real one"


@pytest.mark.parametrize(
    "data",
    [
        b"c__main__\nx\n.",
        b"cos\nsystem\n(S'id'\ntR.",
        b"(S'id'\nios\nsystem\n.",
        b"(cos\nsystem\nS'id'\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02\x83\x01\x00.",
        b"\x80\x02\x84\x01\x00\x00\x00.",
        b"Pxyz\n.",
    ],
    ids=["global", "reduce", "inst", "obj", "ext1", "ext2", "ext4", "persid"],
)
def test_every_way_to_call_is_refused(data: bytes) -> None:
    with pytest.raises(CkptError):
        load(data, ())


BOMBS = {
    "memo index": bytes.fromhex("4e72000000102e"),
    "memo index 4 GiB": b"\x80\x02Nr\xff\xff\xff\xff.",
    "bytes8 of 1 TiB": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b".",
    "bytes8 of 2^63": b"\x80\x04\x8e" + (1 << 63).to_bytes(8, "little") + b".",
    "text8 of 1 TiB": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b".",
    "bytes4 of 4 GiB": b"\x80\x04B\xff\xff\xff\xff.",
    "bytearray8 of 1 TiB": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "frame of 2^62": b"\x80\x04\x95" + (1 << 62).to_bytes(8, "little") + b"N.",
    "long4 of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "negative long4": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "decimal of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "lists in lists": b"]" * 200_000 + b"a" * 199_999 + b".",
    "tuples in tuples": b"N" + b"\x85" * 300_000 + b".",
    "dicts in dicts": b"}N" * 100_000 + b"N" + b"s" * 100_000 + b".",
    "dicts": b"}" * 1_000_000 + b".",
    "sets in sets": b"\x8f" + b"(\x8f" * 100_000 + b"\x90" * 100_000 + b".",
    "calls in calls": b"ctorch\nSize\n(" * 100_000 + b"tR" * 100_000 + b".",
    "calls of calls": b"ctorch\nSize\n" + b")R" * 300_000 + b".",
    "states in states": b"ctorch\nSize\n)R" * 100_000 + b"b" * 99_999 + b".",
    "instances in instances": b"ca\nb\n)\x81" * 100_000 + b"b" * 99_999 + b".",
    "fields in fields": b"ca\nb\n)\x81}(N" * 100_000 + b"Nub" * 100_000 + b".",
    "an instance that is its own state": b"ca\nb\n)\x81q\x00" + b"h\x00b" * 400_000 + b".",
    "a state given again and again": b"](" + b"N" * 100_000 + b"eq\x00ca\nb\n)\x81" + b"h\x00b" * 100_000 + b".",
    "a text as state": b"X\x00\x00\x01\x00" + b"a" * 65536 + b"q\x00ca\nb\n)\x81" + b"h\x00b" * 400_000 + b".",
    "an instance as a key": b"}q\x00ca\nb\n)\x81q\x01h\x01b" + b"h\x00h\x01Ns0" * 1_000 + b"h\x00.",
    "an instance made with its like": b"ca\nb\nq\x00)\x81" + b"q\x01h\x00h\x01\x85\x81" * 100_000 + b".",
    "items at places of an instance": b"ca\nb\n)\x81" + b"K\x01Ns" * 1_000 + b".",
    "references to references": b"N" + b"Q" * 300_000 + b".",
    "names": b"".join(b"ca\n%d\n" % i for i in range(300_000)) + b".",
    "attributes for a name": b"ctorch\nSize\nN}X\x04\x00\x00\x00name]s\x86b.",
    "attributes for a size": b"ctorch\nSize\n)R(K\x01)}N\x86tb.",
    "members for a name": b"ctorch\nSize\n(K\x01K\x02e.",
    "marks": b"(" * 300_000 + b".",
    "marks and tuples": b"(" * 300_000 + b"t" * 300_000 + b".",
    "a tuple of twins as a key": b"}N" + b"q\x00h\x00\x86" * 64 + b"Ns.",
    "a tuple of twins in a name": b"N" + b"q\x00h\x00\x86" * 64 + b"N\x93.",
    "a record that contains itself": b"ctorch\nSize\nq\x00h\x00\x85R.",
    "a list that contains itself": b"]q\x00h\x00a.",
    "a dict with itself as a key": b"}q\x00h\x00Ns.",
    "items set one by one": b"ccollections\nOrderedDict\n)R" + b"K\x01Ns" * 400_000 + b".",
    "items appended one by one": b"ccollections\nOrderedDict\n)R" + b"Na" * 400_000 + b".",
    "nothing": b"",
    "only stop": b".",
    "pop of nothing": b"0.",
    "append to nothing": b"a.",
    "appends to a number": b"K\x01(K\x02e.",
    "items for a list": b"](K\x01K\x02u.",
    "an odd number of items": b"}(K\x01u.",
    "build on nothing": b"Nb.",
    "get of what was never put": b"h\x05.",
    "protocol 9": b"\x80\x09N.",
    "text that is no utf-8": b"\x8c\x02\xff\xff.",
    "trailing garbage": b"N.garbage",
}


@pytest.mark.parametrize("name", nightly_but([*BOMBS][::6], BOMBS))
def test_a_bomb_is_a_value_or_an_error(name: str) -> None:
    """In 512 MiB and 20 seconds of processor time, far from what any of them would take."""
    child = subprocess.run(
        [sys.executable, "-c", DEFUSE],
        input=BOMBS[name],
        capture_output=True,
        check=False,
        preexec_fn=limit_resources,
    )
    assert child.returncode == 0, child.stderr.decode()[-2000:]


DEFUSE = """
import sys
from ckptkit.errors import CkptError
from ckptkit.formats.pickles.inert_pickle import load
class Everything:
    def __contains__(self, name): return True
data = sys.stdin.buffer.read()
for names in ((), Everything()):
    for is_flat in (False, True):
        try:
            load(data, names, as_flat_instances=is_flat)
        except CkptError as error:
            str(error), error.to_json()
"""


def limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))


@pytest.fixture(scope="module")
def metadata(produce: Produce) -> bytes:
    return (produce(producers.fsdp2).root / ".metadata").read_bytes()


def test_a_pickle_cut_at_any_byte_is_corrupt(metadata: bytes) -> None:
    for end in [*range(0, len(metadata), 7), *range(len(metadata) - 40, len(metadata))]:
        with pytest.raises(CkptError):
            load(metadata[:end], EVERYTHING)


def test_bytes_in_memory_past_the_end_are_not_read() -> None:
    data = b"\x8c\x05abc"
    with pytest.raises(Corrupt):
        load(data, ())


@settings(max_examples=300)
@given(data=st.data())
def test_flipped_bytes_give_a_value_or_an_error(metadata: bytes, data: st.DataObject) -> None:
    damaged = bytearray(metadata)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    value_or_error(bytes(damaged))


@settings(max_examples=500)
@given(st.lists(st.sampled_from([bytes([op]) for op in range(256)]) | st.binary(max_size=3), max_size=30).map(b"".join))
def test_random_opcodes_give_a_value_or_an_error(data: bytes) -> None:
    value_or_error(data + b".")


def value_or_error(data: bytes, names: Container[tuple[str, str]] = EVERYTHING) -> None:
    for is_flat in (False, True):
        with suppress(CkptError):
            load(data, names, as_flat_instances=is_flat)


def test_a_flat_state_says_the_same(metadata: bytes) -> None:
    (deep, end), (flat, same_end) = (load(metadata, EVERYTHING, as_flat_instances=is_flat) for is_flat in (False, True))
    assert end == same_end == len(metadata)
    assert plain_of(flat) == plain_of(deep)
    assert len([part for part in walk_members(flat) if isinstance(part, FlatInstance)]) > 10


class Point:
    """An object with a state of three attributes, in whatever order."""

    def __init__(self, **attributes: int) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_attributes_of_a_flat_object_are_found_in_any_order(protocol: int) -> None:
    points = [Point(x=1, y=2, z=3), Point(z=3, x=1, y=2), Point(x=1, y=2), Point(x=1), Point(z=3), Point()]
    found, _ = load(pickle.dumps(points, protocol), EVERYTHING, as_flat_instances=True)
    expected = [(1, 2, 3), (1, 2, 3), (1, 2, None), (1, None, None), (None, None, 3), (None, None, None)]
    for some, values in [(found, expected), *(([point], [one]) for point, one in zip(found, expected, strict=True))]:
        assert list(zip(*attribute_columns(some, ["x", "y", "z"]), strict=True)) == values
    assert [point.attributes() for point in found] == [vars(point) for point in points]


def test_a_flat_object_that_is_shared_is_one() -> None:
    point = Point(x=1, y=2)
    (one, other, by_key), _ = load(pickle.dumps([point, point, {point: 1}]), EVERYTHING, as_flat_instances=True)
    assert one is other
    assert list(by_key) == [one]


def plain_of(value: Any) -> Any:
    """The same with dicts in the place of objects, and tuples in that of sizes."""
    if isinstance(value, Record) and value.of == Global("torch", "Size"):
        return plain_of(value.args[0])
    if isinstance(value, FlatInstance):
        state = value[0] if len(value) == 1 else value.attributes()
        return (str(type(value)), plain_of(()), plain_of(state))
    if isinstance(value, Record):
        return (str(value.of), plain_of(value.args), plain_of({} if value.is_new and not value.state else value.state))
    if isinstance(value, dict):
        return [(plain_of(key), plain_of(child)) for key, child in value.items()]
    return [*map(plain_of, value)] if isinstance(value, (list, tuple)) else str(value)


def test_a_stream_of_pickles_is_read_one_after_another() -> None:
    stream = io.BytesIO()
    for value in (1, "two", [3]):
        pickle.dump(value, stream, 2)
    data, at, found = stream.getvalue(), 0, []
    while at < len(data):
        value, at = load(data, (), at=at)
        found.append(value)
    assert found == [1, "two", [3]]


def test_a_frame_longer_than_the_pickle_is_corrupt() -> None:
    data = pickle.dumps("a" * 100, 4)
    assert load(data, ())[0] == "a" * 100
    assert data[2:3] == b"\x95"
    with pytest.raises(Corrupt, match="damaged or truncated"):
        load(data[:3] + (1 << 62).to_bytes(8, "little") + data[11:], ())
