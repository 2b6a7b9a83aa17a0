"""The result of a conversion or a dry run, and its summary in text."""

from __future__ import annotations

import re
import resource
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ckptkit.checkpoints.find_components import LOST, LeftBehind, describe_not_copied
from ckptkit.checkpoints.salvage_account import Account
from ckptkit.engine.copy import Copied
from ckptkit.engine.ledger import Ledger
from ckptkit.errors import Caution
from ckptkit.io.allocation import find_free_bytes
from ckptkit.layout.plan import RecipeVerdict
from ckptkit.models.fit import join_few_names
from ckptkit.models.names.weights import NOT_ASKED, UNKNOWN, LeftOut
from ckptkit.state.draft import Conversion
from ckptkit.summary import Summarized
from ckptkit.words import command_line, count, describe_checksums, format_bytes


class Written(NamedTuple):
    """The result of writing: a ledger for each draft, and the check of all drafts (None until all parts are finished).

    `remarks` are notes of the store that the output is in. `kept_bytes` were already there from an earlier call.
    """

    ledgers: Sequence[Ledger]
    copied: Sequence[Copied] | None = None
    remarks: Sequence[str] = ()
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Converted(Summarized):
    """The result of a conversion. Keys of `renamed` and names in `dropped` are the source's names.

    `entries` counts the source entries: "written", "dropped" by a rule or an option, and "left" out although no rule or
    option asked for it. `left_behind` are files of the sources that were neither read nor copied. `source` is the first
    of the `sources`. An average has several, with `weights` that add up to 1. `wrapper` is the key above the model that
    was removed; `world_size` the number of ranks of a sharded output. Of the source's bytes, `checked_bytes` were
    verified with recorded checksums; `unchecked_bytes` have no checksum. `resumed_bytes` of the output were already
    written by an earlier call. `completed` are the entries, by their names in the output, that are zeros because the
    sources lack them. `is_finished` is False if this was only one part of the work; `plan` is a hash that is equal for
    all parts. `salvaged` is the account of the damage in the source, for a salvage. `warnings` say what may be lost,
    and what you must do before you can use the output; `notes` are all other remarks.
    """

    source: Path
    sources: tuple[Path, ...]
    weights: tuple[float, ...]
    output: Path
    format: str
    files: Mapping[str, int]
    tensors: int
    nbytes: int
    renamed: Mapping[str, str]
    dropped: Sequence[LeftOut]
    entries: Mapping[str, int]
    left_behind: Sequence[LeftBehind]
    cast: Mapping[str, str]
    notes: Sequence[str]
    warnings: Sequence[str] = ()
    wrapper: str = ""
    world_size: int | None = None
    completed: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    copies: int = 0
    checked_bytes: int = 0
    unchecked_bytes: int = 0
    resumed_bytes: int = 0
    free_bytes: int | None = None
    peak_rss_bytes: int = 0
    dry_run: bool = False
    is_finished: bool = True
    plan: str = ""
    salvaged: Account | None = None

    def summary(self) -> Iterator[str]:
        yield from self.salvaged.warnings(self.output) if self.salvaged else ()
        yield source_and_output_line(self, "averaged" if self.weights else "converted")
        yield from amount_lines(self)
        yield from (f"warning: {text}" for text in self.warnings)


def predict_result(conversion: Conversion, seconds: float) -> Converted:
    """Return the result of a dry run."""
    drafts = conversion.drafts
    sizes = conversion.file_sizes
    sources = tuple(origin.path for origin in conversion.origins)
    layouts = [layout for draft in drafts for layout in draft.sources]
    remarks = [*conversion.notes, *(remark for draft in drafts for remark in draft.remarks)]
    dropped = [group for entries in conversion.entries for group in entries.dropped_by_reason()]
    left = sum(group.entries for group in dropped if group.why in NOT_ASKED)
    counts = {
        "written": sum(len(entries.written) for entries in conversion.entries),
        "dropped": sum(group.entries for group in dropped) - left,
        "left": left,
    }
    return Converted(
        source=sources[0],
        sources=sources,
        weights=conversion.options.weights,
        output=conversion.output,
        format=conversion.options.to,
        files={conversion.output.name: sum(sizes.values())} if conversion.is_file else sizes,
        tensors=sum(len(draft.wanted.tensors) for draft in drafts),
        nbytes=sum(draft.wanted.nbytes for draft in drafts),
        renamed={old: new for draft in drafts for old, new in draft.renamed.items()},
        dropped=dropped,
        entries=counts,
        left_behind=conversion.left_behind,
        cast={name: change for draft in drafts for name, change in draft.cast.items() if name in draft.wanted.tensors},
        notes=[remark for remark in remarks if not isinstance(remark, Caution)],
        warnings=[
            *warnings_on_lost(dropped, conversion.left_behind),
            *(one for one in remarks if isinstance(one, Caution)),
        ],
        wrapper=conversion.wrapper,
        world_size=conversion.world_size,
        completed=conversion.completed,
        seconds=seconds,
        copies=sum(len(tensor.chunks) for layout in layouts for tensor in layout.tensors.values()),
        free_bytes=find_free_bytes(conversion.output),
        dry_run=True,
        plan=conversion.fingerprint,
        salvaged=conversion.salvaged,
    )


