"""Azurite, Microsoft's own emulator of Azure Blob Storage, behind the proxy of `tests/s3.py`.

`npm install azurite` in the root of the repository, or anywhere on PATH, makes it available.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tests.s3 import S3, behind_proxy

ACCOUNT = "devstoreaccount1"  # of every Azurite, with this key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_FOLDERS = (os.environ.get("PATH", ""), str(Path(__file__).parents[1] / "node_modules" / ".bin"))
AZURITE = shutil.which("azurite-blob", path=os.pathsep.join(_FOLDERS))


@contextmanager
def serve_azurite(root: Path) -> Iterator[S3]:
    """Serve containers in the memory of Azurite, until the end of the block."""
    assert AZURITE is not None
    settings = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--loose", "--disableTelemetry"]
    with behind_proxy(root, lambda port: [AZURITE, "--blobPort", str(port), *settings]) as server:
        yield server


def env_of(server: S3) -> dict[str, str]:
    """What makes obstore take this for Azure."""
    return {
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{server.port}/{ACCOUNT}",
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_ALLOW_HTTP": "true",
        "NO_PROXY": "127.0.0.1",
    }


def create_container(server: S3, name: str) -> None:
    """Make a container, with a request signed as Azure wants it: obstore cannot."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-12-02", "Content-Length": "0"}
    signed = "".join(f"{key}:{value}\n" for key, value in headers.items() if key.startswith("x-ms-"))
    text = "PUT" + 12 * "\n" + signed + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", server.upstream)
    connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
    assert connection.getresponse().status == 201
    connection.close()
