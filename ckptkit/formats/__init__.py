"""Find the format of a checkpoint and read its layout. `FORMATS` is the table of all formats.

A format is a module here and a line in `FORMATS`. Formats do not import each other; everything else gets them from
the table. Other packages add formats with the entry point `ckptkit.formats`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path, PurePath
from typing import NamedTuple, cast

from ckptkit.entry_points import PluginTable, import_object
from ckptkit.errors import NotACheckpoint, Report, Unsupported, Usage, raise_problem, translate_os_errors
from ckptkit.formats.protocols import EntryWriter as EntryWriter
from ckptkit.formats.protocols import FormatReader as FormatReader
from ckptkit.formats.protocols import FormatWriter as FormatWriter
from ckptkit.io.file import missing_path_error, names_in
from ckptkit.layout import Layout


class KnownFormat(NamedTuple):
    """A format of the table: its class, the title to show, and whether ckptkit writes it too.

    The class is imported on first use, and detection imports it only if a name matches the pattern `files`: the name of
    a file, or of an entry of a directory. `perhaps` is a pattern of names that files of other formats have too, so only
    their contents decide. `main` is a pattern of the files that contain the model itself. A directory without a main
    file belongs to another format if that format claims it too: an `ema.safetensors` beside a full training state is
    not the checkpoint.
    """

    where: str
    title: str
    files: str
    is_written: bool = False
    perhaps: str = r"(?!)"
    main: str = r".*"


_STATES = r"(state|.*model.*|checkpoint.*|ckpt.*)\.(pt|pth|bin|ckpt)"
_FORMATS_OF_FILES = {  # not .ckpt: some trainers use it for directories too
    ".safetensors": "hf",
    **dict.fromkeys((".pt", ".pth", ".bin"), "pt"),
}
_COMMON = ("dcp", "hf", "deepspeed", "pt")  # formats named in the hint for an unknown path

# by the name that users type; `detect_format` tries the formats in this order
FORMATS = PluginTable(
    "ckptkit.formats",
    KnownFormat,
    {
        "dcp": KnownFormat(
            "ckptkit.formats.dcp.format:Dcp",
            "PyTorch distributed checkpoint (DCP)",
            r"(__\d+)?\.metadata|.*__\d+_\d+\.distcp",
            is_written=True,
        ),
        "torch_checkpointing": KnownFormat(
            "ckptkit.plugins.torch_checkpointing.format:TorchCheckpointing",
            "the package torch_checkpointing",
            r"metadata\.pkl",
            is_written=True,
            perhaps=r".+_0\.pt",
        ),
        "orbax": KnownFormat(
            "ckptkit.plugins.orbax.format:Orbax",
            "orbax",
            r"_METADATA|_CHECKPOINT_METADATA|manifest\.ocdbt",
            main=r"_METADATA|manifest\.ocdbt",
        ),
        "hf": KnownFormat(
            "ckptkit.formats.hf:HuggingFace",
            "Hugging Face safetensors",
            r".*\.safetensors(\.index\.json)?",
            is_written=True,
            main=r".*(model|consolidated).*\.safetensors|shard-.*\.safetensors|.*\.safetensors\.index\.json",
        ),
        "megatron": KnownFormat(
            "ckptkit.plugins.megatron.format:Megatron", "Megatron's ranks", r"mp_rank_[0-9_]+|model_(optim_)?rng\.pt"
        ),
        "consolidated": KnownFormat(
            "ckptkit.plugins.meta:Consolidated", "Meta's ranks", r"consolidated\.[0-9]{2}\.pth"
        ),
        "universal": KnownFormat(
            "ckptkit.plugins.deepspeed.universal:Universal",
            "DeepSpeed universal checkpoint",
            r"zero|latest_universal",
            is_written=True,
        ),
        "deepspeed": KnownFormat(
            "ckptkit.plugins.deepspeed.format:DeepSpeed",
            "DeepSpeed",
            r".*_(model|optim)_states\.pt|layer_.*-model_states\.pt",
        ),
        "ranks": KnownFormat(
            "ckptkit.formats.ranks.format:FilePerRank",
            "torch.save, a file for each rank",
            r".*[._-]rank[_-]?[0-9]+\.(pt|pth|bin)",
            is_written=True,
            perhaps=r"rank[_-]?[0-9]+\.(pt|pth|bin)",
        ),
        "pt_shards": KnownFormat(
            "ckptkit.formats.pt_shards:PtShards",
            "torch.save, several files and their index",
            r".*\.(bin|pt|pth)\.index\.json|.*-[0-9]{5}-of-[0-9]{5}\.(bin|pt|pth)",
        ),
        "pt": KnownFormat("ckptkit.formats.pt:Pt", "torch.save", r".*", is_written=True, main=_STATES),
    },
)

# the `module:function` that decompresses entries, by the name of their wrapper
UNPACKERS = {
    "stream.zstd/1": "ckptkit.formats.archives.zstd:decompress_zstd_streams",
    "zarr": "ckptkit.plugins.orbax.arrays:decompress_cells",
}


@cache
def get_format(name: str) -> FormatReader:
    return cast(FormatReader, import_object(FORMATS[name].where)())


def get_writer(name: str) -> FormatWriter:
    """Return the format `name` as a writer. Raises `Usage` if it is unknown, `Unsupported` if ckptkit only reads it."""
    if name not in FORMATS:
        raise Usage(f"unknown format `{name}`", hint=f"use one of {', '.join(writable_formats())}")
    writer = get_format(name)
    if not isinstance(writer, FormatWriter):
        raise Unsupported(f"ckptkit reads `{name}`, but does not write it")
    return writer


def writable_formats() -> tuple[str, ...]:
    return tuple(name for name, known in FORMATS.items() if known.is_written)


def find_format_of_file_name(name: str) -> str | None:
    """Return the format for an output file of this name; None if the name may be a directory's."""
    return _FORMATS_OF_FILES.get(PurePath(name).suffix)


