"""Find the adapters in a checkpoint by the names and shapes of its tensors, and summarize them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from ckptkit.adapters.config import AdapterConfig, find_adapter_config, is_usable_alpha
from ckptkit.adapters.names import (
    DEFAULT,
    UNUSED,
    WRAPPER,
    Entry,
    find_expert_place,
    find_foreign_matrix_name,
    find_unsupported_method,
    name_in_base_model,
    name_inside_wrapper,
    parse_tensor_name,
)
from ckptkit.checkpoints.component import Component
from ckptkit.entry_points import PluginTable
from ckptkit.errors import Corrupt, Mismatch, NotACheckpoint, Unsupported
from ckptkit.layout import Layout, Spec
from ckptkit.models.names.weights import Weights, find_weights

EMPTY = "empty_adapter"  # the code of the error


@dataclass(frozen=True, slots=True)
class InspectedAdapter:
    """The summary of an adapter.

    `rows` are the distinct row counts of its A matrices: the ranks, or rank times experts for fused experts. `alpha`
    and `base` come from its config file `config`. Without a config they are None, except `alpha` if the trainer's own
    files record it. `has_base` says whether the checkpoint also contains the base.
    """

    name: str
    method: str
    rows: tuple[int, ...]
    alpha: float | None
    targets: tuple[str, ...]
    modules: int
    replaced: tuple[str, ...]
    parameters: int
    nbytes: int
    base: str | None
    has_base: bool
    config: Path | None


def inspect_adapters(component: Component) -> tuple[InspectedAdapter, ...]:
    """Return the adapters in the model component; () if it has none that ckptkit knows."""
    try:
        adapted = find_adapters(find_weights(component.layout).layout)
    except (Corrupt, Mismatch, Unsupported):
        return ()
    inspected: list[InspectedAdapter] = []
    for adapter in adapted.adapters if adapted else ():
        config, values = None, dict[str, Any]()
        with suppress(Corrupt):
            config = find_adapter_config(component.path, adapter.name)
        with suppress(Corrupt, NotACheckpoint, Unsupported):
            if config is None and (names := find_trainer_names(component.layout.tensors)):
                _, values = names.read_trainer_settings(component.layout)
        alpha = (config.values if config else values).get("lora_alpha")
        is_number = isinstance(alpha, int | float) and is_usable_alpha(alpha)
        summary = InspectedAdapter(
            adapter.name,
            adapter.method,
            tuple(sorted(adapter.matrix_count_by_rank)),
            alpha if is_number else None,
            adapter.target_suffixes,
            len(adapter.modules),
            adapter.replaced_parameters,
            sum(spec.numel for spec in adapter.specs.values()),
            sum(spec.nbytes for spec in adapter.specs.values()),
            config.base if config else None,
            bool(adapted and adapted.base),
            config.path if config else None,
        )
        inspected.append(summary)
    return tuple(inspected)


HINT_KEEP_TENSORS = "run `ckptkit convert --to pt` to keep all tensors and their names"
_RANKED = ("A", "embedding_A")
_STACKED = re.compile(r"(?:.*\.)?layers\.[^0-9].*")  # all layers stacked in one tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: its `entries`, by tensor name in `layout`."""

    name: str
    layout: Layout
    entries: Mapping[str, Entry]

    @property
    def method(self) -> str:
        """Return the method as far as tensor names show it: `LoRA`, `DoRA` or `trained tokens`."""
        kinds = {entry.kind for entry in self.entries.values()}
        return "trained tokens" if kinds == {"tokens"} else "DoRA" if "magnitude" in kinds else "LoRA"

    @property
    def matrix_count_by_rank(self) -> Counter[int]:
        """Return how many A matrices have each number of rows: of all experts if they share one matrix."""
        ranked = {name: entry.module for name, entry in self.entries.items() if entry.kind in _RANKED}
        shapes = [(module, self.layout.tensors[name].spec.shape) for name, module in ranked.items()]
        return Counter(
            shape[-2] if len(shape) == 3 and (find_expert_place(module) or _STACKED.fullmatch(module)) else shape[0]
            for module, shape in shapes
            if shape
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the modules that the adapter changes, by their names in the base model."""
        return tuple(dict.fromkeys(entry.module for entry in self.entries.values() if entry.kind != "module"))

    @property
    def target_suffixes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(module.rpartition(".")[2] for module in self.modules))

    @property
    def replaced_parameters(self) -> tuple[str, ...]:
        """Return the base model's parameters that the adapter replaces with a full trained copy."""
        return tuple(entry.module for entry in self.entries.values() if entry.kind == "module")

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: self.layout.tensors[name].spec for name in self.entries}


