"""A conversion that is planned but not yet written: everything that a dry run needs."""

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

from ckptkit.checkpoints.account import Account
from ckptkit.checkpoints.find_components import LeftBehind
from ckptkit.checkpoints.manifest import source_of
from ckptkit.errors import Unsupported, and_more, translate_os_errors
from ckptkit.formats import FormatWriter, locate, unpack
from ckptkit.io.file import file_size
from ckptkit.io.joined import roots_of
from ckptkit.io.origin import Origin
from ckptkit.io.path import is_remote
from ckptkit.layout import Chunk, KeyPath, Layout, NewFile, StoredTensor, WriterOptions
from ckptkit.layout.box import whole
from ckptkit.layout.edits import without_lost
from ckptkit.layout.plan import Recipe
from ckptkit.models.expected import Form
from ckptkit.models.fit import abridge
from ckptkit.models.names.weights import UNKNOWN, LeftOut, Weights, names_of_training, summarize
from ckptkit.state.directories import require_separate_destination
from ckptkit.state.model import Model
from ckptkit.state.options import ConvertOptions
from ckptkit.version import __version__

DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The files to be made of one part of a checkpoint, or of the same part of several, with every byte found.

    Where several processes share the work, each finds the bytes of its own share, when it comes to them.
    They will lie in `place`, a directory in the output or, if it is empty, the output itself. `read` are the files that
    the sources lie in, `made_of` is what their manifest says of them; `renamed` and `cast` are what becomes of names
    and dtypes, `remarks` what the format has to say of itself. A tensor with one of the `recipes` is made by that, any
    other is the first source's. `given` is the first source as it was given, before what is lost in it was left out.
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
    given: Layout | None = None
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
        """Return the draft of what the first of `sources` has, in the format that `options` name.

        The files of a model are called by `stem`, or it is one `file`.
        """
        given = sources[0]
        if options.salvage:
            given = with_lost_operands(sources, more.get("recipes", {}))
            sources = [without_lost(source)[0] for source in (given, *sources[1:])]
        unpacked = tuple(map(unpack, sources))
        asked = WriterOptions(options.max_shard_size, world_size, file, stem=stem)
        files = options.writer.arrange(unpacked[0], asked)
        remarks = tuple(options.writer.remarks(unpacked[0]))
        read = tuple(layout.root / name for layout in sources for name in sorted(layout.files))
        found, more_remarks = find_bytes(unpacked, options)
        remarks += (*more_remarks, *say_unwritten(given, options))
        more = {"place": "", "made_of": source_of(given), "remarks": remarks, "given": given, **more}
        return cls(sources=found, read=read, writer=options.writer, files=files, **more)

    @property
    def wanted(self) -> Layout:
        """Return the layout whose names and dtypes the result has: that of the first source."""
        return self.sources[0]


def find_bytes(sources: tuple[Layout, ...], options: ConvertOptions) -> tuple[tuple[Layout, ...], tuple[str, ...]]:
    """Return the sources with every byte found as far as it is needed now, and remarks on it.

    A share of the work finds its own bytes later. A dry run of a large checkpoint checks a sample.
    """
    if options.part:
        return sources, ()
    if options.dry_run:
        from ckptkit.state.sampling import locate_sample

        checked = [locate_sample(source) for source in sources]
        remarks = [*say_widened(checked[0].part, checked[0].found), *(one.remark for one in checked if one.remark)]
        return tuple(one.layout for one in checked), tuple(remarks)
    located = tuple(map(locate, sources))
    return located, tuple(say_widened(sources[0], located[0]))


def say_unwritten(given: Layout, options: ConvertOptions) -> Iterator[str]:
    """Yield a remark on the metadata of safetensors that another format does not have a place for."""
    if given.texts and not options.writer.is_model_only:
        yield f"not in the output: `__metadata__` of the safetensors ({abridge(sorted(given.texts))})"


