"""Read `adapter_config.json`: ranks, scalings, and settings that ckptkit does not support.

The file may come from an untrusted source: numbers are checked, and name patterns are matched only if matching is
cheap. PEFT looks up ranks and alphas by the name of a module, or by the name of a parameter if the parameter itself is
a target. Source: peft/tuners/lora/{config,model}.py; `_inject_parameters` in peft/tuners/tuners_utils.py;
`get_pattern_key` and `_set_trainable` in peft/utils/other.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.adapters.names import DEFAULT
from ckptkit.errors import Corrupt, NotACheckpoint, Unsupported
from ckptkit.formats.json_text import parse_json
from ckptkit.io.file import read_small
from ckptkit.models.adapter_config_differences import ADAPTER_CONFIG
from ckptkit.models.companions import directories_to_search

NAME = ADAPTER_CONFIG
_LIMIT = 1 << 24  # bytes: the file may be hostile, so its size is bounded
_MAX_RANK = 1 << 31
_MAX_ALPHA = 1e30  # small enough for a float32 factor
_MAX_REPEATS = 3  # in a pattern: the cost of a regex match grows with this power of the name's length
_MAX_PATTERN = 500  # characters: bounds the time to compile and match a hostile pattern
_SUPPORTED_KEYS = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern"),
        *("alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "bias", "lora_bias", "modules_to_save"),
        *("target_parameters", "trainable_token_indices", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        *("ensure_weight_tying", "runtime_config", "lora_B_layout", "unsloth_fused_expert_lora"),
    }
)
_ALL = "all-linear"


@dataclass(frozen=True)
class AdapterConfig:
    """The config of an adapter: the bytes and the parsed values of the file at `path`."""

    path: Path
    content: bytes
    values: Mapping[str, Any]

    @cached_property
    def peft_type(self) -> str:
        """Return the value of `peft_type`, which is `LORA` for every method that ckptkit can merge."""
        return str(self.values.get("peft_type"))

    @cached_property
    def base(self) -> str | None:
        """Return the id or path of the base model; None if the config does not name it."""
        base_name = self.values.get("base_model_name_or_path")
        return base_name if isinstance(base_name, str) and base_name else None

    def bool_setting(self, key: str) -> bool:
        """Return a boolean setting; False if it is missing. Raises `Corrupt` for a value of another type."""
        value = self.values.get(key)
        if value not in (None, True, False):
            raise Corrupt(f"`{key}`: expected true or false, found {value!r}", path=self.path)
        return bool(value)

    def name_list_setting(self, key: str) -> tuple[str, ...]:
        """Return a list of names; () if it is missing. Raises `Corrupt` for a value of another type."""
        value = self.values.get(key) or []
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise Corrupt(f"`{key}`: expected a list of names, found {as_short_json(value)}", path=self.path)
        return tuple(value)

    @property
    def bias(self) -> str:
        """Return which biases were trained: `none`, `all` or `lora_only`. Raises `Corrupt` for another value."""
        value = self.values.get("bias") or "none"
        if value not in ("none", "all", "lora_only"):
            raise Corrupt(f"`bias`: expected none, all or lora_only, found {value!r}", path=self.path)
        return str(value)

    def target_parameters_of(self, module: str) -> tuple[str, ...]:
        """Return the parameters of a module that `target_parameters` may name; PEFT adapts these instead."""
        targets = [target.rpartition(".") for target in self.name_list_setting("target_parameters")]
        return tuple(f"{module}.{leaf}" for above, _, leaf in targets if not above or ends_with_name(module, above))

    def is_target(self, module: str) -> bool:
        """Return whether this config makes PEFT adapt the module.

        Returns False if only a pattern that is too expensive to match could decide. Source:
        `check_target_module_exists` in peft/tuners/tuners_utils.py.
        """
        if self.matches_setting("exclude_modules", module):
            return False
        if isinstance(self.values.get("target_modules"), str):
            return self.matches_setting("target_modules", module)
        parents = (target.rpartition(".")[0] for target in self.name_list_setting("target_parameters"))
        named = [*self.name_list_setting("target_modules"), *parents]
        if named and not any(ends_with_name(module, name) for name in named):
            return False
        layers = self.values.get("layers_to_transform")
        wanted = [layers] if isinstance(layers, int) else layers if isinstance(layers, list) else []
        if not wanted:
            return True
        lists = "|".join(map(re.escape, self.name_list_setting("layers_pattern"))) or r"[^.]*"
        match = re.match(rf"(?:.*?\.)?(?:{lists})\.([0-9]+)\.", module)
        return match is not None and int(match[1]) in wanted

    def matches_setting(self, key: str, module: str) -> bool:
        """Return whether the pattern or list under `key` matches a module; `all-linear` matches every module."""
        value = self.values.get(key)
        if not isinstance(value, str):
            return any(ends_with_name(module, name) for name in self.name_list_setting(key))
        try:
            return value == _ALL or matches_module(value, module, self.path)
        except Unsupported:
            return False

    def rank_of(self, module: str) -> int:
        """Return the rank of a module or of a target parameter. Raises `Corrupt` if it is not a positive number."""
        rank = self.setting_for_module("rank_pattern", "r", module)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= _MAX_RANK:
            raise Corrupt(f"rank of `{module}`: expected 1 to {_MAX_RANK}, found {rank!r}", path=self.path)
        return rank

    def scaling_of(self, module: str) -> float:
        """Return the factor of the product B A of a module: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        alpha, rank = self.setting_for_module("alpha_pattern", "lora_alpha", module), self.rank_of(module)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not is_usable_alpha(alpha):
            raise Corrupt(
                f"alpha of `{module}`: expected a number below {_MAX_ALPHA:g}, found {alpha!r}", path=self.path
            )
        return alpha / math.sqrt(rank) if self.bool_setting("use_rslora") else alpha / rank

    def setting_for_module(self, patterns: str, key: str, module: str) -> Any:
        """Return the value of the first pattern that matches a module's name, or else the value for all modules."""
        values_by_pattern = self.values.get(patterns) or {}
        if not isinstance(values_by_pattern, dict):
            message = f"`{patterns}`: expected a mapping of names, found {as_short_json(values_by_pattern)}"
            raise Corrupt(message, path=self.path)
        for pattern, value in values_by_pattern.items():
            if matches_module(pattern, module, self.path):
                return value
        return values_by_pattern.get(module, self.values.get(key, 8))  # 8 is the default of PEFT

    def trained_token_indices(self, module: str) -> tuple[int, ...]:
        """Return the indices of an embedding's trained rows. Raises `Corrupt` if any is repeated, or none listed."""
        indices = self.values.get("trainable_token_indices")
        if isinstance(indices, dict):
            indices = next((rows for name, rows in indices.items() if module.endswith(name)), None)
        if not isinstance(indices, list) or not all(type(row) is int and row >= 0 for row in indices):
            message = f"`trainable_token_indices`: expected the trained rows of `{module}`, found none"
            raise Corrupt(message, path=self.path)
        if len(set(indices)) != len(indices):
            raise Corrupt(f"`trainable_token_indices` lists a row of `{module}` twice", path=self.path)
        return tuple(indices)

    def require_supported_settings(self) -> None:
        """Raise `Unsupported` for a method or a setting whose arithmetic ckptkit does not implement."""
        if self.peft_type != "LORA":
            raise Unsupported(
                f"expected a LoRA adapter, found {self.peft_type}: ckptkit merges only LoRA", path=self.path
            )
        for key, value in self.values.items():
            if key not in _SUPPORTED_KEYS and value not in (None, False, [], {}):
                what = f"`{key}` is {as_short_json(value)}"
                message = f"{what}: ckptkit cannot merge adapters that were trained with this setting"
                raise Unsupported(message, path=self.path)


