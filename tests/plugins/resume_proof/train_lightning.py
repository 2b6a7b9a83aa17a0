"""A training with Lightning, as its documentation shows it."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, BATCHES, WIDTH = 4, 3, 16


class Module(lightning.LightningModule):
    """Two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = (self.layers(batch[0]) - batch[0].flip(1)).square().mean()
        print(f"loss {loss.item():.8f}", flush=True)  # noqa: T201 - the proof reads it
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--resume")
    given = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(torch.randn(BATCH * BATCHES, WIDTH)), batch_size=BATCH)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=given.steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(given.run, save_top_k=-1, every_n_train_steps=given.save_every)],
    )  # fmt: skip
    trainer.fit(Module(), loader, ckpt_path=given.resume)


if __name__ == "__main__":
    main()
