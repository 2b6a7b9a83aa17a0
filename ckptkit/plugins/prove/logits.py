"""Say how the logits of two models differ, and whether that is no more than rounding does."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_KL = 0.01  # nats for each token: rounding of weights to bfloat16 costs a tenth of it or less
_NOISE = 1e-5  # of the largest logit: what the order of sums in float32 makes of the same weights


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits of two models for `tokens` tokens: how they differ from the source's.

    `kl` is the divergence of the distribution of the next token from the source's, in nats, the mean over all tokens,
    and `max_kl` that at the worst; `max_abs` is the largest difference of two logits, where the largest is `scale`, and
    `unexplained` what is left of it if the source's weights are rounded alike; `same_choice` is at how many tokens the
    likeliest next one is the same. `first` names the block of the model whose output differs first from the source's,
    rounded alike; None if all are the same bit for bit. `rounded` says whether dtypes differ.
    """

    tokens: int
    kl: float
    max_kl: float
    max_abs: float
    unexplained: float
    scale: float
    same_choice: int
    first: str | None
    rounded: bool

    @property
    def is_ok(self) -> bool:
        """Return whether they differ by no more than rounding does. Never where one is no number."""
        return self.unexplained <= _NOISE * self.scale and (not self.rounded or self.kl <= _MOST_KL)
