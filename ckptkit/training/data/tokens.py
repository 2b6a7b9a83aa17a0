"""Write a corpus as one file of token ids, once for all ranks, and mmap it.

    run/
    ├── tokens.bin   the ids of all documents, each followed by the tokenizer's `end`; raw integers of minimal width
    └── tokens.json  the fields of `TokenFile`, and a hash of the sources: if it changes, tokens.bin is written again

Token files of other tools are used where they are: `.npy` (integers, one dimension), `.u32.bin` (raw little-endian
uint32) and any other `.bin` (raw little-endian uint16). The id `end` of the tokenizer ends a document in them too.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import Corrupt, Unsupported, Usage, translate_os_errors
from ckptkit.io.staging import Stage, publish_file
from ckptkit.training.data.documents import TOKEN_FILES, Ids, Text, find_data_files, read_documents
from ckptkit.training.data.tokenizer import Tokenizer

TOKENS, ABOUT = "tokens.bin", "tokens.json"
BATCH_BYTES = 4 * 2**20  # bytes of text in one call of a tokenizer
BLOCK_TOKENS = 2**20  # tokens that `check_and_checksum_tokens` compares at once; bounds its memory


@dataclass(frozen=True, slots=True)
class TokenFile:
    """`count` token ids of numpy's `dtype` from byte `offset` of `path`, all < `vocab_size`; `end` ends a document.

    `checksum` is the CRC-32 of their bytes. It identifies the data when a run is resumed at a position in it.
    """

    path: Path
    dtype: str
    offset: int
    count: int
    end: int
    vocab_size: int
    checksum: int = 0

    def mmap_ids(self) -> NDArray[np.integer]:
        """Return the ids, [count], as an mmap, so that the processes of a machine share the memory.

        Raises `Corrupt` if the file is too short.
        """
        try:
            with translate_os_errors(self.path):
                return np.memmap(self.path, self.dtype, "r", self.offset, (self.count,))
        except ValueError as error:
            raise Corrupt(f"the file is too short for {self.count} tokens", path=self.path) from error


def prepare_tokens(data: Path | None, tokenizer: Tokenizer, directory: Path) -> TokenFile:
    """Return the token file of `data`, by default Python's standard library. Writes it into `directory` if needed.

    Call it on one rank per shared disk. Raises `Usage` for ids outside the tokenizer's vocabulary and for data without
    a target, `Corrupt` for data that cannot be read, and `IOFailure`.
    """
    files = find_data_files(data)
    is_token_file = data in files and files[0].suffix in TOKEN_FILES  # a directory may have such a suffix
    path = files[0] if is_token_file else directory / TOKENS
    # the ids are made of the tokenizer, and of each file as its path, size and mtime tell
    inputs: list[object] = [tokenizer.vocab_size, tokenizer.start, tokenizer.end]
    inputs += [(name, hashlib.sha256(content).hexdigest()) for name, content in sorted(tokenizer.files().items())]
    for file in files:
        with translate_os_errors(file):
            status = file.stat()
        inputs.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    made_of = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    if (known := find_token_file_record(directory / ABOUT, made_of, path)) is not None:
        return known
    with translate_os_errors(directory):
        (directory / ABOUT).unlink(missing_ok=True)  # first, because it does not describe the file written next
    if is_token_file:
        tokens = open_foreign_token_file(path, tokenizer)
    else:
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")
        count = 0
        with Stage(path, overwrite=True, is_file=True).opened() as stage:
            with translate_os_errors(path), (stage.path / path.name).open("wb") as written:
                for ids in tokenize_documents(files, tokenizer):
                    written.write(ids.astype(dtype).data)
                    count += len(ids)
            stage.commit()
        tokens = TokenFile(path, dtype.str, 0, count, tokenizer.end, tokenizer.vocab_size)
    tokens = check_and_checksum_tokens(tokens, data, tokenizer.name)
    fields = asdict(tokens)
    del fields["path"]  # the run may be moved
    about = json.dumps({"made_of": made_of, "tokens": fields}, indent=2).encode() + b"\n"
    publish_file(directory / ABOUT, about, overwrite=True)
    return tokens


def find_token_file_record(record: Path, inputs_hash: str, path: Path) -> TokenFile | None:
    """Return the description of the token file `path` in `record`.

    Returns None if `record` is missing or invalid, has another hash of the sources, or `path` has another size.
    """
    try:
        written = json.loads(record.read_text())
        tokens = TokenFile(path, **written["tokens"])
        size = tokens.offset + tokens.count * np.dtype(tokens.dtype).itemsize
        same = written["made_of"] == inputs_hash and path.stat().st_size == size
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return tokens if same else None


def open_foreign_token_file(path: Path, tokenizer: Tokenizer) -> TokenFile:
    """Return the description of another tool's token file, from its name, header and size.

    Raises `Corrupt` for a damaged file, and `Unsupported` for an array that is not one-dimensional integers.
    """
    if path.suffix == ".npy":
        try:
            with translate_os_errors(path):
                ids = np.lib.format.open_memmap(path, mode="r")
        except ValueError as error:
            raise Corrupt(f"not an array of numpy: {error}", path=path) from error
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise Unsupported(
                f"expected token ids as integers in 1 dimension, found {ids.dtype} in {ids.ndim}", path=path
            )
        return TokenFile(path, ids.dtype.str, ids.offset, ids.size, tokenizer.end, tokenizer.vocab_size)
    dtype = np.dtype("<u4" if path.name.endswith(".u32.bin") else "<u2")
    with translate_os_errors(path):
        count, rest = divmod(path.stat().st_size, dtype.itemsize)
    if rest:
        raise Corrupt(
            f"expected a multiple of {dtype.itemsize} bytes, one token each, found {rest} more after {count} tokens",
            path=path,
        )
    return TokenFile(path, dtype.str, 0, count, tokenizer.end, tokenizer.vocab_size)


def tokenize_documents(files: Iterable[Path], tokenizer: Tokenizer) -> Iterator[NDArray[np.integer]]:
    """Yield the ids of the documents in order, with exactly one `end` after each; skips empty documents."""
    end = np.array([tokenizer.end])
    last = tokenizer.end
    for batch in batch_texts(part for path in files for part in read_documents(path)):
        encoded = iter(tokenizer.encode([part for part in batch if isinstance(part, Text)]))
        for part in batch:
            ids = next(encoded) if isinstance(part, Text) else ids_of_document(part, tokenizer)
            if len(ids):
                if isinstance(part, Text) and part.begins:
                    yield np.array(tokenizer.start, dtype=np.int64)
                yield ids
                last = int(ids[-1])
            if part.ends and last != tokenizer.end:
                yield end
                last = tokenizer.end


def batch_texts(texts: Iterable[Text | Ids]) -> Iterator[list[Text | Ids]]:
    """Yield lists of parts with about `BATCH_BYTES` each."""
    batch: list[Text | Ids] = []
    size = 0
    for part in texts:
        batch.append(part)
        size += 1 + len(part.content)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def ids_of_document(document: Ids, tokenizer: Tokenizer) -> NDArray[np.integer]:
    """Return the ids of a document of token ids, int64. Raises `Usage` for an id outside the vocabulary."""
    for number, token in enumerate(document.content):
        if not 0 <= token < tokenizer.vocab_size:
            where = f"id {token} at place {number} of line {document.line}"
            raise unknown_id_error(where, tokenizer.vocab_size, tokenizer.name, document.path)
    return np.array(document.content, dtype=np.int64)


def check_and_checksum_tokens(tokens: TokenFile, data: Path | None, tokenizer_name: str) -> TokenFile:
    """Return `tokens` with its checksum, after a check of every id.

    Raises `Usage` for an id outside the vocabulary, and if no document has two tokens.
    """
    ids = tokens.mmap_ids() if tokens.count else np.zeros(0, dtype=np.uint8)
    checksum, has_target = 0, False
    for start in range(0, tokens.count, BLOCK_TOKENS):
        block = ids[start : start + BLOCK_TOKENS]
        wrong = (block < 0) | (block >= tokens.vocab_size)
        if wrong.any():
            first = int(wrong.argmax())
            raise unknown_id_error(
                f"id {block[first]} at place {start + first}", tokens.vocab_size, tokenizer_name, tokens.path
            )
        # a token other than `end` that is not the last of the file is followed by a target
        has_target = has_target or bool((block[: tokens.count - 1 - start] != tokens.end).any())
        checksum = zlib.crc32(block.data, checksum)
    if not has_target:
        hint = "pass text with --data"
        raise Usage("there is no text to train on: every document has fewer than two tokens", path=data, hint=hint)
    return replace(tokens, checksum=checksum)


def unknown_id_error(where: str, vocab_size: int, tokenizer_name: str, path: Path) -> Usage:
    hint = "pass the tokenizer that made the ids with --tokenizer"
    return Usage(
        f"expected ids below {vocab_size}, the tokens of tokenizer `{tokenizer_name}`; found {where}",
        path=path,
        hint=hint,
    )
