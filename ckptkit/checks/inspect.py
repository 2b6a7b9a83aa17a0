"""Describe a checkpoint from its metadata: its components, and the sizes of model, optimizer and other entries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit import words
from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.find_components import LeftBehind
from ckptkit.checkpoints.optimizers.keys import find_parameter_key_kind
from ckptkit.checkpoints.partial_file import find_partial_file_error, why_maybe_partial_file
from ckptkit.checkpoints.salvage_account import read_account
from ckptkit.errors import Corrupt, IOFailure, Mismatch, Unsafe, Unsupported
from ckptkit.formats import locate_all_chunks
from ckptkit.io.path import is_remote
from ckptkit.layout import Chunk, Layout, StoredTensor
from ckptkit.layout.gc_pause import collector_paused
from ckptkit.layout.wrappers import may_be_adapter
from ckptkit.models.architectures import HEAD, find_embedding, has_tied_head
from ckptkit.models.companions import find_model_config
from ckptkit.models.names.weights import OF_ONE
from ckptkit.state.quantized.config import may_be_quantized_model
from ckptkit.summary import Summarized
from ckptkit.trainers import has_only_epoch_in_name
from ckptkit.words import count, format_bytes

if TYPE_CHECKING:
    from ckptkit.adapters.find import InspectedAdapter
    from ckptkit.state.quantized.find import InspectedQuantized


@dataclass(frozen=True, slots=True)
class Group:
    """The entries of one kind: their number, their bytes, tensor bytes by dtype, and the top-level keys above them."""

    entries: int
    nbytes: int
    bytes_by_dtype: Mapping[str, int]
    under: tuple[str, ...]


def entries_by_kind(layouts: Iterable[Layout], weights: Mapping[str, str]) -> dict[str, Group]:
    """Group the entries of all components into "model", "optimizer" and "rest"; empty groups are left out.

    `weights` are the model's tensors in the first component.
    """
    entries: Counter[str] = Counter()
    blob_bytes: Counter[str] = Counter()
    dtypes: dict[str, Counter[str]] = defaultdict(Counter)
    under: dict[str, dict[str, None]] = defaultdict(dict)
    for i, part in enumerate(layouts):
        ours = set(weights.values()) if i == 0 else set()
        in_optimizer_directory = part.root.name.startswith("optim")
        for name in part.names:
            key, kind = part.key(name), "rest"
            if name in ours:
                kind = "model"
            elif in_optimizer_directory or any(str(step).startswith("optim") for step in key[:3]):
                kind = "optimizer"
            entries[kind] += 1
            if name in part.tensors:
                spec = part.tensors[name].spec
                dtypes[kind][spec.dtype.name] += spec.nbytes
            else:
                blob_bytes[kind] += part.blobs[name].length
            if len(key) > 1 or name in part.blobs:
                under[kind][str(key[0]).partition(OF_ONE)[0]] = None
    return {
        kind: Group(
            entries[kind], blob_bytes[kind] + dtypes[kind].total(), dict(dtypes[kind].most_common()), tuple(under[kind])
        )
        for kind in ("model", "optimizer", "rest")
        if entries[kind]
    }


Tie = tuple[str, ...]  # names of the same tensor


def find_ties(
    layout: Layout, config: Mapping[str, Any] | None, weights: Mapping[str, str]
) -> tuple[list[Tie], str | None]:
    """Return the groups of names with the same byte ranges, and the head that `config` ties to the embedding.

    Also returns a remark on a head that `config` ties although it differs from the embedding, or was not compared.

    `weights` maps the model's names to the checkpoint's; the checkpoint may lack the head. If it has the head, its
    bytes are read and must equal the embedding's. Scalars never count as tied: a whole parameter group may share one
    step.
    """
    stored = {name: tensor for name, tensor in layout.tensors.items() if tensor.spec.nbytes and tensor.spec.shape}
    alike = tensor_groups_with_shared_key(stored, lambda tensor: (tensor.spec, chunk_identity(tensor.chunks[0])))
    ties = [
        tuple(tie)
        for group_members in alike
        for tie in tensor_groups_with_shared_key(
            group_members, lambda tensor: tuple(map(chunk_identity, tensor.chunks))
        )
    ]
    is_tied = config is not None and has_tied_head(config)
    embedding = find_embedding(weights) if is_tied else None
    own_head = weights.get(HEAD) if is_tied else None
    if embedding is None and own_head is not None and not any(own_head in tie for tie in ties):
        return ties, f"config.json ties `{own_head}` to the embedding, but ckptkit found no single embedding to compare"
    if embedding is not None:
        head = (weights.get(HEAD, HEAD), weights[embedding])
        if not any(set(head) <= set(tie) for tie in ties):
            if head[0] in stored and (why := find_reason_not_equal(layout, *head)):
                return ties, f"config.json ties `{head[0]}` to `{head[1]}`, but {why}"
            ties.append(head)
    return ties, None


def find_reason_not_equal(layout: Layout, name: str, other: str) -> str | None:
    """Return why two tensors do not count as equal; None if they have the same bytes."""
    if is_remote(layout.root):
        return "ckptkit did not compare their bytes, because they are in a store"
    from ckptkit.models.fit import require_equal_tied  # deferred: imports the engine, which is rarely needed

    try:
        require_equal_tied(layout, name, other)
    except Mismatch:
        return "they differ"
    except (Corrupt, IOFailure, Unsafe, Unsupported) as error:
        return f"ckptkit could not compare them: {error.message}"
    return None


def tensor_groups_with_shared_key(
    tensors: Mapping[str, StoredTensor], key: Callable[[StoredTensor], Hashable]
) -> list[dict[str, StoredTensor]]:
    """Return the groups of tensors that share a key; tensors with a unique key are left out."""
    by_key: dict[Hashable, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        by_key.setdefault(key(tensor), {})[name] = tensor
    return [members for members in by_key.values() if len(members) > 1]


def chunk_identity(chunk: Chunk) -> Hashable:
    return chunk.path, chunk.offset, chunk.box, chunk.strides


@dataclass(frozen=True, slots=True)
class Inspected(Summarized):
    """The summary of a checkpoint: `layout` joins its readable components, `unread` names the unreadable ones.

    `model` is the component with the model, or the only one. `step`, `trainer`, `family` (of the model's tensor names)
    and `parameters` (tied ones count once) are None if unknown. `groups` are "model", "optimizer" and "rest", which the
    command prints as `other`.

    `optimizer_keys` are "names" or "ids" of parameters, None without an optimizer or for a mix. `salvaged` is the
    account of a salvaged checkpoint, None for any other. `left_behind` are files in its directory that no component
    reads. `remarks` are contradictions between its files, and things that are missing.
    """

    layout: Layout
    model: Layout
    step: int | None
    whole: Path
    trainer: str | None
    family: str | None
    world_size: int | None
    parameters: int | None
    groups: Mapping[str, Group]
    ties: tuple[Tie, ...]
    has_manifest: bool
    unread: tuple[str, ...]
    optimizer_keys: str | None = None
    adapters: tuple[InspectedAdapter, ...] = ()
    quantized: InspectedQuantized | None = None
    salvaged: Mapping[str, Any] | None = None
    left_behind: tuple[LeftBehind, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Tensor bytes of each dtype, largest first."""
        nbytes: Counter[str] = Counter()
        for spec in self.layout.specs.values():
            nbytes[spec.dtype.name] += spec.nbytes
        return dict(nbytes.most_common())

    def summary(self) -> Iterator[str]:
        facts = [f"{self.layout.format} checkpoint"]
        if self.step is not None:
            facts.append(f"step {self.step}")
        if self.world_size is not None:
            facts.append(f"written by {count(self.world_size, 'rank')}")
        yield f"{self.whole}: {', '.join(facts)}"
        amount = [] if self.parameters is None else [words.format_parameter_count(self.parameters)]
        size = format_bytes(sum(group.nbytes for group in self.groups.values()))
        yield ", ".join([*amount, size, "with a manifest" if self.has_manifest else "no manifest"])
        if self.trainer:
            yield f"trainer: {self.trainer}"
        if self.family:
            yield f"names: {self.family}"


@collector_paused()
def inspect(source: Source, *, with_places: bool = False) -> Inspected:
    """Return what the checkpoint at `source`, or the latest of the run there, contains.

    Reads metadata. Reads tensor data in one case only: on a local disk, it compares a head that config.json ties to the
    embedding. With `with_places`, finds the byte offset of each chunk inside its zip wrapper, which costs two small
    reads per chunk. For compressed chunks that is the offset of the stream.
    """
    checkpoint, unread = Checkpoint.open(source).with_readable_components()
    model = checkpoint.model_component
    weights: Mapping[str, str] = {}  # the checkpoint's names by the model's own names
    if model.is_model:
        with suppress(Mismatch, Unsupported):  # the model cannot be identified
            weights = model.weights.came_from
    quantized = None
    if model.is_model and may_be_quantized_model(model.layout.specs):
        from ckptkit.state.quantized.find import inspect_quantized  # deferred: most models have no quantized weights

        quantized = inspect_quantized(model)
    ties, tie_remark = find_ties(model.layout, find_model_config(model.path), weights)
    layout = locate_all_chunks(checkpoint.layout, decompress=False) if with_places else checkpoint.layout
    adapters: tuple[InspectedAdapter, ...] = ()
    if model.is_model and may_be_adapter(model.layout.tensors):
        from ckptkit.adapters.find import inspect_adapters  # deferred: most models have no adapters

        adapters = inspect_adapters(model)
    # tied parameters count once
    duplicates = {name for tie in ties for name in sorted(set(tie) & model.layout.tensors.keys())[1:]}
    counted = [model.layout.tensors[name].spec.numel for name in weights.values() if name not in duplicates]
    packed = quantized.stored - quantized.parameters if quantized else 0
    return Inspected(
        layout,
        model.layout,
        checkpoint.step,
        checkpoint.path,
        checkpoint.trainer,
        checkpoint.family.name if checkpoint.family else None,
        layout.world_size or checkpoint.world_size,
        sum(counted) - packed if counted else None,
        entries_by_kind([component.layout for component in checkpoint.components], weights),
        tuple(ties),
        model.has_manifest and model.manifest is not None,  # a manifest of an earlier save counts as none
        unread,
        find_parameter_key_kind(layout),
        adapters,
        quantized,
        read_account(checkpoint.path) if checkpoint.path.is_dir() else None,
        tuple(checkpoint.unread_files),
        tuple(remarks_on_checkpoint(checkpoint, tie_remark)),
    )


def remarks_on_checkpoint(checkpoint: Checkpoint, tie_remark: str | None) -> Iterator[str]:
    """Yield remarks: it is one of several files, its steps differ, or a tied head differs from the embedding."""
    if part := find_partial_file_error(checkpoint):
        yield part.message
    elif doubt := why_maybe_partial_file(checkpoint):
        yield doubt
    named, noted = checkpoint.step_in_name, checkpoint.recorded_step
    if named is not None and noted not in (None, named) and not has_only_epoch_in_name(checkpoint.path):
        yield f"the name contains step {named:,}, but the checkpoint records step {noted:,}"
    if tie_remark:
        yield tie_remark
