"""Configuration: what is trained and how, validated once. Opens no file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.errors import Usage
from ckptkit.train.model_config import BYTES, ModelConfig, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run. `batch_size` counts sequences per step over all ranks, so their number does not matter."""

    run: Path
    model: ModelConfig = field(default_factory=ModelConfig)
    data: Path | None = None
    resume: Path | None = None
    steps: int = 100
    batch_size: int = 8
    sequence_length: int = 256
    lr: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    save_every: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length"):
            require_at_least(1, name, getattr(self, name))
        for name in ("lr", "warmup", "weight_decay", "seed", "save_every"):
            require_at_least(0, name, getattr(self, name))
        if self.seed >= 2**32:
            raise Usage(f"seed is {self.seed}; it must be less than 2**32")
        if not self.clip > 0:
            raise Usage(f"clip is {self.clip}; the gradient norm can only be clipped to more than 0")
        if self.device not in DEVICES:
            raise Usage(f"there is no device `{self.device}`", hint=f"use one of {', '.join(DEVICES)}")
        if self.sequence_length > self.model.max_position_embeddings:
            raise Usage(
                f"sequence_length {self.sequence_length} is beyond the model's "
                f"max_position_embeddings {self.model.max_position_embeddings}"
            )
        if self.model.vocab_size < BYTES:
            raise Usage(f"vocab_size {self.model.vocab_size} cannot hold the {BYTES} bytes that text is made of")


DEVICES = ("auto", "cpu", "cuda")
