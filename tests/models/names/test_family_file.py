"""Tables of one's own: rules as data, in front of those known or alone; what is wrong in a file is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.errors import Mismatch, Usage
from ckptkit.models.names.family_file import read_family_file
from ckptkit.models.names.rule import Rule
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.steps import Chain, Concatenated, Grouped, Reversed, Rotary
from tests.models.names.hub_models import HEAD, HEADS, HIDDEN, KEY_HEADS, config_of, saved
from tests.models.names.shelf import check_same

TABLE = """
name = "mine"
drop = ["blocks.{layer}.mask"]

[[rule]]
own = "embed.weight"
hub = "model.embed_tokens.weight"

[[rule]]
own = "head.weight"
hub = "lm_head.weight"

[[rule]]
own = "last_norm.weight"
hub = "model.norm.weight"

[[rule]]
own = ["blocks.{layer}.norm_1.weight", "blocks.{layer}.norm_2.weight"]
hub = ["model.layers.{layer}.input_layernorm.weight", "model.layers.{layer}.post_attention_layernorm.weight"]

[[rule]]
own = "blocks.{layer}.qkv.weight"
hub = [
    "model.layers.{layer}.self_attn.q_proj.weight",
    "model.layers.{layer}.self_attn.k_proj.weight",
    "model.layers.{layer}.self_attn.v_proj.weight",
]
step = ["grouped", {each = [{rotary = "heads"}, {rotary = "key_heads"}, "same"]}]

[[rule]]
own = "out_of_all.weight"
hub = "model.layers.{layer}.self_attn.o_proj.weight"
step = "transposed"

[[rule]]
own = "blocks.{layer}.up_and_gate.weight"
hub = ["model.layers.{layer}.mlp.up_proj.weight", "model.layers.{layer}.mlp.gate_proj.weight"]
step = {alternating = 2}

[[rule]]
own = "blocks.{layer}.down.weight"
hub = "model.layers.{layer}.mlp.down_proj.weight"
"""


def table_in(place: Path, text: str = TABLE) -> Path:
    (place / "mine.toml").write_text(text)
    return place / "mine.toml"


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    return weight.view(heads, 2, HEAD // 2, HIDDEN).transpose(1, 2).reshape(heads * HEAD, HIDDEN)


def own_of(hub: dict[str, Tensor]) -> dict[str, Tensor]:
    """The Hub's tensors as the table calls and folds them, in torch."""
    found = {
        "embed.weight": hub["model.embed_tokens.weight"],
        "head.weight": hub["lm_head.weight"],
        "last_norm.weight": hub["model.norm.weight"],
    }
    outs = []
    for layer in range(2):
        at = f"model.layers.{layer}."
        q = in_pairs(hub[f"{at}self_attn.q_proj.weight"], HEADS).view(KEY_HEADS, -1, HIDDEN)
        k = in_pairs(hub[f"{at}self_attn.k_proj.weight"], KEY_HEADS).view(KEY_HEADS, -1, HIDDEN)
        v = hub[f"{at}self_attn.v_proj.weight"].view(KEY_HEADS, -1, HIDDEN)
        up, gate = hub[f"{at}mlp.up_proj.weight"], hub[f"{at}mlp.gate_proj.weight"]
        found |= {
            f"blocks.{layer}.norm_1.weight": hub[f"{at}input_layernorm.weight"],
            f"blocks.{layer}.norm_2.weight": hub[f"{at}post_attention_layernorm.weight"],
            f"blocks.{layer}.qkv.weight": torch.cat([q, k, v], 1).reshape(-1, HIDDEN),
            f"blocks.{layer}.up_and_gate.weight": torch.stack([up, gate], 1).reshape(-1, HIDDEN),
            f"blocks.{layer}.down.weight": hub[f"{at}mlp.down_proj.weight"],
        }
        outs.append(hub[f"{at}self_attn.o_proj.weight"].T)
    return found | {"out_of_all.weight": torch.stack(outs)}


