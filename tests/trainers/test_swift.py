"""Trees as ms-swift 4.6.0 left them: of transformers' Trainer, by Megatron, and of its own tuners."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import Unsupported
from ckptkit.runs.ls import ls
from tests.producers import save_alone

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")
FILE = "adapter_model.safetensors"
LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def save_adapter(place: Path) -> Path:
    """An adapter of PEFT, and what ms-swift has beside it."""
    place.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (place / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"{LORA}A.weight": torch.ones(4, 6), f"{LORA}B.weight": torch.ones(6, 4)}, place / FILE)
    (place / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    (place / "args.json").write_text('{"swift_version": "4.6.0", "lora_rank": 4}')
    (place / "additional_config.json").write_text('{"lora_dtype": null}')
    torch.save({"seed": 1}, place / "rng_state.pth")
    return place


def test_every_file_of_an_adapter_is_known(tmp_path: Path) -> None:
    place = save_adapter(tmp_path / "run" / "checkpoint-2")
    assert ckptkit.inspect(tmp_path / "run").trainer == "ms-swift"
    done = ckptkit.consolidate(place, tmp_path / "out", strict=True)
    assert {left.name: left.why for left in done.left_behind} == {
        "README.md": "describes these weights only",
        **dict.fromkeys(("additional_config.json", "args.json", "rng_state.pth"), "training state"),
    }


@pytest.mark.parametrize("arguments", ['{"swift_version": "4.6.0"}', '{"lr": 1}'])
def test_shards_of_fsdp_are_named_by_the_arguments_of_the_run(tmp_path: Path, arguments: str) -> None:
    place = tmp_path / "v0-20261127" / "checkpoint-2"
    save_alone({"w": torch.ones(2)}, place / "pytorch_model_fsdp_0")
    (place / "trainer_state.json").write_text("{}")
    (place.parent / "args.json").write_text(arguments)
    expected = "ms-swift" if "swift" in arguments else "Accelerate, by transformers' Trainer"
    assert ckptkit.inspect(place).trainer == ckptkit.inspect(place / "pytorch_model_fsdp_0").trainer == expected


def test_weights_of_the_hub_beside_megatrons_are_read(tmp_path: Path) -> None:
    place = save_adapter(tmp_path / "run" / "checkpoint-2")
    step = place / "iter_0000002"
    dcp.save({"decoder.layers.0.mlp.router.lora_A.default.weight": torch.ones(4, 6)}, checkpoint_id=step)
    (place / "latest_checkpointed_iteration.txt").write_text("2")
    assert ckptkit.inspect(tmp_path / "run").layout.format == "hf"
    assert ckptkit.inspect(step).layout.format == "dcp"
    (place / FILE).unlink()
    assert [(one.path.name, one.is_complete) for one in ls(tmp_path / "run").checkpoints] == [("checkpoint-2", True)]
    done = ckptkit.reshard(tmp_path / "run", tmp_path / "out", to=2)
    assert {"iter_0000002/.metadata", "args.json", "latest_checkpointed_iteration.txt"} <= done.files.keys()


def test_a_run_that_is_named_like_a_step_has_its_steps(tmp_path: Path) -> None:
    for step in (2, 4):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-2" / f"iter_{step:07d}")
    assert ckptkit.inspect(tmp_path / "step-2").step == 4


@pytest.mark.parametrize("place", ["", "checkpoint-2", "checkpoint-2/default", f"checkpoint-2/default/{FILE}"])
def test_its_own_tuners_are_refused(tmp_path: Path, place: str) -> None:
    """LLaMA-Pro's new blocks alone have the names of a model."""
    folder = save_adapter(tmp_path / "run" / "checkpoint-2" / "default")
    (folder / "adapter_config.json").write_text('{"swift_type": "LLAMAPRO", "num_new_blocks": 2}')
    save_file({"model.layers.1.mlp.up_proj.weight": torch.ones(4, 6)}, folder / FILE)
    torch.save({"state": {}, "param_groups": []}, tmp_path / "run" / "checkpoint-2" / "optimizer.pt")
    with pytest.raises(Unsupported, match="ms-swift's own tuners"):
        ckptkit.consolidate(tmp_path / "run" / place, tmp_path / "out")
