"""The calls of a Hub on loopback that have to do with buckets, and with the right to write to its storage."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlsplit

if TYPE_CHECKING:
    from tests.hub_server import Blob, Handler

_DATE = "2026-01-01T00:00:00.000Z"
_HOUR = 3600
_EMPTY = "0" * 64


@dataclass(slots=True)
class Bucket:
    """Files by path, each with its hash. `batches` are the paths of each request that changed some."""

    private: bool
    files: dict[str, tuple[str, Blob]] = field(default_factory=dict)
    batches: list[list[str]] = field(default_factory=list)


def find(handler: Handler, bucket_id: str, *, to_write: bool = False) -> Bucket:
    """A bucket that whoever asks may see."""
    known = handler.check_token()
    bucket = handler.hub.buckets.get(bucket_id)
    if bucket is None or (bucket.private and not known):
        raise handler.refusal(404 if known else 401, "Repository not found", "RepoNotFound")
    if to_write:
        handler.check_owner(bucket_id)
    return bucket


def info(handler: Handler, bucket_id: str) -> None:
    """What a bucket is."""
    bucket = find(handler, bucket_id)
    size = sum(blob.size for _, blob in bucket.files.values())
    told = {"id": bucket_id, "private": bucket.private, "createdAt": _DATE, "size": size}
    handler.answer({**told, "totalFiles": len(bucket.files)})


def create(handler: Handler, bucket_id: str) -> None:
    """Make a bucket."""
    asked = handler.asked()
    handler.check_owner(bucket_id)
    is_new = bucket_id not in handler.hub.buckets
    if is_new:
        handler.hub.buckets[bucket_id] = Bucket(asked.get("visibility") == "private")
    handler.answer({"url": f"{handler.hub.url}/buckets/{bucket_id}"}, 200 if is_new else 409)


def describe(path: str, stored: tuple[str, Blob]) -> dict[str, Any]:
    """A file as a listing shows it."""
    digest, blob = stored
    times = {"mtime": _DATE, "uploadedAt": _DATE}
    return {"type": "file", "path": path, "size": blob.size, "xetHash": digest, **times}


def tree(handler: Handler, bucket_id: str, prefix: str) -> None:
    """The files whose paths begin with a prefix; unless asked for all, folders in place of what lies in them."""
    files = find(handler, bucket_id).files
    is_deep = parse_qs(urlsplit(handler.path).query).get("recursive", [""])[0].lower() == "true"
    found: dict[str, dict[str, Any]] = {}
    for path, stored in sorted(files.items()):
        if path.startswith(prefix):
            folder = path[: path.find("/", len(prefix) + 1)] if "/" in path[len(prefix) + 1 :] else ""
            is_inside = path.startswith(f"{prefix}/") or not prefix
            if folder and not is_deep and is_inside:
                found[folder] = {"type": "directory", "path": folder, "uploadedAt": _DATE}
            else:
                found[path] = describe(path, stored)
    handler.answer(list(found.values()))


def paths_info(handler: Handler, bucket_id: str) -> None:
    """Some files, those that are there."""
    files = find(handler, bucket_id).files
    handler.answer([describe(path, files[path]) for path in handler.asked()["paths"] if path in files])


def batch(handler: Handler, bucket_id: str) -> None:
    """Change files, each by itself."""
    lines = [json.loads(line) for line in handler.body().splitlines()]
    bucket, failed = find(handler, bucket_id, to_write=True), []
    with handler.hub.lock:
        for line in lines:
            try:
                apply(handler, bucket, line)
            except LookupError as error:
                failed.append({"path": line["path"], "error": str(error)})
        bucket.batches.append([line["path"] for line in lines])
    status = 422 if failed and len(failed) == len(lines) else 200
    handler.answer({"success": not failed, "processed": len(lines) - len(failed), "failed": failed}, status)


def apply(handler: Handler, bucket: Bucket, line: dict[str, Any]) -> None:
    """Do one thing of a batch."""
    if line["type"] == "deleteFile":
        if line["path"] not in bucket.files:
            raise LookupError("File not found")
        del bucket.files[line["path"]]
        return
    assert line["type"] == "addFile"
    assert isinstance(line["mtime"], int)
    digest = line["xetHash"]
    stored = handler.hub.storage.find(digest)
    if stored is None and digest != _EMPTY:
        raise LookupError("Xet file not found")
    content = handler.hub.storage.content(stored) if stored else b""
    bucket.files[line["path"]] = digest, handler.hub.store(line["path"], content)


def write_token(handler: Handler, kind: str, place_id: str, revision: str) -> None:
    """The right to write to the storage for an hour."""
    if kind == "buckets":
        find(handler, place_id, to_write=True)
    else:
        handler.find(place_id, to_write=True)
        handler.find_commit(place_id, revision)
    right = {"accessToken": "right-to-write", "exp": int(time.time()) + _HOUR, "casUrl": handler.hub.storage.url}
    headers = zip(
        ("X-Xet-Access-Token", "X-Xet-Token-Expiration", "X-Xet-Cas-Url"), map(str, right.values()), strict=True
    )
    handler.answer(right, headers=dict(headers))


def resolve(handler: Handler, bucket_id: str, path: str) -> None:
    """Where a file is."""
    stored = find(handler, bucket_id).files.get(path)
    if stored is None:
        raise handler.refusal(404, "Entry not found", "EntryNotFound")
    digest, blob = stored
    refresh = f"{handler.hub.url}/api/buckets/{bucket_id}/xet-read-token"
    place = f"{handler.hub.cdn}/in-bucket/{bucket_id}/{digest}/{quote(path)}?Signature=signed"
    headers = {"X-Linked-Size": str(blob.size), "X-Linked-ETag": f'"{digest}"', "X-Xet-Hash": digest}
    handler.begin(302, {**headers, "Link": f'<{refresh}>; rel="xet-auth"', "Location": place}, 0)


def content(handler: Handler, bucket_id: str, digest: str, path: str) -> None:
    """A file, for whoever has its signed URL, and no token."""
    if handler.headers.get("Authorization"):
        raise handler.refusal(400, "a token was sent to the CDN")
    there, blob = handler.hub.buckets[bucket_id].files[path]
    if there != digest:
        raise handler.refusal(404, "no longer there")
    handler.send_file(blob, {"ETag": f'"{digest}"'}, f"buckets/{bucket_id}/{path}")


_ID = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("GET", rf"/api/buckets/{_ID}", info),
    ("POST", rf"/api/buckets/{_ID}", create),
    ("GET", rf"/api/buckets/{_ID}/tree(?:/(.+))?", tree),
    ("POST", rf"/api/buckets/{_ID}/paths-info", paths_info),
    ("POST", rf"/api/buckets/{_ID}/batch", batch),
    ("GET", rf"/api/(buckets|models)/{_ID}/xet-write-token(?:/([^/]+))?", write_token),
    ("GET HEAD", rf"/buckets/{_ID}/resolve/(.+)", resolve),
)
CDN = (("GET HEAD", rf"/in-bucket/{_ID}/(\w+)/(.+)", content),)
