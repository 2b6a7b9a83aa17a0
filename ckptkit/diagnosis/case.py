"""Hold a checkpoint, and where it is to be loaded: all that the kinds of findings look at. Each part is found once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ckptkit.adapters.find import Adapted, find_adapters
from ckptkit.adapters.signs import may_be_adapted
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.diagnosis.misfits import Misfits
from ckptkit.diagnosis.model import Model
from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.layout import Layout
from ckptkit.models.expected import Form, closest
from ckptkit.models.fit import without_extra_state
from ckptkit.names.weights import Weights, find_weights, has_weights
from ckptkit.quantized.find import find_quantized
from ckptkit.tensors.box import Shape


@dataclass(frozen=True)
class Case:
    """A checkpoint, the model that it is to be loaded into, another one that loads, and the ranks that load it.

    What is not given is None. The checkpoint has the parts that can be read, the model's among them.
    """

    checkpoint: Checkpoint
    model: Model | None = None
    like: Checkpoint | None = None
    world_size: int | None = None

    @cached_property
    def layout(self) -> Layout:
        """Return where every chunk of the checkpoint lies, of all its parts."""
        return self.checkpoint.layout

    @cached_property
    def weights(self) -> Weights | None:
        """Return the model's tensors by their own names; None where there are none, or those of several models."""
        layout = self.checkpoint.model_part.layout
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
    def misfits(self) -> Misfits | None:
        """Return the tensors that the model misses or does not know, None where no model says which it has."""
        if self.model is None or self.form is None or not self.is_plain:
            return None
        return Misfits.of(self.plain_shapes, self.form, self.model)

    @cached_property
    def called(self) -> Mapping[str, str]:
        """Return what the model calls those of its tensors that are called otherwise here, by a rule for names."""
        return self.misfits.renamed() if self.misfits and self.checkpoint.family is None else {}

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
        part = self.checkpoint.model_part
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
