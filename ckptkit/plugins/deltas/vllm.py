"""Register ckptkit's weight transfer with vLLM, which calls `register` in each of its processes.

vllm serve org/model --load-format ckptkit --weight-transfer-config '{"backend": "ckptkit"}'
"""

from __future__ import annotations

import logging

BACKEND = "ckptkit"
_logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend. Without vLLM, or in a version with another interface, log one line."""
    try:
        from ckptkit.plugins.deltas.vllm_engine import register_engine

        register_engine(BACKEND)
    except (ImportError, AttributeError, TypeError) as error:
        _logger.warning("ckptkit cannot register weight transfer `%s` with this vLLM: %s", BACKEND, error)
