"""Translate the names of the example trainer, whose `example.0.w` is a norm's weight on the Hub."""

from __future__ import annotations

from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule
from ckptkit.models.names.sizes import Sizes


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    return (Rule.of("example.{layer}.w", "model.layers.{layer}.input_layernorm.weight"),)


EXAMPLE = Family(name="example", rules=rules)
