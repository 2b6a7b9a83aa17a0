"""Find the largest token id of a tokenizer, in any of its files. Does not run the tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.errors import Caution, Mismatch
from ckptkit.models.companions import Companions

_SENTENCEPIECE = "tokenizer.model"
_CONFIG = "tokenizer_config.json"
_IN_JSON = ("tokenizer.json", _CONFIG, "vocab.json", "added_tokens.json")
_KEY = re.compile(rb'"(\d{1,18})"\s*:')  # a key of `added_tokens_decoder`
_PIECE = 0x0A  # protobuf tag of a sentencepiece piece: field 1, a message
_NUMBER = re.compile(rb'"\s*:\s*(\d{1,18})')  # a number value in JSON
_UNIGRAM = re.compile(rb'"type"\s*:\s*"Unigram"')  # its vocabulary is a list: the index is the id
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def check_tokens_have_rows(companions: Companions, rows: int) -> list[str]:
    """Return notes on a vocabulary of `rows` rows. Raises `Mismatch` if the tokenizer has a token without a row."""
    largest = find_largest_token_id(companions.files, companions.config or {})
    if largest is None:
        return ["no tokenizer was found, so ckptkit could not check that each token has a row"]
    number, file = largest
    if number >= rows:
        hint = f"pass --vocab-size {number + 1} or more"
        message = f"the tokenizer has token {number}, but --vocab-size keeps only {rows} rows"
        raise Mismatch(message, path=companions.source_path_of(file), hint=hint)
    return []


def warn_of_tokens_without_row(companions: Companions, rows: int) -> list[Caution]:
    """Return a warning if the tokenizer has a token beyond the last row of an embedding of `rows` rows."""
    # a cheap upper bound first: parsing large tokenizer files is slow
    likely = any(largest_possible_token_id(name, content) >= rows for name, content in companions.files.items())
    number, file = find_largest_token_id(companions.files, {}) or (-1, "") if likely else (-1, "")
    if number < rows:
        return []
    words = f"{file} has token {number}, but the embedding has only {rows} rows"
    return [Caution(f"{words}; copy the tokenizer of this model, or run this again with --vocab-size {number + 1}")]


def largest_possible_token_id(name: str, content: bytes) -> int:
    """Return an upper bound for the token ids in a tokenizer's file, -1 if it has none. Does not parse JSON."""
    if not name.endswith(".json"):
        return max(largest_token_ids_in(name, content), default=-1)
    if name not in _IN_JSON:
        return -1
    numbers = max((int(match[1]) for match in _NUMBER.finditer(content)), default=-1)
    keys = max((int(match[1]) for match in _KEY.finditer(content)), default=-1) if name == _CONFIG else -1
    return max(numbers, keys, content.count(b"[") if _UNIGRAM.search(content) else -1)


def find_largest_token_id(files: Mapping[str, bytes], config: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the largest token id and the file that contains it; None if there are no tokenizer files.

    `files` are the files beside a model, by name. `config` is its config.json, which contains some special token ids.
    """
    ids = [(number, name) for name, content in files.items() for number in largest_token_ids_in(name, content)]
    for key in _IDS if ids else ():
        value = config.get(key)
        numbers = filter(is_integer, value if isinstance(value, list) else [value])
        ids += [(number, "config.json") for number in numbers]
    return max(ids, default=None)


def largest_token_ids_in(name: str, content: bytes) -> Iterator[int]:
    """Yield token ids of a tokenizer's file, the largest among them; nothing for other files."""
    if name == _SENTENCEPIECE:
        count = count_sentencepiece_tokens(content)
        if not count:  # a tiktoken file has one line with an id per token
            numbers = [line.rpartition(b" ")[2] for line in content.splitlines()]
            count = max(map(int, numbers), default=-1) + 1 if all(map(bytes.isdigit, numbers)) else 0
        yield from [count - 1] if count else []
    elif name == "vocab.txt":
        yield content.count(b"\n") - 1
    elif name in _IN_JSON:
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError):
            return
        if isinstance(parsed, dict):
            yield from token_ids_in_json(name, parsed)


def token_ids_in_json(name: str, parsed: Mapping[str, Any]) -> Iterator[int]:
    if name == "tokenizer.json":
        model = parsed.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, list) and vocabulary:
            yield len(vocabulary) - 1
        elif isinstance(vocabulary, dict):
            yield from filter(is_integer, vocabulary.values())
        added = parsed.get("added_tokens")
        for token in added if isinstance(added, list) else ():
            yield from filter(is_integer, [token.get("id") if isinstance(token, dict) else None])
    elif name == _CONFIG:
        decoder = parsed.get("added_tokens_decoder")
        yield from (int(key) for key in (decoder if isinstance(decoder, dict) else ()) if key.isdecimal())
    else:
        yield from filter(is_integer, parsed.values())


def is_integer(value: object) -> bool:
    return type(value) is int


def count_sentencepiece_tokens(content: bytes) -> int:
    """Return the number of pieces in a sentencepiece model, 0 for any other file.

    Source: sentencepiece_model.proto. Each of its fields is a message or a string, with its length in front.
    """
    at = count = 0
    while at < len(content):
        tag, at = read_varint(content, at)
        length, at = read_varint(content, at)
        if tag & 7 != 2 or at + length > len(content):
            return 0
        count += tag == _PIECE
        at += length
    return count


def read_varint(content: bytes, at: int) -> tuple[int, int]:
    """Return a protobuf varint and the offset after it; a value beyond all lengths if it is truncated."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            break
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 1 << 62, len(content)
