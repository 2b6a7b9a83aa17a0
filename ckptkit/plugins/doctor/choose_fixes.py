"""Choose the fewest commands that fix the findings, and only commands that pass a dry run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.conversion.convert import consolidate, convert, draft_salvage, reshard
from ckptkit.conversion.salvaging.repair import survey_file_sizes, survey_structure
from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, NotACheckpoint, Occupied, Unsafe, Unsupported, Usage
from ckptkit.io.path import is_remote
from ckptkit.plugins.doctor.exports import find_complete_export
from ckptkit.plugins.doctor.finding import SHARDS, Finding, Fix, Value, group_findings
from ckptkit.state.options import ConvertOptions
from ckptkit.state.report import Converted

_MAKERS: dict[str, Callable[..., Converted]] = {"consolidate": consolidate, "convert": convert, "reshard": reshard}


_NEVER_JOINED = frozenset(["include", "salvage"])  # users should check the output of these before other changes
_RESHARD, _CONVERT, _EXPORT = "reshard", "convert", "consolidate"


class Trial(NamedTuple):
    """The result of a dry run: the error that the command would fail with, and a remark on its output."""

    error: CkptError | None = None
    remark: str = ""


DryRun = Callable[[Fix], Trial]


def dry_run_fix(fix: Fix, checkpoint: Checkpoint) -> Trial:
    """Return the error of a command's dry run for this checkpoint; for a remote one, tries only salvages."""
    options = dict(fix.options)
    try:
        if "salvage" in options:
            return dry_run_salvage(fix, checkpoint)
        if (fix.verb in _MAKERS or "fix" in options) and not is_remote(checkpoint.path):
            output = options.get("fix", fix.paths[-1])
            run_fix(fix, checkpoint, str(output), dry_run=True, overwrite=True)
    except (Corrupt, Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage) as error:
        return Trial(error)
    except (IOFailure, Occupied):  # not the command's fault: another disk or destination helps
        pass
    return Trial()


def run_fix(fix: Fix, checkpoint: Checkpoint, output: str | Path, **more: Any) -> Converted:
    """Run a fix for this checkpoint. Writes to `output`; `more` are further options."""
    if fix.verb not in _MAKERS:  # a broken export: its tensors come from the file headers instead of the index
        component = checkpoint.model_component
        broken = find_complete_export(component)
        assert broken is not None
        undamaged = replace(checkpoint, components=(replace(component, salvaged=broken[0].layout),))
        return consolidate(undamaged, output, **more)
    return _MAKERS[fix.verb](checkpoint, output, **options_without_also(fix), **more)


