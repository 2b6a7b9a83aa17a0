"""Choose the weights to quantize: linear layers, except where loaders expect plain weights.

Transformers leaves the head, and what its classes keep in fp32 (transformers/quantizers/base.py). vLLM computes
routers, encoders of images and sounds, and the projection of a model's own drafts without scales, and joins some
projections in one matrix, whose parts have to be alike (`packed_modules_mapping` of its classes).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from ckptkit.errors import Unsupported
from ckptkit.layout import Spec
from ckptkit.plugins.quantize.schemes import Scheme

_ROUTERS = ("gate", "router", "shared_expert_gate", "eh_proj")
_TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder", "multi_modal_projector", "audio_tower")
_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_EXPERTS = "experts"
HEADS, ASKED, RAGGED, ALONE = (
    "loaders expect plain weights there",
    "--exclude-quantize matches",
    "rows or columns are not multiples of 128",
    "loaders use them together with plain weights",
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The matrices of linear layers that are quantized, and why others are `left` as they are, by name."""

    names: tuple[str, ...]
    left: Mapping[str, str]

    @property
    def reasons(self) -> Mapping[str, Sequence[str]]:
        ordered = sorted(self.left, key=lambda name: (self.left[name], name))
        return {reason: list(names) for reason, names in groupby(ordered, self.left.__getitem__)}


def choose(
    specs: Mapping[str, Spec], linear: Iterable[str], kept: Iterable[str], scheme: Scheme, globs: Sequence[str]
) -> Chosen:
    """Choose among the tensors of `linear` layers, of which loaders want the `kept` ones as they are.

    What matches one of the `globs`, by its own name or its module's, is left, and so is what has to be like it.
    """
    names = [name for name in linear if name in specs]
    kept = set(kept)
    left = {name: reason for name in names if (reason := reason_to_leave(name, specs[name], kept, scheme, globs))}
    together: dict[str, list[str]] = defaultdict(list)
    for name in names:
        together[group_of(name)].append(name)
    for group in together.values():
        if any(name in left for name in group):
            left |= {name: ALONE for name in group if name not in left}
    return Chosen(tuple(name for name in names if name not in left), left)


def reason_to_leave(name: str, spec: Spec, kept: set[str], scheme: Scheme, globs: Sequence[str]) -> str | None:
    """Return why a tensor stays what it is, None if nothing keeps it. Raises `Unsupported` if it is no float."""
    parts = name.split(".")
    if spec.dtype.kind != "float":
        raise Unsupported(f"it is {spec}, and the weights of linear layers are floats", tensor=name)
    if name in kept or len(spec.shape) != 2 or 0 in spec.shape or not name.endswith(".weight"):
        return HEADS
    if parts[-2] in _ROUTERS or not set(parts).isdisjoint(_TOWERS):
        return HEADS
    if any(matches(name, glob) for glob in globs):
        return ASKED
    return None if scheme.scales(spec.shape) else RAGGED


def matches(name: str, glob: str) -> bool:
    """Return whether a tensor, or its module, is called as a glob says."""
    return fnmatchcase(name, glob) or fnmatchcase(name.removesuffix(".weight"), glob)


def group_of(name: str) -> str:
    """Return what a weight has in common with those that are quantized only if it is: a name of the group."""
    parts = name.split(".")
    if _EXPERTS in parts:
        return ".".join(parts[: parts.index(_EXPERTS) + 1])
    joined = next((group for group in _JOINED if parts[-2:-1] and parts[-2] in group), None)
    return name if joined is None else ".".join([*parts[:-2], "+".join(joined)])


def modules_of(names: Iterable[str]) -> list[str]:
    """Return the modules that loaders look for in a list of those that are left; all experts of a layer are one."""
    parts = (name.split(".") for name in names)
    return sorted({".".join(one[: one.index(_EXPERTS) + 1] if _EXPERTS in one else one[:-1]) for one in parts})
