"""Say how the tensors of Meta's Llama models are split over ranks, by name, and by params.json where names do not tell.

Source: meta-llama/llama-models, models/llama3/model.py, and meta-llama/llama, llama/model.py, with fairscale's layers:
a ColumnParallelLinear has rows of its weight on each rank, a RowParallelLinear columns. The embedding of Llama 1 and 2
has columns on each rank, that of Llama 3 rows; its shape says which. With fewer heads of keys than ranks, some ranks
have copies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.shards.join_ranks import BY_COLUMNS, BY_ROWS, COPIED, JoinRules, find_rule, join_copies, join_ranks
from ckptkit.io.file import is_there, read_small
from ckptkit.layout import StoredTensor

PARAMS = "params.json"
_LIMIT = 1 << 20  # bytes
_EMBEDDING = "tok_embeddings.weight"
_QUERIES = ".attention.wq.weight"
_KEYS = (".attention.wk.weight", ".attention.wv.weight")
_RULES: JoinRules = (
    (r"layers\.[0-9]+\.attention\.w[qkv]\.weight", BY_ROWS),
    (r"layers\.[0-9]+\.feed_forward\.w[13]\.weight", BY_ROWS),
    (r"output\.weight", BY_ROWS),
    (r"layers\.[0-9]+\.attention\.wo\.weight", BY_COLUMNS),
    (r"layers\.[0-9]+\.feed_forward\.w2\.weight", BY_COLUMNS),
    (r"(layers\.[0-9]+\.)?(attention_|ffn_)?norm\.weight", COPIED),
    (r"rope\.freqs", COPIED),
)


@dataclass(frozen=True, slots=True)
class Params:
    """The sizes of a model by its params.json: of its states, its vocabulary, None if not said, and heads."""

    dim: int
    vocabulary: int | None
    heads: int
    key_heads: int
    head_dim: int


def read_params(root: Path) -> Params | None:
    """Return what params.json in a directory says of the model's sizes, None if there is none."""
    path = root / PARAMS
    if not is_there(path):
        return None
    found = parse_json(read_small(path, _LIMIT), path)
    found = found if isinstance(found, dict) else {}
    dim, heads = size_in(found, "dim"), size_in(found, "n_heads")
    if dim is None or heads is None:
        raise Corrupt("expected `dim` and `n_heads`, found neither", path=path)
    key_heads, head_dim = size_in(found, "n_kv_heads") or heads, size_in(found, "head_dim") or dim // heads
    return Params(dim, size_in(found, "vocab_size"), heads, key_heads, head_dim)


def size_in(params: Mapping[str, Any], name: str) -> int | None:
    """Return a positive number by its name, None where there is none; older files have -1 for a size not known."""
    found = params.get(name)
    return found if type(found) is int and 0 < found < 1 << 40 else None


def count_ranks(tensors: Mapping[str, StoredTensor], params: Params) -> int:
    """Return how many ranks share the queries of a model, of which one has `tensors`; 0 if it has none of them."""
    rows = (t.spec.shape[0] for name, t in tensors.items() if name.endswith(_QUERIES) and all(t.spec.shape))
    return params.heads * params.head_dim // next(rows, 1 << 62)


def join(name: str, parts: Sequence[StoredTensor], params: Params | None) -> StoredTensor:
    """Return a tensor of which each rank in turn has a part.

    Raises `Unsupported` where no rule says how, `Corrupt` where the parts do not make up what params.json calls for.
    """
    try:
        tensor = join_parts(name, parts, params) if len(parts) > 1 else parts[0]
        check_shape(name, tensor, params)
    except CkptError as error:
        raise error.blame(tensor=name) from None
    return tensor


def join_parts(name: str, parts: Sequence[StoredTensor], params: Params | None) -> StoredTensor:
    """Return a tensor that several ranks share."""
    if params is None:
        hint = f"put the model's {PARAMS} beside the files"
        raise Unsupported(f"without a {PARAMS} it is not certain how {len(parts)} ranks share it", hint=hint)
    shape = parts[0].spec.shape
    if name == _EMBEDDING and len(shape) == 2:
        return join_ranks(parts, BY_ROWS if shape[1] == params.dim else BY_COLUMNS)
    copies = len(parts) // params.key_heads
    if name.endswith(_KEYS) and copies > 1:
        if shape[:1] != (params.head_dim,) or len(parts) % params.key_heads:
            raise Corrupt(f"expected {params.key_heads} heads on {len(parts)} ranks, found {parts[0].spec} on each")
        groups = (parts[i : i + copies] for i in range(0, len(parts), copies))
        return join_ranks([join_copies(group) for group in groups], BY_ROWS)
    return join_ranks(parts, find_rule(name, _RULES, len(parts)))


def check_shape(name: str, tensor: StoredTensor, params: Params | None) -> None:
    """Raise `Corrupt` for a tensor of another shape than params.json calls for: then a rank is missing."""
    if params is None:
        return
    dim, wide, found = params.dim, params.heads * params.head_dim, list(tensor.spec.shape)
    narrow = params.key_heads * params.head_dim
    wanted: dict[str, list[int | None]] = {
        _EMBEDDING: [params.vocabulary, dim],
        "output.weight": [params.vocabulary, dim],
        "norm.weight": [dim],
        "wq.weight": [wide, dim],
        "wk.weight": [narrow, dim],
        "wv.weight": [narrow, dim],
        "wo.weight": [dim, wide],
    }
    match = re.fullmatch(r"layers\.[0-9]+\.attention\.(w[qkvo]\.weight)", name)
    calls_for = wanted.get(match[1] if match else name)
    if calls_for and not fits(found, calls_for):
        shape = ", ".join("any" if n is None else str(n) for n in calls_for)
        hint = "check that all ranks' files are there and belong to one model"
        raise Corrupt(f"expected shape [{shape}] ({PARAMS}), found {found} in the ranks' files", hint=hint)


def fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(m in (n, None) for n, m in zip(shape, wanted, strict=True))