def test_both_ways(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    hub = saved(config_of("llama"), tmp_path / "hub")
    own = own_of(hub)
    torch.save(own | {"blocks.0.mask": torch.ones(2)}, tmp_path / "own.pt")
    done = ckptkit.consolidate(tmp_path / "own.pt", tmp_path / "out", base=tmp_path / "hub", map=table)
    made = ckptkit.open(tmp_path / "out")
    check_same({name: made[name].torch() for name in made}, hub)
    assert any("from the names of mine" in note for note in done.notes)
    assert any("dropped 1" in note and "blocks.0.mask" in note for note in done.notes)
    ckptkit.convert(tmp_path / "hub", tmp_path / "start.pt", to="pt", map=table, names="mine")
    check_same(torch.load(tmp_path / "start.pt"), own)


def test_moments_go_along(tmp_path: Path) -> None:
    """A training of one's own names, its optimizer by names, into the Hub's names and back."""
    table = table_in(tmp_path)
    config = config_of("llama")
    own = own_of(saved(config, tmp_path / "hub"))
    moments = {name: torch.randn(tensor.shape) for name, tensor in own.items()}
    states = {name: {"exp_avg": moments[name], "step": torch.tensor(3.0)} for name in own}
    groups = [{"params": list(own), "lr": 0.1}]
    torch.save({"model": own, "optimizer": {"state": states, "param_groups": groups}}, tmp_path / "own.pt")
    options: dict[str, Any] = {"map": table, "base": tmp_path / "hub"}
    ckptkit.convert(tmp_path / "own.pt", tmp_path / "hub.pt", to="pt", names="hub", **options)
    found = torch.load(tmp_path / "hub.pt")
    found_moments = {name: state["exp_avg"] for name, state in found["optimizer"]["state"].items()}
    check_same(own_of(found_moments), moments)
    ckptkit.convert(tmp_path / "hub.pt", tmp_path / "back.pt", to="pt", names="mine", **options)
    back = torch.load(tmp_path / "back.pt")
    check_same({name: state["exp_avg"] for name, state in back["optimizer"]["state"].items()}, moments)
    assert sorted(back["optimizer"]["param_groups"][0]["params"]) == sorted(own)


def test_in_front_of_a_family(tmp_path: Path) -> None:
    """A family's checkpoint with one tensor that its table does not know, and one that it would call otherwise."""
    config = config_of("qwen3")
    hub = saved(config, tmp_path / "hub")
    ckptkit.convert(tmp_path / "hub", tmp_path / "titan.pt", to="pt", names="torchtitan")
    titan = torch.load(tmp_path / "titan.pt")
    titan["layers.0.attention.gate"] = torch.ones(3)
    torch.save(titan, tmp_path / "titan.pt")
    with pytest.raises(Mismatch, match="no rule translates it"):
        ckptkit.consolidate(tmp_path / "titan.pt", tmp_path / "out", base=tmp_path / "hub")
    text = '[[rule]]\nown = "layers.{layer}.attention.gate"\nhub = "model.layers.{layer}.self_attn.gate"\n'
    table = table_in(tmp_path, text)
    ckptkit.consolidate(tmp_path / "titan.pt", tmp_path / "out", base=tmp_path / "hub", map=table)
    made = ckptkit.open(tmp_path / "out")
    check_same({name: made[name].torch() for name in made}, hub | {"model.layers.0.self_attn.gate": torch.ones(3)})


def test_what_a_rule_is(tmp_path: Path) -> None:
    text = """
    [[rule]]
    own = ["a.{x}.w1", "a.{x}.w2"]
    hub = "b.{x}.w"
    step = {reversed = {joined = 2, axis = 1}}
    [[rule]]
    own = "c"
    hub = ["q", "k", "v"]
    step = {joined = 3, parts = ["heads", "key_heads", "key_heads"]}
    [[rule]]
    own = "e.{layer}.experts"
    hub = "f.{layer}.{expert}.w"
    step = [{rotary = "heads"}]
    flat = "experts"
    [[rule]]
    own = "g"
    hub = ["h", "i", "j"]
    step = "grouped"
    """
    table = read_family_file(table_in(tmp_path, text))
    assert table.name == "mine"
    assert table.rules(Sizes({})) == (
        Rule(("a.{x}.w1", "a.{x}.w2"), ("b.{x}.w",), Reversed(Concatenated(2, 1))),
        Rule(("c",), ("q", "k", "v"), Concatenated(3, 0, ("heads", "key_heads", "key_heads"))),
        Rule(("e.{layer}.experts",), ("f.{layer}.{expert}.w",), Chain((Rotary("heads"),)), "experts"),
        Rule(("g",), ("h", "i", "j"), Grouped()),
    )


FIRST = '[[rule]]\nown = "a"\nhub = "b"\n\n'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[[rule]\n", "not valid TOML: .*line 1"),
        ("", r"the table does not contain a `\[\[rule\]\]`"),
        ("rule = [1]", "rule 1: a rule must be a table"),
        ('name = "a b"\n' + FIRST, "`name`: expected a plain name, found 'a b'"),
        ("names = 1\n" + FIRST, "the file does not have a key `names`"),
        (FIRST + '[[rule]]\nown = "a"\nhab = "b"', "line 5: a rule does not have a key `hab`"),
        (FIRST + '[[rule]]\nown = "a"', "line 5: `hub`: expected a name, found None"),
        (FIRST + '[[rule]]\nown = "a.{layer"\nhub = "b"', "line 5: `own`: expected a name, found 'a.{layer'"),
        (FIRST + '[[rule]]\nown = "layers.0.a"\nhub = "b"', "line 5: `own` has a number in 'layers.0.a'"),
        (FIRST + '[[rule]]\nown = ["a.{x}", "b.{y}"]\nhub = "c"', "line 5: the names in `own` must have the same"),
        (FIRST + '[[rule]]\nown = ["a", "c"]\nhub = "b"', "line 5: `step` does not make 1 tensor of 2"),
        (FIRST + '[[rule]]\nown = "a"\nhub = "b"\nstep = "rotaty"', "line 5: `step`: unknown step `rotaty`"),
        (
            FIRST + '[[rule]]\nown = "a"\nhub = "b"\nstep = {rotary = "head"}',
            "line 5: `step`: rotary: expected the symbol of a size, found 'head'",
        ),
        (
            FIRST + '[[rule]]\nown = "a"\nhub = "b"\nstep = {rotary = "heads", axis = 1}',
            "line 5: .*does not have a key `axis`",
        ),
        (FIRST + '[[rule]]\nown = "a"\nhub = ["b", "c"]\nstep = {joined = 2, axis = -1}', "line 5: .*axis: .*found -1"),
        (FIRST + '[[rule]]\nown = "a"\nhub = "b"\nstep = {transposed = 1}', "line 5: .*expected two axes, found 1"),
        (FIRST + '[[rule]]\nown = "a"\nhub = "b"\nflat = "x"', "line 5: `flat`: unknown symbol 'x'"),
    ],
)
def test_what_is_wrong_is_said(text: str, wanted: str, tmp_path: Path) -> None:
    table = table_in(tmp_path, text)
    with pytest.raises(Usage, match=wanted) as caught:
        read_family_file(table)
    assert caught.value.path == table


