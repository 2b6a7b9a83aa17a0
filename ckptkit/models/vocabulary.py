"""Give a model more or fewer rows for its vocabulary: embedding and head are cropped, or padded with zeros."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptkit.errors import Mismatch
from ckptkit.layout import Chunk, Spec, StoredTensor, axes
from ckptkit.tensors.box import whole

# every family's names of what has a row for each token
_ROWS = re.compile(
    r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings|lm_head|embed_out|shared_head\.head)\.(weight|bias)"
    r"|(tok_embeddings|embeddings|output|output_layer|lm_head\.w_out)\.weight|wte"
)
_KEY = "vocab_size"


def is_by_token(name: str) -> bool:
    """Return whether a tensor called so has a row for each token of the vocabulary."""
    return _ROWS.fullmatch(name) is not None


def rows_of(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    return {name: tensor.spec.shape[0] for name, tensor in tensors.items() if is_by_token(name)}


def resize(tensors: Mapping[str, StoredTensor], rows: int) -> dict[str, StoredTensor]:
    """Return located tensors with so many rows in each that has one for each token. New ones are zero."""
    return {name: resize_one(one, rows) if is_by_token(name) else one for name, one in tensors.items()}


def resize_one(tensor: StoredTensor, rows: int) -> StoredTensor:
    """Return a tensor with so many rows: without its last ones, or with rows of zeros behind them."""
    dtype, (there, *others) = tensor.spec.dtype, tensor.spec.shape
    if rows <= there:
        return tensor if rows == there else axes.cut(tensor, 0, 0, rows)
    spec = Spec(dtype, (rows - there, *others))
    zeros = Chunk.of_zeros(whole(spec.shape), dtype)
    return axes.concatenate([tensor, StoredTensor(spec, (zeros,))], 0)


def check_rows(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> None:
    """Raise `Mismatch` for an embedding or head with another number of rows than config.json has tokens."""
    size = vocabulary_of(config)
    for name, rows in rows_of(tensors).items():
        if size not in (None, rows):
            hint = f"--vocab-size {size} {'leaves out' if rows > size else 'adds zeros for'} the difference"
            message = f"it has {rows} rows, config.json has a vocabulary of {size}: one of them is padded"
            raise Mismatch(message, tensor=name, hint=hint)


def require_one_size(tensors: Mapping[str, StoredTensor]) -> int:
    """Return the rows that embedding and head have. Raises `Mismatch` if there is none, or they differ."""
    found = rows_of(tensors)
    if not found:
        raise Mismatch("no embedding is here that --vocab-size could change")
    first = next(iter(found))
    other = next((name for name, rows in found.items() if rows != found[first]), None)
    if other is not None:
        message = f"it has {found[other]} rows, `{first}` {found[first]}: these are not of one vocabulary"
        raise Mismatch(message, tensor=other)
    return found[first]


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Return the size of the vocabulary that a config.json says, of the text model if it has several; None if none."""
    inner = config.get("text_config")
    found = (inner if isinstance(inner, Mapping) else config).get(_KEY, config.get(_KEY))
    return found if type(found) is int and found > 0 else None  # -1 is a size not known


def with_vocabulary(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return a config.json with another size of the vocabulary wherever it says one."""
    mended = dict(config)
    inner = mended.get("text_config")
    if isinstance(inner, Mapping):
        mended["text_config"] = {**inner, _KEY: rows}
    if _KEY in mended or not isinstance(inner, Mapping):
        mended[_KEY] = rows
    return mended
