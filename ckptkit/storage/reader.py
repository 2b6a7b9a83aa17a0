"""Read through torch a checkpoint of any format and world size, into tensors that may be sharded in any way.

torch's planner says which box of which tensor a rank needs; what it is made of, and where that lies, says the layout.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptkit.arguments import checked
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.several_disks import Others, join_places
from ckptkit.engine.blocks import Block, blocks_of
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.visit import Worker
from ckptkit.errors import CkptError, Usage
from ckptkit.formats import locate, unpack
from ckptkit.io.path import to_path
from ckptkit.layout import OWN, Chunk, KeyPath, Layout, Spec, StoredTensor, edits, plain_key
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Plan, make_plan, needed
from ckptkit.models.fit import restore_tied
from ckptkit.models.names import HUB, KEEP, check_names
from ckptkit.models.names.naming import name_training
from ckptkit.state.names import NameOptions, ask_names
from ckptkit.storage.entries import read_value
from ckptkit.storage.memory import as_bytes, find_dtype, is_memory, make_buffer, part_of, put
from ckptkit.storage.terms import ERROR, IGNORE, WARN, LoadTerms, PlannerEntries, find_tied, require_equal
from ckptkit.summary import as_call


class LayoutReader(StorageReader):
    """A reader of a layout, edited or as it was opened, into a state with the same names and shapes.

    Where several layouts are given, what is in more than one is read from the first.

    What the state has and no layout is an error; with `missing` "keep" it stays as it is, with "zero" tensors become
    zero, and either is said by a warning, `PartialLoad`. Of optimizers' states "zero" is what they begin with, where
    torch's own do, and "keep" what torch made of them to load into, with a step counted. A planner that allows a
    partial load has them kept.

    Where the state asks for some entries below a key and not for others, a warning (`PartialLoad`) counts the others:
    an optimizer that has made no step has no states, and would get none of those in the checkpoint. With `unasked`
    "error" that is an error, before anything is read; "ignore" silences it. A key below which the state asks for
    nothing, such as the optimizer's where you load a model alone, does not count.

    A dtype that differs in the state is an error, unless `cast` is "allow": then floats of 16 bits and more are
    converted.

    A chunk that a rank reads whole is compared with its recorded CRC-32, and `Corrupt` raised if it differs. Of one
    that is read in part, as when the world size changes, or that has its elements in another order, the CRC-32 says
    nothing.
    """

    def __init__(self, *layouts: Layout, missing: str = ERROR, cast: str = ERROR, unasked: str = WARN) -> None:
        super().__init__()
        self.layouts = layouts
        self.terms = LoadTerms(missing, cast, unasked)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew. Raises `Usage` for an id: what is read is the layout."""
        if checkpoint_id is not None:
            raise Usage("a reader of a layout takes no checkpoint id", path=checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return every tensor as one chunk: the layout knows of which pieces it is made, the planner need not."""
        entries = PlannerEntries(self.layouts[0].root if self.layouts else None)
        keys: dict[str, KeyPath] = {}
        for layout in reversed(self.layouts):
            entries.update({name: describe(tensor.spec) for name, tensor in layout.tensors.items()})
            entries.update({name: BytesStorageMetadata() for name in layout.blobs})
            keys |= {name: plain_key(layout.key(name)) for name in layout.names}
        return Metadata(entries, planner_data=keys)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Set up nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: no rank needs another."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of this rank's plan, once its terms are met: tensors in the order in which they lie."""
        terms = self.terms.with_planner(planner)
        wanted: Mapping[str, Any] = getattr(planner, "state_dict", {})
        items: list[list[ReadItem]] = [[] for _ in self.layouts]
        missing: dict[str, None] = {}
        for item in plan.items:
            number = self._layout_with(item.storage_index.fqn)
            if number is None:
                missing[item.storage_index.fqn] = None
            else:
                items[number].append(item)
        try:
            terms.check_missing(missing, wanted, {name for layout in self.layouts for name in layout.names})
            if wanted and terms.unasked != IGNORE:
                terms.check_unasked(keys_beside(self.layouts, wanted), find_ways(planner))
            if fills_state(planner):
                self._read_together(items, planner, terms)
            else:
                self._read_in_turn(items, planner, terms)
        except CkptError as error:
            error.blame(path=self.layouts[0].root if self.layouts else None)
            raise
        terms.fill_missing(missing, wanted)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_together(self, items: Sequence[list[ReadItem]], planner: LoadPlanner, terms: LoadTerms) -> None:
        """Read all items into the tensors of the state, once all of them meet the terms."""
        tensors = [resolve(tensors_in_order(layout, own), planner) for layout, own in self._each(items)]
        for layout, found in zip(self.layouts, tensors, strict=True):
            terms.check_casts(specs_of(layout, found))
        for (layout, own), found in zip(self._each(items), tensors, strict=True):
            read_entries(layout, own, planner)
            read_tensors(layout, found, planner)

    def _read_in_turn(self, items: Sequence[list[ReadItem]], planner: LoadPlanner, terms: LoadTerms) -> None:
        """Resolve, read and commit one item after the other: the planner may give the same tensor for all of them."""
        for layout, own in self._each(items):
            read_entries(layout, own, planner)
            ledger = Ledger()
            for item in tensors_in_order(layout, own):
                name = item.storage_index.fqn
                only = replace(layout, tensors={name: layout.tensors[name]}, blobs={}, keys={})
                found = resolve([item], planner)
                terms.check_casts(specs_of(only, found))
                read_tensors(only, found, planner, ledger)

    def _each(self, items: Sequence[list[ReadItem]]) -> Iterator[tuple[Layout, list[ReadItem]]]:
        return zip(self.layouts, items, strict=True)

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: no id leads to a layout."""
        return False

    def _layout_with(self, name: str) -> int | None:
        """Return the number of the first layout that has an entry, None if none has."""
        found = (i for i, layout in enumerate(self.layouts) if name in layout.tensors or name in layout.blobs)
        return next(found, None)


class Reader(LayoutReader):
    """A reader of the checkpoint at `path`, of any format, into a state with the names that it has there.

    What each rank saved for itself (`own_state.rank_N.NAME`) each rank reads by its own name, as torch does: rank N
    gets its own `NAME`.

    `path` is a local one, a URL, or the id of a model on the Hub. `also` are other directories with files of the
    same checkpoint, as when each node had a disk of its own. `missing`, `cast` and `unasked` say what happens where
    the state asks for entries that are not there, for another dtype, or not for all entries: see `LayoutReader`.

    With `under` every name of the model is one below that key: the `norm.weight` of a Hugging Face model is read into
    that of `{"model": {...}}` with `under="model"`. Where a config.json ties the head to the embedding, it is there
    again. Optimizer and all else that lies beside a model keep their names; what is in several parts is read from the
    model's. With `names` the model and its optimizer are read by the names of a family, or of the Hub ("hub"), for
    which its config.json must lie there, or in `base`, a directory or Hub id. `map` is a table with further names, and
    `rename` has rules `REGEX=>TEXT` for parameters, as those of `convert`. Entries that are no tensors are read if
    `torch.load(weights_only=True)` would, or are `io.BytesIO`.
    """

    @checked
    def __init__(  # noqa: PLR0913 - each is an option of its own
        self,
        path: str | os.PathLike[str],
        also: Others = (),
        *,
        under: str = "",
        names: str | None = None,
        map: str | os.PathLike[str] | None = None,  # noqa: A002 - called as the option of the commands
        rename: str | Sequence[str] = (),
        base: str | os.PathLike[str] | None = None,
        missing: str = ERROR,
        cast: str = ERROR,
        unasked: str = WARN,
    ) -> None:
        self.named = NameOptions.of(map, rename, base)
        check_names(names, self.named.table)
        self.path = join_places(find_path(path), also)
        self.under = under
        self.names = names or (KEEP if map is None else HUB)
        self.rank = 0
        self._failure: CkptError | None = None
        super().__init__(missing=missing, cast=cast, unasked=unasked)
        self.terms = replace(self.terms, under=under)

    def __repr__(self) -> str:
        terms, names = self.terms, "" if self.names == KEEP else self.names
        asked = {"missing": terms.missing, "cast": terms.cast, "unasked": terms.unasked}
        return as_call(self, self.path, under=self.under, names=names, rename=self.named.rename, **asked)

    def open(self) -> tuple[Layout, ...]:
        """Open the parts of the checkpoint, the model's first: by the names by which they are read."""
        checkpoint = Checkpoint.open(self.path)
        config = self.named.config_of(checkpoint)
        layout = restore_tied(with_own_state(checkpoint.model_component.layout, self.rank), config or {})
        (layout,) = self.named.rename_in([layout])
        layout, _ = name_training(layout, ask_names(checkpoint, self.names, config, self.named.table))
        model = edits.nest(layout, tuple(self.under.split("."))) if self.under else layout
        others = (part.layout for part in checkpoint.components if part is not checkpoint.model_component)
        return (model, *(with_own_state(other, self.rank) for other in others))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, with the checkpoint at another path if one is given."""
        if checkpoint_id is not None:
            self.path = find_path(checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return what the checkpoint holds; nothing if it cannot be read, which `set_up_storage_reader` then says."""
        self._failure = None
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        try:
            self.layouts = self.open()
        except CkptError as error:  # torch takes whatever is raised here for a checkpoint without global metadata
            self._failure = error
            return Metadata({}, planner_data={})
        return super().read_metadata()

    def set_up_storage_reader(self, *_args: Any, **kwargs: Any) -> None:
        """Raise what went wrong when the checkpoint was opened. In a process group of its own a rank has its number."""
        if self._failure is not None:
            raise self._failure
        rank = kwargs.get("rank", self.rank)
        if rank != self.rank and any(OWN in layout.key(name) for layout in self.layouts for name in layout.names):
            self.rank = rank
            self.layouts = self.open()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path or a URL."""
        try:
            find_path(checkpoint_id)
        except (TypeError, CkptError):
            return False
        return True


def find_path(place: str | os.PathLike[str]) -> Path:
    """Return the path that a user means."""
    return place if isinstance(place, Path) else to_path(os.fspath(place))


def with_own_state(layout: Layout, rank: int) -> Layout:
    """Return the layout with what this rank saved for itself under the names that it has on the rank."""
    above = (OWN, f"rank_{rank}")
    keys = {name: key[2:] for name in layout.names if (key := layout.key(name))[:2] == above and len(key) > 2}
    if not keys:
        return layout
    named = {".".join(map(str, key)): name for name, key in keys.items()}
    return replace(
        layout,
        tensors={
            **{name: tensor for name, tensor in layout.tensors.items() if name not in named},
            **{new: layout.tensors[old] for new, old in named.items() if old in layout.tensors},
        },
        blobs={
            **{name: blob for name, blob in layout.blobs.items() if name not in named},
            **{new: layout.blobs[old] for new, old in named.items() if old in layout.blobs},
        },
        keys={**layout.keys, **{new: keys[old] for new, old in named.items()}},
    )


Resolved = Mapping[str, tuple[ReadItem, Tensor]]  # by the label of a file that a tensor is taken for
_PLANNER_STEPS = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")


def read_entries(layout: Layout, plan: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """Read what is asked for of the entries of a layout that are no tensors, and give it to the planner."""
    items = {item.storage_index.fqn: item for item in plan if item.type == LoadItemType.BYTE_IO}
    found = unpack(edits.select(layout, items.__contains__))
    for name, item in items.items():
        planner.load_bytes(item, read_value(found, name))


def keys_beside(layouts: Iterable[Layout], asked: Container[str]) -> Iterator[KeyPath]:
    """Yield the ways to the entries that were not asked for.

    Leaves out what one rank saved for itself, and tied tensors that were asked for by another name.
    """
    for layout in layouts:
        loaded = {place_of(tensor) for name, tensor in layout.tensors.items() if name in asked}
        for name in layout.names:
            tensor = layout.tensors.get(name)
            if name not in asked and not (tensor and place_of(tensor) in loaded) and OWN not in layout.key(name):
                yield layout.key(name)


def place_of(tensor: StoredTensor) -> tuple[str, int]:
    """Return file and offset of the first bytes of a tensor."""
    first = tensor.chunks[0]
    return first.path, first.offset


def find_ways(planner: LoadPlanner) -> list[KeyPath]:
    """Return the ways to the entries that a planner's state asks for."""
    ways: Mapping[str, KeyPath] = getattr(planner, "mappings", {})
    return [ways.get(name, (name,)) for name in getattr(planner, "state_dict", {})]


def fills_state(planner: LoadPlanner) -> bool:
    """Return whether a planner gives the tensors of the state to be read into, as torch's own does."""
    ours = type(planner)
    return all(getattr(ours, name, None) is getattr(DefaultLoadPlanner, name) for name in _PLANNER_STEPS)


def tensors_in_order(layout: Layout, plan: Iterable[ReadItem]) -> list[ReadItem]:
    """Return the items of a plan that are tensors, in the order in which these lie in the files."""
    tensors = (item for item in plan if item.type == LoadItemType.TENSOR)
    return sorted(tensors, key=lambda item: place_of(layout.tensors[item.storage_index.fqn]))


def resolve(items: Iterable[ReadItem], planner: LoadPlanner) -> Resolved:
    """Return the items, and the tensors that the planner gives to read them into."""
    return {f"{i:08d}": (item, planner.resolve_tensor(item).detach()) for i, item in enumerate(items)}


def specs_of(layout: Layout, resolved: Resolved) -> Iterator[tuple[str, Spec, Tensor]]:
    """Yield name and spec of each tensor of a layout that is read, and the tensor that it is read into."""
    for item, tensor in resolved.values():
        name = item.storage_index.fqn
        yield name, layout.tensors[name].spec, tensor


def read_tensors(layout: Layout, resolved: Resolved, planner: LoadPlanner, ledger: Ledger | None = None) -> None:
    """Read tensors of a layout, or boxes of them, into the tensors that the planner has given for them.

    `ledger` has what was read of the layout before, so that a chunk that is read in parts is compared when it is whole.
    Without it, a chunk that is not read whole is not compared.
    """
    items = {label: item for label, (item, _) in resolved.items()}
    tensors = {label: tensor for label, (_, tensor) in resolved.items()}
    wanted = describe_wanted(layout, items, tensors)
    tied = find_tied(tensors)
    apart = {label: torch.empty_like(tensors[label]) for label in tied}  # else the last one read would stay, unseen
    with in_memory_if_split(layout, items, {**tensors, **apart}) as filled:
        fill(make_plan(locate(share_of(layout, wanted)), wanted), filled, ledger)
    for label, one in tied.items():
        name, other = (items[which].storage_index.fqn for which in (label, one))
        require_equal({name: apart[label], other: tensors[one]}, {name: other}, layout.root)
    for label, item in items.items():
        planner.commit_tensor(item, tensors[label])


@contextmanager
def in_memory_if_split(
    layout: Layout, items: Mapping[str, ReadItem], tensors: Mapping[str, Tensor]
) -> Iterator[Mapping[str, Tensor]]:
    """Give memory of the CPU in place of tensors elsewhere whose rows come in another order; it is copied at the end.

    Blocks of such a tensor are no boxes of it, but runs of its bytes.
    """
    apart = {
        label: torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        for label, tensor in tensors.items()
        if layout.tensors[items[label].storage_index.fqn].splits is not None and not is_memory(tensor)
    }
    yield {**tensors, **apart}
    for label, found in apart.items():
        tensors[label].copy_(found)


def fill(plan: Plan, tensors: Mapping[str, Tensor], ledger: Ledger | None) -> None:
    """Read every target of a plan into the tensor that its file stands for."""
    sources = Sources(plan, ledger or Ledger(), is_all=ledger is None)
    with Worker(plan, sources.compares) as worker:
        filler = TensorFiller(worker)
        for target in plan.targets:
            for block in blocks_of(plan, target):
                filler.fill(block, tensors[target.chunk.path])
                sources.note(worker.pieces)


def describe_wanted(layout: Layout, items: Mapping[str, ReadItem], tensors: Mapping[str, Tensor]) -> Layout:
    """Return the tensors to be filled, as a layout whose files are the items."""
    chunks: dict[str, list[Chunk]] = {}
    for label, item in items.items():
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        dtype = find_dtype(tensors[label].dtype, item.storage_index.fqn)
        chunk = Chunk(box, label, 0, box.numel * dtype.itemsize, dtype)
        chunks.setdefault(item.storage_index.fqn, []).append(chunk)
    wanted = {
        name: StoredTensor(Spec(parts[0].dtype, layout.tensors[name].spec.shape), tuple(parts))
        for name, parts in chunks.items()
    }
    return Layout(layout.root, "memory", wanted)


def describe(spec: Spec) -> TensorStorageMetadata:
    """Return a tensor as torch's planner is told of it: in one piece."""
    size = torch.Size(spec.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, spec.dtype.name)), size, [chunk])


