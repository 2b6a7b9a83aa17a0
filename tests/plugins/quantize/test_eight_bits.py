"""Rounding to 8 bits, against torch's own: every upper half of a float32, its neighbors, and random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ckptkit.plugins.quantize.quantized_blocks import round_to_e4m3

HALVES = np.arange(1 << 16, dtype=np.uint32) << 16
RANDOM = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
NORMAL = np.random.default_rng(1).normal(size=1 << 20).astype(np.float32)


@pytest.mark.parametrize(
    "bits",
    [
        HALVES,
        HALVES + np.uint32(1),
        HALVES - np.uint32(1),
        RANDOM,
        NORMAL.view(np.uint32),
        (NORMAL / 99).view(np.uint32),
    ],
)
def test_every_number_is_torch_s(bits: NDArray[np.uint32]) -> None:
    numbers = bits.view(np.float32)
    theirs = torch.from_numpy(numbers.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(round_to_e4m3(numbers), theirs)


def test_elements_that_do_not_lie_together() -> None:
    numbers = NORMAL[: 1 << 10].reshape(32, 32)
    assert np.array_equal(round_to_e4m3(numbers.T), round_to_e4m3(np.ascontiguousarray(numbers.T)))
