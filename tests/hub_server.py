"""A Hub on loopback: the few calls of huggingface.co that are used, for `huggingface_hub` as it is.

Keeps repositories in a directory, counts what is asked for and what is sent, and fails where it is told to. Large files
are redirected to a second origin, as the real one redirects them to its CDN, which answers nobody who brings a token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests import command, hub_buckets
from tests.hub_storage import Storage

_BLOCK = 1 << 16  # bytes
_LARGE = 10_000_000  # bytes; what is larger goes to LFS whatever it is
_LARGE_NAMES = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".model", ".npz", ".parquet", ".zip")
_DATE = "2026-01-01T00:00:00.000Z"
_ME = "somebody"
_ORGANIZATIONS = ("org",)


@dataclass(frozen=True, slots=True)
class Blob:
    """A file as the Hub tells of it: `oid` is git's, of the file or of its LFS pointer. What is sent lies at `path`."""

    path: Path
    size: int
    oid: str
    sha256: str
    is_lfs: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """The files of a repository at some time, by name."""

    oid: str
    title: str
    files: Mapping[str, Blob]

    def under(self, folder: str, *, recursive: bool) -> dict[str, Blob | None]:
        """The files in a folder by name, and None for each folder in it."""
        start = f"{folder}/" if folder else ""
        found: dict[str, Blob | None] = {}
        for name, blob in sorted(self.files.items()):
            if name.startswith(start):
                parts = name.removeprefix(start).split("/")
                folders = [start + "/".join(parts[:i]) for i in range(1, len(parts))]
                found.update(dict.fromkeys(folders if recursive else folders[:1]))
                if recursive or not folders:
                    found[name] = blob
        return found


