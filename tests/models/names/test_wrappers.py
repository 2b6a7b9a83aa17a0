"""Prefixes of wrappers: those that no model has itself go anywhere, DDP's where the model does not know the name."""

from __future__ import annotations

from ckptkit.layout.wrappers import parameter_name_in_model, without_common_ddp_prefix, without_prefixes_except_ddp


def test_what_wrappers_put_into_names_goes_wherever_it_stands() -> None:
    name = "_orig_mod.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp._fpw_module.weight"
    assert without_prefixes_except_ddp(name) == "layers.0.mlp.weight"
    assert without_prefixes_except_ddp("module.layers.0.weight") == "module.layers.0.weight"


def test_a_word_of_the_models_own_stays() -> None:
    assert parameter_name_in_model("module.weight", {"module.weight"}) == "module.weight"
    assert parameter_name_in_model("module._orig_mod.weight", {"weight"}) == "weight"
    assert parameter_name_in_model("module.module.weight", {"module.weight"}) == "module.weight"
    assert parameter_name_in_model("module.module.weight", {"weight"}) == "weight"


def test_ddp_is_taken_off_as_often_as_it_stands_before_all() -> None:
    assert without_common_ddp_prefix({"a": "module.module.x", "b": "module.module.module.y"}) == {
        "a": "x",
        "b": "module.y",
    }
    assert without_common_ddp_prefix({"a": "module.x", "b": "y"}) == {"a": "module.x", "b": "y"}
    assert without_common_ddp_prefix({}) == {}
