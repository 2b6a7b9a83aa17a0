"""Runs on S3: what prune deletes and in which order, pins, holds, and that a killed prune leaves nothing half."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import CkptError, IOFailure, NotACheckpoint, Occupied, Usage
from ckptkit.io.claims import StoreClaim
from ckptkit.io.path import to_path
from ckptkit.plugins.s3_runs import keeper as s3_keeper
from ckptkit.plugins.s3_runs import objects
from ckptkit.runs.prune import Pruned, prune
from ckptkit.runs.retention import dump_metrics
from ckptkit.trainers.ckptkit import METRICS
from ckptkit.training.saving.run import Run
from tests import producers
from tests.conftest import Produce
from tests.s3 import CLAIM, Place, forget, make_place
from tests.tiers import nightly_but

Fill = Callable[..., None]
DELETE = r"POST .*\?delete"


@pytest.fixture(params=["moto", "rclone"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A bucket on each of the two servers: one knows conditions, the other does not."""
    yield make_place(request.getfixturevalue(request.param), monkeypatch)
    forget()


@pytest.fixture
def fill(produce: Produce) -> Fill:
    """Put checkpoints of these steps into a run, each with its loss."""

    def put(place: Place, *steps: int, producer: producers.Producer = producers.under_model) -> None:
        root = produce(producer).root
        for step in steps:
            base = f"{place.name}/run/ckpt-{step}"
            for file in root.rglob("*"):
                if file.is_file():
                    place.files.pipe_file(f"{base}/{file.relative_to(root)}", file.read_bytes())
            place.files.pipe_file(f"{base}/{METRICS}", dump_metrics(step, {"loss": abs(2.1 - step)}))
        forget()
        place.server.requests.clear()

    return put


def url_of(place: Place) -> str:
    return f"s3://{place.name}/run"


def keys(place: Place) -> set[str]:
    """The keys below the run."""
    base = f"{place.name}/run/"
    found = place.files.find(base, refresh=True)
    return {key.removeprefix(base) for key in found}


def steps_in(place: Place) -> set[str]:
    return {key.partition("/")[0] for key in keys(place)}


def visible(place: Place) -> list[int | None]:
    """The steps of the complete checkpoints, as another process sees them."""
    forget()
    return [one.step for one in ckptkit.ls(url_of(place)).checkpoints if one.is_complete]


def writes(place: Place) -> list[str]:
    """The requests that change something."""
    what = [one.what for one in place.server.requests]
    return [one for one in what if one.startswith(("PUT", "DELETE", "POST"))]


def steps(entries: tuple[object, ...]) -> list[object]:
    return [getattr(entry, "step", None) for entry in entries]


@pytest.mark.slow
def test_the_same_rules_as_in_a_directory(either: Place, fill: Fill) -> None:
    fill(either, 1, 2, 3, 4, 10)
    before = keys(either)
    either.server.requests.clear()
    shown = prune(url_of(either), keep_last=1, keep_best="loss")
    assert (steps(shown.keep), steps(shown.delete), shown.deleted) == ([10, 2], [4, 3, 1], False)
    assert (keys(either), writes(either)) == (before, [])
    done = prune(url_of(either), keep_last=1, keep_best="loss", yes=True)
    assert (steps(done.keep), steps(done.delete), done.deleted) == ([10, 2], [4, 3, 1], True)
    assert done.freed_bytes == sum(entry.nbytes for entry in done.delete) > 0
    assert keys(either) == {key for key in before if key.startswith(("ckpt-10/", "ckpt-2/"))}
    again = prune(url_of(either), keep_last=1, keep_best="loss", yes=True)
    assert (steps(again.keep), again.delete, again.other) == ([10, 2], (), ())
    assert all(found.is_ok for found in ckptkit.verify(url_of(either)))


