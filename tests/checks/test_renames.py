"""Renames: a rule that explains several kinds of tensors, or equal content; never a guess among several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.checks.diff import find_renames
from ckptkit.layout import Layout, edits
from ckptkit.layout.renames import Explained, explain_renames


def layout(path: Path, **tensors: Tensor) -> Layout:
    save_file({name.replace("_", "."): tensor.contiguous() for name, tensor in tensors.items()}, path)
    return open_layout(path)


def blocks(prefix: str = "", attention: str = "attn", *, layers: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a small model under these names, `_` for dots."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{prefix}embed_weight": torch.randn(9, 4, generator=generator)}
    for i in range(layers):
        for name, shape in ((f"{attention}_q", (4, 4)), (f"{attention}_k", (4, 4)), ("mlp", (8, 4))):
            tensors[f"{prefix}layers_{i}_{name}_weight"] = torch.randn(shape, generator=generator)
            tensors[f"{prefix}layers_{i}_{name}_bias"] = torch.randn(shape[0], generator=generator)
    return tensors


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (("",), ("backbone_",), [Explained("*", "backbone.*", 73)]),
        (("backbone_",), ("",), [Explained("backbone.*", "*", 73)]),
        (("encoder_",), ("bert_encoder_",), [Explained("*", "bert.*", 73)]),
        (("", "attn"), ("", "self_attention"), [Explained("*.attn.*", "*.self.attention.*", 48)]),
        (
            ("decoder_", "attn"),
            ("model_", "attention"),
            [
                Explained("decoder.*.attn.*", "model.*.attention.*", 48),
                Explained("decoder.*", "model.*", 25),
            ],
        ),
    ],
)
def test_a_rule_whatever_is_in_the_tensors(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...], lines: list[Explained]
) -> None:
    a, b = layout(tmp_path / "a.safetensors", **blocks(*before)), blocks(*after, seed=1)
    found = find_renames(*apart(a, layout(tmp_path / "b.safetensors", **b)))
    assert {old: a.specs[old] for old in found} == {
        old: open_layout(tmp_path / "b.safetensors").specs[new] for old, new in found.items()
    }
    assert explain_renames(found) == lines


def apart(a: Layout, b: Layout) -> tuple[Layout, Layout]:
    """What either has that the other has not."""
    return edits.select_entries(a, lambda name: name not in b.tensors), edits.select_entries(
        b, lambda name: name not in a.tensors
    )


def test_a_word_at_the_end_is_not_a_rule_by_itself(tmp_path: Path) -> None:
    """`wq` may be `query` or `key`: only what is in it tells."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 4, generator=generator) for _ in range(4)]
    a = layout(tmp_path / "a.safetensors", l_0_wq=tensors[0], l_1_wq=tensors[1], l_0_wk=tensors[2], l_1_wk=tensors[3])
    same = {"l_0_query": tensors[0], "l_1_query": tensors[1], "l_0_key": tensors[2], "l_1_key": tensors[3]}
    b = layout(tmp_path / "b.safetensors", **same)
    found = find_renames(a, b)
    assert found == {"l.0.wq": "l.0.query", "l.1.wq": "l.1.query", "l.0.wk": "l.0.key", "l.1.wk": "l.1.key"}
    assert explain_renames(found) == [Explained("l.*.wk", "l.*.key", 2), Explained("l.*.wq", "l.*.query", 2)]
    other = layout(tmp_path / "c.safetensors", **{name: tensor + 1 for name, tensor in same.items()})
    assert find_renames(a, other) == {}


def test_content_that_is_not_unique_tells_nothing(tmp_path: Path) -> None:
    ones, lone = torch.ones(4), torch.arange(4.0)
    a = layout(tmp_path / "a.safetensors", norm1=ones, norm2=ones.clone(), lone=lone, step=torch.tensor(3.0))
    b = layout(tmp_path / "b.safetensors", first=ones, second=ones.clone(), other=lone, count=torch.tensor(3.0))
    assert find_renames(a, b) == {"lone": "other"}


def test_another_layer_is_no_rename(tmp_path: Path) -> None:
    a = layout(tmp_path / "a.safetensors", **blocks(layers=3))
    b = layout(
        tmp_path / "b.safetensors",
        **{name.replace("layers_0_", "layers_7_"): tensor for name, tensor in blocks(layers=3, seed=1).items()},
    )
    assert find_renames(*apart(a, b)) == {}


def test_a_tensor_of_another_shape_is_none_of_the_renamed(tmp_path: Path) -> None:
    tensors = blocks(prefix="x_")
    tensors["x_embed_weight"] = torch.zeros(10, 4)
    found = find_renames(
        layout(tmp_path / "a.safetensors", **blocks("y_")), layout(tmp_path / "b.safetensors", **tensors)
    )
    assert len(found) == 72
    assert "y.embed.weight" not in found


def test_a_single_rename_by_its_names() -> None:
    assert explain_renames({"a.b": "c.b"}) == [Explained("a.b", "c.b", 1)]
    assert explain_renames({"ln.gamma": "ln.weight", "head.gamma": "head.weight"}) == [
        Explained("*.gamma", "*.weight", 2)
    ]
