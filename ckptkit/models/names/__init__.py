"""The known families of names, one module for each, and how to recognize them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

from ckptkit.entry_points import PluginTable, import_object
from ckptkit.errors import Usage
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import mask_numbers

if TYPE_CHECKING:
    from ckptkit.models.names.family import Family

HUB, KEEP = "hub", "keep"


class KnownFamily(NamedTuple):
    """An entry of the table: the module of the family's rules, and a pattern of names that only this family uses.

    `#` replaces every number in a name. The module is imported only after the pattern has matched.
    """

    where: str
    tells: str


# by the name that users type; if several have the same tensor names, the first wins
FAMILIES = PluginTable(
    "ckptkit.families",
    KnownFamily,
    {
        "torchtitan": KnownFamily(
            "ckptkit.models.names.torchtitan:TORCHTITAN",
            r"layers\.#\.attention\.qkv_linear\..*|layers\.#\.moe\.(routed_experts|experts)\..*_E[A-Z]+",
        ),
        "torchtitan-0.2": KnownFamily(
            "ckptkit.models.names.torchtitan:BEFORE_0_3", r"layers\.#\.attention\.w([qkv]|kv_a)\.weight"
        ),
        "megatron": KnownFamily(
            "ckptkit.plugins.megatron.names:MEGATRON",
            r"(decoder|encoder)\.layers(\.#)?\..*\.?linear_(qkv|proj|fc1|fc2)\..*|decoder\.layers\.#\.mixer\.A_log",
        ),
        "meta": KnownFamily("ckptkit.plugins.meta:META", r"layers\.#\.attention\.w[qkvo]\.weight"),
        "torchtune": KnownFamily(
            "ckptkit.plugins.torchtune:TORCHTUNE", r"layers\.#\.(attn\.q_proj\.weight|sa_norm\.scale)"
        ),
        "litgpt": KnownFamily("ckptkit.plugins.litgpt:LITGPT", r"transformer\.h\.#\.attn\.(qkv|attn)\.weight"),
        "olmo": KnownFamily("ckptkit.plugins.olmo:OLMO", r"blocks\.#\.attention\.w_[qkv]\.weight"),
        "maxtext": KnownFamily(
            "ckptkit.plugins.orbax.maxtext:MAXTEXT",
            r"decoder\.(layers|layers_remainder)([._](#|[0-9]+))?(\.layers_[0-9]+)?"
            r"\.self_attention(_local|_global)?\.query\.kernel(\.value)?",
        ),
        "nanogpt": KnownFamily("ckptkit.plugins.nanogpt:NANOGPT", r"transformer\.h\.#\.attn\.c_attn\.weight"),
        "transformers": KnownFamily(
            "ckptkit.models.names.transformers:TRANSFORMERS",
            r"(.*\.)?experts\.(gate_up_proj|down_proj)|"
            r"model\.(language_model|visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\..*",
        ),
    },
)


def find_family_of(
    shapes: Mapping[str, Shape],
    trainer: str | None = None,
    model_type: str = "",
    has_file_beside: Callable[[str], bool] = lambda _: False,
) -> Family | None:
    """Return the family that tensor names belong to; None for the Hub's names and unknown names.

    If several families share names, the trainer that wrote them decides, then a file with sizes beside them, then the
    model type. The tables of these families agree on the types that they share.
    """
    matching = families_with(shapes)
    fitting = (
        *(family for family in matching if trainer and family.trainer == trainer),
        *(family for family in matching if family.sizes_file and has_file_beside(family.sizes_file)),
        *(family for family in matching if model_type in family.types),
        *matching,
    )
    return next(iter(fitting), None)


def families_with(shapes: Mapping[str, Shape]) -> list[Family]:
    """Return every family that has distinctive names, with matching shapes, among these tensors."""
    outlines = {mask_numbers(name): shape for name, shape in shapes.items()}
    matching = []
    for name, known in FAMILIES.items():
        own = [shape for outline, shape in outlines.items() if re.fullmatch(known.tells, outline)]
        if own and any(map((family := load_family(name)).tells_shape, own)):
            matching.append(family)
    return matching


def load_family(name: str) -> Family:
    return cast("Family", import_object(FAMILIES[name].where))


def get_family(name: str) -> Family | None:
    """Return a family by its name, None for the Hub. Raises `Usage` for an unknown name."""
    if name not in (HUB, *FAMILIES):
        raise Usage(f"unknown family of names `{name}`", hint=f"use one of {', '.join((HUB, KEEP, *FAMILIES))}")
    return None if name == HUB else load_family(name)


def require_known_family_name(name: str | None, table: Family | None = None) -> None:
    """Raise `Usage` for a name that is not a family, `HUB`, `KEEP`, or the name of the user's own table."""
    if table is not None and name == KEEP:
        hint = "drop --names keep, or drop --map"
        raise Usage("--map renames tensors, but --names keep keeps their names", hint=hint)
    if name not in (None, KEEP) and (table is None or name != table.name):
        get_family(str(name))
