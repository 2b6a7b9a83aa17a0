"""Read a checkpoint of any format and world size through torch, into tensors with any sharding.

torch's planner decides which box of which tensor a rank needs. The layout says which chunks the box consists of.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

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

from ckptkit.argument_types import with_checked_arguments
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import require_archives_of_one_save
from ckptkit.checkpoints.several_disks import Others, join_directories
from ckptkit.engine.blocks import blocks_of_target
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.visit import Worker
from ckptkit.errors import CkptError, Usage, errors_at
from ckptkit.formats import decompress_entries, locate_all_chunks
from ckptkit.io.path import to_path
from ckptkit.layout import OWN, Chunk, KeyPath, Layout, Spec, StoredTensor, edits
from ckptkit.layout.box import Box
from ckptkit.layout.plan import Plan, make_plan, restrict_to_needed
from ckptkit.models.fit import restore_tied
from ckptkit.models.names import HUB, KEEP, require_known_family_name
from ckptkit.models.names.naming import rename_checkpoint_parameters
from ckptkit.state.names import NameOptions, collect_name_arguments
from ckptkit.storage.entries import entry_as_torch_save
from ckptkit.storage.memory import (
    Buffers,
    is_row_major_on_cpu,
    memory_of_tensor,
    require_known_dtype,
    require_own_memory_per_element,
    view_of_box,
)
from ckptkit.storage.plans import completed_future
from ckptkit.storage.terms import (
    ERROR,
    IGNORE,
    WARN,
    LoadTerms,
    PlannerEntries,
    first_name_by_tied_name,
    require_equal_tied_values,
)
from ckptkit.summary import format_call

T = TypeVar("T")


class LayoutReader(StorageReader):
    """Reads layouts (as opened, or edited) into a state with the same names and shapes.

    If several layouts are given, an entry that is in more than one is read from the first.

    See `Reader` for `missing`, `cast` and `unasked`. For the states of torch's own optimizers, `missing` "zero" gives
    the initial value, and "keep" the value that torch created for the load, with one step counted. With a planner that
    allows partial loads, missing entries are kept. `unasked` matters for an optimizer that has made no step: it has no
    states, and would not get those in the checkpoint. A key below which the state asks for nothing does not count, such
    as the optimizer's key when you load a model only.

    If a rank reads a complete chunk, its recorded checksum is verified, and a difference raises `Corrupt`. A chunk that
    is read in part (as when the world size changes), or whose elements are in another order, is not verified.
    """

    def __init__(self, *layouts: Layout, missing: str = ERROR, cast: str = ERROR, unasked: str = WARN) -> None:
        super().__init__()
        self.layouts = layouts
        self.terms = LoadTerms(missing, cast, unasked)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing. Raises `Usage` for a checkpoint id: the reader reads its layouts."""
        if checkpoint_id is not None:
            raise Usage("a reader of a layout takes no checkpoint id", path=checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return every tensor as one chunk. The planner does not need to know the stored chunks."""
        entries = PlannerEntries(self.layouts[0].root if self.layouts else None)
        keys: dict[str, KeyPath] = {}
        for layout in reversed(self.layouts):
            for name, tensor in layout.tensors.items():
                size = torch.Size(tensor.spec.shape)
                chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
                properties = TensorProperties(dtype=getattr(torch, tensor.spec.dtype.name))
                entries[name] = TensorStorageMetadata(properties, size, [chunk])
            entries.update({name: BytesStorageMetadata() for name in layout.blobs})
            for name in layout.names:  # torch has a plain string for every key of a dict
                keys[name] = tuple(str(step) if isinstance(step, str) else int(step) for step in layout.key(name))
        return Metadata(entries, planner_data=keys)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of this rank's plan, after a check of the terms.

        Tensors are read in the order of the files.
        """
        terms = self.terms
        if terms.missing == ERROR and getattr(planner, "allow_partial_load", False):
            terms = replace(terms, missing="keep")
        wanted: Mapping[str, Any] = getattr(planner, "state_dict", {})
        first_with = {name: i for i, layout in reversed([*enumerate(self.layouts)]) for name in layout.names}
        items: list[list[ReadItem]] = [[] for _ in self.layouts]
        missing: dict[str, None] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if name in first_with:
                items[first_with[name]].append(item)
            else:
                missing[name] = None
        with errors_at(path=self.layouts[0].root if self.layouts else None):
            terms.check_missing(missing, wanted, first_with.keys())
            if wanted and terms.unasked != IGNORE:
                keys: Mapping[str, KeyPath] = getattr(planner, "mappings", {})
                terms.check_unrequested(unrequested_keys(self.layouts, wanted), [keys.get(n, (n,)) for n in wanted])
            # torch's own planner reads directly into the tensors of the state
            cls = type(planner)
            if all(getattr(cls, step, None) is getattr(DefaultLoadPlanner, step) for step in _PLANNER_STEPS):
                self._read_all_at_once(items, planner, terms)
            else:
                self._read_one_by_one(items, planner, terms)
        terms.fill_missing(missing, wanted)
        return completed_future(None)

    def _read_all_at_once(self, items: Sequence[list[ReadItem]], planner: LoadPlanner, terms: LoadTerms) -> None:
        """Read all items into the tensors of the state, after a check of the dtypes of all."""
        tensors = [
            resolve_tensors(tensor_items_in_file_order(layout, own), planner)
            for layout, own in self._with_layouts(items)
        ]
        for layout, resolved in zip(self.layouts, tensors, strict=True):
            terms.check_casts(specs_and_targets_of(layout, resolved))
        for (layout, own), resolved in zip(self._with_layouts(items), tensors, strict=True):
            read_entries(layout, own, planner)
            read_tensors(layout, resolved, planner)

    def _read_one_by_one(self, items: Sequence[list[ReadItem]], planner: LoadPlanner, terms: LoadTerms) -> None:
        """Resolve, read and commit one item after the other: the planner may return the same tensor for all of them."""
        for layout, own in self._with_layouts(items):
            read_entries(layout, own, planner)
            ledger = Ledger()
            for item in tensor_items_in_file_order(layout, own):
                name = item.storage_index.fqn
                only = replace(layout, tensors={name: layout.tensors[name]}, blobs={}, keys={})
                resolved = resolve_tensors([item], planner)
                terms.check_casts(specs_and_targets_of(only, resolved))
                read_tensors(only, resolved, planner, ledger)

    def _with_layouts(self, items: Sequence[list[ReadItem]]) -> Iterator[tuple[Layout, list[ReadItem]]]:
        return zip(self.layouts, items, strict=True)

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class Reader(LayoutReader):
    """Reads the checkpoint at `path`, in any format, into a state with the names of the checkpoint.

    For per-rank state, rank N asks for `NAME` and gets the entry `own_state.rank_N.NAME`.

    `path` is a local path or a URL, such as `hf://org/name`. `also` are other directories with files of the same
    checkpoint, for example if each node saved to its own disk.

    `missing` is for entries that the state asks for and the checkpoint lacks: "error" raises `Mismatch`, "keep" does
    not change them, "zero" sets tensors to zero. `cast` is for tensors with another dtype: "error" raises `Mismatch`,
    "allow" converts floats of 16 bits and more. `unasked` is for a state that asks for only some of the entries below a
    key: "warn" gives a `PartialLoad` warning, "error" raises `Mismatch`, "ignore" does nothing.

    `under` adds a key before every name of the model: with `under="model"`, the reader reads the `norm.weight` of a
    Hugging Face model into the `norm.weight` of `{"model": {...}}`. If a config.json ties the head to the embedding,
    the reader provides the head too. Other entries, such as the optimizer, keep their names. If several components
    contain an entry, the reader reads it from the model's component. `names` translates the model and its optimizer to
    the names of a family, or of the Hub ("hub"). This needs the model's config.json, in the checkpoint or in `base` (a
    directory or Hub id). `map` is a table with further names, and `rename` has rules `REGEX=>TEXT` for parameters, as
    in `convert`. Non-tensor entries are read if `torch.load(weights_only=True)` accepts them, or if they are
    `io.BytesIO`.
    """

    @with_checked_arguments
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
        require_known_family_name(names, self.named.table)
        self.path = join_directories(to_path(path), also)
        self.under = under
        self.names = names or (KEEP if map is None else HUB)
        self.rank = 0
        self._failure: CkptError | None = None
        super().__init__(missing=missing, cast=cast, unasked=unasked)
        self.terms = replace(self.terms, under=under)

    def __repr__(self) -> str:
        terms, names = self.terms, "" if self.names == KEEP else self.names
        options = {"missing": terms.missing, "cast": terms.cast, "unasked": terms.unasked}
        return format_call(self, self.path, under=self.under, names=names, rename=self.named.rename, **options)

    def open(self) -> tuple[Layout, ...]:
        """Return the layouts of the components, the model's first, with the names that `dcp.load` will ask for."""
        checkpoint = Checkpoint.open(self.path)
        config = self.named.find_config_of(checkpoint)
        layout = restore_tied(with_state_of_rank(checkpoint.model_component.layout, self.rank), config or {})
        (layout,) = self.named.rename_parameters_in_layouts([layout])
        layout, _ = rename_checkpoint_parameters(
            layout, collect_name_arguments(checkpoint, self.names, config, self.named.table)
        )
        model = edits.nest_below_key(layout, tuple(self.under.split("."))) if self.under else layout
        others = (part.layout for part in checkpoint.components if part is not checkpoint.model_component)
        return (model, *(with_state_of_rank(other, self.rank) for other in others))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = to_path(checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the entries of the checkpoint.

        If it cannot be read, return none; `set_up_storage_reader` raises the error.
        """
        self._failure = None
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        try:
            self.layouts = self.open()
        except CkptError as error:  # torch interprets any error here as missing global metadata
            self._failure = error
            return Metadata({}, planner_data={})
        return super().read_metadata()

    def set_up_storage_reader(  # type: ignore[override]
        self, _metadata: Metadata | None = None, is_coordinator: bool = True, **kwargs: Any
    ) -> None:
        """Raise the error of opening the checkpoint; the coordinator also raises the error of a file of another save.

        In another process group, reopen it with the rank in that group.
        """
        if self._failure is not None:
            raise self._failure
        if is_coordinator:
            for layout in self.layouts:
                require_archives_of_one_save(layout)
        rank = kwargs.get("rank", self.rank)
        if rank != self.rank and any(OWN in layout.key(name) for layout in self.layouts for name in layout.names):
            self.rank = rank
            self.layouts = self.open()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            to_path(checkpoint_id)
        except (TypeError, CkptError):
            return False
        return True


def with_state_of_rank(layout: Layout, rank: int) -> Layout:
    """Return the layout with this rank's own state under the names that it has on the rank."""
    above = (OWN, f"rank_{rank}")
    keys = {name: key[2:] for name in layout.names if (key := layout.key(name))[:2] == above and len(key) > 2}
    if not keys:
        return layout
    old_names = {".".join(map(str, key)): name for name, key in keys.items()}

    def with_own(entries: Mapping[str, T]) -> dict[str, T]:
        others = {name: entry for name, entry in entries.items() if name not in old_names}
        return others | {new: entries[old] for new, old in old_names.items() if old in entries}

    own_keys = {new: keys[old] for new, old in old_names.items()}
    tensors, blobs = with_own(layout.tensors), with_own(layout.blobs)
    return replace(layout, tensors=tensors, blobs=blobs, keys={**layout.keys, **own_keys})


Resolved = Mapping[str, tuple[ReadItem, Tensor]]  # by label; `read_tensors` uses the labels as file names
_PLANNER_STEPS = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")


def read_entries(layout: Layout, plan: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """Read the requested non-tensor entries of a layout, and pass them to the planner."""
    items = {item.storage_index.fqn: item for item in plan if item.type == LoadItemType.BYTE_IO}
    entries = decompress_entries(edits.select_entries(layout, items.__contains__))
    for name, item in items.items():
        planner.load_bytes(item, entry_as_torch_save(entries, name))


def unrequested_keys(layouts: Iterable[Layout], asked: Container[str]) -> Iterator[KeyPath]:
    """Yield the key paths of the entries that were not requested.

    Leaves out per-rank state, and tied tensors that were requested under another name.
    """
    for layout in layouts:
        loaded = {first_byte_location(tensor) for name, tensor in layout.tensors.items() if name in asked}
        for name in layout.names:
            tensor = layout.tensors.get(name)
            if (
                name not in asked
                and not (tensor and first_byte_location(tensor) in loaded)
                and OWN not in layout.key(name)
            ):
                yield layout.key(name)


def first_byte_location(tensor: StoredTensor) -> tuple[str, int]:
    """Return file and offset of the first bytes of a tensor."""
    first = tensor.chunks[0]
    return first.path, first.offset


def tensor_items_in_file_order(layout: Layout, plan: Iterable[ReadItem]) -> list[ReadItem]:
    """Return the tensor items of a plan, in the order of the files."""
    tensors = (item for item in plan if item.type == LoadItemType.TENSOR)
    return sorted(tensors, key=lambda item: first_byte_location(layout.tensors[item.storage_index.fqn]))


def resolve_tensors(items: Iterable[ReadItem], planner: LoadPlanner) -> Resolved:
    """Return the items, and the tensors that the planner provides for them.

    Raises `Unsupported` for a tensor that bytes cannot be read into.
    """
    resolved = {f"{i:08d}": (item, planner.resolve_tensor(item).detach()) for i, item in enumerate(items)}
    for item, tensor in resolved.values():
        require_own_memory_per_element(tensor, item.storage_index.fqn)
    return resolved


def specs_and_targets_of(layout: Layout, resolved: Resolved) -> Iterator[tuple[str, Spec, Tensor]]:
    """Yield name and spec of each tensor to read, and the tensor that it is read into."""
    for item, tensor in resolved.values():
        name = item.storage_index.fqn
        yield name, layout.tensors[name].spec, tensor


def read_tensors(layout: Layout, resolved: Resolved, planner: LoadPlanner, ledger: Ledger | None = None) -> None:
    """Read tensors of a layout, or boxes of them, into the tensors that the planner provided.

    `ledger` records earlier reads of the layout, so that a chunk that is read in parts is verified when it is complete.
    Without it, only chunks that are read at once are verified.
    """
    items = {label: item for label, (item, _) in resolved.items()}
    tensors = {label: tensor for label, (_, tensor) in resolved.items()}
    # the tensors to fill, as a layout whose files are the items
    chunks: dict[str, list[Chunk]] = {}
    for label, item in items.items():
        box, name = Box(tuple(item.storage_offsets), tuple(item.lengths)), item.storage_index.fqn
        dtype = require_known_dtype(tensors[label].dtype, name)
        chunks.setdefault(name, []).append(Chunk(box, label, 0, box.numel * dtype.itemsize, dtype))
    targets = {
        name: StoredTensor(Spec(parts[0].dtype, layout.tensors[name].spec.shape), tuple(parts))
        for name, parts in chunks.items()
    }
    wanted = Layout(layout.root, "memory", targets)
    tied = first_name_by_tied_name(tensors)
    # otherwise the last read would silently win
    duplicates = {label: torch.empty_like(tensors[label]) for label in tied}
    with cpu_buffers_for_split_tensors(layout, items, {**tensors, **duplicates}) as filled:
        needed = edits.cast_to_specs(replace(restrict_to_needed(layout, wanted), keys={}), wanted.specs)
        read_targets(make_plan(locate_all_chunks(needed), wanted), filled, ledger)
    for label, one in tied.items():
        name, other = (items[which].storage_index.fqn for which in (label, one))
        require_equal_tied_values({name: duplicates[label], other: tensors[one]}, {name: other}, layout.root)
    for label, item in items.items():
        planner.commit_tensor(item, tensors[label])


@contextmanager
def cpu_buffers_for_split_tensors(
    layout: Layout, items: Mapping[str, ReadItem], tensors: Mapping[str, Tensor]
) -> Iterator[Mapping[str, Tensor]]:
    """Provide CPU memory instead of device tensors whose rows are stored in another order; copies it back at the end.

    Blocks of such a tensor are not boxes, but byte ranges.
    """
    on_cpu = {
        label: torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        for label, tensor in tensors.items()
        if layout.tensors[items[label].storage_index.fqn].splits is not None and not is_row_major_on_cpu(tensor)
    }
    yield {**tensors, **on_cpu}
    for label, cpu_tensor in on_cpu.items():
        tensors[label].copy_(cpu_tensor)


def read_targets(plan: Plan, tensors: Mapping[str, Tensor], ledger: Ledger | None) -> None:
    """Read every target of a plan into its tensor: directly into contiguous CPU memory, otherwise through a buffer."""
    sources = Sources(plan, ledger, is_all=ledger is None)
    buffers = Buffers()
    with Worker(plan, sources.is_awaiting_comparison) as worker:
        for target in plan.targets:
            tensor = tensors[target.chunk.path]
            is_direct = is_row_major_on_cpu(tensor)
            out = memory_of_tensor(tensor if is_direct else buffers[tensor.device])
            for block in blocks_of_target(plan, target):
                start = target.chunk.offset + block.start if is_direct else 0
                with errors_at(tensor=target.name):
                    worker.read_input(block, out=out[start : start + block.nbytes])
                if not is_direct:
                    view = view_of_box(tensor, block.box.relative_to(target.chunk.box))
                    view.copy_(buffers[tensor.device][: view.nbytes].view(view.dtype).view(view.shape))
                sources.record_reads(worker.pieces)
