"""Parse the names of an adapter's tensors: the module, the role and the adapter's name.

In training, a tensor name contains the adapter's name (`q_proj.lora_A.default.weight`), and the model's own parameters
are inside a `base_layer`. PEFT saves the adapter without its name. Source: peft/tuners/lora/layer.py, and the table of
saved names in peft/utils/save_and_load.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple

from ckptkit.layout.wrappers import PROMPT

WRAPPER = "base_model.model."  # prefix of the model's own names, after any prefix of the trainer
DEFAULT = "default"

Kind = Literal["A", "B", "bias", "embedding_A", "embedding_B", "magnitude", "tokens", "module"]

_NAME = r"(?:\.(?P<adapter>[^.]+))?"
_KINDS: dict[Kind, re.Pattern[str]] = {
    "A": re.compile(rf"(?P<module>.+)\.lora_A{_NAME}\.weight"),
    "B": re.compile(rf"(?P<module>.+)\.lora_B{_NAME}\.weight"),
    "bias": re.compile(rf"(?P<module>.+)\.lora_B{_NAME}\.bias"),
    "embedding_A": re.compile(rf"(?P<module>.+)\.lora_embedding_A{_NAME}"),
    "embedding_B": re.compile(rf"(?P<module>.+)\.lora_embedding_B{_NAME}"),
    "magnitude": re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.(?!weight$)(?P<adapter>[^.]+))?(?:\.weight)?"),
    "tokens": re.compile(rf"(?P<module>.+)\.trainable_tokens_delta{_NAME}"),
    "module": re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<leaf>.+)"),
}
_SAVED_NAMES = {
    "A": "lora_A.weight",
    "B": "lora_B.weight",
    "bias": "lora_B.bias",
    "embedding_A": "lora_embedding_A",
    "embedding_B": "lora_embedding_B",
    "magnitude": "lora_magnitude_vector",
    "tokens": "trainable_tokens_delta",
}
_KNOWN_PARTS = {part for saved in _SAVED_NAMES.values() for part in saved.split(".")}
# name components of PEFT's wrappers around the model's own modules
_WRAPPERS = frozenset({"base_layer", "original_module", "token_adapter"})
_INSIDE_ATTENTION = re.compile(r"(?P<attention>.+)\.base_layer\.out_proj\.lora_[AB]\..+")
# matrices of other libraries, or of PEFT with a dot in the adapter's name
_OTHER_LIBRARY = re.compile(r"(.+\.lora_)(a|A|down)((?:\..+)?)")
_PARTNER = {"a": "b", "A": "B", "down": "up"}
UNUSED = re.compile(r".+\.trainable_tokens_original(?:\.[^.]+)?")  # a copy inside of the wrapper, never loaded
# tensor names of other methods -> method
_OTHER_METHODS = {
    "lora_E": "AdaLoRA",
    "ranknum": "AdaLoRA",
    "ia3_l": "IA3",
    "hada_w1_a": "LoHa",
    "lokr_w1": "LoKr",
    "lokr_w1_a": "LoKr",
    "vera_lambda_b": "VeRA",
    "boft_R": "BOFT",
    "oft_R": "OFT",
    "hra_u": "HRA",
    "fourierft_spectrum": "FourierFT",
    "vblora_logits_A": "VB-LoRA",
    "randlora_lambda": "RandLoRA",
    "shira_weight": "SHiRA",
    "prompt_embeddings": "prompt learning",
    "prompt_encoder": "prompt learning",
    "adaption_prompt": "Adaption Prompt",
    "ln_tuning_layers": "LN tuning",
    "lora_arrow": "Arrow",
    "lora_diag": "KaSA",
    "internal_xlora_classifier": "X-LoRA",
}


class Entry(NamedTuple):
    """A tensor of an adapter: its role, its module, and its name in the adapter's own file.

    `module` is the name in the base model; for the kind `module` (a parameter that is trained in full) it is the name
    of the parameter. If several parameters of one module have an adapter, their wrappers nest: `depth` counts from
    outside.
    """

    kind: Kind
    adapter: str | None
    module: str
    depth: int
    saved: str

    @property
    def of_experts(self) -> ExpertPlace | None:
        return find_expert_place(self.module) if self.kind in ("A", "B") else None

    @property
    def multihead_attention_module(self) -> str | None:
        """Return the `nn.MultiheadAttention` of an `out_proj` that PEFT adapted with it; None for any other module.

        The name may also mean an `out_proj` that PEFT adapted alone, in a module with a target parameter: an attention
        has an `in_proj_weight` in the base. Source: `MultiheadAttention` in peft/tuners/lora/layer.py.
        """
        match = _INSIDE_ATTENTION.fullmatch(self.saved)
        return name_in_base_model(match["attention"]) if match else None


class ExpertPlace(NamedTuple):
    """The location of expert matrices: the module of all experts, the parameter, and the index of a single expert."""

    module: str
    leaf: str
    expert: int | None


def find_expert_place(module: str) -> ExpertPlace | None:
    """Return the location of the expert matrices that a module name means; None for any other module."""
    above, separator, below = f".{module}.".rpartition(".experts.")
    if not separator:
        return None
    number, _, leaf = below.rstrip(".").rpartition(".")
    if number and not number.isdecimal():
        return None
    return ExpertPlace(f"{above}.experts".lstrip("."), leaf, int(number) if number else None)


def parse_tensor_name(name: str) -> Entry | None:
    """Return the role of an adapter's tensor, parsed from its name; None if the tensor is not an adapter's."""
    own = name_inside_wrapper(name)
    for kind, pattern in _KINDS.items():
        match = pattern.fullmatch(own)
        if match is None:
            continue
        module = match["module"]
        if kind == "module":
            return Entry(
                kind, match["adapter"], f"{name_in_base_model(module)}.{match['leaf']}", 0, f"{module}.{match['leaf']}"
            )
        depth = module.count(".base_layer") if kind in ("A", "B") else 0
        return Entry(kind, match["adapter"], name_in_base_model(module), depth, f"{module}.{_SAVED_NAMES[kind]}")
    return None


def name_inside_wrapper(name: str) -> str:
    return name.rpartition(WRAPPER)[2]


def name_in_base_model(name: str) -> str:
    """Return the base model's name of a parameter or module inside PEFT's wrappers."""
    return ".".join(part for part in name_inside_wrapper(name).split(".") if part not in _WRAPPERS)


def find_unsupported_method(names: Collection[str]) -> str | None:
    """Return the adapter method that these tensor names belong to, if ckptkit does not know it; else None."""
    if not any("base_model." in name or ".base_layer." in name for name in names) and PROMPT not in names:
        return None
    for name in names:
        parts = name.split(".")
        known_method = next((method for part, method in _OTHER_METHODS.items() if part in parts), None)
        unknown = next((part for part in parts if part.startswith("lora_") and part not in _KNOWN_PARTS), None)
        if known_method or (unknown and parse_tensor_name(name) is None):
            return known_method or unknown
    return None


def find_foreign_matrix_name(names: Collection[str]) -> str | None:
    """Return a matrix that has a partner and a name of another library's adapters; None without any."""
    for name in names:
        match = _OTHER_LIBRARY.fullmatch(name)
        if match and parse_tensor_name(name) is None and f"{match[1]}{_PARTNER[match[2]]}{match[3]}" in names:
            return name
    return None
