"""Read Megatron's legacy checkpoints, one torch.save file per tensor-parallel and pipeline rank, as one model.

Source: megatron/training/checkpointing.py, `--ckpt-format torch`. Names stay those of Megatron's modules; tensors are
joined by the rule for each name, and layers and experts get global indices. Per-rank state, such as random state, is
under `rank_state` and the index of the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ckptkit.errors import Corrupt, Report, Unsupported, raise_problem
from ckptkit.formats.archives.flatten import FlatState, flatten_file
from ckptkit.formats.archives.torch_save import archive_extents_of, report_truncated_files
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatReader
from ckptkit.formats.rank_names import read_each_file
from ckptkit.io.file import is_existing_path, names_in
from ckptkit.layout import Blob, Chunk, Extent, KeyPath, Layout, StoredTensor
from ckptkit.layout.wrappers import PARAM_NAMES
from ckptkit.plugins.megatron.join import SavedJob
from ckptkit.plugins.megatron.rank_files import (
    BUFFERS,
    FILES,
    OPTIMIZER,
    VERSION,
    Rank,
    SavedRank,
    directory_names_by_rank,
    find_rank_directories,
    is_per_rank_layer_state,
    is_rank_directory,
    require_rank_file,
)
from ckptkit.plugins.megatron.states import NamedOptimizer, Uncertain, read_named_optimizer

_MODEL = "model"
_RANKS = "rank_state"
_ARGS = "args"  # the arguments of the first rank are enough


@dataclass
class LayoutBuilder:
    """The tensors and entries of the layout under construction."""

    job: SavedJob
    flat: FlatState = field(default_factory=FlatState)

    def add_model(self) -> None:
        """Add the model's tensors, and the per-rank entries of its layers."""
        for name, joined in self.job.join_model_tensors().items():
            self.put_entry((_MODEL, name), joined.tensor, joined.spares)
        for i, saved in enumerate(self.job.ranks.values()):
            for run, flat in saved.models_by_virtual_stage.items():
                rank_entries: dict[str, StoredTensor | Blob] = {**flat.blobs}
                rank_entries |= {name: tensor for name, tensor in flat.tensors.items() if is_per_rank_layer_state(name)}
                for name, entry in rank_entries.items():
                    self.put_entry((_RANKS, i, f"{_MODEL}{run or ''}", name), entry)

    def add_optimizer(self, report: Report) -> None:
        """Add the optimizer by parameter name if the names are certain on every rank, or else unchanged per rank."""
        ranks = self.job.ranks
        named: dict[Rank, NamedOptimizer] = {}
        with suppress(Uncertain):
            optimizers = {rank: read_named_optimizer(saved) for rank, saved in ranks.items()}
            first = optimizers[Rank(0, 0, 0)]
            named = {rank: alike for rank, one in optimizers.items() if (alike := one.with_group_order_of(first))}
        if len(named) == len(ranks):
            self.add_named_optimizers(named)
        else:
            for i, saved in enumerate(self.job.ranks.values()):
                if saved.entries.get(OPTIMIZER) is not None:
                    optimizer = saved.flatten({OPTIMIZER: saved.entries[OPTIMIZER]})
                    self.put_flattened_below((_RANKS, i) if len(ranks) > 1 else (), optimizer)
        # the optimizer state that data-parallel ranks share
        beside = {
            i: str(PurePosixPath(saved.path).with_name(BUFFERS)) for i, saved in enumerate(self.job.ranks.values())
        }
        if any(is_existing_path(self.job.root / path) for path in beside.values()):
            buffers = read_each_file(self.job.root, beside, lambda _, path: flatten_file(self.job.root, path), report)
            for i, flat in buffers.items():
                self.put_flattened_below((_RANKS, i, PurePosixPath(BUFFERS).stem), flat)

    def add_named_optimizers(self, named: Mapping[Rank, NamedOptimizer]) -> None:
        """Add the optimizer states, joined like the parameters, and the parameter groups with all names."""
        first = named[Rank(0, 0, 0)]
        for moment in dict.fromkeys(moment for optimizer in named.values() for moment in optimizer.tensors):
            by_rank = {rank: optimizer.tensors.get(moment, {}) for rank, optimizer in named.items()}
            for name, joined in self.job.join_tensors(by_rank).items():
                self.put_entry((OPTIMIZER, "state", name, moment), joined.tensor, joined.spares)
        names: list[dict[str, None]] = [{} for _ in first.groups]
        for rank, optimizer in named.items():
            for group, members in zip(names, optimizer.groups, strict=True):
                group.update({self.global_name(name, run, rank): None for run, name, _ in members})
            for (run, name, moment), blob in optimizer.blobs.items():
                self.put_entry((OPTIMIZER, "state", self.global_name(name, run, rank), moment), blob)
        saved = next(saved for saved in self.job.ranks.values() if not saved.is_lost)
        for i, (group, settings) in enumerate(zip(names, first.settings, strict=True)):
            lists = {key: list(group) for key in ("params", *(settings.keys() & {PARAM_NAMES}))}
            self.put_flattened_below((OPTIMIZER, "param_groups", i), saved.flatten({**settings, **lists}))
        for key in first.others:
            value_by_rank = {rank: optimizer.others.get(key) for rank, optimizer in named.items()}
            self.add_once_or_per_rank((OPTIMIZER,), key, value_by_rank)

    def global_name(self, name: str, virtual_stage: int, rank: Rank) -> str:
        return self.job.numbering.full_model_name(name, (virtual_stage, rank.stage), rank.expert)

    def add_other_entries(self) -> None:
        """Add the entries outside model and optimizer: once if they are equal on all ranks, or else per rank."""
        first = self.job.ranks[Rank(0, 0, 0)]
        if self.job.row_order_version > (first.find_number(VERSION) or 0):
            self.put_entry((VERSION,), Blob(first.path, 0, 0, dump(self.job.row_order_version)))
        for key in dict.fromkeys(key for saved in self.job.ranks.values() for key in saved.other_entries):
            by_rank = {rank: saved.other_entries.get(key) for rank, saved in self.job.ranks.items()}
            self.add_once_or_per_rank((), key, by_rank)

    def add_once_or_per_rank(self, parent: KeyPath, key: str, value_by_rank: Mapping[Rank, Any]) -> None:
        """Add an entry once, under its own key; or per rank, if the ranks differ or have tensors in it."""
        flats = [self.job.ranks[rank].flatten({key: value}) for rank, value in value_by_rank.items()]
        readable = [flat for rank, flat in zip(value_by_rank, flats, strict=True) if not self.job.ranks[rank].is_lost]
        contents = [{name: blob.content for name, blob in flat.blobs.items()} for flat in readable]
        is_same = not readable[0].tensors and all(one == contents[0] for one in contents)
        if len(flats) == 1 or is_same or key == _ARGS:
            self.put_flattened_below(parent, readable[0])
            return
        for i, flat in enumerate(flats):
            self.put_flattened_below((_RANKS, i, *parent), flat)

    def put_flattened_below(self, parent: KeyPath, flat: FlatState) -> None:
        entries: dict[str, StoredTensor | Blob] = {**flat.tensors, **flat.blobs}
        for name, entry in entries.items():
            self.put_entry((*parent, *flat.keys[name]), entry)

    def put_entry(self, key: KeyPath, entry: StoredTensor | Blob, replicas: tuple[Chunk, ...] = ()) -> None:
        """Add one entry at its key path, with the replicas of its chunks, unless another rank has added it."""
        name = ".".join(map(str, key))
        if name not in self.flat.keys:
            self.flat.put(key, entry)
            self.flat.spares.update({name: replicas} if replicas else {})


