"""Read Meta's `consolidated.NN.pth`: one torch.save file per tensor-parallel rank, as one model.

Source: meta-llama/llama-models, models/llama3/generation.py. Each file contains a plain dict with the same names; the
rank is in the file name. Names stay Meta's.

Also translates the names, which Mistral uses too, to the Hub's. Source: models/llama3/model.py there;
mistralai/mistral-inference, transformer.py; and for the order of rows
transformers/models/{llama,mistral,mixtral}/convert_*_weights_to_hf.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Incomplete, Report, Unsupported, errors_at, raise_problem
from ckptkit.formats.archives.flatten import FlatState, flatten_file
from ckptkit.formats.archives.torch_save import archive_extents_of, is_torch_save, report_truncated_files
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.protocols import FormatReader
from ckptkit.formats.rank_names import read_each_file
from ckptkit.formats.shards.join import (
    BY_COLUMNS,
    BY_ROWS,
    COPIED,
    JoinRules,
    as_unreadable_tensors,
    first_readable_replica,
    join_by_rule,
    replica_chunks_of,
    require_join_rule,
)
from ckptkit.io.file import is_existing_path, names_in, read_small
from ckptkit.layout import Chunk, Extent, Layout, StoredTensor
from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule
from ckptkit.models.names.sizes import LAYER, Sizes, expert_names_of_type
from ckptkit.models.names.steps import Rotary

# How the tensors of Meta's Llama models are split over ranks: by name, or by params.json if the name is not enough.
#
# Source: meta-llama/llama-models, models/llama3/model.py, and meta-llama/llama, llama/model.py, with fairscale's
# layers: a ColumnParallelLinear splits the rows of its weight, a RowParallelLinear the columns. The embedding of
# Llama 1 and 2 is split by columns, the embedding of Llama 3 by rows; the shape shows which. With fewer key heads than
# ranks, some ranks have replicas.
_PARAMS = "params.json"
_LIMIT = 1 << 20  # bytes
_EMBEDDING = "tok_embeddings.weight"
_NORM = "norm.weight"
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
_TYPES = ("llama", "mistral", "mixtral")
_OWN = "layers.{layer}."
_SIZES = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
}
_OF_MIXTURE = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_WITHOUT_LAYER = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@dataclass(frozen=True, slots=True)
class Params:
    """The model sizes in params.json: hidden size, vocabulary (None if not recorded), and heads."""

    dim: int
    vocabulary: int | None
    heads: int
    key_heads: int
    head_dim: int


def find_model_sizes(root: Path) -> Params | None:
    """Return the model sizes in params.json; None without the file."""
    path = root / _PARAMS
    if not is_existing_path(path):
        return None
    params = parse_json(read_small(path, _LIMIT), path)
    params = params if isinstance(params, dict) else {}
    dim, heads = find_size_in(params, "dim"), find_size_in(params, "n_heads")
    if dim is None or heads is None:
        raise Corrupt("expected `dim` and `n_heads`, found neither", path=path)
    key_heads, head_dim = find_size_in(params, "n_kv_heads") or heads, find_size_in(params, "head_dim") or dim // heads
    return Params(dim, find_size_in(params, "vocab_size"), heads, key_heads, head_dim)


def find_size_in(params: Mapping[str, Any], name: str) -> int | None:
    """Return a positive number by name, None if there is none; older files use -1 for an unknown size."""
    value = params.get(name)
    return value if type(value) is int and 0 < value < 1 << 40 else None


def count_model_parallel_ranks(tensors: Mapping[str, StoredTensor], params: Params | None) -> int:
    """Return how many ranks share the model, given the `tensors` of one rank; 0 if unknown.

    Without params.json all heads together are assumed to be as wide as the model, as in Meta's own releases: `head_dim`
    of llama-models is `dim // n_heads`, and each rank has the full norm.
    """
    rows = next((t.spec.shape[0] for name, t in tensors.items() if name.endswith(_QUERIES) and all(t.spec.shape)), 0)
    norm = tensors.get(_NORM)
    wide = params.heads * params.head_dim if params else norm.spec.numel if norm else 0
    return wide // rows if rows and (params or wide % rows == 0) else 0


def join_split_tensor(name: str, shards: Sequence[StoredTensor], params: Params | None) -> StoredTensor:
    if params is None:
        hint = f"put the model's {_PARAMS} beside the files"
        raise Unsupported(f"without a {_PARAMS} it is not certain how {len(shards)} ranks share it", hint=hint)
    shape = shards[0].spec.shape
    if name == _EMBEDDING and len(shape) == 2:
        return join_by_rule(shards, BY_ROWS if shape[1] == params.dim else BY_COLUMNS)
    copies = len(shards) // params.key_heads
    if name.endswith(_KEYS) and copies > 1:
        if shape[:1] != (params.head_dim,) or len(shards) % params.key_heads:
            raise Corrupt(f"expected {params.key_heads} heads on {len(shards)} ranks, found {shards[0].spec} on each")
        groups = (shards[i : i + copies] for i in range(0, len(shards), copies))
        return join_by_rule([first_readable_replica(group) for group in groups], BY_ROWS)
    return join_by_rule(shards, require_join_rule(name, _RULES, len(shards)))


def check_shape(name: str, tensor: StoredTensor, params: Params | None) -> None:
    """Raise `Corrupt` if the shape differs from params.json, which means that a rank is missing."""
    if params is None:
        return
    dim, wide, found = params.dim, params.heads * params.head_dim, list(tensor.spec.shape)
    narrow = params.key_heads * params.head_dim
    wanted: dict[str, list[int | None]] = {
        _EMBEDDING: [params.vocabulary, dim],
        "output.weight": [params.vocabulary, dim],
        _NORM: [dim],
        "wq.weight": [wide, dim],
        "wk.weight": [narrow, dim],
        "wv.weight": [narrow, dim],
        "wo.weight": [dim, wide],
    }
    match = re.fullmatch(r"layers\.[0-9]+\.attention\.(w[qkvo]\.weight)", name)
    expected = wanted.get(match[1] if match else name)
    if expected is None:
        return
    if len(found) != len(expected) or any(n not in (m, None) for m, n in zip(found, expected, strict=True)):
        shape = ", ".join("any" if n is None else str(n) for n in expected)
        hint = "check that all ranks' files are there and belong to one model"
        raise Corrupt(f"expected shape [{shape}] ({_PARAMS}), found {found} in the ranks' files", hint=hint)


_RANK = re.compile(r"consolidated\.([0-9]{2})\.pth")
_MOST = 100  # ranks have two digits


class Consolidated(FormatReader):
    """The format of Meta's releases, which ckptkit reads and does not write."""

    name = "consolidated"
    known_by = "Meta's `consolidated.00.pth`"
    is_sharded = True

    def owns_file(self, name: str) -> bool:
        return bool(_RANK.fullmatch(name))

    def rank_of(self, name: str) -> int | None:
        match = _RANK.fullmatch(name)
        return int(match[1]) if match else None

    def detect(self, path: Path) -> bool:
        """Return True for the file of a rank, or a directory with such a file."""
        files = [path / name for name in names_in(path) if self.owns_file(name)] if path.is_dir() else [path]
        return any(self.owns_file(file.name) and is_torch_save(file) for file in files)

    def check_files_complete(self, path: Path, report: Report) -> None:
        root, files = model_directory_and_rank_files(path, report)
        report_truncated_files(root, (name for name in files if is_existing_path(root / name)), report)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout of the full model; report ranks whose files are missing or unreadable.

        `world_size` is None if it is unknown whether the only file contains the full model. Raises `Corrupt` if the
        ranks do not add up to the model in params.json, `Unsupported` for a tensor without a splitting rule.
        """
        root, files = model_directory_and_rank_files(path, report)
        saved, params = read_consolidated_files(root, files, report), find_model_sizes(root)
        first = next(iter(saved.values()))
        count = count_model_parallel_ranks(first.tensors, params)
        last = [rank_file_name(rank) for rank in range(len(files), count)] if count <= _MOST else []
        for name in last:  # missing after the highest existing rank
            report(missing_consolidated_error(root / name))
        files = [*files, *last]
        ranks = [saved.get(name) or as_unreadable_tensors(first, name) for name in files]
        tensors: dict[str, StoredTensor] = {}
        spares: dict[str, tuple[Chunk, ...]] = {}
        for name in first.tensors:
            parts = [rank.tensors[name] for rank in ranks]
            with errors_at(path=root, tensor=name):
                tensors[name] = join_split_tensor(name, parts, params) if len(parts) > 1 else parts[0]
                check_shape(name, tensors[name], params)
            spares |= {name: copies} if (copies := replica_chunks_of(tensors[name], parts)) else {}
        described = (*saved, _PARAMS) if params else tuple(saved)
        world = len(files) if params or count or len(files) > 1 else None
        return Layout(root, self.name, tensors, first.blobs, first.keys, world, described, spares=spares)

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        return archive_extents_of(layout, filter(self.owns_file, layout.descriptions), report)


def read_consolidated_files(root: Path, files: Sequence[str], report: Report) -> dict[str, FlatState]:
    """Return the contents of the existing rank files; report those that cannot be read.

    Raises `Corrupt` if none can be read, or if two ranks do not have the same tensors.
    """
    existing = {name: name for name in files if is_existing_path(root / name)}
    ranks = read_each_file(root, existing, lambda _, name: flatten_file(root, name), report, needs_one=True)
    first_name, first = next(iter(ranks.items()))
    for name, rank in ranks.items():
        missing = first.tensors.keys() ^ rank.tensors.keys()
        if missing:
            message = f"expected the tensor in both this file and `{first_name}`, found it in one of them"
            raise Corrupt(message, path=root / name, tensor=min(missing))
    return ranks


def model_directory_and_rank_files(path: Path, report: Report) -> tuple[Path, list[str]]:
    """Return the directory of a model, and the file names of all ranks in order.

    `path` may be the directory, or the only file in it. Reports missing files before the highest rank. Raises
    `Unsupported` for one of several files.
    """
    root = path if path.is_dir() else path.parent
    by_rank = {int(match[1]): name for name in names_in(root) if (match := _RANK.fullmatch(name))}
    if path != root and len(by_rank) > 1:
        message = f"this is the file of one of {len(by_rank)} ranks; each has a part of every tensor"
        raise Unsupported(message, path=path, hint=f"pass the directory {root}")
    files = [rank_file_name(rank) for rank in range(1 + max(by_rank))]
    for name in (rank_file_name(rank) for rank in range(max(by_rank)) if rank not in by_rank):
        report(missing_consolidated_error(root / name))
    return root, files


def rank_file_name(rank: int) -> str:
    return f"consolidated.{rank:02d}.pth"


def missing_consolidated_error(path: Path) -> Incomplete:
    hint = "download the missing files again: every rank has a part of every tensor"
    return Incomplete("the file is missing", path=path, hint=hint)


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    model = sizes.require_type(META.name, _TYPES)
    experts = expert_names_of_type("mixtral")
    mixture = {
        "feed_forward.gate": experts.router,
        "feed_forward.experts.{expert}.w1": experts.gate,
        "feed_forward.experts.{expert}.w3": experts.up,
        "feed_forward.experts.{expert}.w2": experts.down,
    }
    in_layer = _IN_LAYER | (mixture if model == "mixtral" else {})
    return (
        *(Rule.of(f"{own}.weight", f"{hub}.weight") for own, hub in _WITHOUT_LAYER.items()),
        *(Rule.of(f"{_OWN}{own}.weight", f"{LAYER}{hub}.weight") for own, hub in in_layer.items()),
        Rule.of(f"{_OWN}attention.wq.weight", f"{LAYER}self_attn.q_proj.weight", Rotary("heads")),
        Rule.of(f"{_OWN}attention.wk.weight", f"{LAYER}self_attn.k_proj.weight", Rotary("key_heads")),
    )


def config_from_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of params.json, in keys of config.json where it has them.

    Source of `use_scaled_rope`: `apply_scaling` in llama-models, models/llama3/model.py, which uses the factors of
    Llama 3.1.
    """
    config = {_SIZES.get(own, own): value for own, value in params.items() if own not in ("moe", "use_scaled_rope")}
    moe = params.get("moe")
    if isinstance(moe, Mapping):
        config |= {hub: moe[own] for own, hub in _OF_MIXTURE.items() if own in moe}
    if type(params.get("use_scaled_rope")) is bool:
        config["rope_parameters"] = {"rope_type": "llama3" if params["use_scaled_rope"] else "default"}
    return {"model_type": "mixtral" if "moe" in params else "llama", **config}


META = Family(
    name="meta",
    types=_TYPES,
    drops=(r"rope\.freqs",),
    rules=rules,
    trainer="Meta, or in its format",
    sizes_file=_PARAMS,
    config_of=config_from_params,
)
