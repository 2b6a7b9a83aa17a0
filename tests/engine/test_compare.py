"""Layouts are held against each other to the last element, however they are cut: real files against numpy."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from math import isclose
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.engine.compare import compare_layouts, row_major_checksums
from ckptkit.engine.distance import Tolerance
from ckptkit.errors import Corrupt
from ckptkit.io.local_file import LocalFile
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES, DType
from tests.raw import Files, Numbers
from tests.strategies import shapes, tilings

DTYPES_OF_NUMPY = [DTYPES[name] for name in ("float32", "float16", "int64", "int8", "complex128")]
FLOAT = DTYPES["float32"]
SMALL = 96  # bytes of a block in these tests


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Let a block be a few elements."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine.blocks", "engine.visit"):
            patch.setattr(f"ckptkit.{module}.BLOCK_BYTES", SMALL)
        patch.setattr("ckptkit.engine.rearrange._SMALL_SPAN", SMALL // 2)
        yield


@st.composite
def stored(draw: st.DrawFn, files: Files, numbers: Numbers, dtype: DType) -> StoredTensor:
    """A tensor in chunks of any shape and order."""
    orders = st.none() | st.permutations(range(numbers.ndim))
    chunks = [files.put(numbers, box, dtype, order=draw(orders)) for box in draw(tilings(numbers.shape))]
    return StoredTensor(Spec(dtype, numbers.shape), tuple(chunks))


def numbers_of(shape: tuple[int, ...], dtype: DType) -> Numbers:
    found: Numbers = np.random.default_rng(0).integers(-99, 99, shape).astype(dtype.name)
    return found


@settings(deadline=None)
@given(st.data())
def test_what_differs_is_found_and_measured(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as home:
        a, b = Files(Path(home, "a")), Files(Path(home, "b"))
        ours: dict[str, StoredTensor] = {}
        theirs: dict[str, StoredTensor] = {}
        truth: dict[str, tuple[Numbers, Numbers]] = {}
        for name in "xyz":
            one, two = data.draw(st.sampled_from(DTYPES_OF_NUMPY)), data.draw(st.sampled_from(DTYPES_OF_NUMPY))
            before = numbers_of(data.draw(shapes), one)
            after = before.real.astype(two.name) if one != two else before.copy()
            changes = data.draw(st.lists(st.integers(0, max(0, after.size - 1)), max_size=3)) if after.size else []
            after.reshape(-1)[changes] += 1
            ours[name], theirs[name] = data.draw(stored(a, before, one)), data.draw(stored(b, after, two))
            truth[name] = before, after
        told: list[int] = []
        jobs, everything = data.draw(st.integers(1, 3)), data.draw(st.booleans())
        layouts = a.layout(**ours), b.layout(**theirs)
        found = compare_layouts(*layouts, measure_all=everything, jobs=jobs, progress=told.append)
    assert sum(told) == sum(layout.nbytes for layout in layouts)
    assert found.checked_bytes >= sum(told)  # chunks that share their bytes count for each
    for name, (before, after) in truth.items():
        is_different = before != after
        assert (name in found.differing_names) == is_different.any()
        if name in found.distances:
            distance = found.distances[name]
            assert distance.different == is_different.sum()
            assert distance.max_abs == np.abs(after.astype(complex) - before).max(initial=0)
            assert isclose(distance.gap, np.square(np.abs(after.astype(complex) - before)).sum())
            if distance.different or everything:
                assert isclose(distance.size_a, np.square(np.abs(before.astype(complex))).sum())
                assert distance.elements <= before.size
            first = np.argwhere(is_different)
            assert distance.first == (tuple(first[0].tolist()) if len(first) else None)
        else:
            assert before.size == 0 or not everything


def pair(home: Path, before: Numbers, after: Numbers) -> tuple[Layout, Layout]:
    """Two layouts with one tensor each, `t`, in one piece."""
    layouts = []
    for name, numbers in (("a", before), ("b", after)):
        files = Files(home / name)
        chunk = files.put(numbers, full_box(numbers.shape), FLOAT)
        layouts.append(files.layout(t=StoredTensor(Spec(FLOAT, numbers.shape), (chunk,))))
    return layouts[0], layouts[1]


def test_a_tolerance(tmp_path: Path) -> None:
    numbers = np.arange(200, dtype=np.float32)
    layouts = pair(tmp_path, numbers, numbers + np.float32(0.5))
    assert compare_layouts(*layouts).distances["t"].different == 200
    assert compare_layouts(*layouts, tolerance=Tolerance(atol=0.5)).differing_names == []
    assert compare_layouts(*layouts, tolerance=Tolerance(rtol=0.01)).distances["t"].different == 50


def test_where_only_a_part_differs_the_whole_counts(tmp_path: Path) -> None:
    numbers = np.arange(1, 201, dtype=np.float32)
    after = numbers.copy()
    after[150] = 0
    distance = compare_layouts(*pair(tmp_path, numbers, after)).distances["t"]
    assert distance.elements < 200
    assert distance.rel_l2 == pytest.approx(151 / np.linalg.norm(numbers.astype(float)))


@pytest.mark.parametrize("side", ["a", "b"])
def test_damage_is_no_difference(tmp_path: Path, side: str) -> None:
    numbers = np.arange(200, dtype=np.float32)
    layouts = pair(tmp_path, numbers, numbers)
    file = tmp_path / side / "f"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(Corrupt) as raised:
        compare_layouts(*layouts, jobs=2)
    assert (raised.value.tensor, raised.value.path) == ("t", file)


@pytest.mark.parametrize("side", ["a", "b"])
def test_bytes_that_are_missing_name_the_tensor(tmp_path: Path, side: str) -> None:
    numbers = np.arange(200, dtype=np.float32)
    layouts = pair(tmp_path, numbers, numbers)
    file = tmp_path / side / "f"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Corrupt) as raised:
        compare_layouts(*layouts, jobs=2)
    assert raised.value.tensor == "t"


def test_equal_layouts_need_no_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.arange(200, dtype=np.float32)
    layouts = pair(tmp_path, numbers, numbers)
    monkeypatch.setattr("ckptkit.engine.measure_distance.measure_distance", None)
    assert compare_layouts(*layouts).distances == {}


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.arange(200, dtype=np.float32)
    layouts = pair(tmp_path, numbers, numbers)
    nbytes: list[int] = []

    read_into = LocalFile.read_into

    def count_and_read(file: LocalFile, buffer: memoryview, offset: int) -> None:
        nbytes.append(len(buffer))
        read_into(file, buffer, offset)

    monkeypatch.setattr(LocalFile, "read_into", count_and_read)
    compare_layouts(*layouts)
    assert sum(nbytes) == 2 * numbers.nbytes


def test_the_same_bits_are_not_the_same_number(tmp_path: Path) -> None:
    numbers = np.arange(200, dtype=np.float32)
    a, b = pair(tmp_path, numbers, numbers)
    integers = b.tensors["t"].chunks[0]._replace(dtype=DTYPES["int32"])
    b = replace(b, tensors={"t": StoredTensor(Spec(DTYPES["int32"], (200,)), (integers,))})
    assert compare_layouts(a, b).distances["t"].different == 199


@settings(deadline=None)
@given(st.data())
def test_fingerprints_are_of_the_elements_in_order(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as home:
        files = Files(Path(home, "a"))
        truth = {name: numbers_of(data.draw(shapes), FLOAT) for name in "xy"}
        layout = files.layout(**{name: data.draw(stored(files, numbers, FLOAT)) for name, numbers in truth.items()})
        found = row_major_checksums(layout, jobs=data.draw(st.integers(1, 3)))
    assert found == {name: zlib.crc32(numbers.tobytes()) for name, numbers in truth.items()}


def test_a_layout_that_is_converted_when_read(tmp_path: Path) -> None:
    numbers = np.array([1, 1 + 2**-12, 3], np.float32)
    a, b = pair(tmp_path, numbers, numbers.astype(np.float16).astype(np.float32))
    half = Spec(DTYPES["float16"], (3,))
    narrow = (replace(layout, tensors={"t": replace(layout.tensors["t"], spec=half)}) for layout in (a, b))
    assert compare_layouts(a, b).differing_names == ["t"]
    assert compare_layouts(*narrow).differing_names == []
