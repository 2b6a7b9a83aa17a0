"""A training with transformers' Trainer, as its documentation shows it: a tiny Llama on random tokens."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

WIDTH, VOCABULARY, LENGTH = 32, 64, 16


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self) -> None:
        self.rows = torch.randint(VOCABULARY, (24, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--save_steps", type=int, required=True)
    parser.add_argument("--resume_from_checkpoint")
    given = parser.parse_args()
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=VOCABULARY, attention_dropout=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=given.output_dir, max_steps=given.max_steps, save_steps=given.save_steps, logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens()).train(given.resume_from_checkpoint)


if __name__ == "__main__":
    main()
