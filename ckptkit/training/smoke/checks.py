"""The checks of a smoke test. Each returns what it compared, or raises `CheckFailed` or `CheckSkipped`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from ckptkit.adapters.names import parse_tensor_name
from ckptkit.checkpoints.run import RunFolder
from ckptkit.conversion.combine import merge
from ckptkit.conversion.convert import consolidate, convert
from ckptkit.entry_points import PluginTable, import_object
from ckptkit.training.models.config import ModelConfig
from ckptkit.training.models.llama import Llama
from ckptkit.training.smoke.rank_tasks import RankAccount
from ckptkit.training.smoke.run_check import CheckFailed, CheckSkipped
from ckptkit.training.smoke.runs import (
    ADAPTED,
    SAVED,
    SIZES,
    STEPS,
    SmokeRuns,
    read_tensors_by_torch,
    require_equal_checkpoints,
    require_equal_tensors,
    steps_of_rank_0,
)

_ROUNDING = 1e-4  # tolerance for fp32 logits, which are of the order of 1


def check_saves_adapters_alone(runs: SmokeRuns) -> str:
    """Check that a LoRA training finishes, and that its checkpoint contains the adapters and no base weights."""
    taken = len(steps_of_rank_0(runs.lora_accounts))
    names = [
        name.removeprefix("model.")
        for name in read_tensors_by_torch(runs.adapter_checkpoint_path)
        if name.startswith("model.")
    ]
    others = [name for name in names if parse_tensor_name(name) is None]
    if taken != ADAPTED or others or not names:
        raise CheckFailed(f"{taken} of {ADAPTED} steps; tensors of no adapter: {others[:4]}")
    return f"{taken} steps, {len(names)} tensors of adapters and none of the model"


def check_resumes_adapters(runs: SmokeRuns) -> str:
    """Check that a resumed LoRA training takes the same steps, and ends with the same tensors."""
    require_equal_steps(runs.lora_accounts, runs.resumed_lora_accounts, ADAPTED // 2)
    return require_equal_checkpoints(
        runs.adapter_checkpoint_path, runs.scratch / "adapters-again" / runs.adapter_checkpoint_path.name
    )


def check_merges_adapters(runs: SmokeRuns) -> str:
    """Check that the merged model has the logits of the model with adapters, up to rounding."""
    expected, found, before = (
        logits_of_prompt(runs, model) for model in (runs.model_with_adapters, merged_model(runs), runs.trained_model)
    )
    error, changed = (float((expected - other).abs().max()) for other in (found, before))
    if not error < min(_ROUNDING, changed):
        raise CheckFailed(f"logits differ by up to {error:.3g}; the adapters have changed them by up to {changed:.3g}")
    return f"adapters change logits by up to {changed:.2g}; merged, they differ by {error:.1g}"


def check_opens_in_peft(runs: SmokeRuns) -> str:
    """Check that PEFT loads the adapter, and computes the same logits with the adapter attached and merged."""
    adapter, ours = export_adapter(runs), merged_model(runs)
    try:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise CheckSkipped(f"{error.name} is not installed") from None
    disable_progress_bar()
    with warnings.catch_warnings(action="ignore"):  # PEFT warns about the next version of transformers
        base = AutoModelForCausalLM.from_pretrained(runs.out, local_files_only=True)
        theirs: Any = PeftModel.from_pretrained(base, adapter)
        found = [logits_of_prompt(runs, lambda tokens: theirs(tokens).logits)]
        peft_merged = theirs.merge_and_unload()
        found.append(logits_of_prompt(runs, lambda tokens: peft_merged(tokens).logits))
    expected = [logits_of_prompt(runs, model) for model in (runs.model_with_adapters, ours)]
    for what, a, b in zip(("with the adapter", "merged"), expected, found, strict=True):
        if not torch.equal(a, b):
            raise CheckFailed(f"{what}: logits differ by up to {float((a - b).abs().max()):.3g}")
    return f"{expected[0].numel():,} logits equal with the adapter attached and merged, bit for bit"


def export_adapter(runs: SmokeRuns) -> Path:
    """Return the path of a PEFT adapter converted from the last checkpoint."""
    out = runs.scratch / "adapter"
    return out if out.exists() else consolidate(runs.adapter_checkpoint_path, out).output


def merged_model(runs: SmokeRuns) -> Llama:
    """Return the built-in model with the merged weights."""
    out = runs.scratch / "merged"
    if not out.exists():
        merge(runs.out, [export_adapter(runs)], out)
    model = Llama(ModelConfig.from_config_json(out / "config.json"))
    model.load_state_dict(load_file(out / "model.safetensors"), strict=False)
    return model


@torch.no_grad()
def logits_of_prompt(runs: SmokeRuns, model: Callable[[Tensor], Tensor]) -> Tensor:
    return model(runs.prompt_tokens)


ADAPTER_CHECKS: dict[str, Callable[[SmokeRuns], str]] = {
    "adapters: train": check_saves_adapters_alone,
    "adapters: resume": check_resumes_adapters,
    "adapters: merge": check_merges_adapters,
    "adapters: PEFT": check_opens_in_peft,
}


def check_saves_two_checkpoints(runs: SmokeRuns) -> str:
    """Check that the run ends with two complete checkpoints."""
    taken = sum(len(account.steps) for account in runs.first_accounts)
    steps = [checkpoint.step for checkpoint in RunFolder(runs.config.run).checkpoints()]
    if steps != [SAVED, STEPS]:
        raise CheckFailed(f"checkpoints of steps {steps}, not {[SAVED, STEPS]}")
    return f"{taken // runs.nproc} steps on {runs.nproc} ranks, checkpoints at {SAVED} and {STEPS}"


def check_losses_finite(runs: SmokeRuns) -> str:
    losses = [step.loss for step in steps_of_rank_0(runs.first_accounts)]
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        raise CheckFailed(f"losses {losses}")
    return f"{STEPS} losses"


def check_loss_falls(runs: SmokeRuns) -> str:
    """Check that the mean loss is lower in the second half of the run."""
    losses = [step.loss for step in steps_of_rank_0(runs.first_accounts)]
    first, second = sum(losses[:SAVED]) / SAVED, sum(losses[SAVED:]) / (STEPS - SAVED)
    if not second < first:
        raise CheckFailed(f"mean {first:.4f}, then {second:.4f}")
    return f"mean {first:.4f}, then {second:.4f}"


def check_ranks_differ(runs: SmokeRuns) -> str:
    """Check that local losses differ between ranks (each has its own data), and that reduced values are equal."""
    for number in range(1, STEPS + 1):
        steps = [step for account in runs.first_accounts for step in account.steps if step.step == number]
        reduced = {(step.loss, step.grad_norm, step.lr, step.tokens) for step in steps}
        if len(reduced) != 1:
            raise CheckFailed(f"step {number}: the ranks disagree on loss, gradient norm, rate or tokens: {reduced}")
        if len({step.local_loss for step in steps}) < runs.nproc:
            raise CheckFailed(f"step {number}: two ranks have the same loss {steps[0].local_loss}, so the same data")
    if runs.nproc == 1:
        raise CheckSkipped("there is one rank only")
    return f"{STEPS} steps: {runs.nproc} ranks with the same mean loss"


def check_replicas_equal(runs: SmokeRuns) -> str:
    """Check that the replicas of an unsharded model are equal after some steps."""
    if runs.nproc == 1:
        raise CheckSkipped("there is one rank only")
    if len({account.crc32 for account in runs.replicated_accounts}) != 1:
        raise CheckFailed(
            f"CRC-32 of the parameters by rank: {[f'{account.crc32:08x}' for account in runs.replicated_accounts]}"
        )
    return f"ddp: {len(runs.replicated_accounts)} replicas equal after 2 steps, bit for bit"


def check_resumes_state(runs: SmokeRuns) -> str:
    """Check that a resumed run has the saved scheduler state and position in the data."""
    saved, loaded = (
        [account.states[SAVED] for account in accounts] for accounts in (runs.first_accounts, runs.resumed_accounts)
    )
    if saved != loaded or not saved:
        raise CheckFailed(f"saved {saved}, loaded {loaded}")
    _, progress = saved[0]
    return f"{progress['sequences']} sequences, {progress['tokens']} tokens"


def require_equal_steps(original: list[RankAccount], resumed: list[RankAccount], saved: int) -> int:
    """Compare the steps after step `saved` of a run with the steps of a run resumed there, and return their number.

    Raises `CheckFailed` unless losses and gradient norms are equal, bit for bit.
    """
    expected = [(step.step, step.loss, step.grad_norm) for step in steps_of_rank_0(original) if step.step > saved]
    found = [(step.step, step.loss, step.grad_norm) for step in steps_of_rank_0(resumed)]
    if found != expected or not found:
        raise CheckFailed(f"steps, losses and norms {found}, not {expected}")
    return len(found)


def check_reshards(runs: SmokeRuns) -> str:
    """Check that resharding to other world sizes, one after the other, does not change the tensors."""
    found = [require_equal_checkpoints(runs.last_checkpoint_path, resharded) for resharded in runs.resharded_paths]
    return f"{' to '.join(map(str, (runs.nproc, *SIZES)))} ranks: {found[-1]}"


def check_resumes_resharded(runs: SmokeRuns) -> str:
    """Check that one more rank takes the same step from a resharded checkpoint as from the original."""
    steps = [(step.loss, step.grad_norm) for step in steps_of_rank_0(runs.original_and_resharded_steps)]
    if len(steps) != 2 or steps[0] != steps[1]:
        raise CheckFailed(f"losses and norms {steps} of the step after {SAVED}")
    return f"{runs.nproc + 1} ranks: loss and norm of the next step equal, bit for bit"


def check_round_trips(runs: SmokeRuns) -> str:
    """Check that the conversions hf to dcp, and dcp to pt to dcp, do not change the tensors."""
    weights = convert(runs.out, runs.scratch / "weights", to="dcp", under="model", world_size=runs.nproc).output
    single_file = convert(runs.last_checkpoint_path, runs.scratch / "whole", to="pt").output
    shards = convert(single_file, runs.scratch / "shards", to="dcp", world_size=runs.nproc).output
    results = [require_equal_checkpoints(runs.last_checkpoint_path, converted) for converted in (single_file, shards)]
    first = require_equal_checkpoints(runs.last_checkpoint_path, weights, "model")
    return f"hf to dcp: {first}; dcp to pt to dcp: {results[-1]}"


def check_consolidates(runs: SmokeRuns) -> str:
    done = consolidate(runs.last_checkpoint_path, runs.out, overwrite=True)
    return f"{done.tensors} tensors, {done.checked_bytes:,} bytes compared with their checksums"


def check_equal_tensors(runs: SmokeRuns) -> str:
    expected = {
        name: tensor for name, tensor in runs.trained_model.state_dict().items() if name not in tied_names(runs)
    }
    return f"{require_equal_tensors(expected, runs.exported_tensors)} tensors equal to dcp.load's"


def check_equal_logits(runs: SmokeRuns) -> str:
    """Check that the built-in model has the same logits with the exported weights as with the checkpoint."""
    model = Llama(ModelConfig.from_config_json(runs.out / "config.json"))
    missing, unexpected = model.load_state_dict(runs.exported_tensors, strict=False)
    if unexpected or set(missing) != tied_names(runs):
        raise CheckFailed(f"missing {missing}, unexpected {unexpected}")
    return check_equals_trained_logits(runs, model)


def check_opens_in_transformers(runs: SmokeRuns) -> str:
    """Check that `AutoModelForCausalLM` loads the export and computes the same logits."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise CheckSkipped("transformers is not installed") from None
    if not runs.out.is_dir():
        raise CheckFailed(f"no export at {runs.out}")
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(runs.out, local_files_only=True)
    return check_equals_trained_logits(runs, lambda tokens: model(tokens).logits)


