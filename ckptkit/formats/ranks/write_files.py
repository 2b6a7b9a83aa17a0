"""Write the files of ranks: lay out each rank's shard of every tensor, and finalize the files after the data.

Each rank's file has DTensors for sharded tensors, and full copies of replicated ones. If the source's optimizer has
parameter indices, the output gets indices that count through its groups. Data that several ranks store is written to
one file, and copied to the others at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, IOFailure, Unsupported, errors_at, skip_problem
from ckptkit.formats.archives.flatten import find_dict_items, unflatten
from ckptkit.formats.archives.non_tensor_entries import load_value
from ckptkit.formats.archives.torch_save import entry_locations_in_file
from ckptkit.formats.archives.write_archive import Storages, make_zip_template, tensor_rebuild_record
from ckptkit.formats.pickles.inert_pickle import PersistentId, Record, walk_members
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.ranks.file_names import CONFIG, MODEL, OPTIMIZER, REST, WITH_WORLD, Naming, find_rank_files_among
from ckptkit.formats.ranks.optimizer import AT
from ckptkit.formats.shards.dtensors import Placed, is_pickled_dtensor, unravel
from ckptkit.formats.shards.rank_file import RankFile, ShardedTensor, read_rank_file
from ckptkit.formats.shards.write_dtensors import RankMesh, dtensor_record, mesh_record, rank_tensor_content
from ckptkit.io.file import OpenFiles, names_in, read_at
from ckptkit.layout import OWN, Chunk, FileOffset, KeyPath, Layout, NewFile, Patch, Spec
from ckptkit.layout.placements import Placement, Shard, local_shape_and_boxes
from ckptkit.layout.wrappers import PARAM_NAMES, names_match_ignoring_wrappers
from ckptkit.words import count

_GROUPS, _PARAMS = "param_groups", "params"
_WORLD_SIZE = "world_size"  # a key in SkyRL's states
_PIECE = 1 << 20  # bytes per copy
_ALONE = RankMesh((1,))  # the mesh of a single rank


def lay_out_rank_files(wanted: Layout, example: Example, world: int) -> Iterator[NewFile]:
    """Yield the files of `world` ranks, and the config file with the number of ranks if names contain it too."""
    # the first axis of the mesh grows or shrinks with the world; the other axes keep their sizes
    rest = example.grid.shape[1:]
    if world % prod(rest):
        axes = f"axes of the mesh: {' x '.join(map(str, rest))}"
        message = f"expected a multiple of {prod(rest)} ranks ({axes}), found {world}"
        raise Unsupported(message, hint=f"pass a multiple of {prod(rest)}")
    writing = Writing(wanted, example, example.grid._replace(shape=(world // prod(rest), *rest)))
    for kind, names in writing.names_by_file_kind().items():
        template = example.naming.templates.get(kind)
        if template is None:
            hint = f"drop it with --exclude '{names[0].partition('.')[0]}*'"
            kinds = " and ".join(example.naming.templates)
            raise Unsupported(f"these files store only {kinds}, not this entry", tensor=names[0], hint=hint)
        for rank in range(world):
            name = template.format(world=world, rank=rank, set=example.label)
            yield writing.make_rank_file(name, names, rank)
    if example.naming is WITH_WORLD:
        config = json.dumps({"FSDP_version": 2, "world_size": world}, indent=4).encode()
        yield NewFile(CONFIG, len(config), ((0, config),))


@dataclass(frozen=True)
class Writing:
    """A checkpoint to write for the ranks of a mesh."""

    wanted: Layout
    example: Example
    grid: RankMesh

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Return the indices of the optimizer's parameters by name, {} if the files store names."""
        return indices_of_parameters(self.wanted) if self.example.naming is WITH_WORLD else {}

    def names_by_file_kind(self) -> dict[str, list[str]]:
        """Return the names of entries by the kind of file that stores them."""
        kinds: dict[str, list[str]] = {}
        for name in self.wanted.names:
            top = self.wanted.key(name)[0]
            kind = str(top) if top in (MODEL, OPTIMIZER) else REST
            if top != OWN:
                kinds.setdefault(kind, []).append(name)
        has_states = False
        for name in kinds.get(OPTIMIZER, ()):
            key, stored = self.wanted.key(name), self.wanted.tensors.get(name)
            is_state = len(key) == AT + 2 and key[1] == "state" and stored is not None and bool(stored.spec.shape)
            has_states |= is_state
            if is_state and self.find_parameter_tensor_name(str(key[AT])) is None:
                message = "ckptkit cannot tell which parameter this state belongs to, so it cannot split the state"
                raise Unsupported(message, tensor=name, hint="drop the optimizer with --exclude 'optimizer.*'")
        if MODEL not in kinds:
            hint = f"pass --under {MODEL} to put all tensors there"
            raise Unsupported(f"there is no model under `{MODEL}`", hint=hint)
        if has_states:
            self.require_index_for_each_parameter(kinds[MODEL])
        return kinds

    def require_index_for_each_parameter(self, names: Iterable[str]) -> None:
        """Raise `Unsupported` if the files number the optimizer's parameters, and a reader could not name them again.

        `names` are the model's. Without recorded names a reader needs as many parameters in both.
        """
        tensors, keys = self.wanted.tensors, map(self.wanted.key, self.wanted.blobs)
        if not self.numbers or any(key[:2] == (OPTIMIZER, _GROUPS) and key[-1] == PARAM_NAMES for key in keys):
            return
        split = {tensors[name].chunks or name for name in names if name in tensors and self.find_placements(name)}
        if len(split) != len(self.numbers):
            expected = f"expected {count(len(split), 'parameter')} in the optimizer, one for each sharded tensor"
            message = f"{expected} of the model, found {len(self.numbers)}: the files only number them"
            hint = "run `ckptkit convert SRC OUT --to dcp`, which stores the optimizer by name"
            raise Unsupported(message, hint=hint)

    def make_rank_file(self, name: str, names: list[str], rank: int) -> NewFile:
        """Return the file of a rank with the entries that belong to this rank or to all ranks."""
        storages = RankStorages(self, rank)
        mine = [entry for entry in names if find_rank_of_entry(self.wanted.key(entry)) in (None, rank)]
        value = unflatten(mine, self.key_in_rank_file, storages.picklable_value_of)
        envelope = make_zip_template(dump(value), storages.contents)
        return NewFile(name, envelope.nbytes, envelope.parts)

    def key_in_rank_file(self, name: str) -> KeyPath:
        """Return the key path of an entry in the file of a rank."""
        key = self.wanted.key(name)
        if key[0] == MODEL:
            return (".".join(map(str, key[1:])),)
        if key[0] == OPTIMIZER:
            numbered = len(key) > AT and key[1] == "state" and key[AT] in self.numbers
            return (key[1], str(self.numbers[str(key[AT])]), *key[AT + 1 :]) if numbered else key[1:]
        return key if find_rank_of_entry(key) is None else (key[0], *key[2:])

    def find_placements(self, name: str) -> tuple[Placement, ...] | None:
        """Return the placements of a tensor on the mesh, None if it is replicated."""
        key = self.wanted.key(name)
        spec = self.wanted.tensors[name].spec
        if key[0] == OPTIMIZER and len(key) == AT + 2 and key[1] == "state":
            parameter = self.find_parameter_tensor_name(str(key[AT]))
            is_moment = parameter is not None and self.wanted.tensors[parameter].spec.shape == spec.shape
            return self.find_placements(parameter) if parameter is not None and is_moment else None
        if key[0] != MODEL or not spec.shape:
            return None
        if name in self.example.spread:
            return self.example.spread[name]
        # a parameter has an optimizer state or several chunks; if no tensor has either, all floats are parameters
        is_parameter = len(self.wanted.tensors[name].chunks) > 1 or name in self.optimized_names
        if not self.optimized_names and all(len(tensor.chunks) <= 1 for tensor in self.wanted.tensors.values()):
            is_parameter = spec.dtype.kind == "float"
        return (Shard(0), *(None for _ in self.grid.shape[1:])) if is_parameter else None  # a buffer is replicated

    @cached_property
    def optimized_names(self) -> frozenset[str]:
        """Return the names of the model's tensors that the optimizer has."""
        return frozenset(f"{MODEL}.{name}" for name in self.numbers or indices_of_parameters(self.wanted))

    def find_parameter_tensor_name(self, parameter_name: str) -> str | None:
        name = f"{MODEL}.{parameter_name}"
        return name if name in self.wanted.tensors else None


