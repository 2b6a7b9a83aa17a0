"""Huge inputs: 200 GB, thousands of files, a hundred thousand tensors, archives past 4 GiB. Cases 60 and 61.

Files are sparse: all is there but data, which reads as zeros. ckptkit writes what torch would need the memory for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.formats import get_writer, locate_all_chunks
from ckptkit.layout import Chunk, Layout, NewFile, Spec, StoredTensor, WriterOptions
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES
from tests.faults.cases import Case, Seen
from tests.faults.damage import Damage
from tests.faults.forged import with_header
from tests.faults.originals import MODEL
from tests.faults.subjects import CONSOLIDATE, INSPECT, command
from tests.faults.trials import Bad, case, server
from tests.faults.verdicts import Verdict

MEMORY = 1 << 30  # bytes
SECONDS = 240.0
_MARKS = (0, 1 << 31, (1 << 32) - 1, 1 << 32, 5 << 30)  # bytes of a tensor that are not zero


def write_sparse(root: Path, shapes: Mapping[str, tuple[int, ...]], ranks: int, dtype: str = "bfloat16") -> None:
    """Write a DCP directory of so many ranks with holes for all data."""
    tensors = {}
    for name, shape in shapes.items():
        spec = Spec(DTYPES[dtype], shape)
        tensors[f"{MODEL}.{name}"] = StoredTensor(spec, (Chunk(full_box(shape), "", 0, spec.nbytes, spec.dtype),))
    keys = {f"{MODEL}.{name}": (MODEL, name) for name in shapes}
    root.mkdir()
    for file in get_writer("dcp").lay_out_files(
        Layout(Path(), "made", tensors, keys=keys), WriterOptions(1 << 40, ranks)
    ):
        write_file(root, file)


def write_file(root: Path, file: NewFile) -> None:
    """Write what is known of a file."""
    with (root / file.name).open("wb") as out:
        os.truncate(out.fileno(), file.nbytes)
        for offset, content in file.parts:
            os.pwrite(out.fileno(), content, offset)


def look(place: Path, name: str, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> Iterator[Seen]:
    """What `inspect` and two dry runs make of a checkpoint that no memory would hold."""
    src = place / "checkpoint"
    write_sparse(src, shapes, ranks)
    for words in ("inspect SRC", "consolidate SRC OUT --dry-run", "reshard SRC OUT --to 8 --dry-run"):
        ended = server(is_ours=True).run("ckptkit", command(*words.split())(src, place / "out"), timeout=SECONDS)
        verdict = Verdict.RIGHT if ended.code == 0 else Verdict.TRACEBACK
        verdict = Verdict.HANG if ended.code is None else Verdict.BLOATED if ended.rss > MEMORY else verdict
        yield Seen(f"ckptkit {words.split()[0]}", verdict, f"{name}: {ended.rss >> 20} MiB\n{ended.err}")
    shutil.rmtree(src)


def many_files(place: Path, whole: bool) -> Iterator[Seen]:
    """200 GB in 4,096 files: 12 tensors, each in 4,096 chunks."""
    ranks = 4096 if whole else 64
    yield from look(place, f"{ranks} files", {f"layers.{i}": (1 << 20, 8192) for i in range(12)}, ranks)


def many_tensors(place: Path, whole: bool) -> Iterator[Seen]:
    """200 GB in a hundred thousand tensors."""
    count = 100_000 if whole else 2000
    yield from look(place, f"{count} tensors", {f"layers.{i}": (1000, 1000) for i in range(count)}, 1)


def past_4_gib(place: Path, whole: bool) -> Iterator[Seen]:
    """A tensor of more than 2^32 bytes in an archive of its own, and one that begins after it in the file."""
    if not whole or shutil.disk_usage(place).free < 12 << 30:
        return
    src, out = place / "checkpoint", place / "out"
    shapes = {"large": (_MARKS[-1] + 1,), "small": (5,)}
    write_sparse(src, shapes, 1, "uint8")
    for name, marks in (("large", _MARKS), ("small", (4,))):
        (chunk,) = locate_all_chunks(open_layout(src)).tensors[f"{MODEL}.{name}"].chunks
        with (src / chunk.path).open("r+b") as file:
            for mark in marks:
                os.pwrite(file.fileno(), b"\x2a", chunk.offset + mark)
    ended = server(is_ours=True).run("ckptkit", CONSOLIDATE.arguments(src, out), timeout=SECONDS)
    verdict = Verdict.RIGHT if ended.code == 0 and has_marks(out / "model.safetensors.index.json") else Verdict.SILENT
    yield Seen(CONSOLIDATE.name, Verdict.BLOATED if ended.rss > MEMORY else verdict, f"{ended.rss >> 20} MiB")


def has_marks(index: Path) -> bool:
    """True if both tensors came out with the bytes that are not zero where they were."""
    found: dict[str, list[int]] = {}
    for path in index.parent.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                found[name] = np.flatnonzero(file.get_tensor(name) == 0x2A).tolist()
    return found == {"large": list(_MARKS), "small": [4]}


def many_keys(name: str) -> Damage:
    """A header of a million keys and 70 MB, and a byte too much behind it."""
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'

    def damage(root: Path) -> None:
        text = "{" + ",".join(f'"{i}":{empty}' for i in range(1_000_000)) + "}"
        (root / name).write_bytes(with_header(text.encode()) + b"*")

    return damage


_SINGLE = "model.safetensors"
_KEYS = Bad(
    "a million keys", "hf", many_keys(_SINGLE), (_SINGLE,), seconds=SECONDS, memory=2 << 30, subjects=(INSPECT,)
)
CASES: tuple[Case, ...] = (
    Case("60", "huge", "200 GB in 4,096 files", many_files),
    Case("60", "huge", "200 GB in 100,000 tensors", many_tensors),
    Case("61", "huge", "a tensor of 5 GiB, and one behind it", past_4_gib),
    case("36", "huge", "a header of a million keys", [_KEYS]),
)
