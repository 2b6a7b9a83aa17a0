"""The facts about an adapter's computation in adapter_config.json. Source: peft/tuners/lora/{config,model}.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.formats.json_text import parse_json
from ckptkit.io.file import read_small
from ckptkit.models.companions import directories_to_search
from ckptkit.models.config_differences import ConfigDifference

ADAPTER_CONFIG = "adapter_config.json"
_LIMIT = 1 << 24  # bytes: the file may be hostile, so its size is bounded
BASE = "base_model_name_or_path"
_INIT = "init_lora_weights"
_BASE_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that modify the base's weights
# keys without effect on what an adapter computes, or whose effect is visible in its tensors
_NOT_COMPUTED = frozenset(
    (
        *("auto_mapping", BASE, "revision", "peft_version", "inference_mode", "task_type"),
        *("lora_dropout", _INIT, "loftq_config", "eva_config", "corda_config", "runtime_config"),
        *("target_modules", "target_parameters", "exclude_modules", "modules_to_save", "layers_to_transform"),
        *("layers_pattern", "trainable_token_indices", "megatron_config", "megatron_core"),
    )
)


def find_adapter_config_values(path: Path) -> Mapping[str, Any] | None:
    """Return the config of the adapter at a path, in its directory or in its run; None without one."""
    for directory in directories_to_search(path.absolute()):
        file = directory / ADAPTER_CONFIG
        if file.is_file():
            config = parse_json(read_small(file, _LIMIT), file)
            return config if isinstance(config, dict) else None
    return None


def find_adapter_differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return the settings that make two adapters with the same tensors compute different results."""
    counting = {*one, *two} - _NOT_COMPUTED
    if peft_modifies_base(one) or peft_modifies_base(two):
        counting.add(_INIT)
    pairs = ((key, one.get(key), two.get(key)) for key in sorted(counting))
    return [ConfigDifference(key, here, there) for key, here, there in pairs if here != there and (here or there)]


def peft_modifies_base(adapter: Mapping[str, Any]) -> bool:
    """Return whether PEFT modifies the base's weights before it adds the adapter to them."""
    return str(adapter.get(_INIT)).lower().startswith(_BASE_CHANGED)