class RankStorages(Storages):
    """The values in one rank's file, and their storages."""

    def __init__(self, writing: Writing, rank: int) -> None:
        super().__init__(writing.wanted)
        self.writing = writing
        self.rank = rank
        self.where = unravel(rank, writing.grid.shape)
        self._local: dict[object, str] = {}

    def picklable_value_of(self, name: str) -> Any:
        """Return the rank's shard of a tensor, or a non-tensor entry, as `write_pickle.dump` takes it."""
        key = self.wanted.key(name)
        if key == (_WORLD_SIZE,):
            return prod(self.writing.grid.shape)
        if key[:2] == (OPTIMIZER, _GROUPS) and key[-1] in (_PARAMS, PARAM_NAMES) and self.writing.numbers:
            names = parameters_in_group(self.wanted, key[:-1])
            if key[-1] == _PARAMS:
                return [self.writing.numbers[parameter] for parameter in names]
            recorded = load_value(self.wanted.root, self.wanted.blobs[name])
            return recorded if names_match_ignoring_wrappers(recorded, names) else names
        placements = self.writing.find_placements(name) if name in self.wanted.tensors else None
        if placements is None:
            return super().picklable_value_of(name)
        stored, calls = self.wanted.tensors[name], self.writing.example.calls
        with errors_at(tensor=name):
            shape = self.writing.grid.shape
            local_shape, pieces = local_shape_and_boxes(stored.spec.shape, shape, self.where, placements)
            if len(pieces) > 1:
                raise Unsupported(f"expected one piece of the tensor on rank {self.rank}, found {len(pieces)}")
            local = Spec(stored.spec.dtype, local_shape)
            place_of = stored.chunks or name  # tied tensors share a storage
            if place_of not in self._local:
                self._local[place_of] = self.add_storage(local.nbytes)
            record = tensor_rebuild_record(local, self._local[place_of])
            # a state that the example lacks is written like its parameter
            like = calls.get(name) or (calls.get(f"{MODEL}.{key[AT]}") if key[0] == OPTIMIZER else None)
            return dtensor_record(stored.spec, placements, self.mesh_record, record, like)

    @cached_property
    def mesh_record(self) -> Record:
        """Return the mesh, which all tensors of the file share."""
        spec, content = rank_tensor_content(self.writing.grid)
        return mesh_record(self.writing.grid, self.rank, tensor_rebuild_record(spec, self.add_storage(content)))


