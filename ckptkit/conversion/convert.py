"""Convert any checkpoint that can be read into any format that can be written: the list of steps.

Every command that writes a checkpoint is a preset of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckptkit.checkpoints.account import NAME as ACCOUNT
from ckptkit.checkpoints.checkpoint import Checkpoint, Source, named_in, path_of
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.examination import OF_EXPORTS, RULES, examine_checkpoint
from ckptkit.checkpoints.examination.inconsistency import Certainty
from ckptkit.checkpoints.find_components import LeftBehind
from ckptkit.checkpoints.one_of_several import find_doubt, require_whole
from ckptkit.checkpoints.replaceable import check_replaceable
from ckptkit.errors import Caution, Corrupt, Mismatch, Unsupported, Usage
from ckptkit.formats import format_of_file, writable_formats
from ckptkit.io.collector import collector_paused
from ckptkit.io.file import is_there
from ckptkit.io.origin import Origin
from ckptkit.io.path import RemotePath, remarks_on_id, to_model_path
from ckptkit.layout.wrappers import may_be_adapted
from ckptkit.models.names import HUB, KEEP
from ckptkit.models.names.weights import UNKNOWN, names_of_training
from ckptkit.state.directories import (
    check_free,
    files_taken,
    require_directory_name,
    require_separate_destination,
    to_output,
)
from ckptkit.state.draft import Conversion, draft_of_model
from ckptkit.state.model import Model, Step, take
from ckptkit.state.options import ADAPTER, MASTER, MODULE, ConvertOptions, Keywords, spell_out
from ckptkit.state.pipeline import write
from ckptkit.state.quantized.signs import may_be_quantized, may_hold_quantized
from ckptkit.state.report import Converted, Written, complete, report
from ckptkit.state.steps import has_known_names, open_model, wanted_names
from ckptkit.words import count

if TYPE_CHECKING:
    from ckptkit.conversion.salvaging.repair import Look


@spell_out
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
    """Write the checkpoint at `src`, or the latest of a run, to directory `dst` in the format `to`.

    "dcp" and "pt" keep everything, also the optimizer and the other files of the checkpoint. If `dst` is a name
    like `model.pt`, the result is one file, without other files, and `to` is by default "pt". "hf" writes only the
    model, as `consolidate` does, and "adapter" only the adapter. `under` puts everything under a key, such as
    `model`. "dcp" is written for `world_size` ranks, by default as many as in the source. `optimizer_keys` writes
    the optimizer's parameters by "names" or "ids". By default, an optimizer in one file gets names when it becomes
    shards, if the names are certain. `optimizer_order` says in which order it got its parameters where nothing
    proves their names: "model", or a file with one name a line. With `complete_optimizer`, parameters without a
    state, because they never received a gradient, get zeros. For the other options see `ConvertOptions`. Raises a
    `CkptError`, and leaves `dst` unchanged, if anything does not fit or a checksum differs.
    """
    own = ConvertOptions.of(
        options,
        to=to or require_format(to_output(dst)),
        world_size=world_size,
        under=under,
        optimizer_keys=optimizer_keys,
        optimizer_order=optimizer_order,
        complete_optimizer=complete_optimizer,
    )
    return run_conversion([src], dst, own)


def require_format(output: Path) -> str:
    """Return the format of a file with the name of the output. Raises `Usage` if the name may be a directory's."""
    found = format_of_file(output.name)
    if found is None:
        raise Usage("missing option '--to'", hint=f"pass one of {', '.join((*writable_formats(), ADAPTER))} as --to")
    return found


def has_quantized(model: Model, options: ConvertOptions) -> bool:
    """Return whether weights may be quantized, or are to be."""
    return options.quantize is not None or may_hold_quantized(model.part.layout.specs, model.config)


def may_be_wrapped(model: Model, options: ConvertOptions) -> bool:
    """Return whether a prefix may stand before all names that is to be stripped."""
    return wanted_names(options) != KEEP and not options.rename and needs_names(model, options)


