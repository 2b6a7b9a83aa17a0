"""Hold tensors against a model: which it calls for and misses, which it does not know, and which is which of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptkit.diagnosis.model import Model
from ckptkit.models.form import Form
from ckptkit.models.vocabulary import is_by_token, vocabulary_of
from ckptkit.names.renames import by_rule
from ckptkit.tensors.box import Shape

Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class Misfits:
    """The tensors that a model calls for and that are missing, and those that it does not call for."""

    missing: Shapes
    extra: Shapes
    needed: int  # how many, in all
    rows: int | None  # of the model's vocabulary

    @classmethod
    def of(cls, shapes: Shapes, form: Form, model: Model) -> Misfits:
        """Hold tensors against a form of the model. What lies beside its own weights is no misfit."""
        missing = {name: form.shapes[name] for name in form.shapes if name in form.needed and name not in shapes}
        extra = {name: shape for name, shape in shapes.items() if name not in form.shapes and name not in model.specs}
        return cls(missing, extra, len(form.needed), vocabulary_of(model.config))

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra)

    @property
    def is_small(self) -> bool:
        """Return whether nothing is missing, so that names of another family cannot be the reason."""
        return not self.missing

    def renamed(self) -> dict[str, str]:
        """Return what the model calls tensors that it does not know, by rule; a padded vocabulary is no hindrance."""
        resized = {name: self.resize(name, shape) for name, shape in self.extra.items()}
        return by_rule(resized, dict(self.missing))

    def resize(self, name: str, shape: Shape) -> Shape:
        """Return a shape with the rows of the model's vocabulary, if it has one for each token."""
        return shape if self.rows is None or not is_by_token(name) else (self.rows, *shape[1:])
