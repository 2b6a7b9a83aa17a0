"""A checkpoint and the model, job or checkpoint to compare it with. Each fact is computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.adapters.find import Adapted, find_adapters
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.examination import examine
from ckptkit.checkpoints.examination.inconsistency import Inconsistency
from ckptkit.errors import Corrupt, IOFailure, Mismatch, NotACheckpoint, Unsupported, Usage
from ckptkit.io.path import to_model_path
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import by_rule, renaming, rules_for
from ckptkit.layout.wrappers import may_be_adapted
from ckptkit.models.companions import find_companions, read_config
from ckptkit.models.expected import Form, closest, forms_for
from ckptkit.models.fit import without_extra_state
from ckptkit.models.names.weights import Weights, find_weights, has_weights
from ckptkit.models.vocabulary import is_by_token, vocabulary_of
from ckptkit.state.quantized.find import find_quantized

Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class LoadTarget:
    """A checkpoint, the model that it is to be loaded into, another one that loads, and the ranks that load it.

    What is not given is None. The checkpoint has the parts that can be read, the model's among them.
    """

    checkpoint: Checkpoint
    model: TargetModel | None = None
    like: Checkpoint | None = None
    world_size: int | None = None

    @cached_property
    def layout(self) -> Layout:
        """Return where every chunk of the checkpoint lies, of all its parts."""
        return self.checkpoint.layout

    @cached_property
    def weights(self) -> Weights | None:
        """Return the model's tensors by their own names; None where there are none, or those of several models."""
        layout = self.checkpoint.model_component.layout
        try:
            return find_weights(layout) if has_weights(layout) else None
        except (Mismatch, Unsupported):
            return None

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Return the shapes of the model's tensors by their own names, {} where there are none."""
        return self.weights.layout.shapes if self.weights else {}

    @cached_property
    def plain_shapes(self) -> Mapping[str, Shape]:
        """Return the shapes of the model's weights, without what modules keep beside them."""
        return without_extra_state(self.weights.layout)[0].shapes if self.weights else {}

    @cached_property
    def misfits(self) -> KeyMismatch | None:
        """Return the tensors that the model misses or does not know, None where no model says which it has."""
        if self.model is None or self.form is None or not self.is_plain:
            return None
        return KeyMismatch.of(self.plain_shapes, self.form, self.model)

    @cached_property
    def renames(self) -> Mapping[str, str]:
        """Return the model's name of each tensor that has another name in the checkpoint, by a rule for names."""
        return self.misfits.renamed() if self.misfits and self.checkpoint.family is None else {}

    @cached_property
    def inconsistencies(self) -> tuple[Inconsistency, ...]:
        """Return what in the checkpoint contradicts the rest of it."""
        return examine(self.layout)

    @property
    def is_asked(self) -> bool:
        """Return whether the checkpoint is to be loaded into a model that was named, not just that of its training."""
        return self.model is not None and self.model.asked

    @cached_property
    def adapted(self) -> Adapted | None:
        """Return the adapters among the model's tensors; None without any."""
        try:
            is_likely = self.weights is not None and may_be_adapted(self.weights.layout.tensors)
            return find_adapters(self.weights.layout) if self.weights and is_likely else None
        except (Corrupt, Unsupported):
            return None

    @cached_property
    def quantization(self) -> str | None:
        """Return the method by which weights of the checkpoint are quantized; None where they are plain numbers."""
        part = self.checkpoint.model_component
        try:
            found = find_quantized(part.layout, self.checkpoint.companions.config)
        except (Corrupt, Mismatch, Unsupported):
            return "unknown"
        return found.method if found else None

    @property
    def is_plain(self) -> bool:
        """Return whether the model's tensors are its weights: no adapter's, and not quantized."""
        return self.weights is not None and self.adapted is None and self.quantization is None

    @cached_property
    def form(self) -> Form | None:
        """Return the form of the model that the tensors are of, or nearly so; None where none is known."""
        if self.model is None or not self.model.forms:
            return None
        return closest(self.model.forms, self.shapes.keys())


