"""Edits on the way: what is selected, renamed and cast, in weights and optimizer alike, judged by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit import average, convert, diff, reshard, verify
from ckptkit.errors import Mismatch, Unsupported, Usage
from tests import producers
from tests.conftest import Produce
from tests.conversion.judges import judge_renamed, save_called
from tests.producers import counted, save_alone
from tests.test_matrix import assert_same, leaves, load_dcp

Leaves = dict[tuple[str, ...], Any]


def loaded(root: Path) -> Leaves:
    return leaves(load_dcp(root))


def only(state: Leaves, keep: Callable[[str], bool]) -> Leaves:
    return {way: leaf for way, leaf in state.items() if keep(".".join(way))}


# -- select ------------------------------------------------------------------------------------------------------------


def test_include_and_exclude(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    done = reshard(source, tmp_path / "out", to=2, include=["model.*", "extra.step"], exclude=["*.bias", "*mask"])
    expected = only(
        loaded(source), lambda name: name.startswith(("model.", "extra.step")) and not name.endswith((".bias", "mask"))
    )
    assert_same(loaded(tmp_path / "out"), expected)
    assert {left.name: left.entries for left in done.dropped} == {"model": 4, "optim": 36, "extra": 4}
    assert done.tensors == len(expected) - 1


def test_what_matches_nothing_is_refused(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.accelerate).root
    with pytest.raises(Usage, match=r"include='modle\.\*' matches no tensor"):
        reshard(source, tmp_path / "out", to=2, include=["model.*", "modle.*"])
    with pytest.raises(Usage, match="leave none of 51 entries"):
        reshard(source, tmp_path / "out", to=2, exclude=["*"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"exclude": "*bais"}, r"exclude='\*bais' matches no tensor"),
        ({"dtype": ["bf16", "model.up.wieght=fp32"]}, r"dtype='model\.up\.wieght' matches no tensor"),
        ({"rename": ["^up=>top", "^up=>bottom"]}, r"rename='\^up=>bottom' matches no tensor"),
    ],
)
def test_a_pattern_that_does_nothing_is_refused(
    produce: Produce, tmp_path: Path, options: dict[str, Any], near: str
) -> None:
    source = produce(producers.fsdp2).root
    for to in ("dcp", "hf"):
        if to == "hf" and "dtype" in options:  # the model's names have no key before them
            options = {"dtype": ["up.wieght=fp32"]}
            near = near.replace(r"model\.", "")
        with pytest.raises(Usage, match=near) as caught:
            convert(source, tmp_path / "out", to=to, **options)
        assert caught.value.hint is not None
        assert "match one of the nearest names, " in caught.value.hint
        assert "--allow-unmatched" in caught.value.hint
        convert(source, tmp_path / to, to=to, **options, allow_unmatched=True)
    assert {path.name for path in tmp_path.iterdir()} == {"dcp", "hf"}


@pytest.mark.parametrize(
    ("verb", "option", "pattern"),
    [
        (verb, option, pattern)
        for verb in ("consolidate", "convert", "reshard", "average", "diff", "stats")
        for option, pattern in (("exclude", "no"), ("dtype", "no=bf16"), ("rename", "^no=>yes"))
        if option == "exclude" or verb not in ("diff", "stats")
    ],
)
def test_a_pattern_that_does_nothing_names_the_file(verb: str, option: str, pattern: str, tmp_path: Path) -> None:
    source, out = tmp_path / "model.pt", tmp_path / "out"
    state = {"model": {"proj.weight": counted(8, 2)}, "optimizer": {"rate": counted(2)}}
    torch.save(state["model"] if verb == "average" else state, source)
    calls: dict[str, Callable[..., object]] = {
        "consolidate": partial(ckptkit.consolidate, source, out),
        "convert": partial(convert, source, out, to="dcp"),
        "reshard": partial(reshard, source, out, to=2),
        "average": partial(average, [source, source], out),
        "diff": partial(diff, source, source),
        "stats": partial(ckptkit.stats, source),
    }
    with pytest.raises(Usage, match="matches no tensor") as caught:
        calls[verb](**{option: [pattern]})
    assert caught.value.path == source


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_names_that_clash_name_the_file(tmp_path: Path, to: str) -> None:
    source = tmp_path / "model.pt"
    torch.save({"a.weight": counted(2), "b.weight": counted(2)}, source)
    with pytest.raises(Mismatch, match="would both get this name") as caught:
        convert(source, tmp_path / "out", to=to, rename=["^a=>b"])
    assert caught.value.path == source


def test_nothing_to_compare_or_look_at_is_refused(produce: Produce) -> None:
    source = produce(producers.fsdp2).root
    for look in (partial(diff, source, source), partial(ckptkit.stats, source)):
        with pytest.raises(Usage, match=r"include and exclude leave none of \d+ entries"):
            look(exclude=["*"])
    with pytest.raises(Usage, match="no tensor is left"):
        ckptkit.stats(source, include=["extra*"])
    for look in (partial(diff, source, source), partial(ckptkit.stats, source)):
        with pytest.raises(Usage, match=r"exclude='optm\.\*' matches no tensor"):
            look(exclude=["optm.*"])
        look(exclude=["optm.*"], allow_unmatched=True)


@pytest.mark.parametrize("to", ["hf", "dcp", "pt"])
def test_nothing_to_write_is_refused(produce: Produce, tmp_path: Path, to: str) -> None:
    source = produce(producers.fsdp2).root
    for include, exclude in (([], ["*"]), (["model.*"], ["mod*"])):
        with pytest.raises(Usage, match="leave none of"):
            convert(source, tmp_path / "out", to=to, include=include, exclude=exclude)
    with pytest.raises(Usage, match="leave none of"):
        average([source, source], tmp_path / "out", exclude=["*"])
    assert list(tmp_path.iterdir()) == []


def test_what_was_compared_is_counted_and_nothing_is_refused(tmp_path: Path) -> None:
    for name, step in (("a", 3), ("b", 3), ("c", 4)):
        torch.save({"step": step, "name": "x"}, tmp_path / f"{name}.pt")
    one, same, other = (tmp_path / f"{name}.pt" for name in "abc")
    assert str(diff(one, same)).endswith("the same: 2 entries, no tensor")
    assert "compared: 2 entries, no tensor" in str(diff(one, other))
    for against in (same, other):
        with pytest.raises(Usage, match="nothing to compare: this and"):
            verify(one, against=against)


def test_a_part_of_which_nothing_is_left_is_not_written(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.accelerate).root
    done = reshard(source, tmp_path / "out", to=2, include=["model.*"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"pytorch_model_fsdp_0"}
    assert [left.name for left in done.dropped] == ["optimizer"]


# -- rename ------------------------------------------------------------------------------------------------------------


def test_a_model_and_its_optimizer_under_other_names(tmp_path: Path) -> None:
    nested, flattened = tmp_path / "nested", tmp_path / "flattened"
    save_called(("first", "second"), nested, flattened)
    rules = [r"^first\.=>block_", r"^block_(.*)=>block.\1", r"^block\.=>encoder-1.", r"second=>out"]
    for source in (nested, flattened):
        done = reshard(source, tmp_path / f"{source.name}-renamed", to=3, rename=rules)
        assert done.renamed["model.first.weight"] == "model.encoder-1.weight"
        assert done.renamed["optim.state.first.weight.exp_avg"] == "optim.state.encoder-1.weight.exp_avg"
    assert done.renamed["optim.param_groups.first.weight.lr"] == "optim.param_groups.encoder-1.weight.lr"
    roots = [(tmp_path / "nested-renamed", False), (tmp_path / "flattened-renamed", True)]
    judge_renamed(("first", "second"), nested, ("encoder-1", "out"), roots)
    convert(nested, tmp_path / "pt", to="pt", rename=rules)
    convert(tmp_path / "pt", tmp_path / "back", to="dcp", rename=[r"^out\.=>second.", r"^encoder-1\.=>first."])
    assert_same(loaded(tmp_path / "back"), loaded(nested))


def test_what_is_no_parameter_keeps_its_name(tmp_path: Path) -> None:
    state = {
        "model": {"w": counted(3), "state.w.x": counted(2), "b": counted(1)},
        "optim": {
            "state": {"0": {"exp_avg": counted(3)}, "1": {"exp_avg": counted(2)}},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        },
        "rng": {"w": counted(5, dtype=torch.uint8)},
        "step": 1,
    }
    save_alone(state, tmp_path / "in")
    done = reshard(tmp_path / "in", tmp_path / "out", to=2, rename=["^=>net."])
    assert done.renamed == {f"model.{name}": f"model.net.{name}" for name in ("w", "state.w.x", "b")}
    found = load_dcp(tmp_path / "out")
    assert found["model"].keys() == {"net.w", "net.state.w.x", "net.b"}
    assert_same(*(only(leaves(tree), lambda name: not name.startswith("model")) for tree in (found, state)))


def test_two_that_would_be_called_the_same(tmp_path: Path) -> None:
    save_alone({"model": {"a": counted(1), "b": counted(2)}}, tmp_path / "in")
    for to in ("dcp", "pt", "hf"):
        with pytest.raises(Mismatch, match="both") as caught:
            convert(tmp_path / "in", tmp_path / "out", to=to, rename=["^[ab]$=>c"])
        assert caught.value.tensor == ("c" if to == "hf" else "model.c")
    for rule in ("no arrow", "(=>x", r"a=>\9"):
        with pytest.raises(Usage, match="rename="):
            reshard(tmp_path / "in", tmp_path / "out", to=1, rename=[rule])


def test_of_several_models_none_is_guessed_unless_it_need_not_be(tmp_path: Path) -> None:
    state = {"actor": {"w": counted(3)}, "critic": {"w": counted(4)}}
    save_alone(state, tmp_path / "in")
    reshard(tmp_path / "in", tmp_path / "out", to=2, dtype="actor.*=bf16")
    found = load_dcp(tmp_path / "out")
    assert (found["actor"]["w"].dtype, found["critic"]["w"].dtype) == (torch.bfloat16, torch.float32)
    for edit in ({"dtype": "bf16"}, {"rename": ["w=>v"]}):
        with pytest.raises(Unsupported, match="several entries could be the model: actor, critic"):
            reshard(tmp_path / "in", tmp_path / "no", to=2, **edit)


# -- cast --------------------------------------------------------------------------------------------------------------


def dtypes(root: Path) -> dict[str, torch.dtype]:
    return {".".join(way): leaf.dtype for way, leaf in loaded(root).items() if isinstance(leaf, Tensor)}


def test_a_dtype_alone_is_that_of_the_weights(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    done = reshard(made.root, tmp_path / "out", to=2, dtype="bf16")
    found = loaded(tmp_path / "out")
    cast = {
        name: tensor.bfloat16() if name.startswith("model.") and tensor.is_floating_point() else tensor
        for name, tensor in made.truth.items()
    }
    assert_same(
        {(".".join(way),): leaf for way, leaf in found.items() if isinstance(leaf, Tensor)},
        {(name,): tensor for name, tensor in cast.items()},
    )
    assert done.cast == {name: "float32 => bfloat16" for name, tensor in cast.items() if tensor.dtype is torch.bfloat16}


def test_rules_for_some_and_the_last_counts(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    before = dtypes(source)

    def after(*rules: str) -> dict[str, torch.dtype]:
        reshard(source, tmp_path / "out", to=2, dtype=rules, overwrite=True)
        return dtypes(tmp_path / "out")

    found = after("optim.*=bf16")
    assert found["optim.state.up.weight.exp_avg"] == found["optim.state.up.weight.step"] == torch.bfloat16
    assert {name for name in found if found[name] != before[name]} == {n for n in before if n.startswith("optim.")}
    assert after("bf16", "model.*=keep") == before
    found = after("*=fp16", "*.exp_avg*=fp64", "optim.*.step=keep", "model.norm.*=float32")
    assert found["model.up.weight"] == torch.float16
    assert found["model.norm.weight"] == found["optim.state.up.weight.step"] == torch.float32
    assert found["optim.state.up.weight.exp_avg_sq"] == torch.float64
    assert found["model.position_ids"] == torch.int64
    assert after("fp16", "keep") == before


def test_what_was_cast_is_reported_under_its_new_name(tmp_path: Path) -> None:
    save_alone({"model": {"a": counted(2)}}, tmp_path / "in")
    done = reshard(tmp_path / "in", tmp_path / "out", to=1, dtype="model.a=bf16", rename=["a=>b"])
    assert done.cast == {"model.b": "float32 => bfloat16"}
    assert dtypes(tmp_path / "out") == {"model.b": torch.bfloat16}


@pytest.mark.parametrize("rule", ["float7", "int8", "*=", "optim.*=float8_e4m3fn", ""])
def test_what_is_no_dtype_to_cast_to(produce: Produce, tmp_path: Path, rule: str) -> None:
    with pytest.raises(Usage):
        reshard(produce(producers.under_model).root, tmp_path / "out", to=1, dtype=[rule])
    assert list(tmp_path.iterdir()) == []
