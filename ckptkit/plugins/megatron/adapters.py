"""Translate the adapters of Megatron's trainers to PEFT's names on the Hub's modules, without copying data.

Megatron-Bridge names the matrices `linear_qkv.adapter.linear_in` (A) and `linear_out` (B), and those of its canonical
LoRA `linear_qkv.adapter.adapter_q.linear_in`; ms-swift uses PEFT's names on Megatron's modules. B has the rows of
Megatron's weight, so the fused query, key and value matrix, or gate and up, is split as that weight is; all of them
share A. Equal layers may be stacked in one tensor. Sources: megatron/bridge/peft/{utils,canonical_lora,lora}.py and
models/conversion/peft_bridge.py of Megatron-Bridge; swift/megatron/utils/megatron_lm_utils.py.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.adapters.config import NAME, AdapterConfig
from ckptkit.adapters.names import DEFAULT
from ckptkit.errors import Corrupt, Mismatch, NotACheckpoint, Unsupported, Usage
from ckptkit.formats import decompress_entries, locate_all_chunks
from ckptkit.io.file import is_existing_path, read_small
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor, axes, edits
from ckptkit.layout.box import full_box
from ckptkit.models.companions import find_companions
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.steps import grouped_query_head_sizes
from ckptkit.models.names.weights import Weights
from ckptkit.plugins.megatron.arguments import COMMON, read_job_arguments
from ckptkit.plugins.megatron.names import MEGATRON

_MATRICES = {"linear_in": "A", "lora_A": "A", "linear_out": "B", "lora_B": "B"}
_BRIDGE = re.compile(r"(.+)\.adapter(?:\.adapter_(q|k|v|gate|up))?\.(linear_in|linear_out)\.weight")
_SWIFT = re.compile(
    r"(?:base_model\.model\.)?(decoder\.(?:.+\.)?(?:linear_\w+|router))()\.(lora_A|lora_B)(?:\.([^.]+))?\.weight"
)
_WHOLE = re.compile(r"(?:base_model\.model\.)?((?:.+\.)?)modules_to_save\.([^.]+)\.(.+)")  # a fully trained module
_OF_PEFT = re.compile(r"(?:.*\.)?(?:lora_\w+|modules_to_save)\..*")
_OF_BASE = "of the base, not the adapter"
_SAVED = "run_config.yaml"
_LIMIT = 1 << 24  # bytes
_LORA = re.compile(r"megatron\.bridge\.peft\.(lora\.(VLM)?LoRA|canonical_lora\.CanonicalLoRA)")


@dataclass(frozen=True, slots=True)
class TrainerMatrix:
    """A LoRA matrix A or B: the Megatron module that it changes, and the `part` of the module if not all of it."""

    module: str
    part: str
    kind: str


def parse_lora_matrix_name(name: str) -> TrainerMatrix | None:
    """Return the LoRA matrix that a tensor name of Megatron's trainers stands for; None for any other tensor."""
    match = _BRIDGE.fullmatch(name) or _SWIFT.fullmatch(name)
    return TrainerMatrix(match[1], match[2] or "", _MATRICES[match[3]]) if match else None


def has_adapter_matrix(names: Collection[str]) -> bool:
    return any(parse_lora_matrix_name(name) for name in names)


