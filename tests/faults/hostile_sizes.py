"""Hostile sizes and names: shapes, headers and lists that claim too much, names that color. Cases 35, 36 and 38."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from tests import producers
from tests.faults.cases import Case, Seen
from tests.faults.damage import Damage, overwrite, zero_page
from tests.faults.forged import SAFETENSORS, TENSOR, forge, forged, of_header, resize, with_header
from tests.faults.originals import MODEL, original, produced, weights
from tests.faults.subjects import command
from tests.faults.trials import Bad, case_of, server
from tests.faults.verdicts import Verdict

MEMORY = 512 << 20  # bytes
SECONDS = 10.0


def impossible() -> Iterator[Bad]:
    """Shapes that no memory holds."""
    for shape in ((1 << 42,), (1 << 32, 1 << 32), (1 << 62, 4), (1,) * 1000, (0, 1 << 62)):
        yield forged(f"{shape[:3]}", resize, *shape)
        yield from of_header(f"{shape[:3]}", "shape", list(shape))
    odd: tuple[Any, ...] = ([-1, 32], [95.0, 32], [True, 3040], ["95", 32], None, "95", {}, [[95], 32])
    for shape in odd:
        yield from of_header(f"{shape}", "shape", shape)


def deep(name: str) -> Damage:
    """Nest a header 200,000 deep."""
    return lambda root: (root / name).write_bytes(with_header(b'{"a":' * 200_000 + b"1" + b"}" * 200_000))


def twice(name: str) -> Damage:
    """A key twice, of which either could be meant."""

    def damage(root: Path) -> None:
        content = (root / name).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        again = json.dumps({"head.weight": header["layers.0.up.weight"]})[1:-1]
        text = content[8:end].rstrip()[:-1] + b"," + again.encode() + b"}"
        (root / name).write_bytes(with_header(text) + content[end:])

    return damage


def headers() -> Iterator[Bad]:
    """Headers that claim to be long, deep or many."""
    for kind, file in SAFETENSORS:
        limits: dict[str, Any] = {"seconds": SECONDS, "memory": MEMORY}
        for length in (1 << 62, (1 << 64) - 1, 3 << 30):
            yield Bad(f"{length} bytes", kind, overwrite(file, 0, length.to_bytes(8, "little")), (file,), **limits)
        yield Bad("deep", kind, deep(file), (file,), **limits)
        yield Bad("twice", kind, twice(file), (file,), **limits)


_FAR = 100_000_000


def rename_entry(metadata: Metadata, new: str, way: tuple[str | int, ...]) -> None:
    """Let the tensor have another name and another way to it."""
    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(TENSOR)
    assert metadata.planner_data is not None
    del metadata.planner_data[TENSOR]
    metadata.planner_data[new] = way
    for index in [index for index in metadata.storage_data if index.fqn == TENSOR]:
        metadata.storage_data[replace(index, fqn=new)] = metadata.storage_data.pop(index)


def change_way(metadata: Metadata) -> None:
    """Let the way to the tensor be the hundred millionth of a list."""
    assert metadata.planner_data is not None
    metadata.planner_data[TENSOR] = (MODEL, _FAR)


def far() -> Iterator[Bad]:
    """A list of which only the hundred millionth member is there."""
    new = f"{MODEL}.{_FAR}"
    truth = {new if name == TENSOR else name: value for name, value in original("dcp").truth.items()}
    culprits = (str(_FAR), *weights())
    limits: dict[str, Any] = {"seconds": SECONDS, "memory": MEMORY}
    yield forged("of another name", change_way)
    damage = forge(lambda metadata: rename_entry(metadata, new, (MODEL, _FAR)))
    yield Bad("the name says so too", "dcp", damage, culprits, truth=truth, is_sound=True, **limits)


def colored(root: Path) -> producers.Truth:
    """A tensor whose name would color a terminal, begin a line and say something."""
    return producers.save_alone({MODEL: {"\x1b[31mred\nred": producers.counted(64, 64)}}, root)


def escapes(place: Path, _: bool) -> Iterator[Seen]:
    """What a checkpoint calls its tensors is shown without moving the cursor, in tables and in errors."""
    src = shutil.copytree(produced(colored).root, place / "checkpoint")
    for words in ("inspect SRC --tensors", "inspect SRC --chunks", "consolidate SRC OUT"):
        if words.startswith("consolidate"):
            zero_page("__0_0.distcp", 1)(src)
        ended = server(is_ours=True).run("ckptkit", command(*words.split())(src, place / "out"))
        shown = ended.out + ended.err
        is_plain = all(c.isprintable() or c == "\n" for c in shown) and "\nred" not in shown
        verdict = Verdict.RIGHT if is_plain else Verdict.ACCEPTED
        yield Seen(
            f"ckptkit {words.split()[0]}", verdict if "31mred" in shown else Verdict.UNFIRED, "escape codes in names"
        )


CASES: tuple[Case, ...] = (
    case_of("35", "hostile", "shapes that cannot be", impossible),
    case_of("36", "hostile", "headers that claim too much", headers),
    case_of("38", "hostile", "the hundred millionth of a list", far),
    Case("38", "hostile", "escape codes in names", escapes),
)
