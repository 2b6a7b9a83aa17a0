"""Which checkpoints stay, for which reason, and that the others go without a trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import Corrupt, Usage
from ckptkit.runs.retention import (
    Best,
    Policy,
    SavedCheckpoint,
    decide_retention,
    dump_metrics,
    read_metrics,
    saved_checkpoints_of,
)
from ckptkit.trainers.ckptkit import METRICS
from tests import producers
from tests.conftest import Produce

NAN = float("nan")


def saved(step: int, **metrics: float) -> SavedCheckpoint:
    return SavedCheckpoint(Path(f"ckpt-{step}"), step, metrics)


def kept(checkpoints: list[SavedCheckpoint], policy: Policy) -> list[int]:
    return [verdict.saved.step for verdict in decide_retention(checkpoints, policy) if verdict.is_kept]


LOSSES = [saved(1, loss=3.0), saved(2, loss=1.0), saved(10, loss=2.0), saved(9, loss=NAN), saved(4), saved(5, loss=2.0)]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (Policy(), [10, 9, 5, 4, 2, 1]),
        (Policy(1), [10]),
        (Policy(3), [10, 9, 5]),
        (Policy(99), [10, 9, 5, 4, 2, 1]),
        (Policy(1, best=Best("loss")), [10, 2]),
        (Policy(1, best=Best("loss", count=2)), [10, 2]),
        (Policy(1, best=Best("loss", count=3)), [10, 5, 2]),
        (Policy(1, best=Best("loss", highest=True)), [10, 1]),
        (Policy(1, best=Best("loss", count=99)), [10, 5, 2, 1]),
        (Policy(1, best=Best("accuracy")), [10]),
        (Policy(best=Best("loss")), [10, 2]),
        (Policy(every=3), [10, 9]),
        (Policy(every=2, best=Best("loss", highest=True)), [10, 4, 2, 1]),
        (Policy(2, every=5), [10, 9, 5]),
    ],
)
def test_what_is_kept(policy: Policy, steps: list[int]) -> None:
    assert kept(LOSSES, policy) == steps
    assert kept(LOSSES[::-1], policy) == steps


def test_each_that_stays_has_its_reasons() -> None:
    reasons = {
        verdict.saved.step: verdict.reasons
        for verdict in decide_retention(LOSSES, Policy(2, best=Best("loss", count=2)))
    }
    assert reasons == {
        10: ("one of the last 2", "loss 2 is among the best"),
        9: ("one of the last 2",),
        5: (),
        4: (),
        2: ("loss 1 is among the best",),
        1: (),
    }
    assert {verdict.reasons for verdict in decide_retention(LOSSES, Policy())} == {("all are kept",)}
    verdicts = decide_retention(LOSSES, Policy(every=2))
    assert [verdict.reasons for verdict in verdicts if verdict.saved.step == 10] == [("the newest", "a multiple of 2")]


def test_what_is_held_stays_and_says_why_first() -> None:
    held = [
        SavedCheckpoint(Path("ckpt-1"), 1, {}, ("pinned",)),
        saved(2),
        SavedCheckpoint(Path("ckpt-3"), 3, {}, ("`latest` names it",)),
    ]
    assert [verdict.reasons for verdict in decide_retention(held, Policy(1))] == [
        ("`latest` names it", "one of the last 1"),
        (),
        ("pinned",),
    ]


def test_the_newest_to_go_on_from_stays_beside_newer_weights() -> None:
    found = [
        saved(1),
        saved(2),
        *(SavedCheckpoint(Path(f"ckpt-{step}"), step, {}, is_weights_only=True) for step in (3, 4)),
    ]
    assert kept(found, Policy(1)) == kept(found, Policy(every=99)) == [4, 2]
    reasons = {verdict.saved.step: verdict.reasons for verdict in decide_retention(found, Policy(every=99))}
    assert (reasons[4], reasons[2]) == (("the newest",), ("the newest to go on from",))
    assert kept(found[2:], Policy(1)) == [4]


def test_steps_count_not_directories() -> None:
    """Two checkpoints of one step, by the names of two trainers, stay or go together."""
    twins = [SavedCheckpoint(Path(f"{name}{step}"), step, {}) for step in (1, 2, 3) for name in ("ckpt-", "step-")]
    assert kept(twins, Policy(2)) == [3, 3, 2, 2]
    assert kept(twins, Policy(every=2)) == [3, 3, 2, 2]


@given(st.lists(st.floats(), max_size=9), st.integers(1, 4), st.booleans(), st.integers(1, 4))
def test_the_newest_and_the_best_are_never_deleted(losses: list[float], last: int, highest: bool, count: int) -> None:
    checkpoints = [saved(step, loss=loss) for step, loss in enumerate(losses)]
    steps = kept(checkpoints, Policy(last, best=Best("loss", highest, count)))
    finite = [loss for loss in losses if abs(loss) < float("inf")]
    assert set(steps) >= set(range(len(losses))[-last:])
    assert len(steps) <= last + count
    if finite:
        assert (max if highest else min)(finite) in [losses[step] for step in steps]


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("loss", Best("loss")),
        ("loss:min", Best("loss")),
        ("loss:3", Best("loss", count=3)),
        ("eval/accuracy:max", Best("eval/accuracy", highest=True)),
        ("accuracy:max:2", Best("accuracy", highest=True, count=2)),
    ],
)
def test_the_best_is_spelt_briefly(text: str, best: Best) -> None:
    assert Best.parse(text) == best


@pytest.mark.parametrize("text", ["", ":max", "loss:", "loss:0", "loss:-1", "loss:low", "loss:2:max", "loss:min:2:3"])
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(Usage, match="expected METRIC"):
        Best.parse(text)


def test_policies_that_make_no_sense() -> None:
    with pytest.raises(Usage, match="keep_last: expected 1 or more, found 0"):
        Policy(0)
    with pytest.raises(Usage, match="keep_every: expected 1 or more, found -5"):
        Policy(every=-5)


def place(produce: Produce, path: Path, metrics: Mapping[str, float] | None = None) -> None:
    shutil.copytree(produce(producers.under_model).root, path)
    if metrics is not None:
        (path / METRICS).write_bytes(dump_metrics(0, metrics))


def test_only_complete_checkpoints_that_the_run_made_are_looked_at(produce: Produce, tmp_path: Path) -> None:
    place(produce, tmp_path / "ckpt-1", {"loss": 2, "other": NAN})
    place(produce, tmp_path / "ckpt-2")
    for name in ("ckpt-3", "ckpt-007", "checkpoint-5", "final", "elsewhere"):
        place(produce, tmp_path / name)
    (tmp_path / "ckpt-3" / ".metadata").unlink()
    (tmp_path / "ckpt-6").symlink_to(tmp_path / "elsewhere")
    found = saved_checkpoints_of(RunFolder(tmp_path))
    assert [one.step for one in found] == [1, 2]
    assert found[0].metrics["loss"] == 2.0
    assert found[1].metrics == {}


def test_metrics_are_read_as_written_or_refused(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(dump_metrics(5, {"loss": 0.25, "step": 99}))
    assert read_metrics(tmp_path) == {"loss": 0.25, "step": 5}
    for text in ("[1]", "{", json.dumps({"loss": "low"}), json.dumps({"loss": None})):
        (tmp_path / METRICS).write_text(text)
        with pytest.raises(Corrupt, match="not the metrics"):
            read_metrics(tmp_path)
