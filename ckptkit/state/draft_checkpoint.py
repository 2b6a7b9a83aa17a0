"""Draft the conversion of a whole checkpoint: all components, the optimizer, and the other files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Self

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component, join_layouts
from ckptkit.checkpoints.optimizers.keys import IDS, with_separate_group_settings
from ckptkit.errors import Mismatch, Unsupported, Usage, names_and_more
from ckptkit.formats import detect_format, get_format
from ckptkit.io.origin import Origin
from ckptkit.layout import OWN, Layout, edits
from ckptkit.models.companions import CONFIG, dump_config, find_companions, read_config_json
from ckptkit.models.fit import restore_tied
from ckptkit.models.names.copies import find_copies_in
from ckptkit.models.names.naming import rename_checkpoint_parameters
from ckptkit.models.names.rename_parameters import renamable_parameters_in, rename_parameters
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.weights import find_weights
from ckptkit.models.token_ids import check_tokens_have_rows
from ckptkit.models.vocabulary import find_vocabulary_size, with_vocabulary_size
from ckptkit.state.directories import files_of_format_in, files_to_copy_and_others, path_below
from ckptkit.state.draft import DAMAGED, Conversion, Draft, Entries, names_with_used_bytes, tensors_sharing_bytes
from ckptkit.state.names import collect_name_arguments, weight_entry_names
from ckptkit.state.optimizers import Completed, Rekeying, choose_optimizer_keys, complete_optimizers, nest_optimizers
from ckptkit.state.options import ConvertOptions
from ckptkit.state.quantized.config import may_be_quantized_model
from ckptkit.state.selection import DtypeRule, apply_dtypes
from ckptkit.state.steps import WITH_FILES, base_names_function, require_format_for_family
from ckptkit.trainers import find_owner_rank_of_file, find_owner_rank_of_key, why_copied_unchanged
from ckptkit.words import count

_MAX_NAMED = 8
OF_RANKS = "state of single ranks; another number of ranks cannot use it"


@dataclass(frozen=True, slots=True)
class Piece:
    """The components of a checkpoint that are written as one: a directory or file, and the files that belong to it.

    `restored` are the tied tensors (the head) that the source left out and that were added again.
    """

    parts: tuple[Component, ...]
    layout: Layout
    restored: frozenset[str]

    @classmethod
    def of(cls, parts: Sequence[Component]) -> Self:
        """Join the components."""
        first, *others = parts
        complete = restore_tied(first.layout, find_companions(first.path, None).config or {})
        restored = frozenset(complete.tensors.keys() - first.layout.tensors)
        if not others:
            return cls((first,), complete, restored)
        layouts = [complete, *(part.layout for part in others)]
        if any(part.folder != first.folder for part in others):  # then use paths relative to the checkpoint's directory
            layouts = [
                edits.prepend_directory_to_paths(layout, part.folder)
                for layout, part in zip(layouts, parts, strict=True)
            ]
        return cls(tuple(parts), join_layouts(layouts[0].root, parts, layouts), restored)

    @property
    def place(self) -> str:
        """Return its path in the output."""
        return self.parts[0].place

    def written_and_dropped(self, chosen: Layout, sources: Sequence[Layout], options: ConvertOptions) -> Entries:
        """Return which entries are written if `chosen` become `sources`. Bytes identify renamed entries."""
        layout = edits.select_entries(self.layout, lambda name: name not in self.restored)
        lost = [name for name in chosen.tensors if chosen.tensors[name].is_lost] if options.salvage else []
        keys = {name: layout.key(name) for name in layout.names}
        of_ranks = {key[0] for key in keys.values() if find_owner_rank_of_key(key) is not None}
        dropped = {name: OF_RANKS for name, key in keys.items() if key[0] in of_ranks}
        dropped |= options.edits.reasons_to_drop(layout.names) | dict.fromkeys(lost, DAMAGED)
        written = frozenset(chosen.names).difference(lost)
        if options.changes_names:
            unused = (written - chosen.blobs.keys()) - names_with_used_bytes(chosen, chosen.tensors, sources)
            dropped |= dict.fromkeys(unused, f"no name in `{options.names}`")
            written -= unused
        return Entries.of(layout, written, dropped)


def draft_components(checkpoint: Checkpoint, output: Path, options: ConvertOptions) -> Conversion:
    """Draft all components of a checkpoint, each at its present path, and the files beside them."""
    pieces, completed = open_pieces(checkpoint, options)
    layouts = completed.layouts
    world_size = options.world_size or max((layout.world_size or 1 for layout in layouts), default=1)
    options.edits.check_globs(layouts, checkpoint.path)
    chosen, remarks = zip(*(choose_entries(piece, options, world_size) for piece in pieces), strict=True)
    dtype_rules = options.edits.dtype_rules(name for layout in chosen for name in layout.tensors)
    if options.rename:
        parameters = [name for layout in chosen for name in renamable_parameters_in(layout, weight_entry_names(layout))]
        options.edits.check_renames(parameters, checkpoint.path)
    rekeyings = choose_optimizer_keys(checkpoint, layouts, options)
    drafts: list[Draft] = []
    entries: list[Entries] = []
    notes = [*completed.remarks, *chain(*remarks)]
    notes += [rekeying.remark for chosen_layout in rekeyings for rekeying in chosen_layout if rekeying.remark]
    for piece, chosen_layout, optimizers in zip(pieces, chosen, rekeyings, strict=True):
        sources: Sequence[Layout] = ()
        if chosen_layout.names or not piece.layout.names:
            draft, more = draft_piece(piece, chosen_layout, options, world_size, optimizers, dtype_rules)
            sources = draft.sources
            drafts.append(draft)
            notes += more
        entries.append(piece.written_and_dropped(chosen_layout, sources, options))
    outputs = [name for draft in drafts for name in draft.wanted.tensors]
    notes += options.edits.check_dtype_globs(dtype_rules, outputs, checkpoint.path)
    if not drafts:
        raise Mismatch("nothing is left to write", path=checkpoint.path, hint="check --include and --exclude")
    made: Mapping[str, bytes] = {}
    if options.family is not None and options.to == WITH_FILES:  # the family needs files beside a model in DCP
        config = find_companions(checkpoint.model_component.path, options.base).config
        made = options.family.files(checkpoint.step or 0, Sizes(config or {}).model_type)
    conversion = Conversion(
        origins=[Origin.of(checkpoint.path)],
        output=output,
        options=options,
        drafts=drafts,
        entries=entries,
        world_size=world_size if options.writer.is_sharded else None,
        notes=[*notes, *(remarks_on_unrenamed_files(checkpoint, pieces, options) if options.rename else ())],
        made=made,
        completed=completed.entries,
    )
    if conversion.is_file:
        if len(drafts) > 1:
            names = ", ".join(draft.place for draft in drafts)
            hint = "choose one component, or pass a directory as destination"
            raise Usage(f"the checkpoint has {len(drafts)} parts ({names}), but the destination is one file", hint=hint)
        return replace(conversion, drafts=[replace(draft, place="") for draft in drafts])
    conversion = with_other_files(conversion, checkpoint, layouts, world_size)
    return conversion if options.vocab_size is None else with_vocabulary_in_configs(conversion, options.vocab_size)


def open_pieces(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[list[Piece], Completed]:
    """Return the pieces of a checkpoint, with the parameter groups and states of the output's optimizers."""
    sharded = [part for part in checkpoint.components if get_format(part.layout.format).is_sharded]
    parts = sharded if options.only_sharded and sharded else list(checkpoint.components)
    main, *others = [part for part in parts if part.under is None]
    # files beside a model that has the requested format already stay files, because its trainer looks for them
    beside = [part for part in parts if part.under is not None and main.layout.format != options.to]
    pieces = [Piece.of([main, *beside]), *(Piece.of([part]) for part in others)]
    layouts = [piece.layout for piece in pieces]
    if options.to != "dcp" or options.rename or options.changes_names or options.wanted_optimizer_keys:
        # otherwise the groups are copied unchanged, in the form of the torch that saved them
        layouts = [with_separate_group_settings(layout) for layout in layouts]
    remarks: list[str] = []
    if options.optimizer_keys == IDS:
        nested = [nest_optimizers(checkpoint, layout, options.order, is_numbered=True) for layout in layouts]
        layouts, remarks = [layout for layout, _ in nested], [remark for _, more in nested for remark in more]
    completed = complete_optimizers(checkpoint, layouts, options)
    pieces = [replace(piece, layout=layout) for piece, layout in zip(pieces, completed.layouts, strict=True)]
    return pieces, replace(completed, remarks=[*remarks, *completed.remarks])


