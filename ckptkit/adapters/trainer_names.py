"""Adapters that a trainer saves under its own names: a row in `TRAINER_NAMES`, and a module that translates them."""

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
    """The interface of a module that translates a trainer's names."""

    def has_adapter_matrix(self, names: Collection[str], /) -> bool:
        """Return whether one of these names is the trainer's name of an adapter matrix."""

    def with_hub_names(self, weights: Weights, path: Path, base: str | None, /) -> Weights:
        """Return the matrices under PEFT's names for the Hub's modules, by the base's config.json."""

    def config_for_hub_modules(
        self, config: AdapterConfig | None, saved: Layout, modules: Collection[str], replaced: Collection[str], /
    ) -> AdapterConfig:
        """Return a config with the Hub's modules as targets. Raises `NotACheckpoint` if no file has alpha."""

    def read_trainer_settings(self, saved: Layout, /) -> tuple[Path, dict[str, Any]]:
        """Return the path of the trainer's own settings, and the values that PEFT's config would have."""


class KnownNames(NamedTuple):
    """A row of the table: `where` is the path of the module, imported if the regex `tells` matches a tensor name."""

    where: str
    tells: str


TRAINER_NAMES = PluginTable(
    "ckptkit.adapter_names",
    KnownNames,
    {"megatron": KnownNames("ckptkit.plugins.megatron.adapters", r"(.*\.)?decoder\..*")},
)


def find_trainer_names(names: Collection[str]) -> TrainerNames | None:
    """Return the module that translates these names; None if they are not a trainer's."""
    for known in TRAINER_NAMES.values():
        if any(map(re.compile(known.tells, re.DOTALL).fullmatch, names)):
            module = cast(TrainerNames, import_module(known.where))
            if module.has_adapter_matrix(names):
                return module
    return None
