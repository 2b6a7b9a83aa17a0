"""Plans executed on real files against a model that holds every tensor in memory."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.engine.blocks import Block
from ckptkit.engine.copy import Copied, copy_by_plan, verify_copy
from ckptkit.engine.ledger import Journal, Ledger
from ckptkit.engine.shares import Share, narrow_to_share
from ckptkit.engine.visit import Worker
from ckptkit.errors import Corrupt, Unsafe
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import Box, Shape, full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import Plan, make_plan, restrict_to_needed
from tests.execute import execute
from tests.raw import Files, Numbers, allocated, contents
from tests.strategies import shapes, solid_shapes, tilings

FLOAT = DTYPES["float32"]
SMALL = 96  # bytes of a block in these tests, so that small tensors are cut as large ones are


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> object:
    """Let a block be a few elements."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("blocks", "shares", "visit"):
            patch.setattr(f"ckptkit.engine.{module}.BLOCK_BYTES", SMALL)
        patch.setattr("ckptkit.engine.rearrange._SMALL_SPAN", SMALL // 2)
        yield


def random_numbers(shape: Shape, itemsize: int) -> Numbers:
    raw = np.random.default_rng(0).integers(0, 256, (*shape, itemsize), np.uint8)
    return raw.view(f"V{itemsize}").reshape(shape)


@given(st.data())
def test_any_chunks_become_any_chunks(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    dtype = data.draw(
        st.sampled_from([DTYPES[name] for name in ("uint8", "bfloat16", "float32", "int64", "complex128")])
    )
    numbers = random_numbers(shape, dtype.itemsize)
    with tempfile.TemporaryDirectory() as home:
        source = Files(Path(home, "src"))
        chunks = [
            source.put(
                numbers,
                box,
                dtype,
                order=data.draw(st.none() | st.permutations(range(len(shape)))),
                file=data.draw(st.sampled_from("ab")),
            )
            for box in data.draw(tilings(shape))
        ]
        if data.draw(st.booleans()):
            chunks = [chunk._replace(crc32=None) for chunk in chunks]
        src = source.layout(t=StoredTensor(Spec(dtype, shape), tuple(chunks)))
        dst = allocated(Path(home, "dst"), Spec(dtype, shape), data.draw(tilings(shape)))

        told: list[int] = []
        copied = execute(make_plan(src, dst), jobs=data.draw(st.integers(1, 3)), progress=told.append)

        assert contents(dst) == numbers.tobytes()
        assert sum(told) == src.nbytes
        check_checksums(copied, dst)
        checked = src.nbytes if chunks[0].crc32 is not None else 0
        assert (copied.checked_bytes, copied.unchecked_bytes) == (checked, src.nbytes - checked)


@given(st.data())
def test_shares_done_by_anyone_in_any_order_are_the_whole(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes)
    numbers = random_numbers(shape, 4)
    with tempfile.TemporaryDirectory() as home:
        source = Files(Path(home, "src"))
        orders = st.none() | st.permutations(range(len(shape)))
        chunks = [source.put(numbers, box, FLOAT, order=data.draw(orders)) for box in data.draw(tilings(shape))]
        src = source.layout(t=StoredTensor(Spec(FLOAT, shape), tuple(chunks)))
        dst = allocated(Path(home, "dst"), Spec(FLOAT, shape), data.draw(tilings(shape)))
        plan = make_plan(src, dst)
        count = data.draw(st.integers(1, 5))
        ledger = Ledger()
        told: list[int] = []
        is_narrow = data.draw(st.booleans())
        for number in data.draw(st.permutations(range(count))):
            share = Share(number, count)
            part = narrowed(plan, share) if is_narrow else plan
            ledger.add_ledger(copy_by_plan(part, share, jobs=2, progress=told.append))
        copied = verify_copy(plan, Ledger.from_json(json.loads(json.dumps(ledger.to_json()))))
        assert contents(dst) == numbers.tobytes()
        check_checksums(copied, dst)
        assert (sum(told), copied.checked_bytes) == (src.nbytes, src.nbytes)


def narrowed(plan: Plan, share: Share) -> Plan:
    """Return the part of a plan that has a share in it."""
    dst, before, behind = narrow_to_share(plan.dst, plan.src, share)
    return replace(make_plan(restrict_to_needed(plan.src, dst), dst), before=before, behind=behind)


def test_a_share_is_planned_with_little_more_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.engine.shares.UNIT_BYTES", SMALL)
    numbers = np.arange(100 * SMALL, dtype=np.float32)
    source = Files(tmp_path / "src")
    rows = [Box((start,), (SMALL,)) for start in range(0, len(numbers), SMALL)]
    spec = Spec(FLOAT, numbers.shape)
    src = source.layout(t=StoredTensor(spec, tuple(source.put(numbers, box, FLOAT) for box in rows)))
    plan = make_plan(src, allocated(tmp_path / "dst", spec, rows))
    sizes = [len(narrowed(plan, Share(number, 10)).targets) for number in range(10)]
    assert sum(sizes) <= 100 + 9
    assert max(sizes) <= 11


def a_long_plan(home: Path) -> Plan:
    """Twenty units, one byte after another."""
    numbers = np.arange(5 * SMALL, dtype=np.float32)
    source = Files(home / "src")
    spec = Spec(FLOAT, numbers.shape)
    src = source.layout(t=StoredTensor(spec, (source.put(numbers, full_box(spec.shape), FLOAT),)))
    return make_plan(src, allocated(home / "dst", spec, [full_box(spec.shape)]))


def test_a_share_that_is_missing_is_noticed(tmp_path: Path) -> None:
    plan = a_long_plan(tmp_path)
    ledger = copy_by_plan(plan, Share(0, 3))
    ledger.add_ledger(copy_by_plan(plan, Share(2, 3)))
    with pytest.raises(Corrupt, match="not all"):
        verify_copy(plan, ledger)


def test_what_a_journal_has_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.engine.shares.UNIT_BYTES", SMALL)
    plan = a_long_plan(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        copy_by_plan(plan, journal=Journal(tmp_path / "j"), jobs=1, progress=interrupt_after(7))
    assert len(Journal(tmp_path / "j").units) == 6
    written: list[int] = []

    def note(_worker: Worker, block: Block) -> int:
        written.append(block.start)
        return 0

    monkeypatch.setattr("ckptkit.engine.copy.try_copy_unchanged", note)
    copy_by_plan(plan, journal=Journal(tmp_path / "j"), jobs=1)
    assert written == list(range(6 * SMALL, 20 * SMALL, SMALL))


def test_files_in_turns_and_tied_tensors_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.engine.shares.UNIT_BYTES", SMALL)
    numbers = np.arange(10 * SMALL, dtype=np.float32)
    spec, source = Spec(FLOAT, numbers.shape), Files(tmp_path / "src")
    stored = StoredTensor(spec, (source.put(numbers, full_box(spec.shape), FLOAT),))
    rows = [Box((start,), (2 * SMALL - 7,)) for start in range(0, 8 * SMALL, 2 * SMALL - 7)]
    rows.append(Box((rows[-1].stop[0],), (10 * SMALL - rows[-1].stop[0],)))
    one = allocated(tmp_path / "dst", spec, rows)
    dst = replace(one, tensors={"t": one.tensors["t"], "tied": one.tensors["t"]})
    plan = make_plan(source.layout(t=stored, tied=stored), dst)
    with pytest.raises(KeyboardInterrupt):
        copy_by_plan(plan, journal=Journal(tmp_path / "j"), jobs=2, progress=interrupt_after(40))
    finished = len(Journal(tmp_path / "j").units)
    assert 0 < finished < 80
    ledger = copy_by_plan(plan, journal=Journal(tmp_path / "j"), jobs=2)
    verify_copy(plan, ledger)
    assert contents(one) == numbers.tobytes()
    assert len(Journal(tmp_path / "j").units) == 80  # both tensors' bytes, in units of SMALL
    assert ledger.resumed_bytes > 0


def test_a_tied_tensor_in_the_unit_in_which_the_first_ends(tmp_path: Path) -> None:
    row = SMALL // 4
    numbers = np.arange(10 * row, dtype=np.float32)
    spec, tied, source = Spec(FLOAT, (10 * row,)), Spec(FLOAT, (2 * row,)), Files(tmp_path / "src")
    src = source.layout(
        t=StoredTensor(spec, (source.put(numbers, full_box(spec.shape), FLOAT),)),
        tied=StoredTensor(tied, (source.put(numbers[8 * row :], full_box(tied.shape), FLOAT),)),
    )
    rows = [Box((start * row,), (n * row,)) for start, n in ((0, 5), (5, 3), (8, 2))]
    one = allocated(tmp_path / "dst", spec, rows)
    same = one.tensors["t"].chunks[2]._replace(box=full_box(tied.shape))
    execute(make_plan(src, replace(one, tensors={**one.tensors, "tied": StoredTensor(tied, (same,))})))
    assert contents(one) == numbers.tobytes()


def test_what_is_no_longer_there_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a power cut, which may lose what was written, though it was noted."""
    monkeypatch.setattr("ckptkit.engine.shares.UNIT_BYTES", SMALL)
    plan = a_long_plan(tmp_path)
    whole_file = plan.dst.root / "f0"
    with pytest.raises(KeyboardInterrupt):
        copy_by_plan(plan, journal=Journal(tmp_path / "j"), jobs=1, progress=interrupt_after(7))
    damaged = bytearray(whole_file.read_bytes())
    damaged[2 * SMALL + 5 : 2 * SMALL + 9] = bytes(4)
    whole_file.write_bytes(damaged)
    verify_copy(plan, copy_by_plan(plan, journal=Journal(tmp_path / "j"), jobs=2))
    assert contents(plan.dst) == contents(plan.src)


def interrupt_after(count: int) -> Callable[[int], None]:
    """A progress that is told of so many blocks."""
    told: list[int] = []

    def progress(nbytes: int) -> None:
        told.append(nbytes)
        if len(told) == count:
            raise KeyboardInterrupt

    return progress


def check_checksums(copied: Copied, dst: Layout) -> None:
    written = [chunk for tensor in dst.tensors.values() for chunk in tensor.chunks if chunk.length]
    for chunk in written:
        raw = (dst.root / chunk.path).read_bytes()[chunk.offset : chunk.offset + chunk.length]
        assert copied.checksums[chunk.path, chunk.offset] == zlib.crc32(raw)
    assert len(copied.checksums) == len(written)


@given(st.data())
def test_casts_happen_on_the_way(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    numbers = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    with tempfile.TemporaryDirectory() as home:
        source = Files(Path(home, "src"))
        order = data.draw(st.none() | st.permutations(range(len(shape))))
        chunks = [source.put(numbers, box, FLOAT, order=order) for box in data.draw(tilings(shape))]
        half = DTYPES["float16"]
        src = source.layout(t=StoredTensor(Spec(half, shape), tuple(chunks)))
        dst = allocated(Path(home, "dst"), Spec(half, shape), data.draw(tilings(shape)))
        copied = execute(make_plan(src, dst), jobs=2)
        assert contents(dst) == numbers.astype(np.float16).tobytes()
        check_checksums(copied, dst)
        assert copied.checked_bytes == numbers.nbytes


@pytest.mark.parametrize("order", [None, [1, 0]], ids=["row-major", "transposed"])
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_flipped_bit_anywhere_is_corrupt(tmp_path: Path, order: list[int] | None, jobs: int) -> None:
    numbers = np.arange(20 * 7, dtype=np.float32).reshape(20, 7)
    source = Files(tmp_path / "src")
    chunk = source.put(numbers, full_box((20, 7)), FLOAT, order=order)
    src = source.layout(t=StoredTensor(Spec(FLOAT, (20, 7)), (chunk,)))
    sound = (source.root / "f").read_bytes()
    for at in range(0, chunk.length, 37):
        damaged = bytearray(sound)
        damaged[chunk.offset + at] ^= 1 << (at % 8)
        (source.root / "f").write_bytes(damaged)
        dst = allocated(tmp_path / f"dst{at}", Spec(FLOAT, (20, 7)), [full_box((20, 7))])
        with pytest.raises(Corrupt) as raised:
            execute(make_plan(src, dst), jobs=jobs)
        assert raised.value.tensor == "t"
        assert raised.value.path == source.root / "f"
        assert str(chunk.offset) in raised.value.message


def test_damage_outside_what_is_copied_is_corrupt_too(tmp_path: Path) -> None:
    """A chunk that is copied in part is read whole, since its CRC-32 is of the whole."""
    numbers = np.arange(60, dtype=np.float32)
    source = Files(tmp_path / "src")
    chunk = source.put(numbers, full_box((60,)), FLOAT)
    damaged = bytearray((source.root / "f").read_bytes())
    damaged[-1] ^= 1
    (source.root / "f").write_bytes(damaged)
    src = source.layout(t=StoredTensor(Spec(FLOAT, (60,)), (chunk,)))
    dst = allocated(tmp_path / "dst", Spec(FLOAT, (60,)), [Box((0,), (10,))])
    with pytest.raises(Corrupt):
        execute(make_plan(src, dst))


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_two_names_for_the_same_bytes(tmp_path: Path, jobs: int) -> None:
    numbers = np.arange(400, dtype=np.float32)
    source = Files(tmp_path / "src")
    tied = StoredTensor(Spec(FLOAT, (400,)), (source.put(numbers, full_box((400,)), FLOAT),))
    src = source.layout(t=tied, u=tied)
    for attempt in range(20):
        root = tmp_path / f"dst{attempt}"
        files = Files(root)
        end = files.append("f", bytes(2 * numbers.nbytes))
        spec = Spec(FLOAT, (400,))
        one = Chunk(full_box((400,)), "f", 0, numbers.nbytes, FLOAT)
        other = one._replace(offset=end - numbers.nbytes)
        dst = files.layout(t=StoredTensor(spec, (one,)), u=StoredTensor(spec, (other,)))
        copied = execute(make_plan(src, dst), jobs=jobs)
        assert copied.checked_bytes == numbers.nbytes
        assert contents(dst, "t") == numbers.tobytes()
        assert contents(dst, "u") == numbers.tobytes()


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_short_or_missing_file_names_the_tensor(tmp_path: Path, jobs: int) -> None:
    numbers = np.arange(90, dtype=np.float32)
    source = Files(tmp_path / "src")
    chunk = source.put(numbers, full_box((90,)), FLOAT)
    src = source.layout(t=StoredTensor(Spec(FLOAT, (90,)), (chunk,)))
    plan = make_plan(src, allocated(tmp_path / "dst", Spec(FLOAT, (90,)), [full_box((90,))]))
    sound = (source.root / "f").read_bytes()
    (source.root / "f").write_bytes(sound[:-1])
    with pytest.raises(Corrupt) as raised:
        execute(plan, jobs=jobs)
    assert (raised.value.tensor, raised.value.path) == ("t", source.root / "f")
    (source.root / "f").unlink()
    with pytest.raises(Corrupt, match="missing"):
        execute(plan, jobs=jobs)
    (source.root / "f").symlink_to(source.root / "elsewhere")
    with pytest.raises(Unsafe):
        execute(plan, jobs=jobs)


def test_an_interrupt_of_the_progress_ends_the_work(tmp_path: Path) -> None:
    source = Files(tmp_path / "src")
    chunk = source.put(np.arange(900, dtype=np.float32), full_box((900,)), FLOAT)
    src = source.layout(t=StoredTensor(Spec(FLOAT, (900,)), (chunk,)))
    plan = make_plan(src, allocated(tmp_path / "dst", Spec(FLOAT, (900,)), [full_box((900,))]))

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(plan, jobs=2, progress=interrupt)
