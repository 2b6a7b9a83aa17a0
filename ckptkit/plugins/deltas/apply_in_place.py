"""Update a Hugging Face model in place with the deltas that continue from its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage, translate_os_errors
from ckptkit.formats import locate_all_chunks
from ckptkit.formats.protocols import JOURNAL
from ckptkit.io.file import is_existing_path, names_in
from ckptkit.io.path import to_local_path, to_path
from ckptkit.layout import Layout
from ckptkit.plugins.deltas import in_place
from ckptkit.plugins.deltas.as_consolidated import open_as_consolidated
from ckptkit.plugins.deltas.chain import DeltaChain
from ckptkit.plugins.deltas.identity import checksum_by_tensor, identity_of_model
from ckptkit.plugins.deltas.open_delta import Delta, open_delta
from ckptkit.plugins.deltas.record import RECORD, is_complete_delta, is_unfinished_delta, short_id
from ckptkit.plugins.deltas.verify_delta import check_delta
from ckptkit.summary import Summarized
from ckptkit.words import count


@dataclass(frozen=True, slots=True)
class ChangedInPlace(Summarized):
    """A model at `path` that was changed in place by `deltas`, in this order; empty if it was up to date.

    `is_completed` means that this call first completed an interrupted change. `unfinished` are deltas in the same
    directory that were skipped because their `delta.json` is missing.
    """

    path: Path
    deltas: tuple[Path, ...]
    tensors: int = 0
    elements: int = 0
    is_completed: bool = False
    unfinished: tuple[Path, ...] = ()

    def summary(self) -> Iterator[str]:
        if self.is_completed:
            yield f"{self.path}: completed a change that was interrupted"
        if self.deltas:
            names = ", ".join(path.name for path in self.deltas)
            yield f"{self.path}: changed in place by {names}"
            yield f"{count(self.elements, 'element')} of {count(self.tensors, 'tensor')} changed"
        elif not self.is_completed:
            yield f"{self.path}: up to date, nothing changed"
        for path in self.unfinished:
            yield f"skipped {path.name}: unfinished, its `{RECORD}` is missing"


def apply_in_place(local: str | Path, root: str | Path) -> ChangedInPlace:
    """Update the Hugging Face model in `local` with the deltas in `root` that continue from its state.

    `root` is a delta, or a directory of deltas. A journal in `local` makes this safe. After a crash the model is old or
    new, or the same call completes the update. A server that has mapped the files sees a mixture of old and new
    weights. Raises `Mismatch` if no delta is for this model, and the errors of a bad delta, before it changes anything.
    """
    path, source = to_local_path(local), to_path(root)
    if not path.is_dir():
        raise NotACheckpoint("expected a directory with a Hugging Face model", path=path)
    with in_place.locked_model(path):
        in_place.remove_leftovers(path)
        is_completed = is_existing_path(path / JOURNAL)
        if is_completed:
            in_place.complete_journal(path)
        component = Checkpoint.open(path).model_component
        model = replace(locate_all_chunks(component.layout), blobs={}, twins={}, keys={})
        if model.format != "hf" or model.world_size is not None or component.path != path:
            hint = "run `ckptkit consolidate` first, or `ckptkit apply BASE DELTA OUT`"
            raise Unsupported("expected a Hugging Face model to change in place", path=path, hint=hint)
        sums = checksum_by_tensor(model)
        complete, unfinished = find_deltas(source)
        chain = find_continuing_chain(model, sums, complete, source)
        if not chain.deltas:
            return ChangedInPlace(path, (), is_completed=is_completed, unfinished=unfinished)
        for file in sorted(path / name for name in model.files):  # the other names of a file would change too
            hint = f"copy the model with `cp -rL {path} COPY`, and pass COPY"
            if file.is_symlink():
                raise Unsafe("the file is a symbolic link, whose target would change", path=file, hint=hint)
            with translate_os_errors(file):
                links = file.stat().st_nlink
            if links > 1:
                message = f"the file has {links} names (hard links), and all of them would change"
                raise Unsafe(message, path=file, hint=hint)
        record = in_place.write_change_journal(path, model, sums, chain)
        in_place.complete_journal(path)
    applied = tuple(delta.path for delta in chain.deltas)
    return ChangedInPlace(path, applied, len(record.tensors), record.changed, is_completed, unfinished)


def find_deltas(root: Path) -> tuple[list[Path], tuple[Path, ...]]:
    """Return the deltas to choose from, and the unfinished ones: `root`, if it is a delta, or those in it."""
    if not root.is_dir():
        raise NotACheckpoint("expected a directory with deltas", path=root)
    if is_complete_delta(root) or is_unfinished_delta(root):
        return [root], ()
    candidates = [root / name for name in sorted(names_in(root))]
    complete = [path for path in candidates if is_complete_delta(path)]
    if not complete:
        raise NotACheckpoint("expected deltas, found none", path=root, hint="`ckptkit delta BASE NEW OUT` writes one")
    return complete, tuple(filter(is_unfinished_delta, candidates))


def find_continuing_chain(model: Layout, sums: Mapping[str, int], delta_paths: list[Path], root: Path) -> DeltaChain:
    """Return the chain of deltas that continues from the model's state; file names do not set the order.

    Raises `Mismatch` if no delta fits, `Usage` if two deltas have the same base.
    """
    require_consolidated_form(model)
    by_base: dict[str, Delta] = {}
    deltas = [open_delta(path) for path in delta_paths]
    for delta in deltas:
        if (other := by_base.get(delta.record.base)) and other.record.new != delta.record.new:
            message = f"expected one delta of base {short_id(delta.record.base)}, also found {other.path.name}"
            raise Usage(message, path=delta.path, hint="pass one of them instead of the directory")
        by_base[delta.record.base] = delta
    identity = identity_of_model(model.specs, sums)
    if identity not in by_base and all(delta.record.new != identity for delta in deltas):
        if len(deltas) == 1:
            DeltaChain.of(deltas).check_base(model, sums)
        message = f"expected a delta of base {short_id(identity)}, found {count(len(deltas), 'delta')} with other bases"
        hint = "add the missing delta, or pass the model that the first delta starts from"
        raise Mismatch(message, path=root, hint=hint)
    chain: list[Delta] = []
    while identity in by_base and by_base[identity] not in chain:
        chain.append(by_base[identity])
        identity = chain[-1].record.new
        check_delta(chain[-1])
    full_chain = DeltaChain.of(chain)
    if chain:
        full_chain.check_base(model, sums)
    return full_chain


def require_consolidated_form(model: Layout) -> None:
    """Raise `Unsupported` unless the model is stored as `consolidate` would write it: deltas refer to that form."""
    wanted = open_as_consolidated(model.root, {}, model.root).layout.specs
    for name in sorted(model.specs.keys() | wanted.keys()):
        if model.specs.get(name) != wanted.get(name):
            message = f"`consolidate` would write {wanted.get(name, 'no such tensor')}, found {model.specs.get(name)}"
            hint = "run `ckptkit apply BASE DELTA OUT`, which writes the result elsewhere"
            raise Unsupported(message, path=model.root, tensor=name, hint=hint)