def parse_adapter_config(path: Path) -> AdapterConfig:
    """Return the adapter config in a file. Raises `Corrupt` if the file has no `peft_type`."""
    content = read_small(path, _LIMIT)
    values = parse_json(content, path)
    if not isinstance(values, dict) or not isinstance(values.get("peft_type"), str):
        raise Corrupt("expected the config of an adapter, found no `peft_type`", path=path)
    return AdapterConfig(path, content, values)


def find_adapter_config(
    checkpoint: Path, adapter: str = DEFAULT, config_path: str | None = None
) -> AdapterConfig | None:
    """Return the config of an adapter: in file or directory `config_path`, else beside the checkpoint or in its run.

    PEFT saves the config of adapter `default` at the top, and any other config in a directory named after the adapter.
    Raises `NotACheckpoint` if `config_path` has no config.
    """
    if config_path is not None:
        path = Path(config_path)
        path = path / NAME if path.is_dir() else path
        if not path.is_file():
            raise NotACheckpoint("no adapter config", path=path)
        return parse_adapter_config(path)
    for directory in directories_to_search(checkpoint.absolute()):
        path = directory / NAME if adapter == DEFAULT else directory / adapter / NAME
        if path.is_file():
            return parse_adapter_config(path)
    return None


def config_bytes_for_inference(config: AdapterConfig) -> bytes:
    """Return the config as PEFT saves it after training, with `inference_mode` on."""
    if config.values.get("inference_mode") is True:
        return config.content
    return (json.dumps({**config.values, "inference_mode": True}, indent=2, sort_keys=True) + "\n").encode()


def is_usable_alpha(alpha: float) -> bool:
    """Return whether alpha is finite and small enough for a float32 factor."""
    return abs(alpha) < _MAX_ALPHA


def matches_module(pattern: str, module: str, path: Path) -> bool:
    """Return whether a pattern matches the end of a name. Raises `Unsupported` if it may take long, or `Corrupt`."""
    repeats = sum(pattern.count(sign) for sign in "*+{")
    if repeats > _MAX_REPEATS or len(pattern) > _MAX_PATTERN or re.search(r"\)[*+{]", pattern):
        hint = "write the names of the modules in place of the pattern"
        raise Unsupported(
            f"ckptkit refuses the pattern `{pattern[:60]}`: matching it could take too long", path=path, hint=hint
        )
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise Corrupt(f"the pattern `{pattern[:60]}` is invalid: {error}", path=path) from error


def ends_with_name(module: str, name: str) -> bool:
    """Return whether a module has this name, or a name that ends with it."""
    return module == name or module.endswith(f".{name}")


def as_short_json(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 60 else f"{text[:57]}..."
