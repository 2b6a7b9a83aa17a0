"""Means of real files, however each source is cut, against numpy's sums."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.engine.check_sources import Sources
from ckptkit.engine.copy import copy_by_plan, verify_copy
from ckptkit.engine.ledger import Journal, Ledger
from ckptkit.engine.recipes import Mean
from ckptkit.engine.shares import Share
from ckptkit.errors import Corrupt, Unsupported
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import make_plan
from tests.execute import execute
from tests.raw import Files, Numbers, allocated, contents
from tests.strategies import shapes, solid_shapes, tilings

FLOAT32, FLOAT64 = DTYPES["float32"], DTYPES["float64"]
INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
QUIET = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}
EDGES = [0.0, -0.0, 1.0, 0.1, -3.4e38, 3.4e38, 1e-45, np.nan, np.inf]


def means(specs: Mapping[str, Spec], weights: Sequence[float]) -> dict[str, Mean]:
    """The recipe of each tensor that is the mean of those of its name."""
    return {name: Mean(name, spec.dtype, weights) for name, spec in specs.items()}


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Let a block be a few elements."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("blocks", "visit"):
            patch.setattr(f"ckptkit.engine.{module}.BLOCK_BYTES", 96)
        patch.setattr("ckptkit.engine.rearrange._SMALL_SPAN", 48)
        yield


def source(root: Path, numbers: Numbers, dtype: DType, data: st.DataObject | None = None) -> Layout:
    """A tensor `t` in chunks of any shape and order, if there is something to choose by."""
    files = Files(root)
    boxes = data.draw(tilings(numbers.shape)) if data else [full_box(numbers.shape)]
    chunks = []
    for box in boxes:
        order = data.draw(st.none() | st.permutations(range(numbers.ndim))) if data else None
        chunks.append(files.put(numbers, box, dtype, order=order))
    return files.layout(t=StoredTensor(Spec(dtype, numbers.shape), tuple(chunks)))


def averaged(home: Path, sources: list[Layout], weights: list[float], dst: Layout, jobs: int = 1) -> bytes:
    """What the sources are averaged to, when all checksums have been compared."""
    plan = make_plan(sources[0], dst, sources[1:], means(dst.specs, weights))
    told: list[int] = []
    done = execute(plan, jobs=jobs, progress=told.append)
    assert done.checked_bytes == sum(chunk.length for src in sources for chunk in src.tensors["t"].chunks)
    assert sum(told) == dst.nbytes
    assert home.is_dir()
    return contents(dst)


@given(st.data())
def test_the_mean_is_that_of_numpy(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        shape = data.draw(shapes)
        weights = data.draw(st.lists(st.sampled_from([0.5, 0.25, 1 / 3, 0.1]), min_size=2, max_size=4))
        random = np.random.default_rng(0)
        numbers = [random.choice(np.array([*EDGES, *random.normal(size=9)], np.float32), shape) for _ in weights]
        sources = [source(home / f"src{i}", each, FLOAT32, data) for i, each in enumerate(numbers)]
        dst = allocated(home / "dst", Spec(FLOAT32, shape), data.draw(tilings(shape)))
        found = averaged(home, sources, weights, dst, data.draw(st.integers(1, 3)))
        same = np.all([each.view(np.uint32) == numbers[0].view(np.uint32) for each in numbers], axis=0)
        with np.errstate(invalid="ignore", over="ignore"):
            total = np.zeros(shape) - 0.0
            for weight, each in zip(weights, numbers, strict=True):
                total = total + weight * each.astype(np.float64)
            expected = np.where(same, numbers[0], total.astype(np.float32))
        np.testing.assert_array_equal(np.frombuffer(found, np.float32).reshape(shape), expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "bool", "float8_e4m3fn"])
@given(st.data())
def test_the_mean_of_the_same_is_the_same(dtype: str, data: st.DataObject) -> None:
    """To the last bit, whatever the bits are, but for the many kinds of NaN."""
    kind = DTYPES[dtype]
    with tempfile.TemporaryDirectory() as directory:
        home, shape = Path(directory), data.draw(solid_shapes)
        raw = np.random.default_rng(data.draw(st.integers(0, 99))).bytes(int(np.prod(shape)) * kind.itemsize)
        numbers = np.frombuffer(raw, f"u{kind.itemsize}").reshape(shape)
        if dtype in INFINITY:
            magnitude = numbers & ((1 << (8 * kind.itemsize - 1)) - 1)
            numbers = np.where(magnitude > INFINITY[dtype], QUIET[dtype], numbers).astype(numbers.dtype)
        sources = [source(home / f"src{i}", numbers, kind, data) for i in range(3)]
        dst = allocated(home / "dst", Spec(kind, shape), data.draw(tilings(shape)))
        assert averaged(home, sources, [1 / 3] * 3, dst) == numbers.tobytes()


def test_what_is_read_in_a_row_need_not_be_read_again(tmp_path: Path) -> None:
    sources = [source(tmp_path / f"src{i}", np.arange(90, dtype=np.float32), FLOAT32) for i in range(2)]
    dst = allocated(tmp_path / "dst", Spec(FLOAT32, (90,)), [full_box((90,))])
    plan = make_plan(sources[0], dst, sources[1:], means(dst.specs, [0.5, 0.5]))
    assert Sources(plan, copy_by_plan(plan)).plan_unread_ranges().targets == ()


def test_integers_are_those_of_the_last(tmp_path: Path) -> None:
    kind = DTYPES["int32"]
    sources = [source(tmp_path / f"src{i}", np.arange(40, dtype=np.int32) + i // 2, kind) for i in range(3)]
    dst = allocated(tmp_path / "dst", Spec(kind, (40,)), [full_box((40,))])
    ledger = copy_by_plan(make_plan(sources[0], dst, sources[1:], means(dst.specs, [1 / 3] * 3)))
    assert ledger.noted == {"t"}
    assert contents(dst) == (np.arange(40, dtype=np.int32) + 1).tobytes()


def test_small_floats_that_differ_have_no_mean(tmp_path: Path) -> None:
    kind = DTYPES["float8_e5m2"]
    sources = [source(tmp_path / f"src{i}", np.full(40, i, np.uint8), kind) for i in range(2)]
    dst = allocated(tmp_path / "dst", Spec(kind, (40,)), [full_box((40,))])
    with pytest.raises(Unsupported) as raised:
        execute(make_plan(sources[0], dst, sources[1:], means(dst.specs, [0.5, 0.5])))
    assert raised.value.tensor == "t"


def test_shares_of_a_mean_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Done in any order, by processes that only leave their journals."""
    monkeypatch.setattr("ckptkit.engine.blocks.BLOCK_BYTES", 96)
    numbers = np.arange(300, dtype=np.int32)
    sources = [source(tmp_path / f"src{i}", numbers + i, DTYPES["int32"]) for i in range(2)]
    dst = allocated(tmp_path / "dst", Spec(DTYPES["int32"], (300,)), [full_box((300,))])
    plan = make_plan(sources[0], dst, sources[1:], means(dst.specs, [0.5, 0.5]))
    for number in (2, 0, 1):
        copy_by_plan(plan, Share(number, 3), Journal(tmp_path / f"{number}.jsonl"))
    ledger = Ledger()
    for number in range(3):
        for unit in Journal(tmp_path / f"{number}.jsonl").units.values():
            ledger.add_ledger(unit)
    assert verify_copy(plan, ledger).checked_bytes == 2 * dst.nbytes
    assert ledger.noted == {"t"}
    assert contents(dst) == (numbers + 1).tobytes()


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_damage_to_any_source_is_found(tmp_path: Path, damaged: int) -> None:
    sources = [source(tmp_path / f"src{i}", np.arange(90, dtype=np.float32), FLOAT32) for i in range(3)]
    dst = allocated(tmp_path / "dst", Spec(FLOAT32, (90,)), [full_box((90,))])
    file = tmp_path / f"src{damaged}" / "f"
    raw = bytearray(file.read_bytes())
    raw[50] ^= 1
    file.write_bytes(raw)
    with pytest.raises(Corrupt) as raised:
        averaged(tmp_path, sources, [0.5, 0.25, 0.25], dst)
    assert raised.value.path == file


def test_what_does_not_fit_the_dtype_names_the_tensor(tmp_path: Path) -> None:
    sources = [source(tmp_path / f"src{i}", np.full(3, 1e30 * (i + 1), np.float64), FLOAT64) for i in range(2)]
    dst = allocated(tmp_path / "dst", Spec(DTYPES["float16"], (3,)), [full_box((3,))])
    with pytest.raises(Unsupported) as raised:
        one, other = (src_as(src, "float16") for src in sources)
        execute(make_plan(one, dst, [other], means(dst.specs, [0.5, 0.5])))
    assert raised.value.tensor == "t"


def src_as(layout: Layout, dtype: str) -> Layout:
    """A source whose numbers are to be converted."""
    tensor = layout.tensors["t"]
    return Layout(layout.root, "raw", {"t": StoredTensor(Spec(DTYPES[dtype], tensor.spec.shape), tensor.chunks)})
