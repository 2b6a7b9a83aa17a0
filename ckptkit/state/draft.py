"""A conversion that is planned but not yet written. It contains everything that a dry run needs."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from ckptkit.checkpoints.find_components import LeftBehind
from ckptkit.checkpoints.manifest import source_record_of
from ckptkit.checkpoints.salvage_account import Account
from ckptkit.errors import Caution, Unsupported, and_more, translate_os_errors
from ckptkit.formats import FormatWriter, decompress_entries, locate_all_chunks
from ckptkit.formats.archives.locate import ENVELOPE
from ckptkit.io.file import file_size
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.origin import Origin
from ckptkit.io.path import is_remote
from ckptkit.layout import Chunk, KeyPath, Layout, NewFile, StoredTensor, WriterOptions
from ckptkit.layout.box import full_box
from ckptkit.layout.edits import split_off_lost_tensors
from ckptkit.layout.plan import Recipe
from ckptkit.models.expected import Form
from ckptkit.models.fit import join_few_names
from ckptkit.models.names.weights import (
    LeftOut,
    count_left_out_by_location,
    mark_weights_in_blobs,
    training_state_names,
)
from ckptkit.state.directories import require_separate_destination
from ckptkit.state.master_weights import unnamed_masters_in
from ckptkit.state.model import Model
from ckptkit.state.options import ConvertOptions
from ckptkit.version import __version__
from ckptkit.words import count

DAMAGED = "damaged"
_MANY_CHUNKS = 20_000  # zip wrappers; a dry run checks all of them up to this number
_SAMPLE = 4096  # checked zip wrappers of a larger checkpoint; as many again are the last in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The files to write for one component of a checkpoint, or for the same component of several checkpoints.

    If several processes share the work, each locates the byte ranges of its own share later. `place` is the directory
    in the output for the files; "" is the output itself. `read` are the source files, `made_of` describes them in the
    manifest. `renamed` and `cast` are changes of names and dtypes, `remarks` are notes of the format. `recipes` compute
    tensors; every tensor without a recipe comes from the first source, which was `given` with its lost tensors.
    """

    place: str
    sources: tuple[Layout, ...]
    read: tuple[Path, ...]
    writer: FormatWriter
    files: tuple[NewFile, ...]
    made_of: Mapping[str, str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    given: Layout
    sums: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        sources: Sequence[Layout],
        options: ConvertOptions,
        world_size: int,
        file: str | None = None,
        stem: str = "model",
        **more: Any,
    ) -> Self:
        """Return the draft for the first of `sources`, in the format that `options` name.

        The names of a model's files start with `stem`, or the model is written as one `file`.
        """
        given = sources[0]
        if options.salvage:
            given = mark_tensors_with_lost_operands(sources, more.get("recipes", {}))
            sources = [split_off_lost_tensors(source)[0] for source in (given, *sources[1:])]
        unpacked = tuple(map(decompress_entries, sources))
        layout_options = WriterOptions(options.max_shard_size, world_size, file, stem=stem)
        files = options.writer.lay_out_files(unpacked[0], layout_options)
        remarks = tuple(options.writer.remarks_on_changes(unpacked[0]))
        read = tuple(layout.root / name for layout in sources for name in sorted(layout.files))
        located, more_remarks = locate_source_chunks(unpacked, options)
        remarks += more_remarks
        if options.world_size is not None:
            remarks += warn_of_empty_ranks(unpacked[0], options.world_size)
        if given.texts and not options.writer.is_model_only:
            texts = join_few_names(sorted(given.texts))
            remarks += (f"not in the output: `__metadata__` of the safetensors ({texts})",)
        more = {"place": "", "made_of": source_record_of(given), "remarks": remarks, "given": given, **more}
        return cls(sources=located, read=read, writer=options.writer, files=files, **more)

    @property
    def wanted(self) -> Layout:
        """Return the layout with the names and dtypes of the result: the layout of the first source."""
        return self.sources[0]


