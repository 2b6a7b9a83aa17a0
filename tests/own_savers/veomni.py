# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["ckptkit-fsdp", "torch==2.13.0", "veomni==0.1.12", "transformers==5.9.0"]
#
# [tool.uv]
# override-dependencies = [
#     "torch==2.13.0",
#     "fsspec>=2024.6.1",
#     "matplotlib; sys_platform == 'never'",
#     "torchvision; sys_platform == 'never'",
# ]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""VeOmni 0.1.12: a linear script with its checkpointer and FSDP2 on 2 ranks, resumed on 1 rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import proof


def train(base: Path, output: Path, *resumed: str) -> None:
    """Train on this rank, saved and loaded by VeOmni; write losses by step, and the logits at the end."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM
    from veomni.checkpoint import build_checkpointer
    from veomni.distributed.parallel_state import init_parallel_state

    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]  # which VeOmni calls on a CPU too
    torch.distributed.init_process_group("gloo")
    ranks = int(os.environ["WORLD_SIZE"])
    state = init_parallel_state(dp_size=ranks, dp_shard_size=ranks, dp_mode="fsdp2", device_type="cpu")
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=state.fsdp_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=proof.STEPS)
    checkpointer = build_checkpointer(dist_backend="fsdp2", ckpt_manager="dcp")
    step = 0
    if resumed:
        loaded = {"model": model, "optimizer": optimizer, "extra_state": {}}
        checkpointer.load(resumed[0], loaded)
        step = loaded["extra_state"]["global_step"]
        scheduler.load_state_dict(loaded["extra_state"]["lr_scheduler"])
    losses = {}
    rows = torch.arange(proof.LENGTH).expand(4 // ranks, proof.LENGTH)  # the same for each rank and step
    for number in range(step + 1, proof.STEPS + 1):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[str(number)] = loss.item()
        if number % proof.SAVED == 0:
            extra = {
                "global_step": number,
                "lr_scheduler": scheduler.state_dict(),
                "torch_rng_state": torch.get_rng_state(),
            }
            saved = {"model": model, "optimizer": optimizer, "extra_state": extra}
            checkpointer.save(str(output / "checkpoints"), saved, global_steps=number)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(proof.LENGTH).unsqueeze(0)).logits
    if int(os.environ["RANK"]) == 0:
        (output / "losses.json").write_text(json.dumps(losses))
        torch.save(logits, output / "logits.pt")
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def main() -> None:
    with proof.directory() as root:
        base, run, out, resumed = (root / name for name in ("base", "run", "out", "resumed"))
        proof.write_llama(base)
        proof.ranks(2, base, run)
        first, last = (run / "checkpoints" / f"global_step_{step}" for step in (proof.SAVED, proof.STEPS))
        said = proof.ckptkit("inspect", last)
        assert "trainer: VeOmni" in said, said
        proof.ckptkit("verify", last)

        proof.ckptkit("consolidate", last, out, "--base", base)
        proof.check_export("2 ranks", out, run / "logits.pt")

        proof.ckptkit("reshard", first, root / "resharded" / first.name, "--to", 1)
        proof.ranks(1, base, resumed, root / "resharded" / first.name)
        proof.check_losses("1 rank", run / "losses.json", resumed / "losses.json")
    print("VeOmni 0.1.12: 2 ranks, FSDP2: inspect, verify, consolidate (logits equal), reshard to 1 (losses equal)")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    else:
        main()
