"""Parse the names of an adapter's tensors: the module, the role and the adapter's name.

In training a name holds that of the adapter (`q_proj.lora_A.default.weight`), and the model's own parameters lie in a
`base_layer`; PEFT saves the adapter without its name. Source: peft/tuners/lora/layer.py, and the table of what is saved
in peft/utils/save_and_load.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple

from ckptkit.layout.wrappers import PROMPT

WRAPPER = "base_model.model."  # before the model's own names, and after whatever a trainer puts before that
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
_SAVED = {
    "A": "lora_A.weight",
    "B": "lora_B.weight",
    "bias": "lora_B.bias",
    "embedding_A": "lora_embedding_A",
    "embedding_B": "lora_embedding_B",
    "magnitude": "lora_magnitude_vector",
    "tokens": "trainable_tokens_delta",
}
_KNOWN_PARTS = {part for saved in _SAVED.values() for part in saved.split(".")}
_WRAPPERS = frozenset({"base_layer", "original_module", "token_adapter"})  # what stands in names of the model's own
# of other libraries; PEFT's too with a point in the adapter's name
_STRANGER = re.compile(r"(.+\.lora_)(a|A|down)((?:\..+)?)")
_SECOND = {"a": "b", "A": "B", "down": "up"}
_UNUSED = re.compile(r".+\.trainable_tokens_original(?:\.[^.]+)?")
# what other methods call their tensors, and the methods
_OTHERS = {
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
    """A tensor of an adapter: what it is, of which module, and what it is called in the adapter's own file.

    `module` is as the base model calls it; of the kind `module`, a parameter that is trained whole, it is the
    parameter. Where several parameters of one module have an adapter, these nest: `depth` counts from outside.
    """

    kind: Kind
    adapter: str | None
    module: str
    depth: int
    saved: str


class ExpertPlace(NamedTuple):
    """Where the matrices of experts lie: the module of all experts, the parameter, and the number of one expert."""

    module: str
    leaf: str
    expert: int | None


def expert_place(module: str) -> ExpertPlace | None:
    """Return which matrices of experts a module of an adapter has; None for any other module."""
    above, found, below = f".{module}.".rpartition(".experts.")
    if not found:
        return None
    number, _, leaf = below.rstrip(".").rpartition(".")
    if number and not number.isdecimal():
        return None
    return ExpertPlace(f"{above}.experts".lstrip("."), leaf, int(number) if number else None)


def read_entry(name: str) -> Entry | None:
    """Return what a tensor of an adapter is, by its name; None for any other."""
    own = own_name(name)
    for kind, pattern in _KINDS.items():
        match = pattern.fullmatch(own)
        if match is None:
            continue
        module = match["module"]
        if kind == "module":
            return Entry(kind, match["adapter"], f"{base_name(module)}.{match['leaf']}", 0, f"{module}.{match['leaf']}")
        depth = module.count(".base_layer") if kind in ("A", "B") else 0
        return Entry(kind, match["adapter"], base_name(module), depth, f"{module}.{_SAVED[kind]}")
    return None


def own_name(name: str) -> str:
    """Return a name without what wraps the model."""
    return name.rpartition(WRAPPER)[2]


def base_name(name: str) -> str:
    """Return what the base model calls a parameter, or a module, that is in a wrapper of an adapter."""
    return ".".join(part for part in own_name(name).split(".") if part not in _WRAPPERS)


def is_unused(name: str) -> bool:
    """Return whether a tensor is a copy that a wrapper keeps for itself."""
    return _UNUSED.fullmatch(name) is not None


def is_copy(name: str) -> bool:
    """Return whether a tensor is the untrained one of a module that is trained whole."""
    return ".original_module." in name


def trained_name(name: str) -> str:
    """Return the name that PEFT saves a parameter by that is trained whole, without its wrapper's part."""
    return name.replace(".modules_to_save.", ".")


def other_method(names: Collection[str]) -> str | None:
    """Return the method that tensors of these names are of, if it is none whose tensors are known here."""
    if not any("base_model." in name or ".base_layer." in name for name in names) and PROMPT not in names:
        return None
    for name in names:
        parts = name.split(".")
        found = next((method for part, method in _OTHERS.items() if part in parts), None)
        unknown = next((part for part in parts if part.startswith("lora_") and part not in _KNOWN_PARTS), None)
        if found or (unknown and read_entry(name) is None):
            return found or unknown
    return None


def find_unknown_name(names: Collection[str]) -> str | None:
    """Return the first of two matrices that are an adapter's as another library than PEFT calls them; None without."""
    for name in names:
        match = _STRANGER.fullmatch(name)
        if match and read_entry(name) is None and f"{match[1]}{_SECOND[match[2]]}{match[3]}" in names:
            return name
    return None


def is_wrapped(name: str) -> bool:
    """Return whether a name is that of a parameter in PEFT's wrapper of a model, or of an adapter that it saved."""
    return name.startswith(WRAPPER) or f".{WRAPPER}" in name