def warnings_on_lost(dropped: Iterable[LeftOut], not_copied: Iterable[LeftBehind]) -> list[str]:
    """Return a warning for each group of tensors, and each kind of state files, that no rule or option drops."""
    lines = [
        f"not copied: `{lost.name}`, {count(lost.entries, 'entry')}, {format_bytes(lost.nbytes)} ({lost.why}); "
        + (f"--include '{lost.name}*' writes it alone" if lost.why == UNKNOWN else "`ckptkit convert` copies it")
        for lost in dropped
        if lost.why in NOT_ASKED
    ]
    return lines + describe_not_copied([lost for lost in not_copied if lost.why in LOST], "not copied")


def complete_result(conversion: Conversion, predicted: Converted, written: Written, seconds: float) -> Converted:
    """Return the result of a finished conversion. `predicted` is the result of its dry run."""
    copied, ledgers = written.copied or (), written.ledgers
    noted = sorted({name for ledger in ledgers for name in ledger.noted})
    last = predicted.sources[-1]
    notes = list(verdict_sentences(conversion, noted)) if written.copied is not None else []
    if noted and predicted.weights:
        notes.append(f"integers and booleans that differ come from {last}: {join_few_names(noted)}")
    uncompared = [path for done in copied for path in done.uncompared]
    if uncompared:
        skipped = f"{count(len(uncompared), 'file')} of the source, because ckptkit read only a part"
        hint = f"{command_line('verify', uncompared[0].parent)} compares whole files"
        notes.append(f"not compared with the manifest: {skipped}; {hint}")
    notes += written.remarks
    return replace(
        predicted,
        notes=[*predicted.notes, *notes],
        seconds=seconds,
        copies=0,
        checked_bytes=sum(done.checked_bytes for done in copied),
        unchecked_bytes=sum(done.unchecked_bytes for done in copied),
        resumed_bytes=sum(ledger.resumed_bytes for ledger in ledgers) + written.kept_bytes,
        free_bytes=None,
        peak_rss_bytes=peak_rss_bytes(),
        dry_run=False,
        is_finished=written.copied is not None,
    )


def verdict_sentences(conversion: Conversion, remarked: Collection[str]) -> Iterator[str]:
    """Yield the verdicts of the recipes on all their tensors."""
    judged: dict[RecipeVerdict, list[str]] = defaultdict(list)
    for draft in conversion.drafts:
        for name, recipe in draft.recipes.items():
            verdict = getattr(recipe, "verdict", None)
            if verdict is not None and name in draft.wanted.tensors:
                judged[verdict].append(name)
    yield from (verdict.verdict_sentence(names, set(remarked)) for verdict, names in judged.items())


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process, in bytes.

    On Linux, `ru_maxrss` includes the memory of the parent before exec; `VmHWM` does not.
    """
    with suppress(OSError):
        if found := re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def source_and_output_line(done: Converted, verb: str) -> str:
    """Return a line that names the sources and the output."""
    if done.weights:
        does = "would average" if done.dry_run else verb
        return f"{does} {count(len(done.sources), 'checkpoint')} into {done.output}"
    ranks = f" for {count(done.world_size, 'rank')}" if done.world_size else ""
    if done.dry_run:
        return f"would write {done.output} from {done.source}{ranks}"
    return f"{verb} {done.source} into {done.output}{ranks}"


def amount_lines(done: Converted) -> Iterator[str]:
    """Yield lines on the amount of work, and on the checks."""
    if done.resumed_bytes:
        yield f"resumed: an earlier call had written {format_bytes(done.resumed_bytes)}"
    if not done.is_finished:
        yield f"this part is done; when all are: ckptkit finalize {quote(str(done.output))}"
    elif done.dry_run:
        room = "" if done.free_bytes is None else f"; {format_bytes(done.free_bytes)} are free"
        yield f"{count(done.copies, 'chunk')} to read, {format_bytes(done.nbytes)} to write{room}"
    else:
        amount = f"{count(done.tensors, 'tensor')}, {format_bytes(done.nbytes)}"
        speed = f"{done.seconds:.2f} s ({format_bytes(done.nbytes / done.seconds)}/s)"
        yield f"{amount} in {speed}; peak memory {format_bytes(done.peak_rss_bytes)}"
        yield describe_checksums(done.checked_bytes, done.unchecked_bytes)