def options_without_also(fix: Fix) -> dict[str, Any]:
    """Return the options of a command without `also`: the open checkpoint already contains these directories."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in fix.options}
    return {name: value for name, value in options.items() if name != "also"}


def dry_run_salvage(fix: Fix, checkpoint: Checkpoint) -> Trial:
    """Return the share of the weights that a salvage keeps, as a remark. Assumes that all tensors are undamaged.

    The trial fails if every weight would come from the other checkpoint.
    """
    check = survey_file_sizes if is_remote(checkpoint.path) else survey_structure
    conversion = ConvertOptions.of({}, **{"to": "hf", **options_without_also(fix)})
    account = draft_salvage(checkpoint.with_base(conversion.base), Path(fix.paths[1]), conversion, check).salvaged
    assert account is not None
    weights = account.weights
    if weights.filled and not weights.own:
        return Trial(
            Corrupt(f"{weights.describe_fraction(weights.filled)} come from {account.other}", path=account.source)
        )
    words = [f"keeps {weights.describe_fraction(weights.own)}"]
    words += [f"takes {weights.describe_fraction(weights.filled)} from {account.other}"] if weights.filled else []
    words += [f"loses {weights.describe_fraction(weights.lost)}"] if weights.lost else []
    return Trial(remark=", ".join(words) if weights.filled or weights.lost else "")


def choose_fixes(
    findings: Iterable[Finding], checkpoint: Checkpoint, dry_run: DryRun
) -> tuple[tuple[Finding, ...], list[str]]:
    """Return the findings, grouped, with the fewest commands that fix them and that pass `dry_run`.

    Also returns notes on findings that no command fixes.
    """
    grouped = group_findings(findings)
    if any(finding.code == "other_model" for finding in grouped):  # no command can create the requested model
        return tuple(replace(finding, fixed_by=None) for finding in grouped), []
    suggested = list(dict.fromkeys(finding.fixed_by for finding in grouped if finding.fixed_by))
    joint = joined_fix_by_fix(suggested, is_sharded=checkpoint.model_component.reader.name == SHARDS)
    trial = cache(dry_run)
    chosen: dict[Fix, Fix | None] = {}
    for fix in suggested:
        # try the joint command first: one command that fixes several findings
        wanted = (other for one in (joint[fix], fix) for other in (one, *fallback_commands(one)))
        chosen[fix] = next((other for other in wanted if trial(other).error is None), None)
    refused = {fix: error for fix in suggested if chosen[fix] is None and (error := trial(fix).error)}
    hints = {fix: f" ({error.hint})" if error.hint else "" for fix, error in refused.items()}
    notes = [f"`{fix}` would fail with: {error.message}{hints[fix]}" for fix, error in refused.items()]
    kept = dict.fromkeys(fix for fix in chosen.values() if fix)
    notes += [f"`{fix}`: {remark}" for fix in kept if (remark := trial(fix).remark)]
    fixes = [chosen[finding.fixed_by] if finding.fixed_by else None for finding in grouped]
    return tuple(replace(finding, fixed_by=fix) for finding, fix in zip(grouped, fixes, strict=True)), notes


def fallback_commands(fix: Fix) -> Iterator[Fix]:
    """Yield commands to use instead, if a command fails its dry run.

    A rename with `names="keep"` skips the comparison with config.json, which may be incomplete. If the format cannot be
    written for another number of ranks, `convert` to DCP shards can. If a salvage would keep no weight, doctor points
    to the checkpoint that would have filled all of them.
    """
    options = dict(fix.options)
    if "fill_from" in options:
        yield Fix.of("doctor", Path(str(options["fill_from"])))
    elif fix.verb == _EXPORT and "rename" in options and "names" not in options:
        yield Fix.of(fix.verb, *fix.paths, **options, names="keep")
    elif fix.verb == _RESHARD:
        yield as_convert_to_shards(fix)


def as_convert_to_shards(fix: Fix) -> Fix:
    """Return the `convert` command that does the work of a `reshard`: it writes DCP shards for as many ranks."""
    options = dict(fix.options)
    return Fix.of(_CONVERT, *fix.paths, **{**options, "to": SHARDS, "world_size": options["to"]})


def joined_fix_by_fix(fixes: Collection[Fix], *, is_sharded: bool) -> dict[Fix, Fix]:
    """Map each command to one command with the options of all commands that have its verb and paths.

    Commands whose options conflict stay separate. If the checkpoint `is_sharded`, a `reshard` joins a `convert`.
    """
    equivalent = {fix: fix for fix in fixes}
    converted = {fix.paths for fix in equivalent if fix.verb == _CONVERT and ("to", SHARDS) in fix.options}
    for fix in fixes if is_sharded else ():
        if fix.verb == _RESHARD and fix.paths in converted:
            equivalent[fix] = as_convert_to_shards(fix)
    alike: dict[tuple[object, ...], list[Fix]] = {}
    for fix, same in equivalent.items():
        if not _NEVER_JOINED & dict(fix.options).keys():
            alike.setdefault((same.verb, *fix.paths), []).append(fix)
    joined = dict(equivalent)
    for members in alike.values():
        joint = join_fixes([equivalent[fix] for fix in members])
        joined |= dict.fromkeys(members, joint) if joint else {}
    return joined


def join_fixes(fixes: Collection[Fix]) -> Fix | None:
    """Return one command with the options of several that share verb and paths; None if two options conflict."""
    options: dict[str, Value] = {}
    for name, value in (option for fix in fixes for option in fix.options):
        known = options.get(name, value)
        if isinstance(known, tuple) and isinstance(value, tuple):
            options[name] = tuple(dict.fromkeys((*known, *value)))
        elif known == value:
            options[name] = value
        else:
            return None
    first = next(iter(fixes))
    return Fix.of(first.verb, *first.paths, **options)
