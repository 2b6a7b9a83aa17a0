"""Convert an adapter's expert matrices to another form, with a config that fits it. Only byte locations change."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.adapters.config import AdapterConfig, ends_with_name
from ckptkit.adapters.experts import find_expert_form, find_lora_b_layout
from ckptkit.adapters.find import Adapter
from ckptkit.adapters.names import WRAPPER, Entry
from ckptkit.adapters.weight_updates import check_adapter_fits_config
from ckptkit.errors import Unsupported, Usage
from ckptkit.formats import decompress_entries, locate_all_chunks
from ckptkit.layout import Chunk, Spec, StoredTensor, axes
from ckptkit.layout.box import Box
from ckptkit.models.companions import CONFIG, find_companions, read_config_json
from ckptkit.models.names.sizes import ExpertNames, expert_names_of_type
from ckptkit.plugins.expert_adapters.pairs import DOWN, GATE, GATE_UP, UP, ExpertPair, ExpertReader
from ckptkit.state.options import FLAT, PEFT, PER_EXPERT, THREE_D, ConvertOptions
from ckptkit.words import count

_INNER = ".base_layer"
_MIDDLES = {"block_sparse_moe": "mlp"}  # parent module of the experts: name in files, name in memory
# model types whose files have one tensor per expert, and whose fused tensor has the gate rows before the up rows
SEPARATE = frozenset(
    {
        *("mixtral", "minimax", "minimax_m2", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"),
        *("qwen3_omni_moe_text", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1"),
        *("ernie4_5_moe", "exaone_moe", "hunyuan_v1_moe", "kimi_k25", "longcat_flash", "solar_open"),
    }
)
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # keys of config.json
_RECORD, _DETAIL, _RANK_MAJOR = "lora_B_layout", "unsloth_fused_expert_lora", "rank_major"


def convert_expert_matrices(
    adapter: Adapter, config: AdapterConfig, path: Path, form: str, options: ConvertOptions
) -> tuple[Adapter, AdapterConfig, str]:
    """Return an adapter with its expert matrices in a form, a config that fits it, and a remark for the summary.

    Raises `Usage` for an adapter without such matrices, or if the form depends on a base that was not found.
    """
    adapter = replace(adapter, layout=locate_all_chunks(decompress_entries(adapter.layout)))
    current_form = find_expert_form(adapter)
    if current_form is None:
        message = "the adapter has no matrices of experts"
        raise Usage(message, path=path, hint="drop --experts and --experts-layout")
    if options.experts_layout is not None and current_form != FLAT:
        message = f"--experts-layout is for experts in one matrix; this adapter stores them as {current_form}"
        raise Usage(message, path=path, hint="drop --experts-layout")
    base = base_text_config(config, path, options)
    hidden, expert_count = first_integer(base, "hidden_size"), first_integer(base, *_COUNTS)
    names: ExpertNames | None = None
    if form == PER_EXPERT:
        model_type = base.get("model_type")
        if model_type is None:
            message = "names of single experts differ by model, and no config.json of the base was found"
            raise Usage(message, path=path, hint="pass --base MODEL")
        if model_type not in SEPARATE:
            message = f"ckptkit does not know a model of type `{model_type}` with a tensor for each expert"
            raise Unsupported(message, path=path, hint="pass --experts flat or 3d")
        names = expert_names_of_type(str(model_type))
    reader = ExpertReader(adapter, config, options.experts_layout, hidden, expert_count)
    pairs = list(convert_pairs_to_form(reader.read_pairs(), form, names))
    new_tensors = list(tensors_in_form(pairs, form, names))
    result = with_expert_matrices(adapter, new_tensors)
    fitting = config_for_form(config, pairs, result, adapter, names, form)
    check_adapter_fits_config(result, fitting)
    stored = f"stored the matrices of {count(pairs[0].expert_count, 'expert')} as {form}"
    unread = "; PEFT does not load this form, and does not say so" if form == THREE_D else ""
    remark = f"{stored}, in {count(len(new_tensors), 'tensor')}; they were {current_form}{unread}"
    return result, fitting, remark


def base_text_config(config: AdapterConfig, path: Path, options: ConvertOptions) -> Mapping[str, Any]:
    """Return the text model's section of the base's config.json; {} if there is no config.json."""
    config_found: Mapping[str, Any] | None = find_companions(path, options.base).config
    named_config = Path(config.base or "", CONFIG)
    if config_found is None and options.base is None and config.base and named_config.is_file():
        config_found = read_config_json(named_config)
    described: Mapping[str, Any] = config_found or {}
    text = described.get("text_config")
    return text if isinstance(text, dict) else described


def first_integer(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the integer under the first of these keys that has one; None without any."""
    return next((config[key] for key in keys if type(config.get(key)) is int), None)


