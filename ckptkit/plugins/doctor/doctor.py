"""Find what will break when a checkpoint is loaded, and the command that fixes it. Reads no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, path_of_source, step_checkpoints_in_run
from ckptkit.checkpoints.examination.facts import Certainty
from ckptkit.checkpoints.find_components import describe_not_copied
from ckptkit.checkpoints.partial_file import find_partial_file_error, why_maybe_partial_file
from ckptkit.errors import and_more, too_small_error
from ckptkit.io.path import remarks_if_taken_from_hub
from ckptkit.layout.gc_pause import collector_paused
from ckptkit.models.companions import CONFIG
from ckptkit.plugins.doctor.choose_fixes import choose_fixes, dry_run_fix, run_fix
from ckptkit.plugins.doctor.damage import (
    find_damage,
    find_inconsistencies,
    find_unreadable_torch_metadata,
    problems_by_component,
)
from ckptkit.plugins.doctor.exports import (
    find_broken_export,
    find_empty_adapter,
    find_invalid_config_dtype,
    find_missing_index,
    find_stray_adapter_config,
)
from ckptkit.plugins.doctor.finding import Finding, Fix
from ckptkit.plugins.doctor.load_target import LoadTarget, TargetModel
from ckptkit.plugins.doctor.names import find_name_mismatches, find_wrapper_prefixes
from ckptkit.plugins.doctor.optimizer import (
    find_group_differences,
    find_missing_states_if_sharded,
    find_rank_dependent_state,
    find_unlisted_parameters,
    list_missing_states,
)
from ckptkit.plugins.doctor.other_checkpoint import compare_with_checkpoint
from ckptkit.plugins.doctor.shapes import (
    comparable_ties,
    find_missing_towers_and_layers,
    find_shape_mismatches,
    find_tie_problems,
)
from ckptkit.plugins.doctor.weights import (
    find_ambiguous_model,
    find_declared_quantized,
    find_extra_state,
    find_missing_mtp_layers,
    find_tokens_without_row,
    find_undeclared_quantized,
    find_unmerged_adapters,
)
from ckptkit.state.master_weights import REMAINDERS, master_remainder_entries
from ckptkit.summary import Summarized, first_lines_and_more
from ckptkit.words import command_line, count

# what doctor looks for in a readable checkpoint, in the order of the output
KINDS: tuple[Callable[[LoadTarget], Iterator[Finding]], ...] = (
    find_unreadable_torch_metadata, find_missing_index, find_invalid_config_dtype, find_stray_adapter_config,
    find_empty_adapter, find_ambiguous_model, find_unmerged_adapters, find_undeclared_quantized,
    find_declared_quantized, find_tokens_without_row, find_extra_state, find_missing_mtp_layers, find_wrapper_prefixes,
    find_name_mismatches, find_missing_towers_and_layers, find_shape_mismatches, find_tie_problems,
    find_missing_states_if_sharded, find_rank_dependent_state, find_group_differences, compare_with_checkpoint,
    find_unlisted_parameters, find_inconsistencies,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Diagnosis(Summarized):
    """The findings on the checkpoint at `path`: what will break when it is loaded.

    `notes` are remarks that break nothing. If doctor ran a command, `fixed_by` is that command and `fixed` the
    diagnosis of its output; otherwise both are None. `compared` are the tied tensors that doctor read to compare their
    values.
    """

    path: Path
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    fixed_by: Fix | None = None
    fixed: Diagnosis | None = None
    compared: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Return whether nothing will break: in the fixed checkpoint if there is one, else in this one."""
        return self.fixed.is_ok if self.fixed else not self.findings

    @property
    def verdict(self) -> str:
        what = count(len(self.findings), "finding")
        return f"{self.path}: {what if self.findings else 'no problem found in names, shapes and metadata'}"

    @property
    def not_read(self) -> str:
        """Return which tensors doctor did not read, and the command that reads them."""
        but = f", except {' and '.join(f'`{name}`' for name in self.compared)}" if self.compared else ""
        return f"tensors were not read{but}: run {command_line('verify', self.path)} to check them"

    def summary(self) -> Iterator[str]:
        yield self.verdict
        yield from first_lines_and_more((f"{one.code}: {one.line}" for one in self.findings), len(self.findings))
        yield from [f"fixed: {self.fixed.verdict}"] if self.fixed else []
        yield self.not_read


