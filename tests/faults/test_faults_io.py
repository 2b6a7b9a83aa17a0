"""The fast share of failing calls, crashes and power loss: what ckptkit makes of them is right, or a clean error."""

from __future__ import annotations

import errno
from pathlib import Path
from resource import RLIMIT_AS

import pytest

from tests.faults import deletions, demotions, in_place, io, readings
from tests.faults.cases import Case
from tests.faults.originals import original
from tests.faults.scenes import Scene, put
from tests.faults.server import Server
from tests.faults.shim import Fault
from tests.faults.stage import scenes
from tests.faults.verdicts import GOOD, Verdict
from tests.faults.writings import COMMANDS, PEERS
from tests.tiers import nightly_but

pytestmark = pytest.mark.filterwarnings("ignore")


CASES = (*io.CASES, *readings.CASES, *deletions.CASES, *demotions.CASES, *in_place.CASES)


def name_of(case: Case) -> str:
    return f"{case.numbers} {case.name}"


@pytest.mark.slow
@pytest.mark.parametrize("case", nightly_but(CASES[::6], CASES), ids=name_of)
def test_ckptkit_is_right_or_says_what_is_wrong(case: Case, tmp_path: Path) -> None:
    seen = [one for one in case.run(tmp_path, False) if one.subject.startswith("ckptkit")]
    assert [one for one in seen if one.verdict not in GOOD] == []


@pytest.fixture
def scene() -> Scene:
    return next(scenes(COMMANDS[:1], [True]))


@pytest.mark.slow
def test_every_kind_of_fault_fires(scene: Scene) -> None:
    everything = Fault(str(scene.root), forever=True)
    scene.lay()
    assert scene.run(everything).fired > 100
    scene.lay()
    ended = scene.run(Fault(str(scene.root), kind="error", number=errno.ENOSPC, calls=("write",)))
    assert (ended.code, ended.fired) == (4, 1)
    assert ended.where.startswith(f"write {scene.place}")
    scene.lay()
    ended = scene.run(Fault(str(scene.root), kind="signal", number=9, calls=("exchange",)))
    assert (ended.code, ended.fired, scene.stands()) == (-9, 1, "old")
    scene.lay()
    ended = scene.run(Fault(str(scene.root), kind="torn", number=9, calls=("exchange",)))
    assert (ended.code, ended.fired, scene.stands()) == (-9, 1, "new")


@pytest.mark.slow
def test_a_scene_tells_a_mixture_from_what_is_whole(scene: Scene) -> None:
    mixed = {**scene.new, "out/config.json": scene.old["out/config.json"]}
    for tree, expected in ((scene.old, "old"), (scene.new, "new"), (mixed, "neither")):
        put(tree, scene.place)
        assert scene.stands() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("call", "lost"), [("exchange", "swap"), ("syncdir", "sync"), ("lock", "lock")])
def test_a_promise_that_is_lost_is_named(scene: Scene, call: str, lost: str) -> None:
    scene.lay()
    ended = scene.run(Fault(str(scene.root), kind="error", number=errno.ENOTSUP, calls=(call,), forever=True))
    assert (ended.code, scene.stands()) == (0, "new")
    assert f"this file system cannot {lost}" in ended.err


@pytest.mark.nightly
def test_the_peers_lose_what_was_there() -> None:
    peer = next(scenes(PEERS[:1], [True]))
    peer.lay()
    ended = peer.run(Fault(str(peer.place), kind="error", number=errno.ENOSPC, calls=("write",)))
    assert ended.fired == 1
    assert peer.judge(ended)[0] is Verdict.LOST


@pytest.mark.nightly
def test_libraries_that_do_not_fit_are_want_of_memory() -> None:
    root = original("dcp").root
    said = set()
    with Server("ckptkit.cli.commands", "ckptkit.cli.stats", "tests.faults.limits") as server:
        taken = int(server.run("tests.faults.limits:tell_memory", []).out)
        for more in range(8):
            ended = server.run("ckptkit", ["stats", str(root)], limits={RLIMIT_AS: taken + (more << 20)})
            first = ended.err.partition("\n")[0]
            # CPython may lose its own MemoryError on the way out of `main`, when we have said what is wrong.
            is_lost = first == "error: not enough memory" and "SystemError" in ended.err
            assert ended.code in (0, 4) or is_lost, ended.err
            said.add(first)
    assert "error: not enough memory" in said
