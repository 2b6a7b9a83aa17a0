"""Staging on a real file system: at every moment the destination is absent, old and whole, or new and whole."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptkit.errors import CkptError, IOFailure, NoRoom, Occupied, Unsafe
from ckptkit.io.allocation import create_file, require_free_space, write_new_file
from ckptkit.io.disk import lock_path, old_destination_path, staging_path
from ckptkit.io.staging import Stage, remove_orphaned_staging


@contextmanager
def staging(dst: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a directory to write into, which is committed when the block ends well and discarded when it does not."""
    stage = Stage(dst, overwrite=overwrite)
    try:
        yield stage.open().path
        stage.commit()
    except BaseException:
        stage.discard()
        raise


def listing(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def make(dst: Path, content: bytes, *, overwrite: bool = False, count: int = 1) -> None:
    with staging(dst, overwrite=overwrite) as room:
        for i in range(count):
            write_new_file(room / f"file{i}", content)


def test_a_directory_appears_when_it_is_whole(tmp_path: Path) -> None:
    dst = tmp_path / "new" / "out"
    with staging(dst) as room:
        write_new_file(room / "a", b"1")
        (room / "sub").mkdir()
        write_new_file(room / "sub" / "b", b"2")
        assert not dst.exists()
        assert room.name.startswith(".")
        assert room.parent == dst.parent
    assert listing(dst) == {"a": b"1", "sub/b": b"2"}
    assert os.listdir(dst.parent) == ["out"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "out") as room:
        write_new_file(room / "a", b"1")
        raise KeyboardInterrupt
    assert not os.listdir(tmp_path)


def test_what_exists_is_not_replaced_unasked(tmp_path: Path) -> None:
    make(tmp_path / "out", b"old")
    with pytest.raises(Occupied):
        make(tmp_path / "out", b"new")
    assert listing(tmp_path) == {"out/file0": b"old"}


def test_what_exists_is_replaced_as_a_whole(tmp_path: Path) -> None:
    make(tmp_path / "out", b"old", count=3)
    make(tmp_path / "out", b"new", overwrite=True)
    assert listing(tmp_path) == {"out/file0": b"new"}


def test_an_error_leaves_the_old(tmp_path: Path) -> None:
    make(tmp_path / "out", b"old")
    with pytest.raises(ValueError, match="stop"), staging(tmp_path / "out", overwrite=True) as room:
        write_new_file(room / "file0", b"new")
        raise ValueError("stop")
    assert listing(tmp_path) == {"out/file0": b"old"}


def test_an_empty_directory_is_free(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", b"new")
    assert listing(tmp_path) == {"out/file0": b"new"}


def test_the_current_directory_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for dst in (Path(), tmp_path):
        with pytest.raises(Occupied, match="the destination is the current directory"):
            make(dst, b"1", overwrite=True)
    assert not os.listdir()


def test_a_file_or_a_link_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    make(tmp_path / "real", b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name, error in (("file", Occupied), ("link", Unsafe)):
        with pytest.raises(error):
            make(tmp_path / name, b"new", overwrite=True)
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert listing(tmp_path / "real") == {"file0": b"old"}


def test_a_second_run_on_the_same_destination_is_refused(tmp_path: Path) -> None:
    with staging(tmp_path / "out") as room:
        write_new_file(room / "a", b"1")
        with pytest.raises(Occupied):
            make(tmp_path / "out", b"2")
        assert listing(room).keys() >= {"a"}
    assert listing(tmp_path / "out") == {"a": b"1"}


def test_a_stage_whose_directory_was_deleted_leaves_the_next_one_alone(tmp_path: Path) -> None:
    deleted = Stage(tmp_path / "run" / "out").open()
    shutil.rmtree(tmp_path / "run")
    with staging(tmp_path / "run" / "out") as room:
        write_new_file(room / "a", b"1")
        deleted.discard()
        with pytest.raises(Occupied):
            make(tmp_path / "run" / "out", b"2")
    assert listing(tmp_path / "run" / "out") == {"a": b"1"}


def test_what_a_dead_run_left_is_taken_away(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=die_in_staging, args=(tmp_path / "out",))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert staging_path(tmp_path / "out").exists()
    make(tmp_path / "out", b"new")
    assert listing(tmp_path) == {"out/file0": b"new"}


def die_in_staging(dst: Path) -> None:
    with staging(dst) as room:
        write_new_file(room / "half", b"1")
        os.kill(os.getpid(), signal.SIGKILL)


def test_nobody_takes_over_while_a_run_commits(tmp_path: Path) -> None:
    """A run is the owner until its directory is in place: a second one that comes in between must not clear it."""
    for attempt in range(2):
        dst = tmp_path / f"out{attempt}"
        stage = Stage(dst).open()
        for i in range(100):
            write_new_file(stage.path / f"file{i}", b"x")
        failures: list[BaseException] = []
        committing = threading.Thread(target=commit, args=(stage, failures))
        committing.start()
        while committing.is_alive() and not dst.exists():
            try:
                intruder = Stage(dst).open()
            except CkptError:
                continue
            intruder.discard()
        committing.join()
        assert not failures
        assert len(listing(dst)) == 100


def commit(stage: Stage, failures: list[BaseException]) -> None:
    try:
        stage.commit()
    except BaseException as error:  # noqa: BLE001 - told to the thread that waits
        failures.append(error)


def test_of_many_runs_at_once_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(2):
        dst = tmp_path / f"out{attempt}"
        start = time.monotonic() + 0.05
        runs = [context.Process(target=make_at, args=(start, dst, str(i).encode())) for i in range(4)]
        for run in runs:
            run.start()
        for run in runs:
            run.join()
        codes = sorted(run.exitcode or 0 for run in runs)
        assert codes == [0, 5, 5, 5]
        made = listing(dst)
        assert len(made) == 20
        assert len(set(made.values())) == 1
        assert os.listdir(tmp_path) == [dst.name] or not staging_path(dst).exists()


def make_at(start: float, dst: Path, content: bytes) -> None:
    while time.monotonic() < start:
        pass
    try:
        make(dst, content, count=20)
    except CkptError as error:
        os._exit(error.exit_code)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_bytes(b"years of work")
    staging_path(tmp_path / "out").symlink_to(precious)
    with pytest.raises(CkptError):
        make(tmp_path / "out", b"new")
    assert listing(precious) == {"thesis": b"years of work"}


def test_links_inside_a_dead_runs_directory_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").write_bytes(b"years of work")
    room = staging_path(tmp_path / "out")
    room.mkdir()
    (room / "link").symlink_to(tmp_path / "precious")
    make(tmp_path / "out", b"new")
    assert listing(tmp_path / "precious") == {"thesis": b"years of work"}
    assert listing(tmp_path / "out") == {"file0": b"new"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_an_io_failure(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(0o500)
    with pytest.raises(CkptError) as raised:
        make(tmp_path / "closed" / "out", b"new")
    assert raised.value.exit_code == 4


def test_a_destination_below_a_file_is_an_io_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CkptError) as raised:
        make(tmp_path / "file" / "out", b"new")
    assert raised.value.exit_code in (4, 5)


def test_a_destination_below_a_dangling_link_names_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(IOFailure, match="points to a missing directory") as raised:
        make(tmp_path / "link" / "out", b"new")
    assert (raised.value.path, raised.value.hint) == (tmp_path / "link", "create nowhere, or remove the link")


def test_a_name_that_is_too_long_for_our_hidden_files_is_named_itself(tmp_path: Path) -> None:
    with pytest.raises(IOFailure, match="file name too long") as raised:
        make(tmp_path / ("x" * 245), b"new")
    assert raised.value.path == tmp_path / ("x" * 245)


def test_files_are_created_at_their_size(tmp_path: Path) -> None:
    create_file(tmp_path / "a", 100, [(0, b"head")])
    assert (tmp_path / "a").read_bytes() == b"head" + bytes(96)
    create_file(tmp_path / "empty", 0, [])
    assert (tmp_path / "empty").read_bytes() == b""
    with pytest.raises(CkptError):
        create_file(tmp_path / "a", 1, [])


@pytest.mark.parametrize("there", [b"", b"head and dat", b"head and data, and too much of it"])
def test_a_file_that_is_there_is_made_whole(tmp_path: Path, there: bytes) -> None:
    """Another process may be filling it just now."""
    (tmp_path / "a").write_bytes(there)
    create_file(tmp_path / "a", 20, [(0, b"Head")], must_be_new=False)
    assert (tmp_path / "a").read_bytes() == b"Head" + there[4:20].ljust(16, b"\0")


def test_room_is_checked_before_it_is_needed(tmp_path: Path) -> None:
    require_free_space(tmp_path / "not" / "yet" / "there", 1)
    with pytest.raises(NoRoom) as raised:
        require_free_space(tmp_path / "not" / "yet", 1 << 60)
    assert raised.value.exit_code == 4


def make_file(dst: Path, content: bytes, *, overwrite: bool = False) -> None:
    stage = Stage(dst, overwrite=overwrite, is_file=True)
    try:
        write_new_file(stage.open().path / "any name", content)
        stage.commit()
    except BaseException:
        stage.discard()
        raise


def test_a_single_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    make_file(tmp_path / "out.pt", b"1")
    assert listing(tmp_path) == {"out.pt": b"1"}
    with pytest.raises(Occupied):
        make_file(tmp_path / "out.pt", b"2")
    make_file(tmp_path / "out.pt", b"2", overwrite=True)
    assert listing(tmp_path) == {"out.pt": b"2"}
    (tmp_path / "there").mkdir()
    with pytest.raises(Occupied):
        make_file(tmp_path / "there", b"3", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["out.pt", "there"]


def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "out.pt", is_file=True).open()
    write_new_file(stage.path / "made", b"ours")
    write_new_file(tmp_path / "out.pt", b"theirs")
    with pytest.raises(Occupied):
        stage.commit()
    stage.discard()
    assert listing(tmp_path) == {"out.pt": b"theirs"}


def test_an_old_one_that_was_put_aside_comes_back(tmp_path: Path) -> None:
    make(tmp_path / "out", b"old")
    (tmp_path / "out").rename(old_destination_path(tmp_path / "out"))
    with pytest.raises(Occupied):
        make(tmp_path / "out", b"new")
    assert listing(tmp_path) == {"out/file0": b"old"}


def test_an_old_one_that_was_put_aside_goes_once_the_new_one_is_there(tmp_path: Path) -> None:
    make(tmp_path / "out", b"old")
    (tmp_path / "out").rename(old_destination_path(tmp_path / "out"))
    (tmp_path / "new").mkdir()
    write_new_file(tmp_path / "new" / "file0", b"new")
    (tmp_path / "new").rename(tmp_path / "out")
    make(tmp_path / "out", b"newer", overwrite=True)
    assert listing(tmp_path) == {"out/file0": b"newer"}


def test_what_dead_runs_have_left_is_cleared_away(tmp_path: Path) -> None:
    alive = Stage(tmp_path / "alive").open()
    waiting = Stage(tmp_path / "waiting", key=b"key").open()
    waiting.unlock_for_resume()
    lock_path(tmp_path / "waiting").touch()
    staging_path(tmp_path / "dead").mkdir()
    write_new_file(staging_path(tmp_path / "dead") / "file", b"1")
    lock_path(tmp_path / "dead").touch()
    lock_path(tmp_path / "shown").touch()
    remove_orphaned_staging(tmp_path)
    assert set(os.listdir(tmp_path)) == {alive.path.name, lock_path(alive.dst).name, waiting.path.name}
    alive.discard()


def test_what_dead_runs_have_left_without_a_lock_is_cleared_away_and_what_was_aside_put_back(tmp_path: Path) -> None:
    staging_path(tmp_path / "dead").mkdir()
    make(tmp_path / "out", b"old")
    (tmp_path / "out").rename(old_destination_path(tmp_path / "out"))
    staging_path(tmp_path / "out").mkdir()
    remove_orphaned_staging(tmp_path)
    assert listing(tmp_path) == {"out/file0": b"old"}
    assert os.listdir(tmp_path) == ["out"]


def test_a_directory_that_cannot_be_listed_is_not_taken_for_empty(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "out").open()
    write_new_file(stage.path / "file", b"1")
    stage.path.rename(tmp_path / "away")
    with pytest.raises(CkptError):
        stage.commit()
    assert not (tmp_path / "out").exists()
    stage.discard()
