"""A weight transfer backend for vLLM that patches the weights of a running engine with deltas.

Written for vLLM 0.32: `vllm/distributed/weight_transfer/base.py` and
`vllm/model_executor/model_loader/checkpoint_weight_patch.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from ckptkit.errors import CkptError, Corrupt, Unsupported, Usage
from ckptkit.integrations.loaded_weights import LOADED, LoadedWeights
from ckptkit.plugins.deltas.chain import identity_of_model
from ckptkit.plugins.deltas.vllm_patches import all_changes_of, load_and_check_chain

if TYPE_CHECKING:
    from ckptkit.plugins.deltas.chain import DeltaChain

_RELOAD = "start vLLM with `--load-format ckptkit`; after a failed update call `reload_weights`"
_logger = init_logger("vllm.plugins.ckptkit")  # vLLM only shows loggers below `vllm`


def register_engine(backend: str) -> None:
    """Register the engine under the name `backend`, unless the name is registered already."""
    if backend not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend, DeltaEngine)


@dataclass
class DeltaInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the loader already knows the engine's weights."""


@dataclass
class DeltaUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The directory or URL of a delta, or of several deltas in the order in which they are applied."""

    path: str | list[str]

    @property
    def paths(self) -> list[str]:
        paths = self.path if isinstance(self.path, list) else [self.path]
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise Usage(f"expected `path` to be a delta or a list of deltas, found {self.path!r}")
        return paths


class DeltaEngine(WeightTransferEngine):  # type: ignore[misc]
    """Patch the weights that `--load-format ckptkit` loaded. All checks run before the first element changes."""

    init_info_cls = DeltaInitInfo
    update_info_cls = DeltaUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: DeltaInitInfo) -> None:  # noqa: ARG002
        with log_and_reraise_errors():
            self.require_patchable_weights()

    def start_weight_update(self) -> None:
        """Do nothing: weights change in place."""

    def finish_weight_update(self) -> None:
        """Do nothing: weights change in place."""

    def shutdown(self) -> None:
        """Do nothing: there are no resources to release."""

    def receive_weights(self, update_info: DeltaUpdateInfo) -> None:
        """Apply deltas.

        Raises a `CkptError`; the weights are then unchanged, unless the error says that they are damaged.
        """
        with log_and_reraise_errors():
            weights = self.require_patchable_weights()
            chain, result = load_and_check_chain(update_info.paths, weights)
            patches = [make_patch(chain, name) for name in chain.specs]
            for patch in patches:
                self.load_noop_patch(patch)
            self.apply_patches(patches)
            LOADED[self.model] = result
            new = identity_of_model(result.layout.specs, result.sums)
            _logger.info("ckptkit applied %s: the weights are now %s", ", ".join(update_info.paths), new)

    def require_patchable_weights(self) -> LoadedWeights:
        """Return the recorded state of the engine's weights.

        Raises `Unsupported` if they cannot be patched in place.
        """
        weights = LOADED.get(self.model)
        if weights is None:
            raise Unsupported("the state of the engine's weights is unknown to ckptkit", hint=_RELOAD)
        if self.model_config.quantization is not None:
            message = f"vLLM cannot patch weights that it quantized ({self.model_config.quantization})"
            raise Unsupported(message, hint="write the whole model by `ckptkit apply`, then call `reload_weights`")
        packed = next((name for name, parameter in self.model.named_parameters() if not parameter.numel()), None)
        if packed is not None:
            message = "vLLM has packed this weight for its kernels: it cannot be patched in place"
            hint = "write the whole model by `ckptkit apply`, then call `reload_weights`"
            raise Unsupported(message, tensor=packed, hint=hint)
        return weights

    def load_noop_patch(self, patch: CheckpointWeightPatch) -> None:
        """Load a patch without changes. Raises `Unsupported` if vLLM cannot load a patch of this tensor."""
        nothing = patch._replace(values=patch.values[:0], indices=patch.indices[:0])
        try:
            loaded = load_checkpoint_weight_patches(self.model, [nothing])
        except Exception as error:
            raise Unsupported(f"vLLM cannot patch this tensor in place ({error!r})", tensor=patch.name) from error
        parallel = self.parallel_config
        if not loaded and parallel.pipeline_parallel_size == 1 and not parallel.enable_expert_parallel:
            raise Unsupported("vLLM's model does not load this tensor", tensor=patch.name)

    def apply_patches(self, patches: Sequence[CheckpointWeightPatch]) -> None:
        """Patch the weights. Raises `Corrupt` if that fails; the state of the weights is then unknown."""
        try:
            load_checkpoint_weight_patches(self.model, patches)
        except BaseException as error:
            LOADED.pop(self.model, None)
            raise Corrupt(f"the engine's weights are damaged: {error!r}", hint="call `reload_weights`") from error
        if wrong := [name for name, parameter in self.model.named_parameters() if torch.isnan(parameter).any()]:
            LOADED.pop(self.model, None)
            raise Corrupt("the engine's weight has NaN after the patch", tensor=wrong[0], hint="call `reload_weights`")


def make_patch(chain: DeltaChain, name: str) -> CheckpointWeightPatch:
    spec, changes = chain.specs[name], all_changes_of(chain, name)
    dtype = getattr(torch, spec.dtype.name)
    values = torch.from_numpy(changes.values.copy().view("u1")).view(dtype)
    return CheckpointWeightPatch(name, spec.shape, dtype, values, torch.from_numpy(changes.positions.copy()))


@contextmanager
def log_and_reraise_errors() -> Iterator[None]:
    """Log an error of ckptkit in one line; vLLM logs the traceback."""
    try:
        yield
    except CkptError as error:
        _logger.log(logging.ERROR, "ckptkit: %s", error)
        raise
