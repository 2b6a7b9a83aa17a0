"""The facts about a model's computation that are not in its tensors. Every command compares two models here.

They are in config.json or in a trainer's own files (such as Meta's params.json), in an adapter's config, in the modules
after a transformer (sentence-transformers), and in Python files with the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats.json_text import parse_json
from ckptkit.io.crc32 import crc32
from ckptkit.io.file import is_existing_path
from ckptkit.models.adapter_config_differences import (
    ADAPTER_CONFIG,
    BASE,
    find_adapter_config_values,
    find_adapter_differences,
)
from ckptkit.models.companions import CONFIG, MODULES, Companions, different_preprocessing_files, find_companions
from ckptkit.models.config_differences import (
    ConfigDifference,
    compare_flattened_configs,
    find_config_differences,
    find_contradictions,
    flatten_both_configs,
)
from ckptkit.models.names import find_family_of
from ckptkit.models.names.naming import reported_facts
from ckptkit.models.names.weights import find_weights


class ComparedFacts(NamedTuple):
    """The differences between the facts of two models, certain ones first, and notes on facts that were not compared.

    `described_in` names the files that were compared, such as config.json.
    """

    differences: tuple[ConfigDifference, ...]
    notes: tuple[str, ...] = ()
    described_in: str = CONFIG

    @property
    def certain_differences(self) -> tuple[ConfigDifference, ...]:
        return tuple(one for one in self.differences if one.is_certain)


@dataclass(frozen=True)
class ModelFacts:
    """The facts about the model at `path`: its model files, and what the trainer's own files report.

    `reported` uses the keys of config.json where they exist; `reported_in` names the trainer's files. `adapter` is the
    config of an adapter.
    """

    path: Path
    companions: Companions = field(default_factory=Companions)
    reported: Mapping[str, Any] = field(default_factory=dict)
    reported_in: str = ""
    adapter: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, source: Checkpoint | Component, base: str | None = None) -> ModelFacts:
        """Return the facts of the model in a checkpoint; its model files are in `base` if given.

        Raises `Corrupt`, `IOFailure` or `Unsafe` for a file that cannot be read.
        """
        component = source.model_component if isinstance(source, Checkpoint) else source
        facts = cls(source.path, find_companions(component.path, base))
        if component.is_adapter:
            return replace(facts, adapter=find_adapter_config_values(component.path))
        try:
            weights = find_weights(component.layout)
        except (Mismatch, Unsupported):  # no model, or several
            return facts
        shapes, root = weights.layout.shapes, weights.layout.root
        family = find_family_of(shapes, component.trainer, "", lambda name: is_existing_path(root / name))
        if family is None:
            return facts
        reported = reported_facts(family, weights.whole)
        return replace(facts, reported=reported, reported_in=family.sizes_file or f"files of {family.name}")

    @property
    def config(self) -> Mapping[str, Any] | None:
        return self.companions.config

    @cached_property
    def non_transformers_config(self) -> Mapping[str, Any] | None:
        """Return the config.json of another library than transformers; None without one."""
        text = self.companions.files.get(CONFIG) if self.companions.library else None
        return None if text is None else dict(parse_json(text, self.config_directory / CONFIG))

    @property
    def library(self) -> str:
        """Return the name of the library whose config.json describes the model; "" without one."""
        known = self.companions.library
        return known.title if known else "" if self.config is None else "transformers"

    @property
    def config_directory(self) -> Path:
        """Return the directory of config.json, or else the checkpoint."""
        return self.companions.found_in or self.path

    @property
    def described_in(self) -> str:
        """Return the name of the files with the facts: config.json, or else the trainer's own files."""
        return CONFIG if self.library else self.reported_in if self.reported else ""

    @property
    def fact_file_names(self) -> frozenset[str]:
        if self.adapter is not None:
            return frozenset((ADAPTER_CONFIG,))
        more = (name for name in self.companions.files if is_module_config_file(name) or is_python_file(name))
        return frozenset((self.described_in, *more))

    @cached_property
    def modules_after_transformer(self) -> dict[str, Any]:
        """Return the classes of the modules after a transformer, and their settings; {} for other models."""
        files = {
            name: parse_json(data, Path(name))
            for name, data in self.companions.files.items()
            if is_module_config_file(name)
        }
        settings = {name.partition("/")[0]: one for name, one in files.items() if "/" in name}
        listed = files.get(MODULES)
        entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        types = [str(one.get("type")).rpartition(".")[2] for one in entries]
        return {MODULES: types, **settings} if types else {}

    def compare(self, other: ModelFacts) -> ComparedFacts:
        """Return the differences that let two models compute different results from equal tensors."""
        if self.adapter is not None and other.adapter is not None:
            different = tuple(find_adapter_differences(self.adapter, other.adapter))
            base, other_base = (str(adapter.get(BASE) or "") for adapter in (self.adapter, other.adapter))
            note = f"the adapters name different bases: `{base}`, in {other.path} `{other_base}`"
            return ComparedFacts(different, (note,) if base != other_base else (), ADAPTER_CONFIG)
        modules = compare_flattened_configs(
            *flatten_both_configs(self.modules_after_transformer, other.modules_after_transformer)
        )
        ours, theirs = (
            {name: f"CRC-32 {crc32(data):08x}" for name, data in facts.companions.files.items() if is_python_file(name)}
            for facts in (self, other)
        )
        differences = [*self.find_differences(other), *modules]
        if ours and theirs:
            differences.extend(
                ConfigDifference(name, ours.get(name), theirs.get(name), is_certain=False)
                for name in sorted({*ours, *theirs})
                if ours.get(name) != theirs.get(name)
            )
        differences.sort(key=lambda one: not one.is_certain)
        notes = (*self.notes_on_missing_configs(other), *self.notes_on_different_inputs(other))
        files = " and ".join(dict.fromkeys(filter(None, (self.described_in, other.described_in))))
        return ComparedFacts(tuple(differences), notes, files)

    def find_differences(self, other: ModelFacts) -> list[ConfigDifference]:
        """Return the differences of the configs, or else of the facts that the trainers' files report."""
        differences: list[ConfigDifference] = []
        if self.config is not None and other.config is not None:
            differences = find_config_differences(self.config, other.config)
        elif self.non_transformers_config is not None and other.non_transformers_config is not None:
            differences = find_config_differences(self.non_transformers_config, other.non_transformers_config)
        elif other.config is not None:
            differences = find_contradictions(self.reported, other.config)
        elif self.config is not None:
            found = find_contradictions(other.reported, self.config)
            differences = [ConfigDifference(key, there, here, certain) for key, here, there, certain in found]
        if differences or not (self.reported and other.reported):
            return differences
        return compare_flattened_configs(*flatten_both_configs(self.reported, other.reported))

    def notes_on_different_inputs(self, other: ModelFacts) -> Iterator[str]:
        """Yield a note if files that prepare the inputs differ, such as a tokenizer."""
        if different := different_preprocessing_files(self.companions, other.companions):
            yield f"{', '.join(different)}: differs from {other.config_directory}, so the models may get other inputs"

    def notes_on_missing_configs(self, other: ModelFacts) -> Iterator[str]:
        """Yield a note if only one of the two has a config.json, or if their libraries differ."""
        if self.library and other.library:
            if "transformers" in {self.library, other.library} and self.library != other.library:
                libraries = f"of {self.library} in {self.path} and of {other.library} in {other.path}"
                yield f"{CONFIG} is {libraries}, so ckptkit did not compare how the models compute"
            return
        if not self.library and not other.library:
            return
        without = other if self.library else self
        rest = f"compared only the facts in {without.reported_in}" if without.reported else "did not compare"
        how = "" if without.reported else " how the models compute"
        yield f"{CONFIG} is missing in {without.path}, so ckptkit {rest}{how}"


def is_module_config_file(name: str) -> bool:
    return name == MODULES or name.endswith(f"/{CONFIG}")


def is_python_file(name: str) -> bool:
    return name.endswith(".py")
