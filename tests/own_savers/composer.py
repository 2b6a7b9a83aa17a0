# /// script
# requires-python = ">=3.11"
# dependencies = ["ckptkit-fsdp[hf]", "torch==2.13.0", "mosaicml==0.32.1"]
#
# [tool.uv]
# override-dependencies = ["torch==2.13.0", "torchvision==0.28.0", "triton; sys_platform == 'never'"]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""Composer 0.32.1: its Trainer with FSDP2 on 2 ranks saves shards, and resumes on 1 rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import proof


def train(base: Path, output: Path, *resumed: str) -> None:
    """Train on this rank with Composer's Trainer; write losses by batch, and the logits at the end."""
    proof.torchvision_on_cpu()
    import torch
    from composer import Callback, Trainer
    from composer.models import ComposerModel
    from composer.utils.parallelism import FSDP2Config, ParallelismConfig
    from transformers import LlamaForCausalLM

    class Llama(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
            for layer in self.model.model.layers:
                layer._fsdp_wrap = True

        def forward(self, rows: Any) -> Any:
            return self.model(rows).logits

        def loss(self, logits: Any, rows: Any) -> Any:
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    losses: dict[str, float] = {}

    class Losses(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            losses[str(int(state.timestamp.batch))] = float(state.loss)

    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    rows: Any = torch.arange(proof.LENGTH).expand(64, proof.LENGTH).contiguous()  # the same for each rank and step
    model = Llama()
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(
            rows, batch_size=4 // ranks, sampler=torch.utils.data.DistributedSampler(rows, ranks, rank)
        ),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_duration="4ba",
        device="cpu",
        precision="fp32",
        save_folder=str(output),
        save_interval="2ba",
        load_path=resumed[0] if resumed else None,
        parallelism_config=ParallelismConfig(fsdp2=FSDP2Config()),
        callbacks=[Losses()],
        progress_bar=False,
        seed=0,
        dist_timeout=600,
    )
    trainer.fit()
    with torch.no_grad():
        logits = trainer.state.model.eval()(torch.arange(proof.LENGTH).unsqueeze(0))
    if rank == 0:
        (output / "losses.json").write_text(json.dumps(losses))
        torch.save(logits, output / "logits.pt")
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def main() -> None:
    proof.torchvision_on_cpu()  # for transformers

    with proof.directory() as root:
        base, run, out, resumed = (root / name for name in ("base", "run", "out", "resumed"))
        proof.write_llama(base)
        proof.ranks(2, base, run)
        said = proof.ckptkit("inspect", run / "ep0-ba4")
        assert "trainer: Composer" in said, said
        proof.ckptkit("verify", run / "ep0-ba4")

        proof.ckptkit("consolidate", run / "ep0-ba4", out, "--base", base)
        proof.check_export("2 ranks", out, run / "logits.pt")

        proof.ckptkit("reshard", run / "ep0-ba2", root / "resharded/ep0-ba2", "--to", 1)
        proof.ranks(1, base, resumed, root / "resharded/ep0-ba2")
        proof.check_losses("1 rank", run / "losses.json", resumed / "losses.json")
    print("Composer 0.32.1: 2 ranks, FSDP2: inspect, verify, consolidate (logits equal), reshard to 1 (losses equal)")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    else:
        main()
