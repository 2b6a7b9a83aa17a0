"""The account of a salvage: the tensors that were lost or taken from elsewhere, in the result and in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, IOFailure, Unsafe, and_more
from ckptkit.formats.json_text import parse_json
from ckptkit.io.file import is_existing_path, read_small
from ckptkit.layout.box import Box
from ckptkit.words import count, format_bytes

NAME = "salvage.json"
LIMIT = 1 << 28  # bytes: bounds the memory for a damaged or hostile file
_DAMAGED = "bytes changed after they were written: their CRC-32 differs from the recorded one"


@dataclass(frozen=True, slots=True)
class Lost:
    """A lost tensor or entry, by its name in the output: the reason, and the file that contained it.

    `boxes` are the lost boxes, empty if all of it is lost. `name` is empty for a file with unknown contents.
    """

    name: str
    why: str
    path: Path | None
    boxes: tuple[Box, ...] = ()
    shape: tuple[int, ...] | None = None
    nbytes: int = 0

    @property
    def label(self) -> str:
        """Return its name, followed by the lost box in brackets unless all of it is lost."""
        if not (self.boxes and self.shape):
            return self.name
        parts = [
            ", ".join(
                ":" if size == extent else f"{start}:{start + size}"
                for start, size, extent in zip(box.start, box.size, self.shape, strict=True)
            )
            for box in self.boxes
        ]
        while all(part.endswith(", :") for part in parts):
            parts = [part.removesuffix(", :") for part in parts]
        return f"{self.name}[{parts[0]}]{and_more(len(parts) - 1)}"

    def describe_loss(self, checkpoint_path: Path) -> str:
        """Return the reason, and the file of the checkpoint at `checkpoint_path` that contained it."""
        why = _DAMAGED if "CRC-32" in self.why else self.why
        if self.path is None:
            return why
        is_inside = self.path != checkpoint_path and self.path.is_relative_to(checkpoint_path)
        return f"{self.path.relative_to(checkpoint_path) if is_inside else self.path.name}: {why}"

    def to_json(self) -> dict[str, Any]:
        boxes = [{"start": list(box.start), "size": list(box.size)} for box in self.boxes]
        path = None if self.path is None else str(self.path.absolute())
        return {"name": self.name or None, "why": self.why, "path": path, "shape": self.shape, "boxes": boxes}


@dataclass(frozen=True, slots=True)
class Filled:
    """A tensor or entry with bytes from another checkpoint or copy; `cast` describes the dtype conversion, if any."""

    name: str
    source: str
    cast: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "from": self.source, "cast": self.cast or None}


@dataclass(frozen=True, slots=True)
class SalvagedWeights:
    """The sizes in bytes of the model's tensors: from the checkpoint itself, from another one, and lost."""

    own: Mapping[str, int] = field(default_factory=dict)
    filled: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)

    def describe_fraction(self, nbytes_by_name: Mapping[str, int]) -> str:
        """Return the size of a part of the weights as text: `3 of 21 weights (1.2 MB, 14% of the bytes)`."""
        every = [*self.own.values(), *self.filled.values(), *self.lost.values()]
        size = sum(nbytes_by_name.values())
        tenths = size * 1000 // sum(every) if sum(every) else 1000  # rounded down, so that 100% means all bytes
        percent = f"{tenths // 10}%" if tenths % 10 == 0 else f"{tenths / 10}%"
        of_bytes = f"{format_bytes(size)}, {percent} of the bytes"
        return f"{len(nbytes_by_name):,} of {count(len(every), 'weight')} ({of_bytes})"

    def to_json(self) -> dict[str, int]:
        parts = {"own": self.own, "filled": self.filled, "lost": self.lost}
        numbers = {name: len(part) for name, part in parts.items()}
        return numbers | {f"{name}_bytes": sum(part.values()) for name, part in parts.items()}


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a salvage: lost tensors, tensors from elsewhere, and tensors restored from another copy.

    `source` is the salvaged checkpoint; `described_by` is the checkpoint whose metadata describes its files, if its own
    is missing; `other` is the checkpoint that lost tensors were taken from.
    """

    lost: Sequence[Lost] = ()
    filled: Sequence[Filled] = ()
    repaired: Sequence[str] = ()
    kept: int = 0
    source: Path = Path()
    described_by: Path | None = None
    other: Path | None = None
    weights: SalvagedWeights = SalvagedWeights()

    @property
    def is_fully_from_source(self) -> bool:
        """Return whether nothing is lost and every tensor comes from the checkpoint itself."""
        return not (self.lost or self.filled or self.described_by)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        lost, filled = ([one.to_json() for one in found] for found in (self.lost, self.filled))
        described = {"described_by": str(self.described_by.absolute())} if self.described_by else {}
        more = {"repaired": list(self.repaired), "weights": self.weights.to_json(), **described}
        return {"lost": lost, "filled": filled, **more}

    def warnings(self, output: Path) -> Iterator[str]:
        """Yield what is missing from `output`, and what has other values there than in the damaged checkpoint."""
        weights = self.weights
        if weights.filled:
            yield f"{weights.describe_fraction(weights.filled)} come from {self.other}, not from {self.source}"
        if weights.lost:
            yield f"{weights.describe_fraction(weights.lost)} are lost and missing from {output}"
        others = [one for one in self.lost if one.name and one.name not in weights.lost]
        if others:
            yield f"{count(len(others), 'entry')} of the training state or other files: lost and missing from {output}"
        rounded = [one for one in self.filled if one.cast]
        if rounded:
            which = f"`{rounded[0].name}`{and_more(len(rounded) - 1)}"
            yield f"filled after a cast ({rounded[0].cast}): {which}"

    def to_bytes(self, earlier_account: Path | None = None) -> bytes:
        """Return the content of the account's file.

        Includes the source's own account at path `earlier_account`, if any.
        """
        value = {"source": str(self.source.absolute()), "tensors_kept": self.kept, **self.to_json()}
        earlier = read_account(earlier_account.parent) if earlier_account else None
        value |= {"before": earlier} if earlier else {}
        return (json.dumps(value, indent=1) + "\n").encode()


def read_account(root: Path) -> Mapping[str, Any] | None:
    """Return the account in a directory; None if it is missing or unreadable."""
    try:
        account = parse_json(read_small(root / NAME, LIMIT), root / NAME) if is_existing_path(root / NAME) else None
    except (Corrupt, IOFailure, Unsafe):
        return None
    return account if isinstance(account, dict) else None


def describe_account(account: Mapping[str, Any]) -> str:
    """Return a summary of an account: how many tensors were lost and filled."""
    words = []
    for kind, what in (("lost", "lost"), ("filled", "filled from elsewhere")):
        if isinstance(entries := account.get(kind), list) and entries:
            words.append(f"{len(entries):,} {what}")
    if account.get("described_by"):
        words.append(f"names and shapes from {account['described_by']}")
    numbers = account.get("weights")
    if isinstance(numbers, dict) and (total := sum(numbers.get(part, 0) for part in ("own", "filled", "lost"))):
        words.append(f"{numbers.get('own', 0):,} of {count(total, 'weight')} are from the checkpoint itself")
    return f"salvaged from a damaged checkpoint: {', '.join(words)}"
