"""Turn text into token ids, by bytes or with a Hugging Face tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import Usage
from ckptkit.io.path import hint_on_id, is_model_id
from ckptkit.training.data.documents import Text
from ckptkit.training.models.config import BYTES, END_OF_TEXT


class Tokenizer(Protocol):
    """A tokenizer. A document becomes `start`, the ids of its texts, and `end`."""

    name: str
    vocab_size: int  # every id is less
    start: tuple[int, ...]
    end: int

    def encode(self, texts: Sequence[Text]) -> Sequence[NDArray[np.integer]]:
        """Return the ids of each text, int [n], without `start` and `end`. Raises `Corrupt` if it cannot read one."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files, by name, with which others open it; they differ between two that make different ids."""


class Bytes:
    """A tokenizer whose tokens are bytes; NUL ends a document. Takes any file, text or not."""

    name = "bytes"
    vocab_size = BYTES
    start: tuple[int, ...] = ()
    end = END_OF_TEXT

    def encode(self, texts: Sequence[Text]) -> list[NDArray[np.integer]]:
        """Return the bytes themselves."""
        return [np.frombuffer(text.content, dtype=np.uint8) for text in texts]

    def files(self) -> dict[str, bytes]:
        """Return {}: it needs no files."""
        return {}


class HuggingFaceTokenizer:
    """A tokenizer of transformers. Its end-of-text token ends a document, one spelled out within the text too.

    A document starts with a token if the tokenizer itself starts a text with it, and ends no document with it.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if tokenizer.eos_token_id is None:
            hint = "name its `eos_token` in tokenizer_config.json"
            raise Usage(f"the tokenizer `{name}` does not have an end-of-text token", hint=hint)
        self.name = name
        self.end = int(tokenizer.eos_token_id)
        # Not len(tokenizer): where added tokens leave ids unused, the highest is more than that.
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.start = tuple(token for token in tokenizer("")["input_ids"][:1] if token != self.end)
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[Text]) -> list[NDArray[np.integer]]:
        """Return the ids of all texts, found at once by a thread per core."""
        if not texts:
            return []
        decoded = [text.decode() for text in texts]
        # It would warn of texts longer than the model's context: they are cut into sequences later.
        found = self._tokenizer(decoded, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.array(ids, dtype=np.int64) for ids in found["input_ids"]]

    def files(self) -> dict[str, bytes]:
        """Return tokenizer.json and its companions, as transformers saves them."""
        with tempfile.TemporaryDirectory() as room:
            self._tokenizer.save_pretrained(room)
            return {path.name: path.read_bytes() for path in sorted(Path(room).iterdir()) if path.is_file()}


def choose_tokenizer(name: str | None) -> Tokenizer:
    """Return `Bytes`, or the Hugging Face tokenizer of a directory, a tokenizer.json in one, or a model of the Hub."""
    if name is None:
        return Bytes()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        hint = "pip install 'ckptkit-fsdp[hf]', or drop `--tokenizer` to train on bytes"
        raise Usage("a Hugging Face tokenizer needs the package transformers", hint=hint) from error
    if "/" in name and not Path(name).exists() and not is_model_id(name):
        raise Usage(f"no tokenizer `{name}`: the file or directory does not exist", hint=hint_on_id(name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(name).parent if Path(name).name == "tokenizer.json" else name)
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = str(error).partition("\n")[0]
        hint = "give a directory with a tokenizer.json, or the name of a model on the Hub"
        raise Usage(f"no tokenizer `{name}`: {reason}", hint=hint) from error
    return HuggingFaceTokenizer(tokenizer, name)
