"""The fast share of faults of a store: what stands there is absent or whole, and the same command completes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import stores
from tests.faults.cases import Case
from tests.faults.store_scenes import StoreScene, stage
from tests.faults.store_writings import COMMANDS
from tests.faults.stores import judge_again
from tests.faults.verdicts import GOOD, Verdict
from tests.tiers import nightly_but

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.mark.parametrize("case", nightly_but(stores.CASES[1::6], stores.CASES), ids=lambda case: case.name)
def test_ckptkit_is_whole_or_absent_in_a_store(case: Case, tmp_path: Path) -> None:
    seen = list(case.run(tmp_path, False))
    assert any(one.verdict is not Verdict.UNFIRED for one in seen)
    assert [one for one in seen if one.verdict not in GOOD] == []


def test_a_half_output_is_seen() -> None:
    """A store that loses bytes of a file that it has said to be there is told from one that is only slow."""
    scene = StoreScene(COMMANDS[0], False, stage())
    with scene.lay() as place:
        assert place.run().code == 0
        assert place.stands() == "new"
        key = place.key("__0_0.distcp")
        scene.stage.call("put_object", Bucket=place.bucket, Key=key, Body=scene.new["__0_0.distcp"][:-1000])
        assert place.stands() == "half"
        scene.stage.call("delete_object", Bucket=place.bucket, Key=place.key(".metadata"))
        assert place.stands() == "half"
        scene.stage.call("delete_object", Bucket=place.bucket, Key=key)
        assert place.stands() == "absent"


@pytest.mark.nightly
def test_what_is_sent_twice_is_seen() -> None:
    scene = StoreScene(COMMANDS[0], False, stage())
    with scene.lay() as place:
        assert place.run().code == 0
        sent = place.sent()
        assert sum(sent.values()) == sum(map(len, scene.new.values()))
        for name in scene.new:
            scene.stage.call("delete_object", Bucket=place.bucket, Key=place.key(name))
        verdict, _ = judge_again(place, sent, was_whole=False)
    assert verdict is Verdict.LOST