def remarks_on_unrenamed_files(
    checkpoint: Checkpoint, pieces: Sequence[Piece], options: ConvertOptions
) -> Iterator[str]:
    """Yield a remark on each file beside the model that is copied with names that `--rename` would change."""
    written = [part for piece in pieces for part in piece.parts]
    for part in checkpoint.components:
        if part.under is not None and part not in written:
            renamed, _ = rename_parameters(part.layout, frozenset(), options.edits.make_renaming())
            if renamed is not part.layout:
                copied = f"copied `{part.place}` unchanged, with the old names in its optimizer"
                yield f"{copied} (`convert --to dcp` renames them)"


def choose_entries(piece: Piece, options: ConvertOptions, world_size: int) -> tuple[Layout, list[str]]:
    """Return the entries of a piece to write, and remarks on them."""
    chosen = edits.select_entries(piece.layout, options.edits.is_selected)
    opaque = why_copied_unchanged(chosen.tensors)
    remarks = [opaque] if opaque else []
    how = "in the storage of the embedding" if options.writer.ties else "as a tensor of its own, although it is tied"
    remarks += [f"wrote `{name}` {how}" for name in chosen.tensors.keys() & piece.restored]
    if not options.writer.is_sharded:
        return chosen, remarks
    chosen, more = drop_unusable_rank_state(chosen, world_size)
    return chosen, [*remarks, *more]


