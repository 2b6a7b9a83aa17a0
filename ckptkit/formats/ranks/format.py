"""Read and write directories with a file of torch.save per rank, whose shards are DTensors or ShardedTensors.

No file describes the whole checkpoint: each tensor has the position of its rank's shard, and file names have the rank.
So ckptkit opens all files and checks that they agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsafe, Unsupported, errors_at, raise_problem
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.archives.torch_save import archive_extents_of, read_raw_pickle, report_truncated_files
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.protocols import FormatWriter
from ckptkit.formats.rank_names import read_each_file
from ckptkit.formats.ranks.file_names import (
    BARE,
    CONFIG,
    MODEL,
    NAMINGS,
    OPTIMIZER,
    REST,
    WITH_WORLD,
    RankFiles,
    find_rank_files_among,
    has_rank_model_files,
)
from ckptkit.formats.ranks.optimizer import join_optimizer
from ckptkit.formats.ranks.write_files import lay_out_rank_files, patches_for_rank_files, sharding_example_of
from ckptkit.formats.shards.join import join_files
from ckptkit.formats.shards.rank_file import RankFile, ShardedTensor, read_rank_file
from ckptkit.io.file import names_in, read_small
from ckptkit.layout import Extent, FileOffset, Layout, NewFile, Patch, StoredTensor, WriterOptions, check_chunks_tile
from ckptkit.layout.gc_pause import collector_paused
from ckptkit.layout.wrappers import is_flat_parameter_name


# Files may have duplicates: views of flat parameters under the names of parameters.
#
# Source: torch/distributed/fsdp/_state_dict_utils.py, `_local_post_state_dict_hook`, with `use_orig_params=True`: a
# rank's shard of each parameter, flattened, is a view of the flat parameter in the same file.
def without_flat_parameter_views(files: Sequence[RankFile]) -> list[RankFile]:
    """Return the files of all ranks without the tensors that are views of flat parameters in them."""
    views = set()
    for file in files:
        spans = [
            (chunk.offset, chunk.offset + chunk.length)
            for name, tensor in file.tensors.items()
            if isinstance(tensor.spread, ShardedTensor) and is_flat_parameter_name(str(file.flat.keys[name][-1]))
            for chunk in tensor.chunks
        ]
        for name, tensor in file.tensors.items() if spans else ():
            if tensor.spread is None and tensor.chunks[0].length:
                begin, end = tensor.chunks[0].offset, tensor.chunks[0].offset + tensor.chunks[0].length
                if any(low <= begin and end <= high for low, high in spans):
                    views.add(name)
    if not views:
        return list(files)
    kept = ({name: one for name, one in file.flat.tensors.items() if name not in views} for file in files)
    return [replace(file, flat=replace(file.flat, tensors=own)) for file, own in zip(files, kept, strict=True)]


_OWN = ("rng",)  # keys that are per-rank state even if all ranks have equal values


def join_training_state_entries(files: Sequence[RankFile]) -> FlatState:
    """Return the further entries of the files, by their keys. Per-rank entries are under `rank_N` below their key."""
    joined = FlatState()
    for top in dict.fromkeys(key[0] for file in files for key in file.flat.keys.values()):
        if top in (MODEL, OPTIMIZER):
            message = f"an entry is called `{top}`, which is the name of the contents of other files"
            raise Corrupt(message, path=files[0].name)
        shared = top not in _OWN and all(
            comparable_content(file, top) == comparable_content(files[0], top) for file in files
        )
        for file in files[:1] if shared else files:
            above = (top,) if shared else (top, f"rank_{file.rank}")
            for name, key in file.flat.keys.items():
                if key[0] == top:
                    tensor = file.flat.tensors.get(name)
                    entry = file.flat.blobs[name] if tensor is None else StoredTensor(tensor.spec, tensor.chunks)
                    joined.put((*above, *key[1:]), entry)
    return joined


def comparable_content(file: RankFile, top_key: str | int) -> list[tuple[object, ...]]:
    """Return the comparable part of a rank's entries below a key: values, and the checksums of tensors."""
    content: list[tuple[object, ...]] = []
    for name, key in file.flat.keys.items():
        if key[0] == top_key and name in file.flat.blobs:
            content.append((name, file.flat.blobs[name].content))
        elif key[0] == top_key:
            tensor = file.flat.tensors[name]
            content.append((name, tensor.spec, *(chunk.crc32 for chunk in tensor.chunks)))
    return content


_CONFIG_LIMIT = 1 << 16  # bytes
SHARD_KINDS = (b"torch.distributed._shard.sharded_tensor", b"torch.distributed.tensor", b"torch.distributed._tensor")


