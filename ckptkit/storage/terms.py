"""The terms of a load: which entries may be missing, and which dtypes may be converted.

Missing entries and other dtypes are errors unless the caller allows them. Tied tensors must be equal. torch's planner
stops at the first missing name, or silently skips all of them with `allow_partial_load`. It ignores dtypes: torch casts
values to the dtypes of the tensors that they are read into.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ckptkit.checkpoints.optimizers.missing_states import FIRST_ZERO
from ckptkit.errors import Mismatch, Usage, and_more, warn
from ckptkit.layout import KeyPath, Spec
from ckptkit.layout.box import full_box
from ckptkit.storage.memory import view_of_box
from ckptkit.words import count


def first_name_by_tied_name(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each name that is not the first name of its tensor, with the first name."""
    first: dict[object, str] = {}
    named = {name: first.setdefault(memory_identity_of(tensor), name) for name, tensor in tensors.items()}
    return {name: first_name for name, first_name in named.items() if name != first_name}


def memory_identity_of(tensor: Tensor) -> object:
    """Return a key that is equal for tied tensors: the address and the layout of their elements."""
    local = local_shard(tensor)
    return local.data_ptr(), tensor.dtype, tensor.shape, local.stride()


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shards(tensor: Tensor) -> list[Tensor]:
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [local_shard(tensor)]


def require_equal_tied_values(tensors: Mapping[str, Tensor], tied: Mapping[str, str], path: Path) -> None:
    """Raise `Mismatch` unless the values loaded for tied names are equal to the last bit."""
    for name, tied_name in tied.items():
        values, tied_values = (local_shard(tensors[which]) for which in (name, tied_name))
        everything = full_box(tuple(values.shape))
        # as integers, so that NaNs compare by their bits
        if not torch.equal(view_of_box(values, everything), view_of_box(tied_values, everything)):
            raise Mismatch(
                f"the model ties it to `{tied_name}`, but the checkpoint's bytes differ",
                path=path,
                tensor=name,
                hint="if they were trained separately, build the model with a head of its own",
            )


ERROR, KEEP, ZERO, ALLOW, WARN, IGNORE = "error", "keep", "zero", "allow", "warn", "ignore"
_MAX_NAMED = 8  # in a message
_NUMBERED = re.compile(r"((?:.*\.)?state\.)[0-9]+\.")  # a state under a parameter index
_NAME_FIRST = "run `ckptkit convert CKPT OUT --to dcp --optimizer-keys names`, and load OUT"
_INITIALIZE = "create the states of a new optimizer with torch's `get_optimizer_state_dict` before you load"
_TORCH_PLAN = create_default_local_load_plan.__code__


class PartialLoad(UserWarning):
    """Warning: the checkpoint lacks entries that were requested, or has entries that were not."""


