# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ckptkit-fsdp[hf]", "torch==2.13.0", "sentence-transformers==6.2.0", "accelerate==1.15.0", "datasets==5.2.0",
# ]
#
# [tool.uv.sources]
# ckptkit-fsdp = { path = "../..", editable = true }
# ///
"""sentence-transformers 6.2: a BERT with pooling, and with a dense layer, on 2 ranks with FSDP2 and on 1 rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import proof

KINDS = ("pooling", "dense")
WORDS, STEPS, SAVED = 200, 4, 2


def write_base(base: Path, kind: str) -> None:
    """Write the model that training starts from, as sentence-transformers does."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    bert = base.with_name(f"bert-{kind}")
    BertModel(
        BertConfig(vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ).save_pretrained(bert)  # fmt: skip
    proof.write_tokenizer(bert, WORDS)
    parts = [
        Transformer(str(bert), max_seq_length=16),
        modules.Pooling(32),
        *([Dense(32, 8)] if kind == "dense" else []),
    ]
    SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(base))


def text(seed: int) -> str:
    return " ".join(f"w{(seed * 31 + place * 7) % (WORDS - 4)}" for place in range(8))


def make_trainer(base: Path, output: Path, ranks: int) -> Any:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    fsdp = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": "BertLayer"}
    model = SentenceTransformer(str(base), device="cpu")
    rows = [{"sentence1": text(row), "sentence2": text(row + 1), "score": row % 5 / 4} for row in range(32)]
    return SentenceTransformerTrainer(
        model,
        Arguments(
            output_dir=str(output), max_steps=STEPS, save_steps=SAVED, logging_steps=1, learning_rate=1e-2,
            per_device_train_batch_size=4 // ranks, use_cpu=True, disable_tqdm=True, report_to=[],
            dataloader_pin_memory=False, **({"fsdp": True, "fsdp_config": fsdp} if ranks > 1 else {}),
        ),
        train_dataset=Dataset.from_list(rows),
        loss=CosineSimilarityLoss(model),
    )  # fmt: skip


def train(root: Path, name: str, *resumed: Path) -> None:
    """Train each kind on this rank, or the first ones from these checkpoints; save the trained weights."""
    import torch

    proof.fsdp_on_cpu()
    from accelerate.state import AcceleratorState

    for kind, checkpoint in zip(KINDS, resumed or (None, None), strict=False):
        AcceleratorState._reset_state(reset_partial_state=False)
        trainer = make_trainer(root / "base" / kind, root / name / kind, int(os.environ["WORLD_SIZE"]))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        weights = trainer.model.state_dict().items()
        state = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in weights}
        if trainer.is_world_process_zero():
            torch.save(state, root / name / kind / "trained.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the process at its end


def check_export(root: Path, name: str, kind: str, out: Path) -> None:
    """Compare the embeddings of an export, opened by sentence-transformers, with those of the trained weights."""
    import torch
    from sentence_transformers import SentenceTransformer

    trained = SentenceTransformer(str(root / "base" / kind), device="cpu")
    trained.load_state_dict(torch.load(root / name / kind / "trained.pt"))
    texts = [text(row) for row in range(40, 44)]
    expected, found = (model.encode(texts) for model in (trained, SentenceTransformer(str(out), device="cpu")))
    assert (expected == found).all(), f"{name}, {kind}: embeddings differ by {abs(expected - found).max()}"


def check_dense(root: Path, checkpoint: Path) -> None:
    """Export a model with a dense layer, whose export ckptkit refuses, through a file of torch.save."""
    import torch
    from sentence_transformers import SentenceTransformer

    base = root / "base" / "dense"
    said = proof.refused("consolidate", checkpoint, root / "out" / "dense", "--base", base)
    assert "a SentenceTransformer whose `2_Dense` has weights of its own" in said, said
    proof.ckptkit("convert", checkpoint / "pytorch_model_fsdp_0", root / "dense.pt")
    model = SentenceTransformer(str(base), device="cpu")
    model.load_state_dict(torch.load(root / "dense.pt")["model"])
    model.save_pretrained(str(root / "dense"))
    check_export(root, "run", "dense", root / "dense")


def make_resumable(root: Path, checkpoint: Path) -> Path:
    """Return a checkpoint of one process, made from one of FSDP: the Trainer cannot resume from its own shards."""
    import torch

    out, state = root / "alone" / checkpoint.name, root / "state"
    proof.ckptkit("consolidate", checkpoint, out, "--base", root / "base" / "pooling")
    options = ("--to", "pt", "--optimizer-keys", "ids", "--optimizer-order", "model")
    proof.ckptkit("convert", checkpoint, state, *options)
    torch.save(torch.load(state / "optimizer_0" / "state.pt")["optimizer"], out / "optimizer.pt")
    for name in ("scheduler.pt", "trainer_state.json"):
        (out / name).write_bytes((checkpoint / name).read_bytes())
    return out


def main() -> None:
    with proof.directory() as root:
        for kind in KINDS:
            write_base(root / "base" / kind, kind)
        proof.ranks(1, root, "one")
        proof.ranks(2, root, "run")
        last, titles = f"checkpoint-{STEPS}", {"one": "sentence-transformers", "run": "Accelerate"}
        for name, title in titles.items():
            for kind in KINDS:
                said = proof.ckptkit("inspect", root / name / kind / last)
                assert f"trainer: {title}, by transformers' Trainer" in said, f"{name}, {kind}: {said}"
                proof.ckptkit("verify", root / name / kind / last)
            out = root / "out" / name
            proof.ckptkit("consolidate", root / name / "pooling" / last, out, "--base", root / "base" / "pooling")
            check_export(root, name, "pooling", out)
        check_dense(root, root / "run" / "dense" / last)
        proof.ranks(1, root, "resumed", make_resumable(root, root / "run" / "pooling" / f"checkpoint-{SAVED}"))
        expected, found = (
            proof.logged_losses(root / name / "pooling" / last, root / f"{name}.json") for name in ("run", "resumed")
        )
        proof.check_losses("pooling", expected, found)
    print(
        "sentence-transformers 6.2.0: 1 rank, and 2 ranks with FSDP2: inspect, verify, consolidate (embeddings equal; "
        "a dense layer refused), convert to 1 (losses equal)"
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:]))
    else:
        main()
