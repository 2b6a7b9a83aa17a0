"""Make the loader and the weight transfer of ckptkit known to vLLM, which calls `register` in each of its processes.

vllm serve run/ckpt-500 --load-format ckptkit
vllm serve org/model --load-format ckptkit --model-loader-extra-config '{"path": "s3://bucket/run/ckpt-500"}'
vllm serve org/model --load-format ckptkit --weight-transfer-config '{"backend": "ckptkit"}'
"""

from __future__ import annotations

import logging

FORMAT = "ckptkit"
_logger = logging.getLogger(__name__)


def register() -> None:
    """Register both, once. Without vLLM, or in a version with another interface, log one line."""
    try:
        from ckptkit.integrations.vllm_loader import register_loader

        register_loader(FORMAT)
    except (ImportError, AttributeError, TypeError) as error:
        _logger.warning("ckptkit cannot register load format `%s` with this vLLM: %s", FORMAT, error)
        return
    try:
        from ckptkit.integrations.vllm_deltas import register_engine

        register_engine(FORMAT)
    except (ImportError, AttributeError, TypeError) as error:
        _logger.warning("ckptkit cannot register weight transfer `%s` with this vLLM: %s", FORMAT, error)
