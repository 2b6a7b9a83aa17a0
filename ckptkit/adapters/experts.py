"""Find the form of an adapter's expert matrices, and the layout in which it packs lora_B of fused experts.

In the layout `peft`, column `k*E + e` of lora_B belongs to expert e, in `blocks` column `e*r + k`. unsloth trained
`blocks` until 2026.9.5. Since 2026.9.6 it uses PEFT's layout, and records which layout it used. Sources:
`ParamWrapper.get_delta_weight` in peft/tuners/lora/layer.py; `unflatten_moe_lora_b` and `saved_lora_b_layouts` in
unsloth_zoo/temporary_patches/moe_utils.py (2026.10.9); unslothai/unsloth#6930, unslothai/unsloth-zoo#1232 and #1269.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckptkit.adapters.config import AdapterConfig
from ckptkit.adapters.find import Adapter
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.io.file import read_small
from ckptkit.state.options import BLOCKS, FLAT, PEFT, PER_EXPERT, STACKED, THREE_D

_HINT = "pass --experts-layout blocks if unsloth 2026.9.5 or older trained the adapter, or else --experts-layout peft"

_RECORDED = {"rank_major": PEFT, "grouped_by_expert": BLOCKS}
_FLAT, _DETAIL = "lora_B_layout", "unsloth_fused_expert_lora"
_CARD, _TAG = "README.md", "- unsloth"  # the model card of an adapter that unsloth trained has this tag
_LIMIT = 1 << 24  # bytes of a model card


def find_expert_form(adapter: Adapter) -> str | None:
    """Return the form of an adapter's expert matrices; None if it has none. Raises `Mismatch` for several forms."""
    specs = adapter.layout.specs
    name_by_form = {}
    for name, entry in adapter.entries.items():
        if place := entry.of_experts:
            all_in_one = STACKED if len(specs[name].shape) == 3 else FLAT
            form = PER_EXPERT if place.expert is not None else THREE_D if place.leaf else all_in_one
            name_by_form[form] = name
    if len(name_by_form) > 1:
        message = f"the adapter stores experts as {' and '.join(sorted(name_by_form))}"
        raise Mismatch(message, path=adapter.layout.path, tensor=next(iter(name_by_form.values())))
    return next(iter(name_by_form), None)


def find_lora_b_layout(config: AdapterConfig, parameter: str) -> str | None:
    """Return the layout of lora_B of a fused-experts parameter: `peft` or `blocks`; None if no file says.

    unsloth's record takes precedence. Without a record, an adapter of unsloth may have either layout. For any other
    library, `peft_version` in the config shows that PEFT wrote the adapter.
    """
    mapping = config.values.get("auto_mapping")  # where unsloth records itself
    mapping = mapping if isinstance(mapping, dict) else {}
    leaf = parameter.rpartition(".")[2]
    for record in (config.values, mapping):
        if _FLAT in record or _DETAIL in record:
            return _RECORDED.get(unsloth_layout_of(record, leaf))
    if "peft_version" not in config.values or "unsloth" in json.dumps(mapping):
        return None
    card = config.path.parent / _CARD
    is_tagged = card.is_file() and _TAG in read_small(card, _LIMIT).decode(errors="replace").splitlines()
    return None if is_tagged else PEFT


def choose_lora_b_layout(
    config: AdapterConfig, parameter: str, count: int, rank: int, option: str | None, tensor: str
) -> str:
    """Return the layout of lora_B of fused experts: `option`, or else the layout that the files record.

    For one expert or rank 1 both layouts are the same. Raises `Unsupported` if the layout is unknown.
    """
    if 1 in (count, rank):
        return PEFT
    layout = option or find_lora_b_layout(config, parameter)
    if layout is None:
        message = f"no file records the layout of lora_B for {count} experts of rank {rank}: peft or blocks"
        raise Unsupported(message, path=config.path, tensor=tensor, hint=_HINT)
    return layout


def remarks_on_lora_b_layout(config: AdapterConfig) -> list[str]:
    """Return a remark if an adapter of fused experts has a layout other than PEFT's, or an unknown one."""
    layouts = {
        name: find_lora_b_layout(config, name) or "unknown" for name in config.name_list_setting("target_parameters")
    }
    unlike = ", ".join(f"{name} ({layout})" for name, layout in layouts.items() if layout != PEFT)
    if not unlike:
        return []
    option = " --experts-layout peft|blocks" if "unknown" in layouts.values() else ""
    hint = f"pass --merge{option} to write the merged model instead"
    return [f"loaders of adapters expect lora_B of experts in PEFT's layout, found {unlike}; {hint}"]


def unsloth_layout_of(record: Mapping[str, Any], leaf: str) -> str:
    """Return the layout that unsloth recorded for a parameter; "" without a record."""
    detail = record.get(_DETAIL)
    parameters = detail.get("parameters") if isinstance(detail, dict) else None
    if not isinstance(parameters, dict):
        return str(record.get(_FLAT))
    entry = parameters.get(leaf)
    return str(entry.get(_FLAT)) if isinstance(entry, dict) else ""
