"""`LoadTarget`: a checkpoint, and the model, job or checkpoint to compare it with. Each fact is computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.adapters.find import Adapted, find_adapters
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.examination import examine_checkpoint
from ckptkit.checkpoints.examination.facts import Inconsistency
from ckptkit.errors import Corrupt, IOFailure, Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage
from ckptkit.io.path import to_model_path
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import match_names_by_rule, renaming_function, rules_for_renames
from ckptkit.layout.wrappers import may_be_adapter
from ckptkit.models.companions import find_companions, read_config_json
from ckptkit.models.expected import Form, closest_form, forms_of_model
from ckptkit.models.fit import drop_extra_state
from ckptkit.models.names import HUB
from ckptkit.models.names.naming import name_weights
from ckptkit.models.names.weights import Weights, find_weights_or_none
from ckptkit.models.vocabulary import find_vocabulary_size, has_row_per_token
from ckptkit.state.names import collect_name_arguments
from ckptkit.state.quantized.find import find_quantized

Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class LoadTarget:
    """A checkpoint to load, the model to load it into, a checkpoint that already loads there, and the number of ranks.

    Arguments that the user did not pass are None. The checkpoint contains only components that can be read; the model's
    component is always one of them.
    """

    checkpoint: Checkpoint
    model: TargetModel | None = None
    like: Checkpoint | None = None
    world_size: int | None = None

    @cached_property
    def layout(self) -> Layout:
        return self.checkpoint.layout

    @cached_property
    def weights(self) -> Weights | None:
        """Return the model's tensors under the model's names; None if there are none, or several models."""
        return find_weights_or_none(self.checkpoint.model_component.layout)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Return the shapes of the model's tensors under the model's names; {} if there are none."""
        return self.weights.layout.shapes if self.weights else {}

    @cached_property
    def weight_shapes(self) -> Mapping[str, Shape]:
        """Return the shapes of the model's weights, without `_extra_state` entries of modules."""
        return drop_extra_state(self.weights.layout)[0].shapes if self.weights else {}

    @cached_property
    def key_mismatch(self) -> KeyMismatch | None:
        """Return the missing and unexpected tensors; None if it is unknown which tensors the model has."""
        if self.model is None or self.best_matching_form is None or not self.has_plain_weights:
            return None
        return KeyMismatch.of(self.weight_shapes, self.best_matching_form, self.model)

    @cached_property
    def renames(self) -> Mapping[str, str]:
        """Return the model's name by checkpoint name, for tensors that one renaming rule maps onto the model."""
        return self.key_mismatch.renames_of_extra() if self.key_mismatch and self.checkpoint.family is None else {}

    @cached_property
    def hub_shapes(self) -> Shapes:
        """Return the shapes of the model's tensors by the Hub's names; the present ones if there is no translation."""
        return self.shapes_on_hub(None) or self.shapes

    def shapes_on_hub(self, rows: int | None) -> Shapes | None:
        """Return the shapes by the Hub's names, with `rows` of the vocabulary; None if ckptkit cannot translate."""
        if self.weights is None or self.model is None:
            return None
        try:
            named, _ = name_weights(
                self.weights, collect_name_arguments(self.checkpoint, HUB, self.model.config or None, rows=rows)
            )
        except (Corrupt, IOFailure, Mismatch, Unsafe, Unsupported):
            return None
        return named.layout.shapes

    @cached_property
    def inconsistencies(self) -> tuple[Inconsistency, ...]:
        return examine_checkpoint(self.checkpoint)

    @property
    def asked(self) -> TargetModel | None:
        """Return the model that the user named; None if ckptkit took the checkpoint's own config."""
        return self.model if self.model is not None and self.model.asked else None

    @property
    def base(self) -> str | None:
        """Return the value of `--base` in a command that fixes the checkpoint for the model that the user named."""
        return self.asked.name if self.asked else None

    @cached_property
    def adapters_in_model(self) -> Adapted | None:
        """Return the adapters among the model's tensors; None if there are none."""
        try:
            is_likely = self.weights is not None and may_be_adapter(self.weights.layout.tensors)
            return find_adapters(self.weights.layout) if self.weights and is_likely else None
        except (Corrupt, Unsupported):
            return None

    @cached_property
    def quantization(self) -> str | None:
        """Return the quantization method of the weights, "unknown" if it cannot be read, None for plain weights."""
        model = self.checkpoint.model_component
        try:
            quantized = find_quantized(model.layout, self.checkpoint.companions.config)
        except (Corrupt, Mismatch, Unsupported):
            return "unknown"
        return quantized.method if quantized else None

    @property
    def has_plain_weights(self) -> bool:
        """Return whether the model's tensors are plain weights: no adapter, and not quantized."""
        return self.weights is not None and self.adapters_in_model is None and self.quantization is None

    @cached_property
    def best_matching_form(self) -> Form | None:
        """Return the model's form, on disk or in memory, whose names match the tensors best; None if none is known."""
        if self.model is None or not self.model.forms:
            return None
        return closest_form(self.model.forms, self.shapes.keys())


