import json
from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit.errors import NotACheckpoint, Unsupported, Usage
from ckptkit.train.config import TrainConfig
from ckptkit.train.model_config import SIZES, ModelConfig


@pytest.mark.parametrize("size", SIZES)
def test_every_size_survives_its_config_json(tmp_path: Path, size: str) -> None:
    config = ModelConfig.sized(size, tied=False)
    (tmp_path / "config.json").write_text(config.to_json())
    assert ModelConfig.read(tmp_path / "config.json") == config


def test_transformers_reads_and_writes_the_same_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = replace(ModelConfig(), rope_theta=5e5, rms_norm_eps=1e-4, head_dim=32, tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(config.to_json())
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "theirs")
    assert ModelConfig.read(tmp_path / "theirs/config.json") == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mixtral"),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_what_the_built_in_llama_cannot_be_is_named(tmp_path: Path, key: str, value: object) -> None:
    keys = json.loads(ModelConfig().to_json())
    del keys["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(keys | {key: value}))
    with pytest.raises(Unsupported) as raised:
        ModelConfig.read(tmp_path / "config.json")
    assert raised.value.path == tmp_path / "config.json"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "llama", "num_attention_heads": "many"}', "\x00"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(NotACheckpoint):
        ModelConfig.read(tmp_path / "config.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": 0},
        {"hidden_size": 65},
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        {"head_dim": 15},
    ],
)
def test_a_model_that_contradicts_itself_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Usage):
        ModelConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"clip": 0.0},
        {"seed": 2**32},
        {"sequence_length": 4096},
        {"device": "tpu"},
        {"model": ModelConfig(vocab_size=100)},
    ],
)
def test_a_run_that_contradicts_itself_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(Usage):
        TrainConfig(run=tmp_path, **wrong)  # type: ignore[arg-type]
