"""`Run("s3://...")`: what is saved comes back, and a save that died is in nobody's way."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import IOFailure, NotACheckpoint, Occupied, Usage
from ckptkit.training.saving.run import Run
from tests.s3 import CLAIM, Place
from tests.training.saving.networks import Trainee


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with warnings.catch_warnings(action="error"):
        yield


def url_of(place: Place) -> str:
    return f"s3://{place.name}/run"


def save(run: Run, step: int, trainee: Trainee) -> None:
    run.save(step, trainee.model, trainee.optimizer, metrics={"loss": step / 10}, **trainee.state())


def load(run: Run, trainee: Trainee, path: str | Path | None = None) -> int:
    return run.load(trainee.model, trainee.optimizer, path=path, **trainee.state())


@pytest.mark.parametrize("background", [False, True])
def test_what_is_saved_comes_back(place: Place, background: bool) -> None:
    ours, other = Trainee.make("plain", seed=0), Trainee.make("plain", seed=1)
    ours.learn(2)
    with Run(url_of(place), background=background, files={"config.json": b"{}"}) as run:
        assert run.latest() is None
        with pytest.raises(NotACheckpoint):
            load(run, other)
        save(run, 2, ours)
        then = Trainee.make("plain", seed=0)
        then.learn(2)
        ours.learn(1)
        run.wait()
        assert [one.step for one in run.checkpoints()] == [2]
        save(run, 3, ours)
    latest = run.latest()
    assert latest is not None
    assert str(latest.path) == f"{url_of(place)}/ckpt-3"
    assert load(run, other, f"{url_of(place)}/ckpt-2") == 2
    assert then.compare(other) == []
    assert load(Run(url_of(place)), other) == 3
    assert ours.compare(other) == []
    names = {key.removeprefix(f"{place.name}/run/") for key in place.files.find(f"{place.name}/run", refresh=True)}
    assert names == {
        f"ckpt-{step}/{name}"
        for step in (2, 3)
        for name in ("__0_0.distcp", "__0_1.distcp", "config.json", "metrics.json", "ckptkit.json", ".metadata")
    }
    assert all(part.is_ok for part in ckptkit.verify(f"{url_of(place)}/ckpt-3"))


@pytest.mark.slow
def test_a_save_that_died_is_in_nobodys_way(place: Place) -> None:
    trainee = Trainee.make("plain", seed=0)
    trainee.learn(1)
    for where in ("PUT .*__0_1", "PUT .*ckptkit.json", "PUT .*metadata"):
        place.server.fail(where, status=403)
        run = Run(url_of(place))
        with pytest.raises(IOFailure, match="rank 0 could not save it: access denied"):
            save(run, 5, trainee)
        assert run.latest() is None
        assert CLAIM in place.names()
    save(Run(url_of(place)), 5, trainee)
    assert CLAIM not in place.names()
    place.server.requests.clear()
    with pytest.raises(Occupied, match="the destination exists"):
        save(Run(url_of(place)), 5, trainee)
    assert not any(one.sent for one in place.server.requests)


@pytest.mark.slow
def test_what_others_left_is_not_replaced(place: Place, tmp_path: Path) -> None:
    trainee = Trainee.make("plain", seed=0)
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    place.files.put(str(tmp_path / "model.safetensors"), f"{place.name}/run/ckpt-5/model.safetensors")
    with pytest.raises(Occupied, match="the destination exists"):
        save(Run(url_of(place)), 5, trainee)
    place.files.pipe_file(f"{place.name}/run/ckpt-6/thesis.tex", b"x")
    with pytest.raises(Occupied, match="thesis"):
        save(Run(url_of(place)), 6, trainee)


@pytest.mark.parametrize("state_dict", ["full", "hf"])
def test_one_object_of_several_ranks_is_refused(state_dict: str) -> None:
    with pytest.raises(Usage, match="several ranks would write one object") as refused:
        Run("s3://bucket/run", state_dict=state_dict)
    assert refused.value.hint is not None
    assert "save `sharded`" in refused.value.hint
