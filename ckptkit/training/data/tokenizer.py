"""Tokenize text into bytes or with a Hugging Face tokenizer.

The ids of a document are a tokenizer's `start`, the ids of the document's texts, and `end`; all are below `vocab_size`.
Tokenizers that produce different ids have different `files`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import Usage
from ckptkit.io.path import hint_for_hub_id, means_hub_model
from ckptkit.training.data.documents import Text
from ckptkit.training.models.config import BYTES, END_OF_TEXT


class Bytes:
    """A tokenizer whose tokens are the bytes of any file; NUL ends a document."""

    name = "bytes"
    vocab_size = BYTES
    start: tuple[int, ...] = ()
    end = END_OF_TEXT

    def encode(self, texts: Sequence[Text]) -> list[NDArray[np.integer]]:
        return [np.frombuffer(text.content, dtype=np.uint8) for text in texts]

    def files(self) -> dict[str, bytes]:
        return {}


class HuggingFaceTokenizer:
    """A tokenizer of transformers. Its end-of-text token ends a document, also where the text spells it out.

    `start` is the token that the tokenizer adds before a text, unless it is the end-of-text token.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if tokenizer.eos_token_id is None:
            hint = "name its `eos_token` in tokenizer_config.json"
            raise Usage(f"the tokenizer `{name}` does not have an end-of-text token", hint=hint)
        self.name = name
        self.end = int(tokenizer.eos_token_id)
        # Not len(tokenizer): if added tokens leave gaps in the ids, the highest id is larger.
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.start = tuple(token for token in tokenizer("")["input_ids"][:1] if token != self.end)
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[Text]) -> list[NDArray[np.integer]]:
        """Return the ids of each text, int [n]. Uses a thread per core. Raises `Corrupt` for text that is not UTF-8."""
        if not texts:
            return []
        decoded = [text.decode() for text in texts]
        # verbose=False: no warning for texts longer than the model's context, since they are cut into sequences later
        encoding = self._tokenizer(decoded, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.array(ids, dtype=np.int64) for ids in encoding["input_ids"]]

    def files(self) -> dict[str, bytes]:
        """Return tokenizer.json and the other files that transformers saves."""
        with tempfile.TemporaryDirectory() as directory:
            self._tokenizer.save_pretrained(directory)
            return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}


Tokenizer = Bytes | HuggingFaceTokenizer


def choose_tokenizer(name: str | None) -> Tokenizer:
    """Return the Hugging Face tokenizer `name`: a directory, a tokenizer.json, or a Hub id; `Bytes` for None.

    Raises `Usage` if transformers is not installed or the tokenizer cannot be loaded.
    """
    if name is None:
        return Bytes()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        hint = "pip install 'ckptkit-fsdp[hf]', or drop --tokenizer to train on bytes"
        raise Usage("a Hugging Face tokenizer needs the package transformers", hint=hint) from error
    if "/" in name and not Path(name).exists() and not means_hub_model(name):
        raise Usage(f"no tokenizer `{name}`: the file or directory does not exist", hint=hint_for_hub_id(name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(name).parent if Path(name).name == "tokenizer.json" else name)
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = str(error).partition("\n")[0]
        hint = "pass a directory with a tokenizer.json, or the name of a model on the Hub"
        raise Usage(f"no tokenizer `{name}`: {reason}", hint=hint) from error
    return HuggingFaceTokenizer(tokenizer, name)
