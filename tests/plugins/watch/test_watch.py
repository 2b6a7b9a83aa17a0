"""What a watch does with the checkpoints of a run: each once, across restarts, kills, saves and prunes beside it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.checks.make_manifest import make_manifest
from ckptkit.errors import Corrupt, NotACheckpoint, Occupied, Usage
from ckptkit.plugins.watch.run_commands import describe_exit
from ckptkit.plugins.watch.stability import FileSnapshot, StabilityWait
from ckptkit.plugins.watch.watch import Event, watch
from ckptkit.runs.deletion import WATCHES, LocalLease, is_handled_by_watch
from ckptkit.runs.prune import prune
from tests.producers import save_alone

pytestmark = pytest.mark.slow

SOON = 0.02  # seconds between two looks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints and one that is not complete."""
    for step in (9, 10):
        save(tmp_path / "run", step)
    (tmp_path / "run" / "ckpt-11").mkdir()
    (tmp_path / "run" / "ckpt-11" / "__0_0.distcp").write_bytes(b"begun")
    return tmp_path / "run"


def save(run: Path, step: int, value: float = 1.0) -> Path:
    path = run / f"ckpt-{step}"
    save_alone({"model": {"w": torch.full((64,), value)}, "step": torch.tensor(step)}, path)
    return path


def shell(script: str) -> list[str]:
    """A command of a shell, which finds what it is about in its environment."""
    return ["sh", "-c", script]


def append(log: Path) -> list[str]:
    return shell(f'echo "$CKPTKIT_NAME $CKPTKIT_STEP" >> "{log}"')


