"""A watch of a run on S3: it sees what is complete, its notes stay here, and prune sees what it holds."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.checkpoints.run import local_directory_of_run
from ckptkit.errors import IOFailure
from ckptkit.io.disk import DurabilityWarning
from ckptkit.io.path import to_path
from ckptkit.plugins.watch.watch import Event, find_file_identity, watch
from ckptkit.runs.deletion import WATCHES
from tests.s3 import CLAIM, S3, Place, forget, make_place

pytestmark = pytest.mark.slow

SOON = 0.05  # seconds between two looks


@pytest.fixture
def place(moto: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield make_place(moto, monkeypatch)
    forget()


def url_of(place: Place) -> str:
    return f"s3://{place.name}/run"


def save(place: Place, tmp_path: Path, *steps: int) -> None:
    """Put models into the run, each with its step as its weight."""
    for step in steps:
        save_file({"w": torch.full((4,), float(step))}, tmp_path / "model.safetensors")
        base = f"{place.name}/run/ckpt-{step}"
        place.files.put_file(str(tmp_path / "model.safetensors"), f"{base}/model.safetensors")
        place.files.pipe_file(f"{base}/config.json", b"{}")
    forget()


def append(log: Path) -> str:
    script = f"import os; open({str(log)!r}, 'a').write(os.environ['CKPTKIT_CKPT'] + '\\n')"
    return shlex.join([sys.executable, "-c", script])


def test_each_is_handled_once_and_the_notes_stay_here(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "log"
    save(place, tmp_path, 1, 2)
    done = watch(url_of(place), exec=append(log), every=SOON, once=True)
    assert log.read_text().split() == [f"{url_of(place)}/ckpt-1", f"{url_of(place)}/ckpt-2"]
    assert [str(path) for path in done.handled] == log.read_text().split()
    save(place, tmp_path, 3)
    assert len(watch(url_of(place), exec=append(log), every=SOON, once=True).handled) == 1
    assert len(log.read_text().split()) == 3
    run = ckptkit.ls(url_of(place)).root
    assert [path.suffix for path in (local_directory_of_run(run) / WATCHES).iterdir()] == [".json"]
    assert not any(WATCHES in key for key in place.files.find(f"{place.name}/run", refresh=True))


def test_what_is_not_complete_is_waited_for(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "log"
    save(place, tmp_path, 1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "model" / "model.safetensors")
    place.server.fail("PUT .*ckpt-2/model.safetensors", status=403)
    with pytest.raises(IOFailure):
        ckptkit.cp(tmp_path / "model", f"{url_of(place)}/ckpt-2")
    watch(url_of(place), exec=append(log), every=SOON, once=True)
    assert log.read_text().split() == [f"{url_of(place)}/ckpt-1"]
    ckptkit.cp(tmp_path / "model", f"{url_of(place)}/ckpt-2")
    watch(url_of(place), exec=append(log), every=SOON, once=True)
    assert log.read_text().split()[1:] == [f"{url_of(place)}/ckpt-2"]


def test_prune_leaves_alone_what_is_being_handled(place: Place, tmp_path: Path) -> None:
    save(place, tmp_path, 1, 2, 3)
    script = f"""
import ckptkit, os
done = ckptkit.prune({url_of(place)!r}, keep_last=1, yes=True)
held = [entry.path.name for entry in done.keep if "a watch on" in entry.reason]
assert held == [os.path.basename(os.environ["CKPTKIT_CKPT"])] or os.environ["CKPTKIT_STEP"] == "3", done
"""
    done = watch(url_of(place), exec=[[sys.executable, "-c", script]], every=SOON, tries=1, once=True)
    assert ([path.name for path in done.handled], done.failed) == (["ckpt-1", "ckpt-3"], ())
    assert [path.name for path in done.missed] == ["ckpt-2"]
    ckptkit.prune(url_of(place), keep_last=1, yes=True)
    assert [one.step for one in ckptkit.ls(url_of(place)).checkpoints] == [3]


def test_the_hold_of_a_killed_watch_ends_by_itself(place: Place, tmp_path: Path) -> None:
    save(place, tmp_path, 1, 2)
    base = f"{place.name}/run/{WATCHES}"
    place.files.pipe_file(f"{base}/a-there.hold", b'{"checkpoint": "ckpt-1", "host": "there", "until": 9e9}')
    place.files.pipe_file(f"{base}/a.json", b'{"commands": []}')  # the journal of a local run that was copied here
    assert ckptkit.prune(url_of(place), keep_last=1, yes=True).delete == ()
    place.files.pipe_file(f"{base}/a-there.hold", b'{"checkpoint": "ckpt-1", "host": "there", "until": 1e9}')
    assert len(ckptkit.prune(url_of(place), keep_last=1, yes=True).delete) == 1


def test_outputs_in_the_store_are_known_by_their_claims(place: Place, tmp_path: Path) -> None:
    """Of a watch that was killed while a command ran: an upload that did not end is not taken for an output."""
    save(place, tmp_path, 1)
    out = f"{place.name}/run/exported/ckpt-1"
    told: list[Event] = []
    do = "convert {ckpt} {out} --to dcp --quiet"
    place.server.fail(r"PUT .*exported/ckpt-1/\.metadata", times=9, status=403)
    failed = watch(url_of(place), do=do, every=SOON, tries=1, once=True)
    assert (len(failed.failed), f"{out}/{CLAIM}" in place.files.find(out, refresh=True)) == (1, True)
    assert find_file_identity(to_path(f"s3://{out}")) is None
    place.server.faults.clear()
    done = watch(url_of(place), do=do, every=SOON, once=True, tell=told.append)
    assert (len(done.handled), [event.outcome for event in told]) == (1, [None, "handled"])
    assert find_file_identity(to_path(f"s3://{out}")) is not None
    assert ckptkit.diff(f"{url_of(place)}/ckpt-1", f"s3://{out}").is_equal


def test_a_key_that_may_only_read_is_enough_and_what_is_lost_is_said(place: Place, tmp_path: Path) -> None:
    save(place, tmp_path, 1, 2)
    place.server.fail("^(PUT|DELETE|POST)", times=99, status=403, code="AccessDenied")
    with pytest.warns(DurabilityWarning, match="prune cannot see which checkpoint this watch is handling"):
        done = watch(url_of(place), exec=append(tmp_path / "log"), every=SOON, once=True)
    assert len(done.handled) == 2


def test_a_bucket_that_does_not_exist_ends_the_watch(place: Place) -> None:
    with warnings.catch_warnings(action="error"), pytest.raises(IOFailure, match="the bucket does not exist"):
        watch("s3://absent-bucket/run", exec="true", every=SOON)
    done = watch(url_of(place), exec="true", every=SOON, once=True)
    assert done.handled == ()
