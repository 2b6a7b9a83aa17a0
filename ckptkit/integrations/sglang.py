"""Let SGLang read any checkpoint: by a hook on its loader, or as a custom loader of weights.

python -m sglang.launch_server --model-path run/ckpt-500
python -m sglang.launch_server ... --custom-weight-loader ckptkit.integrations.sglang.load
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import NotACheckpoint
from ckptkit.integrations.read_ahead import read_ahead
from ckptkit.ops.hub_model import HubModel

if TYPE_CHECKING:
    import torch

HOOKED = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"
PATH = "path"  # the name of the tensor that has the path of a checkpoint, as bytes of UTF-8
_logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, "torch.Tensor"]]


def register() -> None:
    """Put a hook around SGLang's iterator of weights. In a version with another interface, log one line."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        pkgutil.resolve_name(HOOKED)
        HookRegistry.register(HOOKED, iterate_weights, HookType.AROUND)
    except (ImportError, AttributeError) as error:
        _logger.warning("ckptkit cannot register its hook with this SGLang: %s", error)


def iterate_weights(original: Callable[..., Weights], loader: Any, source: Any, *more: Any, **named: Any) -> Weights:
    """Return the weights of a local checkpoint that SGLang cannot read itself; of any other those that it reads."""
    checkpoint = checkpoint_at(Path(source.model_or_path))
    if checkpoint is None:
        return original(loader, source, *more, **named)
    return under_prefix(source.prefix, read_ahead(HubModel.open(checkpoint).tensors))


def checkpoint_at(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a directory; None where there is none, or one of a Hugging Face model."""
    if not path.is_dir():
        return None
    try:
        checkpoint = Checkpoint.open(path)
    except NotACheckpoint:
        return None
    return None if checkpoint.model_component.reader.is_model_only else checkpoint


def under_prefix(prefix: str, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    return ((prefix + name, tensor) for name, tensor in weights)


def load(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load the checkpoint whose path is in the tensor `path` into a model of SGLang, as a custom weight loader does.

    The path may be a URL; the tensor has its UTF-8 as uint8. Raises a `CkptError` for what cannot be read.
    """
    path = bytes(dict(named_tensors)[PATH].tolist()).decode()
    model.load_weights(read_ahead(HubModel.open(path).tensors))