def is_for_loaders(_: Model, options: ConvertOptions) -> bool:
    """Return whether the output is a model under the Hub's names, as config.json describes it."""
    return options.writer.is_model_only and wanted_names(options) == HUB


def may_tear(model: Model, options: ConvertOptions) -> bool:
    """Return whether a cast may tear quantized weights from their scales."""
    return bool(options.dtype) and options.quantize is None and has_quantized(model, options)


def may_leave_remainders(model: Model, options: ConvertOptions) -> bool:
    """Return whether an optimizer may have remainders of the weights that are not asked for."""
    dtypes = (tensor.spec.dtype.name for tensor in model.part.layout.tensors.values())
    return options.writer.is_model_only and options.weights_from is None and "int16" in dtypes


def may_complete(checkpoint: Checkpoint, options: ConvertOptions) -> bool:
    """Return whether an optimizer may have remainders that complete weights, and a cast is asked for."""
    return bool(options.dtype) and any(t.spec.dtype.name == "int16" for t in checkpoint.layout.tensors.values())


def has_base(model: Model, options: ConvertOptions) -> bool:
    """Return whether a base may have weights to compare those of the output with."""
    if options.text_only:  # the base has the names of the larger model
        return False
    return is_for_loaders(model, options) and bool(options.base or model.config.get("_name_or_path"))


def declares_predictors(model: Model, options: ConvertOptions) -> bool:
    """Return whether config.json may declare layers that predict further tokens (MTP)."""
    return is_for_loaders(model, options) and any("mtp" in key or "nextn" in key for key in keys_in(model.config))


