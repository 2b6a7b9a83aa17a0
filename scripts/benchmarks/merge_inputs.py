"""Write the inputs of `scripts/bench merge`: a llama of 8 layers, and a LoRA on it. No ckptkit here."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, VOCABULARY = 8, 32_000


def main() -> None:
    """Save a base of about so many GB, and an adapter of a rank above 0, in a directory."""
    home, size_gb, rank = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    width = 128 * max(1, round((size_gb * 1e9 / 2 / (LAYERS * 12)) ** 0.5 / 128))  # a layer has 12 times its square
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 128 * 128 or width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    model.save_pretrained(home / "base", max_shard_size="10GB")
    if not rank:
        return
    from peft import LoraConfig, get_peft_model  # not on every machine

    torch.set_default_dtype(torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.save_pretrained(str(home / "adapter"))


if __name__ == "__main__":
    main()
