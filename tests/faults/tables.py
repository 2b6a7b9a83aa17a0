"""Count what was seen by group or case and by whose program it was, as rows of tables. Runs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.faults.cases import Case, Seen
from tests.faults.verdicts import GOOD, Verdict

FAMILIES = ("ckptkit", "torch", "accelerate")
UNTOLD = "without a manifest"  # the group of what nothing in a checkpoint shows: not counted as anybody's fault
COLUMNS = [verdict for verdict in Verdict if verdict is not Verdict.UNFIRED]


class Tally:
    """The runs of each family's programs, in each row by what they came to; and those of ours that came to no good."""

    def __init__(self, rows: Sequence[str]) -> None:
        self.counts: dict[str, dict[str, Counter[Verdict]]] = {
            row: {family: Counter() for family in FAMILIES} for row in rows
        }
        self.untold: set[str] = set()
        self.bad: list[tuple[Case, Seen]] = []

    @property
    def runs(self) -> int:
        """Return how many there were."""
        return sum(sum(counted(found)) for families in self.counts.values() for found in families.values())

    def has(self, family: str) -> bool:
        """Return True if any program of this family was tried."""
        return any(sum(counted(families[family])) for families in self.counts.values())

    def add(self, row: str, case: Case, seen: Seen) -> None:
        """Count a run."""
        family = seen.subject.partition(" ")[0]
        self.counts[row][family][seen.verdict] += 1
        if case.group == UNTOLD:
            self.untold.add(row)
        elif family == FAMILIES[0] and seen.verdict not in GOOD:
            self.bad.append((case, seen))


def rows_of(family: str, tally: Tally) -> list[list[str]]:
    """Return the table of one family's programs: head, the rows that it was tried in, the sum of what can be told."""
    rows = {row: found[family] for row, found in tally.counts.items() if sum(counted(found[family]))}
    told = {row: found for row, found in rows.items() if row not in tally.untold}
    untold = {row: found for row, found in rows.items() if row in tally.untold}
    return [
        [family, "runs", *COLUMNS],
        *([row, *cells(found)] for row, found in told.items()),
        ["**all**", *cells(sum(told.values(), Counter()))],
        *([f"*{row}*", *cells(found)] for row, found in untold.items()),
    ]


def counted(found: Counter[Verdict]) -> list[int]:
    """Return how often each verdict was given; a fault that never happened is no run."""
    return [found[column] for column in COLUMNS]


def cells(found: Counter[Verdict]) -> list[str]:
    """Return the numbers of a row."""
    return [f"{number:,}" for number in (sum(counted(found)), *counted(found))]
