"""Hostile pickles: those that would run code, and those that would fill the memory. Cases 30 to 32.

The payload makes one file, the canary, and does nothing else.
"""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from struct import pack
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError
from tests.faults.bad_inputs import DESCRIBED, METADATA, SAVED
from tests.faults.cases import Case
from tests.faults.damage import Damage, write
from tests.faults.forged import forge
from tests.faults.originals import ANYTHING, MODEL, original, weights
from tests.faults.subjects import CONSOLIDATE, CONVERT, INSPECT, OURS, VERIFY
from tests.faults.trials import Bad, canary_of, case_of
from tests.faults.zips import be_archive

# of trainers
PICKLED = [(kind, file) for kind, file in (*SAVED, *DESCRIBED) if file.endswith((".pt", ".pth", ".pkl", "2.bin"))]
MEMORY = 512 << 20  # bytes
SECONDS = 10.0  # a bomb would take minutes


# -- that run code -----------------------------------------------------------------------------------------------------


class Payload:
    """Pickled as a call that makes the canary."""

    def __init__(self, root: Path) -> None:
        self.command = f"touch {canary_of(root)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def in_opcodes(root: Path) -> dict[str, bytes]:
    """The same call as every opcode that calls anything would make it."""
    command = b"X" + pack("<I", len(text := f"touch {canary_of(root)}".encode())) + text
    python = b"X" + pack("<I", len(text := f"open({str(canary_of(root))!r}, 'w')".encode())) + text
    return {
        "GLOBAL REDUCE": b"cposix\nsystem\n" + command + b"\x85R.",
        "STACK_GLOBAL REDUCE": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + command + b"\x85R.",
        "INST": b"(" + command + b"iposix\nsystem\n.",
        "OBJ": b"(cposix\nsystem\n" + command + b"o.",
        "NEWOBJ": b"\x80\x04csubprocess\nPopen\n(X\x02\x00\x00\x00-c" + command + b"t\x81.",
        "eval": b"c__builtin__\neval\n" + python + b"\x85R.",
        "dotted name": b"\x80\x04\x8c\x05torch\x8c\x0dos.sys.system\x93" + command + b"\x85R.",
        "getattr": b"c__builtin__\ngetattr\n(cos\n__dict__\nX\x06\x00\x00\x00systemtR" + command + b"\x85R.",
        "EXT1": b"\x80\x02\x82\x01" + command + b"\x85R.",
        "BUILD": b"\x80\x04ccollections\nOrderedDict\n)R}X\x0c\x00\x00\x00__setstate__cposix\nsystem\nsb"
        + command
        + b"b.",
    }


def be_pickle(name: str, of: Callable[[Path], bytes]) -> Damage:
    """Let a file be a pickle."""
    return lambda root: (root / name).write_bytes(of(root))


def hide(change: Callable[[Metadata, Payload], object]) -> Damage:
    """Put the payload into metadata that are sound otherwise."""
    return lambda root: forge(lambda metadata: change(metadata, Payload(root)))(root)


def in_planner(metadata: Metadata, payload: Payload) -> None:
    """As one more way to a tensor."""
    assert metadata.planner_data is not None
    metadata.planner_data["more"] = payload


def in_place(metadata: Metadata, payload: Payload) -> None:
    """As where a chunk lies."""
    metadata.storage_data[next(iter(metadata.storage_data))] = payload


def in_store(metadata: Metadata, payload: Payload) -> None:
    """As what nobody looks at."""
    metadata.storage_meta = payload  # type: ignore[assignment]


def code_in_metadata() -> Iterator[Bad]:
    """The payload as `.metadata`, and in it."""
    for name in in_opcodes(Path()):
        of = partial(lambda name, root: in_opcodes(root)[name], name)
        yield Bad(name, "dcp", be_pickle(METADATA, of), (METADATA,))
    for change in (in_planner, in_place, in_store):
        yield Bad(change.__name__, "dcp", hide(change), (METADATA,))


def replace_item(key: str, value: Callable[[Path], Any]) -> Damage:
    """Let an entry that is no tensor be another value; its archive is put at the end of a file."""

    def damage(root: Path) -> None:
        raw = io.BytesIO()
        torch.save(value(root), raw)

        def change(metadata: Metadata) -> None:
            place = metadata.storage_data[MetadataIndex(key)]
            file = root / place.relative_path
            place.offset, place.length = file.stat().st_size, len(raw.getvalue())
            file.write_bytes(file.read_bytes() + raw.getvalue())

        forge(change)(root)

    return damage


def save_pt(value: Callable[[Path], Any]) -> Damage:
    """Let the file of torch.save hold something else."""
    return lambda root: torch.save(value(root), root / "state.pt")


def payload_beside(root: Path) -> dict[str, Any]:
    """A model, and beside it the payload."""
    return {MODEL: weights(), "step": Payload(root)}


def payload_among(root: Path) -> dict[str, Any]:
    """A model with the payload among its tensors."""
    return {MODEL: {**weights(), "more": Payload(root)}, "step": 1}


