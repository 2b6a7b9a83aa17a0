"""Find modules of the base that an adapter skips although it changes the same modules of other layers."""

from __future__ import annotations

from collections.abc import Collection

from ckptkit.adapters.config import AdapterConfig
from ckptkit.adapters.find import Adapter
from ckptkit.errors import Caution, and_more
from ckptkit.layout.renames import fold
from ckptkit.words import count, natural

_SHOWN = 2  # modules in a message


def find_gaps(adapter: Adapter, config: AdapterConfig, base: Collection[str]) -> list[Caution]:
    """Return a warning if modules are missing in an adapter; [] if it has every module that PEFT would adapt.

    `base` are the base's tensors under the adapter's names. A module is missing if the base has it, the adapter has the
    module of this name in another layer, and the adapter's config does not exclude it.
    """
    adapted = set(adapter.modules)
    folded = {fold(module) for module in adapted}
    inside = {fold(entry.module) for entry in adapter.entries.values() if entry.attention is not None}

    def target_of(module: str) -> str:
        """Return the module that has to be a target: the `nn.MultiheadAttention` of an `out_proj`, else the module."""
        above = module.rpartition(".")[0]
        return above if fold(module) in inside and f"{above}.in_proj_weight" in base else module

    in_base = {name.rpartition(".")[0] for name in base}
    missing = sorted(
        (own for own in in_base - adapted if fold(own) in folded and config.is_target(target_of(own))), key=natural
    )
    if not missing:
        return []
    names = f"{', '.join(f'`{candidate}`' for candidate in missing[:_SHOWN])}{and_more(len(missing) - _SHOWN)}"
    what = f"the adapter has no matrices for {count(len(missing), 'module')} that it changes in other layers"
    return [Caution(f"{config.path.parent}: {what}: {names}; these modules keep the weights of the base")]
