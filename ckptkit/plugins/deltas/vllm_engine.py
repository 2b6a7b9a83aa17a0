"""A weight transfer backend for vLLM that patches the weights of a running engine by deltas.

vLLM's interface is that of 0.32, `vllm/distributed/weight_transfer/base.py` and
`vllm/model_executor/model_loader/checkpoint_weight_patch.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from ckptkit.errors import CkptError, Corrupt, Unsupported, Usage
from ckptkit.integrations.loaded_weights import LoadedWeights, forget, replace_weights, weights_of
from ckptkit.io.path import to_path
from ckptkit.plugins.deltas.chain import DeltaChain
from ckptkit.plugins.deltas.changes import Changes, view
from ckptkit.plugins.deltas.check_delta import check_tensor
from ckptkit.plugins.deltas.identity import identify
from ckptkit.plugins.deltas.open_delta import Delta, open_delta
from ckptkit.plugins.deltas.patch import merge_changes, read_all
from ckptkit.plugins.deltas.payload import INDICES, VALUES, WHOLE, index_dtype

if TYPE_CHECKING:
    from ckptkit.plugins.deltas.chain import DeltaChain

FLOATS = ("float64", "float32", "float16", "bfloat16")  # NaN marks what does not change in a patch of vLLM


def check_chain(places: Sequence[str | Path], weights: LoadedWeights) -> tuple[DeltaChain, LoadedWeights]:
    """Return deltas that follow each other, and the weights that they make of `weights`. Reads all of the deltas.

    Raises `Mismatch` if `weights` are not their base, or a delta is missing between two, `Corrupt` for damaged bytes,
    wrong positions, and a result other than the one that they name, and `Unsupported` for values that are NaN and
    dtypes that cannot be patched.
    """
    chain = DeltaChain.of([open_delta(to_path(place)) for place in places])
    chain.check_base(weights.layout, weights.sums)
    for delta in chain.deltas:
        for name in delta.record.tensors:
            check_patchable(delta, name)
    return chain, LoadedWeights(weights.layout, {**weights.sums, **chain.sums})


def check_patchable(delta: Delta, name: str) -> None:
    """Raise a `CkptError` unless a tensor of a delta has the right checksums, and values that can be patched."""
    dtype = delta.record.tensors[name].spec.dtype.name
    held = (delta.layout.tensors.get(name + suffix) for suffix in (INDICES, VALUES, WHOLE))
    try:
        if dtype not in FLOATS:
            raise Unsupported(f"expected one of {', '.join(FLOATS)} to patch in place, found {dtype}")
        if any(one is not None and one.chunks[0].crc32 is None for one in held):
            hint = "write the delta again with `ckptkit delta`, or copy it together with that file"
            raise Unsupported("expected a CRC-32 in `ckptkit.json`, found none", hint=hint)
        if number := check_tensor(delta, name):
            raise Unsupported(f"expected new values without NaN, found {number}: vLLM patches no NaN")
    except CkptError as error:
        raise error.blame(path=delta.file_of(name), tensor=name) from error.__cause__


def changes_of(chain: DeltaChain, name: str) -> Changes:
    """Return all that a chain changes in a tensor: every element of it where a delta holds it whole."""
    last, later = chain.last_whole(name), chain.load(name)
    if last is None:
        assert later is not None
        return later
    spec = chain.specs[name]
    values = view(read_all(chain.deltas[last], name + WHOLE), spec.dtype.itemsize)
    every = Changes(np.arange(spec.numel, dtype=index_dtype(spec)), values)
    return every if later is None else merge_changes([every, later])


_RELOAD = "start vLLM with `--load-format ckptkit`; after a failed update call `reload_weights`"
_logger = init_logger("vllm.plugins.ckptkit")  # a name whose lines vLLM shows


def register_engine(backend: str) -> None:
    """Make the engine known by its name, unless it is."""
    if backend not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend, DeltaEngine)


@dataclass
class DeltaInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: the loader knows which weights the engine has."""