def code_in_values() -> Iterator[Bad]:
    """The payload as an entry of a checkpoint: it may be carried along as bytes, or refused."""
    carried = {**original("training").truth, "note": ANYTHING}
    yield Bad("BYTE_IO", "training", replace_item("note", Payload), ("note", ".distcp"), truth=carried)
    yield Bad("all of it", "pt", save_pt(Payload), ("state.pt",))
    beside = {**original("pt").truth, "step": ANYTHING}
    yield Bad("beside tensors", "pt", save_pt(payload_beside), ("state.pt",), truth=beside)
    inside = {**original("pt").truth, f"{MODEL}.more": ANYTHING}
    yield Bad("among tensors", "pt", save_pt(payload_among), ("state.pt",), truth=inside)


def put_in(file: str, opcodes: bytes) -> Damage:
    """Let the dict that a trainer's file holds have one more entry, made by these opcodes."""

    def damage(root: Path) -> None:
        with_pickle(root / file, lambda pickle: pickle[:-1] + b"X\x04\x00\x00\x00more" + opcodes[:-1] + b"s.")

    return damage


def with_pickle(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change what is pickled in a file: in an archive, or by itself."""
    if not zipfile.is_zipfile(path):
        path.write_bytes(change(path.read_bytes()))
        return
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename.partition("/")[2]: archive.read(entry) for entry in archive.infolist()}
    path.write_bytes(be_archive({**entries, "data.pkl": change(entries["data.pkl"])}))


def code_in_files_of_ranks() -> Iterator[Bad]:
    """The payload in each kind of file of trainers' ranks: it may be carried along as bytes, or refused."""
    for kind, file in PICKLED:
        for name in in_opcodes(Path()):

            def damage(root: Path, file: str = file, name: str = name) -> None:
                put_in(file, in_opcodes(root)[name])(root)

            truth = {**dict.fromkeys(names_with(kind, damage), ANYTHING), **original(kind).truth}
            # of an object that is given two states the second is carried, and torch makes nothing of it
            subjects = (CONSOLIDATE, INSPECT, VERIFY, *(() if name == "BUILD" else (CONVERT,)))
            yield Bad(f"{name} in {file}", kind, damage, (file,), truth=truth, subjects=subjects)


def names_with(kind: str, damage: Damage) -> tuple[str, ...]:
    """The names of all that is in a damaged checkpoint; none in one that is refused."""
    with TemporaryDirectory() as place:
        root = Path(shutil.copytree(original(kind).root, Path(place) / "checkpoint"))
        damage(root)
        try:
            return open_layout(root).names
        except CkptError:
            return ()


# -- that fill the memory ----------------------------------------------------------------------------------------------


def doubled(make: bytes) -> bytes:
    """Sixty times the opcodes `make` after two copies of what the last time made: little to say, much to walk."""
    return b"".join(b"h%ch%c%sq%c" % (i, i, make, i + 1) for i in range(60))


BOMBS = {
    "memo index 2^28": b"Nr\x00\x00\x00\x10.",
    "memo index 2^32 - 1": b"\x80\x04Nr\xff\xff\xff\xff.",
    "200,000 lists deep": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "200,000 tuples deep": b"\x80\x04)" + b"\x85" * 200_000 + b".",
    "200,000 marks": b"\x80\x04" + b"(" * 200_000 + b".",
    "a string of 2^60 bytes": b"\x80\x04\x8d" + pack("<Q", 1 << 60) + b"a.",
    "bytes of 2^40 bytes": b"\x80\x04\x8e" + pack("<Q", 1 << 40) + b"a.",
    "an array of 2^40 bytes": b"\x80\x05\x96" + pack("<Q", 1 << 40) + b"a.",
    "a string of 2 GiB": b"\x80\x04X" + pack("<I", 0x7FFFFFFF) + b"a.",
    "an integer of 2 GiB": b"\x80\x04\x8b" + pack("<i", 0x7FFFFFFF) + b"\x01.",
    "a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "a frame of 2^62 bytes": b"\x80\x04\x95" + pack("<Q", 1 << 62) + b"}.",
    "shared 2^60 times": b"\x80\x04]q\x00" + doubled(b"\x86") + b".",
    "a key of 2^60 tuples": b"\x80\x04})q\x00" + doubled(b"\x86") + b"Ns.",
    "in itself": b"\x80\x04]q\x00h\x00a.",
}


def bombs() -> Iterator[Bad]:
    """Each as metadata, and as what is pickled in an archive."""
    for name, bomb in BOMBS.items():
        limits: dict[str, Any] = {"seconds": SECONDS, "memory": MEMORY}
        yield Bad(name, "dcp", write(METADATA, bomb), (METADATA,), **limits)
        archive = be_archive({"data.pkl": bomb, "byteorder": b"little", "version": b"3\n"})
        yield Bad(name, "pt", write("state.pt", archive), ("state.pt",), **limits)
        for kind, file in PICKLED:
            content = archive if file != "metadata.pkl" else bomb
            yield Bad(f"{name} as {file}", kind, write(file, content), (file,), **limits, subjects=OURS)
        yield Bad(f"{name}, beside a model", "hf", write("optimizer.pt", archive), ("optimizer.pt",), **limits)


CASES: tuple[Case, ...] = (
    case_of("30", "hostile", "code in `.metadata`", code_in_metadata),
    case_of("31", "hostile", "code in an entry, or in a file of torch.save", code_in_values),
    case_of("31", "hostile", "code in trainers' files", code_in_files_of_ranks),
    case_of("32", "hostile", "pickles that would fill the memory", bombs),
)
