# /// script
# requires-python = ">=3.11"
# dependencies = ["ckptkit-fsdp[hf]", "torch==2.13.0", "ai2-olmo-core==3.0.0"]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""OLMo-core 3.0.0: its Trainer with FSDP2 on 2 ranks, resumed on 1 rank, exported as OLMo 2."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import proof

WORDS, LENGTH, ROWS = 200, 16, 64


def train(root: Path, output: Path) -> None:
    """Train on this rank with OLMo-core's Trainer; write losses by step, and the logits at the end."""
    import numpy as np
    import torch
    from olmo_core.config import DType
    from olmo_core.data import NumpyDataLoaderConfig, NumpyDatasetDType, NumpyFSLDatasetConfig, TokenizerConfig
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.distributed.utils import get_rank
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
    from olmo_core.optim import AdamWConfig, CosWithWarmup
    from olmo_core.train import Duration, TrainerConfig, prepare_training_environment, teardown_training_environment
    from olmo_core.train.callbacks import Callback, CheckpointerCallback, ConfigSaverCallback
    from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

    losses: dict[str, float] = {}

    class Losses(Callback):
        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            if "train/CE loss" in metrics:
                losses[str(step)] = metrics["train/CE loss"]

    prepare_training_environment(seed=0, backend="gloo", shared_filesystem=True)
    if get_rank() == 0 and not (root / "tokens.npy").exists():
        np.random.default_rng(0).integers(3, WORDS, ROWS * LENGTH, dtype=np.uint16).tofile(root / "tokens.npy")
    torch.distributed.barrier()
    model_config = TransformerConfig.llama_like(
        d_model=32, vocab_size=WORDS, n_layers=2, n_heads=4, n_kv_heads=2, hidden_size_multiplier=1.5, qk_norm=True,
        block_name=TransformerBlockType.reordered_norm, layer_norm_eps=1e-6,
    )  # fmt: skip
    data = NumpyFSLDatasetConfig(
        tokenizer=TokenizerConfig(vocab_size=WORDS, eos_token_id=1, pad_token_id=0),
        paths=[str(root / "tokens.npy")],
        dtype=NumpyDatasetDType.uint16,
        sequence_length=LENGTH,
        work_dir=str(output / "work"),
    )
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=1e-2),
        scheduler=CosWithWarmup(warmup_steps=2),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp, param_dtype=DType.float32),
        max_grad_norm=1.0,
    ).build(model_config.build(init_device="meta"), device=torch.device("cpu"))
    loader = NumpyDataLoaderConfig(global_batch_size=4 * LENGTH, seed=0)
    trainer = TrainerConfig(
        save_folder=str(output),
        work_dir=str(output / "work"),
        save_overwrite=True,
        device="cpu",
        max_duration=Duration.steps(4),
        metrics_collect_interval=1,
        callbacks={
            "checkpointer": CheckpointerCallback(save_interval=2, save_async=False),
            "config_saver": ConfigSaverCallback(),
            "losses": Losses(),
        },
    ).build(module, loader.build(data.build(), dp_process_group=module.dp_process_group))
    # as OLMo-core's scripts do: config.json of each checkpoint is OLMo-core's own
    trainer.callbacks["config_saver"].config = {"model": model_config.as_config_dict(), "data": data.as_config_dict()}
    trainer.fit()
    with torch.no_grad():
        logits = module.model.eval()(torch.arange(LENGTH).unsqueeze(0))
    if get_rank() == 0:
        (output / "losses.json").write_text(json.dumps(losses))
        torch.save(logits, output / "logits.pt")
    teardown_training_environment()


def write_base(base: Path) -> None:
    """Write the config.json that transformers has for this model."""
    from transformers import Olmo2Config

    Olmo2Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 500000},
        tie_word_embeddings=False, architectures=["Olmo2ForCausalLM"],
    ).save_pretrained(base)  # fmt: skip
    proof.write_tokenizer(base, WORDS)


def main() -> None:
    import torch

    with proof.directory() as root:
        run, out, base = root / "run", root / "out", root / "base"
        write_base(base)
        proof.ranks(2, root, run)
        said = proof.ckptkit("inspect", run / "step4")
        assert "trainer: OLMo-core" in said, said
        proof.ckptkit("verify", run / "step4")

        proof.ckptkit("consolidate", run / "step4", out, "--base", base)
        from transformers import AutoModelForCausalLM

        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(out)(torch.arange(LENGTH).unsqueeze(0)).logits
        difference = (logits - torch.load(run / "logits.pt")).abs().max().item()
        assert difference < 1e-5, f"logits differ by {difference}"

        resumed = root / "resumed"
        proof.ckptkit("reshard", run / "step2", resumed / "step2", "--to", 1)
        proof.ranks(1, root, resumed)
        proof.check_losses("1 rank", run / "losses.json", resumed / "losses.json")
    print("OLMo-core 3.0.0: 2 ranks, FSDP2: inspect, verify, consolidate (logits equal), reshard to 1 (losses equal)")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
