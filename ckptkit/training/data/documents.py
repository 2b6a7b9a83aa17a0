"""Read documents from text files, JSONL files and directories, in parts.

A text file is one document, or several separated by NUL bytes. A line of a JSONL file is one document: its `text`, or
its token ids under `input_ids` or `tokens`. A directory is read recursively in the order of file names, without hidden
files.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import Corrupt, Usage, translate_os_errors

PART_BYTES = 2**16  # size of parts of long texts: large enough for few cuts, small enough to spread over threads
STDLIB_BYTES = 4 * 2**20
SEPARATOR = b"\0"
TOKEN_FILES = (".npy", ".bin")


@dataclass(frozen=True, slots=True)
class Text:
    """A document or a part of one. `begins` and `ends` say whether it includes the document's start and end.

    `place` is the byte offset of the part in a text file, or the line number in a JSONL file.
    """

    path: Path
    place: int
    content: bytes
    begins: bool = True
    ends: bool = True

    def decode(self) -> str:
        """Return the text, decoded as UTF-8. Raises `Corrupt` with the byte offset of the first invalid byte."""
        try:
            return self.content.decode()
        except UnicodeDecodeError as error:
            hint = "convert the file to UTF-8, or train on bytes, without a tokenizer"
            raise Corrupt(f"byte {self.place + error.start} is not UTF-8 text", path=self.path, hint=hint) from error


@dataclass(frozen=True, slots=True)
class Ids:
    """A document of token ids, from a line of a JSONL file."""

    path: Path
    line: int
    content: list[int]
    ends: bool = True


def find_data_files(data: Path | None) -> list[Path]:
    """Return the files of `data` in order: the file itself, or the files in a directory; for None the default data.

    The default data are modules of Python's standard library. Raises `Usage` for a directory with token files.
    """
    if data is None:
        return stdlib_modules()
    with translate_os_errors(data):
        if not data.is_dir():
            data.stat()  # reports a missing file as missing
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
    """Return the first 4 MiB of top-level modules of Python's standard library, which every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    files, size = [], 0
    with translate_os_errors(root):
        for path in sorted(root.glob("*.py")):
            if size < STDLIB_BYTES:
                files.append(path)
                size += path.stat().st_size
    return files


def read_documents(path: Path) -> Iterator[Text | Ids]:
    """Yield the documents of a file in order, without empty lines. Keeps at most one line or two parts in memory."""
    if path.suffix != ".jsonl":
        yield from read_text_documents(path)
        return
    with translate_os_errors(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield parse_jsonl_document(path, number, line)


def read_text_documents(path: Path) -> Iterator[Text]:
    """Yield the documents of a text file, long documents in parts."""
    offset, rest, begins = 0, b"", True
    with translate_os_errors(path), path.open("rb") as file:
        while block := file.read(PART_BYTES):
            *finished, rest = (rest + block).split(SEPARATOR)
            for text in finished:
                yield Text(path, offset, text, begins)
                offset, begins = offset + len(text) + len(SEPARATOR), True
            if len(rest) > PART_BYTES:
                cut = find_text_cut_offset(rest)
                yield Text(path, offset, rest[:cut], begins, ends=False)
                offset, rest, begins = offset + cut, rest[cut:], False
        yield Text(path, offset, rest, begins)


def find_text_cut_offset(text: bytes) -> int:
    """Return the offset at which to cut a text: before the last space or newline, else at a character boundary.

    A cut before a space rarely changes the tokens, because most tokenizers split there. A tokenizer that adds a space
    before every text yields one more token per cut.
    """
    for separator in (b" ", b"\n"):
        if (offset := text.rfind(separator)) > 0:
            return offset
    last = range(len(text) - 1, len(text) - 5, -1)
    return next((cut for cut in last if text[cut] & 0xC0 != 0x80), len(text))  # skip UTF-8 continuation bytes


def parse_jsonl_document(path: Path, number: int, line: bytes) -> Text | Ids:
    """Return the document of a line. Raises `Corrupt` with the line number if it is invalid."""
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