def find_rank_of_entry(key: KeyPath) -> int | None:
    """Return the rank whose per-rank state an entry is, None for shared entries."""
    step = str(key[1]) if len(key) > 1 and key[0] not in (MODEL, OPTIMIZER) else ""
    rank = step.removeprefix("rank_")
    return int(rank) if rank != step and rank.isdecimal() else None


def indices_of_parameters(wanted: Layout) -> dict[str, int]:
    """Return the index of each parameter by name, as the optimizer's groups list them; {} if they list indices."""
    keys = map(wanted.key, wanted.blobs)
    groups = [key[AT] for key in keys if key[:2] == (OPTIMIZER, _GROUPS) and key[-1] == _PARAMS]
    names = [
        name for group in sorted(groups, key=int) for name in parameters_in_group(wanted, (OPTIMIZER, _GROUPS, group))
    ]
    return {name: i for i, name in enumerate(names)} if all(isinstance(name, str) for name in names) else {}


def parameters_in_group(wanted: Layout, group_key: KeyPath) -> list[Any]:
    name = next(name for name in wanted.blobs if wanted.key(name) == (*group_key, _PARAMS))
    return list(load_value(wanted.root, wanted.blobs[name]))


def patches_for_rank_files(
    root: Path, files_by_kind: list[list[RankFile]], checksums: Mapping[FileOffset, int]
) -> Iterator[tuple[str, Patch]]:
    """Yield the replicas and CRC-32s to write, by file.

    `files_by_kind` are those of all ranks by kind, as read back now.
    """
    with OpenFiles(root) as sources:
        for of_kind in files_by_kind:
            chunks = [(name, chunk) for file in of_kind for name, chunk in chunks_in(file)]
            written = {(name, one.box): one for name, one in chunks if (one.path, one.offset) in checksums}
            for file in of_kind:
                entries = {
                    entry.offset: entry for entry in entry_locations_in_file(root / file.name).values() if entry.length
                }
                for name, chunk in chunks_in(file):
                    source = written[name, chunk.box]
                    if (chunk.path, chunk.offset) != (source.path, source.offset):
                        yield from patches_copying_chunk(source, chunk, sources)
                    crc = checksums[source.path, source.offset].to_bytes(4, "little")
                    yield from ((chunk.path, (at, crc)) for at in entries[chunk.offset].crc_offsets)