@dataclass(frozen=True, slots=True)
class KeyMismatch:
    """The tensors that a model needs and the checkpoint lacks, and the tensors that the model does not have."""

    missing: Shapes
    extra: Shapes
    tied: Shapes  # tied tensors of the model, which the checkpoint may omit
    needed: int  # number of tensors that the model needs
    rows: int | None  # size of the model's vocabulary

    @classmethod
    def of(cls, shapes: Shapes, form: Form, model: TargetModel) -> KeyMismatch:
        """Compare tensors with a form of the model. Tensors that the model's own files contain are never `extra`."""
        missing = {name: form.shapes[name] for name in form.shapes if name in form.needed_names and name not in shapes}
        extra = {name: shape for name, shape in shapes.items() if name not in form.shapes and name not in model.specs}
        tied = {name: form.shapes[name] for name in form.tied if name in form.shapes and name not in shapes}
        return cls(missing, extra, tied, len(form.needed_names), find_vocabulary_size(model.config))

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra)

    def renames_of_extra(self) -> dict[str, str]:
        """Return the model's name for each `extra` tensor that a rule explains. Ignores padding of the vocabulary."""
        resized = {
            name: shape if self.rows is None or not has_row_per_token(name) else (self.rows, *shape[1:])
            for name, shape in self.extra.items()
        }
        by_rule_pairs = match_names_by_rule(resized, dict(self.missing))
        new_name = renaming_function(rules_for_renames(by_rule_pairs, by_rule_pairs) or ())
        remaining = {name: new_name(name) for name in resized if name not in by_rule_pairs}
        return by_rule_pairs | {old: new for old, new in remaining.items() if self.tied.get(new) == resized[old]}


@dataclass(frozen=True)
class TargetModel:
    """A model called `name`: its config, and the forms its tensors can have on disk.

    The last form is the one in memory. `specs` are dtype and shape of its weights, {} if it comes without weights.
    `reason` says why `forms` is empty. `asked` is False for the checkpoint's own model.
    """

    name: str
    config: Mapping[str, Any]
    forms: tuple[Form, ...]
    specs: Mapping[str, Spec]
    reason: str | None = None
    asked: bool = True

    @classmethod
    def open(cls, source: str) -> TargetModel:
        """Open the model in a directory, a checkpoint, a config.json or a Hub repository. Raises `NotACheckpoint`."""
        if source.endswith(".json") and Path(source).is_file():
            return cls.of(source, read_config_json(Path(source)) or {}, {})
        try:
            specs = Checkpoint.open(to_model_path(source)).weights.layout.specs
        except (Corrupt, IOFailure, Mismatch, NotACheckpoint, Unsupported, Usage):
            specs = {}
        try:
            config = find_companions(Path(source), source).config if not Path(source).is_file() else None
        except (NotACheckpoint, Usage):
            if not specs:
                raise
            config = None
        return cls.of(source, config or {}, specs)

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], specs: Mapping[str, Spec], *, asked: bool = True) -> TargetModel:
        """Return the model that a config describes; `specs` are those of its weights, {} without weights."""
        by_weights = Form({name: spec.shape for name, spec in specs.items()}) if specs else None
        try:
            forms = forms_of_model(config, lambda: frozenset(specs) or None) if config else ()
            reason = None
        except Unsupported as error:
            forms, reason = (), error.message
        if not forms and by_weights is not None:
            forms, reason = (by_weights,), None
        return cls(name, config, forms, specs, reason, asked)
