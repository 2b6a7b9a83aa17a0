"""Choose the commands that fix findings: as few as can do it, and none that a dry run refuses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.checkpoints.account import Account
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.conversion.consolidate import consolidate
from ckptkit.conversion.convert import convert, draft_salvage
from ckptkit.conversion.reshard import reshard
from ckptkit.conversion.salvaging.repair import look_at_sizes, look_at_structure
from ckptkit.diagnosis.exports import repaired
from ckptkit.diagnosis.finding import SHARDS, Finding, Fix, Value, group
from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, NotACheckpoint, Occupied, Unsafe, Unsupported, Usage
from ckptkit.io.path import is_remote
from ckptkit.state.options import ConvertOptions
from ckptkit.state.report import Converted

_MAKERS: dict[str, Callable[..., Converted]] = {"consolidate": consolidate, "convert": convert, "reshard": reshard}


def dry_run_fix(fix: Fix, checkpoint: Checkpoint) -> Trial:
    """Return the error that a command for this checkpoint would end with, as far as metadata and sizes tell.

    A remote checkpoint is not tried, unless it is damaged.
    """
    options = dict(fix.options)
    try:
        if "salvage" in options:
            return judge_salvage(dry_run_salvage(fix, checkpoint))
        if is_run_here(fix) and not is_remote(checkpoint.path):
            output = options.get("fix", fix.paths[-1])
            run_fix(fix, checkpoint, str(output), dry_run=True, overwrite=True)
    except (Corrupt, Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage) as error:
        return Trial(error)
    except (IOFailure, Occupied):  # another disk or another destination helps
        pass
    return Trial()


def is_run_here(fix: Fix) -> bool:
    """Return whether a command writes another checkpoint."""
    return fix.verb in _MAKERS or "fix" in dict(fix.options)


def run_fix(fix: Fix, checkpoint: Checkpoint, output: str | Path, **more: Any) -> Converted:
    """Run a command for this checkpoint, with another output and `more` options."""
    if fix.verb not in _MAKERS:
        return consolidate(repaired(checkpoint), output, **more)
    return _MAKERS[fix.verb](checkpoint, output, **options_of(fix), **more)


def options_of(fix: Fix) -> dict[str, Any]:
    """Return the options of a command, without the directories that the checkpoint has already."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in fix.options}
    return {name: value for name, value in options.items() if name != "also"}


def dry_run_salvage(fix: Fix, checkpoint: Checkpoint) -> Account:
    """Return what a salvage would lose and fill, as if the bytes of all tensors had been found undamaged."""
    look = look_at_sizes if is_remote(checkpoint.path) else look_at_structure
    asked = ConvertOptions.of({}, **{"to": "hf", **options_of(fix)})
    salvaged = draft_salvage(checkpoint.with_base(asked.base), Path(fix.paths[1]), asked, look).salvaged
    assert salvaged is not None
    return salvaged


def judge_salvage(found: Account) -> Trial:
    """Return how many of the weights a salvage keeps; an error if it would only copy those of another checkpoint."""
    weights = found.weights
    if weights.filled and not weights.own:
        return Trial(Corrupt(f"{weights.share(weights.filled)} come from {found.other}", path=found.source))
    words = [f"keeps {weights.share(weights.own)}"]
    words += [f"takes {weights.share(weights.filled)} from {found.other}"] if weights.filled else []
    words += [f"loses {weights.share(weights.lost)}"] if weights.lost else []
    return Trial(remark=", ".join(words) if weights.filled or weights.lost else "")


_ALONE = frozenset(["include", "salvage"])  # look at what these make before you do more to it
_RESHARD, _CONVERT, _EXPORT = "reshard", "convert", "consolidate"


class Trial(NamedTuple):
    """What a dry run of a command shows: the error that it would end with, and what there is to say of its result."""

    error: CkptError | None = None
    remark: str = ""


DryRun = Callable[[Fix], Trial]


