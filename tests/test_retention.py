"""Which checkpoints stay, for which reason, and that the others go without a trace."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import Corrupt, IOFailure, Usage
from ckptkit.retention import (
    METRICS,
    Best,
    Policy,
    Saved,
    decide,
    delete,
    find_saved,
    finish_deleting,
    read_metrics,
    write_metrics,
)
from ckptkit.runs import Run
from tests import producers
from tests.conftest import Produce

NAN = float("nan")


def saved(step: int, **metrics: float) -> Saved:
    return Saved(Path(f"ckpt-{step}"), step, metrics)


def kept(checkpoints: list[Saved], policy: Policy) -> list[int]:
    return [verdict.saved.step for verdict in decide(checkpoints, policy) if verdict.is_kept]


LOSSES = [saved(1, loss=3.0), saved(2, loss=1.0), saved(10, loss=2.0), saved(9, loss=NAN), saved(4), saved(5, loss=2.0)]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (Policy(), [10, 9, 5, 4, 2, 1]),
        (Policy(1), [10]),
        (Policy(3), [10, 9, 5]),
        (Policy(99), [10, 9, 5, 4, 2, 1]),
        (Policy(1, Best("loss")), [10, 2]),
        (Policy(1, Best("loss", count=2)), [10, 2]),
        (Policy(1, Best("loss", count=3)), [10, 5, 2]),
        (Policy(1, Best("loss", highest=True)), [10, 1]),
        (Policy(1, Best("loss", count=99)), [10, 5, 2, 1]),
        (Policy(1, Best("accuracy")), [10]),
    ],
)
def test_what_is_kept(policy: Policy, steps: list[int]) -> None:
    assert kept(LOSSES, policy) == steps
    assert kept(LOSSES[::-1], policy) == steps


def test_each_that_stays_has_its_reasons() -> None:
    reasons = {verdict.saved.step: verdict.reasons for verdict in decide(LOSSES, Policy(2, Best("loss", count=2)))}
    assert reasons == {
        10: ("one of the last 2", "loss 2 is among the best"),
        9: ("one of the last 2",),
        5: (),
        4: (),
        2: ("loss 1 is among the best",),
        1: (),
    }
    assert {verdict.reasons for verdict in decide(LOSSES, Policy())} == {("all are kept",)}


@given(st.lists(st.floats(), max_size=9), st.integers(1, 4), st.booleans(), st.integers(1, 4))
def test_the_newest_and_the_best_are_never_deleted(losses: list[float], last: int, highest: bool, count: int) -> None:
    checkpoints = [saved(step, loss=loss) for step, loss in enumerate(losses)]
    steps = kept(checkpoints, Policy(last, Best("loss", highest, count)))
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
    with pytest.raises(Usage, match="does not say which"):
        Best.parse(text)


def test_policies_that_make_no_sense() -> None:
    with pytest.raises(Usage, match="keep_last is 0"):
        Policy(0)
    with pytest.raises(Usage, match="keep_best alone"):
        Policy(None, Best("loss"))


def place(produce: Produce, path: Path, metrics: Mapping[str, float] | None = None) -> None:
    shutil.copytree(produce(producers.under_model).root, path)
    if metrics is not None:
        (path / METRICS).write_bytes(write_metrics(0, metrics))


def test_only_complete_checkpoints_that_the_run_made_are_looked_at(produce: Produce, tmp_path: Path) -> None:
    place(produce, tmp_path / "ckpt-1", {"loss": 2, "other": NAN})
    place(produce, tmp_path / "ckpt-2")
    for name in ("ckpt-3", "ckpt-007", "checkpoint-5", "final", "elsewhere"):
        place(produce, tmp_path / name)
    (tmp_path / "ckpt-3" / ".metadata").unlink()
    (tmp_path / "ckpt-6").symlink_to(tmp_path / "elsewhere")
    found = find_saved(Run(tmp_path))
    assert [one.step for one in found] == [1, 2]
    assert found[0].metrics["loss"] == 2.0
    assert found[1].metrics == {}


def test_metrics_are_read_as_written_or_refused(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(write_metrics(5, {"loss": 0.25, "step": 99}))
    assert read_metrics(tmp_path) == {"loss": 0.25, "step": 5}
    for text in ("[1]", "{", json.dumps({"loss": "low"}), json.dumps({"loss": None})):
        (tmp_path / METRICS).write_text(text)
        with pytest.raises(Corrupt, match="not the metrics"):
            read_metrics(tmp_path)


def test_a_checkpoint_goes_out_of_sight_before_it_goes(
    produce: Produce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(produce, tmp_path / "ckpt-1")
    delete(tmp_path / "ckpt-1")
    assert list(tmp_path.iterdir()) == []

    place(produce, tmp_path / "ckpt-1")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            delete(tmp_path / "ckpt-1")
    assert Run(tmp_path).checkpoints() == []
    assert len(list(tmp_path.iterdir())) == 1
    place(produce, tmp_path / "ckpt-1")  # saved again meanwhile
    delete(tmp_path / "ckpt-1")
    assert list(tmp_path.iterdir()) == []


def test_what_was_being_deleted_is_cleared_away(
    produce: Produce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(produce, tmp_path / "ckpt-1")
    place(produce, tmp_path / "ckpt-2")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            delete(tmp_path / "ckpt-1")
    finish_deleting(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-2"]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_error_of_the_disk_is_ours(tmp_path: Path) -> None:
    with pytest.raises(IOFailure) as raised:
        delete(tmp_path / "ckpt-1")
    assert raised.value.path == tmp_path / "ckpt-1"
    assert not os.listdir(tmp_path)