@dataclass(frozen=True, slots=True)
class KeyMismatch:
    """The tensors that a model calls for and that are missing, and those that it does not call for."""

    missing: Shapes
    extra: Shapes
    tied: Shapes  # that the model has in memory, and that need not be there
    needed: int  # how many, in all
    rows: int | None  # of the model's vocabulary

    @classmethod
    def of(cls, shapes: Shapes, form: Form, model: TargetModel) -> KeyMismatch:
        """Hold tensors against a form of the model. What lies beside its own weights is no misfit."""
        missing = {name: form.shapes[name] for name in form.shapes if name in form.needed and name not in shapes}
        extra = {name: shape for name, shape in shapes.items() if name not in form.shapes and name not in model.specs}
        tied = {name: form.shapes[name] for name in form.tied if name in form.shapes and name not in shapes}
        return cls(missing, extra, tied, len(form.needed), vocabulary_of(model.config))

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra)

    @property
    def is_small(self) -> bool:
        """Return whether nothing is missing, so that names of another family cannot be the reason."""
        return not self.missing

    def renamed(self) -> dict[str, str]:
        """Return what the model calls tensors that it does not know, by rule; a padded vocabulary is no hindrance."""
        resized = {name: self.resize(name, shape) for name, shape in self.extra.items()}
        found = by_rule(resized, dict(self.missing))
        new_name = renaming(rules_for(found, found) or ())
        left = {name: new_name(name) for name in resized if name not in found}
        return found | {old: new for old, new in left.items() if self.tied.get(new) == resized[old]}

    def resize(self, name: str, shape: Shape) -> Shape:
        """Return a shape with the rows of the model's vocabulary, if it has one for each token."""
        return shape if self.rows is None or not is_by_token(name) else (self.rows, *shape[1:])


@dataclass(frozen=True)
class TargetModel:
    """A model called `name`: the forms that its tensors may have on disk, that in memory last, and its config.

    `specs` are those of its weights, {} where none lie there. `reason` says why there are no forms. It is `asked` for,
    or the checkpoint's own.
    """

    name: str
    config: Mapping[str, Any]
    forms: tuple[Form, ...]
    specs: Mapping[str, Spec]
    reason: str | None = None
    asked: bool = True

    @classmethod
    def open(cls, source: str) -> TargetModel:
        """Open the model in a directory, a checkpoint's, a config.json, or the repository of a Hub id.

        Raises `NotACheckpoint` where neither a config nor weights are found.
        """
        if source.endswith(".json") and Path(source).is_file():
            return cls.of(source, read_config(Path(source)) or {}, {})
        specs = find_specs(source)
        try:
            config = find_companions(Path(source), source).config if not Path(source).is_file() else None
        except (NotACheckpoint, Usage):
            if not specs:
                raise
            config = None
        return cls.of(source, config or {}, specs)

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], specs: Mapping[str, Spec], *, asked: bool = True) -> TargetModel:
        """Return the model of a config, of which weights with these specs may lie there."""
        by_weights = Form({name: spec.shape for name, spec in specs.items()}) if specs else None
        try:
            forms = forms_for(config, lambda: frozenset(specs) or None) if config else ()
            reason = None
        except Unsupported as error:
            forms, reason = (), error.message
        if not forms and by_weights is not None:
            forms, reason = (by_weights,), None
        return cls(name, config, forms, specs, reason, asked)


def find_specs(source: str) -> Mapping[str, Spec]:
    """Return dtype and shape of the weights that lie somewhere, by the model's names; {} where there are none."""
    try:
        return Checkpoint.open(to_model_path(source)).weights.layout.specs
    except (Corrupt, IOFailure, Mismatch, NotACheckpoint, Unsupported, Usage):
        return {}
