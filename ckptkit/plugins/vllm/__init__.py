"""Register ckptkit's loader with vLLM, which calls `register` in each of its processes.

vllm serve run/ckpt-500 --load-format ckptkit
vllm serve org/model --load-format ckptkit --model-loader-extra-config '{"path": "s3://bucket/run/ckpt-500"}'
"""

from __future__ import annotations

import logging

FORMAT = "ckptkit"
_logger = logging.getLogger(__name__)


def register() -> None:
    """Register the loader. Without vLLM, or in a version with another interface, log one line."""
    try:
        from ckptkit.plugins.vllm.loader import register_loader

        register_loader(FORMAT)
    except (ImportError, AttributeError, TypeError) as error:
        _logger.warning("ckptkit cannot register load format `%s` with this vLLM: %s", FORMAT, error)
