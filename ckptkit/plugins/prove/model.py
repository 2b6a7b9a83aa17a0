"""Open a checkpoint as a model of transformers, and hold what a comparison of logits came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Mismatch, Unsupported, and_more
from ckptkit.layout import Layout
from ckptkit.layout.wrappers import may_be_adapter
from ckptkit.models.companions import Companions
from ckptkit.models.fit import require_equal_tied
from ckptkit.models.names.naming import name_weights
from ckptkit.models.names.transformers import TRANSFORMERS
from ckptkit.models.names.weights import find_weights
from ckptkit.models.transformers_model import MetaModel, find_meta_model
from ckptkit.state.model import Model
from ckptkit.state.names import AS_THEY_ARE, NameOptions, collect_name_arguments
from ckptkit.state.steps import without_trainer_prefix

_MOST_KL = 0.01  # nats per token: rounding weights to bfloat16 costs a tenth of this or less
_NOISE = 1e-5  # fraction of the largest logit: the effect of another summation order in float32


@dataclass(frozen=True, slots=True)
class Runnable:
    """A model to run: the transformers model of its config, and its tensors under transformers' names in memory."""

    path: Path
    meta: MetaModel
    layout: Layout
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: Mapping[str, Any], named: NameOptions = AS_THEY_ARE) -> Runnable:
        """Return the model in a checkpoint, under the names that transformers uses in memory.

        `named` are the user's options for the names in the checkpoint. Raises `Mismatch` if a tensor of the model is
        missing or has another shape.
        """
        component = checkpoint.model_component
        path, meta = component.path, find_meta_model(config)
        weights = find_weights(named.rename_parameters_in_layouts([component.layout])[0])
        model = Model(part=component, weights=weights, origins=(path,), companions=Companions(config=dict(config)))
        model = model if named.rename else without_trainer_prefix(model)
        weights, remarks = model.weights, model.remarks
        if may_be_adapter(weights.layout.tensors):
            hint = "run `ckptkit consolidate SRC MERGED --merge` first, and prove against MERGED"
            raise Unsupported("expected a model, found an adapter that is not merged", path=path, hint=hint)
        table = named.find_table_for(weights.layout.tensors)
        arguments = collect_name_arguments(checkpoint, TRANSFORMERS.name, config, table)
        translated, naming_remarks = name_weights(weights, arguments)
        if translated.layout.tensors.keys() != weights.layout.tensors.keys():
            remarks += tuple(f"{path}: {remark}" for remark in naming_remarks)
        tensors = dict(translated.layout.tensors)
        for name, origin in ((name, origin) for name, origin in meta.tied.items() if origin in tensors):
            if name in tensors:  # most programs keep only one of two tied tensors, so they must be equal
                require_equal_tied(translated.layout, name, origin)
            tensors.setdefault(name, tensors[origin])
        missing = [name for name in meta.shapes if name not in tensors and name not in meta.unsaved]
        if missing:
            message = f"missing: config.json describes it{and_more(len(missing) - 1)}"
            raise Mismatch(message, path=path, tensor=missing[0])
        for name, shape in meta.shapes.items():
            found = tensors[name].spec.shape if name in tensors else shape
            if found != shape:
                message = f"expected shape {list(shape)} (config.json), found {list(found)}"
                hint = "check that config.json belongs to this model"
                raise Mismatch(message, path=path, tensor=name, hint=hint)
        return cls(path, meta, replace(translated.layout, tensors=tensors), remarks)


@dataclass(frozen=True, slots=True)
class Logits:
    """How the logits of two models differ over `tokens` tokens; the second model is the source.

    `kl` is the mean KL divergence of the next-token distribution from the source in nats, `max_kl` its maximum.
    `max_abs` is the largest difference of two logits, where the largest logit is `scale`; `unexplained` is that
    difference when the source's weights are rounded to the same dtypes. `same_choice` counts the tokens with the same
    most likely next token. `first` is the first block whose output differs from the (rounded) source; None if all are
    equal bit for bit. `rounded` is true if dtypes differ.
    """

    tokens: int
    kl: float
    max_kl: float
    max_abs: float
    unexplained: float
    scale: float
    same_choice: int
    first: str | None
    rounded: bool

    @property
    def is_ok(self) -> bool:
        """Return whether they differ by no more than rounding explains; False if a logit is NaN."""
        return self.unexplained <= _NOISE * self.scale and (not self.rounded or self.kl <= _MOST_KL)
