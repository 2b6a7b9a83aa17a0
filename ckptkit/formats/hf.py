"""Read and write Hugging Face checkpoints: safetensors files, and the index that maps tensors to files.

Source: huggingface_hub's `split_torch_state_dict_into_shards`. Also reads files per rank, which
torch.distributed.checkpoint's `HuggingFaceStorageWriter` writes, and so transformers with
`distributed_checkpoint=True`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from ckptkit.errors import ELSEWHERE, CkptError, Corrupt, Incomplete, Report, Unsupported, raise_problem
from ckptkit.formats.index_file import make_index, read_index
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.protocols import JOURNAL, FormatWriter
from ckptkit.formats.safetensors_headers import (
    check_header_with_library,
    make_header,
    read_header_with_metadata,
    require_storable_spec,
)
from ckptkit.io.file import is_existing_path, names_in, read_small
from ckptkit.io.remote_file import iterate_with_prefetch
from ckptkit.layout import Chunk, Extent, Layout, NewFile, Spec, StoredTensor, WriterOptions, check_chunks_tile
from ckptkit.words import command_line, natural_sort_key

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS_FILE = "transformers_weights"  # the key of config.json that names a file, or an index, of another name
_CONFIG = "config.json"
_CONFIG_LIMIT = 1 << 24  # bytes; a config.json has a few kilobytes
_COPY = f"copy the missing files here, or {ELSEWHERE}"
_SUFFIX = ".safetensors"
_INDEX = f"{_SUFFIX}.index.json"
_NUMBERED = re.compile(r"model-([0-9]+)-of-([0-9]+)\.safetensors")
_SHARD = re.compile(r"shard-([0-9]{5,})-model-([0-9]{5,})-of-([0-9]{5,})\.safetensors")  # rank and part, counted from 1
_DELTA = re.compile(r"delta-[0-9]{5}-of-[0-9]{5}\.safetensors")  # weight updates, not a model
_ENCODING = "delta_encoding"  # in the index of weight updates that slime or miles publish
_MANIFEST = 1 << 28  # bytes; a larger `manifest.json` is refused
_HEAD = 1 << 16  # bytes; most headers are shorter


class HuggingFace(FormatWriter):
    """The format of `model.safetensors`, or several files with an index. Files per rank are only read."""

    name = "hf"
    known_by = "`*.safetensors` with its index"
    is_model_only = True

    def owns_file(self, name: str) -> bool:
        return name.endswith((_SUFFIX, _INDEX))

    def rank_of(self, name: str) -> int | None:
        match = _SHARD.fullmatch(name)
        return int(match[1]) - 1 if match else None

    def detect(self, path: Path) -> bool:
        if path.is_dir():
            return any(map(self.owns_file, names_in(path)))
        return path.suffix == _SUFFIX

    def check_files_complete(self, path: Path, report: Report) -> None:
        """Report files that the index names and that are missing; raise if the files are ambiguous."""
        find_safetensors(path, report)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout of a file, or of the files of a directory that belong together.

        The index, the single file or the numbers in their names determine these files. Of files per rank, those of the
        last ranks may be missing without a trace: nothing records the world size, or the shape of a tensor. The
        layout's `world_size` is the number of ranks found.
        """
        indexed = find_safetensors(path, report)
        chunks: dict[str, list[Chunk]] = {}
        texts: dict[str, str] = {}
        unread = set(indexed.missing)
        for file in iterate_with_prefetch(indexed.root, indexed.names, lambda name: [(name, 0, _HEAD)]):
            try:
                is_shard = indexed.world_size is not None
                header, more = read_header_with_metadata(indexed.root / file, is_shard=is_shard, report=report)
            except CkptError as error:
                unread.add(file)
                report(error)
                continue
            texts = more | texts
            for name, chunk in header.items():
                chunks.setdefault(name, []).append(chunk)
        if indexed.index is not None:
            check_index(indexed.root / indexed.described_by, indexed.index, chunks, unread, report)
        tensors = {name: join_chunks(name, parts, indexed.root) for name, parts in chunks.items()}
        described_by = () if indexed.index is None else (indexed.described_by,)
        ranks = indexed.world_size
        layout = Layout(indexed.root, self.name, tensors, world_size=ranks, descriptions=described_by, texts=texts)
        if unread:
            if indexed.index is None:  # if ranks wrote shards, any tensor may be affected
                return replace(layout, absent=dict.fromkeys(tensors, "") if ranks is not None else {})
            absent = {name: file for name, file in indexed.index.items() if file in unread and name not in tensors}
            return replace(layout, absent=absent)
        gaps: list[CkptError] = []
        check_chunks_tile(layout, gaps.append)
        for gap in [indexed.lost] if gaps and indexed.lost else gaps:
            report(gap)
        return replace(layout, absent=dict.fromkeys(tensors, "")) if gaps and indexed.lost else layout

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:  # noqa: ARG002
        for name, tensor in layout.tensors.items():
            for chunk in tensor.chunks:
                yield Extent(chunk.path, chunk.offset, chunk.length, None, name)

    def lay_out_files(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        """Return the files for the tensors of `wanted`: headers, index, room for data. Writes no other entries."""
        specs = wanted.specs
        for name, spec in specs.items():
            require_storable_spec(name, spec)
        if options.file is not None:
            return (new_safetensors_file(options.file, specs, wanted.texts),)
        shares = split_into_files(specs, options)
        files = [
            new_safetensors_file(file, {name: specs[name] for name in members}, wanted.texts)
            for file, members in shares.items()
        ]
        if len(files) > 1:
            index = make_index(specs, {name: file for file, members in shares.items() for name in members})
            files.append(NewFile(f"{options.stem}{_INDEX}", len(index), ((0, index),)))
        return tuple(files)

    def check_with_own_library(self, written: Layout) -> None:
        """Raise `Corrupt` unless the safetensors library reads the tensors of `written` from each file."""
        files: dict[str, dict[str, Chunk]] = {}
        for name, tensor in written.tensors.items():
            for chunk in tensor.chunks:
                files.setdefault(chunk.path, {})[name] = chunk
        for file, chunks in files.items():
            check_header_with_library(written.root / file, chunks)


def new_safetensors_file(name: str, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> NewFile:
    """Return a safetensors file with its header, which has `metadata` as metadata, and room for the tensors."""
    header = make_header(specs, {"format": "pt", **metadata})
    return NewFile(name, len(header) + sum(spec.nbytes for spec in specs.values()), ((0, header),))


@dataclass(frozen=True, slots=True)
class IndexedFiles:
    """The files of a checkpoint in directory `root`, and the contents of their index, if there is one.

    `missing` are files that the index names and that are not there. `world_size` is the number of ranks that wrote the
    files, if each wrote its own. `lost` is the error for a rank without files; a rank without data writes none.
    `described_by` is the name of the index.
    """

    root: Path
    names: Sequence[str]
    index: Mapping[str, str] | None = None
    missing: Sequence[str] = ()
    world_size: int | None = None
    lost: Corrupt | None = None
    described_by: str = ""


def find_safetensors(path: Path, report: Report) -> IndexedFiles:
    """Return the files of the checkpoint at `path`; report missing ones. Raises an error if they are ambiguous."""
    if not path.is_dir():
        if _DELTA.fullmatch(path.name):
            raise delta_error(path.parent)
        is_indexed = _NUMBERED.fullmatch(path.name) and is_existing_path(path.parent / INDEX)
        require_no_compressed_deltas(path.parent, read_index(path.parent / INDEX)[1] if is_indexed else {})
        if _SHARD.fullmatch(path.name):
            hint = "pass the directory that has all shards"
            raise Unsupported("this file is the shard of one rank", path=path, hint=hint)
        return IndexedFiles(path.parent, [path.name])
    present = set(names_in(path))
    if JOURNAL in present:
        hint = "run the same `ckptkit apply ... --in-place` again: it completes the change"
        report(Incomplete("a change of this model was interrupted", path=path / JOURNAL, hint=hint))
    shards = [match for name in sorted(present) if (match := _SHARD.fullmatch(name))]
    if shards:
        return find_rank_safetensors(path, shards, present)
    candidates = files_that_loaders_open(path, present)
    if indices := sorted(name for name in candidates if name.endswith(_INDEX)):
        return read_indexed_files(path, indices, present, report)
    require_no_compressed_deltas(path, {})
    if any(map(_DELTA.fullmatch, present)):
        raise delta_error(path)
    numbered = [match for name in sorted(candidates) if (match := _NUMBERED.fullmatch(name))]
    if numbered:
        return find_numbered_files(path, numbered, present, report)
    names = [SINGLE] if SINGLE in candidates else sorted(name for name in candidates if name.endswith(_SUFFIX))
    if len(names) != 1:
        hint = f"pass one of them: {', '.join(names[:4])}"
        raise Unsupported(f"expected an index of the {len(names)} safetensors files, found none", path=path, hint=hint)
    return IndexedFiles(path, names)


def files_that_loaders_open(path: Path, present: set[str]) -> set[str]:
    """Return only the file that config.json names, if it names one in the directory, else all that are `present`.

    Source: `_get_resolved_checkpoint_files` in transformers/modeling_utils.py.
    """
    usual = {name for name in present if name in (SINGLE, INDEX) or _NUMBERED.fullmatch(name)}
    if _CONFIG not in present or not any(name.endswith((_SUFFIX, _INDEX)) for name in present - usual):
        return present
    config = parse_json(read_small(path / _CONFIG, _CONFIG_LIMIT), path / _CONFIG)
    named = config.get(WEIGHTS_FILE) if isinstance(config, dict) else None
    return {named} if isinstance(named, str) and named in present else present


def find_rank_safetensors(path: Path, shards: Sequence[re.Match[str]], present: set[str]) -> IndexedFiles:
    """Return the files of all ranks. Raises `Corrupt` if a part is missing, or another model is in the directory too.

    A rank without shards in some part of the model has no file for that part.
    """
    names = [match[0] for match in shards]
    ranks, parts = ({int(match[i]) for match in shards} for i in (1, 2))
    other = min((name for name in present.difference(names) if name.endswith((_SUFFIX, _INDEX))), default=None)
    if other is not None:
        hint = "move one of them elsewhere: they may be of different saves, or one was made from the other"
        raise Corrupt(f"both the shards of {len(ranks)} ranks and `{other}` are here", path=path, hint=hint)
    if lost := find_missing_number_error("shard-*-model-{:05d}-*", parts, part_count_in_names(path, shards, 3), path):
        raise lost
    lost = find_missing_number_error("shard-{:05d}-*", ranks, max(ranks), path)
    return IndexedFiles(path, names, world_size=len(ranks), lost=lost)


def find_numbered_files(path: Path, files: Sequence[re.Match[str]], present: set[str], report: Report) -> IndexedFiles:
    """Return the files `model-0000i-of-0000N` without an index; report if one of the N is missing."""
    if SINGLE in present:
        raise two_exports_error(path, files[0][0])
    count = part_count_in_names(path, files, 2)
    numbers = {int(match[1]) for match in files}
    if lost := find_missing_number_error(f"model-{{:05d}}-of-{count:05d}{_SUFFIX}", numbers, count, path):
        report(lost)
    return IndexedFiles(path, [match[0] for match in files])


def part_count_in_names(path: Path, files: Sequence[re.Match[str]], regex_group: int) -> int:
    """Return the number of parts that all file names contain. Raises `Corrupt` where they disagree."""
    counts = {int(match[regex_group]) for match in files}
    if len(counts) > 1:
        few, many = min(counts), max(counts)
        raise Corrupt(f"the shards come from different saves: one of {few} files, one of {many} files", path=path)
    return counts.pop()


def find_missing_number_error(pattern: str, numbers: set[int], last: int, path: Path) -> Incomplete | None:
    """Return the error for the first number from 1 to `last` without a file named by `pattern`, if any."""
    missing = next(number for number in count(1) if number not in numbers)
    if missing > last:
        return None
    message = f"`{pattern.format(missing)}` is missing: expected numbers 1 to {last}, found {len(numbers)} of them"
    return Incomplete(message, path=path, hint=_COPY)


def two_exports_error(path: Path, other: str) -> Corrupt:
    """Return the error for a single file beside `other`, a file of a model in several files."""
    hint = "remove the older export: loaders disagree on which one they use"
    return Corrupt(f"both `{SINGLE}` and `{other}` are here, from different exports", path=path, hint=hint)


def delta_error(path: Path) -> Unsupported:
    hint = f"run {command_line('apply', 'BASE', path, 'OUT')} with the checkpoint that it was made from"
    return Unsupported("expected a checkpoint, found a delta", path=path, hint=hint)


def require_no_compressed_deltas(directory: Path, metadata: Mapping[str, Any]) -> None:
    """Raise `Unsupported` if the safetensors in a directory are compressed weight updates of an RL trainer.

    `metadata` comes from their index. Sources: `disk_delta.py` of slime and miles, whose index names an encoding;
    `delta_checkpoint.py` of SkyRL, which writes a `manifest.json`.
    """
    manifest = directory / "manifest.json"
    value = parse_json(read_small(manifest, _MANIFEST), manifest) if is_existing_path(manifest) else None
    if isinstance(value, dict) and {"base_version", "tensors"} <= value.keys():
        trainer = "SkyRL"
    elif _ENCODING in metadata:
        trainer = "slime or miles"
    else:
        return
    message = f"weight updates of {trainer}, which ckptkit stopped reading in 0.1"
    raise Unsupported(message, path=directory, hint=f"apply them with {trainer}, and pass the model")


def read_indexed_files(path: Path, indices: Sequence[str], present: set[str], report: Report) -> IndexedFiles:
    """Return the files that the index names; report missing ones. Refuses a single file beside them as ambiguous.

    Some libraries name an index after their files. Refuses several of these, unless one has the usual name.
    """
    if len(indices) > 1 and INDEX not in indices:
        hint = f"pass one of them alone: move the others away from {path}"
        raise Unsupported(f"expected the index of one model, found {', '.join(indices)}", path=path, hint=hint)
    described_by = INDEX if INDEX in indices else indices[0]
    index, metadata = read_index(path / described_by)
    require_no_compressed_deltas(path, metadata)
    single = described_by.removesuffix(".index.json")
    names = sorted(set(index.values()))
    if single in present and single not in names:
        raise two_exports_error(path, described_by)
    missing = [name for name in names if name not in present]
    if missing:
        message = f"{len(missing)} of {len(names)} files are missing: {', '.join(missing)}"
        report(Incomplete(message, path=path, files=missing, hint=_COPY))
    available = [name for name in names if name in present]
    return IndexedFiles(path, available, index, missing, described_by=described_by)


def check_index(
    path: Path,
    file_by_tensor: Mapping[str, str],
    chunks: Mapping[str, Sequence[Chunk]],
    unread: Container[str],
    report: Report,
) -> None:
    """Report where the index and the headers of the files, except `unread` ones, do not name the same tensors."""
    for name, file in file_by_tensor.items():
        files = [chunk.path for chunk in chunks.get(name, ())]
        if files != [file] and file not in unread:
            where = f"found it in {' and '.join(f'`{file}`' for file in files)}" if files else "found it in no file"
            report(Corrupt(f"expected the tensor in `{file}` (index), {where}", path=path, tensor=name))
    for name in chunks:
        if name not in file_by_tensor:
            message = f"`{chunks[name][0].path}` contains a tensor that the index does not list"
            report(Corrupt(message, path=path, tensor=name))


def join_chunks(name: str, chunks: Sequence[Chunk], root: Path) -> StoredTensor:
    """Return the tensor of these chunks. Its shape ends where the last chunk does: nothing records it."""
    first, *others = chunks
    for chunk in others:
        if (chunk.dtype, len(chunk.size)) != (first.dtype, len(first.size)):
            first_text, other_text = (f"{Spec(c.dtype, c.size)} in `{c.path}`" for c in (first, chunk))
            raise Corrupt(f"the shards disagree: {first_text}, {other_text}", path=root, tensor=name)
    shape = tuple(map(max, zip(*(chunk.box.stop for chunk in chunks), strict=True)))
    return StoredTensor(Spec(first.dtype, shape), tuple(chunks))


def split_into_files(specs: Mapping[str, Spec], options: WriterOptions) -> dict[str, list[str]]:
    """Return the names of the tensors in each file: as `options.places` says, or by size in natural order.

    A tensor larger than the largest file has its own.
    """
    if options.places is not None:
        shares: dict[str, list[str]] = {}
        for name in specs:
            shares.setdefault(options.places[name], []).append(name)
        return dict(sorted(shares.items()))
    shards: list[list[str]] = [[]]
    filled, stem = 0, options.stem
    for name in sorted(specs, key=lambda name: (natural_sort_key(name), name)):
        nbytes = specs[name].nbytes
        if shards[-1] and filled + nbytes > options.max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    if len(shards) == 1:
        return {f"{stem}{_SUFFIX}": shards[0]}
    return {f"{stem}-{i:05d}-of-{len(shards):05d}{_SUFFIX}": names for i, names in enumerate(shards, start=1)}