@pytest.mark.slow
def test_what_makes_it_visible_goes_first_and_the_claim_last(place: Place, fill: Fill) -> None:
    fill(place, 1, 2, producer=producers.accelerate)
    seen: list[tuple[set[str], bool]] = []

    def look() -> None:
        found = {key.removeprefix("ckpt-1/") for key in keys(place) if key.startswith("ckpt-1/")}
        seen.append((found, Checkpoint.at(to_path(f"{url_of(place)}/ckpt-1")).is_complete))

    place.server.fail(f"{DELETE}|DELETE ", times=9, first=look)
    whole = {key.removeprefix("ckpt-1/") for key in keys(place) if key.startswith("ckpt-1/")}
    prune(url_of(place), keep_last=1, yes=True)
    first, second, last = (found for found, _ in seen)
    assert first == whole | {CLAIM}
    assert not any(name.endswith((".metadata", "ckptkit.json")) for name in second)
    assert {name for name in first if name.endswith(".distcp")} <= second
    assert last == {CLAIM}
    assert steps_in(place) == {"ckpt-2"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ckptkit.checkpoints.checkpoint.LatestDiffers")
def test_what_is_held_stays(place: Place, fill: Fill) -> None:
    fill(place, 1, 2, 3, 4, 5)
    assert [path.name for path in ckptkit.pin(f"{url_of(place)}/ckpt-1")] == ["ckpt-1"]
    place.files.pipe_file(f"{place.name}/run/latest", b"ckpt-2")
    forget()
    done = prune(url_of(place), keep_last=1, yes=True)
    assert [(entry.step, entry.reason) for entry in done.keep] == [
        (5, "one of the last 1"),
        (2, "`latest` names it"),
        (1, "pinned"),
    ]
    assert ".pins/ckpt-1" in keys(place)
    listed = {one.step: one for one in ckptkit.ls(url_of(place)).checkpoints}
    assert (listed[1].is_pinned, listed[2].is_pinned) == (True, False)
    assert ckptkit.unpin(f"{url_of(place)}/ckpt-1", f"{url_of(place)}/ckpt-2") == [to_path(f"{url_of(place)}/ckpt-1")]
    assert ".pins/ckpt-1" not in keys(place)
    assert [path.name for path in ckptkit.pin(url_of(place))] == ["ckpt-2"]  # which `latest` names
    with pytest.raises(NotACheckpoint):
        ckptkit.pin(f"{url_of(place)}/ckpt-3")


@pytest.mark.slow
def test_a_pin_that_comes_before_the_first_file_goes_is_seen(either: Place, fill: Fill) -> None:
    fill(either, 1, 2)

    def set_pin() -> None:
        either.files.pipe_file(f"{either.name}/run/.pins/ckpt-1", b"")

    either.server.fail(f"PUT .*ckpt-1/{CLAIM}", first=set_pin)
    done = prune(url_of(either), keep_last=1, yes=True)
    assert [(entry.step, entry.reason) for entry in done.keep] == [(2, "one of the last 1"), (1, "pinned")]
    assert done.freed_bytes == 0
    assert visible(either) == [1, 2]
    assert not any(CLAIM in key for key in keys(either))


@pytest.mark.slow
def test_a_pin_that_comes_later_is_refused_and_taken_back(
    place: Place, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(place, 1, 2)
    monkeypatch.setattr(s3_keeper, "_PATIENCE", 0.1)
    refused: list[CkptError] = []

    def pin() -> None:
        try:
            ckptkit.pin(f"{url_of(place)}/ckpt-1")
        except CkptError as error:
            refused.append(error)

    place.server.fail(DELETE, first=pin)
    assert steps(prune(url_of(place), keep_last=1, yes=True).delete) == [1]
    assert isinstance(refused[0], Occupied)
    assert steps_in(place) == {"ckpt-2"}


def prune_apart(env: dict[str, str], url: str) -> None:
    os.environ.update(env)
    prune(url, keep_last=1, yes=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "producer",
    nightly_but([producers.under_model], [producers.under_model, producers.accelerate]),
    ids=["one part", "two parts"],
)
def test_killed_at_any_request_it_leaves_nothing_half(
    place: Place, fill: Fill, producer: producers.Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["ckptkit.runs.prune", "s3fs", "torch"])
    for number in range(100):
        place = make_place(place.server, monkeypatch)
        fill(place, 1, 2, producer=producer)
        client = processes.Process(target=prune_apart, args=(place.server.env, url_of(place)))
        kill = place.server.fail("^(PUT|POST|DELETE)", skip=number, status=500, first=client.kill)
        client.start()
        client.join()
        place.server.faults.clear()
        if kill.times:
            break
        assert client.exitcode == -signal.SIGKILL
        seen = visible(place)
        assert 2 in seen
        assert 1 not in seen or all(found.is_ok for found in ckptkit.verify(f"{url_of(place)}/ckpt-1"))
        half = steps_in(place) - {f"ckpt-{step}" for step in seen}
        listed = {one.path.name: one for one in ckptkit.ls(url_of(place)).checkpoints}
        claims = {name: listed[name].claim for name in half}
        assert all(claim is not None and claim.is_deletion for claim in claims.values())
        done = prune(url_of(place), keep_last=1, yes=True)
        assert steps(done.keep) == [2]
        assert half == {entry.path.name for entry in done.delete if entry.reason == "its deletion did not finish"}
        assert steps_in(place) == {"ckpt-2"}
    assert number == 4  # a claim, two requests for files, and the claim again
    assert steps_in(place) == {"ckpt-2"}


@pytest.mark.nightly
def test_a_deletion_that_did_not_touch_it_is_decided_anew(place: Place, fill: Fill) -> None:
    """The newest checkpoints may be gone by then, and this one be the last that is left."""
    fill(place, 1, 2)
    leave_deletion(place)
    place.files.rm(f"{place.name}/run/ckpt-2", recursive=True)
    forget()
    done = prune(url_of(place), keep_last=1, yes=True)
    assert (steps(done.keep), done.delete) == ([1], ())
    assert visible(place) == [1]
    fill(place, 2)
    assert steps(prune(url_of(place), keep_last=1, yes=True).delete) == [1]
    assert steps_in(place) == {"ckpt-2"}


def leave_deletion(place: Place) -> None:
    """Let a deletion of the first checkpoint die with its claim set."""
    place.server.fail(DELETE, status=403, code="AccessDenied")
    place.server.fail(f"DELETE .*{CLAIM}", times=9, status=403, code="AccessDenied")
    with pytest.raises(IOFailure):
        prune(url_of(place), keep_last=1, yes=True)
    place.server.faults.clear()
    assert f"ckpt-1/{CLAIM}" in keys(place)


def test_what_may_not_be_deleted_is_said_and_stays_whole(place: Place, fill: Fill) -> None:
    fill(place, 1, 2)
    before = keys(place)
    place.server.fail(DELETE, status=403, code="AccessDenied")
    with pytest.raises(IOFailure, match="access denied") as refused:
        prune(url_of(place), keep_last=1, yes=True)
    assert "s3:DeleteObject" in str(refused.value.hint)
    assert (keys(place), visible(place)) == (before, [1, 2])


def error_of(place: Place, code: str) -> str:
    """An answer to a deletion that refuses one object."""
    one = f"<Error><Key>run/ckpt-1/.metadata</Key><Code>{code}</Code><Message>so it is</Message></Error>"
    return f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{one}</DeleteResult>'


def test_a_single_object_that_is_refused_is_an_error(place: Place, fill: Fill) -> None:
    fill(place, 1, 2)
    place.server.fail(DELETE, status=200, body=error_of(place, "AccessDenied"))
    with pytest.raises(IOFailure, match="access denied: so it is") as refused:
        prune(url_of(place), keep_last=1, yes=True)
    assert str(refused.value.path) == f"{url_of(place)}/ckpt-1/.metadata"
    assert visible(place) == [1, 2]


@pytest.mark.nightly
def test_whatever_is_busy_is_asked_again(place: Place, fill: Fill) -> None:
    fill(place, 1, 2, 3)
    place.server.fail(DELETE, status=503, code="SlowDown")
    place.server.fail(DELETE, status=200, body=error_of(place, "InternalError"))
    assert steps(prune(url_of(place), keep_last=1, yes=True).delete) == [2, 1]
    assert steps_in(place) == {"ckpt-3"}


@pytest.mark.nightly
def test_many_objects_go_in_batches(place: Place, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(place, 1, 2)
    for number in range(11):
        place.files.pipe_file(f"{place.name}/run/ckpt-1/logs/{number}.txt", b"mine")
    monkeypatch.setattr(objects, "_BATCH", 4)
    rest = sum(key.startswith("ckpt-1/") for key in keys(place)) - 1  # all but the metadata
    place.server.requests.clear()
    prune(url_of(place), keep_last=1, yes=True)
    assert sum("?delete" in what for what in writes(place)) == 1 + -(-rest // 4)
    assert steps_in(place) == {"ckpt-2"}  # with what else lay in its directory, as on a disk


@pytest.mark.nightly
def test_a_store_that_deletes_only_one_by_one(place: Place, fill: Fill) -> None:
    fill(place, 1, 2)
    place.server.fail(DELETE, times=9, status=501, code="NotImplemented")
    prune(url_of(place), keep_last=1, yes=True)
    assert steps_in(place) == {"ckpt-2"}


@pytest.mark.nightly
def test_two_at_once_end_one_deletion_together(place: Place, fill: Fill) -> None:
    fill(place, 1, 2, 3)
    other: list[Pruned] = []
    place.server.fail(DELETE, skip=1, first=lambda: other.append(prune(url_of(place), keep_last=1, yes=True)))
    done = prune(url_of(place), keep_last=1, yes=True)
    assert steps(other[0].delete) == [2, 1]
    assert steps(done.keep) == [3]
    assert steps_in(place) == {"ckpt-3"}


@pytest.mark.slow
def test_an_upload_and_a_deletion_keep_apart(place: Place, fill: Fill, produce: Produce, tmp_path: Path) -> None:
    fill(place, 1, 2)
    source = produce(producers.under_model).root
    leave_deletion(place)
    with pytest.raises(Occupied, match="another deletion has been under way since"):
        ckptkit.cp(source, f"{url_of(place)}/ckpt-1")
    prune(url_of(place), keep_last=1, yes=True)
    place.server.fail("PUT .*ckpt-0/.metadata", status=403)
    with pytest.raises(IOFailure):
        ckptkit.cp(source, f"{url_of(place)}/ckpt-0")
    place.server.fail("DELETE .*ckpt-1", times=9, status=403)
    with pytest.raises(IOFailure):
        ckptkit.cp(source, f"{url_of(place)}/ckpt-1")
    place.server.faults.clear()
    listed = {one.step: one for one in ckptkit.ls(url_of(place)).checkpoints}
    assert {step: (one.is_complete, one.claim and one.claim.kind) for step, one in listed.items()} == {
        0: (False, "upload"),
        1: (True, "upload"),
        2: (True, None),
    }
    before = keys(place)
    done = prune(url_of(place), keep_last=1, yes=True)
    assert (steps(done.keep), done.delete) == ([2, 1], ())
    assert all(entry.reason.startswith("an upload has been under way since") for entry in (done.keep[1], *done.other))
    assert keys(place) == before


@pytest.mark.nightly
@pytest.mark.parametrize("is_late", [False, True])
def test_a_deletion_stops_when_an_upload_overwrites_what_it_deletes(
    place: Place, fill: Fill, produce: Produce, is_late: bool
) -> None:
    """The upload comes, and is done, before prune claims what is half deleted; or before it deletes the rest."""
    fill(place, 1, 2)
    source, url = produce(producers.under_model).root, f"{url_of(place)}/ckpt-1"
    place.server.fail(DELETE, skip=1, status=403, code="AccessDenied")
    with pytest.raises(IOFailure):
        prune(url_of(place), keep_last=1, yes=True)
    forget()
    overwrite = partial(ckptkit.cp, source, url, overwrite=True)
    place.server.fail(f"GET .*ckpt-1/{CLAIM}", skip=int(is_late), first=overwrite)
    if is_late:
        with pytest.raises(Occupied, match="another process finished this deletion"):
            prune(url_of(place), keep_last=1, yes=True)
    else:
        done = prune(url_of(place), keep_last=1, yes=True)
        assert done.keep[-1].reason == "another process finished its deletion, and new files are there"
    forget()
    assert all(found.is_ok for found in ckptkit.verify(url))
    assert visible(place) == [1, 2]


@pytest.mark.nightly
def test_a_place_where_nothing_is_left_but_a_deletion_is_called_that(place: Place) -> None:
    place.files.pipe_file(f"{place.name}/run/ckpt-1/{CLAIM}", StoreClaim.for_deletion([]).to_bytes())
    with pytest.raises(NotACheckpoint, match="found no complete checkpoint: a deletion has been under way since"):
        ckptkit.inspect(f"{url_of(place)}/ckpt-1")


@pytest.mark.nightly
def test_an_upload_that_comes_after_the_plan_is_left_alone(place: Place, fill: Fill) -> None:
    fill(place, 1, 2)

    def claim() -> None:
        words = b'{"plan": "x", "started": "now", "host": "there", "uploads": null}'
        place.files.pipe_file(f"{place.name}/run/ckpt-1/{CLAIM}", words)

    place.server.fail(f"PUT .*ckpt-1/{CLAIM}", first=lambda: None)
    place.server.fail(f"GET .*ckpt-1/{CLAIM}", first=claim)
    done = prune(url_of(place), keep_last=1, yes=True)
    assert [entry.reason for entry in done.keep] == [
        "one of the last 1",
        "an upload has been under way since now, from there",
    ]
    assert visible(place) == [1, 2]


@pytest.mark.nightly
def test_files_that_were_added_to_a_half_deleted_checkpoint_stay(place: Place, fill: Fill) -> None:
    fill(place, 1, 2)
    place.server.fail(DELETE, skip=1, status=403, code="AccessDenied")
    with pytest.raises(IOFailure):
        prune(url_of(place), keep_last=1, yes=True)
    assert visible(place) == [2]
    place.server.fail(r"PUT .*ckpt-1/mine", first=wait_a_second)
    place.files.pipe_file(f"{place.name}/run/ckpt-1/mine", b"of another tool")
    forget()
    done = prune(url_of(place), keep_last=1, yes=True)
    assert done.delete == ()
    assert done.other[0].reason.startswith("files were added after its deletion began")
    assert "ckpt-1/mine" in keys(place)


def wait_a_second() -> None:
    """Let the clock of the store go on, which some tell in whole seconds."""
    time.sleep(1.1)


@pytest.mark.slow
def test_a_training_keeps_by_its_rules_and_ends_what_died(place: Place) -> None:
    run = Run(url_of(place), keep_last=2)
    for step in (1, 2):
        run.save(step, nn.Linear(2, 2))
    place.server.fail(DELETE, skip=1, status=403, code="AccessDenied")
    with pytest.warns(UserWarning, match="an old checkpoint was not deleted: .*access denied"):
        run.save(3, nn.Linear(2, 2))
    assert visible(place) == [2, 3]
    run.save(4, nn.Linear(2, 2))
    assert [one.step for one in run.checkpoints()] == [3, 4]
    assert steps_in(place) == {"ckpt-3", "ckpt-4"}


def test_what_cannot_work_is_refused(place: Place, fill: Fill) -> None:
    fill(place, 1, 2)
    with pytest.raises(Usage, match="demote works in local directories only"):
        prune(url_of(place), keep_last=1, demote=True, yes=True)
    for url in ("gs://bucket/run", "az://bucket/run", "hf://org/name"):
        for change in (lambda url: prune(url, keep_last=1), ckptkit.pin, ckptkit.unpin):
            with pytest.raises(Usage, match="only in local directories and on s3://"):
                change(url)
    with pytest.raises(IOFailure, match="the bucket does not exist"):
        prune("s3://absent-bucket/run", keep_last=1)
    with pytest.raises(NotACheckpoint):
        prune(f"s3://{place.name}/other", keep_last=1)
