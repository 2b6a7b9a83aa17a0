"""A model loader for vLLM that reads any checkpoint directly, at the start and when weights are reloaded."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checks.open import HubModel, LazyCheckpoint, LazyTensor
from ckptkit.errors import Caution, CkptError, Unsupported
from ckptkit.integrations.loaded_weights import record_loaded_weights
from ckptkit.io.path import to_model_path

if TYPE_CHECKING:
    import torch

AHEAD_BYTES = 1 << 30  # memory for tensors that were read ahead; a single larger tensor may exceed it
_THREADS = 4  # parallel reads: each small tensor in a store costs a round trip


def read_tensors_ahead(
    tensors: LazyCheckpoint, skip: Callable[[str], bool] = lambda _name: False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors in file order, without the tensors that `skip` excludes.

    Each tensor is read in full, and its checksum is verified. Raises a `CkptError` for the first that cannot be read.
    """
    pending: deque[tuple[LazyTensor, Future[torch.Tensor]]] = deque()
    pending_bytes = 0
    with ThreadPoolExecutor(_THREADS, "ckptkit-read-ahead") as pool:
        try:
            for tensor in tensors_in_file_order(tensors, skip):
                while pending and pending_bytes + tensor.nbytes > AHEAD_BYTES:
                    pending_bytes -= pending[0][0].nbytes
                    yield pop_first_pending(pending)
                pending_bytes += tensor.nbytes
                pending.append((tensor, pool.submit(tensor.torch)))
            while pending:
                yield pop_first_pending(pending)
        finally:  # the consumer may have stopped early
            pool.shutdown(cancel_futures=True)


def pop_first_pending(pending: deque[tuple[LazyTensor, Future[torch.Tensor]]]) -> tuple[str, torch.Tensor]:
    tensor, read = pending.popleft()
    return tensor.name, read.result()


def tensors_in_file_order(tensors: LazyCheckpoint, skip: Callable[[str], bool]) -> list[LazyTensor]:
    """Return the needed tensors, ordered by file and byte offset."""

    def place(name: str) -> tuple[str, int]:
        chunks = tensors.layout.tensors[name].chunks
        return (chunks[0].path, chunks[0].offset) if chunks else ("", 0)  # a computed tensor may have no chunks

    return [tensors[name] for name in sorted(filter(lambda name: not skip(name), tensors), key=place)]


PATH, BASE = "path", "base"
_FIRST = "ckptkit_first_model"
_logger = init_logger("vllm.plugins.ckptkit")  # vLLM only shows loggers below `vllm`


def register_loader(load_format: str) -> None:
    """Register the loader under the name `load_format`, unless it is registered already."""
    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(load_format) is not Loader:
        model_loader.register_model_loader(load_format)(Loader)


class Loader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own loader, with weights from a checkpoint of any format, model family and location.

    `path` in the extra config is the checkpoint, by default the model that vLLM was started with. `base` is the model
    with the config.json to use: by default the model that vLLM was started with, if `path` is given or the checkpoint
    has no config.json.
    """

    def __init__(self, load_config: Any) -> None:
        self.extra = load_config.model_loader_extra_config
        known = copy.copy(load_config)
        if isinstance(self.extra, dict):
            known.model_loader_extra_config = {k: v for k, v in self.extra.items() if k not in (PATH, BASE, _FIRST)}
        super().__init__(known)

    def download_model(self, model_config: Any) -> None:
        """Do nothing: a remote checkpoint is read directly."""

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors by the Hub's names, with verified checksums and without experts of other ranks.

        Raises a `CkptError` for the first damaged or missing tensor, and logs it in one line.
        """
        self.counter_before_loading_weights = time.perf_counter()
        is_unused = getattr(model, "is_unused_checkpoint_weight", None)

        def skip(name: str) -> bool:
            return should_skip_weight(name, self.local_expert_ids) or bool(is_unused and is_unused(name))

        try:
            if getattr(model, "secondary_weights", ()):
                raise Unsupported(
                    f"`{type(model).__name__}` reads weights from a second model; ckptkit does not support that"
                )
            opened = self.open_model(model_config)
            for remark in opened.remarks:
                if isinstance(remark, Caution):
                    _logger.warning("%s", remark)
            if not is_receiving_deltas(load_format=self.load_config.load_format):
                yield from read_tensors_ahead(opened.tensors, skip)
                return
            every = record_loaded_weights(model, opened.tensors.layout, read_tensors_ahead(opened.tensors))
            yield from (one for one in every if not skip(one[0]))
        except CkptError as error:
            _logger.log(logging.ERROR, "ckptkit: %s", error)  # in one line; vLLM logs the traceback
            raise

    def open_model(self, model_config: Any) -> HubModel:
        """Open the checkpoint with the weights of a vLLM model.

        The model that vLLM was started with uses `path`, until another model is loaded in its place. A draft model has
        another name, and its own weights.
        """
        name = model_config.model
        first = self.extra.setdefault(_FIRST, name)
        if name != first and getattr(model_config, "runner_type", None) != "draft":
            # another model replaces the first: `path` is the checkpoint of the first
            self.extra.pop(PATH, None)
        source = self.extra.get(PATH) if name == first else None
        checkpoint = Checkpoint.open(to_model_path(str(source or name)))
        _logger.info("ckptkit loads %s", checkpoint.path)
        has_config = source is None and checkpoint.companions.config is not None
        config_from = None if has_config else getattr(model_config, "hf_config_path", None) or first
        return HubModel.open(checkpoint, base=self.extra.get(BASE) or config_from)


def is_receiving_deltas(load_format: str) -> bool:
    """Return whether the engine receives deltas: then the loader must read and record all weights.

    The loader and the weight transfer backend are registered under the same name.
    """
    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    return transfer is not None and transfer.backend == load_format