@torch.no_grad()
def check_equals_trained_logits(runs: SmokeRuns, model: Callable[[Tensor], Tensor]) -> str:
    """Compare a model's logits with the logits of the trained model. Raises `CheckFailed` if they differ."""
    found, expected = model(runs.prompt_tokens), runs.trained_model(runs.prompt_tokens)
    if not torch.equal(found, expected):
        raise CheckFailed(f"logits differ by up to {float((found - expected).abs().max()):.3g}")
    return f"{expected.numel():,} logits equal, bit for bit"


def tied_names(runs: SmokeRuns) -> set[str]:
    return set() if runs.config.untied else {"lm_head.weight"}


class KnownCheck(NamedTuple):
    """An entry of `PLUGIN_CHECKS`: the `module:function` of a check."""

    where: str


PLUGIN_CHECKS = PluginTable(
    "ckptkit.smoke_checks",
    KnownCheck,
    {"memory as estimated": KnownCheck("ckptkit.plugins.estimate.smoke_check:check_bytes_as_estimated")},
)

CHECKS: dict[str, Callable[[SmokeRuns], str]] = {
    "train": check_saves_two_checkpoints,
    "losses are finite": check_losses_finite,
    "loss falls": check_loss_falls,
    "ranks agree": check_ranks_differ,
    "replicas": check_replicas_equal,
    "resume: state": check_resumes_state,
    "resume: losses": lambda runs: (
        f"{require_equal_steps(runs.first_accounts, runs.resumed_accounts, SAVED)} losses and norms equal, bit for bit"
    ),
    "resume: weights": lambda runs: require_equal_checkpoints(
        runs.last_checkpoint_path, runs.scratch / "resumed" / runs.last_checkpoint_path.name
    ),
    "another world size": lambda runs: (
        f"{runs.nproc + 1} ranks: {require_equal_checkpoints(runs.last_checkpoint_path, runs.other_world_size_path)}"
    ),
    # a full (single-file) checkpoint loads, and the shards saved from it are unchanged
    "full state": lambda runs: require_equal_checkpoints(runs.last_checkpoint_path, runs.path_resharded_from_full),
    **{name: import_object(known.where) for name, known in PLUGIN_CHECKS.items()},
    "reshard": check_reshards,
    "resume after reshard": check_resumes_resharded,
    "consolidate": check_consolidates,
    "equal tensors": check_equal_tensors,
    "round trip": check_round_trips,
    "equal logits": check_equal_logits,
    "equal logits in transformers": check_opens_in_transformers,
    **ADAPTER_CHECKS,
}