def share_of(layout: Layout, wanted: Layout) -> Layout:
    """Return the part of a layout that `wanted` is made of, in the dtypes of `wanted` where both are floats."""

    def wanted_dtype(name: str, spec: Spec) -> DType:
        dtype = wanted.tensors[name].spec.dtype
        return dtype if spec.dtype.can_become(dtype) else spec.dtype

    return edits.cast(replace(needed(layout, wanted), keys={}), wanted_dtype)


class TensorFiller:
    """A reader of blocks into tensors: straight into contiguous memory of the CPU, into others through a buffer."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._buffer: Tensor | None = None

    def fill(self, block: Block, tensor: Tensor) -> None:
        """Read a block of a target into its place in the target's tensor; an error names the tensor."""
        try:
            self._fill(block, tensor)
        except CkptError as error:
            raise error.blame(tensor=block.target.name) from None

    def _fill(self, block: Block, tensor: Tensor) -> None:
        if is_memory(tensor):
            start = block.target.chunk.offset + block.start
            self._worker.read(block, out=as_bytes(tensor)[start : start + block.nbytes])
            return
        if self._buffer is None:
            self._buffer = make_buffer(tensor.device)
        self._worker.read(block, out=as_bytes(self._buffer)[: block.nbytes])
        put(part_of(tensor, block.box.relative_to(block.target.chunk.box)), self._buffer)