class FilePerRank(FormatWriter):
    """The format of one file of torch.save per rank: a directory with the files of all ranks."""

    name = "ranks"
    known_by = "a file of torch.save for each rank"
    needs_shapes = True
    is_sharded = True
    repeats = True

    def owns_file(self, name: str) -> bool:
        """Return True for the file of a rank, and for the file with the number of ranks."""
        return name == CONFIG or any(naming.match_name(name) for naming in NAMINGS)

    def rank_of(self, name: str) -> int | None:
        kind_and_match = next((match for naming in (*NAMINGS, BARE) if (match := naming.match_name(name))), None)
        return int(kind_and_match[1]["rank"]) if kind_and_match else None

    def is_bound_to_world_size(self, path: Path) -> bool:  # noqa: ARG002
        """Return True: each rank reads its own file, and some names contain the number of ranks."""
        return True

    def detect(self, path: Path) -> bool:
        """Return True for a directory with model files of ranks, by their names or by the shards in one of them."""
        if not path.is_dir():
            return False
        names = names_in(path)
        if has_rank_model_files(names):
            return True
        bare = min(filter(BARE.match_name, names), default=None)
        try:
            pickle = b"" if bare is None else read_raw_pickle(path / bare)
        except (Corrupt, Unsafe, Unsupported):
            return False  # not a readable file of this format; another format may claim it
        return any(kind in pickle for kind in SHARD_KINDS)

    def check_files_complete(self, path: Path, report: Report) -> None:
        """Report truncated files; raise `Corrupt` if one is missing or belongs to another run."""
        report_truncated_files(path, find_rank_files(path).names, report)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout with the keys `model` and `optimizer`. Raises an error for a tensor that cannot be read."""
        rank_files = find_rank_files(path, report)
        with collector_paused(), errors_at(path=path):
            flat = join_rank_files(path, rank_files, report)
            descriptions = (*((CONFIG,) if (path / CONFIG).exists() else ()), *sorted(rank_files.names))
            flats = (flat.tensors, flat.blobs, flat.keys)
            layout = Layout(path, self.name, *flats, rank_files.world, descriptions, spares=flat.spares)
            check_chunks_tile(layout, report)
        return layout

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        return archive_extents_of(layout, find_rank_files(layout.root, report).names, report)

    def lay_out_files(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        """Return the files of `options.world_size` ranks, named and sharded like the files of `wanted`, if any."""
        return tuple(lay_out_rank_files(wanted, sharding_example_of(wanted), options.world_size))

    def remarks_on_changes(self, wanted: Layout) -> Iterator[str]:
        if sharding_example_of(wanted).was_sharded:
            yield "FSDP1's ShardedTensors become DTensors as torch 2.13 has them: a run with FSDP2 loads these files"

    def patches_after_data(self, written: Layout, checksums: Mapping[FileOffset, int]) -> Iterator[tuple[str, Patch]]:
        """Return the replicas that several ranks store, and the CRC-32 of each storage."""
        rank_files = find_rank_files(written.root)
        files = [read_rank_files(written.root, rank_files, kind, (kind,), raise_problem) for kind in rank_files.files]
        return patches_for_rank_files(written.root, files, checksums)


def find_rank_files(path: Path, report: Report = raise_problem) -> RankFiles:
    """Return the files of ranks in a directory; report missing ones. Raises `Corrupt` if they are not of one run."""
    with errors_at(path=path):
        rank_files = find_rank_files_among(names_in(path), lambda problem: report(problem.blame(path=path)))
        if rank_files is None:
            raise Corrupt("no rank's file contains a model")
    if rank_files.naming is WITH_WORLD and (path / CONFIG).exists():
        config = parse_json(read_small(path / CONFIG, _CONFIG_LIMIT), path / CONFIG)
        recorded = config.get("world_size") if isinstance(config, dict) else None
        if type(recorded) is int and recorded != rank_files.world:
            message = f"expected {recorded} ranks, found files of {rank_files.world}"
            raise Corrupt(message, path=path / CONFIG, hint="check that all files come from one run")
    return rank_files


def join_rank_files(path: Path, rank_files: RankFiles, report: Report) -> FlatState:
    """Return model, optimizer and other entries of all ranks; report files that cannot be read, and skip them."""
    model = without_flat_parameter_views(
        read_rank_files(path, rank_files, MODEL, () if rank_files.naming is BARE else (MODEL,), report)
    )
    if not model:
        raise Corrupt("no rank's file with a model can be read")
    whole = join_files(model, reporter_naming_file(path, rank_files, MODEL, report))
    try:
        if files := read_rank_files(path, rank_files, OPTIMIZER, (OPTIMIZER,), report):
            report_file = reporter_naming_file(path, rank_files, OPTIMIZER, report)
            is_in_order = rank_files.naming.is_in_order
            whole.update(join_optimizer(files, model, report_file, rank_files.world, is_in_model_order=is_in_order))
    except CkptError as error:
        report(error)
    if files := read_rank_files(path, rank_files, REST, (), report):
        whole.update(join_training_state_entries(files))
    return whole


def reporter_naming_file(path: Path, rank_files: RankFiles, kind: str, report: Report) -> Report:
    """Return a report that names the file of the rank whose shard of a tensor is missing."""

    def report_file(problem: CkptError) -> None:
        if isinstance(problem, Incomplete) and problem.ranks:
            problem.blame(path=path / rank_files.file_name_of(kind, problem.ranks[0]))
        report(problem)

    return report if report is raise_problem else report_file


def read_rank_files(
    path: Path, rank_files: RankFiles, kind: str, key_prefix: tuple[str, ...], report: Report
) -> list[RankFile]:
    files = dict(sorted(rank_files.files.get(kind, {}).items()))
    return list(
        read_each_file(path, files, lambda rank, name: read_rank_file(path, name, rank, key_prefix), report).values()
    )