@dataclass(slots=True)
class Repository:
    """Commits, oldest first, and what branches point to."""

    private: bool
    commits: dict[str, Commit]
    branches: dict[str, str]

    def at(self, revision: str) -> Commit | None:
        """The commit that a branch or an id means."""
        return self.commits.get(self.branches.get(revision, revision))


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD path" `where` matches, once `skip` have passed.

    With a `status` that is the answer; else, once `after` bytes of the body have gone either way: "drop" the
    connection, "stall" until it may `go` on, or "drop" if that is its kind by then, or "flip" a bit of what follows.
    "mute" does all but answer.
    """

    where: str
    kind: str
    after: int = 0
    status: int = 0
    times: int = 1
    skip: int = 0
    message: str = "as it was told to"
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


class Hub:
    """The server. `served` counts bytes of file content by "org/name/file", `received` uploaded bytes by SHA-256.

    `requests` counts requests by "METHOD path". Files larger than `part_size` are uploaded in parts. A context manager.
    """

    def __init__(self, root: Path, *, part_size: int = 1 << 30, page_size: int = 1000) -> None:
        self.root = root
        self.part_size = part_size
        self.page_size = page_size
        self.token = "hf_" + "x" * 34
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, Blob] = {}  # what was uploaded, by the SHA-256 it was announced with
        self.buckets: dict[str, hub_buckets.Bucket] = {}
        self.storage = Storage(root / "storage")
        self.served: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self.processes: list[subprocess.Popen[str]] = []  # ended with the server, should a test have left them
        self.lock = threading.RLock()
        (root / "objects").mkdir(parents=True)
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self, is_cdn)) for is_cdn in (0, 1)]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    def __enter__(self) -> Self:
        for server in self._servers:
            server.daemon_threads = True
            server.block_on_close = False
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for fault in self.faults:
            fault.go.set()
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                process.communicate()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a process that takes this for the Hub; large files do not go to its storage."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token,
            "HF_HOME": str(self.root / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
        }

    @property
    def storage_env(self) -> dict[str, str]:
        """The environment of a process that sends large files to the storage of this."""
        return {**self.env, "HF_HUB_DISABLE_XET": "0", "HF_XET_CACHE": str(self.root / "xet-cache")}

    def put(
        self, repo_id: str, files: Mapping[str, bytes | Path], *, private: bool = False, revision: str = "main"
    ) -> str:
        """Commit files to a repository, which is made if there is none; gives the commit's id."""
        blobs = {name: self.store(name, content) for name, content in files.items()}
        with self.lock:
            repository = self.repositories.get(repo_id) or self.create(repo_id, private=private)
            head = repository.at(revision) or repository.at("main")
            assert head is not None
            return self.commit(repository, revision, "put", {**head.files, **blobs})

    def claim(self, repo_id: str, name: str, **lies: Any) -> None:
        """Tell of a file something else than what is sent: another `size`, `sha256` or `oid`."""
        head = self.head(repo_id)
        blob = replace(head.files[name], **lies)
        self.commit(self.repositories[repo_id], "main", "claim", {**head.files, name: blob})

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What is in a repository."""
        return {name: blob.path.read_bytes() for name, blob in self.head(repo_id, revision).files.items()}

    def head(self, repo_id: str, revision: str = "main") -> Commit:
        """The newest commit of a branch."""
        commit = self.repositories[repo_id].at(revision)
        assert commit is not None
        return commit

    def fail(self, where: str, kind: str = "status", **how: Any) -> Fault:
        """Make the next requests fail whose "METHOD path" the pattern `where` is found in; see `Fault`."""
        fault = Fault(where, kind, **how)
        self.faults.append(fault)
        return fault

    def next_fault(self, request: str) -> Fault | None:
        """The fault that a request meets."""
        with self.lock:
            for fault in self.faults:
                if fault.times and re.search(fault.where, request):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def create(self, repo_id: str, *, private: bool) -> Repository:
        """Make an empty repository."""
        repository = self.repositories[repo_id] = Repository(private, {}, {})
        self.commit(repository, "main", "initial commit", {".gitattributes": self.store(".gitattributes", b"*.bin\n")})
        return repository

    def commit(self, repository: Repository, branch: str, title: str, files: Mapping[str, Blob]) -> str:
        """Add a commit to a branch."""
        said = repr((title, len(repository.commits), sorted(files.items())))
        oid = hashlib.sha1(said.encode()).hexdigest()
        repository.commits[oid] = Commit(oid, title, dict(files))
        repository.branches[branch] = oid
        return oid

    def store(self, name: str, content: bytes | Path, *, is_lfs: bool = False) -> Blob:
        """Keep a file; one that is given by its path stays where it is."""
        if isinstance(content, Path):
            path, sha256 = content, sum_file(content)
        else:
            sha256 = hashlib.sha256(content).hexdigest()
            path = self.root / "objects" / f"{sha256}-kept"
            path.write_bytes(content)
        size = path.stat().st_size
        with path.open("rb") as file:
            is_lfs = is_lfs or is_large(name, size, file.read(512))
        told = pointer(sha256, size) if is_lfs else path.read_bytes()
        return Blob(path, size, git_oid(told), sha256, is_lfs)


def sum_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_oid(content: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """What lies in git in place of a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def is_large(name: str, size: int, sample: bytes) -> bool:
    """True if a file goes to LFS: by its name, its size, or for not being text."""
    return size > _LARGE or name.endswith(_LARGE_NAMES) or b"\0" in sample


def owner_of(repo_id: str) -> str:
    """Whose repository it is."""
    return repo_id.partition("/")[0]


def describe(name: str, blob: Blob | None, commit: Commit | None) -> dict[str, Any]:
    """A file or folder as a listing shows it, with its last commit if one is given."""
    last = {"lastCommit": {"id": commit.oid, "title": commit.title, "date": _DATE}} if commit else {}
    if blob is None:
        return {"type": "directory", "path": name, "oid": git_oid(name.encode()), "size": 0, **last}
    shown = {"type": "file", "path": name, "oid": blob.oid, "size": blob.size, **last}
    if blob.is_lfs:
        size = len(pointer(blob.sha256, blob.size))
        shown["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": size}
    return shown