def say_widened(promised: Layout, located: Layout) -> Iterator[str]:
    """Yield a remark if files hold floats of fewer bits than the metadata promise."""
    pairs = zip(promised.tensors.items(), located.tensors.values(), strict=True)
    narrow = [name for (name, one), other in pairs if one.chunks and one.chunks[0].dtype != other.chunks[0].dtype]
    if narrow:
        stored, dtype = (layout.tensors[narrow[0]].chunks[0].dtype for layout in (located, promised))
        which = f"`{narrow[0]}`{and_more(len(narrow) - 1)}"
        yield f"{which}: expected {dtype}, found {stored} in the file; cast, as torch does"


def with_lost_operands(sources: Sequence[Layout], recipes: Mapping[str, Recipe]) -> Layout:
    """Return the first source with the tensors lost whose recipes need something that is lost."""
    first, tensors = sources[0], dict(sources[0].tensors)
    for name in recipes.keys() & tensors.keys():
        operands = (sources[one.source].tensors[one.name] for one in recipes[name].operands)
        gone = next((chunk for operand in operands for chunk in operand.chunks if chunk.is_lost), None)
        if gone is not None:
            spec = tensors[name].spec
            tensors[name] = StoredTensor(spec, (gone._replace(box=whole(spec.shape)),))
    return replace(first, tensors=tensors)