def draft_piece(
    piece: Piece,
    chosen: Layout,
    options: ConvertOptions,
    world_size: int,
    optimizers: Sequence[Rekeying],
    dtype_rules: Sequence[DtypeRule],
) -> tuple[Draft, list[str]]:
    """Draft a piece, with remarks: change the keys of its optimizer, rename it, put it under a key, and cast it."""
    remarks: list[str] = []
    is_for_weights = options.rename or options.changes_names or any("=" not in rule for rule in options.dtype)
    weights = weight_entry_names(chosen) if is_for_weights else frozenset()
    layout = chosen
    for rekeying in optimizers:
        layout = rekeying.apply_to(layout)
    if options.rename:
        layout, _ = rename_parameters(layout, weights, options.edits.make_renaming())
    renamed = {old: new for old, new in zip(chosen.names, layout.names, strict=True) if old != new}
    is_named = bool(weights) and options.changes_names
    if is_named:
        part, rows = piece.parts[0], options.vocab_size
        companions = find_companions(part.path, options.base)
        require_format_for_family(companions, options)
        notes = [] if rows is None else check_tokens_have_rows(companions, rows)
        ask_base = base_names_function(options.base)
        asked = collect_name_arguments(part, options.wanted_names, companions.config, options.table, rows, ask_base)
        layout, remarks = rename_checkpoint_parameters(layout, asked)
        remarks += notes
    refuse_untranslated_copies(chosen, layout, weights)
    if len(piece.parts) > 1:
        layout = edits.nest_below_key(layout, ())
    if options.under:
        layout = edits.nest_below_key(layout, (options.under,))
    casts: Mapping[str, str] = {}
    if dtype_rules:
        both = zip(chosen.names, layout.names, strict=True)
        pairs = tensors_sharing_bytes(chosen, chosen.tensors, [layout]) if is_named else both
        sources: dict[str, set[str]] = {name: set() for name in layout.names}
        for old, new in pairs:
            sources[new].add(old)
        layout, casts = apply_dtypes(layout, dtype_rules, sources, lambda name: not weights.isdisjoint(sources[name]))
        if casts and may_be_quantized_model(piece.parts[0].layout.specs):
            from ckptkit.state.quantized.dequantize import refuse_separate_rounding

            refuse_separate_rounding(piece.parts[0], {name: frozenset(sources[name]) for name in casts})
    return Draft.of([layout], options, world_size, place=piece.place, renamed=renamed, cast=casts), remarks


def refuse_untranslated_copies(layout: Layout, changed: Layout, weights: frozenset[str]) -> None:
    """Raise `Unsupported` if the weights got other names or rows, and a copy of them, such as an EMA, did not."""
    before, after = layout.specs, changed.specs
    if all(after.get(name) == before[name] for name in weights):
        return
    if copies := find_copies_in(layout, layout.tensors.keys() - weights, find_weights(layout).layout.shapes):
        first = min(copies)
        message = "this copy of the weights would keep the old names and rows"
        above = f"{escape(first.partition('.')[0])}.*"
        hint = f"drop it with --exclude '{above}', or convert it alone with --include '{above}'"
        raise Unsupported(message, path=layout.path, tensor=first, hint=hint)


