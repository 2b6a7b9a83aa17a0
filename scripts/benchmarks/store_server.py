"""Serve a bucket on this machine until standard input ends: by SeaweedFS if it is there, else by rclone.

moto, with which most tests run, keeps all in memory and computes checksums in Python: it would be what is measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from s3fs import S3FileSystem

from tests.s3 import find_weed, serve_s3, serve_weed


def main(root: str, bucket: str) -> None:
    """Say in one line of JSON how the server is called and reached, without the proxy of the tests in between."""
    weed = find_weed()
    place = Path(root)
    place.mkdir()
    with serve_s3(place) if weed is None else serve_weed(place, weed) as server:
        url = f"http://127.0.0.1:{server.upstream}"
        env = server.env | {"AWS_ENDPOINT_URL": url}
        secrets = {"key": env["AWS_ACCESS_KEY_ID"], "secret": env["AWS_SECRET_ACCESS_KEY"]}
        files = S3FileSystem(endpoint_url=url, client_kwargs={"region_name": "us-east-1"}, **secrets)
        files.call_s3("create_bucket", Bucket=bucket)
        name = "`rclone serve s3` (no checksums)" if weed is None else "SeaweedFS (compares every checksum)"
        print(json.dumps({"name": name, "env": env | remote(env)}), flush=True)
        sys.stdin.read()


def remote(env: dict[str, str]) -> dict[str, str]:
    """Return what makes `bench:` mean the server to rclone."""
    words = {
        "TYPE": "s3",
        "PROVIDER": "Other",
        "ENDPOINT": env["AWS_ENDPOINT_URL"],
        "ACCESS_KEY_ID": env["AWS_ACCESS_KEY_ID"],
        "SECRET_ACCESS_KEY": env["AWS_SECRET_ACCESS_KEY"],
        "FORCE_PATH_STYLE": "true",
    }
    return {f"RCLONE_CONFIG_BENCH_{name}": value for name, value in words.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
