"""Change repositories and buckets on the Hub. Sends the content of small files only."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.utils import hf_raise_for_status, http_backoff

from ckptkit.errors import Unsupported
from ckptkit.io.stores.hub import request_headers
from ckptkit.io.stores.hub_errors import MAIN, translate_hub_errors

MODEL, BUCKET = "models", "buckets"  # kinds of repositories in the Hub's API
_SAMPLE = 512  # first bytes of a file, from which the Hub decides whether it is text
NDJSON = {"Content-Type": "application/x-ndjson"}

Line = dict[str, Any]  # one line of a request that changes several files


@dataclass(frozen=True, slots=True)
class XetAccess:
    """A temporary permission to write to the Hub's Xet storage; `refresh_url` renews it.

    https://huggingface.co/docs/xet/auth
    """

    endpoint: str
    token: str = field(repr=False)
    expires: int
    refresh_url: str
    headers: Mapping[str, str] = field(repr=False)


def wants_lfs_storage(repo_id: str, revision: str, name: str, data: bytes) -> bool:
    """Return whether the Hub wants a small file in its LFS storage instead of in git.

    Raises `Unsupported` if the .gitignore of the repository names the file.
    """
    asked = {"path": name, "size": len(data), "sample": b64encode(data[:_SAMPLE]).decode()}
    with translate_hub_errors(repo_id, revision):
        address = f"{constants.ENDPOINT}/api/{MODEL}/{repo_id}/preupload/{quote(revision, safe='')}"
        response = http_backoff("POST", address, json={"files": [asked]}, headers=request_headers())
        hf_raise_for_status(response)
        (upload_mode,) = response.json()["files"]
    if upload_mode.get("shouldIgnore"):
        hint = "take the line out of .gitignore, or write to another repository"
        raise Unsupported(f"the .gitignore of the repository excludes `{name}`", hint=hint)
    return bool(upload_mode["uploadMode"] == "lfs" and data)  # the storage accepts no empty files


def request_xet_access(kind: str, target_id: str, revision: str | None = None) -> XetAccess:
    """Return a permission to write to the storage of a repository at a revision, or of a bucket."""
    at = "" if revision is None else f"/{quote(revision, safe='')}"
    address = f"{constants.ENDPOINT}/api/{kind}/{target_id}/xet-write-token{at}"
    headers = request_headers()
    with translate_hub_errors(target_id, revision or MAIN):
        response = http_backoff("GET", address, headers=headers)
        hf_raise_for_status(response)
        access = response.json()
        return XetAccess(access["casUrl"], access["accessToken"], int(access["exp"]), address, headers)


def to_json_lines(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