def keys_in(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a config.json, and those of the sections in it."""
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            yield from keys_in(value)


def needs_names(model: Model, options: ConvertOptions) -> bool:
    """Return whether the tensors may have other names than those that you ask for."""
    is_asked = options.map is not None or options.vocab_size is not None
    return is_asked or not (is_for_loaders(model, options) and has_known_names(model))


NAMING = (  # each source by itself
    Step("ckptkit.state.steps:refuse_copies", is_for_loaders),
    Step("ckptkit.state.quantized.plain:open_quantized", has_quantized),
    Step("ckptkit.state.steps:unwrap", may_be_wrapped),
    Step("ckptkit.state.steps:translate_names", needs_names),
    Step("ckptkit.state.text_only:take_text", lambda _, asked: asked.text_only),
)

STEPS = (  # the model, or several whose mean it is to be
    Step("ckptkit.state.steps:resize_vocabulary", lambda _, asked: asked.vocab_size is not None),
    Step("ckptkit.checks.from_base:copy_from_base", lambda _, asked: bool(asked.from_base)),
    Step("ckptkit.state.steps:fit_config", is_for_loaders),
    Step("ckptkit.checks.against_base:compare_with_base", has_base),
    Step("ckptkit.state.steps:describe_predictors", declares_predictors),
    Step("ckptkit.state.steps:restore_keys", lambda _, asked: not asked.writer.is_model_only),
    Step("ckptkit.state.steps:cast", lambda _, asked: bool(asked.dtype)),
    Step("ckptkit.state.quantized.plain:check_casts", may_tear),
    Step("ckptkit.state.steps:describe", lambda model, _: model.companions.config is not None),
    Step("ckptkit.plugins.quantize.quantize:quantize", lambda _, asked: asked.quantize is not None),
    Step("ckptkit.state.mean:average", lambda _, asked: bool(asked.weights)),
    Step("ckptkit.state.masters:make_masters", lambda model, _: model.part.masters is not None),
    Step("ckptkit.state.masters:note_remainders", may_leave_remainders),
)


def run_conversion(sources: Sequence[Source], dst: str | Path, options: ConvertOptions) -> Converted:
    """Make of a checkpoint, or of the mean of several, what `options` say, or a part of that.

    Raises a `CkptError`, and leaves `dst` as it was, if anything does not fit or a checksum differs.
    """
    try:
        return report_on(sources, dst, options, write)
    except Corrupt as error:
        if len(sources) == 1 and (older := older_than_latest(path_of(sources[0]))):
            error.hint = f"{f'{error.hint}; or ' if error.hint else ''}pass {older.path}, the checkpoint before it"
        raise


def older_than_latest(run: Path) -> Checkpoint | None:
    """Return the complete checkpoint before the latest one of a run; None if there is none, or it is no run."""
    if not run.is_dir() or Checkpoint.at(run).is_direct:
        return None
    complete = [one for one in named_in(run) if one.is_complete]
    return complete[-2] if len(complete) > 1 else None


def report_on(
    sources: Sequence[Source],
    dst: str | Path,
    options: ConvertOptions,
    work: Callable[[Conversion], Written],
) -> Converted:
    """Draft a conversion, do the `work`, unless it is a dry run, and report on it."""
    began = time.perf_counter()
    conversion = draft(sources, to_output(dst), options)
    prospect = report(conversion, time.perf_counter() - began)
    if options.dry_run:
        return prospect
    written = work(conversion)
    return complete(conversion, prospect, written, time.perf_counter() - began)


@collector_paused()
def draft(sources: Sequence[Source], dst: Path, options: ConvertOptions) -> Conversion:
    """Plan a conversion: locate every byte and lay out the output files. Writes nothing."""
    writer = options.writer
    require_directory_name(dst, writer)
    checkpoints = [Checkpoint.open(source).with_base(options.base) for source in sources]
    for checkpoint in checkpoints:
        require_whole(checkpoint)
        require_separate_destination(checkpoint, dst, writer)
    check_free(dst, overwrite=options.overwrite, is_file=dst.suffix in writer.suffixes)
    conversion = draft_opened(checkpoints, dst, options)
    conversion = with_left_behind(conversion, checkpoints)
    if options.strict:
        require_all_taken(conversion)
    if options.overwrite and not isinstance(dst, RemotePath):  # in a store whoever claims it looks
        check_replaceable(dst, conversion.file_sizes, by_training=conversion.replaces_training)
    is_known = conversion.is_fitted or options.salvage  # a salvage reads what it can, and says what it lacks
    doubts = [] if is_known else [doubt for one in checkpoints if (doubt := find_doubt(one))]
    notes = (*conversion.notes, *map(Caution, doubts), *remarks_on_id(options.base))
    return replace(conversion, notes=notes)


def draft_opened(checkpoints: Sequence[Checkpoint], dst: Path, options: ConvertOptions) -> Conversion:
    """Draft the conversion of opened checkpoints, or of what is whole of a damaged one."""
    if options.salvage:
        return draft_salvage(checkpoints[0], dst, options)
    conversion, source = draft_of(checkpoints, dst, options), checkpoints[0].path
    conversion = replace(conversion, notes=(*conversion.notes, *warn_of_inconsistencies(checkpoints, options)))
    return with_earlier_account(conversion, source) if is_there(source / ACCOUNT) else conversion


def warn_of_inconsistencies(checkpoints: Sequence[Checkpoint], options: ConvertOptions) -> Iterator[Caution]:
    """Yield a warning for what contradicts the rest of a source, as far as the output has it.

    Raises `Mismatch` for states that have no place in a format that keeps each beside its parameter.
    """
    for checkpoint in checkpoints:
        if options.writer.is_model_only or not has_states(checkpoint, options):
            yield from warn_of_weights(checkpoint)
            continue
        for one in examine_checkpoint(checkpoint, RULES):
            if one.certainty is Certainty.CERTAIN and options.writer.needs_shapes:
                raise one.to_error(checkpoint.path)
            if one.certainty > Certainty.NOTE:
                yield Caution(f"{checkpoint.path}: {one.line}")


def has_states(checkpoint: Checkpoint, options: ConvertOptions) -> bool:
    """Return whether states of a training are among the tensors that are chosen."""
    return any(map(options.edits.admit, names_of_training(checkpoint.layout)))


def warn_of_weights(checkpoint: Checkpoint) -> Iterator[Caution]:
    """Yield a warning for what contradicts the rest of a checkpoint whose weights alone are written."""
    for one in examine_checkpoint(checkpoint, OF_EXPORTS):
        yield Caution(f"{checkpoint.path}: {one.line}")


def draft_salvage(checkpoint: Checkpoint, dst: Path, options: ConvertOptions, look: Look | None = None) -> Conversion:
    """Draft what is whole of a damaged checkpoint, with an account of what is lost.

    By default, `look` reads every byte to find the damage.
    """
    from ckptkit.conversion.salvaging.salvage import salvage

    options.check_salvage()
    salvaged = salvage(checkpoint, dst, options, look)
    return salvaged.account(draft_of([salvaged.checkpoint], dst, options))


def draft_of(checkpoints: Sequence[Checkpoint], dst: Path, options: ConvertOptions) -> Conversion:
    """Draft the conversion of opened checkpoints: all parts of one, or the model alone."""
    if options.weights_from == MODULE:
        checkpoints = [checkpoint.with_twins() for checkpoint in checkpoints]
    if options.weights_from == MASTER:
        from ckptkit.state.masters import with_masters

        checkpoints = [with_masters(checkpoint, options) for checkpoint in checkpoints]
    if not (options.writer.is_model_only or options.weights or options.merge):
        return draft_parts(checkpoints[0], dst, options)
    parts, remarks = choose_models(checkpoints, options)
    if options.merge:
        from ckptkit.adapters.merge import draft_merge

        return draft_merge(parts, remarks, dst, options)
    if any(may_be_adapted(part.layout.tensors) for part in parts):
        from ckptkit.adapters.draft import draft_adapters, open_adapters

        if adapted := [found for part in parts if (found := open_adapters(part, options))]:
            if parts[0].masters is not None:
                hint = "drop --weights-from to take the adapter as it was saved"
                raise Unsupported("ckptkit does not take the masters of an adapter", path=parts[0].path, hint=hint)
            return draft_adapters(adapted, remarks, dst, options)
    if options.to == ADAPTER or options.experts:
        hint = "pass --to hf and drop --experts to write the model"
        raise Usage("the checkpoint contains no adapter", path=parts[0].path, hint=hint)
    if options.adapter_config:
        raise Usage("the checkpoint contains no adapter", path=parts[0].path, hint="drop --adapter-config")
    return draft_model(parts, remarks, dst, options)


def choose_models(checkpoints: Sequence[Checkpoint], options: ConvertOptions) -> tuple[list[Component], list[str]]:
    """Return the part of each checkpoint with the model that is to be written, and notes on the alternatives."""
    parts, notes = zip(*(choose_model(checkpoint, options) for checkpoint in checkpoints), strict=True)
    return list(parts), list(dict.fromkeys(filter(None, notes)))


def choose_model(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[Component, str]:
    """Return the part with the model that is to be written, and a note if there is another; "" if not."""
    takes_states = options.salvage or options.weights_from == MODULE or checkpoint.model_component.masters is not None
    exported = None if takes_states else checkpoint.exported
    if exported is None:
        return checkpoint.model_component, ""
    from ckptkit.adapters.empty import find_empty  # few checkpoints have an adapter beside states

    name, states = exported.path.name, checkpoint.model_component.place
    if error := find_empty(exported.layout):
        return checkpoint.model_component, f"used the states in `{states}`, not `{name}`: {error.message}"
    return exported, f"used `{name}`, the exported model; pass `{states}` to use the weights in its states"


def draft_model(parts: Sequence[Component], remarks: Sequence[str], dst: Path, options: ConvertOptions) -> Conversion:
    """Draft the weights in a part of a checkpoint, or the mean of those in several."""
    model = take_steps(parts, options)
    origins = [Origin.of(part.masters.root if part.masters else part.path) for part in parts]
    conversion = draft_of_model(replace(model, remarks=(*remarks, *model.remarks)), origins, dst, options)
    return replace(conversion, also_read=[origin_of_base(dst, options)]) if options.from_base else conversion


def take_steps(parts: Sequence[Component], options: ConvertOptions) -> Model:
    """Return the weights in a part of a checkpoint, or the mean of those in several, as they will be written."""
    models = [open_named(part, options) for part in parts]
    return take(STEPS, models[0] if len(models) == 1 else align(models), options)


def open_named(part: Component, options: ConvertOptions) -> Model:
    """Return the weights in a part of a checkpoint under the names that you ask for, with their masters beside them."""
    model = take(NAMING, open_model(part, options), options)
    if part.masters is None:
        return model
    from ckptkit.state.masters import join_masters

    return join_masters(model, take(NAMING, open_model(part, options, part.masters), options))


def origin_of_base(dst: Path, options: ConvertOptions) -> Origin:
    """Return the base as a source that must not change meanwhile. Raises `Unsafe` if the output would replace it."""
    assert options.base is not None
    base = Checkpoint.open(to_model_path(options.base))
    require_separate_destination(base, dst, options.writer)
    return Origin.of(base.path)


def with_left_behind(conversion: Conversion, checkpoints: Sequence[Checkpoint]) -> Conversion:
    """Return the conversion with the files that stay in the directories of its sources."""
    found: list[LeftBehind] = []
    for checkpoint in checkpoints:
        used = {*conversion.files_used, *files_taken(checkpoint, conversion.made, conversion.output)}
        if len(checkpoints) > 1:  # the account of entries is that of the first
            layout = checkpoint.model_component.layout
            used |= {layout.root / name for name in layout.files}
        found += checkpoint.left_behind(used)
    return replace(conversion, left_behind=tuple(found))


def require_all_taken(conversion: Conversion) -> None:
    """Raise `Mismatch` if a tensor or file of the sources would be left behind though no rule or option asks for it."""
    for entries in conversion.entries:
        for left in entries.groups():
            if left.why == UNKNOWN:
                message = f"`{left.name}` would be lost: {count(left.entries, 'tensor')} ({left.why})"
                hint = f"drop it with --exclude '{left.name}*', or drop --strict"
                raise Mismatch(message, path=conversion.origins[0].path, hint=hint)
    for file in conversion.left_behind:
        if not file.is_known:
            hint = "move the file elsewhere, or drop --strict"
            raise Mismatch(f"`{file.name}` would not be copied ({file.why})", path=file.path, hint=hint)


def align(models: Sequence[Model]) -> Model:
    from ckptkit.state import mean

    return mean.align(models)


def draft_parts(checkpoint: Checkpoint, dst: Path, options: ConvertOptions) -> Conversion:
    """Draft all parts of a checkpoint, the optimizer too, in the form that the format wants."""
    if may_complete(checkpoint, options):
        from ckptkit.state.masters import require_completed

        require_completed(checkpoint, options)
    if options.writer.needs_names:
        from ckptkit.state.by_names import draft_by_names

        return draft_by_names(checkpoint, dst, options)
    from ckptkit.state import parts

    return parts.draft_parts(checkpoint, dst, options, refuse_separated)


def refuse_separated(part: Component, casts: Mapping[str, str]) -> None:
    """Raise an error if casts would tear quantized weights from their scales."""
    if casts and may_be_quantized(part.layout.specs):
        from ckptkit.state.quantized import plain

        plain.refuse_separated(part, casts, {})


def with_earlier_account(conversion: Conversion, source: Path) -> Conversion:
    from ckptkit.conversion.salvaging import salvage  # the source was salvaged before

    return salvage.with_earlier_account(conversion, source)
