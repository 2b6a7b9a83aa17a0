"""Checks: what must be true of a smoke run and of all that comes of it. Each says what it compared, or raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptkit.checkpoints.run import Run
from ckptkit.estimates.estimate import estimate
from ckptkit.ops.consolidate import consolidate
from ckptkit.ops.convert import convert
from ckptkit.train.metrics import Step
from ckptkit.train.models.config import ModelConfig
from ckptkit.train.models.llama import Llama
from ckptkit.train.smoke.practice import Copy, Held, Standing, Taken, replicate
from ckptkit.train.smoke.trial import SAVED, SIZES, STEPS, Failed, Trial, of, read_tensors, work


class Skipped(Exception):
    """A check cannot be made on this machine."""


def trains(trial: Trial) -> str:
    """The run ends with both of its checkpoints complete."""
    taken = of(Taken, trial.first)
    steps = [checkpoint.step for checkpoint in Run(trial.config.run).checkpoints()]
    if steps != [SAVED, STEPS]:
        raise Failed(f"checkpoints of steps {steps}, not {[SAVED, STEPS]}")
    return f"{len(taken) // trial.nproc} steps on {trial.nproc} ranks, checkpoints at {SAVED} and {STEPS}"


def is_finite(trial: Trial) -> str:
    """Every loss is a number."""
    found = [step.loss for step in of_rank_0(trial.first)]
    if len(found) != STEPS or not all(map(math.isfinite, found)):
        raise Failed(f"losses {found}")
    return f"{STEPS} losses"


def falls(trial: Trial) -> str:
    """The second half of the run has the lower losses."""
    found = [step.loss for step in of_rank_0(trial.first)]
    first, second = sum(found[:SAVED]) / SAVED, sum(found[SAVED:]) / (STEPS - SAVED)
    if not second < first:
        raise Failed(f"mean {first:.4f}, then {second:.4f}")
    return f"mean {first:.4f}, then {second:.4f}"


def differs_between_ranks(trial: Trial) -> str:
    """Each rank has a loss of its own, for it has its own data; what is reduced is the same on all."""
    taken = of(Taken, trial.first)
    for number in range(1, STEPS + 1):
        steps = [report.step for report in taken if report.step.step == number]
        reduced = {(step.loss, step.grad_norm, step.lr, step.tokens) for step in steps}
        if len(reduced) != 1:
            raise Failed(f"step {number}: the ranks disagree on loss, gradient norm, rate or tokens: {reduced}")
        if len({step.local_loss for step in steps}) < trial.nproc:
            raise Failed(f"step {number}: two ranks have the same loss {steps[0].local_loss}, so the same data")
    if trial.nproc == 1:
        raise Skipped("there is one rank only")
    return f"{STEPS} steps: {trial.nproc} losses, one mean"


def replicates(trial: Trial) -> str:
    """Where each rank has all parameters, they are the same after some steps."""
    if trial.nproc == 1:
        raise Skipped("there is one rank only")
    config = replace(trial.config, run=trial.room / "ddp", strategy="ddp", steps=2)
    copies = of(Copy, work(partial(replicate, config), trial.nproc))
    if len({copy.crc32 for copy in copies}) != 1:
        raise Failed(f"CRC-32 of the parameters by rank: {[f'{copy.crc32:08x}' for copy in copies]}")
    return f"ddp: {len(copies)} replicas equal after 2 steps, bit for bit"


def resumes_state(trial: Trial) -> str:
    """A run that goes on has the scheduler and the place in the data that were saved."""
    saved = [standing for standing in of(Standing, trial.first) if standing.step == SAVED]
    loaded = [standing for standing in of(Standing, trial.resumed) if standing.step == SAVED]
    if by_rank(saved) != by_rank(loaded) or not saved:
        raise Failed(f"saved {saved}, loaded {loaded}")
    return f"{saved[0].progress['sequences']} sequences, {saved[0].progress['tokens']} tokens"


def resumes_losses(trial: Trial) -> str:
    """It takes the same steps, to the last bit of losses and norms."""
    expected = [(step.step, step.loss, step.grad_norm) for step in of_rank_0(trial.first) if step.step > SAVED]
    found = [(step.step, step.loss, step.grad_norm) for step in of_rank_0(trial.resumed)]
    if found != expected or not found:
        raise Failed(f"steps, losses and norms {found}, not {expected}")
    return f"{len(found)} losses and norms equal, bit for bit"


def resumes_weights(trial: Trial) -> str:
    """And it ends with the same weights and optimizer."""
    return compare_checkpoints(trial.checkpoint, trial.room / "resumed" / trial.checkpoint.name)


def loads_at_another_size(trial: Trial) -> str:
    """Loaded by another number of ranks, gathered into one file, the checkpoint is what it was."""
    return f"{trial.nproc + 1} ranks: " + compare_checkpoints(trial.checkpoint, trial.at_another_size)


def loads_full(trial: Trial) -> str:
    """That file loads, and saves as shards that are what they were."""
    return compare_checkpoints(trial.checkpoint, trial.from_full)


def reshards(trial: Trial) -> str:
    """Written for other numbers of ranks, one after the other, it is what it was."""
    found = [compare_checkpoints(trial.checkpoint, resharded) for resharded in trial.resharded]
    return f"{' to '.join(map(str, (trial.nproc, *SIZES)))} ranks: {found[-1]}"


def resumes_resharded(trial: Trial) -> str:
    """A run that goes on with more ranks takes the same step from what was written for them as from the original."""
    steps = [(step.loss, step.grad_norm) for step in of_rank_0(trial.stepped)]
    if len(steps) != 2 or steps[0] != steps[1]:
        raise Failed(f"losses and norms {steps} of the step after {SAVED}")
    return f"{trial.nproc + 1} ranks: loss and norm of the next step equal, bit for bit"


def goes_there_and_back(trial: Trial) -> str:
    """The export becomes weights to start from, and one file of torch.save shards, and both are what they were."""
    weights = convert(trial.out, trial.room / "weights", to="dcp", under="model", world_size=trial.nproc).output
    whole = convert(trial.checkpoint, trial.room / "whole", to="pt").output
    shards = convert(whole, trial.room / "shards", to="dcp", world_size=trial.nproc).output
    found = [compare_checkpoints(trial.checkpoint, converted) for converted in (whole, shards)]
    return f"hf to dcp: {compare_checkpoints(trial.checkpoint, weights, 'model')}; dcp to pt to dcp: {found[-1]}"


def holds_what_was_estimated(trial: Trial) -> str:
    """The rank with most holds as many bytes of parameters and optimizer as `ckptkit estimate` says."""
    held = of(Held, trial.first)
    precision = "bfloat16" if held[0].computes_in == "bfloat16" else "float32"
    size = trial.config.sequence_length, -(-trial.config.batch_size // trial.nproc)
    (budget,) = estimate(
        trial.config.run / "config.json", world_size=trial.nproc, strategy="full_shard", recompute_every=0,
        sequence_length=size[0], micro_batch_size=size[1], param_dtype=precision,
    ).budgets  # fmt: skip
    expected = budget.parts["parameters"], budget.parts["optimizer"]
    found = max(rank.parameters for rank in held), max(rank.optimizer for rank in held)
    if found != expected:
        raise Failed(f"{found[0]:,} bytes of parameters and {found[1]:,} of moments; estimated {expected}")
    peak = held[0].peak and f"; at most {held[0].peak:,} bytes, estimated {budget.peak:,}"
    return f"{found[0]:,} bytes of parameters, {found[1]:,} of moments{peak or ''}"


def consolidates(trial: Trial) -> str:
    """The last checkpoint becomes safetensors."""
    done = consolidate(trial.checkpoint, trial.out, overwrite=True)
    return f"{done.tensors} tensors, {done.checked_bytes:,} bytes compared with their checksums"


def has_equal_tensors(trial: Trial) -> str:
    """The export has the tensors that `dcp.load` gives; of tied ones, the first."""
    expected = {name: tensor for name, tensor in trial.trained.state_dict().items() if name not in tied_names(trial)}
    if trial.exported.keys() != expected.keys():
        raise Failed(f"names that only one side has: {sorted(trial.exported.keys() ^ expected.keys())}")
    wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, trial.exported[name])]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(expected)} tensors differ, first `{wrong[0]}`")
    return f"{len(expected)} tensors equal to dcp.load's"


def has_equal_logits(trial: Trial) -> str:
    """The built-in model gives the same logits from the export as from the checkpoint."""
    model = Llama(ModelConfig.read(trial.out / "config.json"))
    missing, unexpected = model.load_state_dict(trial.exported, strict=False)
    if unexpected or set(missing) != tied_names(trial):
        raise Failed(f"missing {missing}, unexpected {unexpected}")
    return compare_logits(trial, model)


def opens_in_transformers(trial: Trial) -> str:
    """`AutoModelForCausalLM` opens the export and gives the same logits."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise Skipped("transformers is not installed") from None
    if not trial.out.is_dir():
        raise Failed(f"no export at {trial.out}")
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(trial.out, local_files_only=True)
    return compare_logits(trial, lambda tokens: model(tokens).logits)