@dataclass(frozen=True, slots=True)
class ChosenFixes:
    """The findings with the commands that fix them, and notes on those that no command fixes."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def choose_fixes(findings: Iterable[Finding], checkpoint: Checkpoint, dry_run: DryRun) -> ChosenFixes:
    """Return the findings, grouped, with the fewest commands that fix them and that `dry_run` finds no error in."""
    found = group(findings)
    if any(one.code == "other_model" for one in found):  # no command makes the model that is wanted
        return ChosenFixes(tuple(replace(one, fixed_by=None) for one in found))
    own = list(dict.fromkeys(one.fixed_by for one in found if one.fixed_by))
    joint = join_all(own, is_sharded=checkpoint.model_component.reader.name == SHARDS)
    trials = Trials(dry_run, {})
    chosen = {fix: trials.first(joint[fix], fix) for fix in own}
    refused = {fix: error for fix in own if chosen[fix] is None and (error := trials.known[fix].error)}
    notes = [f"`{fix}` would fail with: {error.message}{hint_of(error)}" for fix, error in refused.items()]
    taken = dict.fromkeys(fix for fix in chosen.values() if fix)
    notes += [f"`{fix}`: {remark}" for fix in taken if (remark := trials.known[fix].remark)]
    return ChosenFixes(
        tuple(replace(one, fixed_by=chosen[one.fixed_by]) if one.fixed_by else one for one in found), tuple(notes)
    )


def hint_of(error: CkptError) -> str:
    return f" ({error.hint})" if error.hint else ""


@dataclass(frozen=True, slots=True)
class Trials:
    """The commands that were tried, each once, and what each trial shows."""

    dry_run: DryRun
    known: dict[Fix, Trial]

    def first(self, *fixes: Fix) -> Fix | None:
        """Return the first of the commands, or of those that do nearly the same, that is not refused; else None."""
        wanted = (other for fix in fixes for other in (fix, *others(fix)))
        return next((fix for fix in wanted if self.admits(fix)), None)

    def admits(self, fix: Fix) -> bool:
        """Return whether a command is not refused."""
        if fix not in self.known:
            self.known[fix] = self.dry_run(fix)
        return self.known[fix].error is None


def others(fix: Fix) -> Iterator[Fix]:
    """Yield commands that do nearly the same where the command itself is refused.

    A rename with `names="keep"` is not compared with the config, which another finding says is incomplete here. Files
    that cannot be written for other ranks become shards. Where nothing of a model can be saved, the checkpoint that
    would fill it is used.
    """
    options = dict(fix.options)
    if "fill_from" in options:
        yield Fix.of("doctor", Path(str(options["fill_from"])))
    elif fix.verb == _EXPORT and "rename" in options and "names" not in options:
        yield Fix.of(fix.verb, *fix.paths, **options, names="keep")
    elif fix.verb == _RESHARD:
        yield as_shards(fix)


def as_shards(fix: Fix) -> Fix:
    """Return a command that writes a checkpoint for other ranks as one that converts it to shards for them."""
    options = dict(fix.options)
    return Fix.of(_CONVERT, *fix.paths, **{**options, "to": SHARDS, "world_size": options["to"]})


def join_all(fixes: Collection[Fix], *, is_sharded: bool) -> dict[Fix, Fix]:
    """Return by each command the one that does the same as all with its verb and paths, if they do not disagree.

    Where the checkpoint `is_sharded` already, a command that writes it for other ranks can convert it too.
    """
    own = {fix: fix for fix in fixes}
    whole = {fix.paths for fix in own if fix.verb == _CONVERT and ("to", SHARDS) in fix.options}
    for fix in fixes if is_sharded else ():
        if fix.verb == _RESHARD and fix.paths in whole:
            own[fix] = as_shards(fix)
    alike: dict[tuple[object, ...], list[Fix]] = {}
    for fix, same in own.items():
        if not _ALONE & dict(fix.options).keys():
            alike.setdefault((same.verb, *fix.paths), []).append(fix)
    found = dict(own)
    for members in alike.values():
        joint = join([own[fix] for fix in members])
        found |= dict.fromkeys(members, joint) if joint else {}
    return found


def join(fixes: Collection[Fix]) -> Fix | None:
    """Return one command with the options of several that have its verb and paths; None where two disagree."""
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
