"""The order of a model's parameters, held against torch's own modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptkit.checkpoints.optimizers.parameter_order import is_buffer, is_order_of_modules


def test_buffers_of_floats_are_known_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    buffers = dict(model.named_buffers())
    assert {name for name in model.state_dict() if is_buffer(name)} == buffers.keys()


def test_modules_give_their_own_first_and_then_their_children() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    models: list[nn.Module] = [nn.TransformerEncoder(layer, 12), nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))]
    with_own = nn.Bilinear(2, 2, 2)
    with_own.register_module("below", nn.LSTM(2, 2, 11))
    for model in (*models, with_own, nn.ParameterList([torch.zeros(1)] * 12)):
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name in model.state_dict() if name in names]
        assert is_order_of_modules(names)


@pytest.mark.parametrize(
    "names",
    [
        ["a.bias", "a.weight", "b.weight"],  # sorted
        ["0.w", "1.w", "10.w", "2.w"],
        ["a.w", "b.w", "a.b"],  # shared out among ranks
        ["a.b.w", "a.w"],
    ],
)
def test_other_orders_are_no_evidence(names: list[str]) -> None:
    assert not is_order_of_modules(names)