class PlannerEntries(dict[str, TensorStorageMetadata | BytesStorageMetadata]):
    """The entries of a checkpoint for planners. For torch's own planner, every other name seems to exist too.

    torch's planner would stop at the first missing name. This way the reader gets all names, and applies its terms. A
    planner that looks up a name itself, to skip missing entries, gets the true answer. For a tensor of another size,
    where torch's planner would raise a ValueError, `Mismatch` names the tensor and both shapes.
    """

    def __init__(self, root: Path | None = None) -> None:
        super().__init__()
        self.root = root

    def __contains__(self, name: object) -> bool:
        # the caller decides, because other planners need the true answer
        return super().__contains__(name) or sys._getframe(1).f_code is _TORCH_PLAN

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        caller = sys._getframe(1)
        if caller.f_code is not _TORCH_PLAN:
            return super().__getitem__(name)
        entry = self.get(name) or BytesStorageMetadata()
        if isinstance(entry, TensorStorageMetadata):
            wanted, size = caller.f_locals.get("obj"), entry.size
            if isinstance(wanted, Tensor):
                # a tensor that holds pieces of a larger one (torch's `CheckpointableTensor`) has the larger one's size
                size = torch.Size(getattr(wanted, "global_shape", wanted.size()))
            if size != entry.size:
                shapes = f"expected shape {list(size)} as in the state to load into, found {list(entry.size)}"
                hint = "build the model with the sizes of the checkpoint, or load another checkpoint"
                raise Mismatch(f"{shapes} in the checkpoint", path=self.root, tensor=name, hint=hint)
        return entry


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """The terms of a load: `missing` is "error", "keep" or "zero", `cast` is "error" or "allow".

    `unasked` is "warn", "error" or "ignore". `under` is the key that was added before the names of the checkpoint.
    """

    missing: str = ERROR
    cast: str = ERROR
    unasked: str = WARN
    under: str = ""

    def __post_init__(self) -> None:
        if self.missing not in (ERROR, KEEP, ZERO):
            raise Usage(f"missing: expected `{ERROR}`, `{KEEP}` or `{ZERO}`, found `{self.missing}`")
        if self.cast not in (ERROR, ALLOW):
            raise Usage(f"cast: expected `{ERROR}` or `{ALLOW}`, found `{self.cast}`")
        if self.unasked not in (WARN, ERROR, IGNORE):
            raise Usage(f"unasked: expected `{WARN}`, `{ERROR}` or `{IGNORE}`, found `{self.unasked}`")

    def check_unrequested(self, keys: Iterable[KeyPath], requested: Iterable[KeyPath]) -> None:
        """Warn about entries below a requested key that the checkpoint has and the state lacks, or raise `Mismatch`.

        `keys` are the key paths of the checkpoint's entries, `requested` those that a state asks for.
        """
        ways = {key[:steps] for key in requested for steps in range(1, len(key) + 1)}
        unrequested = [key for key in keys if key not in ways and len(key) > 1 and key[:1] in ways]
        if not unrequested:
            return
        above = Counter(next(key[:n] for n in range(1, len(key) + 1) if key[:n] not in ways) for key in unrequested)
        groups = [f"{count(n, 'entry')} under `{'.'.join(map(str, key))}`" for key, n in above.items()]
        text = (
            f"the state to load into does not have {', '.join(groups[:_MAX_NAMED])}{and_more(len(groups) - _MAX_NAMED)}"
        )
        advice = _INITIALIZE if any(key[-1] == "state" for key in above) else "load the whole state"
        if self.unasked == ERROR:
            raise Mismatch(f"{text}, which the checkpoint has", hint=f'{advice}; or pass unasked="ignore"')
        text += f', which the checkpoint has: it is not loaded; {advice}, or pass unasked="ignore"'
        warn(text, PartialLoad)

    def check_missing(self, names: Collection[str], wanted: Mapping[str, Any], stored: Collection[str]) -> None:
        """Raise `Mismatch` for names that are not `stored` in the checkpoint.

        With "zero" only non-tensor entries are refused, and with "keep" no entry, unless the checkpoint lacks all of
        them.
        """
        if names and wanted and len(names) >= len(wanted):
            message = f"expected {count(len(names), 'entry')} of the state to load into, found 0 in the checkpoint"
            where = (
                self.hint_on_nesting(names, stored)
                or f"the checkpoint has names like {names_with_rest_count(sorted(stored)[:3])}"
            )
            raise Mismatch(message, tensor=next(iter(names)), hint=where)
        if self.missing == KEEP:
            return
        # the missing states of optimizers that use parameter indices in the checkpoint
        by_index = tuple({match[1] for match in map(_NUMBERED.match, stored) if match})
        numbered = {name for name in names if name.startswith(by_index)}
        is_refused = self.missing == ERROR
        refused = [name for name in names if is_refused or name in numbered or not isinstance(wanted.get(name), Tensor)]
        if refused:
            what = (
                "and only tensors can be set to zero"
                if self.missing == ZERO and not numbered
                else "but the state to load into asks for it"
            )
            message = f"the checkpoint does not contain it, {what}"
            if len(refused) > 1:
                message += f"; also missing: {names_with_rest_count(refused[1:])}"
            hint = self.hint_on_nesting(refused, stored) or (
                _NAME_FIRST if numbered else hint_on_missing_names(refused)
            )
            raise Mismatch(message, tensor=refused[0], hint=hint)

    def hint_on_nesting(self, missing: Collection[str], stored: Collection[str]) -> str:
        """Return a hint for names that are all at another level of nesting in the checkpoint; "" for any others."""
        names = list(missing)
        steps = names[0].split(".")
        for depth in range(1, len(steps)):
            above = ".".join(steps[:depth]) + "."
            if all(name.startswith(above) and name.removeprefix(above) in stored for name in names):
                return f'pass under="{above[:-1]}": the checkpoint has these names without that'
        ends = (name.removesuffix(f".{names[0]}") for name in stored if name.endswith(f".{names[0]}"))
        if (key := next((key for key in ends if all(f"{key}.{name}" in stored for name in names)), None)) is None:
            return ""
        if key == self.under:
            return f'drop under="{key}": the checkpoint has these names without that'
        nested = "".join(f'{{"{step}": ' for step in key.split("."))
        return f"the checkpoint has these names under `{key}`: load {nested}STATE{'}' * len(key.split('.'))}"

    def fill_missing(self, names: Iterable[str], wanted: Mapping[str, Any]) -> None:
        """Set missing tensors to zero if the terms say so, and warn about all missing entries."""
        names = list(names)
        if not names:
            return
        if self.missing == ZERO:
            for part in (part for name in names for part in local_shards(wanted[name])):
                part.detach().zero_()
        done = "now zero" if self.missing == ZERO else "unchanged"
        text = f"{count(len(names), 'entry', 'is')} not in the checkpoint, and {done}: {names_with_rest_count(names)}"
        warn(text, PartialLoad)

    def check_casts(self, specs_and_targets: Iterable[tuple[str, Spec, Tensor]]) -> None:
        """Raise `Mismatch` for tensors whose dtype differs from the checkpoint's, unless casts are allowed."""
        if self.cast == ALLOW:
            return
        changed: dict[str, str] = {}
        for name, spec, tensor in specs_and_targets:
            ours = str(tensor.dtype).removeprefix("torch.")
            if ours != spec.dtype.name:
                changed[name] = (
                    f"expected {ours} as in the state to load into, found {spec.dtype.name} in the checkpoint"
                )
        if changed:
            first, *others = changed
            more = f"; also: {names_with_rest_count(others)}" if others else ""
            hint = 'cast="allow" converts floats of 16 bits and more'
            raise Mismatch(f"{changed[first]}{more}", tensor=first, hint=hint)


def names_with_rest_count(names: list[str]) -> str:
    """Return the first names, and the number of others."""
    return ", ".join(f"`{name}`" for name in names[:_MAX_NAMED]) + and_more(len(names) - _MAX_NAMED)


def hint_on_missing_names(names: Sequence[str]) -> str:
    """Return a hint for missing names."""
    keep = 'pass missing="keep" to keep the values in memory, or missing="zero" to set them to zero'
    if not all("state." in name for name in names):
        return keep
    if all(name.rpartition(".")[2] in FIRST_ZERO for name in names):
        keep = 'pass missing="zero", its initial value ("keep" would keep a state with one step counted)'
    run = "run `ckptkit reshard --complete-optimizer`"
    return f"{run} if the parameters never received a gradient, or {keep}"
