"""Scenes in a store: a writing to a bucket of its own, and what readers make of what stands there after a fault.

A store cannot swap two prefixes: where a writing replaces an old checkpoint, that is gone before the new one is there.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from s3fs import S3FileSystem
from torch.distributed.checkpoint.api import CheckpointException

from tests.faults.originals import bits
from tests.faults.server import Ended, Server
from tests.faults.store_writings import MODULES, StoreWriting, make_state
from tests.faults.subjects import Leaves, read_dcp
from tests.s3 import S3, Fault, Request, serve_moto

Objects = Mapping[str, bytes]  # content by name
CLAIM = ".ckptkit-upload"  # begins the names of claims and notes
MARKS = {"dcp": ".metadata", "hf": "config.json", "pt": ""}
DATA = (".distcp", ".safetensors", ".pt")  # ends the names of what must be whole wherever it is seen
OLD, NEW = 1, 2
_TRIES_ONCE = {"AWS_MAX_ATTEMPTS": "1"}  # so that a store that stays away is given up soon
_TIMEOUT = 60.0
_NUMBERS = count()


@dataclass(slots=True)
class StoreStage:
    """A store behind its proxy, a server whose children write to it, and the sources in directory `root`.

    `known` is what readers have said of contents that were there before.
    """

    s3: S3
    server: Server
    root: Path
    files: Any
    known: dict[str, str] = field(default_factory=dict)

    def call(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self.files.call_s3(operation, **arguments)
        return answer


@cache
def stage() -> StoreStage:
    """The stage of this process; it ends with it."""
    root = Path(tempfile.mkdtemp(prefix="store-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    closing = ExitStack()
    atexit.register(closing.close)
    s3 = closing.enter_context(serve_moto(root, least_part=1))
    server = closing.enter_context(Server(*MODULES))
    direct = f"http://127.0.0.1:{s3.upstream}"
    files = S3FileSystem(
        endpoint_url=direct,
        key=s3.env["AWS_ACCESS_KEY_ID"],
        secret=s3.env["AWS_SECRET_ACCESS_KEY"],
        client_kwargs={"region_name": "us-east-1"},
        skip_instance_cache=True,
    )
    for seed in (OLD, NEW):
        ended = server.run("tests.faults.store_writings:make_source", [str(root / str(seed)), str(seed)])
        assert ended.code == 0, ended
    return StoreStage(s3, server, root, files)


@dataclass(frozen=True)
class StoreScene:
    """A writing to an empty place in a store, or over an old checkpoint."""

    writing: StoreWriting
    is_over: bool
    stage: StoreStage

    @property
    def name(self) -> str:
        return "over an old one" if self.is_over else "fresh"

    @cached_property
    def old(self) -> Objects:
        """What is there before."""
        return self._made(OLD) if self.is_over else {}

    @cached_property
    def new(self) -> Objects:
        """What is there after a writing that nothing came to."""
        return self._made(NEW)

    @cached_property
    def requests(self) -> int:
        """How many requests a writing makes that nothing comes to."""
        with self.lay() as place:
            ended = place.run()
            assert ended.code == 0, ended
            return len(place.asked)

    @cached_property
    def truths(self) -> Mapping[str, Leaves]:
        """What the format's own reader finds in the old checkpoint and in the new one."""
        found = {"new": self.new, **({"old": self.old} if self.is_over else {})}
        return {name: read(self.writing.format, objects) for name, objects in found.items()}

    def _made(self, seed: int) -> Objects:
        with Place.make(replace(self, is_over=False)) as place:
            ended = place.run(seed=seed)
            assert ended.code == 0, ended
            objects = place.objects()
        found = {bits(one) for one in read(self.writing.format, objects).values() if isinstance(one, torch.Tensor)}
        missing = {name for name, tensor in make_state(seed).items() if bits(tensor) not in found}
        assert not missing, f"{self.writing.subject} does not write {missing}"
        return objects

    def lay(self) -> Place:
        """Return a bucket as it is before the writing."""
        place = Place.make(self)
        for name, content in self.old.items():
            self.stage.call("put_object", Bucket=place.bucket, Key=place.key(name), Body=content)
        return place