def chunks_in(file: RankFile) -> Iterator[tuple[str, Chunk]]:
    """Yield the non-empty chunks of a rank, with their names in its file."""
    for name, tensor in file.flat.tensors.items():
        for chunk in tensor.chunks:
            if chunk.length:
                yield name, chunk


def patches_copying_chunk(source: Chunk, target: Chunk, sources: OpenFiles) -> Iterator[tuple[str, Patch]]:
    for at in range(0, target.length, _PIECE):
        size = min(_PIECE, target.length - at)
        yield target.path, (target.offset + at, read_at(sources[source.path], size, source.offset + at))


@dataclass(frozen=True, slots=True)
class Example:
    """A way to write files of ranks: their names, the mesh, and the placements of each model tensor.

    `spread` is empty if the example does not show which tensors are sharded; a replicated tensor has None there.
    `calls` are the DTensors of the example, which new ones imitate. `was_sharded`: its tensors are ShardedTensors.
    """

    naming: Naming = WITH_WORLD
    label: str = ""
    grid: RankMesh = _ALONE
    spread: Mapping[str, tuple[Placement, ...] | None] = field(default_factory=dict)
    calls: Mapping[str, Record] = field(default_factory=dict)
    was_sharded: bool = False


def sharding_example_of(wanted: Layout) -> Example:
    """Return how a checkpoint in files of ranks was written; for any other, an example sharded by rows as in FSDP2."""
    rank_files = find_rank_files_among(names_in(wanted.root), skip_problem) if wanted.format == "ranks" else None
    if rank_files is None:
        return Example()
    if not rank_files.naming.templates:
        raise Unsupported("ckptkit reads files with such names, but does not write them", hint="use `convert --to dcp`")
    model = read_first_readable_file(wanted, rank_files.files[MODEL])
    meshes = [tensor.spread.mesh for tensor in model.tensors.values() if isinstance(tensor.spread, Placed)]
    if any(len(mesh.ranks) != rank_files.world or mesh != meshes[0] for mesh in meshes):
        hint = "use `convert --to dcp`"
        raise Unsupported("the tensors are on several meshes, or on some of the ranks only", hint=hint)
    calls = {
        f"{MODEL}.{name}": value for name, value in find_dict_items(model.value) or () if is_pickled_dtensor(value)
    }
    storages = (member.value for member in walk_members(model.value) if isinstance(member, PersistentId))
    device = next((str(one[3]) for one in storages if isinstance(one, tuple) and len(one) > 3), "cuda")
    grid = RankMesh((rank_files.world,), device=device.partition(":")[0])
    if meshes:
        like = next(iter(calls.values())).args[3][-1]["_spec"].attributes()["mesh"]
        grid = RankMesh(meshes[0].shape, meshes[0].names, meshes[0].device, like)
    spread: dict[str, tuple[Placement, ...] | None] = {}
    for name, tensor in model.tensors.items():
        if isinstance(tensor.spread, Placed):
            spread[name] = tensor.spread.placements
        else:  # ShardedTensors are written as DTensors sharded by rows
            spread[name] = None if tensor.spread is None else (Shard(0),)
    return Example(
        naming=rank_files.naming,
        label=rank_files.label,
        grid=grid,
        spread=spread if any(spread.values()) else {},
        calls=calls,
        was_sharded=any(isinstance(tensor.spread, ShardedTensor) for tensor in model.tensors.values()),
    )


def read_first_readable_file(wanted: Layout, files: Mapping[int, str]) -> RankFile:
    """Return the readable file of the lowest rank: in a damaged checkpoint some may be unreadable."""
    *others, last = sorted(files)
    for rank in others:
        # try the next rank; the last one raises its error
        with suppress(Corrupt, IOFailure, Unsupported):
            return read_rank_file(wanted.root, files[rank], rank, (MODEL,))
    return read_rank_file(wanted.root, files[last], last, (MODEL,))