def warn_of_empty_ranks(wanted: Layout, ranks: int) -> tuple[str, ...]:
    """Return a warning if most ranks get no shard of any tensor."""
    tensors = [tensor for tensor in wanted.tensors.values() if tensor.spec.shape]
    rows = max((tensor.spec.shape[0] for tensor in tensors), default=0)
    used = -(-rows // -(-rows // ranks)) if rows else 0
    counts = [len(tensor.chunks) for tensor in tensors]
    if max(counts, default=0) > 1:  # else tensors of one chunk are split by rows, too
        used = max(used, counts.count(1))
    if 2 * used >= ranks:
        return ()
    return (Caution(f"{ranks - used:,} of {ranks:,} ranks get no shard: no tensor has more than {count(rows, 'row')}"),)


def warn_of_unnamed_masters(layout: Layout, options: ConvertOptions) -> tuple[str, ...]:
    """Return a warning if only weights are written, and the optimizer does not name the parameters of its masters."""
    masters = unnamed_masters_in(layout) if options.writer.is_model_only and options.weights_from is None else []
    if not masters:
        return ()
    which = f"{count(len(masters), 'fp32 master weight')} without parameter names, such as `{masters[0]}`"
    return (Caution(f"the optimizer has {which}: the output has the 16-bit weights"),)


def locate_source_chunks(
    sources: tuple[Layout, ...], options: ConvertOptions
) -> tuple[tuple[Layout, ...], tuple[str, ...]]:
    """Return the sources with their byte ranges located as far as needed now, and remarks.

    A process with a share of the work locates its byte ranges later. A dry run of a large checkpoint locates a sample.
    """
    if options.part:
        return sources, ()
    located: list[Layout] = []
    remarks: list[str] = []
    for source in sources:
        checked, remark = sample_of_chunks(source) if options.dry_run else (source, ())
        found = locate_all_chunks(checked)
        remarks += [*(remarks_on_other_dtypes(checked, found) if not located else ()), *remark]
        located.append(found if checked is source else source)
    return tuple(located), tuple(remarks)


def sample_of_chunks(layout: Layout) -> tuple[Layout, list[str]]:
    """Return a large layout with only a sample of its chunks, and a remark; a small layout unchanged.

    The sample includes the last zip wrapper of a number of files: the reader of the metadata has compared only file
    sizes.
    """
    chunks = [chunk for tensor in layout.tensors.values() for chunk in tensor.chunks if chunk.wrapper == ENVELOPE]
    if len(chunks) <= _MANY_CHUNKS:
        return layout, []
    last: dict[str, Chunk] = {}
    for chunk in chunks:
        if chunk.offset >= last.get(chunk.path, chunk).offset:
            last[chunk.path] = chunk
    groups = list(last.values()), chunks
    evenly_spaced = (chunk for group in groups for chunk in group[:: max(1, len(group) // _SAMPLE)])
    chosen = {(chunk.path, chunk.offset) for chunk in evenly_spaced}
    tensors = {
        name: replace(tensor, chunks=sampled)
        for name, tensor in layout.tensors.items()
        if (sampled := tuple(chunk for chunk in tensor.chunks if (chunk.path, chunk.offset) in chosen))
    }
    remark = f"checked the headers of {len(chosen):,} of {len(chunks):,} chunks; the conversion itself checks all"
    return replace(layout, tensors=tensors), [remark]


def remarks_on_other_dtypes(promised: Layout, located: Layout) -> Iterator[str]:
    """Yield a remark if the metadata declares another dtype than the files contain: ckptkit casts, as torch does."""
    pairs = zip(promised.tensors.items(), located.tensors.values(), strict=True)
    narrow = [name for (name, one), other in pairs if one.chunks and one.chunks[0].dtype != other.chunks[0].dtype]
    if narrow:
        stored, dtype = (layout.tensors[narrow[0]].chunks[0].dtype for layout in (located, promised))
        which = f"`{narrow[0]}`{and_more(len(narrow) - 1)}"
        yield f"{which}: expected {dtype}, found {stored} in the file; cast, as torch does"


def mark_tensors_with_lost_operands(sources: Sequence[Layout], recipes: Mapping[str, Recipe]) -> Layout:
    """Return the first source, with tensors marked as lost if their recipe needs a lost tensor."""
    first, tensors = sources[0], dict(sources[0].tensors)
    for name in recipes.keys() & tensors.keys():
        operands = (sources[one.source].tensors[one.name] for one in recipes[name].operands)
        lost_chunk = next((chunk for operand in operands for chunk in operand.chunks if chunk.is_lost), None)
        if lost_chunk is not None:
            spec = tensors[name].spec
            tensors[name] = StoredTensor(spec, (lost_chunk._replace(box=full_box(spec.shape)),))
    return replace(first, tensors=tensors)


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of layout `read`: the `written` names, and the `dropped` names with the reason.

    `prefix` is the key path of the model's parent: the summary counts dropped entries by the key after it.
    """

    read: Layout
    written: frozenset[str]
    dropped: Mapping[str, str]
    prefix: KeyPath = ()

    @classmethod
    def of(
        cls,
        read: Layout,
        written: Iterable[str],
        dropped: Mapping[str, str],
        prefix: KeyPath = (),
        used: Iterable[Layout] = (),
    ) -> Self:
        """Return the entries of a layout.

        An entry is written if `written` names it, or if a layout in `used` has its bytes. Raises `Unsupported` if an
        entry is neither written nor dropped.
        """
        names = frozenset(read.names).intersection(written)
        unaccounted = [name for name in read.names if name not in names and name not in dropped]
        names |= names_with_used_bytes(read, unaccounted, used) if unaccounted else frozenset()
        forgotten = [name for name in unaccounted if name not in names]
        if forgotten:
            message = f"the output would lose this entry{and_more(len(forgotten) - 1)}, and no option drops it"
            hint = f"drop it with --exclude '{forgotten[0]}'"
            raise Unsupported(message, path=read.root, tensor=forgotten[0], hint=hint)
        return cls(read, names, {name: why for name, why in dropped.items() if name not in names}, prefix)

    def dropped_by_reason(self) -> tuple[LeftOut, ...]:
        """Count the dropped entries by location and reason."""
        return count_left_out_by_location(self.read, self.prefix, self.dropped, self.written)


def names_with_used_bytes(read: Layout, names: Iterable[str], used: Iterable[Layout]) -> frozenset[str]:
    """Return the tensors whose bytes are used by other layouts, under any name, in full or in part."""
    return frozenset(name for name, _ in tensors_sharing_bytes(read, names, used))


def tensors_sharing_bytes(read: Layout, names: Iterable[str], used: Iterable[Layout]) -> Iterator[tuple[str, str]]:
    """Yield each tensor with the name of a tensor in other layouts that uses its bytes, in full or in part."""
    starts: dict[Path, list[tuple[int, str]]] = defaultdict(list)
    for layout in used:
        for user, tensor in layout.tensors.items():
            for chunk in tensor.chunks:
                starts[layout.root / chunk.path].append((chunk.offset, user))
    sorted_starts = {path: sorted(found) for path, found in starts.items()}
    for name in names:
        for chunk in read.tensors[name].chunks if name in read.tensors else ():
            found = sorted_starts.get(read.root / chunk.path, [])
            first = bisect_left(found, (chunk.offset, ""))
            stop = bisect_left(found, (chunk.offset + max(chunk.length, 1), ""))
            yield from ((name, user) for _, user in found[first:stop])


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Everything that an output is made of: a draft for each component, and other files that are generated or copied.

    `origins` are the sources; `also_read` are further ones such as the base. `entries` say which entries are written.
    `left_behind` are source files that are neither read nor copied. `wrapper` is the key above the model that is
    removed. `world_size` is the number of ranks of a sharded output. `completed` are the entries written as zeros
    because the source lacks them. `salvaged` is the account of the damage, for a salvage. `is_fitted` is True if
    config.json describes all tensors and their shapes fit.
    """

    origins: Sequence[Origin]
    output: Path
    options: ConvertOptions
    drafts: Sequence[Draft]
    made: Mapping[str, bytes] = field(default_factory=dict)
    copied_files: Mapping[str, Path] = field(default_factory=dict)
    entries: Sequence[Entries] = ()
    left_behind: Sequence[LeftBehind] = ()
    wrapper: str = ""
    world_size: int | None = None
    completed: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    salvaged: Account | None = None
    also_read: Sequence[Origin] = ()
    is_fitted: bool = False

    @property
    def is_file(self) -> bool:
        return self.output.suffix in self.options.writer.suffixes

    @property
    def is_training_file(self) -> bool:
        """Return whether the output is a file with training state: without a manifest, it may replace such a file."""
        has_states = any(training_state_names(one.read) for one in self.entries)
        return self.is_file and has_states and not self.options.writer.is_model_only

    @property
    def file_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file, by its path in the output."""
        sizes = {str(Path(part.place, file.name)): file.nbytes for part in self.drafts for file in part.files}
        sizes |= {name: len(content) for name, content in self.made.items()}
        return sizes | {name: file_size(path) for name, path in self.copied_files.items()}

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the plan. It depends on the options and on the current files of the sources."""
        digest = blake2b(__version__.encode(), digest_size=16)
        for draft in self.drafts:
            files = [(file.name, file.nbytes) for file in draft.files]
            stamps = []
            for path in draft.read:
                with translate_os_errors(path):
                    status = path.stat()
                inode = status.st_ino if is_remote(path) else 0  # of a remote file, a hash of its version
                stamps.append((path.name, status.st_size, status.st_mtime_ns, inode))
            digest.update(repr((draft.place, draft.writer.name, files, stamps)).encode())
        return digest.hexdigest()

    def shared_options_key(self, share_count: int) -> bytes:
        """Return the JSON text that `share_count` processes must agree on before they write one output together."""
        agreed = {
            "sources": [[str(place.absolute()) for place in local_paths_of(origin.path)] for origin in self.origins],
            "options": self.options.to_json(),
            "parts": share_count,
            "plan": self.fingerprint,
        }
        return json.dumps(agreed, indent=1, sort_keys=True).encode()

    def with_notes(self, *notes: str) -> Conversion:
        return replace(self, notes=(*self.notes, *notes))


def draft_of_model(model: Model, output: Path, options: ConvertOptions) -> Conversion:
    """Draft the files of one model, with config and tokenizer if the format is for models only.

    Raises `Unsafe` if the output would replace the base whose tensors are read.
    """
    if model.base is not None:
        require_separate_destination(model.base, output, options.writer)
    is_alone = options.writer.is_model_only
    world_size = options.world_size or model.part.layout.world_size or 1
    new_names: dict[str, list[str]] = {}  # of each renamed weight, by its name in the checkpoint
    for new, old in model.weights.came_from.items():
        if new in model.layout.tensors and old != new:
            new_names.setdefault(old, []).append(new)
    draft = Draft.of(
        [model.layout, *model.others],
        options,
        world_size,
        made_of=model.made_of or source_record_of(model.layout),
        renamed={old: news[0] + and_more(len(news) - 1) for old, news in new_names.items()},
        cast=model.casts,
        recipes=model.recipes_by_name(),
        stem=model.companions.weights_stem if is_alone else "model",
    )
    weights = model.weights
    written = weights.origins_of(draft.wanted.tensors) | model.merged
    lost = weights.origins_of(draft.given.tensors.keys() - draft.wanted.tensors)
    left_out = mark_weights_in_blobs(model.part.layout, weights.left_out)
    dropped = {**left_out, **model.dropped, **dict.fromkeys(lost, DAMAGED)}
    return Conversion(
        origins=[Origin.of(path) for path in model.origins],
        also_read=[Origin.of(model.base.path)] if model.base is not None else [],
        output=output,
        options=options,
        drafts=[draft],
        made=model.companions.to_files() if is_alone else {},
        entries=[Entries.of(model.part.layout, written, dropped, weights.prefix, draft.sources)],
        wrapper=weights.dotted_prefix if is_alone else "",
        world_size=world_size if options.writer.is_sharded else None,
        notes=(*model.remarks, *warn_of_unnamed_masters(model.part.layout, options)),
        is_fitted=isinstance(model.expected, Form),
    )
