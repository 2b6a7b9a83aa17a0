# /// script
# requires-python = ">=3.11"
# dependencies = ["ckptkit-fsdp[hf]", "torch==2.13.0", "torchtitan==0.3.0", "triton==3.7.1"]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""torchtitan 0.3.0: its Trainer on 2 ranks with FSDP2 saves by DCP, and resumes on 1 rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import proof

HIDDEN, HEADS, LAYERS, WORDS, LENGTH = 32, 4, 2, 128, 16


def prepare(assets: Path) -> None:
    """Write the tokenizer and the config.json that a user downloads with the model."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, rms_norm_eps=1e-5, max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(assets)  # fmt: skip
    proof.write_tokenizer(assets, WORDS)


def on_cpu() -> None:
    """Let torchtitan, which falls back to "cuda", find the CPU as its device."""
    from types import SimpleNamespace

    import torch

    of_gpu = {
        "device_count": lambda: 1,
        "get_device_name": lambda device: "CPU",
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1 << 30),
        "memory_stats": lambda device: {},
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, function in of_gpu.items():
        setattr(torch.cpu, name, function)
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda **_: None  # it needs torch 2.14


def train(assets: Path, output: Path, *excluded: str) -> None:
    """Train on this rank with torchtitan's Trainer; write losses by step, and the logits at the end."""
    on_cpu()
    import torch
    from datasets import Dataset
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    # Every document is the same and fills a row, so that the loss does not depend on how ranks share the documents.
    text = " ".join(f"w{n * 7 % (WORDS - 4)}" for n in range(LENGTH - 1))
    DATASETS["same"] = DatasetConfig(
        path=str(assets),
        loader=lambda path: Dataset.from_list([{"text": text}] * 64),
        sample_processor=lambda sample: sample["text"],
    )
    layers = llama3._build_llama3_layers(
        n_layers=LAYERS,
        dim=HIDDEN,
        n_heads=HEADS,
        n_kv_heads=HEADS // 2,
        hidden_dim=64,
        rope=ComplexRoPE.Config(dim=HIDDEN // HEADS, max_seq_len=64, theta=10000.0),
        attn_backend="varlen",
    )
    for layer in layers:  # on a CPU, flex and varlen attention have no backward pass
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec = llama3.model_registry("debugmodel", attn_backend="varlen")
    spec.model = llama3.Llama3Model.Config(
        dim=HIDDEN,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(num_embeddings=WORDS, embedding_dim=HIDDEN, param_init=llama3._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=HIDDEN, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=WORDS, param_init=llama3._output_linear_init(HIDDEN)),
        layers=layers,
    )
    ranks = int(os.environ["WORLD_SIZE"])
    config = Trainer.Config(
        model_spec=spec,
        hf_assets_path=str(assets),
        dump_folder=str(output),
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        optimizer=default_adamw(lr=1e-2, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=4 // ranks,
            seq_len=LENGTH,
            steps=4,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="same"),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
        checkpoint=CheckpointManager.Config(
            enable=True, interval=2, last_save_model_only=False, exclude_from_loading=list(excluded)
        ),
    )
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
    losses: dict[int, float] = {}
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.update({step: float(loss)})
    trainer.train()
    tokens = torch.arange(LENGTH).unsqueeze(0)
    with torch.no_grad():
        logits = trainer.model_parts[0](tokens, None)
    if int(os.environ["RANK"]) == 0:
        (output / "losses.json").write_text(json.dumps(losses))
        torch.save(logits, output / "logits.pt")
    trainer.close()
    torch.distributed.destroy_process_group()


def main() -> None:
    import torch

    with proof.directory() as root:
        assets, run, out = root / "assets", root / "run", root / "out"
        prepare(assets)
        proof.ranks(2, assets, run)
        checkpoints = run / "checkpoint"
        said = proof.ckptkit("inspect", checkpoints / "step-4")
        assert "trainer: torchtitan" in said, said
        proof.ckptkit("verify", checkpoints / "step-4")

        proof.ckptkit("consolidate", checkpoints / "step-4", out, "--base", assets)
        from transformers import AutoModelForCausalLM

        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(out)(torch.arange(LENGTH).unsqueeze(0)).logits
        difference = (logits - torch.load(run / "logits.pt")).abs().max().item()
        assert difference < 1e-5, f"logits differ by {difference}"

        # On other ranks torchtitan refuses the state of its loader ("dp_degree is inconsistent"), so it is excluded.
        resumed = root / "resumed"
        proof.ckptkit("reshard", checkpoints / "step-2", resumed / "checkpoint/step-2", "--to", 1)
        proof.ranks(1, assets, resumed, "dataloader")
        proof.check_losses("1 rank", run / "losses.json", resumed / "losses.json")
    print("torchtitan 0.3.0: 2 ranks, FSDP2: inspect, verify, consolidate (logits equal), reshard to 1 (losses equal)")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    else:
        main()
