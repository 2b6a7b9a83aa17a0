"""Stats: what the numbers of a checkpoint look like, tensor by tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from ckptkit.formats import locate, open_layout
from ckptkit.layout import Spec
from ckptkit.ops.progress import Progress, telling
from ckptkit.runs import find_checkpoint
from ckptkit.statistics import survey


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Of how many numbers of a tensor how many are NaN, infinite, zero and denormal; the lowest and the highest.

    A complex element is two numbers, and so is a byte that holds two of 4 bits. `low` and `high` are None where all are
    NaN, or there are none. Integers and booleans have zeros and extremes only.
    """

    name: str
    spec: Spec
    numbers: int
    nan: int
    inf: int
    zero: int
    denormal: int
    low: int | float | None
    high: int | float | None

    @property
    def is_all_zero(self) -> bool:
        """True if there are numbers, and all are zero."""
        return 0 < self.zero == self.numbers

    @property
    def is_constant(self) -> bool:
        """True if there are several numbers, and all are the same."""
        return self.numbers > 1 and not self.nan and self.low == self.high


def scan(path: str | Path, *, jobs: int | None = None, progress: Progress | None = None) -> tuple[TensorStats, ...]:
    """Look at every number of the checkpoint at `path`, or of the latest of the run at `path`, with `jobs` threads.

    Compares no checksums. Raises `Corrupt` where bytes are missing, naming the tensor.
    """
    layout = locate(open_layout(find_checkpoint(Path(path))))
    told = telling(progress, layout.nbytes)
    found = survey(layout, jobs=jobs, progress=told)
    return tuple(TensorStats(name, spec, **asdict(found[name])) for name, spec in layout.specs.items())
