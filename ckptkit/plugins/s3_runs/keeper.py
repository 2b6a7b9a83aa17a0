"""Keep a run on S3, without locks or renames: objects mark that a checkpoint is claimed, pinned or watched.

A deletion claims the checkpoint as an upload does, so that the two exclude each other. Then it checks for pins and
watches. A pin or a watch is written first and then checks for a claim, so of two concurrent operations at least one
sees the other. A deletion removes first the files that make a checkpoint visible, and last its claim. Several processes
may delete the same checkpoint together.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, candidate_paths_in_run
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.run import local_directory_of_run
from ckptkit.errors import (
    CkptError,
    Corrupt,
    IOFailure,
    Mismatch,
    NotACheckpoint,
    Occupied,
    Unsupported,
    translate_os_errors,
)
from ckptkit.io.claims import StoreClaim, find_claim
from ckptkit.io.destination import CLAIM
from ckptkit.io.disk import make_directories, warn_of_lost_guarantee
from ckptkit.io.file import list_children, read_small
from ckptkit.io.path import RemotePath, drop_cached_listing, is_remote
from ckptkit.io.stores.s3 import S3Store
from ckptkit.io.stores.s3_errors import DENIED, TAKEN, error_code_of
from ckptkit.models.companions import CONFIG
from ckptkit.plugins.s3_runs.objects import delete_batch, find_claim_at, in_batches, read_store_or_local_clock
from ckptkit.runs.deletion import PINS, WATCHES, is_pinned, locked_watch, require_unmoved_run
from ckptkit.runs.run_backend import WatchLease, reasons_to_keep, require_complete_checkpoint
from ckptkit.words import command_line

_PATIENCE = 10.0  # seconds to wait for a concurrent deletion to end
_PAUSE = 0.5  # seconds between two checks
_HOLD = ".hold"  # suffix of the object with which a watch protects a checkpoint
_LIMIT = 1 << 12  # bytes of such an object


class S3Keeper:
    """The backend for the run at `root`, a prefix of a bucket."""

    def __init__(self, root: RemotePath) -> None:
        self.root = root
        self.bucket = S3Store(str(root.store_root))
        self._half_deleted: set[Path] = set()

    def drop_cached_listings(self) -> None:
        drop_cached_listing(self.root)

    def run_exists(self) -> bool:
        """Return True: a prefix needs no directory."""
        return True

    @contextmanager
    def pruning(self) -> Iterator[None]:
        """Allow deletions, also in several processes: each checkpoint is claimed separately."""
        self.drop_cached_listings()
        yield

    def delete_checkpoint(self, checkpoint: Path, *, by_trainer: bool = False) -> tuple[str, ...]:
        """Delete a checkpoint unless something protects it, such as an upload that has claimed it.

        Returns the reasons why it was kept; empty if it was deleted.
        """
        claim = self._claim_for_deletion(checkpoint)
        if claim is None:
            is_reused = bool(self.bucket.list_objects(f"{remote_key_of(checkpoint)}/"))
            return ("another process finished its deletion, and new files are there",) if is_reused else ()
        if not claim.is_deletion:
            return (f"an {claim.describe()}",)
        self.drop_cached_listings()
        if reasons := self.find_protections(checkpoint, by_trainer=by_trainer):
            self._drop_claim(checkpoint)
            return reasons
        keys = self._object_keys_until_claim(checkpoint)
        try:
            self._delete_objects(checkpoint, keys)
        except IOFailure:
            with suppress(IOFailure):  # the cause of the failure may also prevent this request
                self.drop_cached_listings()
                if Checkpoint.at(checkpoint).is_complete:
                    self._drop_claim(checkpoint)
            raise
        finally:
            self.drop_cached_listings()
        return ()

    def unfinished_deletions(self) -> dict[Path, str]:
        """Return the directories with an unfinished deletion that are no longer complete, with the reason."""
        interrupted: dict[Path, str] = {}
        for path in candidate_paths_in_run(self.root):
            claim = find_claim(path)
            is_claimed = claim is not None and claim.is_deletion
            if is_claimed and not Checkpoint.at(path).is_complete and not self._has_files_added_during_deletion(path):
                interrupted[path] = "its deletion did not finish"
        self._half_deleted |= interrupted.keys()
        return interrupted

    def find_other_process_work(self, checkpoint: Path) -> str | None:
        """Return a description of an upload that works on a directory; None if there is none.

        Files that were added after a deletion began also count as an upload.
        """
        claim = find_claim(checkpoint)
        if claim is None:
            return None
        if not claim.is_deletion:
            return f"an {claim.describe()}"
        is_reused = not Checkpoint.at(checkpoint).is_complete and self._has_files_added_during_deletion(checkpoint)
        return f"files were added after its deletion began, {claim.started}" if is_reused else None

    def find_protections(self, checkpoint: Path, *, by_trainer: bool = False) -> tuple[str, ...]:
        """Return the pins and watches that protect a checkpoint, as of the last refresh."""
        return (*reasons_to_keep(checkpoint, by_trainer=by_trainer), *self._watches_on(checkpoint))

    def pin(self, checkpoint: Path) -> None:
        """Write the pin object, then wait for a deletion that started before it, at most `_PATIENCE` seconds."""
        self.drop_cached_listings()
        require_complete_checkpoint(checkpoint)
        was_pinned = is_pinned(checkpoint)
        self.bucket.call_operation("put_object", self._pin_key(checkpoint), Body=b"")
        try:
            last = time.monotonic() + _PATIENCE
            while self.is_being_deleted(checkpoint):
                if time.monotonic() > last:
                    hint = f"wait for it to end; if it was killed, delete {checkpoint / CLAIM} to keep the checkpoint"
                    raise Occupied("another process is deleting this checkpoint", path=checkpoint, hint=hint)
                time.sleep(_PAUSE)
            self.drop_cached_listings()
            require_complete_checkpoint(checkpoint)
        except CkptError:
            if not was_pinned:
                self.unpin(checkpoint)
            raise
        finally:
            self.drop_cached_listings()

    def unpin(self, checkpoint: Path) -> None:
        self.bucket.call_operation("delete_object", self._pin_key(checkpoint))
        self.drop_cached_listings()

    @contextmanager
    def watching(self, key: str, max_handling_seconds: float) -> Iterator[WatchLease]:
        """Lock the file of a watch on this machine, where its journal also is."""
        read_store_or_local_clock(self.bucket)  # fail now if the bucket does not exist, instead of retrying later
        folder = local_directory_of_run(self.root)
        with translate_os_errors(folder):
            make_directories(folder, sync=False)
        with locked_watch(folder, key) as lock:
            post = S3Post(self, folder, key, lock, max_handling_seconds)
            post.unprotect()
            try:
                yield post
            finally:
                with suppress(IOFailure):  # the object expires by itself
                    post.unprotect()

    def is_being_deleted(self, checkpoint: Path) -> bool:
        """Return whether a deletion has claimed a checkpoint, from the store and not from a cache."""
        claim = self._read_claim(checkpoint)
        return claim is not None and claim.is_deletion

    def _claim_for_deletion(self, checkpoint: Path) -> StoreClaim | None:
        """Claim a checkpoint for its deletion. Return the claim that exists then: ours, or another.

        Returns None if only an interrupted deletion was to be finished, and it has been finished in the meantime.
        """
        existing = self._read_claim(checkpoint)
        if existing is None and checkpoint in self._half_deleted:
            return None
        # an interrupted deletion of a checkpoint that is still complete is decided anew
        if existing is not None and not (existing.is_deletion and Checkpoint.at(checkpoint).is_complete):
            return existing
        base = f"{remote_key_of(checkpoint)}/"
        ours = StoreClaim.for_deletion(key.removeprefix(base) for key in self.bucket.list_objects(base))
        try:
            condition = {} if existing else {"IfNoneMatch": "*"}
            self.bucket.call_operation("put_object", self._claim_key(checkpoint), Body=ours.to_bytes(), **condition)
        except IOFailure as error:
            if error_code_of(error) not in TAKEN:
                raise
        # read again: some stores ignore the condition, so another claim may exist
        return self._read_claim(checkpoint) or ours

    def _read_claim(self, checkpoint: Path) -> StoreClaim | None:
        """Return the claim on a checkpoint, from the store and not from a cache."""
        return find_claim_at(self.bucket, self._claim_key(checkpoint))

    def _drop_claim(self, checkpoint: Path) -> None:
        if self.is_being_deleted(checkpoint):
            self.bucket.call_operation("delete_object", self._claim_key(checkpoint))

    def _object_keys_until_claim(self, checkpoint: Path) -> list[str]:
        """Return the keys below a checkpoint that are not newer than its claim, without the claim itself."""
        claim_key = self._claim_key(checkpoint)
        objects = self.bucket.list_objects(f"{remote_key_of(checkpoint)}/")
        if claim_key not in objects:
            return []
        return [
            key for key, stored in objects.items() if key != claim_key and stored.changed <= objects[claim_key].changed
        ]

    def _delete_objects(self, checkpoint: Path, keys: Sequence[str]) -> None:
        """Delete objects: first those that make a checkpoint visible, and the claim last."""
        first = marker_keys_of(checkpoint).intersection(keys)
        rest = [key for key in keys if key not in first]
        for batch in (*in_batches(sorted(first)), *in_batches(rest)):
            if not self.is_being_deleted(checkpoint):  # another process has finished this deletion
                if self.bucket.list_objects(f"{remote_key_of(checkpoint)}/"):
                    hint = f"{command_line('ls', self.root)} shows what is there now"
                    raise Occupied("another process finished this deletion", path=checkpoint, hint=hint)
                return
            delete_batch(self.bucket, batch)
        self._drop_claim(checkpoint)

    def _has_files_added_during_deletion(self, checkpoint: Path) -> bool:
        """Return whether files were added after a deletion began."""
        base = f"{remote_key_of(checkpoint)}/"
        return len(self.bucket.list_objects(base)) > len(self._object_keys_until_claim(checkpoint)) + 1

    def _watches_on(self, checkpoint: Path) -> Iterator[str]:
        """Yield the watches that protect a checkpoint. The object of a watch expires at its `until` time."""
        folder = self.root / WATCHES
        if not folder.is_dir():
            return
        for path in list_children(folder):
            if path.suffix != _HOLD:  # files of a local watch that were copied with the run
                continue
            try:
                note = json.loads(read_small(path, _LIMIT))
                name, host, until = note["checkpoint"], note["host"], float(note["until"])
            except (TypeError, ValueError, KeyError) as error:
                message = "expected the record of a watch, found other data"
                raise Corrupt(message, path=path, hint="delete this object") from error
            if name == checkpoint.name and read_store_or_local_clock(self.bucket) < until:
                yield f"a watch on {host} is handling it"

    def _claim_key(self, checkpoint: Path) -> str:
        return f"{remote_key_of(checkpoint)}/{CLAIM}"

    def _pin_key(self, checkpoint: Path) -> str:
        return f"{remote_key_of(self.root / PINS)}/{checkpoint.name}"


@dataclass(slots=True)
class S3Post:
    """The lease of the watch `key`: an object in the run names the protected checkpoint for `longest` seconds."""

    keeper: S3Keeper
    home: Path
    key: str
    lock: int
    longest: float
    can_hold: bool = True

    @property
    def folder(self) -> Path:
        return self.home / WATCHES

    def protect(self, checkpoint: Path) -> None:
        """Write the object, then wait for a deletion that started before it."""
        until = read_store_or_local_clock(self.keeper.bucket) + self.longest
        content = json.dumps({"checkpoint": checkpoint.name, "host": socket.gethostname(), "until": until}).encode()
        if self._try_call("put_object", Body=content):
            last = time.monotonic() + _PATIENCE
            while self.keeper.is_being_deleted(checkpoint) and time.monotonic() < last:
                time.sleep(_PAUSE)
        self.keeper.drop_cached_listings()

    def unprotect(self) -> None:
        self._try_call("delete_object")

    def now_ns(self) -> int:
        return int(read_store_or_local_clock(self.keeper.bucket) * 1e9)

    def require_unmoved_run(self) -> None:
        require_unmoved_run(self.lock, self.home, self.key)

    def _try_call(self, operation: str, **arguments: bytes) -> bool:
        """Write or delete the object, and return whether the credentials allow it. Warns once if they do not."""
        if not self.can_hold:
            return False
        name = f"{self.key}-{socket.gethostname()}{_HOLD}"
        try:
            key = f"{remote_key_of(self.keeper.root / WATCHES)}/{name}"
            self.keeper.bucket.call_operation(operation, key, **arguments)
        except IOFailure as error:
            if error_code_of(error) not in DENIED:
                raise
            self.can_hold = False
            message = "the store refuses writes: prune cannot see which checkpoint this watch is handling"
            warn_of_lost_guarantee(self.keeper.root, message)
        return self.can_hold


def marker_keys_of(checkpoint: Path) -> set[str]:
    """Return the keys of the files that make a checkpoint visible: when all of them are gone, no reader finds it.

    They are manifests, config.json, and for each component its metadata files, or all files if it has no metadata.
    """
    paths = {checkpoint / MANIFEST, checkpoint / CONFIG}
    for component in Checkpoint.at(checkpoint).components:
        paths |= {component.path / MANIFEST, component.path / CONFIG}
        # a reader cannot find an unreadable component anyway
        with suppress(Corrupt, Mismatch, NotACheckpoint, Unsupported):
            layout = component.layout
            paths |= {layout.root / name for name in (layout.descriptions or layout.paths)}
    return {remote_key_of(path) for path in paths}


def remote_key_of(path: Path) -> str:
    assert is_remote(path)
    return path.key
