"""Hold what the tensors of a model are on disk: names, shapes, ties, and which of them loaders keep in fp32."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ckptkit.tensors.box import Shape


@dataclass(frozen=True, eq=False)
class Form:
    """Names and shapes of all tensors of a model, in one of the forms in which it may lie on disk.

    `tied` are names that are not written, with the name of the tensor that each is the same as; `unsaved` are never
    written. `in_fp32` are those that loaders keep in fp32, by the dtype in which they load the others. `came_from`
    says what each is made of in memory, where that is something else.
    """

    shapes: Mapping[str, Shape]
    tied: Mapping[str, str] = field(default_factory=dict)
    unsaved: frozenset[str] = frozenset()
    in_fp32: Mapping[str, frozenset[str]] = field(default_factory=dict)
    came_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def needed(self) -> frozenset[str]:
        """Return the names of the tensors without which the model is not whole."""
        return frozenset(self.shapes) - self.tied.keys() - self.unsaved


def closest(forms: Iterable[Form], names: Collection[str]) -> Form:
    """Return the form that tensors of these names are of, or nearly so; of several the first."""
    found = frozenset(names)
    return min(forms, key=lambda form: len(form.needed - found) + len(found - form.shapes.keys()))
