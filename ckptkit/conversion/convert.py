"""Convert a checkpoint from any readable format to any writable format.

Every command that writes a checkpoint is a preset of this function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, path_of_source, step_checkpoints_in_run
from ckptkit.checkpoints.examination import OF_EXPORTS, OF_SHAPES, RULES, examine_checkpoint
from ckptkit.checkpoints.examination.facts import Certainty
from ckptkit.checkpoints.find_components import LeftBehind
from ckptkit.checkpoints.manifest import FileSum, read_manifest
from ckptkit.checkpoints.partial_file import find_partial_file_error, why_maybe_partial_file
from ckptkit.checkpoints.replaceable import check_replaceable
from ckptkit.checkpoints.salvage_account import NAME as ACCOUNT
from ckptkit.conversion.build_model import build_model, choose_model_component
from ckptkit.entry_points import import_object
from ckptkit.errors import Caution, Corrupt, IOFailure, Mismatch, Unsafe, Unsupported, Usage
from ckptkit.formats import find_format_of_file_name, writable_formats
from ckptkit.io.crc32 import RESTORE, crc32
from ckptkit.io.destination import allows_other_files, to_destination
from ckptkit.io.file import is_existing_path, read_small
from ckptkit.io.path import is_remote, local_path_beside, remarks_if_taken_from_hub, to_path
from ckptkit.layout.gc_pause import collector_paused
from ckptkit.layout.wrappers import may_be_adapter
from ckptkit.models.companions import TOKENIZER_LIMIT, directories_to_search
from ckptkit.models.names.weights import NOT_ASKED, training_state_names
from ckptkit.state.directories import (
    path_below,
    require_directory_name,
    require_free_or_replaceable,
    require_outside_destination,
    require_separate_destination,
)
from ckptkit.state.draft import Conversion, draft_of_model
from ckptkit.state.options import ADAPTER, MASTER, MODULE, ConvertOptions, Keywords, with_full_signature
from ckptkit.state.report import Converted, Written, complete_result, predict_result
from ckptkit.state.selection import LIKE
from ckptkit.state.write_output import write_output
from ckptkit.words import count, join_with_or

if TYPE_CHECKING:
    from ckptkit.conversion.salvaging.repair import SurveyFunction

RUN = "run"  # default output directory of `ckptkit train`


@with_full_signature
def convert(
    src: Source,
    dst: str | Path,
    *,
    to: str | None = None,
    world_size: int | None = None,
    under: str = "",
    optimizer_keys: str | None = None,
    optimizer_order: str | Path | None = None,
    complete_optimizer: bool = False,
    **options: Unpack[Keywords],
) -> Converted:
    """Write the checkpoint at `src`, or the latest of a run, to `dst` in the format `to`.

    `dst` is a directory, a file or a URL in a store. "dcp" and "pt" keep everything, also the optimizer and the other
    files of the checkpoint. If `dst` is a name like `model.pt`, the result is one file, without other files, and `to`
    is by default "pt"; for a directory, `to` is required. "hf" writes only the model, as `consolidate` does, and
    "adapter" only the adapter. `under` puts everything under a key, such as `model`. "dcp" is
    written for `world_size` ranks, by default as many as in the source. `optimizer_keys` writes the optimizer's
    parameters by "names" or "ids". By default, an optimizer in one file gets names when it becomes shards, if the names
    are certain. `optimizer_order` states the order in which the optimizer got its parameters, if nothing proves their
    names: "model", or a file with one name a line. With `complete_optimizer`, parameters without a state, because they
    never received a gradient, get zeros. For the other options see `ConvertOptions`. Raises a `CkptError`, and leaves
    `dst` unchanged, if anything does not fit or a checksum differs.
    """
    to = to or find_format_of_file_name(to_destination(dst).name)
    if to is None:
        formats = join_with_or((*writable_formats(), ADAPTER))
        raise Usage(f"--to: expected {formats}, found none", hint="pass --to with one of them: hf is safetensors")
    own = ConvertOptions.of(
        options,
        to=to,
        world_size=world_size,
        under=under,
        optimizer_keys=optimizer_keys,
        optimizer_order=optimizer_order,
        complete_optimizer=complete_optimizer,
    )
    return run_conversion([src], dst, own)


@with_full_signature
def consolidate(src: Source, dst: str | Path, **options: Unpack[Keywords]) -> Converted:
    """Write the model weights of the checkpoint at `src` to directory or URL `dst`, with config and tokenizer.

    `dtype` converts floats of 16 bits and more; `GLOB=DTYPE` converts matching ones. `max_shard_size` is in bytes.
    `base` is a directory or Hub id with config and tokenizer. `include` and `exclude` are globs of the names in the
    checkpoint; `rename` has rules `REGEX=>TEXT` for the model's own names. `strict` refuses tensors that config.json
    does not describe. Without `sync`, a power failure may lose the result. `part`, such as "1/8", does one share of the
    work; call `finalize` after the last. Raises a `CkptError`, and leaves `dst` unchanged, if anything does not fit or
    a checksum differs.
    """
    return convert(src, dst, to="hf", **options)


@with_full_signature
def reshard(
    src: Source | None = None,
    dst: str | Path | None = None,
    *,
    to: int,
    optimizer_order: str | Path | None = None,
    complete_optimizer: bool = False,
    **options: Unpack[Keywords],
) -> Converted:
    """Write the checkpoint at `src` to directory or URL `dst` for `to` ranks.

    Files by rank keep their format; every other format becomes DCP. `src` may be a run, by default `run/` or else the
    current directory; ckptkit reads its latest complete checkpoint. `dst` is by default `SRC-toN` next to it.
    Components that do not depend on the number of ranks, such as safetensors beside a sharded optimizer, are copied
    unchanged. With `complete_optimizer`, parameters without an optimizer state get zeros. For `optimizer_order`, the
    other options and the errors, see `convert`.
    """
    own = {"world_size": to, "only_sharded": True, "complete_optimizer": complete_optimizer}
    asked = ConvertOptions.of(options, to="dcp", optimizer_order=optimizer_order, **own)
    source = Checkpoint.open(src if src is not None else default_source())
    formats = {part.reader.name for part in source.components if part.reader.is_sharded}
    if len(formats) == 1 and formats <= set(writable_formats()):
        asked = replace(asked, to=formats.pop())
    if dst is None:  # in the current directory if the source is remote
        path = source.path if source.path.name not in ("", "..") else source.path.resolve()
        dst = local_path_beside(path, f"{path.name}-to{to}")
    return run_conversion([source], dst, asked)


def default_source() -> Path:
    return Path(RUN) if Path(RUN).is_dir() else Path()


def run_conversion(sources: Sequence[Source], dst: str | Path, options: ConvertOptions) -> Converted:
    """Convert one checkpoint, or the mean of several, as `options` say; with `part`, only that part of the work.

    Raises a `CkptError`, and leaves `dst` as it was, if anything does not fit or a checksum differs.
    """
    try:
        return plan_and_convert(sources, dst, options, write_output)
    except Corrupt as error:
        if len(sources) == 1 and (older := find_checkpoint_before_latest(path_of_source(sources[0]))):
            error.hint = f"{f'{error.hint}; or ' if error.hint else ''}pass {older.path}, the checkpoint before it"
        raise


def find_checkpoint_before_latest(run: Path) -> Checkpoint | None:
    """Return the last checkpoint of a run before the latest one that can be read; None without one, or for no run."""
    newest = Checkpoint.at(run)
    if not run.is_dir() or (newest.is_at_own_path and not newest.is_run_with_strays):
        return None
    complete = [checkpoint for checkpoint in step_checkpoints_in_run(run) if checkpoint.is_complete]
    for checkpoint in complete[-2::-1]:
        with suppress(Corrupt, IOFailure, Unsafe, Unsupported):
            if checkpoint.layout.names:
                return checkpoint
    return None


def plan_and_convert(
    sources: Sequence[Source], dst: str | Path, options: ConvertOptions, work: Callable[[Conversion], Written]
) -> Converted:
    """Plan a conversion, do the `work` unless it is a dry run, and return the result."""
    began = time.perf_counter()
    conversion = plan_conversion(sources, to_destination(dst), options)
    prospect = predict_result(conversion, time.perf_counter() - began)
    if options.dry_run:
        return prospect
    written = work(conversion)
    return complete_result(conversion, prospect, written, time.perf_counter() - began)


@collector_paused()
def plan_conversion(sources: Sequence[Source], dst: Path, options: ConvertOptions) -> Conversion:
    """Plan a conversion: locate every byte and lay out the output files. Writes nothing."""
    writer = options.writer
    require_directory_name(dst, writer)
    checkpoints = [Checkpoint.open(source).with_base(options.base) for source in sources]
    for checkpoint in checkpoints:
        if partial := find_partial_file_error(checkpoint):
            raise partial
        require_separate_destination(checkpoint, dst, writer)
    named = filter(None, (options.base, *(rule.partition(LIKE)[2] for rule in options.dtype)))
    for path in map(to_path, named):
        # a model id is not a path, and a repository on the Hub keeps its earlier commits
        if not allows_other_files(path) and path.exists():
            require_outside_destination(path, dst)
    require_free_or_replaceable(dst, overwrite=options.overwrite, is_file=dst.suffix in writer.suffixes)
    if options.salvage:
        conversion = draft_salvage(checkpoints[0], dst, options)
    else:
        conversion = draft_conversion(checkpoints, dst, options)
        conversion = conversion.with_notes(
            *warn_of_inconsistencies(checkpoints, options, is_fitted=conversion.is_fitted)
        )
        if is_existing_path(checkpoints[0].path / ACCOUNT):  # the source is itself the result of a salvage
            from ckptkit.conversion.salvaging.salvage import with_earlier_account

            conversion = with_earlier_account(conversion, checkpoints[0].path)
    conversion = with_not_copied_files(conversion, checkpoints).with_notes(
        *warn_of_changed_files(conversion, checkpoints)
    )
    if options.strict:
        require_all_copied_or_explained(conversion)
    if options.overwrite and not is_remote(dst):  # in a store, the process that claims `dst` checks
        check_replaceable(dst, conversion.file_sizes, output_is_training=conversion.is_training_file)
    is_known = conversion.is_fitted or options.salvage  # a salvage lists the missing tensors itself
    hint = "pass --base MODEL to compare its shapes with a config.json"
    doubts = [] if is_known else [(one.path, doubt) for one in checkpoints if (doubt := why_maybe_partial_file(one))]
    cautions = (Caution(f"{path}: {doubt}; {hint}") for path, doubt in doubts)
    return conversion.with_notes(*cautions, *remarks_if_taken_from_hub(options.base))


def warn_of_changed_files(conversion: Conversion, checkpoints: Sequence[Checkpoint]) -> Iterator[Caution]:
    """Yield a warning for each small file of a source, such as config.json, that the output has and that has changed.

    A user may have edited it on purpose, so this is no error.
    """
    names = conversion.copied_files.keys() | (() if conversion.options.base else conversion.made.keys())
    roots = dict.fromkeys(part.path for checkpoint in checkpoints for part in checkpoint.components)
    for root in filter(Path.is_dir, roots):
        recorded: Mapping[str, FileSum] = {}
        with suppress(Corrupt):  # a salvage reads a checkpoint with a damaged manifest, too
            manifest = read_manifest(root)
            recorded = manifest.files if manifest else {}
        for name in sorted(recorded.keys() & names):
            path, known = root / name, recorded[name]
            if is_existing_path(path) and known.nbytes <= TOKENIZER_LIMIT:
                found = crc32(read_small(path, TOKENIZER_LIMIT))
                if found != known.crc32:
                    yield Caution(f"{path}: expected CRC-32 {known.crc32:08x} (manifest), found {found:08x}; {RESTORE}")


def warn_of_inconsistencies(
    checkpoints: Sequence[Checkpoint], options: ConvertOptions, *, is_fitted: bool
) -> Iterator[Caution]:
    """Yield a warning for each inconsistency of a source that also affects the output.

    `is_fitted` is True if config.json describes all tensors and their shapes fit. Raises `Mismatch` for states that do
    not fit their parameters, if the output format requires it.
    """
    for checkpoint in checkpoints:
        if options.writer.is_model_only or not any(
            map(options.edits.is_selected, training_state_names(checkpoint.layout))
        ):
            yield from warn_of_inconsistent_weights(checkpoint, is_fitted=is_fitted)
            continue
        for inconsistency in examine_checkpoint(checkpoint, RULES):
            if inconsistency.certainty is Certainty.CERTAIN and options.writer.needs_shapes:
                raise inconsistency.to_error(checkpoint.path)
            if inconsistency.certainty > Certainty.NOTE:
                yield Caution(f"{checkpoint.path}: {inconsistency.message_with_tensor}")


def warn_of_inconsistent_weights(checkpoint: Checkpoint, *, is_fitted: bool = False) -> Iterator[Caution]:
    """Yield a warning for each inconsistency of a checkpoint whose weights alone are written."""
    rules = tuple(rule for rule in OF_EXPORTS if not is_fitted or rule not in OF_SHAPES)
    for inconsistency in examine_checkpoint(checkpoint, rules):
        yield Caution(f"{checkpoint.path}: {inconsistency.message_with_tensor}")


def draft_salvage(
    checkpoint: Checkpoint, dst: Path, options: ConvertOptions, survey: SurveyFunction | None = None
) -> Conversion:
    """Plan the output of the undamaged tensors. By default, `survey` reads every byte to find the damage."""
    from ckptkit.conversion.salvaging.salvage import survey_repair_and_fill

    salvaged = survey_repair_and_fill(checkpoint, dst, options, survey)
    return salvaged.with_account_of_lost_tensors(draft_conversion([salvaged.checkpoint], dst, options))


def draft_conversion(checkpoints: Sequence[Checkpoint], dst: Path, options: ConvertOptions) -> Conversion:
    """Plan the conversion of opened checkpoints: all components of one, or only the model or the adapters."""
    if options.weights_from == MODULE:
        checkpoints = [checkpoint.with_low_precision_as_weights() for checkpoint in checkpoints]
    if options.weights_from == MASTER:
        from ckptkit.state.master_weights import with_master_weights

        checkpoints = [with_master_weights(checkpoint, options) for checkpoint in checkpoints]
    if not (options.writer.is_model_only or options.weights or options.merge):
        checkpoint = checkpoints[0]
        if options.dtype and any(tensor.spec.dtype.name == "int16" for tensor in checkpoint.layout.tensors.values()):
            from ckptkit.state.master_weights import refuse_cast_with_remainders

            refuse_cast_with_remainders(checkpoint, options)
        if options.writer.drafted_by:
            whole: Conversion = import_object(options.writer.drafted_by)(checkpoint, dst, options)
            return whole
        from ckptkit.state.draft_checkpoint import draft_components

        return draft_components(checkpoint, dst, options)
    chosen = [choose_model_component(checkpoint, options) for checkpoint in checkpoints]
    parts, remarks = [part for part, _ in chosen], dict.fromkeys(note for _, notes in chosen for note in notes)
    if not options.merge:
        if any(may_be_adapter(part.layout.tensors) for part in parts):
            from ckptkit.adapters.draft import draft_adapters, open_adapters

            if adapted := [opened for part in parts if (opened := open_adapters(part, options))]:
                conversion = draft_adapters(adapted, dst, options)
                return replace(conversion, notes=[*remarks, *conversion.notes])
        if options.to == ADAPTER or options.experts or options.adapter_config:
            hint = "pass --to hf to write the model" if options.to == ADAPTER else "drop --adapter-config"
            hint = "drop --experts" if options.experts else hint
            raise Usage("the checkpoint contains no adapter", path=parts[0].path, hint=hint)
    conversion = draft_of_model(build_model(parts, options), dst, options)
    return replace(conversion, notes=[*remarks, *conversion.notes])


def with_not_copied_files(conversion: Conversion, checkpoints: Sequence[Checkpoint]) -> Conversion:
    """Return the conversion with the files of its sources that it does not copy."""
    read = {path for draft in conversion.drafts for path in draft.read} | set(conversion.copied_files.values())
    read |= {entries.read.root / name for entries in conversion.entries for name in entries.read.files}
    files: list[LeftBehind] = []
    for checkpoint in checkpoints:
        # config.json and the like are used if the output has files of these names
        places = [*directories_to_search(checkpoint.path), *(part.path for part in checkpoint.components)]
        used = {*read, *(place / name for name in conversion.made for place in places)}
        if output := path_below(checkpoint.path, conversion.output):
            used.add(output)
        if len(checkpoints) > 1 or conversion.options.merge:  # it knows files of the first source or base
            layout = checkpoint.model_component.layout
            used |= {layout.root / name for name in layout.files}
        files += checkpoint.list_not_copied_files(used)
    return replace(conversion, left_behind=tuple(files))


def require_all_copied_or_explained(conversion: Conversion) -> None:
    """Raise `Mismatch` if a tensor or file of the sources would not be copied although no rule or option says so."""
    for entries in conversion.entries:
        for left in entries.dropped_by_reason():
            if left.why in NOT_ASKED:
                message = f"`{left.name}` would be lost: {count(left.entries, 'tensor')} ({left.why})"
                hint = f"drop it with --exclude '{left.name}*', or drop --strict"
                raise Mismatch(message, path=conversion.origins[0].path, hint=hint)
    for file in conversion.left_behind:
        if not file.is_expected:
            hint = "move the file elsewhere, or drop --strict"
            raise Mismatch(f"`{file.name}` would not be copied ({file.why})", path=file.path, hint=hint)
