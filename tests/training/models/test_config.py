import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptkit.errors import NotACheckpoint, Unsupported, Usage
from ckptkit.training.models.config import SIZES, ModelConfig, RopeScaling
from ckptkit.training.models.llama import LlamaBlueprint

LLAMA3 = RopeScaling(rope_type="llama3", factor=32.0, original_max_position_embeddings=64)
LINEAR = RopeScaling(rope_type="linear", factor=2.0)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_survives_its_config_json(tmp_path: Path, size: str) -> None:
    config = ModelConfig.of_size(size, tied=False, vocab_size=300)
    (tmp_path / "config.json").write_text(config.to_json())
    assert ModelConfig.from_config_json(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("size", "tied", "parameters"),
    [("1b", True, 1_235_814_400), ("3b", True, 3_212_749_824), ("8b", False, 8_030_261_248),
     ("70b", False, 70_553_706_496)],
)  # fmt: skip
def test_the_sizes_of_llama_3_have_its_parameters_with_its_vocabulary(size: str, tied: bool, parameters: int) -> None:
    with torch.device("meta"):
        model = LlamaBlueprint(ModelConfig.of_size(size, tied=tied, vocab_size=128256)).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_a_size_has_the_vocabulary_of_bytes_unless_told() -> None:
    assert ModelConfig.of_size("tiny").vocab_size == 256
    assert ModelConfig.of_size("tiny", vocab_size=1000) == ModelConfig(vocab_size=1000)
    with pytest.raises(Usage, match="vocab_size"):
        ModelConfig.of_size("tiny", vocab_size=0)
    with pytest.raises(Usage, match="unknown model size `huge`"):
        ModelConfig.of_size("huge")


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3])
def test_transformers_reads_and_writes_the_same_config(tmp_path: Path, scaling: RopeScaling | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = replace(
        ModelConfig(), rope_theta=5e5, rms_norm_eps=1e-4, head_dim=32, tie_word_embeddings=False, rope_scaling=scaling
    )
    (tmp_path / "config.json").write_text(config.to_json())
    assert ModelConfig.from_config_json(tmp_path / "config.json") == config
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "theirs")
    assert ModelConfig.from_config_json(tmp_path / "theirs/config.json") == config


def test_rope_scaling_is_read_as_older_files_have_it(tmp_path: Path) -> None:
    keys = json.loads(ModelConfig().to_json())
    del keys["rope_parameters"]
    for scaling in ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}):
        (tmp_path / "config.json").write_text(json.dumps(keys | {"rope_theta": 7e4, "rope_scaling": scaling}))
        assert ModelConfig.from_config_json(tmp_path / "config.json") == ModelConfig(
            rope_theta=7e4, rope_scaling=LINEAR
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mixtral"),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ],
)
def test_what_the_built_in_llama_cannot_be_is_named(tmp_path: Path, key: str, value: object) -> None:
    keys = json.loads(ModelConfig().to_json())
    del keys["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(keys | {key: value}))
    with pytest.raises(Unsupported) as raised:
        ModelConfig.from_config_json(tmp_path / "config.json")
    assert raised.value.path == tmp_path / "config.json"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "llama", "num_attention_heads": "many"}', "\x00"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(NotACheckpoint):
        ModelConfig.from_config_json(tmp_path / "config.json")


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


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"factor": float("nan")}, {"low_freq_factor": 4.0}])
def test_a_rope_scaling_that_contradicts_itself_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(Usage):
        replace(LLAMA3, **wrong)  # type: ignore[arg-type]