@collector_paused()
def doctor(
    ckpt: Source,
    *,
    model: str | Path | None = None,
    like: Source | None = None,
    world_size: int | None = None,
    fix: str | Path | None = None,
) -> Diagnosis:
    """Find what will break when you load the checkpoint at `ckpt`, or the latest of the run there.

    doctor checks the checkpoint alone, or against a target: the `model` in a directory, a config.json or a Hub
    repository; a job of `world_size` ranks; or the checkpoint `like`, which loads there. It finds the damage that
    `verify` finds with `fast`. It reads no tensors, except two that should be tied: `not_read` says so. With `fix`,
    doctor runs the one command that is certain to help, writes its output to the directory `fix`, and diagnoses that
    output too.

    Raises `NotACheckpoint` if there is no checkpoint, `Usage` if the model does not exist.
    """
    if world_size is not None and world_size < 1:
        raise too_small_error("world_size", 1, world_size)
    checkpoint = Checkpoint.open(ckpt)
    case, findings = open_load_target(checkpoint, model, like, world_size)
    found = [finding for kind in KINDS for finding in kind(case)] if case else []
    findings += sorted(found, key=lambda finding: finding.code != "config")  # another model explains the others
    chosen, fix_notes = choose_fixes(findings, checkpoint, partial(dry_run_fix, checkpoint=checkpoint))
    notes = (
        *remarks_if_taken_from_hub(model),
        *note_on_later_unfinished_checkpoint(path_of_source(ckpt), checkpoint),
        *notes_on_skipped_checks(case),
        *fix_notes,
    )
    read = tuple(dict.fromkeys(name for tie in comparable_ties(case).items() for name in tie)) if case else ()
    diagnosis = Diagnosis(checkpoint.path, chosen, notes, compared=read)
    if fix is None:
        return diagnosis
    if not chosen:
        return replace(diagnosis, notes=(*notes, f"nothing to fix: {fix} was not written"))
    # the commands that are certain to help with every finding that suggests them
    suggested = dict.fromkeys(one.fixed_by for one in chosen if one.fixed_by)
    fixed_by = {command: [one for one in chosen if one.fixed_by == command] for command in suggested}
    certain = [command for command, those in fixed_by.items() if all(one.is_certain for one in those)]
    if len(certain) != 1:
        many = f"{len(certain)} commands would each fix a part: run one, then `ckptkit doctor` on its output"
        note = f"nothing was fixed: {many if certain else 'no fix is certain to help'}"
        return replace(diagnosis, notes=(*notes, note))
    converted = run_fix(certain[0], checkpoint, fix)
    fixed = doctor(fix, model=model, like=like, world_size=world_size)
    left_out = [f"not copied: `{entry.name}`" for entry in converted.dropped]
    left_out += describe_not_copied(converted.left_behind, "not copied")
    fixed = replace(fixed, notes=(*converted.notes, *left_out, *fixed.notes))
    return replace(diagnosis, fixed_by=certain[0], fixed=fixed)


def open_load_target(
    checkpoint: Checkpoint, model: str | Path | None = None, like: Source | None = None, world_size: int | None = None
) -> tuple[LoadTarget | None, list[Finding]]:
    """Return the checkpoint with its target, None if its model cannot be read, and the damage that was found."""
    if broken := find_broken_export(checkpoint):
        return None, broken
    damage = problems_by_component(checkpoint)
    if not damage and (part := find_partial_file_error(checkpoint)):
        damage = {checkpoint.model_component.path: [part]}
    findings = list(find_damage(checkpoint, damage, model))
    if checkpoint.model_component.path in damage:
        return None, findings
    readable = replace(checkpoint, components=tuple(part for part in checkpoint.components if part.path not in damage))
    other = None if like is None else Checkpoint.open(like)
    return LoadTarget(readable, open_model(readable, model), other, world_size), findings


def open_model(checkpoint: Checkpoint, model: str | Path | None) -> TargetModel | None:
    """Return the model that the user named, or else the one of the checkpoint's own config; None without a config."""
    if model is not None:
        return TargetModel.open(str(model))
    own = checkpoint.companions
    if own.config is None or own.found_in is None:
        return None
    return TargetModel.of(str(own.found_in / CONFIG), own.config, {}, asked=False)


def notes_on_skipped_checks(target: LoadTarget | None) -> Iterator[str]:
    """Yield the checks that doctor skipped, and differences that may be intended."""
    if target is None:
        yield "nothing else was checked"
        return
    if target.key_mismatch is None and (doubt := why_maybe_partial_file(target.checkpoint)):
        yield doubt
    states = [] if target.checkpoint.model_component.reader.is_sharded else list(list_missing_states(target))
    if states:
        what = f"`{states[0].tensor}`{and_more(len(states) - 1)}"
        yield (
            f"the optimizer has no state of {what}: the parameter is frozen, or never received a gradient. In the "
            f"second case torch's `set_optimizer_state_dict` fails; to fix that: {states[0].fix}"
        )
    if target.weights and (names := master_remainder_entries(target.layout, target.weights.layout.specs)):
        yield (
            f"the optimizer has remainders of the masters of {count(len(names), 'weight')} in {REMAINDERS}, such as "
            f"`{names[0]}`: an optimizer without remainders loads them as numbers; `--weights-from master` adds them"
        )
    yield from (one.message_with_tensor for one in target.inconsistencies if one.certainty is Certainty.NOTE)
    if target.model is None:
        if target.like is None:
            yield "no config.json is here: names and shapes were not compared (pass --model or --like)"
        return
    if target.model.reason is not None:
        yield f"names and shapes were not compared with {target.model.name}: {target.model.reason}"
    dtypes_there = {spec.dtype for name, spec in target.model.specs.items() if name in target.shapes}
    dtypes_here = {spec.dtype for name, spec in target.weights.layout.specs.items()} if target.weights else set()
    if dtypes_there and dtypes_here and dtypes_there != dtypes_here:
        one, two = (", ".join(sorted(dtype.name for dtype in dtypes)) for dtypes in (dtypes_here, dtypes_there))
        yield f"expected weights in {two} as in {target.model.name}, found {one}: a load converts them silently"


def note_on_later_unfinished_checkpoint(asked: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note if the run at `asked` has a later checkpoint that is not complete."""
    if asked == checkpoint.path or not asked.is_dir():
        return
    named = [one for one in step_checkpoints_in_run(asked) if (one.step_in_name or 0) > (checkpoint.step_in_name or 0)]
    later = [one.name for one in named if not one.is_complete]
    if later:
        yield f"later, and unfinished: {', '.join(later)}"
