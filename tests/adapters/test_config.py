"""Configs of adapters: what they say of a module, as PEFT itself reads them, and what a stranger may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.adapters.config import AdapterConfig, find_adapter_config, parse_adapter_config
from ckptkit.errors import CkptError, Corrupt, Unsupported

GOOD: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def config(tmp_path: Path, **values: Any) -> AdapterConfig:
    """A config that says this."""
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**GOOD, **values}))
    return parse_adapter_config(path)


def test_ranks_and_scalings_of_modules(tmp_path: Path) -> None:
    patterns = {
        "rank_pattern": {"^model.layers.0.q_proj": 2, r"layers\.1\..*k_proj": 4},
        "alpha_pattern": {"q_proj": 6},
    }
    found = config(tmp_path, **patterns)
    modules = ("model.layers.0.q_proj", "model.layers.1.q_proj", "model.layers.1.attn.k_proj", "vq_proj")
    assert [found.rank_of(module) for module in modules] == [2, 8, 4, 8]
    assert [found.scaling_of(module) for module in modules] == [3.0, 0.75, 4.0, 2.0]
    assert config(tmp_path, use_rslora=True, lora_alpha=4, r=16).scaling_of("q") == 1.0


def test_patterns_match_as_they_do_for_the_library(tmp_path: Path) -> None:
    get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key
    for pattern in ("q_proj", "layers.1.q_proj", "^model.layers.0.q_proj", r"layers\.[01]\.q_proj", "proj", "q_pro."):
        found = config(tmp_path, rank_pattern={pattern: 3})
        for module in ("model.layers.0.q_proj", "layers.1.q_proj", "q_proj", "mq_proj", "q_proj.x"):
            assert (found.rank_of(module) == 3) == (get_pattern_key([pattern], module) == pattern), (pattern, module)


NUMBERS: dict[str, list[Any]] = {
    "r": [0, -1, 2**40, 1.5, True, "8", None, [8], 10**400],
    "lora_alpha": [float("nan"), float("inf"), "16", True, [], 1e300, 10**400],
    "rank_pattern": [{"q": 2**40}, {"q": "2"}, ["q"], {"(": 2}, {"q{9999999999}": 2}],
    "use_rslora": [2, "yes", [1]],
    "use_dora": [2, "yes", [1]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NUMBERS.items() for value in values])
def test_hostile_numbers(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(CkptError) as raised:
        found = config(tmp_path, **{key: value})
        found.scaling_of("q")
        found.bool_setting("use_dora")
        found.require_supported_settings()
    assert raised.value.exit_code == 3
    assert raised.value.path == tmp_path / "adapter_config.json"


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a+)+b", ".*.*.*.*.*x", "(a|aa)+$", "(?:a{1,9}){1,9}", "x" * 10_000])
def test_patterns_take_little_time(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(Unsupported):
        config(tmp_path, rank_pattern={pattern: 2}).rank_of("a" * 60)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("peft_type", name) for name in ("IA3", "LOHA", "")),
        *(("use_qalora", True), ("alora_invocation_tokens", [1, 2]), ("arrow_config", {"top_k": 1})),
        *(("use_bdlora", {"nblocks": 2}), ("kasa_config", {"beta": 1}), ("monteclora_config", {"n": 1})),
        *(("velora_config", {"n": 1}), ("megatron_config", {"n": 1}), ("layer_replication", [[0, 4]])),
        ("a_method_of_tomorrow", {"n": 1}),
    ],
)
def test_methods_that_are_not_known_are_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(Unsupported) as raised:
        config(tmp_path, **{key: value}).require_supported_settings()
    assert key in raised.value.message or str(value) in raised.value.message


@pytest.mark.parametrize("text", ["[]", "{}", '{"peft_type": 3}', "no json", '{"r": 1, "r": 2}', "[" * 100_000])
def test_what_is_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(text)
    with pytest.raises(Corrupt):
        parse_adapter_config(path)


def test_where_configs_lie(tmp_path: Path) -> None:
    """Beside the model's part, in the checkpoint or in the run; that of any but `default` in a folder of its name."""
    part = tmp_path / "run" / "checkpoint-3" / "pytorch_model_fsdp_0"
    (part.parent / "other").mkdir(parents=True)
    part.mkdir()
    assert find_adapter_config(part) is None
    config(tmp_path / "run")
    config(part.parent / "other", r=2)
    found, other = find_adapter_config(part), find_adapter_config(part, "other")
    assert found is not None
    assert other is not None
    assert (found.rank_of("q"), other.rank_of("q")) == (8, 2)