@torch.no_grad()
def compare_logits(trial: Trial, model: Callable[[Tensor], Tensor]) -> str:
    """Compare a model's logits with those of the trained one."""
    found, expected = model(trial.prompt), trial.trained(trial.prompt)
    if not torch.equal(found, expected):
        raise Failed(f"logits differ by up to {float((found - expected).abs().max()):.3g}")
    return f"{expected.numel():,} logits equal, bit for bit"


def compare_checkpoints(one: Path, other: Path, under: str = "") -> str:
    """Compare all tensors of two checkpoints, or of the first those `under` a key, read by torch."""
    expected = {name: tensor for name, tensor in read_tensors(one).items() if name.startswith(under)}
    found = read_tensors(other)
    if found.keys() != expected.keys():
        raise Failed(f"names that only one side has: {sorted(found.keys() ^ expected.keys())}")
    wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(expected)} tensors differ, first `{wrong[0]}`")
    return f"{len(expected)} tensors of {under or 'model and optimizer'} equal, bit for bit"


def of_rank_0(heard: list[Any]) -> list[Step]:
    """The steps as rank 0 saw them."""
    return [taken.step for taken in of(Taken, heard) if taken.rank == 0]


def by_rank(standings: list[Standing]) -> list[Standing]:
    """In the order of ranks."""
    return sorted(standings, key=lambda standing: standing.rank)


def tied_names(trial: Trial) -> set[str]:
    """The names that an export leaves out since another name holds the same weight."""
    return set() if trial.config.untied else {"lm_head.weight"}


CHECKS: dict[str, Callable[[Trial], str]] = {
    "train": trains,
    "losses are finite": is_finite,
    "loss falls": falls,
    "ranks agree": differs_between_ranks,
    "replicas": replicates,
    "resume: state": resumes_state,
    "resume: losses": resumes_losses,
    "resume: weights": resumes_weights,
    "another world size": loads_at_another_size,
    "full state": loads_full,
    "memory as estimated": holds_what_was_estimated,
    "reshard": reshards,
    "resume after reshard": resumes_resharded,
    "consolidate": consolidates,
    "equal tensors": has_equal_tensors,
    "round trip": goes_there_and_back,
    "equal logits": has_equal_logits,
    "equal logits in transformers": opens_in_transformers,
}
