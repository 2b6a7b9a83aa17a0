"""The cases of I/O, crashes and neighbors: 10 and 39 to 56. Which writings they come to, and at how many points.

`ckptkit consolidate` is tried at every call, the others at some of each kind: they write by the same code.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.faults import limits, neighbors, points, ranks
from tests.faults.cases import Case, Seen
from tests.faults.outages import try_outages
from tests.faults.points import Trouble, try_doubles, try_points
from tests.faults.scenes import NEW, Scene
from tests.faults.stage import home, scenes
from tests.faults.writings import COMMANDS, OWN_FORMATS, PEERS, SAVES, Writing

Try = Callable[[Scene, int | None], Iterator[Seen]]

_OURS = (*COMMANDS, *OWN_FORMATS, *SAVES)
_FIRST = COMMANDS[:1]
_SOME = 15  # points of a kind of trouble, where not every one is tried
_FEW = 2  # in the fast share: the first and the last


def over(writings: Sequence[Writing], attempt: Try, _: Path, whole: bool) -> Iterator[Seen]:
    """Try something with each writing, fresh and over an old output; in the fast share, with two over an old one."""
    chosen = writings if whole else [w for w in writings if w in (*_FIRST, SAVES[0]) or not w.is_ours][:2]
    for scene in scenes(chosen, (False, True) if whole else (True,)):
        most = (None if scene.writing in _FIRST else _SOME) if whole else _FEW
        yield from attempt(scene, most)


def all_of(troubles: Sequence[Trouble], scene: Scene, most: int | None) -> Iterator[Seen]:
    """Try each of the troubles."""
    for trouble in troubles:
        yield from try_points(scene, trouble, most)


def at_most(number: int, attempt: Try, scene: Scene, most: int | None) -> Iterator[Seen]:
    """Try fewer points, where each is dear."""
    return attempt(scene, number if most is None else min(most, number))


def race(scene: Scene, most: int | None) -> Iterator[Seen]:
    """Let two runs race."""
    return neighbors.try_races(scene, 25 if most is None else most)


def apart(scene: Scene, most: int | None) -> Iterator[Seen]:
    """Mix up the source and the output."""
    return neighbors.try_own_source(scene)


def kill_ranks(root: Path, whole: bool) -> Iterator[Seen]:
    """Kill ranks."""
    return ranks.try_killing(root, 6 if whole else 0)


def stop(root: Path, whole: bool) -> Iterator[Seen]:
    """Stop a command, by signals and by closing what it writes to."""
    source = home() / "sources" / str(NEW) / "dcp"
    yield from ranks.try_pipes(root, source)
    yield from ranks.try_stops(root, source, 20 if whole else 1)
    yield from over(COMMANDS, partial(all_of, points.STOPPED), root, whole)


def _case(numbers: str, group: str, name: str, writings: Sequence[Writing], attempt: Try) -> Case:
    return Case(numbers, group, name, partial(over, writings, attempt))


_file_sizes = partial(limits.try_limit, limit=resource.RLIMIT_FSIZE, values=limits.FILE_SIZES)
_open_files = partial(limits.try_limit, limit=resource.RLIMIT_NOFILE, values=limits.OPEN_FILES)
# torch's own writing, in which Python's files are closed, gives up where a signal interrupts that
_OUR_CALLS = (*COMMANDS, SAVES[1], SAVES[3])

CASES = (
    _case("10", "data", "a file is cut while it is read", COMMANDS, neighbors.try_cut),
    _case("39", "io", "no space, at each call", _OURS, partial(all_of, points.NOT_ENOUGH)),
    _case("39", "io", "no space, at each call", PEERS, partial(all_of, points.NOT_ENOUGH[:1])),
    _case("40", "io", "an I/O error, at each call", _OURS, partial(all_of, points.BROKEN[:1])),
    _case("40", "io", "I/O errors from a call on", _OURS, partial(at_most, 60, partial(all_of, points.BROKEN[1:]))),
    _case("41", "io", "interrupted calls", _OUR_CALLS, partial(all_of, points.INTERRUPTED)),
    _case("42", "io", "short reads and writes", _OURS, partial(all_of, points.SHORT)),
    _case("43", "io", "no quota", _OURS, partial(at_most, _SOME, partial(all_of, points.QUOTA))),
    _case("43", "io", "limits on file sizes", _OURS, lambda scene, most: _file_sizes(scene, most=most)),
    _case("43", "io", "limits on open files", _OURS, lambda scene, most: _open_files(scene, most=most)),
    _case("45", "io", "limits on memory", COMMANDS, limits.try_memory),
    _case("46", "io", "read-only, stale", _OURS, partial(at_most, 40, partial(all_of, points.GONE))),
    _case("46", "io", "calls that a file system lacks", _OURS, partial(at_most, 1, partial(all_of, points.LACKING))),
    _case("47-48", "crash", "kill -9 before and within each call", _OURS, partial(all_of, points.KILLED)),
    _case("47-48", "crash", "kill -9 before and within each call", PEERS, partial(all_of, points.KILLED)),
    Case("49, 53", "crash", "kill -9 of ranks at random times", kill_ranks),
    _case("50", "crash", "power loss after each change", (*_OURS, *PEERS), partial(at_most, 60, try_outages)),
    _case("51", "crash", "a crash after a crash", (*COMMANDS, SAVES[0]), partial(at_most, 8, try_doubles)),
    Case("52", "crash", "SIGINT, SIGTERM, SIGPIPE", stop),
    _case("54", "conc", "two runs to one output", _FIRST, race),
    _case("55", "conc", "the source is replaced while it is read", COMMANDS, partial(at_most, 60, neighbors.try_swap)),
    _case("56", "conc", "the output is the source, or in it", _FIRST, apart),
)