def with_hub_names(weights: Weights, path: Path, base: str | None) -> Weights:
    """Return the matrices of an adapter under PEFT's names for the Hub's modules, as config.json describes the model.

    Raises `Usage` without a config.json, `Unsupported` for adapter tensors other than LoRA matrices.
    """
    layout = weights.layout
    require_supported_adapter(layout)
    config = find_companions(path, base).config
    if config is None:
        message = "the names are Megatron's, and the Hub's follow from the base's config.json, which was not found"
        first = next(name for name in layout.tensors if parse_lora_matrix_name(name))
        raise Usage(message, path=path, tensor=first, hint="pass --base MODEL")
    pairs: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # matrix names by (module, part), then "A" and "B"
    for name in layout.tensors:
        if (matrix := parse_lora_matrix_name(name)) is not None:
            pairs[matrix.module, matrix.part][matrix.kind] = name
    unpaired = next((name for names in pairs.values() for name in names.values() if len(names) < 2), None)
    if unpaired is not None:
        raise Mismatch("the other of the two matrices is missing", path=layout.path, tensor=unpaired)
    # Megatron's names of the tensors in modules that ms-swift trained in full
    full_modules = {name: match[1] + match[3] for name in layout.tensors if (match := _WHOLE.fullmatch(name))}
    used = {name for names in pairs.values() for name in names.values()} | full_modules.keys()
    unpacked = locate_all_chunks(decompress_entries(edits.select_entries(layout, used.__contains__)))
    named = [*hub_matrices(unpacked, pairs, Sizes(config)), *hub_full_modules(unpacked, full_modules, Sizes(config))]
    tensors = {new: tensor for new, tensor, _ in named}
    came_from = {new: weights.came_from[old] for new, _, old in named}
    others = {old: _OF_BASE for name, old in weights.came_from.items() if name not in used}
    translated = replace(unpacked, tensors=tensors, blobs={}, keys={}, twins={})
    return replace(weights, layout=translated, came_from=came_from, left_out={**weights.left_out, **others})


def hub_matrices(
    layout: Layout, pairs: Mapping[tuple[str, str], Mapping[str, str]], sizes: Sizes
) -> Iterator[tuple[str, StoredTensor, str]]:
    """Yield each matrix as (new PEFT name, tensor, old name)."""
    for (module, part), names in pairs.items():
        a, b = (layout.tensors[names[kind]] for kind in "AB")
        try:
            named = list(hub_weights_with_matrices(module, part, a, b, sizes))
        except Mismatch as error:
            raise Mismatch(error.message, path=layout.root, tensor=names["B"], hint=error.hint) from None
        for new, one, other in named:
            for kind, tensor in (("A", one), ("B", other)):
                yield f"{new.removesuffix('.weight')}.lora_{kind}.{DEFAULT}.weight", tensor, names[kind]


def hub_full_modules(
    layout: Layout, full_modules: Mapping[str, str], sizes: Sizes
) -> Iterator[tuple[str, StoredTensor, str]]:
    """Yield the tensors of fully trained modules, without padding, as (new name, tensor, old name)."""
    for name, own_name in full_modules.items():
        for new, tensor in MEGATRON.to_hub({own_name: layout.tensors[name]}, sizes).tensors.items():
            module, _, leaf = new.rpartition(".")
            yield f"{module}.modules_to_save.{DEFAULT}.{leaf}", tensor, name


def require_supported_adapter(layout: Layout) -> None:
    """Raise `Unsupported` for adapters of experts, DoRA, and several adapters."""
    adapters = set()
    for name in layout.tensors:
        match = _SWIFT.fullmatch(name)
        full_module = _WHOLE.fullmatch(name)
        adapters |= {match[4]} if match else {full_module[2]} if full_module else set()
        matrix = parse_lora_matrix_name(name)
        hint = "merge the adapter with the trainer that wrote it, and convert the model"
        if matrix is not None and ".experts." in name:
            raise Unsupported("an adapter of experts under Megatron's names", path=layout.path, tensor=name, hint=hint)
        if matrix is None and ".adapter." in name and not name.endswith("_extra_state"):
            message = "expected linear_in and linear_out of LoRA in an adapter of Megatron-Bridge, found another tensor"
            raise Unsupported(message, path=layout.path, tensor=name, hint=hint)
        if matrix is None and full_module is None and _OF_PEFT.fullmatch(name):
            message = "expected LoRA of linear layers in an adapter of ms-swift, found another tensor"
            raise Unsupported(message, path=layout.path, tensor=name, hint=hint)
    if len(adapters) > 1:
        message = f"expected one adapter under Megatron's names, found {', '.join(sorted(map(str, adapters)))}"
        raise Unsupported(message, path=layout.path, hint="drop the others with --exclude '*.NAME.*'")


