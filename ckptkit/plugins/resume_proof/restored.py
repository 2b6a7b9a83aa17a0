"""Check that every group of state in a checkpoint is restored, and name the cause if the resumed run differs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import numpy as np

from ckptkit.errors import and_more
from ckptkit.plugins.resume_proof.change import CHANGES, freeze_optimizer, option_value_without_updates
from ckptkit.plugins.resume_proof.checks import has_other_step_count, is_same_loss, losses_after_checkpoint
from ckptkit.plugins.resume_proof.compare import distance_by_differing_tensor, group_differences
from ckptkit.plugins.resume_proof.runs import Cause, Runs, checkpoints_by_step
from ckptkit.plugins.resume_proof.states import (
    DATA,
    EMA,
    IMPERATIVES,
    MOMENTS,
    OPTIMIZER_STEP,
    OPTIONS,
    OTHER,
    RANDOM,
    SCALER,
    SCHEDULER,
    STEP,
    WEIGHTS,
    CheckpointContents,
    read_tensors_beside_checkpoints,
)  # fmt: skip
from ckptkit.training.smoke.run_check import CheckFailed, CheckSkipped
from ckptkit.words import count

_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})  # states that decay
_COUNTED = re.compile(r"running_(mean|var)|num_batches_tracked")  # buffers that a forward pass changes
_SAME = 1e-6  # relative: moments that were decayed by a beta of almost 1, in float32

Look = Callable[[Runs], str]


def restored_checks(runs: Runs) -> dict[str, Look]:
    """Return a check for each group of state that the checkpoint contains, and the verdict on the resumed run."""
    groups = [group for group in runs.middle_state.groups if group in CHANGES]
    checks: dict[str, Look] = {f"restored: {group}": partial(check_group_restored, group=group) for group in groups}
    return {
        **checks,
        "loaded into its place": check_weights_loaded_correctly,
        "resume continues the run": check_same_final_state,
    }


def check_group_restored(runs: Runs, group: str) -> str:
    """Check that a change of one group in the checkpoint reaches the resumed training."""
    number, execution, found = runs.resume_with_changed_group(group)
    change = CHANGES[group].format(entries=count(number, "entry"), rates=count(number, "learning rate"))
    what = f"{change} in {runs.middle_path.name}"
    if found is None:
        raise CheckSkipped(f"{what}; the script does not resume from the copy: {execution.describe_failure()}")
    if found:
        runs.reached[group] = {one.group for one in found}
        return f"{what}; that changed {', '.join(one.group for one in found)} at step {runs.script.steps}"
    if not runs.is_finite:
        raise CheckSkipped(f"{what}; the resumed run ends with NaN or infinite weights, which hide the change")
    differing = {gap.group for gap in runs.group_differences}
    if group == STEP:
        is_other_at_end = bool(differing & {STEP, OPTIMIZER_STEP}) or has_other_step_count(runs)
    else:
        is_other_at_end = group in differing
    if not is_other_at_end:  # such as a learning rate that the script computes from the step
        runs.unread.append(group)
        raise CheckSkipped(f"{what}; the script computes {group} anew, and ends with the right value")
    runs.lost.append(group)
    lost = f"nothing changed at step {runs.script.steps}, so the script does not restore it"
    raise CheckFailed(f"{group}: {what}, and {lost}: {IMPERATIVES[group]}")


def check_weights_loaded_correctly(runs: Runs) -> str:
    """Resume with a learning rate of 0 and betas of 1: the weights and moments at the end are those that were loaded.

    Skipped where the script takes its learning rate or betas from elsewhere: the steps then change all tensors.
    """
    if OPTIONS not in runs.middle_state.groups or {OPTIONS, SCHEDULER}.intersection(runs.lost + runs.unread):
        raise CheckSkipped("the script does not take its learning rate from the checkpoint")
    with runs.deleted_afterwards("frozen"):
        resumed = runs.resume_run("frozen", change=freeze_optimizer)
        if not resumed.is_done:
            raise CheckSkipped(f"with a learning rate of 0: {resumed.describe_failure()}")
        frozen = runs.state_at_end(resumed)
        values = runs.middle_state.values
        given = {
            name: option_value_without_updates(name, values[name].value) for name in runs.middle_state.names_in(OPTIONS)
        }
        if not all(name in frozen.values and frozen.values[name].value == value for name, value in given.items()):
            raise CheckSkipped("the script does not take its learning rate and betas from the checkpoint")
        found = list(find_wrongly_restored_tensors(runs, frozen))
    if found and not runs.has_other_weights:
        raise CheckSkipped(f"the script changes {found[0].why.partition(' is ')[0]} without its optimizer")
    if found:
        runs.misloaded += found
        raise CheckFailed(f"{found[0].why}{and_more(len(found) - 1)}: {IMPERATIVES[found[0].group]}")
    runs.is_in_place = True
    weights, moments = (len(runs.middle_state.names_in(group)) for group in (WEIGHTS, MOMENTS))
    what = f"{count(weights, 'weight')} and {count(moments, 'moment')}"
    return f"after steps with a learning rate of 0, {what} equal those in {runs.middle_path.name}"


def find_wrongly_restored_tensors(runs: Runs, frozen: CheckpointContents) -> Iterator[Cause]:
    """Return each weight and moment that steps should not have changed, and that is not as in the checkpoint."""
    distances = distance_by_differing_tensor(runs.middle_state, frozen)
    for name in runs.middle_state.names_in(WEIGHTS):
        if name in distances and not _COUNTED.search(name):
            yield Cause(WEIGHTS, f"the weight `{name}` is not the one in the checkpoint")
    moments = [name for name in runs.middle_state.names_in(MOMENTS) if name.rpartition(".")[2] in _MOMENTS]
    changed = [name for name in moments if name in distances and not distances[name].rel_l2 <= _SAME]
    saved = {name: runs.middle_state.read_tensor(name) for name in moments} if changed else {}
    for name in changed:
        end = frozen.read_tensor(name)
        alike = (one for one in moments if saved[one].shape == end.shape and np.allclose(saved[one], end, _SAME, 0))
        origin = next(alike, None)
        where = f"`{origin}` of the checkpoint" if origin else "not the one in the checkpoint"
        yield Cause(MOMENTS, f"the optimizer's `{name}` is {where}")


def check_same_final_state(runs: Runs) -> str:
    """Check that the resumed run ends as the uninterrupted one, or say what differs and why."""
    # the first tensors that differ in files which both runs wrote beside their checkpoints
    whole, resumed = (execution.run for execution in (runs.uninterrupted, runs.resumed_run))
    ours = read_tensors_beside_checkpoints(whole, runs.checkpoint_paths.values())
    theirs = read_tensors_beside_checkpoints(
        resumed, (checkpoint.path for checkpoint in checkpoints_by_step(resumed).values())
    )
    outputs = [gap.first for gap in group_differences(ours, theirs, runs.control_tolerance)]
    if not runs.group_differences and not outputs and not runs.lost:
        close = "bit for bit" if runs.control_tolerance.is_exact else f"within {4 * runs.control_tolerance.largest:.2g}"
        tensors, entries = len(runs.last_state.tensors), len(runs.last_state.values)
        return f"step {runs.script.steps}: {count(tensors, 'tensor')} and {count(entries, 'entry')} equal, {close}"
    differing = {gap.group for gap in runs.group_differences}
    if differing == {RANDOM} == runs.reached.get(RANDOM) and not outputs:
        idle = f"changing it in {runs.middle_path.name} changed no other state, so these steps do not use it"
        first = runs.group_differences[0].first
        return f"step {runs.script.steps}: only the random state differs (`{first}`); {idle}"
    seen = "; ".join(gap.describe_difference() for gap in runs.group_differences[:3]) or ", ".join(outputs[:3])
    causes = chain(observed_causes(runs), causes_by_elimination(runs, outputs))
    group, why, hint = next(causes)
    different = f"different at step {runs.script.steps}: {seen}"
    raise CheckFailed(f"{different}; cause: {why}; hint: {hint or IMPERATIVES[group]}")


def observed_causes(runs: Runs) -> Iterator[Cause]:
    """Yield causes that a changed copy, the number of steps, or entries that depend on one group alone have shown."""
    if runs.lost:
        yield Cause(runs.lost[0], f"{' and '.join(runs.lost)} in the checkpoint not restored")
    yield from runs.misloaded
    if has_other_step_count(runs):
        yield Cause(STEP, "step: the resumed run took another number of steps")
    groups, gaps = runs.middle_state.groups, {gap.group: gap for gap in runs.group_differences}
    if OPTIMIZER_STEP in gaps:
        name = gaps[OPTIMIZER_STEP].first
        before, expected, found = (
            float(state.values[name].value if name in state.values else state.read_tensor(name))
            for state in (runs.middle_state, runs.last_state, runs.resumed_state)
        )
        if expected - before < runs.script.steps - runs.script.save_every and SCALER not in groups:
            yield Cause(SCALER, "the script skips optimizer steps, but the checkpoint contains no gradient scaler")
        group = OPTIMIZER_STEP if runs.uninterrupted_losses_by_step else STEP
        yield Cause(group, f"{group}: the optimizer counts {expected:.0f} steps, and {found:.0f} after a resume")
    for group in (SCHEDULER, SCALER, DATA, RANDOM):
        if group in gaps:
            yield Cause(group, f"{group}: the script does not continue with the one in {runs.middle_path.name}")
    if OPTIONS in gaps and SCHEDULER not in groups:
        yield Cause(SCHEDULER, f"{gaps[OPTIONS].describe_difference()}; the checkpoint contains no scheduler")
    if OPTIONS in gaps:
        yield Cause(OPTIONS, gaps[OPTIONS].describe_difference())


def causes_by_elimination(runs: Runs, outputs: list[str]) -> Iterator[Cause]:
    """Yield the causes that remain after `observed_causes`; the last one always applies."""
    groups, gaps = runs.middle_state.groups, {gap.group for gap in runs.group_differences}
    if has_other_first_loss(runs) and RANDOM in groups:
        yield Cause(DATA, "data position: all states were restored, but the first loss differs, so the batch does")
    if has_other_first_loss(runs):
        why = "random state or data position: the first loss differs; the checkpoint contains no random state"
        yield Cause(RANDOM, why)
    if OPTIONS in runs.unread and gaps and runs.uninterrupted_losses_by_step is not None:
        yield Cause(OPTIONS, f"{OPTIONS}: the script does not load them; only the first learning rate differs")
    if outputs and gaps <= {EMA}:
        why = f"EMA, or another state that is not in the checkpoint: `{outputs[0]}`, saved at the end, differs"
        yield Cause(EMA, why)
    if gaps == {EMA}:
        yield Cause(EMA, "EMA: only the averaged weights differ")
    if runs.uninterrupted_losses_by_step is None:
        lacking = "" if RANDOM in groups else "; the checkpoint contains no random state"
        hint = "pass --loss with a pattern that matches one loss at each step"
        yield Cause(OTHER, f"unknown without the loss of each step{lacking}", hint)
    if runs.is_in_place:
        yield Cause(OPTIONS, f"{OPTIONS}: weights and moments were restored, but the first optimizer step differs")
    yield Cause(MOMENTS, f"{MOMENTS}: the first loss is equal, but the first optimizer step differs")


def has_other_first_loss(runs: Runs) -> bool:
    try:
        return not is_same_loss(runs, *losses_after_checkpoint(runs))
    except (CheckFailed, CheckSkipped):
        return False
