"""Open a checkpoint as the Hugging Face model that `consolidate` would write of it, and write nothing.

Loaders of models and engines for inference read it straight from the files of a training, tensor by tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checks.open import LazyCheckpoint
from ckptkit.conversion.build_model import build_model, choose_models
from ckptkit.errors import Mismatch
from ckptkit.formats import locate, unpack
from ckptkit.layout.wrappers import may_be_adapted
from ckptkit.models.companions import CONFIG
from ckptkit.state.model import Model
from ckptkit.state.options import ConvertOptions


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model under the Hub's names: its small files by name, its config.json, and its tensors, read when asked for.

    Tied tensors are there once, adapters are merged. `remarks` are what `consolidate` would say of the model.
    """

    path: Path
    files: dict[str, bytes]
    config: dict[str, Any]
    tensors: LazyCheckpoint
    remarks: tuple[str, ...] = ()

    @classmethod
    def open(cls, source: Source, *, base: str | Path | None = None) -> HubModel:
        """Open the checkpoint at `source`, or the latest of the run there; config and tokenizer may come from `base`.

        `base` is a directory, a URL or a Hub id; an adapter is merged into it. Finds every byte and reads no tensor.
        Raises `Mismatch` without a config.json, and for tensors that it describes and that are missing or have another
        shape.
        """
        options = ConvertOptions.of({"base": base}, to="hf")
        checkpoint = Checkpoint.open(source).with_base(options.base)
        model = model_of(checkpoint, options)
        if model.companions.config is None:
            hint = "pass base=MODEL, a directory or Hub id with the config.json of this model"
            message = f"expected a {CONFIG} in the checkpoint or its run, found none"
            raise Mismatch(message, path=checkpoint.path, hint=hint)
        sources = tuple(locate(unpack(layout)) for layout in (model.layout, *model.others))
        tensors = LazyCheckpoint(sources[0], sources, model.made_recipes())
        return cls(checkpoint.path, model.companions.to_files(), dict(model.config), tensors, model.remarks)


def model_of(checkpoint: Checkpoint, options: ConvertOptions) -> Model:
    """Return the model in a checkpoint, as `consolidate` writes it; of an adapter the model that it is merged into."""
    (part,), remarks = choose_models([checkpoint], options)
    if may_be_adapted(part.layout.tensors):
        from ckptkit.adapters.draft import open_adapters

        options = replace(options, merge=open_adapters(part, options) is not None)
    return build_model([part], options).say(*remarks)
