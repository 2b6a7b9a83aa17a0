"""Prefixes of wrappers: those that no model has itself go anywhere, DDP's where the model does not know the name."""

from __future__ import annotations

from ckptkit.layout.wrappers import model_name_of, without_ddp, without_inner_prefixes


def test_what_wrappers_put_into_names_goes_wherever_it_stands() -> None:
    name = "_orig_mod.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp._fpw_module.weight"
    assert without_inner_prefixes(name) == "layers.0.mlp.weight"
    assert without_inner_prefixes("module.layers.0.weight") == "module.layers.0.weight"


def test_a_word_of_the_models_own_stays() -> None:
    assert model_name_of("module.weight", {"module.weight"}) == "module.weight"
    assert model_name_of("module._orig_mod.weight", {"weight"}) == "weight"
    assert model_name_of("module.module.weight", {"module.weight"}) == "module.weight"
    assert model_name_of("module.module.weight", {"weight"}) == "weight"


def test_ddp_is_taken_off_as_often_as_it_stands_before_all() -> None:
    assert without_ddp({"a": "module.module.x", "b": "module.module.module.y"}) == {"a": "x", "b": "module.y"}
    assert without_ddp({"a": "module.x", "b": "y"}) == {"a": "module.x", "b": "y"}
    assert without_ddp({}) == {}
