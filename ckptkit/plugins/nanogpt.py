"""Translate the names of nanoGPT to the Hub's names of GPT-2, where four matrices are transposed.

Source: karpathy/nanoGPT, model.py, `GPT.from_pretrained`; transformers/pytorch_utils.py, `Conv1D`. Without `bias=True`
the model has no biases, but a GPT-2 needs them: such a model cannot be represented on the Hub.
"""

from __future__ import annotations

from typing import Any

from ckptkit.formats.archives.flatten import find_dict_items
from ckptkit.formats.archives.non_tensor_entries import load_value
from ckptkit.layout import Layout
from ckptkit.layout.box import Shape
from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.steps import SwappedAxes, TensorStep

_TYPES = ("gpt2",)
_MATRICES = tuple(f"h.{{layer}}.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
_OTHERS = ("h.{layer}.ln_1", "h.{layer}.ln_2", "ln_f")
_ARGS = "model_args"


def rules(sizes: Sizes) -> tuple[Rule, ...]:
    sizes.require_type(NANOGPT.name, _TYPES)
    return (
        *(rule_for_tensor(f"{name}.weight", SwappedAxes()) for name in _MATRICES),
        *(rule_for_tensor(f"{name}.weight") for name in ("wte", "wpe", *_OTHERS)),
        *(rule_for_tensor(f"{name}.bias") for name in (*_MATRICES, *_OTHERS)),
        Rule.of("lm_head.weight", "lm_head.weight"),
    )


def rule_for_tensor(name: str, step: TensorStep | None = None) -> Rule:
    """Return the rule for a tensor. On the Hub its name has the prefix `transformer.`, or none in the first files."""
    return Rule.of(f"transformer.{name}", f"transformer.{name} | {name}", step)


def is_linear_qkv(shape: Shape) -> bool:
    """Return whether a fused query, key and value matrix has its outputs as rows, as in nn.Linear."""
    return len(shape) == 2 and shape[0] == 3 * shape[1]


def model_arguments_of(checkpoint: Layout) -> dict[str, Any]:
    """Return the arguments of the model, whose keys are those of GPT-2's config.json; {} without saved arguments."""
    entries = {checkpoint.key(name): blob for name, blob in checkpoint.blobs.items()}
    if (_ARGS,) in entries:
        return {str(key): value for key, value in find_dict_items(load_value(checkpoint.root, entries[_ARGS,])) or ()}
    inside = {key: blob for key, blob in entries.items() if len(key) == 2 and key[0] == _ARGS}
    return {str(key[1]): load_value(checkpoint.root, blob) for key, blob in inside.items()}


NANOGPT = Family(
    name="nanogpt",
    tells_shape=is_linear_qkv,
    types=_TYPES,
    drops=(r"(transformer\.)?h\.#\.attn\.(masked_)?bias",),  # the mask of attention
    biased=r"transformer\.(h\.#\.)?(attn\.c_attn|(attn|mlp)\.c_proj|mlp\.c_fc|ln_[12f])",
    rules=rules,
    describe=model_arguments_of,
    trainer="nanoGPT",
    has_tied_head=True,
)