@dataclass(frozen=True, slots=True)
class Entries:
    """What becomes of the entries of a layout: each is `written`, or `dropped` for a reason.

    The groups of dropped ones are counted from the key path `prefix` on.
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
        """Return the balance of a layout: entries are written that `written` names, or whose bytes are `used`.

        Raises `Unsupported` unless each entry is accounted for.
        """
        names = frozenset(read.names).intersection(written)
        rest = [name for name in read.names if name not in names and name not in dropped]
        names |= with_bytes_in(read, rest, used) if rest else frozenset()
        lost = [name for name in rest if name not in names]
        if lost:
            message = f"no rule or option drops it, but it would be lost{and_more(len(lost) - 1)}"
            raise Unsupported(message, path=read.root, tensor=lost[0], hint=f"drop it with --exclude '{lost[0]}'")
        return cls(read, names, {name: why for name, why in dropped.items() if name not in names}, prefix)

    @property
    def left(self) -> int:
        """Return how many tensors are dropped although no rule or option asks for it."""
        return sum(why == UNKNOWN for why in self.dropped.values())

    def groups(self) -> tuple[LeftOut, ...]:
        """Count what was dropped, by where it lies and why."""
        return summarize(self.read, self.prefix, self.dropped, self.written)


def with_bytes_in(read: Layout, names: Iterable[str], used: Iterable[Layout]) -> frozenset[str]:
    """Return the tensors whose bytes other layouts use, under any name, whole or in part."""
    offsets: dict[Path, list[int]] = defaultdict(list)
    for layout in used:
        for tensor in layout.tensors.values():
            for chunk in tensor.chunks:
                offsets[layout.root / chunk.path].append(chunk.offset)
    places = {path: sorted(found) for path, found in offsets.items()}

    def is_used(chunk: Chunk) -> bool:
        found = places.get(read.root / chunk.path, [])
        at = bisect_left(found, chunk.offset)
        return at < len(found) and found[at] < chunk.offset + max(chunk.length, 1)

    tensors = (name for name in names if name in read.tensors)
    return frozenset(name for name in tensors if any(map(is_used, read.tensors[name].chunks)))


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """All that an output is made of: a draft for each part of a checkpoint, and other files, made or copied unchanged.

    All of it comes from the `origins`, and some tensors from `also_read`, such as the base. `entries` are what became
    of all that was read, `left_behind` the files of the sources that are neither read nor copied, `wrapper` the key
    that a model is taken out of, `world_size` the ranks that a sharded output is for, `completed` the entries that are
    zeros because the sources lack them, `notes` what else there is to say, `salvaged` the account of what was damaged,
    if that was asked for. It `is_fitted` if config.json describes all tensors, and they have the shapes it calls for.
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
    def replaces_training(self) -> bool:
        """Return whether it may replace a training's checkpoint: as a file with all states, which has no manifest."""
        has_states = any(names_of_training(one.read) for one in self.entries)
        return self.is_file and has_states and not self.options.writer.is_model_only

    @property
    def files_used(self) -> set[Path]:
        """Return the files of the sources that were read, or are copied unchanged."""
        read = {path for draft in self.drafts for path in draft.read} | set(self.copied_files.values())
        return read | {one.read.root / name for one in self.entries for name in one.read.files}

    @property
    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by its name in the output."""
        sizes = {str(Path(part.place, file.name)): file.nbytes for part in self.drafts for file in part.files}
        sizes |= {name: len(content) for name, content in self.made.items()}
        return sizes | {name: file_size(path) for name, path in self.copied_files.items()}

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of what goes where: by the options and the files as they are now, all else follows."""
        digest = blake2b(__version__.encode(), digest_size=16)
        for draft in self.drafts:
            files = [(file.name, file.nbytes) for file in draft.files]
            stamps = [(path.name, *stamp(path)) for path in draft.read]
            digest.update(repr((draft.place, draft.writer.name, files, stamps)).encode())
        return digest.hexdigest()

    def key(self, count: int) -> bytes:
        """Return what all processes have in common, if `count` of them make it, in words that another can follow."""
        words = {
            "sources": [[str(place.absolute()) for place in roots_of(origin.path)] for origin in self.origins],
            "options": self.options.to_json(),
            "parts": count,
            "plan": self.fingerprint,
        }
        return json.dumps(words, indent=1, sort_keys=True).encode()

    def say(self, *notes: str) -> Conversion:
        """Return the conversion with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def names_in(self, place: str) -> list[str]:
        """Return the names of the files directly in a directory of the output."""
        return [path.name for path in map(Path, self.file_sizes) if path.parent == Path(place)]


def draft_of_model(model: Model, output: Path, options: ConvertOptions) -> Conversion:
    """Draft the files of one model, with config and tokenizer if the format is that of a model alone.

    Raises `Unsafe` if the output would replace the base whose tensors are read.
    """
    if model.base is not None:
        require_separate_destination(model.base, output, options.writer)
    is_alone = options.writer.is_model_only
    world_size = options.world_size or model.part.layout.world_size or 1
    draft = Draft.of(
        [model.layout, *model.others],
        options,
        world_size,
        made_of=model.made_of or source_of(model.layout),
        renamed=renamed_in(model),
        cast=model.casts,
        recipes=model.made_recipes(),
        stem=model.companions.stem if is_alone else "model",
    )
    return Conversion(
        origins=[Origin.of(path) for path in model.origins],
        also_read=[Origin.of(model.base.path)] if model.base is not None else [],
        output=output,
        options=options,
        drafts=[draft],
        made=model.companions.to_files() if is_alone else {},
        entries=[entries_of(model, draft)],
        wrapper=model.weights.wrapper if is_alone else "",
        world_size=world_size if options.writer.is_sharded else None,
        notes=model.remarks,
        is_fitted=isinstance(model.expected, Form),
    )


def entries_of(model: Model, draft: Draft) -> Entries:
    """Return what became of the entries that a model was read from."""
    written = model.weights.origins_of(draft.wanted.tensors) | model.merged
    dropped = {**model.weights.left_out, **model.dropped, **lost_in(draft, model.weights)}
    return Entries.of(model.part.layout, written, dropped, model.weights.prefix, draft.sources)


def lost_in(draft: Draft, weights: Weights) -> dict[str, str]:
    """Return why entries of a damaged checkpoint are not written."""
    lost = draft.given.tensors.keys() - draft.wanted.tensors if draft.given else ()
    return dict.fromkeys(weights.origins_of(lost), DAMAGED)


def renamed_in(model: Model) -> dict[str, str]:
    """Return the weights that get another name: the name in the checkpoint, and the new one.

    Of several that one became it is the first, and how many more there are.
    """
    became: dict[str, list[str]] = {}
    for new, old in model.weights.came_from.items():
        if new in model.layout.tensors and old != new:
            became.setdefault(old, []).append(new)
    return {old: news[0] + and_more(len(news) - 1) for old, news in became.items()}


def stamp(path: Path) -> tuple[int, int, int]:
    """Return a file's size in bytes, the time of its last change in nanoseconds, and a remote one's inode, else 0."""
    with translate_os_errors(path):
        status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino if is_remote(path) else 0
