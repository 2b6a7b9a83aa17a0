"""Watch a run, and handle each checkpoint once when it is complete, while training and prune continue."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, candidate_paths_in_run, sorted_checkpoints_with_step
from ckptkit.errors import IOFailure, NotACheckpoint, Occupied, Usage, translate_os_errors
from ckptkit.io.allocation import make_directory
from ckptkit.io.claims import find_claim_object
from ckptkit.io.destination import to_destination
from ckptkit.io.path import drop_cached_listing, is_remote
from ckptkit.plugins.watch.journal import HandledRecord, WatchJournal
from ckptkit.plugins.watch.run_commands import Final, WatchCommand
from ckptkit.plugins.watch.stability import FileSnapshot, StabilityWait
from ckptkit.runs.run_backend import (
    RunBackend,
    WatchLease,
    open_run_backend,
    refuse_checkpoint_as_run,
    uncached_path_of,
)
from ckptkit.summary import Summarized
from ckptkit.trainers import find_step_of_path, name_without_suffixes
from ckptkit.words import count

DAY = 86400.0  # seconds
_OUT = "exported"  # the output directory inside the run

Outcome = Literal["handled", "failed", "missed"]
Words = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Event:
    """Progress of a watch as text: the outcome of a checkpoint, or None while it is being handled."""

    checkpoint: Path
    outcome: Outcome | None
    message: str


Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Watched(Summarized):
    """The checkpoints of the run `root` by outcome.

    This watch `handled` them, or a command `failed`; the `missed` ones were deleted before they were handled. An
    earlier watch handled the checkpoints in `before`. `reasons` maps each failed checkpoint to the command that failed
    and the cause.
    """

    root: Path
    handled: tuple[Path, ...]
    failed: tuple[Path, ...]
    missed: tuple[Path, ...]
    before: tuple[Path, ...]
    reasons: Mapping[Path, str] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return not self.failed

    def summary(self) -> Iterator[str]:
        parts = [
            f"handled {count(len(self.handled), 'checkpoint')}",
            f"{len(self.failed)} failed" if self.failed else "",
            f"{len(self.missed)} deleted before" if self.missed else "",
            f"{len(self.before)} handled before" if self.before else "",
        ]
        yield ", ".join(filter(None, parts))


def watch(
    run: Source,
    *,
    do: Words | Sequence[Words] = (),
    exec: Words | Sequence[Words] = (),  # noqa: A002 - the option's name
    out: str | Path | None = None,
    every: float = 30.0,
    tries: int = 3,
    timeout: float = DAY,
    once: bool = False,
    tell: Listener | None = None,
) -> Watched:
    """Handle every checkpoint of the run at `run` once, the oldest first: existing and new ones.

    `do` are commands of ckptkit and `exec` other programs, one or several, each a command line (split as by a shell) or
    a list of words. They run one after the other, in their own processes and without a shell. The placeholders
    `{ckpt}`, `{name}`, `{step}` and `{out}` become the checkpoint's path, its name, its step, and a path for the
    output: the checkpoint's name in directory `out`, or in `exported` of the run. `{prev}` becomes the path of the
    previously handled checkpoint; commands with `{prev}` are skipped for the first checkpoint.

    A checkpoint is handled when it is complete and has not changed for `every` seconds; the watch also checks the run
    every `every` seconds. No prune and no `Run` deletes a checkpoint while it is handled. A command that runs longer
    than `timeout` seconds is terminated with its children, and counts as failed; pass `math.inf` for no limit. A failed
    command is retried, after a pause of `every` seconds that doubles each time, up to `tries` attempts. The journal in
    `.ckptkit-watch` of the run records the handled checkpoints; for a run on S3 it is in the cache of this machine. The
    next watch retries checkpoints that failed, and handles a checkpoint that was saved again as a new one.

    With `once`, returns when all existing checkpoints have been handled or given up; without it, never returns. Raises
    `NotACheckpoint` if the directory is missing, `Usage` for invalid commands, `Occupied` if a watch with the same
    commands is running.
    """
    commands = [*(WatchCommand.parse(one, is_ours=True) for one in as_command_list(do))]
    commands += [WatchCommand.parse(one, is_ours=False) for one in as_command_list(exec)]
    if not commands:
        raise Usage("no command to run was passed", hint="pass --do 'consolidate {ckpt} {out}', or --exec")
    if not (every > 0 and timeout > 0) or tries < 1:
        raise Usage("expected --every and --timeout of more than 0 seconds, and --tries of 1 or more")
    root = uncached_path_of(run).absolute()
    keeper = open_run_backend(root)
    keeper.drop_cached_listings()
    with translate_os_errors(root):
        if not keeper.run_exists():
            raise NotACheckpoint("no such directory", path=root, hint="make the directory first if the run is new")
        refuse_checkpoint_as_run(root)
    output_directory = root / _OUT if out is None else to_destination(out).resolve()
    description = {
        "commands": [list(one.words) for one in commands],
        "out": _OUT if out is None else str(output_directory),
    }
    key = hashlib.sha256(json.dumps(description).encode()).hexdigest()[:12]
    with keeper.watching(key, max_handling_seconds=timeout * len(commands)) as post:
        journal, listener = WatchJournal.of(post.folder, key, description), tell or (lambda _event: None)
        stability = StabilityWait(every)
        watcher = Watcher(keeper, post, journal, commands, output_directory, every, tries, timeout, listener, stability)
        return watcher.run_once() if once else watcher.run_forever()


def as_command_list(commands: Words | Sequence[Words]) -> list[Words]:
    return [commands] if isinstance(commands, str) else list(commands)


@dataclass(slots=True)
class Watcher:
    """A running watch. The outputs are below `place`; `every` and `timeout` are in seconds.

    Between two checks it knows the last outcome of each checkpoint, and when it is due.
    """

    keeper: RunBackend
    post: WatchLease
    journal: WatchJournal
    commands: Sequence[WatchCommand]
    place: Path
    every: float
    tries: int
    timeout: float
    tell: Listener
    stability: StabilityWait
    _outcomes: dict[str, Event] = field(default_factory=dict)
    _failures: dict[str, list[int]] = field(default_factory=dict)  # save time (ns) at each failed attempt
    _due: dict[str, float] = field(default_factory=dict)  # when a failed one is retried, by the monotonic clock
    _waiting: set[str] = field(default_factory=set)  # complete but not handled yet

    @property
    def root(self) -> Path:
        return self.keeper.root

    def run_forever(self) -> NoReturn:
        while True:
            try:
                self.poll_once()
            except IOFailure as error:  # retry at the next check: a file server may come back
                self.tell(Event(error.path or self.root, None, f"{error.message}; the watch goes on"))
            time.sleep(self.seconds_until_next_check())

    def run_once(self) -> Watched:
        """Handle the existing checkpoints. Checks complete ones twice, because they may still be written."""
        existing = {path.name for path in candidate_paths_in_run(self.root)}
        before = {name for name in existing if (entry := self.journal.entries.get(name)) and entry.state == "done"}
        polls = 0
        while True:
            is_restless = self.poll_once(existing)
            polls += 1
            if not self._due and (polls > 1 or not is_restless):
                break
            time.sleep(self.seconds_until_next_check())
        for name in sorted(self._waiting):
            self.tell(Event(self.root / name, None, "still being written: left for the next time"))
        failed = self.checkpoints_with("failed")
        return Watched(
            self.root,
            self.checkpoints_with("handled"),
            failed,
            self.checkpoints_with("missed"),
            tuple(self.root / name for name in sorted(before - self._outcomes.keys())),
            {path: self._outcomes[path.name].message for path in failed},
        )

    def checkpoints_with(self, outcome: Outcome) -> tuple[Path, ...]:
        return tuple(event.checkpoint for event in self._outcomes.values() if event.outcome == outcome)

    def seconds_until_next_check(self) -> float:
        soonest = min(self._due.values(), default=math.inf) - time.monotonic()
        return min(self.every, max(soonest, 0.01))

    def poll_once(self, names: AbstractSet[str] | None = None) -> bool:
        """Handle the checkpoints that are ready; return whether complete ones may still be written.

        Raises `IOFailure` if a checkpoint cannot be inspected, after the others are done.
        """
        self.post.require_unmoved_run()
        self.keeper.drop_cached_listings()
        now_ns = self.post.now_ns()
        candidates = [path for path in candidate_paths_in_run(self.root) if names is None or path.name in names]
        for name in sorted(self._waiting - {path.name for path in candidates}):
            self.record_missed(name)
        is_restless = False
        ready: dict[Checkpoint, FileSnapshot] = {}
        failures: list[IOFailure] = []
        for path in candidates:
            try:
                checkpoint, snapshot = Checkpoint.at(path), FileSnapshot.try_take(path)
                if (
                    snapshot is None
                    or checkpoint.step_in_name is None
                    or self.has_no_work_left(checkpoint, snapshot)
                    or not checkpoint.is_complete
                ):
                    continue
            except IOFailure as error:
                failures.append(error)
                continue
            self._waiting.add(checkpoint.name)
            if not self.stability.has_been_stable(checkpoint.name, snapshot, now_ns):
                is_restless = True
            elif self._due.get(checkpoint.name, 0) <= time.monotonic():
                ready[checkpoint] = snapshot
        for checkpoint in sorted_checkpoints_with_step(ready):
            is_restless |= not self.handle_checkpoint(checkpoint, ready[checkpoint])
        if failures:
            raise failures[0]
        return is_restless

    def has_no_work_left(self, checkpoint: Checkpoint, snapshot: FileSnapshot) -> bool:
        """Return whether no work is left on a checkpoint since it was last saved."""
        if self._failures.get(checkpoint.name, []).count(snapshot.saved_ns) >= self.tries:
            return True
        entry = self.journal.entries.get(checkpoint.name)
        if entry is None or entry.state != "done":
            return False
        # prune may keep only the weights of a handled checkpoint, whose save time then differs
        return snapshot.saved_ns == entry.saved_ns or (checkpoint.is_weights_only and not entry.is_weights_only)

    def handle_checkpoint(self, checkpoint: Checkpoint, snapshot: FileSnapshot) -> bool:
        """Handle a checkpoint, protect it meanwhile, and record the outcome. Returns False if it has changed."""
        self._due.pop(checkpoint.name, None)
        try:
            self.post.protect(checkpoint.path)
        except Occupied as error:
            self._due[checkpoint.name] = time.monotonic() + self.every
            self.tell(Event(checkpoint.path, None, f"{error.message}: will try again later"))
            return True
        try:
            is_there = checkpoint.path.exists()
            if is_there and FileSnapshot.try_take(checkpoint.path) != snapshot:
                return False
            failure = self.run_commands(checkpoint, snapshot.saved_ns) if is_there else None
        finally:
            self.post.unprotect()
        if not is_there or (failure and not checkpoint.path.exists()):
            self.record_missed(checkpoint.name)
        elif failure:
            self.record_failure(checkpoint.name, snapshot.saved_ns, failure)
        else:
            self.record_outcome(checkpoint.name, "handled", "handled")
        return True

    def run_commands(self, checkpoint: Checkpoint, saved_ns: int) -> str | None:
        """Run the remaining commands for a checkpoint. Returns the failure, None if there was none."""
        name = checkpoint.path.stem if checkpoint.path.is_file() else checkpoint.name
        out = self.place / name
        prev = self.find_previous_handled(checkpoint)
        values = {"ckpt": str(checkpoint.path), "name": name, "step": str(checkpoint.step_in_name), "out": str(out)}
        values["prev"] = "" if prev is None else str(prev)
        entry = self.journal.entries.get(checkpoint.name)
        if entry is None or saved_ns != entry.saved_ns:
            entry = HandledRecord("waiting", saved_ns, is_weights_only=checkpoint.is_weights_only)
        for number, command in enumerate(self.commands):
            if number < entry.commands_done:
                continue
            if "prev" in command.placeholders and prev is None:
                self.tell(Event(checkpoint.path, None, f"skipped, no checkpoint was handled before: {command}"))
            elif not killed_command_made_output(entry, output := find_output(command, values, out)):
                # recorded first: after a kill, `killed_command_made_output` compares the output with it
                before = None if output is None else find_file_identity(output)
                entry = replace(entry, state="begun", commands_done=number, out_before=before)
                self.write_record(checkpoint.name, entry)
                if "out" in command.placeholders:
                    make_directory(out.parent)
                self.tell(Event(checkpoint.path, None, str(command)))
                failure = command.run_command(values, self.post.lock, self.timeout)
                if failure:
                    self.write_record(checkpoint.name, replace(entry, state="failed", out_before=None))
                    return type(failure)(f"{command}: {failure}")
            is_last = number + 1 == len(self.commands)
            state = "done" if is_last else "waiting"
            entry = replace(entry, state=state, commands_done=number + 1, out_before=None)
            self.write_record(checkpoint.name, entry)
        return None

    def find_previous_handled(self, checkpoint: Checkpoint) -> Path | None:
        """Return the last handled checkpoint before this one, even if it was deleted since; None if there is none."""
        steps: dict[Path, int] = {}
        for name in (name for name, entry in self.journal.entries.items() if entry.state == "done"):
            step = int(name) if name.isdecimal() else find_step_of_path(Path(name_without_suffixes(name)))
            if step is not None:
                steps[self.root / name] = step
        limit = -1 if checkpoint.step_in_name is None else checkpoint.step_in_name
        before = [path for path, step in steps.items() if step < limit]
        return max(before, key=lambda path: steps[path], default=None)

    def write_record(self, name: str, entry: HandledRecord) -> None:
        """Write to the journal, unless the run was moved: the old path must not be created again."""
        self.post.require_unmoved_run()
        self.journal.write_record(name, entry)

    def record_failure(self, name: str, saved_ns: int, failure: str) -> None:
        """Record a failed attempt, and schedule a retry or give up."""
        failures = self._failures.setdefault(name, [])
        failures.append(saved_ns)
        count = failures.count(saved_ns)
        if count >= self.tries or isinstance(failure, Final):
            self.record_outcome(name, "failed", f"given up after {count} {'try' if count == 1 else 'tries'}: {failure}")
            return
        pause = self.every * 2 ** (count - 1)
        self._due[name] = time.monotonic() + pause
        self.tell(Event(self.root / name, None, f"{failure}; the next try is in {pause:g} s"))

    def record_missed(self, name: str) -> None:
        """Record that a checkpoint was deleted before it was handled."""
        entry = self.journal.entries.get(name)
        self.write_record(name, HandledRecord("missed", entry.saved_ns if entry else 0))
        self.record_outcome(name, "missed", "deleted before it was handled")

    def record_outcome(self, name: str, outcome: Outcome, message: str) -> None:
        self._due.pop(name, None)
        self._waiting.discard(name)
        self._outcomes[name] = Event(self.root / name, outcome, message)
        self.tell(self._outcomes[name])


def find_output(command: WatchCommand, values: Mapping[str, str], out: Path) -> Path | None:
    """Return the output of a command of ckptkit, its last argument that begins with `{out}`; else None."""
    words = [word for word in command.fill(values) if word.startswith(values["out"])]
    return out.parent / (out.name + words[-1].removeprefix(values["out"])) if command.is_ours and words else None


def killed_command_made_output(entry: HandledRecord, output: Path | None) -> bool:
    """Return whether a command made its output although the watch was killed while it ran.

    A command of ckptkit writes its output atomically, so a new output is complete.
    """
    return entry.state == "begun" and output is not None and find_file_identity(output) not in (None, entry.out_before)


def find_file_identity(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a file or directory; None if it does not exist.

    A replacement has a different pair. In a store, the first number is a hash of the files at the path, and an
    unfinished upload counts as missing.
    """
    if not is_remote(path):
        with translate_os_errors(path):
            try:
                state = path.lstat()
            except FileNotFoundError:
                return None
            return state.st_ino, state.st_mtime_ns
    drop_cached_listing(path)
    snapshot = FileSnapshot.try_take(path) if path.exists() and not find_claim_object(path) else None
    if snapshot is None:
        return None
    digest = hashlib.blake2b(repr(snapshot.files).encode(), digest_size=6).digest()
    return int.from_bytes(digest), snapshot.changed_ns
