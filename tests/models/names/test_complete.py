"""Layers and experts that are missing, or that the config knows nothing of; and how numbers are found in names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import Mismatch
from ckptkit.layout.renames import mask_numbers, numbers_in
from ckptkit.models.names.naming import require_layers_and_experts
from ckptkit.models.names.sizes import Sizes

CONFIG = {"num_hidden_layers": 3, "num_experts": 2}
ATTENTION = "model.layers.{}.self_attn.o_proj.weight"
EXPERT = "model.layers.{}.mlp.experts.{}.up_proj.weight"
ALL = [ATTENTION.format(i) for i in range(3)] + [EXPERT.format(i, e) for i in (1, 2) for e in range(2)]
ALL += ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]  # the first layer has no experts


def check(names: list[str], **more: Any) -> None:
    require_layers_and_experts(names, Sizes(CONFIG | more), Path("there"))


def test_all_is_there() -> None:
    check(ALL)
    check([*ALL, "model.layers.3.enorm.weight"], num_nextn_predict_layers=1)
    require_layers_and_experts(["h.0.attn.c_attn.weight"], Sizes({"n_layer": 2}), Path("there"))  # called otherwise


@pytest.mark.parametrize(
    ("names", "tensor", "words"),
    [
        (
            [name for name in ALL if "layers.1." not in name],
            "model.layers.1",
            "expected numbers 0 to 2 .*, found 2 of them",
        ),
        ([*ALL, ATTENTION.format(7)], "model.layers.7", "expected numbers 0 to 2 .*, found this one too"),
        ([*ALL, EXPERT.format(1, 2)], EXPERT.format(1, 2), "expected numbers 0 to 1 .*, found this one too"),
        (
            [name for name in ALL if name != EXPERT.format(2, 0)],
            EXPERT.format(2, 0),
            "expected numbers 0 to 1 .*, found 1 of them",
        ),
        ([name for name in ALL if "experts" not in name], None, "expected 2 experts .*, found none"),
        ([name for name in ALL if name != ATTENTION.format(2)], ATTENTION.format(2), "layer 1 has this tensor"),
    ],
)
def test_what_is_missing_or_too_much(names: list[str], tensor: str | None, words: str) -> None:
    with pytest.raises(Mismatch, match=words) as caught:
        check(names)
    assert (caught.value.tensor, caught.value.path) == (tensor, Path("there"))


@pytest.mark.parametrize(
    ("name", "outline", "numbers"),
    [
        ("layers.3.linear_fc1.weight12", "layers.#.linear_fc1.weight#", (3, 12)),
        ("layers.3.linear_fc1.weight12_w", "layers.#.linear_fc1.weight#_w", (3, 12)),
        ("experts.linear_fc2.bias0", "experts.linear_fc2.bias#", (0,)),
        ("experts.weights2.w1", "experts.weights2.w1", ()),
        ("weight2.x", "weight2.x", ()),
        ("7.weight_v1", "#.weight_v1", (7,)),
        (f"layers.{'9' * 5000}.w", f"layers.{'9' * 5000}.w", ()),
    ],
)
def test_numbers_in_names(name: str, outline: str, numbers: tuple[int, ...]) -> None:
    assert (mask_numbers(name), numbers_in(name)) == (outline, numbers)
