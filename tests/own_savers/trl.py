# /// script
# requires-python = ">=3.11"
# dependencies = ["ckptkit-fsdp[hf]", "torch==2.13.0", "trl==1.16.0", "peft==0.21.2"]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""TRL 1.16: SFT with all weights and with a LoRA, reward and DPO on 2 ranks with FSDP2, resumed on 1 rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import proof

KINDS = ("sft", "lora", "reward", "dpo")
WORDS, STEPS, SAVED = 200, 4, 2


def write_base(base: Path) -> None:
    """Write the model that all kinds start from, as transformers does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(base)
    proof.write_tokenizer(base, WORDS)


def text(seed: int, length: int) -> str:
    return " ".join(f"w{(seed * 31 + place * 7) % (WORDS - 4)}" for place in range(length))


def make_trainer(kind: str, base: Path, output: Path, ranks: int) -> Any:
    """Return TRL's trainer; its rows have one length, so that the loss does not depend on how ranks share them."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    fsdp = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    options: dict[str, Any] = {
        "output_dir": str(output), "max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1, "learning_rate": 1e-2,
        "per_device_train_batch_size": 4 // ranks, "use_cpu": True, "bf16": False, "fsdp": True, "fsdp_config": fsdp,
        "gradient_checkpointing": False, "dataloader_pin_memory": False, "disable_tqdm": True, "report_to": [],
    }  # fmt: skip
    if kind in {"sft", "lora"}:
        lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return trl.SFTTrainer(
            str(base),
            trl.SFTConfig(**options),
            train_dataset=Dataset.from_list([{"text": text(row, 8)} for row in range(32)]),
            peft_config=lora if kind == "lora" else None,
        )
    pairs = [{"prompt": text(row, 4), "chosen": text(row + 1, 4), "rejected": text(row + 2, 4)} for row in range(32)]
    config, trainer = (trl.RewardConfig, trl.RewardTrainer) if kind == "reward" else (trl.DPOConfig, trl.DPOTrainer)
    return trainer(str(base), args=config(**options), train_dataset=Dataset.from_list(pairs))


def train(root: Path, name: str, *resumed: Path) -> None:
    """Train each kind on this rank, from a checkpoint if one is given for each; save the trained weights."""
    import torch

    proof.fsdp_on_cpu()
    from accelerate.state import AcceleratorState

    for place, kind in enumerate(KINDS):
        AcceleratorState._reset_state(reset_partial_state=False)
        trainer = make_trainer(kind, root / "base", root / name / kind, int(os.environ["WORLD_SIZE"]))
        trainer.train(resume_from_checkpoint=str(resumed[place]) if resumed else None)
        state = {name: value.full_tensor() for name, value in trainer.model.state_dict().items()}
        if trainer.is_world_process_zero():
            torch.save(state, root / name / kind / "trained.pt")
            if kind == "lora":  # the checkpoints of shards are without it
                trainer.model.peft_config["default"].save_pretrained(root / name / kind)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def check_export(kind: str, root: Path) -> None:
    """Compare the logits of an export, opened by its consumer, with those of the trained weights."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    run, out, base = root / "run" / kind, root / "out" / kind, root / "base"
    classes = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    proof.ckptkit("consolidate", run / f"checkpoint-{STEPS}", out, *(() if kind == "lora" else ("--base", base)))
    trained = classes.from_pretrained(base, **({"num_labels": 1} if kind == "reward" else {}))
    exports = [classes.from_pretrained(base if kind == "lora" else out)]
    if kind == "lora":
        trained = get_peft_model(trained, LoraConfig.from_pretrained(str(run)))
        exports = [PeftModel.from_pretrained(exports[0], out)]
        proof.ckptkit("merge", base, run / f"checkpoint-{STEPS}", root / "merged")
        exports.append(classes.from_pretrained(root / "merged"))
    missing, unexpected = trained.load_state_dict(torch.load(run / "trained.pt"), strict=kind != "lora")
    assert not unexpected, f"{kind}: {unexpected}"
    assert not [name for name in missing if "lora" in name], f"{kind}: {missing}"
    tokens = torch.arange(4, 12).unsqueeze(0)
    for export in exports:
        difference = (trained.eval()(tokens).logits - export.eval()(tokens).logits).abs().max().item()
        assert difference <= (1e-5 if export is exports[-1] and kind == "lora" else 0), (
            f"{kind}: logits differ by {difference}"
        )


def main() -> None:
    with proof.directory() as root:
        write_base(root / "base")
        proof.ranks(2, root, "run")
        for kind in KINDS:
            run = root / "run" / kind
            said = proof.ckptkit("inspect", run / f"checkpoint-{STEPS}")
            assert "trainer: Accelerate, by transformers' Trainer" in said, f"{kind}: {said}"
            proof.ckptkit("verify", run / f"checkpoint-{STEPS}")
            check_export(kind, root)
            proof.ckptkit("reshard", run / f"checkpoint-{SAVED}", root / "resharded" / kind, "--to", 1)
        proof.ranks(1, root, "resumed", *(root / "resharded" / kind for kind in KINDS))
        for kind in KINDS:
            last = f"checkpoint-{STEPS}"
            expected, found = (
                proof.logged_losses(root / name / kind / last, root / f"{name}-{kind}.json")
                for name in ("run", "resumed")
            )
            proof.check_losses(kind, expected, found)
    print(
        f"TRL 1.16.0 ({', '.join(KINDS)}): 2 ranks, FSDP2: inspect, verify, consolidate (logits equal), "
        "reshard to 1 (losses equal)"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:]))
    else:
        main()