@dataclass(slots=True)
class Place:
    """A bucket with one checkpoint, old, new or none; a context manager that removes it."""

    scene: StoreScene
    bucket: str

    @classmethod
    def make(cls, scene: StoreScene) -> Place:
        bucket = f"bucket-{os.getpid()}-{next(_NUMBERS)}"
        scene.stage.call("create_bucket", Bucket=bucket)
        return cls(scene, bucket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        call = self.scene.stage.call
        for upload in self.uploads():
            call("abort_multipart_upload", Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        for key in self._keys():
            call("delete_object", Bucket=self.bucket, Key=key)
        call("delete_bucket", Bucket=self.bucket)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/run/ckpt-5{self.scene.writing.suffix}"

    def key(self, name: str) -> str:
        base = f"run/ckpt-5{self.scene.writing.suffix}"
        return f"{base}/{name}" if name and not self.scene.writing.suffix else f"{base}{name}"

    # -- writing -------------------------------------------------------------------------------------------------------

    def run(self, fault: Fault | None = None, *, is_again: bool = False, seed: int = NEW) -> Ended:
        """Write, with a fault or without one; `is_again` if it was called before."""
        stage, writing = self.scene.stage, self.scene.writing
        more = writing.over if self.scene.is_over else writing.again if is_again else ()
        names = {"src": str(stage.root / str(seed)), "out": self.url, "room": str(stage.root), "seed": str(seed)}
        words = [word.format(**names) for word in (*writing.words, *more)]
        self.clear()
        if fault is not None:
            stage.s3.faults.append(fault)
        env = stage.s3.env | (_TRIES_ONCE if fault and fault.times > 1 else {})
        self._pid_file.unlink(missing_ok=True)
        try:
            return stage.server.run(writing.target, [str(self._pid_file), *words], env=env, timeout=_TIMEOUT)
        finally:
            stage.s3.faults.clear()

    def kill(self) -> None:
        """Kill the writing, with all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(int(self._pid_file.read_text()), signal.SIGKILL)

    @property
    def _pid_file(self) -> Path:
        return self.scene.stage.root / "pid"

    def clear(self) -> None:
        """Forget what was asked."""
        self.scene.stage.s3.requests.clear()
        self.scene.stage.s3.done.clear()

    @property
    def asked(self) -> list[Request]:
        return self.scene.stage.s3.requests

    def sent(self) -> dict[str, int]:
        """Bytes of each piece of a file that the store has taken since the last writing began, by its request.

        A piece is the same in another upload of its file.
        """
        taken = [one for one in self.scene.stage.s3.done if is_data(one)]
        return {re.sub(r"uploadId=[^&]*&?", "", one.what): one.sent for one in taken}

    # -- what stands there ---------------------------------------------------------------------------------------------

    def _keys(self) -> list[str]:
        found = self.scene.stage.call("list_objects_v2", Bucket=self.bucket)
        return [one["Key"] for one in found.get("Contents", ())]

    def uploads(self) -> list[Mapping[str, Any]]:
        """The uploads that were begun, and neither completed nor aborted."""
        found: list[Mapping[str, Any]] = self.scene.stage.call("list_multipart_uploads", Bucket=self.bucket).get(
            "Uploads", []
        )
        return found

    def everything(self) -> Objects:
        """All objects in the bucket, by what comes after the checkpoint's own name."""
        base = self.key("")
        read_object = self.scene.stage.files.cat_file
        return {key.removeprefix(base).removeprefix("/"): read_object(f"{self.bucket}/{key}") for key in self._keys()}

    def objects(self) -> Objects:
        """The objects of the checkpoint."""
        return {name: content for name, content in self.everything().items() if not name.startswith(CLAIM)}

    def leavings(self) -> list[str]:
        """What an upload has left that is no part of the checkpoint."""
        claims = [name for name in self.everything() if name.startswith(CLAIM)]
        return sorted([*claims, *(f"upload of {one['Key']}" for one in self.uploads())])

    def stands(self) -> str:
        """`absent`, `old`, `new`, `half` (seen and not whole) or `wrong` (read as if it were whole).

        Two readers say so, ours and the format's own; and every file of data that can be seen has to be whole.
        """
        everything = self.everything()
        name = digest(everything)
        known = self.scene.stage.known
        if name not in known:
            known[name] = self._ask_readers(everything)
        return known[name]

    def _ask_readers(self, everything: Objects) -> str:
        scene = self.scene
        objects = {name: content for name, content in everything.items() if not name.startswith(CLAIM)}
        wholes = {(name, content) for one in (scene.old, scene.new) for name, content in one.items()}
        is_torn = any(item not in wholes for item in objects.items() if item[0].endswith(DATA) or scene.writing.suffix)
        is_seen = MARKS[scene.writing.format] in objects
        try:
            found = read(scene.writing.format, objects)
        except (Exception, CheckpointException):  # noqa: BLE001 - of whichever library
            return "half" if is_torn or is_seen else self._ask_ours("absent", objects)
        read_as = next((name for name, truth in scene.truths.items() if are_same(found, truth)), "wrong")
        return "half" if is_torn and read_as != "wrong" else self._ask_ours(read_as, objects)

    def _ask_ours(self, said: str, objects: Objects) -> str:
        """Return what the other reader said, or that ours disagrees."""
        if not self.scene.writing.is_ours or said == "wrong":
            return said
        whole_names = [one.keys() for one in (self.scene.old, self.scene.new) if one]
        for how in ([], ["--fast"]):
            ended = self.scene.stage.server.run(
                *("ckptkit", ["verify", self.url, *how]), env=self.scene.stage.s3.env, timeout=_TIMEOUT
            )
            is_alike = (ended.code == 0) == (said != "absent")
            # a model without its config, which comes last, is a checkpoint for ours
            has_data = any(objects.keys() >= {name for name in names if name.endswith(DATA)} for names in whole_names)
            is_excused = said == "absent" and has_data
            if not is_alike and not is_excused:
                return f"{said} for its own reader, but verify {' '.join(how)} ended with {ended.code}: {ended.out}"
        return said


def is_data(request: Request) -> bool:
    """Whether a request sends bytes of a file."""
    return request.what.startswith("PUT") and CLAIM not in request.what and request.sent > 0


def digest(objects: Objects) -> str:
    """What tells contents from others; of claims the names only."""
    found = blake2b(digest_size=16)
    for name, content in sorted(objects.items()):
        found.update(f"{name} {len(content)} ".encode() + (b"" if name.startswith(CLAIM) else content))
    return found.hexdigest()


def are_same(found: Leaves, expected: Leaves) -> bool:
    """Whether all tensors are the same, bit for bit."""
    one, other = (
        {name: bits(tensor) for name, tensor in leaves.items() if isinstance(tensor, torch.Tensor)}
        for leaves in (found, expected)
    )
    return one == other


def read(form: str, objects: Objects) -> Leaves:
    """Return what the format's own reader finds in these files: torch's, or transformers'."""
    with tempfile.TemporaryDirectory(prefix="read-") as home:
        for name, content in objects.items():
            path = Path(home, "ckpt", name) if name else Path(home, "ckpt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return READERS[form](Path(home, "ckpt"))


def read_hf(root: Path) -> Leaves:
    """The weights as transformers loads them. Raises `ValueError` if it makes up some."""
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(root, output_loading_info=True)
    if any(told.values()):
        raise ValueError(f"transformers did not load all: {told}")
    return dict(model.state_dict())


READERS: dict[str, Callable[[Path], Leaves]] = {
    "dcp": lambda root: read_dcp(root, Ended(0, "", "", 0, 0)),
    "hf": read_hf,
    "pt": lambda path: dict(torch.load(path)["model"]),
}
