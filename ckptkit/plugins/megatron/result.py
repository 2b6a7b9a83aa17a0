"""Gather the layout of a whole checkpoint, by key paths as torch's own state dicts have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from ckptkit.errors import CkptError, Report
from ckptkit.formats.archives.flatten import FlatState, flatten
from ckptkit.formats.archives.state_files import read_state_file
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.io.file import is_there
from ckptkit.layout import Blob, Chunk, KeyPath, Layout, StoredTensor
from ckptkit.layout.recorded_names import PARAM_NAMES
from ckptkit.plugins.megatron.grid import BUFFERS, Rank
from ckptkit.plugins.megatron.join import Job
from ckptkit.plugins.megatron.saved import OPTIMIZER, VERSION, is_own_state
from ckptkit.plugins.megatron.states import Named, name_states

_MODEL = "model"
_RANKS = "rank_state"
_ARGS = "args"  # of which the first rank's are as good as any


@dataclass
class Result:
    """The tensors and entries of a checkpoint as they are gathered."""

    job: Job
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    keys: dict[str, KeyPath] = field(default_factory=dict)
    spares: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)

    def add_model(self) -> None:
        """Add the model's tensors, and what its layers on each rank hold beside."""
        for name, joined in self.job.tensors().items():
            self.put((_MODEL, name), joined.tensor, joined.spares)
        for i, saved in enumerate(self.job.ranks.values()):
            for run, flat in saved.models.items():
                own: dict[str, StoredTensor | Blob] = {**flat.blobs}
                own |= {name: tensor for name, tensor in flat.tensors.items() if is_own_state(name)}
                for name, entry in own.items():
                    self.put((_RANKS, i, f"{_MODEL}{run or ''}", name), entry)

    def add_optimizer(self, report: Report) -> None:
        """Add the optimizer by name if that is certain on every rank, or else each rank's as it is."""
        ranks = {rank: name_states(saved) for rank, saved in self.job.ranks.items()}
        first = ranks[Rank(0, 0, 0)]
        named = {rank: alike for rank, one in ranks.items() if one and first and (alike := one.in_order_of(first))}
        if len(named) == len(ranks):
            self.add_named(named)
        else:
            self.add_of_ranks(OPTIMIZER, {rank: saved.entries.get(OPTIMIZER) for rank, saved in self.job.ranks.items()})
        beside = [str(PurePosixPath(saved.path).with_name(BUFFERS)) for saved in self.job.ranks.values()]
        if any(is_there(self.job.root / path) for path in beside):
            for i, path in enumerate(beside):
                self.add_buffers(i, path, report)

    def add_buffers(self, rank: int, path: str, report: Report) -> None:
        """Add what data-parallel ranks share of an optimizer. Reports a file that is missing or cannot be read."""
        try:
            state = read_state_file(self.job.root, path)
            self.put_all((_RANKS, rank, PurePosixPath(BUFFERS).stem), flatten(state.value, state.entries, path))
        except CkptError as error:
            report(error.blame(path=self.job.root / path))

    def add_named(self, named: Mapping[Rank, Named]) -> None:
        """Add the states of parameters, joined as these are, and the groups with the names of all."""
        first = named[Rank(0, 0, 0)]
        for moment in dict.fromkeys(moment for one in named.values() for moment in one.tensors):
            by_rank = {rank: one.tensors.get(moment, {}) for rank, one in named.items()}
            for name, joined in self.job.join(by_rank).items():
                self.put((OPTIMIZER, "state", name, moment), joined.tensor, joined.spares)
        names: list[dict[str, None]] = [{} for _ in first.groups]
        for rank, one in named.items():
            for group, members in zip(names, one.groups, strict=True):
                group.update({self.whole_name(name, run, rank): None for run, name, _ in members})
            for (run, name, moment), blob in one.blobs.items():
                self.put((OPTIMIZER, "state", self.whole_name(name, run, rank), moment), blob)
        saved = self.job.sound
        for i, (group, settings) in enumerate(zip(names, first.settings, strict=True)):
            lists = {key: list(group) for key in ("params", *(settings.keys() & {PARAM_NAMES}))}
            self.put_all((OPTIMIZER, "param_groups", i), saved.flatten({**settings, **lists}))
        for key in first.others:
            self.add_common((OPTIMIZER,), key, {rank: one.others.get(key) for rank, one in named.items()})

    def whole_name(self, name: str, run: int, rank: Rank) -> str:
        """Return what a parameter of a rank is called in the whole model."""
        return self.job.numbering.name(name, (run, rank.stage), rank.expert)

    def add_rest(self) -> None:
        """Add what lies beside model and optimizer: once if it is the same on all ranks, or else for each."""
        first = self.job.ranks[Rank(0, 0, 0)]
        if self.job.version > (first.number(VERSION) or 0):
            self.put((VERSION,), Blob(first.path, 0, 0, dump(self.job.version)))
        for key in dict.fromkeys(key for saved in self.job.ranks.values() for key in saved.others):
            self.add_common((), key, {rank: saved.others.get(key) for rank, saved in self.job.ranks.items()})

    def add_common(self, above: KeyPath, key: str, values: Mapping[Rank, Any]) -> None:
        """Add an entry of all ranks once, under its own key; or for each rank, if they differ or hold tensors."""
        flats = [self.job.ranks[rank].flatten({key: value}) for rank, value in values.items()]
        sound = [flat for rank, flat in zip(values, flats, strict=True) if not self.job.ranks[rank].is_lost]
        contents = [{name: blob.content for name, blob in flat.blobs.items()} for flat in sound]
        is_same = not sound[0].tensors and all(one == contents[0] for one in contents)
        if len(flats) == 1 or is_same or key == _ARGS:
            self.put_all(above, sound[0])
            return
        for i, flat in enumerate(flats):
            self.put_all((_RANKS, i, *above), flat)

    def add_of_ranks(self, key: str, values: Mapping[Rank, Any]) -> None:
        """Add an entry of each rank as it is; that of an only rank under its own key."""
        for i, (rank, value) in enumerate(values.items()):
            if value is not None:
                above: KeyPath = (_RANKS, i) if len(values) > 1 else ()
                self.put_all(above, self.job.ranks[rank].flatten({key: value}))

    def put_all(self, above: KeyPath, flat: FlatState) -> None:
        """Add what was flattened, below a key path."""
        entries: dict[str, StoredTensor | Blob] = {**flat.tensors, **flat.blobs}
        for name, entry in entries.items():
            self.put((*above, *flat.keys[name]), entry)

    def put(self, key: KeyPath, entry: StoredTensor | Blob, spares: tuple[Chunk, ...] = ()) -> None:
        """Add one entry by its key path, with other copies of its chunks."""
        name = ".".join(map(str, key))
        self.keys[name] = key
        self.spares[name] = spares
        if isinstance(entry, Blob):
            self.blobs.setdefault(name, entry)
        else:
            self.tensors[name] = entry

    def layout(self, format_name: str, files: tuple[str, ...]) -> Layout:
        """Return what was gathered; `files` are those of the ranks that could be read."""
        ranks, spares = len(self.job.ranks), {name: found for name, found in self.spares.items() if found}
        return Layout(self.job.root, format_name, self.tensors, self.blobs, self.keys, ranks, files, spares=spares)
