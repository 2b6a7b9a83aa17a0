"""Find quantized weights where plain ones are looked for."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.commands import export, is_model
from ckptkit.diagnosis.finding import Finding

_KEY = "quantization_config"


def find_quantized(case: Case) -> Iterator[Finding]:
    """Yield that weights are quantized, if the config that they are loaded by does not say so."""
    if case.model is None or case.quantization is None or case.model.config.get(_KEY):
        return
    if not (case.model.asked or is_model(case.checkpoint)):
        return
    message = f"the weights are quantized ({case.quantization}), and the config of {case.model.name} does not say so"
    base = case.model.name if case.model.asked else None
    yield Finding("quantized", None, message, export(case.checkpoint, "--dtype", "bf16", base=base))