class Refused(Exception):
    """An answer that is an error, with the code that `huggingface_hub` goes by."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


class Dropped(Exception):
    """The connection is to be cut without another word."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, hub: Hub, is_cdn: int, *args: Any) -> None:
        self.hub = hub
        self.is_cdn = bool(is_cdn)
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def serve(self) -> None:
        """Answer a request: by the first route that it matches."""
        url = urlsplit(self.path)
        request = f"{self.command} {unquote(url.path)}"
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.fault = None
        with self.hub.lock:
            self.hub.requests[request] += 1
        try:
            self.fault = self.hub.next_fault(request)
            if self.fault and self.fault.status:
                self.body()
                raise Refused(self.fault.status, self.fault.message)
            for method, pattern, answer in CDN if self.is_cdn else ROUTES:
                found = re.fullmatch(pattern, url.path)
                if found and self.command in method.split():
                    answer(self, *(unquote(group or "") for group in found.groups()))
                    return
            self.body()
            raise Refused(404, f"no such call: {request}")
        except Refused as error:
            self.answer({"error": str(error)}, error.status, error.headers)
        except (Dropped, ConnectionError):
            self.close_connection = True
            with suppress(OSError):
                self.connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815

    # what a request holds

    def body(self) -> bytes:
        """All that was sent along."""
        return b"".join(self.blocks())

    def blocks(self) -> Iterable[bytes]:
        """What was sent along, piece by piece, until something goes wrong with it."""
        passed = 0
        for size in self.sizes():
            left = size
            while left:
                block = self.rfile.read(min(left, _BLOCK))
                if not block:
                    raise Dropped
                left -= len(block)
                yield self.meet_fault(block, passed)
                passed += len(block)

    def sizes(self) -> Iterable[int]:
        """Bytes of each chunk that the client sends."""
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            yield int(self.headers.get("Content-Length") or 0)
            return
        while size := int(self.rfile.readline().strip() or b"0", 16):
            yield size
            self.rfile.readline()
        self.rfile.readline()

    def meet_fault(self, block: bytes, passed: int) -> bytes:
        """A block after the fault of this request, if it is where that comes."""
        fault = self.fault
        if fault is None or fault.kind == "mute" or not passed <= fault.after < passed + len(block):
            return block
        fault.reached.set()
        if fault.kind == "stall":
            fault.go.wait()
            if fault.kind == "stall":
                return block
        if fault.kind == "drop":
            raise Dropped
        at = fault.after - passed
        return block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :]

    def asked(self) -> dict[str, Any]:
        """The JSON that was sent along."""
        value: dict[str, Any] = json.loads(self.body() or b"{}")
        return value

    def check_token(self) -> bool:
        """True if whoever asks is known; a wrong token is refused."""
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {self.hub.token}"):
            raise Refused(401, "Invalid credentials in Authorization header")
        return given is not None

    def refusal(self, status: int, message: str, code: str = "") -> Refused:
        """An answer that is an error, to be raised."""
        return Refused(status, message, code)

    def check_owner(self, place_id: str) -> None:
        """Refuse whoever may not write there."""
        if not self.check_token():
            raise Refused(401, "Invalid username or password.")
        if owner_of(place_id) not in (_ME, *_ORGANIZATIONS):
            raise Refused(403, f"You don't have the required permissions to write to {place_id}")

    def find(self, repo_id: str, *, to_write: bool = False) -> Repository:
        """A repository that whoever asks may see."""
        known = self.check_token()
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and not known):
            raise Refused(404 if known else 401, "Repository not found", "RepoNotFound")
        if to_write:
            self.check_owner(repo_id)
        return repository

    def find_commit(self, repo_id: str, revision: str) -> Commit:
        """A commit of a repository that whoever asks may see."""
        commit = self.find(repo_id).at(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # what is answered

    def answer(self, value: Any, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        """JSON."""
        content = json.dumps(value).encode()
        self.begin(status, {"Content-Type": "application/json", **headers}, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def begin(self, status: int, headers: Mapping[str, str], length: int) -> None:
        """Everything before the body."""
        if self.fault and self.fault.kind == "mute":
            raise Dropped
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_file(self, blob: Blob, headers: Mapping[str, str], counted_as: str) -> None:
        """The content of a file, or the range of it that is asked for."""
        size = blob.path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        start, stop = 0, size
        if asked:
            start = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
            stop = min(size, int(asked[2]) + 1) if asked[1] and asked[2] else size
            if start >= size:
                raise Refused(416, "range not satisfiable")
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        self.begin(206 if asked else 200, {"Accept-Ranges": "bytes", **headers}, stop - start)
        if self.command == "HEAD":
            return
        with blob.path.open("rb") as file:
            file.seek(start)
            while start < stop:
                block = file.read(min(_BLOCK, stop - start))
                self.wfile.write(self.meet_fault(block, file.tell() - len(block)))
                start += len(block)
                with self.hub.lock:
                    self.hub.served[counted_as] += len(block)

    # reading

    def whoami(self) -> None:
        """Who is asking."""
        if not self.check_token():
            raise Refused(401, "Invalid username or password.")
        organizations = [{"name": name, "type": "org"} for name in _ORGANIZATIONS]
        self.answer({"type": "user", "id": "1", "name": _ME, "fullname": _ME, "orgs": organizations})

    def info(self, repo_id: str, revision: str) -> None:
        """A repository at a revision, with its files."""
        repository, commit = self.find(repo_id), self.find_commit(repo_id, revision or "main")
        files = []
        for name, blob in sorted(commit.files.items()):
            shown: dict[str, Any] = {"rfilename": name}
            if "blobs" in self.query:
                told = describe(name, blob, None)
                shown |= {"size": blob.size, "blobId": blob.oid}
                if lfs := told.get("lfs"):
                    shown["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
            files.append(shown)
        ids = {"_id": "1", "id": repo_id, "modelId": repo_id, "author": owner_of(repo_id), "sha": commit.oid}
        access = {"private": repository.private, "gated": False, "disabled": False}
        rest = {"tags": [], "downloads": 0, "likes": 0, "lastModified": _DATE, "createdAt": _DATE}
        self.answer({**ids, **access, **rest, "siblings": files})

    def tree(self, repo_id: str, revision: str, folder: str) -> None:
        """The files in a folder, page by page."""
        commit = self.find_commit(repo_id, revision)
        is_deep, with_commit = (self.query.get(name, "").lower() == "true" for name in ("recursive", "expand"))
        found = [
            describe(name, blob, commit if with_commit else None)
            for name, blob in commit.under(folder, recursive=is_deep).items()
        ]
        if folder and not found:
            raise Refused(404, f"{folder} does not exist", "EntryNotFound")
        start = int(self.query.get("cursor", 0))
        stop = start + self.hub.page_size
        path = urlsplit(self.path).path
        more = f"{self.hub.url}{path}?recursive={is_deep}&expand={with_commit}&cursor={stop}"
        self.answer(found[start:stop], headers={"Link": f'<{more}>; rel="next"'} if stop < len(found) else {})

    def paths_info(self, repo_id: str, revision: str) -> None:
        """Some files and folders, those that are there."""
        content = self.body().decode()
        is_json = "json" in self.headers.get("Content-Type", "")
        wanted = json.loads(content) if is_json else parse_qs(content)
        commit = self.find_commit(repo_id, revision)
        everything = commit.under("", recursive=True)
        with_commit = str(wanted.get("expand", ["false"])).lower().strip("[']") == "true"
        names = [name for name in wanted.get("paths", []) if name in everything]
        self.answer([describe(name, everything[name], commit if with_commit else None) for name in names])

    def refs(self, repo_id: str) -> None:
        """The branches."""
        branches = self.find(repo_id).branches
        shown = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in branches.items()]
        self.answer({"branches": shown, "converts": [], "tags": []})

    def resolve(self, repo_id: str, revision: str, name: str) -> None:
        """A file, or where a large one is."""
        commit = self.find_commit(repo_id, revision)
        blob = commit.files.get(name)
        if blob is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.oid}"'}
        if not blob.is_lfs:
            self.send_file(blob, headers, f"{repo_id}/{name}")
            return
        place = f"{self.hub.cdn}/{repo_id}/{commit.oid}/{quote(name)}?Signature=signed"
        linked = {"X-Linked-Size": str(blob.size), "X-Linked-ETag": f'"{blob.sha256}"', "Location": place}
        self.begin(302, headers | linked, 0)

    def content(self, repo_id: str, revision: str, name: str) -> None:
        """A large file, for whoever has its signed URL, and no token."""
        if self.headers.get("Authorization"):
            raise Refused(400, "a token was sent to the CDN")
        commit = self.hub.repositories[repo_id].at(revision)
        assert commit is not None
        self.send_file(commit.files[name], {"ETag": f'"{commit.files[name].sha256}"'}, f"{repo_id}/{name}")

    # writing

    def create(self) -> None:
        """Make a repository."""
        asked, known = self.asked(), self.check_token()
        owner = asked.get("organization") or _ME
        repo_id = f"{owner}/{asked['name']}"
        if not known:
            raise Refused(401, "Invalid username or password.")
        if owner not in (_ME, *_ORGANIZATIONS):
            raise Refused(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        with self.hub.lock:
            is_new = repo_id not in self.hub.repositories
            if is_new:
                self.hub.create(repo_id, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        url = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        self.answer(url if is_new else {**url, "error": "You already created this model repo"}, 200 if is_new else 409)

    def branch(self, repo_id: str, name: str) -> None:
        """Make a branch from the head of main, or from where is asked for."""
        asked, repository = self.asked(), self.find(repo_id, to_write=True)
        if name in repository.branches:
            raise Refused(409, f"Reference already exists: {name}")
        repository.branches[name] = self.find_commit(repo_id, asked.get("startingPoint") or "main").oid
        self.answer({})

    def validate_yaml(self) -> None:
        """Is the metadata of a model card as it should be?"""
        import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

        content = self.asked()["content"]
        found = re.match(r"\A---\n(.*?)\n---\n", content, re.DOTALL)
        if found is None:
            self.answer({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
            return
        kinds: dict[str, Any] = {
            "library_name": str,
            "tags": list,
            "license": str,
            "pipeline_tag": str,
            "base_model": (str, list),
        }
        metadata = yaml.safe_load(found[1])
        wrong = [name for name, value in metadata.items() if not isinstance(value, kinds.get(name, object))]
        errors = [{"message": f'"{name}" has the wrong type'} for name in wrong]
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, repo_id: str, revision: str) -> None:
        """How each file is to be uploaded, and what is there in its place."""
        asked = self.asked()
        self.find(repo_id, to_write=True)
        there = self.find_commit(repo_id, revision).files
        files = []
        for wanted in asked["files"]:
            name, sample = wanted["path"], base64.b64decode(wanted["sample"])
            blob = there.get(name)
            oid = blob and (blob.sha256 if blob.is_lfs else blob.oid)
            mode = "lfs" if is_large(name, wanted["size"], sample) else "regular"
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer({"files": files})

    def batch(self, repo_id: str) -> None:
        """Where each large file is to be sent, if it is not here."""
        asked = self.asked()
        self.find(repo_id, to_write=True)
        objects = [self.actions(repo_id, wanted["oid"], wanted["size"]) for wanted in asked["objects"]]
        self.answer({"transfer": "basic", "objects": objects}, headers={"Content-Type": "application/vnd.git-lfs+json"})

    def actions(self, repo_id: str, oid: str, size: int) -> dict[str, Any]:
        """What is to be done with one large file: nothing, or one upload, or one of each part."""
        if oid in self.hub.objects:
            return {"oid": oid, "size": size}
        verify = {"href": f"{self.hub.url}/{repo_id}.git/info/lfs/objects/verify"}
        upload: dict[str, Any] = {"href": f"{self.hub.cdn}/upload/{oid}"}
        if size > self.hub.part_size:
            numbers = range(1, -(-size // self.hub.part_size) + 1)
            parts = {f"{number:05d}": f"{self.hub.cdn}/upload/{oid}/{number}" for number in numbers}
            upload = {"href": f"{self.hub.cdn}/complete/{oid}"}
            upload["header"] = {"chunk_size": str(self.hub.part_size), **parts}
        return {"oid": oid, "size": size, "authenticated": True, "actions": {"upload": upload, "verify": verify}}

    def upload(self, oid: str, part: str) -> None:
        """Take a large file, or a part of one."""
        path = self.hub.root / "objects" / f"{oid}.{part or 'whole'}.{threading.get_ident()}"
        with path.open("wb") as file:
            for block in self.blocks():
                file.write(block)
                with self.hub.lock:
                    self.hub.received[oid] += len(block)
        if part:
            os.replace(path, self.hub.root / "objects" / f"{oid}.{part}")
        else:
            self.keep(oid, path)
        self.answer({}, headers={"ETag": f'"{oid}-{part}"'})

    def complete(self, oid: str) -> None:
        """Put the parts of a large file together."""
        whole = self.hub.root / "objects" / f"{oid}.whole"
        with whole.open("wb") as file:
            for part in self.asked()["parts"]:
                file.write((self.hub.root / "objects" / f"{oid}.{part['partNumber']}").read_bytes())
        self.keep(oid, whole)
        self.answer({})

    def keep(self, oid: str, path: Path) -> None:
        """A large file that was uploaded: from now on it is what it is, whatever it was announced as."""
        kept = self.hub.root / "objects" / oid
        os.replace(path, kept)
        size, sha256 = kept.stat().st_size, sum_file(kept)
        with self.hub.lock:
            self.hub.objects[oid] = Blob(kept, size, git_oid(pointer(sha256, size)), sha256, is_lfs=True)

    def verify(self, repo_id: str) -> None:
        """Is a large file here, as long as it should be?"""
        asked = self.asked()
        self.find(repo_id, to_write=True)
        blob = self.hub.objects.get(asked["oid"])
        if blob is None or blob.size != asked["size"]:
            raise Refused(422, "the object is not here, or not as long")
        self.answer({})

    def commit(self, repo_id: str, revision: str) -> None:
        """Make files appear, all at once."""
        lines = [json.loads(line) for line in self.body().splitlines()]
        repository = self.find(repo_id, to_write=True)
        with self.hub.lock:
            head = self.find_commit(repo_id, revision)
            if lines[0]["value"].get("parentCommit") not in (None, head.oid):
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
            files = dict(head.files)
            for line in lines[1:]:
                self.apply(line["key"], line["value"], files)
            oid = self.hub.commit(repository, revision, lines[0]["value"]["summary"], files)
        self.answer({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}"})

    def apply(self, key: str, value: dict[str, Any], files: dict[str, Blob]) -> None:
        """Do one thing of a commit."""
        name = value["path"]
        if key == "file":
            files[name] = self.hub.store(name, base64.b64decode(value["content"]))
        elif key == "lfsFile" and value["oid"] in self.hub.objects:
            files[name] = self.hub.objects[value["oid"]]
        elif key == "lfsFile" and (stored := self.hub.storage.find(value["oid"])):
            files[name] = self.hub.store(name, self.hub.storage.content(stored), is_lfs=True)
        elif key == "deletedFile" and name in files:
            del files[name]
        else:
            raise Refused(400, f"cannot do {key} of {name}")


_ID = r"([\w.-]+/[\w.-]+)"
_REVISION = r"([^/]+)"
Route = tuple[str, str, Callable[..., None]]
ROUTES: tuple[Route, ...] = (
    *hub_buckets.ROUTES,
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("GET", rf"/api/models/{_ID}(?:/revision/{_REVISION})?", Handler.info),
    ("GET", rf"/api/models/{_ID}/tree/{_REVISION}(?:/(.+))?", Handler.tree),
    ("POST", rf"/api/models/{_ID}/paths-info/{_REVISION}", Handler.paths_info),
    ("GET", rf"/api/models/{_ID}/refs", Handler.refs),
    ("GET HEAD", rf"/{_ID}/resolve/{_REVISION}/(.+)", Handler.resolve),
    ("POST", rf"/api/models/{_ID}/branch/{_REVISION}", Handler.branch),
    ("POST", rf"/api/models/{_ID}/preupload/{_REVISION}", Handler.preupload),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", Handler.batch),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/verify", Handler.verify),
    ("POST", rf"/api/models/{_ID}/commit/{_REVISION}", Handler.commit),
)
CDN: tuple[Route, ...] = (
    ("PUT", r"/upload/(\w+)(?:/(\d+))?", Handler.upload),
    ("POST", r"/complete/(\w+)", Handler.complete),
    *hub_buckets.CDN,
    ("GET HEAD", rf"/{_ID}/{_REVISION}/(.+)", Handler.content),
)


def ckptkit(hub: Hub, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that takes this for the Hub, run to its end."""
    return command.ckptkit(*arguments, env={**hub.env, **environment})


def start(hub: Hub, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A command that takes this for the Hub, begun."""
    words = [sys.executable, "-m", "ckptkit", *map(str, arguments)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env={**hub.env, **environment}, stdout=pipe, stderr=pipe, text=True)
    hub.processes.append(process)
    return process