def test_an_axis_that_a_tensor_has_not(tmp_path: Path) -> None:
    """What a table asks of a tensor that has no such axis is one error with its name."""
    hub = saved(config_of("llama"), tmp_path / "hub")
    torch.save(own_of(hub) | {"last_norm.weight": torch.ones(1, HIDDEN, 1)}, tmp_path / "own.pt")
    text = TABLE.replace('hub = "model.norm.weight"', 'hub = "model.norm.weight"\nstep = {transposed = [0, 5]}')
    with pytest.raises(Mismatch, match=r"expected more axes, .*; found shape \[1, 32, 1\]") as caught:
        ckptkit.consolidate(tmp_path / "own.pt", tmp_path / "out", base=tmp_path / "hub", map=table_in(tmp_path, text))
    assert caught.value.tensor == "last_norm.weight"


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="no such file"):
        ckptkit.consolidate(tmp_path, tmp_path / "out", map=tmp_path / "none.toml")


def test_a_table_that_is_not_used(tmp_path: Path) -> None:
    hub = saved(config_of("llama"), tmp_path / "hub")
    torch.save(hub, tmp_path / "own.pt")
    with pytest.raises(Usage, match="map renames tensors"):
        ckptkit.consolidate(tmp_path / "own.pt", tmp_path / "out", map=table_in(tmp_path), names="keep")
    with pytest.raises(Mismatch, match="no rule translates it and 20 more from the names of mine"):
        ckptkit.consolidate(tmp_path / "own.pt", tmp_path / "out", map=table_in(tmp_path), base=tmp_path / "hub")


def test_the_table_in_the_docs(tmp_path: Path) -> None:
    """What docs/names.md shows does what it says, both ways."""
    page = (Path(__file__).parents[3] / "docs" / "names.md").read_text()
    table = table_in(tmp_path, page.partition("```toml\n")[2].partition("```")[0])
    hub = saved(config_of("llama"), tmp_path / "hub")
    own = own_of(hub)
    shown = ("embed.weight", *(f"blocks.{i}.{name}.weight" for i in range(2) for name in ("norm_1", "norm_2", "qkv")))
    given = {name: own[name] for name in shown} | {"out_of_all_layers.weight": own["out_of_all.weight"].mT.contiguous()}
    torch.save(given | {"blocks.1.mask": torch.ones(2)}, tmp_path / "own.pt")
    options: dict[str, Any] = {"map": table, "base": tmp_path / "hub"}
    ckptkit.convert(tmp_path / "own.pt", tmp_path / "hub.pt", to="pt", **options)
    found = torch.load(tmp_path / "hub.pt")
    assert len(found) == 1 + 2 * 6
    check_same(found, {name: hub[name] for name in found})
    ckptkit.convert(tmp_path / "hub.pt", tmp_path / "back.pt", to="pt", names="mine", **options)
    check_same(torch.load(tmp_path / "back.pt"), given)