def describe_writable_formats() -> str:
    """Return the names of all formats that ckptkit writes, each with its title."""
    return "; ".join(f"{name}: {title_of_format(name)}" for name in writable_formats())


def title_of_format(name: str) -> str:
    """Return the title of the format `name`. An unknown name is not repeated: it may contain anything."""
    return FORMATS[name].title if name in FORMATS else "a checkpoint"


def describe_common_formats() -> str:
    """Return how to recognize the most common formats, for the hint on a path that no format claims."""
    return ", ".join(get_format(name).known_by for name in _COMMON if name in FORMATS)


def detect_format(path: Path) -> FormatReader | None:
    """Return the first format that claims `path` and finds its main files there, else the first that claims it."""
    if find_single_dcp_file_error(path) is not None:
        return None
    with translate_os_errors(path):
        names = names_in(path) if path.is_dir() else [path.name]
        claims = (reader for reader in likely_formats(names, include_possible=True) if reader.detect(path))
        first = next(claims, None)
        if first is None or not path.is_dir() or has_main_file(first, names):
            return first
        return next((reader for reader in claims if has_main_file(reader, names)), first)


def is_main_file_name(name: str) -> bool:
    """Return whether some format stores a model itself in a file of this name."""
    return any(reader.owns_file(name) and has_main_file(reader, [name]) for reader in likely_formats([name]))


def lacks_main_file(path: Path, reader: FormatReader) -> bool:
    """Return whether the format claims a directory by files that may be beside any checkpoint."""
    return path.is_dir() and not has_main_file(reader, names_in(path))


def has_main_file(reader: FormatReader, names: Iterable[str]) -> bool:
    return has_matching_name(names, FORMATS[reader.name].main)


def find_single_dcp_file_error(path: Path) -> NotACheckpoint | None:
    """Return the error for a single file of a DCP directory; None for any other path."""
    with translate_os_errors(path):
        if not has_matching_name([path.name], FORMATS["dcp"].files) or not path.is_file():
            return None
    kind = "one shard" if path.suffix == ".distcp" else "the metadata"
    hint = f"pass the directory {path.absolute().parent}"
    return NotACheckpoint(f"this file is {kind} of a DCP directory, not a checkpoint", path=path, hint=hint)


def has_known_file_name(names: Iterable[str]) -> bool:
    """Return whether some format uses a file with one of these names."""
    names = list(names)
    return any(reader.owns_file(name) for reader in likely_formats(names) for name in names)


def is_checkpoint_by_contents(path: Path) -> bool:
    """Return whether a directory is a checkpoint of a format that only the contents of its files reveal."""
    with translate_os_errors(path):
        names = names_in(path)
        likely = [name for name, known in FORMATS.items() if has_matching_name(names, known.perhaps)]
        return any(get_format(name).detect(path) for name in likely)


def likely_formats(names: Collection[str], *, include_possible: bool = False) -> Iterator[FormatReader]:
    """Yield, and import, the formats that use (with `include_possible`: may use) a file with one of these names."""
    for name, known in FORMATS.items():
        if has_matching_name(names, known.files) or (include_possible and has_matching_name(names, known.perhaps)):
            yield get_format(name)


def has_matching_name(names: Iterable[str], pattern: str) -> bool:
    return any(map(re.compile(pattern, re.DOTALL).fullmatch, names))


def require_known_format(path: Path) -> FormatReader:
    """Return the format of the checkpoint at `path`. Raises `NotACheckpoint` if none claims it."""
    reader = detect_format(path)
    if reader is None:
        if (shard := find_single_dcp_file_error(path)) is not None:
            raise shard
        if not path.exists():
            raise missing_path_error(path)
        raise no_format_error(path, f"pass a checkpoint: {describe_common_formats()} and others")
    return reader


def no_format_error(path: Path, hint: str | None = None) -> NotACheckpoint:
    return NotACheckpoint("no checkpoint in any known format", path=path, hint=hint)


def decompress_entries(layout: Layout, report: Report = raise_problem) -> Layout:
    """Return the layout with all compressed entries decompressed into a temporary file, which the layout keeps alive.

    Reports each entry that cannot be decompressed, and leaves it unchanged.
    """
    for wrapper in sorted({item.wrapper for _, item in layout.chunks_and_blobs} & UNPACKERS.keys(), key=str):
        layout = import_object(UNPACKERS[str(wrapper)])(layout, report)
    return layout


def locate_all_chunks(layout: Layout, report: Report = raise_problem, *, decompress: bool = True) -> Layout:
    """Return the layout with the bytes of every chunk located inside their archives. A plan needs located chunks.

    Decompresses compressed entries, unless `decompress` is false. Reports each chunk that cannot be located, and
    leaves it unchanged.
    """
    from ckptkit.formats.archives import locate as envelopes  # only some layouts need it

    with translate_os_errors(layout.root):
        return envelopes.locate_in_archives(
            decompress_entries(layout, report) if decompress else layout, report, skipped_wrappers=UNPACKERS
        )