def test_each_is_handled_once_the_oldest_first(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = watch(run, exec=[append(log)], every=SOON, once=True)
    assert log.read_text() == "ckpt-9 9\nckpt-10 10\n"
    assert (done.handled, done.failed, done.before) == ((run / "ckpt-9", run / "ckpt-10"), (), ())
    save(run, 12)
    done = watch(run, exec=[append(log)], every=SOON, once=True)
    assert log.read_text() == "ckpt-9 9\nckpt-10 10\nckpt-12 12\n"
    assert (done.handled, len(done.before)) == ((run / "ckpt-12",), 2)


def test_the_one_before(run: Path, tmp_path: Path) -> None:
    """`{prev}` is the last that was handled, in this watch or an earlier one; the first has none."""
    told: list[str] = []
    root, log = tmp_path / "root", tmp_path / "log"
    do = f"delta {{prev}} {{ckpt}} {root}/{{name}} --force --quiet"
    say = [shell(f'echo "$CKPTKIT_NAME $(basename "$CKPTKIT_PREV")" >> "{log}"')]

    def tell(event: Event) -> None:
        told.append(event.message)

    save(run, 10, 2.0)
    assert watch(run, do=do, exec=say, every=SOON, once=True, tell=tell).is_ok
    assert sum("skipped, no checkpoint was handled before: delta {prev}" in message for message in told) == 1
    assert {path.name for path in root.iterdir()} == {"ckpt-10"}
    save(run, 12, 3.0)
    assert watch(run, do=do, exec=say, every=SOON, once=True).is_ok
    assert {path.name for path in root.iterdir()} == {"ckpt-10", "ckpt-12"}
    assert log.read_text() == "ckpt-9 \nckpt-10 ckpt-9\nckpt-12 ckpt-10\n"


def test_commands_of_ours_make_an_output_for_each(run: Path) -> None:
    done = watch(run, do="consolidate {ckpt} {out} --quiet", every=SOON, once=True)
    assert done.is_ok
    made = sorted(path.relative_to(run) for path in (run / "exported").rglob("*.safetensors"))
    assert made == [Path(f"exported/ckpt-{step}/model.safetensors") for step in (10, 9)]
    inode = (run / "exported/ckpt-9").stat().st_ino
    assert watch(run, do="consolidate {ckpt} {out} --quiet", every=SOON, once=True).handled == ()
    assert (run / "exported/ckpt-9").stat().st_ino == inode


def test_outputs_go_where_they_are_asked_to(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "not yet there" / "exports"
    assert watch(run, exec=[["cp", "-r", "{ckpt}", "{out}"]], out=out, every=SOON, once=True).is_ok
    assert sorted(path.name for path in out.iterdir()) == ["ckpt-10", "ckpt-9"]


def test_commands_run_in_order_and_are_resumed_where_they_failed(run: Path, tmp_path: Path) -> None:
    log, fixed = tmp_path / "log", tmp_path / "fixed"
    commands = [append(log), shell(f'test -e "{fixed}"'), shell(f"echo last >> '{log}'")]
    done = watch(run, exec=commands, every=SOON, tries=2, once=True)
    assert [path.name for path in done.failed] == ["ckpt-9", "ckpt-10"]
    assert log.read_text() == "ckpt-9 9\nckpt-10 10\n"
    fixed.touch()
    assert watch(run, exec=commands, every=SOON, once=True).is_ok
    assert log.read_text() == "ckpt-9 9\nckpt-10 10\nlast\nlast\n"


def test_what_fails_is_tried_again_and_then_reported_while_others_go_on(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f'echo $CKPTKIT_STEP >> "{log}"; test $CKPTKIT_STEP != 9 || exit 7'
    told: list[Event] = []
    done = watch(run, exec=[shell(script)], every=SOON, tries=3, once=True, tell=told.append)
    assert (done.handled, done.failed, done.is_ok) == ((run / "ckpt-10",), (run / "ckpt-9",), False)
    assert sorted(log.read_text().split()) == ["10", "9", "9", "9"]
    ends = {event.checkpoint.name: event.message for event in told if event.outcome}
    assert ends["ckpt-9"].startswith("given up after 3 tries: sh -c ")
    assert ends["ckpt-9"].endswith("exit code 7")
    pauses = [event.message.rpartition("; ")[2] for event in told if "next try" in event.message]
    assert pauses == ["the next try is in 0.02 s", "the next try is in 0.04 s"]


def test_a_command_that_hangs_is_ended_with_its_children_and_tried_again(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f'test $CKPTKIT_STEP = 10 || {{ sleep 1000 & echo $! >> "{log}"; wait; }}'
    told: list[Event] = []
    done = watch(run, exec=[shell(script)], every=SOON, tries=2, timeout=1, once=True, tell=told.append)
    assert (done.handled, done.failed) == ((run / "ckpt-10",), (run / "ckpt-9",))
    reason = (
        f"given up after 2 tries: sh -c {script}: ran longer than 1 s, the timeout, and was ended with its children"
    )
    assert done.reasons == {run / "ckpt-9": reason}
    assert [event.message for event in told if event.outcome == "failed"] == [reason]
    assert sum("was ended with its children; the next try is in" in event.message for event in told) == 1
    sleeping = log.read_text().split()
    assert len(sleeping) == 2
    wait_until_ended(sleeping)
    assert not is_handled_by_watch(run / "ckpt-9")


@pytest.mark.parametrize("leader", ["trap '' TERM; ", ""], ids=["none ends", "only the first ends"])
def test_what_does_not_end_when_it_is_asked_to_is_killed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leader: str
) -> None:
    monkeypatch.setattr("ckptkit.plugins.watch.run_commands._GRACE", 0.5)
    log = tmp_path / "log"
    child = f'sh -c \'trap "" TERM; echo $$ >> "{log}"; while :; do sleep 0.1; done\''
    done = watch(run, exec=[shell(f"{leader}{child} & wait; wait")], every=SOON, tries=1, timeout=0.5, once=True)
    assert [path.name for path in done.failed] == ["ckpt-9", "ckpt-10"]
    wait_until_ended(log.read_text().split())


def test_one_that_failed_is_tried_anew_by_the_next_watch(run: Path, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed"
    command = [shell(f'test -e "{fixed}"')]
    assert len(watch(run, exec=command, every=SOON, tries=1, once=True).failed) == 2
    assert len(watch(run, exec=command, every=SOON, tries=1, once=True).failed) == 2
    fixed.touch()
    assert len(watch(run, exec=command, every=SOON, tries=1, once=True).handled) == 2


@pytest.mark.parametrize("seconds", [5, -5000], ids=["later", "by a clock that is behind"])
def test_one_that_is_saved_again_is_another(run: Path, tmp_path: Path, seconds: float) -> None:
    log = tmp_path / "log"
    watch(run, exec=[append(log)], every=SOON, once=True)
    shutil.rmtree(run / "ckpt-9")
    then = time.time() + seconds  # the clock of some file systems is coarse
    for file in save(run, 9, 2.0).iterdir():
        os.utime(file, (then, then))
    watch(run, exec=[append(log)], every=SOON, once=True)
    assert log.read_text() == "ckpt-9 9\nckpt-10 10\nckpt-9 9\n"


def test_a_model_that_is_saved_again_is_another(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    for seconds in (0, 5):
        (run / "ckpt-9").mkdir(parents=True, exist_ok=True)
        save_file({"w": torch.full((64,), float(seconds))}, run / "ckpt-9" / "model.safetensors")
        then = time.time() + seconds - 100
        os.utime(run / "ckpt-9" / "model.safetensors", (then, then))
        assert len(watch(run, exec=[append(log)], every=SOON, once=True).handled) == 1
        assert watch(run, exec=[append(log)], every=SOON, once=True).handled == ()


def test_what_is_put_beside_the_tensors_makes_no_other_checkpoint(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    watch(run, exec=[append(log)], every=SOON, once=True)
    make_manifest(run / "ckpt-9")
    (run / "ckpt-10" / "scores.json").write_text("{}")
    assert watch(run, exec=[append(log)], every=SOON, once=True).handled == ()


def test_one_that_was_demoted_is_no_other(run: Path, tmp_path: Path) -> None:
    watch(run, exec=[append(tmp_path / "log")], every=SOON, once=True)
    assert len(prune(run, keep_last=1, demote=True, yes=True).demote) <= 1
    assert watch(run, exec=[append(tmp_path / "log")], every=SOON, once=True).handled == ()


def test_one_that_is_deleted_before_it_is_handled_is_said(run: Path) -> None:
    told: list[Event] = []
    done = watch(run, exec=[shell(f"rm -rf '{run}/ckpt-10'")], every=SOON, once=True, tell=told.append)
    assert (done.handled, done.missed) == ((run / "ckpt-9",), (run / "ckpt-10",))
    assert told[-1].message == "deleted before it was handled"


def test_one_that_is_deleted_under_a_command_that_then_fails_is_said_too(run: Path) -> None:
    done = watch(run, exec=[shell('rm -rf "$CKPTKIT_CKPT"; exit 1')], every=SOON, once=True)
    assert [path.name for path in done.missed] == ["ckpt-9", "ckpt-10"]
    assert done.failed == ()


def test_prune_leaves_alone_what_is_being_handled(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    prune_it = [sys.executable, "-m", "ckptkit", "prune", str(run), "--keep-last", "1", "--yes"]
    command = f'test $CKPTKIT_STEP != 9 || {" ".join(prune_it)} > "{log}"'
    assert watch(run, exec=[shell(command)], every=SOON, once=True).is_ok
    assert "a watch is handling it" in log.read_text()
    assert (run / "ckpt-9").is_dir()
    prune(run, keep_last=1, yes=True)
    assert not (run / "ckpt-9").exists()


def test_a_run_that_was_moved_is_known_and_none_is_made_in_its_place(run: Path, tmp_path: Path) -> None:
    log, moved = tmp_path / "log", tmp_path / "moved"
    commands = [append(log), shell(f"test $CKPTKIT_STEP = 9 || test -e '{moved}' || mv '{run}' '{moved}'")]
    with pytest.raises(NotACheckpoint, match="the run is gone"):
        watch(run, exec=commands, every=SOON, once=True)
    assert not run.exists()
    (tmp_path / "link").symlink_to(moved)
    done = watch(tmp_path / "link", exec=commands, every=SOON, once=True)
    assert ([path.name for path in done.handled], [path.name for path in done.before]) == (["ckpt-10"], ["ckpt-9"])
    assert log.read_text() == "ckpt-9 9\nckpt-10 10\n"
    assert watch(moved, exec=commands, every=SOON, once=True).handled == ()


def test_rest_is_told_by_the_clock_that_the_files_are_dated_by(run: Path, tmp_path: Path) -> None:
    look = FileSnapshot.try_take(run / "ckpt-9")
    assert look is not None
    patience = StabilityWait(30)
    assert not patience.has_been_stable("ckpt-9", look, look.changed_ns + 29 * 10**9)
    assert not patience.has_been_stable("ckpt-9", look, look.changed_ns - 3600 * 10**9)
    assert patience.has_been_stable("ckpt-9", look, look.changed_ns + 30 * 10**9)
    with (tmp_path / "lock").open("w") as lock:
        assert LocalLease(run, "key", lock.fileno()).now_ns() >= look.changed_ns


@pytest.mark.parametrize(("code", "words"), [(-9, "ended by SIGKILL"), (-40, "ended by signal 40"), (3, "exit code 3")])
def test_how_a_command_ended(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_whoever_deletes_just_now_is_waited_for(run: Path, tmp_path: Path) -> None:
    from ckptkit.runs.deletion import locked_for_deletion

    log = tmp_path / "log"
    with locked_for_deletion(run):
        watching = threading.Thread(
            target=watch, args=(run,), kwargs={"exec": [append(log)], "every": SOON, "once": True}
        )
        watching.start()
        watching.join(0.5)
        assert not log.exists()
    watching.join()
    assert log.read_text() == "ckpt-9 9\nckpt-10 10\n"


def test_a_save_that_goes_on_is_waited_for(run: Path, tmp_path: Path) -> None:
    """As transformers' Trainer saves: the model looks complete before the optimizer is there."""
    from safetensors.torch import save_file

    log, place = tmp_path / "log", run / "checkpoint-20"

    def train() -> None:
        for number in range(20):
            (place / f"rng_state_{number}.pth").write_bytes(b"x")
            time.sleep(0.05)
        (place / "optimizer.pt").write_bytes(b"last")

    place.mkdir()
    (place / "config.json").write_text("{}")
    save_file({"w": torch.ones(9)}, place / "model.safetensors")
    training = threading.Thread(target=train)
    training.start()
    watch(run, exec=[shell(f'ls "$CKPTKIT_CKPT" >> "{log}"')], every=2, once=True)
    training.join()
    assert "model.safetensors" not in log.read_text() or "optimizer.pt" in log.read_text()


def test_two_of_the_same_do_not_run_together_and_two_others_do(run: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    lines = [
        "import sys, ckptkit",
        "from pathlib import Path",
        f"run, log = {str(run)!r}, {str(tmp_path / 'log')!r}",
        "try:",
        "    ckptkit.watch(run, exec=[[sys.executable, __file__]], every=0.02, once=True)",
        "except ckptkit.CkptError as error:",
        "    Path(log).write_text(error.message)",
        "ckptkit.watch(run, exec=[['true']], every=0.02, once=True)",
    ]
    inner.write_text("\n".join(lines))
    done = watch(run, exec=[[sys.executable, str(inner)]], every=SOON, once=True)
    assert done.is_ok
    assert (tmp_path / "log").read_text() == "another watch with the same commands handles this run"


KILLED = """
import os, sys, ckptkit
from ckptkit.plugins.watch.journal import WatchJournal
note = WatchJournal.write_record
def die(self, name, entry):
    if entry.state == sys.argv[2]:
        os.kill(os.getpid(), 9)
    note(self, name, entry)
WatchJournal.write_record = die
ckptkit.watch(sys.argv[1], do="consolidate {ckpt} {out} --quiet", every=0.02, once=True)
"""


def test_killed_between_handling_and_noting_it_is_not_done_twice(run: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(run), "done"], check=False)
    assert ended.returncode == -signal.SIGKILL
    made = run / "exported" / "ckpt-9"
    before = made.stat()
    assert not (run / "exported" / "ckpt-10").exists()
    told: list[Event] = []
    done = watch(run, do="consolidate {ckpt} {out} --quiet", every=SOON, once=True, tell=told.append)
    assert (len(done.handled), done.failed) == (2, ())
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    begun = [event.checkpoint.name for event in told if event.outcome is None]
    assert begun == ["ckpt-10"]


@pytest.mark.parametrize("ending", ["/hf", "-weights"])
def test_an_output_is_what_the_command_names_and_not_its_directory(run: Path, ending: str) -> None:
    """The watch was killed with its command, which had made a hidden directory for the output, or all of it."""
    command = f"consolidate {{ckpt}} {{out}}{ending} --quiet"
    program = KILLED.replace("consolidate {ckpt} {out} --quiet", command)
    for state, interrupted in (("begun", True), ("done", False)):
        shutil.rmtree(run / "exported", ignore_errors=True)
        shutil.rmtree(run / ".ckptkit-watch", ignore_errors=True)
        subprocess.run([sys.executable, "-c", program, str(run), "done"], check=False)
        output = run / "exported" / f"ckpt-9{ending}"
        assert output.exists()
        if interrupted:
            output.rename(output.with_name(f".{output.name}.ckptkit.tmp"))
        told: list[Event] = []
        done = watch(run, do=command, every=SOON, tries=1, once=True, tell=told.append)
        assert (len(done.handled), done.failed) == (2, ()), state
        assert (output / "model.safetensors").exists()


def test_killed_before_its_command_ran_it_is_done(run: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(run), "begun"], check=False)
    assert not (run / "exported").exists()
    assert len(watch(run, do="consolidate {ckpt} {out} --quiet", every=SOON, once=True).handled) == 2


def test_what_was_there_before_is_not_taken_for_an_output(run: Path) -> None:
    (run / "exported" / "ckpt-9").mkdir(parents=True)
    (run / "exported" / "ckpt-9" / "mine").touch()
    for _ in range(2):
        done = watch(run, do="consolidate {ckpt} {out} --quiet", every=SOON, tries=1, once=True)
        assert [path.name for path in done.failed] == ["ckpt-9"]
    assert (run / "exported" / "ckpt-9" / "mine").exists()


def start(run: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckptkit", "watch", str(run), "--every", "0.05", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> str:
    while not (path.exists() and path.read_text().endswith("\n")):
        time.sleep(0.02)
    return path.read_text()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_ended(pids: list[str]) -> None:
    last = time.monotonic() + 10
    while any(is_alive(int(pid)) for pid in pids):
        assert time.monotonic() < last
        time.sleep(0.02)


def test_a_command_that_outlives_a_killed_watch_keeps_its_checkpoint(run: Path, tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    script = f"echo $$ >> '{begun}'; until test -e '{go}'; do sleep 0.05; done"
    watching = start(run, "--exec", f'sh -c "{script}"')
    wait_for(begun)
    watching.kill()
    watching.wait()
    assert is_handled_by_watch(run / "ckpt-9")
    with pytest.raises(Occupied, match="another watch with the same commands"):
        watch(run, exec=[shell(script)], every=SOON, once=True)
    assert [entry.path.name for entry in prune(run, keep_last=1, yes=True).keep] == ["ckpt-10", "ckpt-9"]
    go.touch()
    while is_handled_by_watch(run / "ckpt-9"):
        time.sleep(0.02)
    assert len(watch(run, exec=[shell(script)], every=SOON, once=True).handled) == 2
    watching.communicate()


def test_a_signal_ends_it_with_its_command(run: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    watching = start(run, "--exec", f"sh -c 'sleep 1000 & echo $! > {begun}; wait'")
    sleeping = int(wait_for(begun))
    watching.terminate()
    out, err = watching.communicate()
    assert (watching.returncode, out) == (143, "")
    assert err.endswith("interrupted\n")
    while is_alive(sleeping):
        time.sleep(0.02)
    assert not is_handled_by_watch(run / "ckpt-9")


def test_a_signal_leaves_no_half_output(tmp_path: Path) -> None:
    save_alone({"model": {f"w{number}": torch.ones(1 << 20) for number in range(64)}}, tmp_path / "run" / "ckpt-1")
    watching = start(tmp_path / "run", "--do", "consolidate {ckpt} {out}")
    out = tmp_path / "run" / "exported"
    while not out.exists():
        time.sleep(0.002)
    watching.terminate()
    watching.communicate()
    assert not (out / "ckpt-1").exists() or len(list((out / "ckpt-1").iterdir())) >= 2
    assert watch(tmp_path / "run", do="consolidate {ckpt} {out}", every=0.05, once=True).is_ok
    assert (out / "ckpt-1" / "model.safetensors").stat().st_size > 64 << 22


def test_it_goes_on_beside_a_training_until_a_signal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    watching = start(run, "--exec", "true")
    assert watching.stdout is not None
    for step in (1, 2):
        save(tmp_path / "hidden", step).rename(run / f"ckpt-{step}")
        assert watching.stdout.readline() == f"ckpt-{step}: handled\n"
    watching.send_signal(signal.SIGINT)
    watching.communicate()
    assert watching.returncode == 130


def test_a_journal_that_is_none_is_refused(run: Path) -> None:
    watch(run, exec=[["true"]], every=SOON, once=True)
    (journal,) = (run / WATCHES).glob("*.json")
    said = json.loads(journal.read_text())
    assert said["commands"] == [["true"]]
    assert said["checkpoints"]["ckpt-9"]["state"] == "done"
    for content in ("", "[]", '{"checkpoints": {"ckpt-9": 1}}', '{"checkpoints": {"ckpt-9": {"state": "x"}}}'):
        journal.write_text(content)
        with pytest.raises(Corrupt, match="not the journal of a watch"):
            watch(run, exec=[["true"]], every=SOON, once=True)


@pytest.mark.parametrize(
    ("do", "program", "message"),
    [
        ((), (), "no command to run was passed"),
        ("consolidate {chkpt} out", (), "`{chkpt}` in `consolidate {chkpt} out` is not a known placeholder"),
        ("consolidate run out", (), "`consolidate run out` does not name the checkpoint"),
        ("consolidate '{ckpt}", (), "cannot be split into words"),
        ((), "no-such-program {ckpt}", "unknown program `no-such-program`"),
        ((), "", "expected a command, found nothing"),
    ],
)
def test_commands_that_make_no_sense_are_refused(run: Path, do: str, program: str, message: str) -> None:
    with pytest.raises(Usage) as raised:
        watch(run, do=do, exec=program if program or do or "words" not in message else [""], once=True)
    assert message in str(raised.value)


def test_checkpoints_that_are_files_are_handled_too(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    torch.save({"state_dict": {"w": torch.ones(3)}, "global_step": 5}, tmp_path / "run" / "epoch=0-step=5.ckpt")
    done = watch(tmp_path / "run", do="consolidate {ckpt} {out} -q", every=SOON, once=True)
    assert [path.name for path in done.handled] == ["epoch=0-step=5.ckpt"]
    assert (tmp_path / "run" / "exported" / "epoch=0-step=5" / "model.safetensors").is_file()


def test_what_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="no such directory"):
        watch(tmp_path / "none", exec="true", once=True)
    with pytest.raises(NotACheckpoint, match="a checkpoint, not a run"):
        watch(run / "ckpt-9", exec="true", once=True)
    with pytest.raises(Usage, match="only in local directories and on s3://"):
        watch("gs://bucket/run", exec="true", once=True)
