"""Adapters that a trainer saved under names of its own: a line in `TRAINER_NAMES`, and a module that knows them."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from ckptkit.adapters.config import AdapterConfig
from ckptkit.entry_points import PluginTable
from ckptkit.layout import Layout
from ckptkit.models.names.weights import Weights


class TrainerNames(Protocol):
    """What the module of a line does."""

    def has_matrix(self, names: Collection[str], /) -> bool:
        """Return whether one of these is what the trainer calls a matrix."""

    def with_hub_names(self, weights: Weights, path: Path, base: str | None, /) -> Weights:
        """Return the matrices under PEFT's names for the Hub's modules, as the config.json of the base describes it."""

    def hub_config(
        self, config: AdapterConfig | None, saved: Layout, modules: Collection[str], replaced: Collection[str], /
    ) -> AdapterConfig:
        """Return a config with the Hub's modules as targets. Raises `NotACheckpoint` if nothing gives alpha."""

    def trainer_values(self, saved: Layout, /) -> tuple[Path, dict[str, Any]]:
        """Return what PEFT's config would say, by what the trainer saved, and where that lies."""


class KnownNames(NamedTuple):
    """A line: the module, which is imported when a name has the form `tells`."""

    where: str
    tells: str


TRAINER_NAMES = PluginTable(
    "ckptkit.adapter_names",
    KnownNames,
    {"megatron": KnownNames("ckptkit.plugins.megatron.adapters", r"(.*\.)?decoder\..*")},
)


def trainer_names_in(names: Collection[str]) -> TrainerNames | None:
    """Return the module for a trainer's names of matrices if some of these are such names, else None."""
    for known in TRAINER_NAMES.values():
        if any(map(re.compile(known.tells, re.DOTALL).fullmatch, names)):
            found = cast(TrainerNames, import_module(known.where))
            if found.has_matrix(names):
                return found
    return None
