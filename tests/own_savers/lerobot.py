# /// script
# requires-python = ">=3.12"
# dependencies = ["ckptkit-fsdp", "torch==2.13.0", "lerobot[training]==0.6.1"]
#
# [tool.uv]
# override-dependencies = [
#     "torch==2.13.0",
#     "torchvision==0.28.0",
#     "cmake; sys_platform == 'never'",
#     "huggingface-hub>=1.26",
#     "rerun-sdk; sys_platform == 'never'",
#     "torchcodec; sys_platform == 'never'",
#     "triton; sys_platform == 'never'",
# ]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""LeRobot 0.6.1: an ACT policy in one process, by its train step and save_checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import proof


def batch(step: int) -> dict[str, Any]:
    """Return the rows of a step."""
    import torch

    generator = torch.Generator().manual_seed(step)
    return {
        "observation.state": torch.randn(4, 2, generator=generator),
        "observation.environment_state": torch.randn(4, 3, generator=generator),
        "action": torch.randn(4, 4, 2, generator=generator),
        "action_is_pad": torch.zeros(4, 4, dtype=torch.bool),
    }


def train(output: Path, resumed: str = "") -> None:
    """Train to step 4, from a checkpoint if one is given; write losses by step, and the actions at the end."""
    proof.torchvision_on_cpu()
    import torch
    from accelerate import Accelerator
    from lerobot.common.train_utils import (
        get_step_checkpoint_dir,
        load_training_state,
        save_checkpoint,
        update_last_checkpoint,
    )
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.optim.factory import make_optimizer_and_scheduler
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.scripts.lerobot_train import update_policy
    from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

    torch.manual_seed(0)
    config = ACTConfig(
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
            "observation.environment_state": PolicyFeature(FeatureType.ENV, (3,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        chunk_size=4, n_action_steps=4, dim_model=32, n_heads=2, dim_feedforward=48, n_encoder_layers=1,
        n_decoder_layers=1, n_vae_encoder_layers=1, latent_dim=8, dropout=0.0, device="cpu", push_to_hub=False,
    )  # fmt: skip
    job = TrainPipelineConfig(DatasetConfig("local/rows"), policy=config, output_dir=output, steps=4, batch_size=4)
    job.optimizer, job.scheduler = config.get_optimizer_preset(), config.get_scheduler_preset()
    policy = ACTPolicy.from_pretrained(Path(resumed, "pretrained_model")) if resumed else ACTPolicy(config)
    numbers = {"mean": torch.zeros(2), "std": torch.ones(2)}
    statistics = {"observation.state": numbers, "action": numbers}
    before, after = make_pre_post_processors(config, dataset_stats=statistics)
    optimizer, scheduler = make_optimizer_and_scheduler(job, policy)
    accelerator = Accelerator(cpu=True)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    step = load_training_state(Path(resumed), optimizer, scheduler)[0] if resumed else 0
    losses = {}
    for number in range(step + 1, job.steps + 1):
        meters = {name: AverageMeter(name) for name in ("loss", "grad_norm", "lr", "update_s")}
        metrics = MetricsTracker(4, 64, 1, meters)
        metrics, _ = update_policy(metrics, policy, batch(number), optimizer, 10.0, accelerator, scheduler)
        losses[str(number)] = metrics.loss.val
        if number % 2 == 0:
            directory = get_step_checkpoint_dir(output, job.steps, number)
            save_checkpoint(
                directory, number, job, accelerator.unwrap_model(policy), optimizer, scheduler, before, after
            )
            update_last_checkpoint(directory)
    (output / "losses.json").write_text(json.dumps(losses))
    torch.save(policy.eval().predict_action_chunk(batch(0)), output / "actions.pt")


def compare(policy: Path, run: Path) -> None:
    """Check that LeRobot opens a policy with its processors, and that its actions are those of the training."""
    proof.torchvision_on_cpu()
    import torch
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    opened = ACTPolicy.from_pretrained(policy).eval()
    make_pre_post_processors(opened.config, pretrained_path=str(policy))
    difference = (opened.predict_action_chunk(batch(0)) - torch.load(run / "actions.pt")).abs().max().item()
    assert difference == 0, f"actions differ by {difference}"


def main() -> None:
    with proof.directory() as root:
        run, out, resumed = root / "run", root / "out", root / "resumed"
        call = (sys.executable, Path(__file__).resolve())
        proof.call(*call, "train", run)
        checkpoints = run / "checkpoints"
        said = proof.ckptkit("inspect", checkpoints / "000004/pretrained_model")
        assert "trainer: LeRobot" in said, said
        proof.ckptkit("inspect", checkpoints / "000004")
        proof.ckptkit("verify", checkpoints / "000004/pretrained_model")
        proof.ckptkit("consolidate", checkpoints / "000004/pretrained_model", out)
        proof.call(*call, "compare", out, run)

        # LeRobot's ranks have the same weights: it resumes on any number of ranks. Its policy goes through shards.
        first = resumed / "checkpoints/000002"
        proof.ckptkit("reshard", checkpoints / "000002/pretrained_model", root / "shards", "--to", 2)
        proof.ckptkit("consolidate", root / "shards", first / "pretrained_model")
        shutil.copytree(checkpoints / "000002/training_state", first / "training_state")
        proof.call(*call, "train", resumed, first)
        proof.check_losses("resumed", run / "losses.json", resumed / "losses.json")
    print("LeRobot 0.6.1: 1 process: inspect, verify, consolidate (actions equal), shards and back (losses equal)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]), *sys.argv[3:])
    elif sys.argv[1:2] == ["compare"]:
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