@dataclass
class DeltaUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The directory or URL of a delta, or of several in the order in which they are applied."""

    path: str | list[str]

    @property
    def paths(self) -> list[str]:
        paths = self.path if isinstance(self.path, list) else [self.path]
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise Usage(f"expected `path` to be a delta or a list of deltas, found {self.path!r}")
        return paths


class DeltaEngine(WeightTransferEngine):  # type: ignore[misc]
    """Patch the weights that `--load-format ckptkit` loaded. Every check comes before the first element changes."""

    init_info_cls = DeltaInitInfo
    update_info_cls = DeltaUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: DeltaInitInfo) -> None:  # noqa: ARG002
        """Check that deltas can be applied to this engine."""
        with log_errors():
            self.check_engine()

    def start_weight_update(self) -> None:
        """Do nothing: weights change in place."""

    def finish_weight_update(self) -> None:
        """Do nothing: weights change in place."""

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""

    def receive_weights(self, update_info: DeltaUpdateInfo) -> None:
        """Apply deltas. Raises a `CkptError`; unless it says that weights are damaged, they are as they were."""
        with log_errors():
            weights = self.check_engine()
            chain, result = check_chain(update_info.paths, weights)
            patches = [patch_of(chain, name) for name in chain.specs]
            for patch in patches:
                self.rehearse(patch)
            self.apply(patches)
            replace_weights(self.model, result)
            new = identify(result.layout.specs, result.sums)
            _logger.info("ckptkit applied %s: the weights are now %s", ", ".join(update_info.paths), new)

    def check_engine(self) -> LoadedWeights:
        """Return what is known of the engine's weights. Raises `Unsupported` if they cannot be patched in place."""
        weights = weights_of(self.model)
        if weights is None:
            raise Unsupported("the state of the engine's weights is unknown to ckptkit", hint=_RELOAD)
        if self.model_config.quantization is not None:
            message = f"vLLM cannot patch weights that it quantized ({self.model_config.quantization})"
            raise Unsupported(message, hint="write the whole model by `ckptkit apply`, then call `reload_weights`")
        packed = next((name for name, one in self.model.named_parameters() if not one.numel()), None)
        if packed is not None:
            message = "vLLM has packed this weight for its kernels: it cannot be patched in place"
            hint = "write the whole model by `ckptkit apply`, then call `reload_weights`"
            raise Unsupported(message, tensor=packed, hint=hint)
        return weights

    def rehearse(self, patch: CheckpointWeightPatch) -> None:
        """Load a patch that changes nothing. Raises `Unsupported` where vLLM's loader does not take the tensor."""
        nothing = patch._replace(values=patch.values[:0], indices=patch.indices[:0])
        try:
            loaded = load_checkpoint_weight_patches(self.model, [nothing])
        except Exception as error:
            raise Unsupported(f"vLLM cannot patch this tensor in place ({error!r})", tensor=patch.name) from error
        parallel = self.parallel_config
        if not loaded and parallel.pipeline_parallel_size == 1 and not parallel.enable_expert_parallel:
            raise Unsupported("vLLM's model does not load this tensor", tensor=patch.name)

    def apply(self, patches: Sequence[CheckpointWeightPatch]) -> None:
        """Patch the weights. Raises `Corrupt` where that fails: the weights are then of an unknown state."""
        try:
            load_checkpoint_weight_patches(self.model, patches)
        except BaseException as error:
            forget(self.model)
            raise Corrupt(f"the engine's weights are damaged: {error!r}", hint="call `reload_weights`") from error
        if wrong := [name for name, one in self.model.named_parameters() if torch.isnan(one).any()]:
            forget(self.model)
            raise Corrupt("the engine's weight has NaN after the patch", tensor=wrong[0], hint="call `reload_weights`")


def patch_of(chain: DeltaChain, name: str) -> CheckpointWeightPatch:
    spec, changes = chain.specs[name], changes_of(chain, name)
    dtype = getattr(torch, spec.dtype.name)
    values = torch.from_numpy(changes.values.copy().view("u1")).view(dtype)
    return CheckpointWeightPatch(name, spec.shape, dtype, values, torch.from_numpy(changes.positions.copy()))


@contextmanager
def log_errors() -> Iterator[None]:
    """Log an error of ckptkit's in one line: the traceback is vLLM's."""
    try:
        yield
    except CkptError as error:
        _logger.log(logging.ERROR, "ckptkit: %s", error)
        raise