def convert_pairs_to_form(pairs: Iterable[ExpertPair], form: str, names: ExpertNames | None) -> Iterator[ExpertPair]:
    """Yield the pairs in a form, under its module names: gate and up fused, separate (by `names`), or as they are."""
    if form == FLAT:
        yield from fuse_gate_and_up(pairs)
    elif form == PER_EXPERT:
        assert names is not None
        middle = names.down.partition(".experts.")[0]
        for pair in pairs:
            parent = pair.module.removesuffix(".experts").rpartition(".")[0]
            moved = pair._replace(module=f"{parent}.{middle}.experts")
            if pair.leaf != GATE_UP:
                yield moved
                continue
            half = pair.b.spec.shape[1] // 2  # gate and up have half of the rows of B each, and share A
            for leaf, at in ((GATE, 0), (UP, half)):
                yield moved._replace(leaf=leaf, b=axes.narrow_axis(pair.b, 1, at, at + half))
    else:
        yield from pairs


def fuse_gate_and_up(pairs: Iterable[ExpertPair]) -> Iterator[ExpertPair]:
    """Yield gate and up as one pair: A stacked, B padded with zeros. Raises `Unsupported` if one of them is missing."""
    by_module: dict[str, dict[str, ExpertPair]] = defaultdict(dict)
    for pair in pairs:
        middle, parent = pair.module.split(".")[-2:-1], pair.module.removesuffix(".experts").rpartition(".")[0]
        module = f"{parent}.{_MIDDLES[middle[0]]}.experts" if middle and middle[0] in _MIDDLES else pair.module
        by_module[module][pair.leaf] = pair._replace(module=module)
    for module, by_leaf in by_module.items():
        gate, up = by_leaf.pop(GATE, None), by_leaf.pop(UP, None)
        if (gate is None) != (up is None):
            present, missing = (GATE, UP) if gate else (UP, GATE)
            message = f"`{module}` has {present} without {missing}: no form but per-expert and 3d can store that"
            raise Unsupported(message, hint="pass --experts per-expert or 3d")
        if gate is not None and up is not None:
            yield gate._replace(
                leaf=GATE_UP,
                a=axes.concatenate([gate.a, up.a], 1),
                b=axes.concatenate(
                    [padded_with_zero_columns(gate.b, 0, up.rank), padded_with_zero_columns(up.b, gate.rank, 0)], 1
                ),
            )
        yield from by_leaf.values()


def padded_with_zero_columns(b: StoredTensor, before: int, after: int) -> StoredTensor:
    """Return B `[E, out, r]` with columns of zeros before and after."""
    count, rows, rank = b.spec.shape
    width = before + rank + after
    zeros = [(at, size) for at, size in ((0, before), (before + rank, after)) if size]
    chunks = [Chunk.of_zeros(Box((0, 0, at), (count, rows, size)), b.spec.dtype) for at, size in zeros]
    moved = [chunk._replace(box=axes.shift_box(chunk.box, 2, before)) for chunk in axes.with_unsplit_chunks(b).chunks]
    return StoredTensor(Spec(b.spec.dtype, (count, rows, width)), (*moved, *chunks))


def tensors_in_form(
    pairs: Sequence[ExpertPair], form: str, names: ExpertNames | None
) -> Iterator[tuple[Entry, StoredTensor]]:
    """Yield the tensors of a form, each with its entry (role and name in the adapter's file)."""
    has_both = {pair.module for pair in pairs if pair.leaf == DOWN} & {p.module for p in pairs if p.leaf == GATE_UP}
    for pair in pairs:
        if form == FLAT:
            is_inner = pair.leaf == GATE_UP and pair.module in has_both
            a = axes.merge_axes(pair.a, 0, 2)  # [E*r, in]
            b = axes.merge_axes(axes.permute_axes(pair.b, (1, 2, 0)), 1, 2)  # [out, r*E]
            yield from entries_of_lora_pair(pair.module, _INNER if is_inner else "", a, b)
        elif form == PER_EXPERT:
            both = zip(axes.unstack(pair.a), axes.unstack(pair.b), strict=True)
            for number, (a, b) in enumerate(both):
                yield from entries_of_lora_pair(f"{pair.module}.{number}.{parameter_leaf_name(pair, names)}", "", a, b)
        else:
            yield from entries_of_lora_pair(f"{pair.module}.{pair.leaf}", "", pair.a, pair.b)


