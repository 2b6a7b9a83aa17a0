"""Measure writing to S3 beside rclone, awscli and torch's own writer. Imports no torch: see `__main__`.

The server runs on the same machine, takes a share of its cores, and is the same for all.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.benchmarks.runs import Contender, measure, table
from scripts.benchmarks.storage import DTYPE, ranks
from scripts.benchmarks.workplace import ckptkit, make, size_of, workplace
from scripts.markdown import paragraph

BUCKET = "bench-store"
URL = "s3://PREFIX"  # `store_turn` fills in another one for each run
RCLONE = "rclone copy --config '' --s3-no-check-bucket"
AWS = "aws s3 cp --only-show-errors --recursive"
SAVES = {"fsspec": "torch FsspecWriter", "store": "ckptkit.storage.Writer"}


def store(size_gb: float, runs: int) -> None:
    """Measure consolidating to a store on this machine, and saving to it from 2 ranks."""
    with workplace() as home, serving(home / "server") as server:
        src, model = home / "dcp", home / "hf"
        make(8, f"sharded --size-gb {size_gb} --dtype {DTYPE}", src)
        ckptkit("consolidate", src, model)
        subprocess.run(shlex.split(f"{RCLONE} {src} bench:{BUCKET}/dcp"), check=True)
        results = measure([*conversions(src, model), *saves(src, size_gb)], home / "out", runs=runs, modes=("warm",))
        size = size_of(src)
    text = f"""{size} of 8 ranks, to {server} on this machine, which shares the cores with the programs; medians of
        {runs} runs, each to a prefix of its own. The reference for conversions is `rclone copy` of a finished output,
        for saves torch. ckptkit sends a CRC-32 with every part. Its memory is mostly parts of 16 MiB: 8 jobs have one
        or two each. The memory of a save is the sum of 2 ranks, with the model and the libraries."""
    print(paragraph(text))
    print(table(results))


def conversions(src: Path, model: Path) -> Iterator[Contender]:
    """Yield what brings a Hugging Face model to the store; the finished output is at `model`."""
    floor = "rclone copy, finished output"
    yield sender(floor, f"{RCLONE} {shlex.quote(str(model))} bench:PREFIX", src, floor)
    if shutil.which("aws"):
        yield sender("aws s3 cp, finished output", f"{AWS} {shlex.quote(str(model))} {URL}", src, floor)
    then = f"ckptkit consolidate {{src}} {{out}}/model --no-sync && {RCLONE} {{out}}/model bench:PREFIX"
    yield sender("ckptkit consolidate --no-sync, then rclone copy", then, src, floor)
    yield sender("ckptkit consolidate, to the store", f"ckptkit consolidate {{src}} {URL}", src, floor)
    yield sender("ckptkit consolidate, store to store", f"ckptkit consolidate s3://{BUCKET}/dcp {URL}", src, floor)


def saves(src: Path, size_gb: float) -> Iterator[Contender]:
    """Yield the saves by 2 ranks of what they have loaded before."""
    for name, title in SAVES.items():
        command = f"{ranks('save', 2, size_gb, DTYPE)} {{src}} --url {URL} --by {name}"
        yield sender(f"2 ranks: {title}", command, src, f"2 ranks: {SAVES['fsspec']}")


def sender(name: str, command: str, src: Path, floor: str) -> Contender:
    """Return a program that sends to a prefix that nobody used before; `store_turn` looks at what came."""
    turn = f"python -m scripts.benchmarks.store_turn {BUCKET} {{src}} {shlex.quote(command)} {{out}}"
    return Contender(name, turn, src, floor, only_reads=True, tells=True)


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Serve a bucket until the end of the block, to whoever inherits the environment; give the server's name."""
    command = [sys.executable, "-m", "scripts.benchmarks.store_server", str(root), BUCKET]
    before = dict(os.environ)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        told = json.loads(server.stdout.readline())
        os.environ.update(told["env"])
        try:
            yield told["name"]
        finally:
            os.environ.clear()
            os.environ.update(before)
            server.stdin.close()  # which ends it