def hub_weights_with_matrices(
    module: str, part: str, a: StoredTensor, b: StoredTensor, sizes: Sizes
) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    """Yield the Hub's weights that a Megatron module consists of, each with its matrices A and B."""
    layers = axes.unstack(a) if len(a.spec.shape) == 3 else None
    rows = b
    if part:  # zeros in the shape of a B for all parts, to find the Hub's names of the parts
        *stacked, _, rank = b.spec.shape
        groups, per_group, width = grouped_query_head_sizes(sizes)
        row_count = groups * (per_group + 2) * width if module.endswith("linear_qkv") else 2 * b.spec.shape[-2]
        shape = (*stacked, row_count, rank)
        rows = StoredTensor(Spec(b.spec.dtype, shape), (Chunk.of_zeros(full_box(shape), b.spec.dtype),))
    for name, cut in MEGATRON.to_hub({f"{module}.weight": rows}, sizes).tensors.items():
        layer = next((int(step) for step in name.split(".") if step.isdecimal()), 0)
        if part and not name.endswith(f".{part}_proj.weight"):
            continue
        part_b = axes.unstack(b)[layer] if part and layers is not None else b
        yield name, a if layers is None else layers[layer], part_b if part else cut


def config_for_hub_modules(
    config: AdapterConfig | None, saved: Layout, modules: Collection[str], replaced: Collection[str]
) -> AdapterConfig:
    """Return the adapter config with the Hub's modules as targets, from `config` or from the trainer's settings.

    `replaced` are the parameters of fully trained modules. Raises `NotACheckpoint` if the trainer saved no settings.
    """
    targets = sorted({module.rpartition(".")[2] for module in modules})
    path, settings = (config.path, config.values) if config else read_trainer_settings(saved)
    full_modules = sorted({parameter.split(".")[-2] for parameter in replaced})
    values = {**settings, "target_modules": targets, "modules_to_save": full_modules or None}
    content = (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
    return AdapterConfig(path, content, values)


def read_trainer_settings(saved: Layout) -> tuple[Path, dict[str, Any]]:
    """Return the file with the trainer's settings, and these settings in keys of PEFT's config."""
    if (file := saved.root / _SAVED).is_file():  # of Megatron-Bridge, with a section `peft`
        text = read_small(file, _LIMIT).decode(errors="replace")
        section = re.search(r"^peft:\n((?:[ -].*\n?)+)", text, re.MULTILINE)
        facts = dict(re.findall(r"^  (\w+): *(\S+) *$", section[1], re.MULTILINE)) if section else {}
        if not _LORA.fullmatch(facts.get("_target_", "")):
            raise Unsupported(f"`peft`: expected LoRA of Megatron-Bridge, found {facts.get('_target_')}", path=file)
        dim, scale = (facts.get(key, "") for key in ("dim", "alpha"))
        if not (dim.isdecimal() and re.fullmatch(r"[0-9]+(\.[0-9]+)?", scale)):
            raise Corrupt(f"`peft`: expected numbers for dim and alpha, found `{dim}` and `{scale}`", path=file)
        return file, {"peft_type": "LORA", "r": int(dim), "lora_alpha": float(scale) if "." in scale else int(scale)}
    args = read_job_arguments(saved)
    rank, alpha = args.get("lora_rank"), args.get("lora_alpha")
    if type(rank) is not int or type(alpha) not in (int, float):
        message = f"there is no {NAME}, no {_SAVED} of Megatron-Bridge and no argument of ms-swift: alpha is unknown"
        raise NotACheckpoint(message, path=saved.root, hint="pass --adapter-config FILE")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": args.get("use_rslora") is True}
    return saved.root / COMMON if is_existing_path(saved.root / COMMON) else saved.root, values
