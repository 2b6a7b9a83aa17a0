import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit.errors import IOFailure, Usage
from ckptkit.training.config import (
    SETTINGS,
    TrainConfig,
    read_settings,
    settings_from_file,
    settings_to_resume_with,
    train_settings,
)

RUN = TrainConfig(run=Path("run"))
UNUSUAL = replace(
    RUN, model='a "b"\\c', untied=True, weights=Path("w\x7f/é"), freeze=("a.*", "b"), lr=3e-4, fsdp="1", keep_last=2,
    keep_every=5, strategy="shard_grad_op", compile=True, tokenizer="t\n",
)  # fmt: skip


@pytest.mark.parametrize("config", [RUN, UNUSUAL])
def test_settings_survive_toml(tmp_path: Path, config: TrainConfig) -> None:
    (tmp_path / "train.toml").write_text(config.to_toml())
    assert TrainConfig(run=config.run, **read_settings(tmp_path / "train.toml")) == config


def test_toml_holds_every_setting_that_has_a_value_and_nothing_of_one_run_alone() -> None:
    kept = tomllib.loads(replace(UNUSUAL, resume="auto", weights=None).to_toml())
    assert kept.keys() == train_settings().keys() - {"weights", "data", "keep_best", "lora_rank"}
    assert "run" not in train_settings()
    assert "resume" not in train_settings()


def test_every_setting_says_what_it_means() -> None:
    for name, setting in train_settings().items():
        assert setting.text.endswith("."), name
        assert getattr(RUN, name) == setting.default


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepps = 1", "unknown setting `stepps`"),
        ("run = 'elsewhere'", "unknown setting `run`"),
        ("steps = '1'", "steps: expected a whole number, found '1'"),
        ("steps = true", "steps: expected a whole number, found True"),
        ("untied = 1", r"untied: expected .*found 1"),
        ("lr = 'high'", r"lr: expected .*found 'high'"),
        ("freeze = 'a'", r"freeze: expected .*found 'a'"),
        ("freeze = [1]", r"freeze: expected .*found \[1\]"),
        ("fsdp = 2", r"fsdp: expected .*found 2"),
        ("steps = ", "not a TOML file"),
        ("\udc80", "not a TOML file"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "train.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(Usage, match=said) as raised:
        read_settings(path)
    assert raised.value.path == path


def test_a_whole_number_will_do_where_any_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text("lr = 1")
    assert read_settings(tmp_path / "train.toml") == {"lr": 1.0}
    with pytest.raises(IOFailure):
        read_settings(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": 0}, r"steps: expected .*found 0"),
        ({"lr": -1.0}, r"lr: expected .*found -1\.0"),
        ({"lr": float("nan")}, r"lr: expected .*found nan"),
        ({"clip": 0.0}, r"clip: expected .*found 0\.0"),
        ({"clip": float("nan")}, r"clip: expected .*found nan"),
        ({"seed": 2**32}, "less than 2"),
        ({"micro_batch_size": -1}, r"micro_batch_size: expected .*found -1"),
        ({"keep_last": 0}, r"keep_last: expected .*found 0"),
        ({"keep_every": 0}, r"keep_every: expected .*found 0"),
        ({"device": "tpu"}, "unknown device `tpu`"),
        ({"strategy": "zero1"}, "unknown strategy `zero1`"),
        ({"lora_rank": 0}, r"lora_rank: expected .*found 0"),
        ({"lora_rank": 2, "lora_alpha": 0}, r"lora_alpha: expected .*found 0"),
        ({"lora_rank": 2, "freeze": ("a",)}, "lora_rank already freezes all other parameters"),
        ({"lora_rank": 2, "state_dict": "hf"}, "cannot store adapters"),
        ({"lora_rank": 2, "fsdp": "1", "wrap": "size"}, "a unit could mix adapters"),
        ({"lora_targets": ("q_proj",)}, "no effect without lora_rank"),
        ({"lora_alpha": 16}, "no effect without lora_rank"),
        ({"state_dict": "adapter"}, "expected LoRA adapters to train, found none"),
        ({"fsdp": "3"}, "unknown fsdp `3`"),
        ({"replicas": 2}, "expected hybrid_shard for 2 replicas, found full_shard"),
        ({"wrap": "size"}, "wrap: expected block for FSDP2, found size"),
        ({"resume": "run/ckpt-1", "weights": Path("w")}, "already contains weights"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(Usage, match=said):
        TrainConfig(run=Path("run"), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["acc", "acc:max:2"])
def test_the_best_checkpoints_are_kept_by_a_metric_that_they_contain(rule: str) -> None:
    with pytest.raises(Usage, match=r"keep_best: expected a metric that checkpoints contain \(loss\), found `acc`"):
        replace(RUN, keep_best=rule)
    with pytest.raises(Usage, match=r"expected METRIC\[:min\|max\]\[:N\], found `loss:low`"):
        replace(RUN, keep_best="loss:low")
    assert replace(RUN, keep_best="loss:max:2").keep_best == "loss:max:2"


def test_a_run_without_checkpoints_that_resumes_starts_from_its_weights(tmp_path: Path) -> None:
    (tmp_path / SETTINGS).write_text("weights = 'base'\nsteps = 3\n")
    assert settings_to_resume_with(tmp_path, "auto") == {"weights": Path("base"), "steps": 3}
    assert TrainConfig(run=tmp_path, resume="auto", weights=Path("base")).weights == Path("base")
    assert settings_to_resume_with(tmp_path, "run/ckpt-1") == {"steps": 3}
    assert settings_to_resume_with(tmp_path, None) == {}


def test_settings_of_a_run_with_starting_weights_go_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("weights = 'base'\nsteps = 3\n")
    assert settings_from_file(path, "run/ckpt-1") == {"steps": 3}
    assert settings_from_file(path, None) == settings_from_file(path, "auto") == {"weights": Path("base"), "steps": 3}
    path.write_text("weights = 'base'\nlora_rank = 2\n")
    assert settings_from_file(path, "run/ckpt-1") == {"weights": Path("base"), "lora_rank": 2}