def with_other_files(
    conversion: Conversion,
    checkpoint: Checkpoint,
    layouts: Iterable[Layout],
    world_size: int,
    *,
    without_copies: bool = False,
) -> Conversion:
    """Return the conversion with the other files of a checkpoint's directory to copy, and notes on the files to skip.

    A second copy of the model beside components in subdirectories is skipped: loaders would read only that. With
    `without_copies`, one inside the directory of the model itself is skipped too.
    """
    root = checkpoint.path
    if not root.is_dir():
        return conversion
    used = frozenset(file for layout in layouts for file in files_of_format_in(layout))
    result = path_below(root, conversion.output)
    other_files, irregular = files_to_copy_and_others(root, used | ({result} if result else set()))
    notes = [*conversion.notes, *(f"skipped `{name}`: not a regular file" for name in irregular)]
    if conversion.options.writer.is_sharded:
        dropped, remarks = rank_files_of_other_world_size(other_files, world_size)
        notes += remarks
        other_files = {name: path for name, path in other_files.items() if name not in dropped}
    is_model_here = any(not part.place for part in checkpoint.components)
    reader = detect_format(root) if without_copies or not is_model_here else None
    copies = sorted(name for name in other_files if reader and reader.owns_file(name))
    notes += (f"skipped `{name}`: another copy of the weights" for name in copies)
    other_files = {name: path for name, path in other_files.items() if name not in copies}
    return replace(conversion, copied_files=other_files, notes=notes)


def with_vocabulary_in_configs(conversion: Conversion, rows: int) -> Conversion:
    """Return the conversion with each copied config.json rewritten for a vocabulary of `rows` rows."""
    generated = dict(conversion.made)
    for name, path in conversion.copied_files.items():
        config = read_config_json(path) if Path(name).name == CONFIG else None
        if config is not None and find_vocabulary_size(config) is not None:
            generated[name] = dump_config(with_vocabulary_size(config, rows))
    copied_files = {name: path for name, path in conversion.copied_files.items() if name not in generated}
    return replace(conversion, made=generated, copied_files=copied_files)


# The state of a rank's random generator or data loader cannot be divided among other ranks. ckptkit drops it and says
# so, because a job would otherwise load the state of another rank.


def drop_unusable_rank_state(layout: Layout, world_size: int) -> tuple[Layout, list[str]]:
    """Return the checkpoint without per-rank state that `world_size` ranks cannot use, and notes about that state."""
    owners = {name: owner for name in layout.names if (owner := find_owner_rank_of_key(layout.key(name))) is not None}
    groups = sorted({str(layout.key(name)[0]) for name in owners})
    dropped: set[str] = set()
    notes = []
    for group in groups:
        members = [name for name in owners if str(layout.key(name)[0]) == group]
        ranks = 1 + max(owners[name] for name in members)
        # with tensor parallelism there are fewer data loaders than ranks
        if world_size not in (ranks, layout.world_size):
            dropped |= {name for name in layout.names if str(layout.key(name)[0]) == group}
            inner = list(dict.fromkeys(str(key[2]) for key in map(layout.key, members) if len(key) > 2))
            which = f" ({names_and_more(inner, _MAX_NAMED)})" if inner else ""
            words = f"state of {count(ranks, 'rank')}, which {world_size} cannot use"
            notes.append(f"dropped `{group}`{which}: {words}")
        elif group == OWN:
            differ = count(len(members), "entry", "differs")
            notes.append(f"{differ} between ranks: each rank has its own under `{OWN}.rank_N`")
    return edits.select_entries(layout, lambda name: name not in dropped), notes


def rank_files_of_other_world_size(names: Iterable[str], world_size: int) -> tuple[set[str], list[str]]:
    """Return the names of the files with per-rank state, if their number differs from `world_size`; and notes."""
    owners = {name: owner for name in names if (owner := find_owner_rank_of_file(name)) is not None}
    ranks = 1 + max(owners.values(), default=-1)
    if ranks in (0, world_size):
        return set(), []
    state = f"state of {count(ranks, 'rank')}, which {world_size} cannot use"
    return set(owners), [f"skipped `{min(owners)}` and similar files: {state}"]