def parameter_leaf_name(pair: ExpertPair, names: ExpertNames | None) -> str:
    if names is None:
        return pair.leaf
    return {GATE: names.gate, UP: names.up, DOWN: names.down}[pair.leaf].rpartition(".")[2]


def entries_of_lora_pair(
    module: str, inner: str, a: StoredTensor, b: StoredTensor
) -> Iterator[tuple[Entry, StoredTensor]]:
    yield Entry("A", None, module, int(bool(inner)), f"{WRAPPER}{module}{inner}.lora_A.weight"), a
    yield Entry("B", None, module, int(bool(inner)), f"{WRAPPER}{module}{inner}.lora_B.weight"), b


def with_expert_matrices(adapter: Adapter, expert_tensors: Iterable[tuple[Entry, StoredTensor]]) -> Adapter:
    """Return an adapter with `expert_tensors` in place of its expert matrices, under their names in its file."""
    entries = {name: entry for name, entry in adapter.entries.items() if not entry.of_experts}
    removed = adapter.entries.keys() - entries
    tensors = {name: one for name, one in adapter.layout.tensors.items() if name not in removed}
    for entry, tensor in expert_tensors:
        entries[entry.saved], tensors[entry.saved] = entry, tensor
    layout = replace(adapter.layout, tensors=tensors, blobs={}, keys={}, twins={})
    return replace(adapter, layout=layout, entries=entries)


def config_for_form(
    config: AdapterConfig,
    pairs: Sequence[ExpertPair],
    converted: Adapter,
    original: Adapter,
    names: ExpertNames | None,
    form: str,
) -> AdapterConfig:
    """Return the config of an adapter after its expert matrices changed their form."""
    values = dict(config.values)
    experts = {entry.module for entry in original.entries.values() if entry.of_experts}
    others = {entry.module for entry in converted.entries.values() if not entry.of_experts}
    leaves = sorted({parameter_leaf_name(pair, names) for pair in pairs})
    targets = values.get("target_modules")
    if isinstance(targets, list):
        # a target stays if it matches a module outside the experts, or no expert
        kept = [
            target
            for target in targets
            if any(ends_with_name(module, str(target)) for module in others)
            or not any(ends_with_name(module, str(target)) for module in experts)
        ]
        values["target_modules"] = kept if form == FLAT else list(dict.fromkeys([*kept, *leaves]))
    parameters = {f"{'.'.join(pair.module.split('.')[-2:])}.{pair.leaf}" for pair in pairs}
    values["target_parameters"] = sorted(parameters) if form == FLAT else None
    for key in (_RECORD, _DETAIL):
        values.pop(key, None)
    values |= rank_and_alpha_patterns(config, pairs, names)
    fitting = replace(config, values=values)
    if form == FLAT and any(find_lora_b_layout(fitting, f"{pair.module}.{pair.leaf}") != PEFT for pair in pairs):
        values[_RECORD] = _RANK_MAJOR
    content = (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
    return replace(config, content=content, values=values)


def rank_and_alpha_patterns(
    config: AdapterConfig, pairs: Sequence[ExpertPair], names: ExpertNames | None
) -> dict[str, Any]:
    """Return the `rank_pattern` and `alpha_pattern` that keep the scaling of each pair, without the defaults."""
    modules_by_leaf: dict[str, dict[tuple[int, float], list[str]]] = defaultdict(lambda: defaultdict(list))
    for pair in pairs:
        scaling = config.scaling_of(pair.source)
        alpha = scaling * (math.sqrt(pair.rank) if config.bool_setting("use_rslora") else pair.rank)
        number = "" if names is None else r"\.\d+"
        leaf = f"{number}\\.{parameter_leaf_name(pair, names)}"
        modules_by_leaf[leaf][pair.rank, round(alpha, 9)].append(re.escape(pair.module) + leaf)
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for leaf, modules_by_rank in modules_by_leaf.items():
        for (rank, alpha), modules in modules_by_rank.items():
            # one pattern for all layers if they agree, else one for each module
            keys = [f"experts{leaf}"] if len(modules_by_rank) == 1 else modules
            ranks |= dict.fromkeys(keys, rank)
            alphas |= dict.fromkeys(keys, int(alpha) if alpha.is_integer() else alpha)
    old_ranks, old_alphas = (config.values.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    if not (old_ranks or old_alphas):
        ranks = {key: rank for key, rank in ranks.items() if rank != config.values.get("r", 8)}
        alphas = {key: alpha for key, alpha in alphas.items() if alpha != config.values.get("lora_alpha", 8)}
    return {"rank_pattern": {**ranks, **old_ranks}, "alpha_pattern": {**alphas, **old_alphas}}
