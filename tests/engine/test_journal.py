"""Journals as a worker leaves them, whole or cut short at any byte, and what another makes of them."""

from __future__ import annotations

from pathlib import Path

from ckptkit.engine.ledger import Journal, Ledger


def a_ledger(number: int) -> Ledger:
    ledger = Ledger()
    ledger.read.add((0, f"src{number}", 8), 0, 4, 0x1234)
    ledger.written.add(("dst", 64), 4 * number, 4, 0xFFFFFFFF)
    return ledger


def entries(journal: Journal) -> dict[int, object]:
    return {unit: ledger.to_json() for unit, ledger in journal.units.items()}


def test_what_is_noted_is_there_for_the_next(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "work" / "j")
    for unit in (3, 4):
        journal.record_unit(unit, a_ledger(unit))
    again = Journal(journal.path)
    assert entries(again) == {3: a_ledger(3).to_json(), 4: a_ledger(4).to_json()}
    assert not again.has_ended
    journal.record_end(sync=True)
    assert Journal(journal.path).has_ended
    assert entries(Journal(journal.path)) == entries(again)


def test_cut_at_any_byte_it_has_the_whole_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    for unit in (0, 1):
        journal.record_unit(unit, a_ledger(unit))
    journal.record_end(sync=False)
    whole = journal.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for length in range(len(whole)):
        journal.path.write_bytes(whole[:length])
        cut = Journal(journal.path)
        complete = sum(length >= len(b"".join(lines[: i + 1])) for i in range(2))
        assert list(cut.units)[:complete] == list(range(complete))
        assert not cut.has_ended
        cut.record_unit(7, a_ledger(7))
        again = Journal(journal.path)
        assert entries(again) == {**{i: a_ledger(i).to_json() for i in range(complete)}, 7: a_ledger(7).to_json()}


def test_garbage_is_no_journal(tmp_path: Path) -> None:
    for text in (b"\xff\n", b"[]\n", b'{"unit": "x"}\n', b'{"unit": 1, "read": [["f"]], "written": []}\n', b"3\n"):
        (tmp_path / "j").write_bytes(text)
        assert Journal(tmp_path / "j").units == {}
