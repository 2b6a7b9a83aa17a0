# /// script
# requires-python = ">=3.11"
# dependencies = ["ckptkit-fsdp[hf]", "torch==2.13.0", "diffusers==0.42.0", "accelerate==1.15.0"]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""diffusers 0.42: a UNet, a DiT and a Flux transformer, trained by Accelerate on 2 ranks with FSDP2."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import proof

STEPS, SAVED, BATCH = 4, 2, 4
WRAPPED = {
    "unet": ["DownBlock2D", "UpBlock2D"],
    "dit": ["FeedForward"],  # DiT's forward uses a layer inside of its first block, which FSDP2 would not gather
    "flux": ["FluxTransformerBlock", "FluxSingleTransformerBlock"],
}


def make_model(kind: str) -> Any:
    """Return a tiny model of diffusers with random weights."""
    import diffusers
    import torch

    torch.manual_seed(0)
    if kind == "unet":
        return diffusers.UNet2DModel(
            sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
            norm_num_groups=4, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
        )  # fmt: skip
    if kind == "dit":
        return diffusers.DiTTransformer2DModel(
            sample_size=8, in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
            num_embeds_ada_norm=10, norm_num_groups=4,
        )  # fmt: skip
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def call(kind: str, model: Any, seed: int) -> Any:
    """Return what a model computes for the rows of this rank in one batch."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = slice(int(os.environ.get("RANK", "0")), None, int(os.environ.get("WORLD_SIZE", "1")))
    images = torch.randn(BATCH, 4, 8, 8, generator=generator)[rows]
    times = torch.randint(0, 1000, (BATCH,), generator=generator)[rows]
    if kind == "unet":
        return model(images, times).sample
    if kind == "dit":
        return model(images, timestep=times, class_labels=times % 10).sample
    words, pooled = torch.randn(BATCH, 6, 32, generator=generator)[rows], torch.ones(len(images), 32)
    return model(
        images.flatten(2).transpose(1, 2), encoder_hidden_states=words, pooled_projections=pooled,
        timestep=times / 1000, img_ids=torch.arange(192.0).reshape(64, 3), txt_ids=torch.zeros(6, 3),
    ).sample  # fmt: skip


def train(root: Path, name: str, *resumed: Path) -> None:
    """Train each kind on this rank, from a checkpoint if one is given for each; `accelerator.save_state` saves."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    proof.fsdp_on_cpu()
    for place, kind in enumerate(WRAPPED):
        AcceleratorState._reset_state(reset_partial_state=False)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=WRAPPED[kind], cpu_ram_efficient_loading=False,
        )  # fmt: skip
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = make_model(kind).eval()  # in training mode, DiT drops labels at random
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if resumed:
            accelerator.load_state(str(resumed[place]))
        losses = {}
        for step in range(SAVED if resumed else 0, STEPS):
            loss = call(kind, model, step).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[str(step + 1)] = accelerator.reduce(loss.detach(), "mean").item()
            if step + 1 in (SAVED, STEPS):
                accelerator.save_state(str(root / name / kind / f"checkpoint-{step + 1}"))
        state = {key: value.full_tensor() for key, value in model.state_dict().items()}
        if accelerator.is_main_process:
            torch.save(state, root / name / kind / "trained.pt")
            (root / f"{name}-{kind}.json").write_text(json.dumps(losses))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def check_export(kind: str, root: Path) -> None:
    """Compare what a model computes that diffusers loads from an export with what the trained weights compute."""
    import torch

    trained = make_model(kind).eval()
    trained.save_pretrained(root / "base" / kind)
    trained.load_state_dict(torch.load(root / "run" / kind / "trained.pt"))
    checkpoint = root / "run" / kind / f"checkpoint-{STEPS}"
    base = root / "base" / kind
    proof.ckptkit("consolidate", checkpoint, root / "out" / kind, "--base", base)
    proof.ckptkit("consolidate", checkpoint, root / "split" / kind, "--base", base, "--max-shard-size", "60KB")
    assert (root / "split" / kind / "diffusion_pytorch_model.safetensors.index.json").is_file(), f"{kind}: no index"
    for place in ("out", "split"):
        export, info = type(trained).from_pretrained(root / place / kind, output_loading_info=True)
        assert not any(info.values()), f"{kind}: {info}"
        with torch.no_grad():
            difference = (call(kind, trained, 9) - call(kind, export, 9)).abs().max().item()
        assert difference == 0, f"{kind}: outputs differ by {difference}"


def check_pipeline(root: Path) -> None:
    """Export into a pipeline, which diffusers then loads; ckptkit refuses the pipeline itself."""
    import diffusers
    import torch

    pipeline = root / "pipeline"
    diffusers.DDPMPipeline(make_model("unet"), diffusers.DDPMScheduler()).save_pretrained(pipeline)
    assert "a diffusers pipeline" in proof.refused("inspect", pipeline)
    proof.ckptkit("inspect", pipeline / "unet")
    checkpoint = root / "run" / "unet" / f"checkpoint-{STEPS}"
    proof.ckptkit("consolidate", checkpoint, pipeline / "unet", "--base", root / "base" / "unet", "--overwrite")
    loaded = diffusers.DDPMPipeline.from_pretrained(pipeline).unet.state_dict()
    trained = torch.load(root / "run" / "unet" / "trained.pt")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items()), "pipeline: other weights"


def main() -> None:
    with proof.directory() as root:
        proof.ranks(2, root, "run")
        for kind in WRAPPED:
            run = root / "run" / kind
            said = proof.ckptkit("inspect", run / f"checkpoint-{STEPS}")
            assert "trainer: Accelerate\n" in said, f"{kind}: {said}"
            proof.ckptkit("verify", run / f"checkpoint-{STEPS}")
            check_export(kind, root)
            proof.ckptkit("reshard", run / f"checkpoint-{SAVED}", root / "resharded" / kind, "--to", 1)
        check_pipeline(root)
        proof.ranks(1, root, "resumed", *(root / "resharded" / kind for kind in WRAPPED))
        for kind in WRAPPED:
            proof.check_losses(kind, root / f"run-{kind}.json", root / f"resumed-{kind}.json")
    print(
        f"diffusers 0.42.0 ({', '.join(WRAPPED)}): 2 ranks, FSDP2: inspect, verify, consolidate (outputs equal), "
        "reshard to 1 (losses equal)"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:]))
    else:
        main()
