"""One list of options: of the dataclass, of the functions' keywords, and of the commands."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from ckptkit import consolidate, convert, reshard
from ckptkit.errors import Usage
from ckptkit.layout.dtypes import DTYPES
from ckptkit.state.options import ConvertOptions, Keywords


def test_the_functions_take_what_the_dataclass_has() -> None:
    """But for what a preset settles, or one command only takes."""
    names = {field.name for field in fields(ConvertOptions)}
    assert names - set(Keywords.__annotations__) == {
        "to",
        "world_size",
        "under",
        "optimizer_keys",
        "optimizer_order",
        "complete_optimizer",
        "weights",
        "scales",
        "only_sharded",
    }
    assert set(Keywords.__annotations__) <= names


@pytest.mark.parametrize("given", [torch.bfloat16, [torch.bfloat16], ("*.bias=fp32", torch.bfloat16)], ids=str)
def test_a_dtype_may_be_torchs_own(given: Any) -> None:
    options = ConvertOptions.of({"dtype": given}, to="hf")
    assert options.edits.dtype_of_weights == DTYPES["bfloat16"]
    assert options.to_json()["dtype"][-1] == "torch.bfloat16"


def test_what_is_no_dtype_is_refused() -> None:
    with pytest.raises(Usage, match="unknown dtype `3`"):
        ConvertOptions.of({"dtype": cast(Any, 3)}, to="hf")


def test_what_is_not_an_option(tmp_path: Path) -> None:
    for name in ("rnaks", "weights", "only_sharded", "workers", "to"):
        given: dict[str, Any] = {name: 2}
        with pytest.raises(TypeError, match=name):
            consolidate(tmp_path, tmp_path / "out", **given)


@pytest.mark.parametrize("form", ["pt", "dcp", "ranks", "universal"])
def test_a_size_of_safetensors_files_is_refused_where_none_are_written(form: str, tmp_path: Path) -> None:
    with pytest.raises(Usage, match=f"`{form}` does not write safetensors files"):
        convert(tmp_path / "absent", tmp_path / "out", to=form, max_shard_size=1000)


def test_the_config_of_an_adapter_is_refused_where_there_is_none(tmp_path: Path) -> None:
    save_file({"up.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "adapter.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up"]}')
    with pytest.raises(Usage, match="contains no adapter") as refused:
        consolidate(tmp_path, tmp_path / "out", adapter_config=tmp_path / "adapter.json")
    assert refused.value.hint == "drop --adapter-config"


def test_options_are_checked_before_anything_is_opened(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(Usage, match="unknown format `zip`"):
        convert(absent, tmp_path / "out", to="zip")
    with pytest.raises(Usage, match="jobs: expected 1 or more, found 0"):
        convert(absent, tmp_path / "out", to="pt", jobs=0)
    with pytest.raises(Usage, match="world_size: expected 1 or more, found 0"):
        reshard(absent, tmp_path / "out", to=0)
    for size in (0, -1, "0", "-1"):
        with pytest.raises(Usage, match=f"expected a size, found `{size}`"):
            consolidate(absent, tmp_path / "out", max_shard_size=size)
    with pytest.raises(Usage, match="rename: expected REGEX=>TEXT"):
        consolidate(absent, tmp_path / "out", rename="x")
    with pytest.raises(Usage, match="expected a part like 1/8"):
        consolidate(absent, tmp_path / "out", part="3/2")
    with pytest.raises(Usage, match=r"config\.json"):
        convert(absent, tmp_path / "out", to="pt", base="org/name")


def test_one_word_or_several() -> None:
    one = ConvertOptions.of({"dtype": "bf16", "include": "model.*"}, to="hf")
    assert one == ConvertOptions.of({"dtype": ["bf16"], "include": ("model.*",)}, to="hf")


def test_options_survive_json(tmp_path: Path) -> None:
    """What another process is told; but for what concerns one process alone."""
    options = ConvertOptions.of(
        {"dtype": "bf16", "rename": ["a=>b"], "base": str(tmp_path), "jobs": 3, "part": "1/2", "sync": False},
        to="hf",
        weights=(0.1, 0.9),
    )
    told = json.loads(json.dumps(options.to_json()))
    assert not told.keys() & {"jobs", "part", "sync", "dry_run", "progress"}
    again = ConvertOptions.of({}, **told)
    assert again.to_json() == options.to_json()
    assert (again.weights, again.dtype, again.jobs) == ((0.1, 0.9), ("bf16",), None)


@pytest.mark.parametrize("given", [{"under": "app"}, {"optimizer_keys": "ids"}], ids=str)
def test_keys_of_a_format_with_fixed_keys_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Usage, match="has no effect: `universal` has fixed keys"):
        convert(tmp_path / "absent", tmp_path / "out", to="universal", **given)