@dataclass(frozen=True, slots=True)
class Adapted:
    """The adapters of a checkpoint, and `base`: its other tensors, as base model name -> name in the checkpoint.

    `is_saved` means that the names have PEFT's saved form, without the adapter's name. `copies` are tensors that PEFT
    saves beside parameters that were trained in full: duplicates, and the untrained originals.
    """

    adapters: tuple[Adapter, ...]
    base: Mapping[str, str]
    is_saved: bool
    copies: tuple[str, ...] = ()


def find_adapters(layout: Layout) -> Adapted | None:
    """Return the adapters among the tensors of a model, and the base model's other tensors; None without adapters.

    Raises `Unsupported` for tensors of methods that ckptkit does not know, `Corrupt` for contradictory names.
    """
    method = find_unsupported_method(layout.tensors)
    if method is not None:
        message = f"expected LoRA or DoRA, found an adapter of {method}"
        raise Unsupported(message, path=layout.path, hint=HINT_KEEP_TENSORS)
    unknown_name = find_foreign_matrix_name(layout.tensors)
    if unknown_name is not None:
        message = "PEFT does not give this name to an adapter's matrix"
        raise Unsupported(message, path=layout.path, tensor=unknown_name, hint=HINT_KEEP_TENSORS)
    parsed = {name: entry for name in layout.tensors if (entry := parse_tensor_name(name)) is not None}
    # with the names that PEFT gives them in a file, without any prefix of the trainer
    entries = {name: entry._replace(saved=WRAPPER + entry.saved) for name, entry in parsed.items()}
    if not any(entry.kind != "module" for entry in entries.values()):
        return None
    rest = [name for name in layout.tensors if name not in entries and not UNUSED.fullmatch(name)]
    nameless = {entry.adapter is None for entry in entries.values()}
    if len(nameless) > 1:
        first = next(name for name, entry in entries.items() if entry.adapter is None)
        message = "expected the name of an adapter in this tensor name, as in the others, found none"
        raise Corrupt(message, path=layout.path, tensor=first)
    if nameless == {True}:
        whole, copies = find_full_parameters(rest)
        return Adapted((Adapter(DEFAULT, layout, entries | whole),), {}, is_saved=True, copies=copies)
    by_name: dict[str, dict[str, Entry]] = defaultdict(dict)
    for name, entry in entries.items():
        by_name[entry.adapter or DEFAULT][name] = entry
    in_order = sorted(by_name.items(), key=lambda item: (item[0] != DEFAULT, item[0]))
    adapters = tuple(Adapter(name, layout, own_entries) for name, own_entries in in_order)
    base: dict[str, str] = {}
    for name in rest:
        own = name_in_base_model(name)
        if own in base:
            message = f"this tensor and `{base[own]}` are both `{own}` of the base model"
            raise Corrupt(message, path=layout.path, tensor=name)
        base[own] = name
    return Adapted(adapters, base, is_saved=False)


def find_full_parameters(names: list[str]) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return the full parameters in an adapter's own file, and the names of copies that PEFT does not load.

    PEFT saves a resized embedding that was trained in full three times: under its own name, which it loads, in
    `modules_to_save`, and untrained in `original_module`. Source: `get_peft_model_state_dict`.
    """
    own = {name: name.replace(".modules_to_save.", ".") for name in names if ".original_module." not in name}
    saved_names = {name for name, new in own.items() if name == new}
    loaded = {name: new for name, new in own.items() if name == new or new not in saved_names}
    whole = {
        name: Entry("module", None, name_in_base_model(new), 0, WRAPPER + name_inside_wrapper(new))
        for name, new in loaded.items()
    }
    return whole, tuple(name for name in names if name not in loaded)


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


def find_empty_adapter_error(layout: Layout) -> Corrupt | None:
    """Return the error for an adapter file without tensors, or with tensors of size 0; None for any other.

    `Trainer.save_model` of transformers saved such adapters under ZeRO 3, before transformers' pull request 41416.
    """
    empty = sorted(name for name, tensor in layout.tensors.items() if not tensor.spec.numel)
    if layout.tensors and not empty:
        return None
    what = f"{len(empty)} of {len(layout.tensors)} tensors have size 0" if empty else "the file contains no tensors"
    hint = "pass the training's checkpoint, whose `global_step` directory has the weights"
    error = Corrupt(
        f"the adapter is empty, {what}: ZeRO 3 saved it without gathering the parameters",
        path=layout.path,
        tensor=next(iter(empty), None),
        hint=hint,
    )
    error.code = EMPTY
    return error
