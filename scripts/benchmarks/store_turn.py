"""Run one program that writes to a store, to a prefix that nobody used before, and look at what came there.

Prints seconds and peak memory in MiB as JSON, as the program itself tells them or as they were measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

from scripts.benchmarks.runs import run

_LEAST = 0.9  # of the bytes of the source


def main(bucket: str, src: str, command: str, out: str) -> None:
    """Run a shell command about `{src}`, `{out}` and PREFIX, the bucket and the prefix."""
    prefix = f"{bucket}/{uuid4().hex}"
    ended = run(command.replace("PREFIX", prefix), Path(src), Path(out))
    there = int(json.loads(rclone("size", "--json", prefix))["bytes"])
    if there < _LEAST * sum(path.stat().st_size for path in Path(src).iterdir()):
        raise SystemExit(f"{command} wrote only {there} bytes")
    rclone("delete", prefix)
    told = ended.told if any(line.startswith("{") for line in ended.said.splitlines()) else None
    print(json.dumps(told or {"seconds": ended.seconds, "peak": ended.peak}))


def rclone(*words: str) -> str:
    """Return what rclone says of a prefix, the last of the words."""
    *options, prefix = words
    command = ["rclone", "--config", "", *options, f"bench:{prefix}"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
