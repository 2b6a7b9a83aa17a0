"""Open a checkpoint as a model of transformers: the tensors of its config.json, as in memory there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Mismatch, Unsupported, and_more
from ckptkit.layout import Layout
from ckptkit.layout.wrappers import may_be_adapted
from ckptkit.models.companions import Companions
from ckptkit.models.fit import check_equal
from ckptkit.models.names.naming import name_weights
from ckptkit.models.names.transformers import TRANSFORMERS
from ckptkit.models.names.weights import find_weights
from ckptkit.models.transformers_model import MetaModel, find_meta_model
from ckptkit.state.model import Model
from ckptkit.state.names import AS_THEY_ARE, NameOptions, ask_names
from ckptkit.state.steps import unwrap


@dataclass(frozen=True, slots=True)
class Runnable:
    """A model to run: what transformers builds of its config, and its tensors as that has them in memory."""

    path: Path
    meta: MetaModel
    layout: Layout
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: Mapping[str, Any], named: NameOptions = AS_THEY_ARE) -> Runnable:
        """Return the model in a checkpoint, under the names that transformers has in memory.

        `named` is what the user says of the names in the checkpoint.
        """
        part = checkpoint.model_component
        path, meta = part.path, find_meta_model(config)
        weights = find_weights(named.rename_in([part.layout])[0])
        model = Model(part=part, weights=weights, origins=(path,), companions=Companions(config=dict(config)))
        model = model if named.rename else unwrap(model)
        weights, remarks = model.weights, model.remarks
        if may_be_adapted(weights.layout.tensors):
            hint = "run `ckptkit consolidate SRC MERGED --merge` first, and prove against MERGED"
            raise Unsupported("expected a model, found an adapter that is not merged", path=path, hint=hint)
        table = named.table_for(weights.layout.tensors)
        found, more = name_weights(weights, ask_names(checkpoint, TRANSFORMERS.name, config, table))
        if found.layout.tensors.keys() != weights.layout.tensors.keys():
            remarks += tuple(f"{path}: {remark}" for remark in more)
        tensors = dict(found.layout.tensors)
        for name, origin in meta.tied.items():
            if name not in tensors and origin in tensors:
                tensors[name] = tensors[origin]
            elif name in tensors and origin in tensors:
                check_equal(found.layout, name, origin)  # one of two that differ is lost in most programs
        made = cls(path, meta, replace(found.layout, tensors=tensors), remarks)
        made.check()
        return made

    def check(self) -> None:
        """Raise `Mismatch` for a tensor that the model has, and that is not there or has another shape."""
        missing = [name for name in self.meta.shapes if name not in self.layout.tensors]
        missing = [name for name in missing if name not in self.meta.unsaved]
        if missing:
            message = f"missing: config.json describes it{and_more(len(missing) - 1)}"
            raise Mismatch(message, path=self.path, tensor=missing[0])
        for name, shape in self.meta.shapes.items():
            found = self.layout.tensors[name].spec.shape if name in self.layout.tensors else shape
            if found != shape:
                message = f"expected shape {list(shape)} (config.json), found {list(found)}"
                raise Mismatch(
                    message, path=self.path, tensor=name, hint="check that config.json belongs to this model"
                )
