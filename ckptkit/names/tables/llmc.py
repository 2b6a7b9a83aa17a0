"""The names of llm.c, which has all layers in one tensor, and GPT-2's names on the Hub.

Source: karpathy/llm.c, train_gpt2.py, `write_tensors`. The head is the embedding. Its vocabulary is padded.
"""

from __future__ import annotations

from ckptkit.names.family import Family
from ckptkit.names.rule import Rule
from ckptkit.names.sizes import Sizes
from ckptkit.names.steps import SwappedAxes

_TYPES = ("gpt2",)
_MATRICES = {"qkv": "attn.c_attn", "attproj": "attn.c_proj", "fc": "mlp.c_fc", "fcproj": "mlp.c_proj"}
_NORMS = {"ln1": "h.{layer}.ln_1", "ln2": "h.{layer}.ln_2", "lnf": "ln_f"}


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    """Return the table. Raises `Unsupported` for any other type of model than GPT-2."""
    sizes.require_type(LLMC.name, _TYPES)
    return (
        *(Rule.of(name, f"transformer.{name}.weight") for name in ("wte", "wpe")),
        *(Rule.of(f"{own}w", f"transformer.{hub}.weight") for own, hub in _NORMS.items()),
        *(Rule.of(f"{own}b", f"transformer.{hub}.bias") for own, hub in _NORMS.items()),
        *(Rule.of(f"{own}w", f"transformer.h.{{layer}}.{hub}.weight", SwappedAxes()) for own, hub in _MATRICES.items()),
        *(Rule.of(f"{own}b", f"transformer.h.{{layer}}.{hub}.bias") for own, hub in _MATRICES.items()),
    )


LLMC = Family(name="llmc", types=_TYPES, rules=rules)
