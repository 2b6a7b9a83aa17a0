"""Load the weights of a checkpoint of any format into the tensors of a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import CkptError, Mismatch
from ckptkit.layout import Layout
from ckptkit.models.names import HUB, KEEP, find_family_of
from ckptkit.models.names.between_families import choose_family
from ckptkit.models.names.naming import name_weights
from ckptkit.models.names.sizes import Sizes
from ckptkit.state.names import collect_name_arguments
from ckptkit.storage.ranks import Ranks, find_cause
from ckptkit.storage.reader import LayoutReader
from ckptkit.storage.terms import (
    ERROR,
    IGNORE,
    LoadTerms,
    first_name_by_tied_name,
    memory_identity_of,
    require_equal_tied_values,
)
from ckptkit.words import count


def load_weights(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    missing: str = ERROR,
    cast: str = ERROR,
) -> tuple[str, ...]:
    """Load the model of the checkpoint at `path`, in any format, into `tensors` in place. Keys are the model's names.

    If the checkpoint has another family's names, its config.json or else `config` is needed to translate them.
    `tensors` may be plain tensors or DTensors, on any device. For tied names (the same memory), the checkpoint may lack
    all but one; those that it has must be equal. Returns the names of the checkpoint's weights that were not requested.

    With `missing` "keep", weights that the checkpoint lacks do not change, with "zero" they become zero; both give a
    warning. With `cast` "allow", floats of 16 bits and more are converted to the dtypes of `tensors`.

    If torch.distributed is initialized, every rank must call it, and an error on one rank is raised on all: `Mismatch`
    for a tensor that is missing, has another shape or dtype, or differs from a tensor that it is tied to; and the
    errors of reading the checkpoint.
    """
    terms = LoadTerms(missing, cast)
    ranks = Ranks()
    layout, lacking = ranks.run_on_all_ranks(lambda: weights_for_model(path, tensors, config, terms))
    present = {name: tensor for name, tensor in tensors.items() if name in layout.tensors}
    tied = first_name_by_tied_name(present)
    wanted = {name: torch.empty_like(tensor) if name in tied else tensor for name, tensor in present.items()}
    try:
        with warnings.catch_warnings():
            # torch warns about a load in a single process, which is normal here
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(wanted, storage_reader=LayoutReader(layout, cast=cast, unasked=IGNORE))
    except CheckpointException as error:
        cause = find_cause(error)
        raise (cause.blame(path=path) if isinstance(cause, CkptError) else cause) from error
    ranks.run_on_all_ranks(lambda: require_equal_tied_values(wanted, tied, path))
    terms.fill_missing(lacking, tensors)
    return tuple(name for name in layout.tensors if name not in tensors)


def weights_for_model(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, terms: LoadTerms
) -> tuple[Layout, list[str]]:
    """Return the weights of the checkpoint under the model's names, and the names of missing weights.

    Raises `Mismatch` unless they have the shapes of `tensors`, and the names, as far as the terms require it.
    """
    checkpoint = Checkpoint.open(path)
    config = checkpoint.companions.config or config
    names = KEEP
    if not checkpoint.weights.layout.tensors.keys() >= tensors.keys():
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        family = find_family_of(shapes)
        family = family if config is None else choose_family(family, shapes, Sizes(config))
        names = family.name if family else HUB
    named, _ = name_weights(checkpoint.weights, collect_name_arguments(checkpoint, names, config))
    layout = named.layout
    loaded = {memory_identity_of(tensor) for name, tensor in tensors.items() if name in layout.tensors}
    missing = [
        name for name, t in tensors.items() if name not in layout.tensors and memory_identity_of(t) not in loaded
    ]
    if missing and terms.missing == ERROR:
        raise Mismatch(
            f"the checkpoint lacks {len(missing)} of the model's {count(len(tensors), 'tensor')}",
            path=path,
            tensor=missing[0],
            hint="check that the checkpoint is of the same model",
        )
    for name, tensor in tensors.items():
        shape = layout.tensors[name].spec.shape if name in layout.tensors else tuple(tensor.shape)
        if shape != tuple(tensor.shape):
            message = f"expected shape {list(tensor.shape)} as in the model, found {list(shape)} in the checkpoint"
            raise Mismatch(message, path=path, tensor=name, hint="check that the checkpoint is of the same model")
    return layout, missing
