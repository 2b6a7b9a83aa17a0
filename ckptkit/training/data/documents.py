"""Read the documents of text, JSONL files and directories, part by part.

A text file is one document, or several with a NUL byte between them. A line of a JSONL file is one document: its
`text`, or its token ids under `input_ids` or `tokens`. A directory holds the documents of its files, hidden ones left
out, in the order of their names.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import Corrupt, Usage, translate_os_errors

PART_BYTES = 2**16  # of a long text: so much that cuts are rare, so little that a tokenizer's threads share the work
STDLIB_BYTES = 4 * 2**20
SEPARATOR = b"\0"
TOKEN_FILES = (".npy", ".bin")


@dataclass(frozen=True, slots=True)
class Text:
    """A part of a document: all, unless it does not begin or end there. `place` is its first byte in a text file."""

    path: Path
    place: int
    content: bytes
    begins: bool = True
    ends: bool = True

    def decode(self) -> str:
        """Decode the bytes as UTF-8. Raises `Corrupt` with the place of the first that is not."""
        try:
            return self.content.decode()
        except UnicodeDecodeError as error:
            hint = "convert the file to UTF-8, or train on bytes, without a tokenizer"
            raise Corrupt(f"byte {self.place + error.start} is not UTF-8 text", path=self.path, hint=hint) from error


@dataclass(frozen=True, slots=True)
class Ids:
    """A document that is token ids already, on a line of a JSONL file."""

    path: Path
    line: int
    content: list[int]
    ends: bool = True


def find_files(data: Path | None) -> list[Path]:
    """Return the files that `data` means, in order: itself, the ones below a directory, or of the standard library."""
    if data is None:
        return stdlib_modules()
    with translate_os_errors(data):
        if not data.is_dir():
            data.stat()  # a missing file is said to be missing
            return [data]
        files = sorted(path for path in data.rglob("*") if path.is_file())
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(data).parts)]
    for path in files:
        if path.suffix in TOKEN_FILES:
            raise Usage(
                "expected a directory of text files, found a file of token ids", path=path, hint="pass that file alone"
            )
    return files


def stdlib_modules() -> list[Path]:
    """Return the first top-level modules of the standard library, which every machine has; 4 MiB of them."""
    root = Path(sysconfig.get_path("stdlib"))
    files, size = [], 0
    with translate_os_errors(root):
        for path in sorted(root.glob("*.py")):
            if size < STDLIB_BYTES:
                files.append(path)
                size += path.stat().st_size
    return files


def read(path: Path) -> Iterator[Text | Ids]:
    """Read the documents of a file one after the other, no more of it in memory than a line or two parts."""
    return read_lines(path) if path.suffix == ".jsonl" else read_text(path)


def read_text(path: Path) -> Iterator[Text]:
    """Read the documents of a text file; long ones in parts."""
    place, rest, begins = 0, b"", True
    with translate_os_errors(path), path.open("rb") as file:
        while block := file.read(PART_BYTES):
            *ended, rest = (rest + block).split(SEPARATOR)
            for text in ended:
                yield Text(path, place, text, begins)
                place, begins = place + len(text) + len(SEPARATOR), True
            if len(rest) > PART_BYTES:
                cut = find_cut(rest)
                yield Text(path, place, rest[:cut], begins, ends=False)
                place, rest, begins = place + cut, rest[cut:], False
        yield Text(path, place, rest, begins)


def find_cut(text: bytes) -> int:
    """Return where to cut a text so that its parts make the same tokens: before a space, after a line, or anywhere.

    Most tokenizers split before a space anyhow. Those that put one before every text make one token more at a cut.
    """
    for sign in (b" ", b"\n"):
        if (found := text.rfind(sign)) > 0:
            return found
    last = range(len(text) - 1, len(text) - 5, -1)
    return next((cut for cut in last if text[cut] & 0xC0 != 0x80), len(text))  # where a character of UTF-8 begins


def read_lines(path: Path) -> Iterator[Text | Ids]:
    """Read the documents of a JSONL file, one a line; empty lines hold none."""
    with translate_os_errors(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield parse_line(path, number, line)


def parse_line(path: Path, number: int, line: bytes) -> Text | Ids:
    """Return the document of a line. Raises `Corrupt` with its number if it holds none."""
    try:
        match json.loads(line):
            case {"text": str(text)}:
                return Text(path, number, text.encode())
            case {"input_ids": [*ids]} | {"tokens": [*ids]} if all(type(token) is int for token in ids):
                return Ids(path, number, ids)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"line {number} cannot be read: {error}", path=path) from error
    hint = "a line has a string under `text`, or a list of integers under `input_ids` or `tokens`"
    raise Corrupt(f"line {number} has no text and no token ids", path=path, hint=hint)