_EMBEDDING = "word_embeddings.weight"


class Megatron(FormatReader):
    """The format of Megatron's legacy checkpoints, which ckptkit reads and does not write."""

    name = "megatron"
    known_by = "Megatron's `mp_rank_00`"
    is_sharded = True

    def owns_file(self, name: str) -> bool:
        return bool(find_rank_directories([name]))

    def rank_of(self, name: str) -> int | None:
        numbers = find_rank_directories([name]).get(name)
        return int("".join(f"{number:04d}" for number in numbers)) if numbers else None

    def detect(self, path: Path) -> bool:
        """Return True for a directory with rank directories, for a rank directory, and for the file in it."""
        if path.is_dir():
            paths = (path, *(path / name for name in find_rank_directories(names_in(path))))
            return any(map(is_rank_directory, paths))
        return path.name in FILES and is_existing_path(path)

    def check_files_complete(self, path: Path, report: Report) -> None:
        root, files = find_root_and_rank_files(path, report)
        directories = find_rank_directories(files)
        if len(set(map(len, directories.values()))) == 1 and len(directories) > 1:
            directory_names_by_rank(root, directories, None, has_stages=True, report=report)
        report_truncated_files(root, (file for file in files.values() if is_existing_path(root / file)), report)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout of the full model; the optimizer is by name if its parameters are certain.

        Ranks that are missing or unreadable are reported, and their tensors get the shapes of another rank in the same
        stage. Raises `Corrupt` if a stage has no readable rank, or a file comes from another job, `Unsupported` for a
        tensor without a known splitting rule.
        """
        root, files = find_root_and_rank_files(path, report)
        existing = {name: file for name, file in files.items() if is_existing_path(root / file)}
        saved = read_each_file(root, existing, lambda _, file: SavedRank.read(root, file), report, needs_one=True)
        job = SavedJob(root, assign_ranks(root, files, saved, report))
        check_ranks_consistent(job)
        result = LayoutBuilder(job)
        result.add_model()
        result.add_optimizer(report)
        result.add_other_entries()
        flat, read = result.flat, tuple(rank.path for rank in saved.values())
        ranks = len(job.ranks)
        return Layout(root, self.name, flat.tensors, flat.blobs, flat.keys, ranks, read, spares=flat.spares)

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        return archive_extents_of(layout, layout.paths | set(layout.descriptions), report)


def find_root_and_rank_files(path: Path, report: Report) -> tuple[Path, dict[str, str]]:
    """Return the directory of a checkpoint, and the file of each rank relative to it, by rank directory.

    Reports rank directories without a file. A single rank directory, or its file, is accepted only if there are no
    other ranks.
    """
    if path.is_dir() and not is_rank_directory(path):
        return path, {name: require_rank_file(path, name, report) for name in find_rank_directories(names_in(path))}
    folder = path if path.is_dir() else path.parent
    rank_count = len(find_rank_directories(names_in(folder.parent))) if find_rank_directories([folder.name]) else 1
    name = path.name if not path.is_dir() else next(name for name in FILES if is_existing_path(path / name))
    sizes = SavedRank.read(folder, name).find_grid_sizes
    if rank_count > 1 or (sizes and sizes != (1, 1, 1)):
        message = "this is the directory of one rank; each rank has a part of every tensor"
        raise Unsupported(message, path=path, hint=f"pass the directory above, {folder.parent}")
    return folder, {"": name}


def assign_ranks(
    root: Path, files: Mapping[str, str], saved: Mapping[str, SavedRank], report: Report
) -> Mapping[Rank, SavedRank]:
    """Return the saved states by rank; an unreadable rank is modeled on a readable rank of the same stage."""
    if "" in saved:
        return {Rank(0, 0, 0): saved[""]}
    sizes = next(iter(saved.values())).find_grid_sizes
    has_stages = sizes.stages > 1 or sizes.experts == 1 if sizes else not all(map(has_word_embedding, saved.values()))
    directory_names = directory_names_by_rank(root, find_rank_directories(files), sizes, has_stages, report)
    of_stages = {rank.stage: saved[name] for rank, name in directory_names.items() if name in saved}
    ranks: dict[Rank, SavedRank] = {}
    for rank, name in sorted(directory_names.items()):
        if name in saved:
            ranks[rank] = saved[name]
        elif rank.stage in of_stages:
            path = files.get(name, f"{name}/{FILES[0]}")
            ranks[rank] = replace(of_stages[rank.stage], path=path, is_lost=True)
        else:
            message = f"no rank of stage {rank.stage} of the pipeline can be read, so its layers are unknown"
            raise Corrupt(message, path=root / name)
    return ranks


def has_word_embedding(saved: SavedRank) -> bool:
    """Return whether a rank has the word embedding, which only the first pipeline stage has."""
    return any(name.endswith(_EMBEDDING) for run in saved.models_by_virtual_stage for name in saved.specs(run))


def check_ranks_consistent(job: SavedJob) -> None:
    """Raise `Corrupt` if the files come from several saves, or from jobs of different sizes.

    Raises `Unsupported` for ways to split a model that the directory names do not show.
    """
    first = next(iter(job.ranks.values()))
    for saved in job.ranks.values():
        for label, expected, found in (
            ("iteration", first.find_number("iteration"), saved.find_number("iteration")),
            ("checkpoint version", first.find_number(VERSION), saved.find_number(VERSION)),
            ("number of ranks", first.find_grid_sizes, saved.find_grid_sizes),
        ):
            if expected != found:
                mixed = "this directory mixes files of several saves"
                message = f"expected {label} {expected} as in `{first.path}`, found {found}: {mixed}"
                raise Corrupt(message, path=job.root / saved.path)
    rank_0, ranks = job.ranks[Rank(0, 0, 0)], job.sizes.tensor
    args, path = rank_0.job_arguments, job.root / rank_0.path
    groups = args.get("num_query_groups")
    if args.get("group_query_attention") and isinstance(groups, int) and groups < ranks:
        message = f"expected at least {ranks} groups of queries, one for each rank, found {groups}"
        raise Unsupported(message, path=path)
    expert_ranks = args.get("expert_tensor_parallel_size")
    if args.get("num_experts") and isinstance(expert_ranks, int) and expert_ranks != ranks:
        message = f"expected experts split over {ranks} ranks like the other tensors, found {expert_ranks}"
        raise Unsupported(message, path=path)
