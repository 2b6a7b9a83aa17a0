"""The first checks of a script: it runs, saves what ckptkit recognizes, and resumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import isfinite

from ckptkit.plugins.resume_proof.runs import Runs, files_of_checkpoint
from ckptkit.plugins.resume_proof.states import IMPERATIVES, OTHER, SCHEDULER, STEP, list_damage
from ckptkit.training.smoke.run_check import CheckFailed, CheckSkipped
from ckptkit.words import count, format_bytes

_LONGEST = 60  # characters of a name that are shown; names of callbacks may have hundreds
_SHOWN = 3  # lines of output that a message quotes
_NO_LOSS = "correct it, or leave out --loss to compare only checkpoints"
_COPIES = 3  # of all checkpoints of a run: the uninterrupted run, the resumed one, and a third beside them


def check_runs_and_saves(runs: Runs) -> str:
    """Check that the script ends, stops at the last step, and saves a checkpoint in the middle and at the end."""
    script, done = runs.script, runs.uninterrupted
    runs.require_success(done, "the script did not end" if done.exit_code is None else "the script failed")
    steps = sorted(runs.checkpoint_paths)
    if not steps:
        files = sorted(str(file.relative_to(done.run)) for file in files_of_checkpoint(done.run))
        if not files:
            hint = "pass {run} to the option that sets its output directory"
            raise CheckFailed(f"the script saved nothing in {{run}}: {hint}")
        named = "no checkpoint is named by its step, as `step_4` is"
        raise CheckFailed(f"{named}; found {', '.join(files[:3])}: put the step into the name")
    if max(steps) > script.steps:
        hint = "pass {steps} to the option that ends the training"
        raise CheckFailed(f"expected a last checkpoint at step {script.steps}, found one at {max(steps)}: {hint}")
    if runs.overwrites_checkpoints and script.save_every not in steps:
        name = runs.checkpoint_paths[script.steps].name
        raise CheckFailed(f"each save replaces {name}, faster than ckptkit can copy it: put the step into the name")
    missing = [step for step in (script.save_every, script.steps) if step not in steps]
    if missing:
        found = ", ".join(map(str, steps))
        expected = f"expected checkpoints at steps {script.save_every}, {script.steps}"
        raise CheckFailed(f"{expected}, found {found}: {hint_on_missing_checkpoint(runs)}")
    names = ", ".join(dict.fromkeys(runs.checkpoint_paths[step].name for step in steps))
    ranks = f" on {count(runs.nproc, 'rank')}" if script.has_nproc_placeholder else ""
    result = f"{script.steps} steps{ranks}, saved {names}"
    if runs.has_kept_first_checkpoint or runs.overwrites_checkpoints:
        return result
    remark = f"the script deletes {runs.middle_path.name}, so ckptkit stopped a second run to get it"
    return f"{result}; {remark}: keep at least two"


def hint_on_missing_checkpoint(runs: Runs) -> str:
    """Return what to do about a checkpoint that is missing at the end of the uninterrupted run."""
    if runs.was_deleted:
        return f"the script deletes the one of step {runs.script.save_every}: keep at least two checkpoints"
    if "{save_every}" not in runs.script.command:
        return "pass {save_every} to the option that sets how often it saves"
    return "save every {save_every} steps, and keep at least two checkpoints if the script deletes older ones"


def check_recognized(runs: Runs) -> str:
    """Check that both checkpoints can be read and are undamaged, and say what they contain."""
    for step in (runs.script.save_every, runs.script.steps):
        damage = list_damage(runs.checkpoint_paths[step])
        if damage:
            raise CheckFailed(f"ckptkit verify found a problem: {damage[0]}")
    sizes = (file.stat().st_size for path in runs.checkpoint_paths.values() for file in files_of_checkpoint(path))
    needed, free = _COPIES * sum(sizes), shutil.disk_usage(runs.room).free
    if free < needed:
        message = f"the proof needs {format_bytes(needed)} in {runs.room}, and the disk has {format_bytes(free)} free"
        raise CheckFailed(f"{message}: use a smaller model, or another --run")
    state = runs.middle_state
    if not state.tensors:
        raise CheckFailed(f"{state.path.name} contains no tensors")
    known = [group for group in state.groups if group != OTHER]
    who = f" by {state.trainer}" if state.trainer else ""
    unread = f"; not read: {state.unread[0]}" if state.unread else ""
    missing = "" if SCHEDULER in state.groups else "; no scheduler state"
    return f"{' and '.join(state.formats)}{who}: {', '.join(known)}{missing}{unread}"


def check_finite_losses(runs: Runs) -> str:
    """Check that the uninterrupted run printed a finite loss for each step."""
    if runs.script.loss is None:
        raise CheckSkipped("no --loss: only checkpoints are compared")
    losses = runs.uninterrupted_losses_by_step
    if not runs.uninterrupted.losses and runs.script.find_loss_file_and_key:
        file, key = runs.script.find_loss_file_and_key
        there = "" if (runs.uninterrupted.run / file).is_file() else ", which does not exist"
        raise CheckFailed(f"--loss: found no line with the key {key} in {{run}}/{file}{there}: {_NO_LOSS}")
    if not runs.uninterrupted.losses:
        lines = ", ".join(f"`{line}`" for line in runs.uninterrupted.last_output_lines(_SHOWN)) or "nothing"
        ending = f"matches no line of the output, which ends with {lines}"
        raise CheckFailed(f"--loss: `{runs.script.loss}` {ending}: {_NO_LOSS}")
    if losses is None:  # more can also be of an evaluation, or of a step after the last
        found = len(runs.uninterrupted.losses)
        expected = f"expected a loss for each of {runs.script.steps} steps"
        raise CheckSkipped(f"--loss: {expected}, found {found}: correct the pattern")
    means = [sum(step) / len(step) for step in losses]
    if not all(map(isfinite, means)):
        step = next(i for i, mean in enumerate(means, 1) if not isfinite(mean))
        raise CheckFailed(f"the loss of step {step} is {means[step - 1]}: lower the learning rate")
    half = len(means) // 2
    early, late = sum(means[:half]) / half, sum(means[half:]) / (len(means) - half)
    falls = "falls" if late < early else "does not fall, as it need not in so few steps"
    return f"{len(means)} losses; the mean {falls}: {early:.4g}, then {late:.4g}"


def check_determinism(runs: Runs) -> str:
    """Measure how far a second run of the same command is from the first."""
    tolerance = runs.control_tolerance
    names = ", ".join(name[-_LONGEST:] for name in sorted(tolerance.volatile)[:3])
    volatile = f"; volatile: {names}" if names else ""
    if tolerance.is_exact:
        return f"a second run is equal, bit for bit{volatile}"
    distance = f"{tolerance.largest:.2g} (relative)"
    return f"a second run differs by {distance}; resumed runs may differ by 4 times that{volatile}"


def check_resumed_run_reaches_last_step(runs: Runs) -> str:
    """Check that a fresh process resumes from a copy of the middle checkpoint, and ends at the last step."""
    execution = runs.resumed_run
    if not execution.is_done and has_other_step_count(runs):
        steps = f"{len(execution.losses)} losses, expected {runs.script.steps - runs.script.save_every}"
        printed = f"{STEP}: the resumed run printed {steps}, and failed"
        raise CheckFailed(f"{printed}: {IMPERATIVES[STEP]}; output: {execution.log}")
    name = runs.middle_path.name
    runs.require_resumed(execution, f"from {name}")
    runs.state_at_end(execution)
    return f"from a copy of {name} to step {runs.script.steps}"


def has_other_step_count(runs: Runs) -> bool:
    """Return whether the resumed run printed the losses of more or fewer steps than it should have taken."""
    script = runs.script
    if runs.uninterrupted_losses_by_step is None:
        return False
    found = len(runs.resumed_run.losses)
    expected = len(runs.uninterrupted_losses_by_step[0]) * (script.steps - script.save_every)
    return found != expected if runs.resumed_run.is_done else found > expected


def check_first_loss(runs: Runs) -> str:
    """Check the first loss after the resume against the same step of the uninterrupted run."""
    expected, found = losses_after_checkpoint(runs)
    first = f"the first loss after {runs.middle_path.name}"
    losses = f"expected {format_losses(expected)}, found {format_losses(found)}"
    if not is_same_loss(runs, expected, found):
        hint = "the weights, the data or the random state differ from the checkpoint (see the checks below)"
        raise CheckFailed(f"{first}: {losses}: {hint}")
    seen = f" is {format_losses(found)} in both runs" if expected == found else f" is close: {losses}"
    wanted = len(runs.uninterrupted.losses) // runs.script.steps * (runs.script.steps - runs.script.save_every)
    printed = len(runs.resumed_run.losses)
    other = f"; the resumed run printed {printed} losses, expected {wanted}" if printed != wanted else ""
    return f"{first}{seen}{other}"


def losses_after_checkpoint(runs: Runs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the losses of the first step after the checkpoint, in the uninterrupted and in the resumed run."""
    if runs.uninterrupted_losses_by_step is None:
        raise CheckSkipped("no losses to compare")
    each = len(runs.uninterrupted_losses_by_step[0])
    found = runs.resumed_run.losses[:each]
    if len(found) < each:
        raise CheckFailed("the resumed run printed no loss")
    return runs.uninterrupted_losses_by_step[runs.script.save_every], tuple(sorted(found))


def is_same_loss(runs: Runs, expected: tuple[float, ...], found: tuple[float, ...]) -> bool:
    """Return whether two losses are equal; if two runs of the command are not, whether they are within a hundredth."""
    pairs = list(zip(expected, found, strict=True))
    return expected == found or (
        not runs.control_tolerance.is_exact and all(abs(a - b) <= 0.01 * abs(a) for a, b in pairs)
    )


def format_losses(losses: tuple[float, ...]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses[:2])


# In this order. Without one that is `needed`, the others say nothing.
CHECKS: dict[str, Callable[[Runs], str]] = {
    "run": check_runs_and_saves,
    "checkpoints": check_recognized,
    "losses are finite": check_finite_losses,
    "deterministic": check_determinism,
    "resume": check_resumed_run_reaches_last_step,
    "first loss": check_first_loss,
}
NEEDED = frozenset({"run", "checkpoints", "losses are finite", "deterministic", "resume"})
