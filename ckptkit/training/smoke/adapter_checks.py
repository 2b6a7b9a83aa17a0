"""Check a training of adapters on the export of a smoke run, and what is made of them. As in `checks`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ckptkit.adapters.names import read_entry
from ckptkit.conversion.consolidate import consolidate
from ckptkit.conversion.merge import merge
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import Llama
from ckptkit.training.smoke.judging import Skipped, compare_checkpoints, of_rank_0
from ckptkit.training.smoke.runs import ADAPTED, Failed, SmokeRuns, read_tensors

_ROUNDING = 1e-4  # of logits of a few units, in fp32


def saves_adapters_alone(runs: SmokeRuns) -> str:
    """Check that a training of adapters ends, and that its checkpoint holds them and nothing else of the model."""
    taken = len(of_rank_0(runs.adapted))
    names = [name.removeprefix("model.") for name in read_tensors(runs.adapters) if name.startswith("model.")]
    others = [name for name in names if read_entry(name) is None]
    if taken != ADAPTED or others or not names:
        raise Failed(f"{taken} of {ADAPTED} steps; tensors of no adapter: {others[:4]}")
    return f"{taken} steps, {len(names)} tensors of adapters and none of the model"


def resumes_adapters(runs: SmokeRuns) -> str:
    """Check that a resumed training of adapters takes the same steps, and ends with the same tensors."""
    expected = [(step.step, step.loss, step.grad_norm) for step in of_rank_0(runs.adapted) if step.step > ADAPTED // 2]
    found = [(step.step, step.loss, step.grad_norm) for step in of_rank_0(runs.adapted_again)]
    if found != expected or not found:
        raise Failed(f"steps, losses and norms {found}, not {expected}")
    return compare_checkpoints(runs.adapters, runs.scratch / "adapters-again" / runs.adapters.name)


def merges_adapters(runs: SmokeRuns) -> str:
    """Check that the merged model gives the logits of the model with adapters, but for rounding."""
    expected, found, before = (logits(runs, model) for model in (runs.with_adapters, merged(runs), runs.trained))
    apart, changed = (float((expected - other).abs().max()) for other in (found, before))
    if not apart < min(_ROUNDING, changed):
        raise Failed(f"logits differ by up to {apart:.3g}; the adapters have changed them by up to {changed:.3g}")
    return f"adapters change logits by up to {changed:.2g}; merged, they differ by {apart:.1g}"


def opens_in_peft(runs: SmokeRuns) -> str:
    """Check that PEFT opens the adapter, and gives the same logits with it and merged."""
    adapter, ours = exported(runs), merged(runs)
    try:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed") from None
    disable_progress_bar()
    with warnings.catch_warnings(action="ignore"):  # its own, of transformers' next version
        base = AutoModelForCausalLM.from_pretrained(runs.out, local_files_only=True)
        theirs: Any = PeftModel.from_pretrained(base, adapter)
        there = [logits(runs, lambda tokens: theirs(tokens).logits)]
        whole = theirs.merge_and_unload()
        there.append(logits(runs, lambda tokens: whole(tokens).logits))
    here = [logits(runs, model) for model in (runs.with_adapters, ours)]
    for what, one, other in zip(("with the adapter", "merged"), here, there, strict=True):
        if not torch.equal(one, other):
            raise Failed(f"{what}: logits differ by up to {float((one - other).abs().max()):.3g}")
    return f"{here[0].numel():,} logits equal with the adapter attached and merged, bit for bit"


def exported(runs: SmokeRuns) -> Path:
    """Return the adapter as PEFT saves it, made of the last checkpoint."""
    out = runs.scratch / "adapter"
    return out if out.exists() else consolidate(runs.adapters, out).output


def merged(runs: SmokeRuns) -> Llama:
    """Return the built-in model with the weights of the merged one."""
    out = runs.scratch / "merged"
    if not out.exists():
        merge(runs.out, [exported(runs)], out)
    model = Llama(ModelConfig.read(out / "config.json"))
    model.load_state_dict(load_file(out / "model.safetensors"), strict=False)
    return model


@torch.no_grad()
def logits(runs: SmokeRuns, model: Callable[[Tensor], Tensor]) -> Tensor:
    return model(runs.prompt)


ADAPTER_CHECKS: dict[str, Callable[[SmokeRuns], str]] = {
    "adapters: train": saves_adapters_alone,
    "adapters: resume": resumes_adapters,
    "adapters: merge": merges_adapters,
    "adapters: PEFT": opens_in_peft,
}
