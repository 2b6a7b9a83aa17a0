"""Find the cause of a load error in the checkpoint. Each function handles one kind of message."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.damage import find_torch_version
from ckptkit.diagnosis.finding import Finding, export, reshard, resize, rewrite
from ckptkit.diagnosis.names import find_names, find_wrappers, may_be_trained, raw_names, say_renamed
from ckptkit.diagnosis.optimizer import find_missing_states, list_missing_states, optimizers_in
from ckptkit.diagnosis.shapes import find_shapes
from ckptkit.layout import Layout
from ckptkit.layout.renames import by_rule, find_prefix_rule, rules_for
from ckptkit.models.known_types import HEAD
from ckptkit.models.names import HUB
from ckptkit.models.vocabulary import rows_of

Look = Callable[["MatchedMessage", LoadTarget], Iterator[Finding]]
_QUOTED = re.compile(r'"([^"]+)"')
_GROUPS = "param_groups."  # beside `state.` in an optimizer's state dict
_MAX_ENTRIES = 3  # in one finding
_SIZE = re.compile(r"[0-9]+")
_WORLD = re.compile(r"_world_size_([0-9]{1,7})_rank_")
_OPERAND = re.compile(r"Unsupported operand ([0-9]+)")  # the first byte of a file that is not a pickle
_NO_FILE = {"118": ", but a pointer of git-lfs: `git lfs pull` fetches it", "60": ", but a web page"}
_UNEXPECTED = re.compile(r"Unexpected key\(s\) in state_dict: (.*)")


@dataclass(frozen=True, slots=True)
class MatchedMessage:
    """The variable `parts` of a matched message, in order, and the full `text` that contains it."""

    parts: tuple[str, ...]
    text: str


def find_keys(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:
    """Yield the keys that `load_state_dict` misses, with the names that the checkpoint has for them, if any."""
    wanted = _QUOTED.findall(matched.parts[0])
    unexpected = [name for renamed in _UNEXPECTED.findall(matched.text) for name in _QUOTED.findall(renamed)]
    raw = raw_names(case)
    pairs = by_rule(dict.fromkeys(unexpected), dict.fromkeys(wanted))
    if len(pairs) < len(wanted):
        pairs |= {name: own for name, own in raw.items() if own in wanted and name != own}
    renamed = set(pairs.values())
    if pairs:
        rules = rules_for({old: new for old, new in pairs.items() if old in raw}, raw.keys()) if raw else None
        yield from say_renamed(case.checkpoint, pairs, rules, "the model")
    elif case.checkpoint.family is not None and case.checkpoint.companions.config is not None:
        message = f"the checkpoint uses {case.checkpoint.family.name}'s names, and the model uses other names"
        yield Finding("family", wanted[0], message, rewrite(case.checkpoint, names=HUB), tuple(wanted))
        return
    present = tuple(name for name in wanted if name not in renamed and name in raw)
    if present:
        where = f"under `{case.weights.wrapper}`" if case.weights and case.weights.wrapper else "on top"
        message = f"the checkpoint contains it, {where}: load that part of the checkpoint"
        yield Finding("key", present[0], message, None, present)
    yield from (missing_tensor(case, name) for name in wanted if name not in renamed and name not in raw)


def missing_tensor(case: LoadTarget, name: str) -> Finding:
    if name.endswith(HEAD):
        message = "the checkpoint does not contain it: perhaps it was tied to the embedding and not saved"
        return Finding("tie", name, message, export(case.checkpoint))
    return Finding("missing", name, "the checkpoint does not contain it")


def find_unexpected(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:
    """Yield the tensors that the model does not have. If keys are missing too, `find_keys` handles the message."""
    if "Missing key(s) in state_dict" not in matched.text:
        for name in _QUOTED.findall(matched.parts[0]):
            fix = None if may_be_trained(case, name) else rewrite(case.checkpoint, exclude=(f"*{name}",))
            yield Finding("unexpected", name, "the checkpoint contains it, but the model does not have it", fix)


def explain_key(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:
    """Yield why the shards lack a key: its optimizer state was not saved, or it has another name or parent key."""
    name = matched.parts[0].rstrip(".")
    states = [state for state in find_missing_states(case) if state.tensor and name.startswith(f"{state.tensor}.")]
    if states:
        yield from find_missing_states(case)
        return
    wrapper = case.weights.wrapper if case.weights else ""
    unwrapped, raw = name.removeprefix(f"{wrapper}.") if wrapper else name, raw_names(case)
    if entry_names := entries_with_same_end(name, case.layout):
        yield Finding("key", name, f"the checkpoint contains it as {entry_names}")
    elif (rule := find_prefix_rule([unwrapped], raw)) is not None:
        fix = rewrite(case.checkpoint, rename=(rule,))
        yield Finding("renamed", name, "the checkpoint contains it under another name", fix)
    elif ".param_groups." in name:
        message = "the torch that saved this optimizer did not have this option: load without it, then set it"
        yield Finding("missing", name, message)
    else:
        yield missing_tensor(case, name)


def entries_with_same_end(name: str, layout: Layout) -> str:
    """Return the entries whose names share their end with key `name`, as text; "" if there are none.

    If `name` ends with the names of entries, the longest is the match. Otherwise all entries that end with `name` are
    listed. If `name` is one word such as `step`, entries of an optimizer's state do not match: they need the parameter
    too.
    """
    if ends := [known for known in layout.names if name.endswith(f".{known}")]:
        return f"`{max(ends, key=len)}`"
    known_by_end = [known for known in layout.names if known.endswith(f".{name}")]
    if "." not in name:
        above = {known.rpartition(_GROUPS)[0] for known in layout.names if _GROUPS in known}
        inner_prefixes = tuple(f"{optimizer}{part}" for optimizer in above for part in ("state.", _GROUPS))
        known_by_end = [known for known in known_by_end if not known.startswith(inner_prefixes)]
    more = len(known_by_end) - _MAX_ENTRIES
    shown = " or ".join(f"`{known}`" for known in known_by_end[:_MAX_ENTRIES])
    return f"{shown} or {more} more" if more > 0 else shown


def find_kind(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the entry is a tensor in the checkpoint but a plain value in the state to load into."""
    name = matched.parts[0].strip()
    if name in case.layout.tensors:
        message = "the checkpoint has a tensor, and the state to load into a plain value"
        if ".param_groups." in f".{name}":
            message += ": build the optimizer as it was built for the save, for example with `lr=torch.tensor(...)`"
        yield Finding("kind", name, message)


def find_size(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:
    """Yield the shape mismatch of a tensor. `parts` are the checkpoint's shape, the model's shape, and its name."""
    saved, wanted = (tuple(map(int, _SIZE.findall(part))) for part in matched.parts[:2])
    name = matched.parts[2].strip().rstrip(".")
    rows = rows_of(case.weights.layout.tensors) if case.weights else {}
    is_vocabulary = any(f".{name}".endswith(f".{known}") or known.endswith(f".{name}") for known in rows)
    if saved and wanted and saved[1:] == wanted[1:] and is_vocabulary:
        message = f"expected {wanted[0]} rows as in the model, found {saved[0]}: one of the two is padded"
        yield Finding("vocabulary", name, message, rewrite(case.checkpoint, vocab_size=wanted[0]))
    elif len(wanted) == 1 and len(saved) > 1:
        message = f"expected {list(saved)}, found one axis of {wanted[0]} in the model: FSDP1 wrapped it for the load"
        yield Finding("shape", name, message)
    else:
        message = f"expected {list(wanted)} as in the model, found {list(saved)}: check that it is the same model"
        yield Finding("shape", name, message)


def find_size_by_name(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:
    name, saved, wanted = matched.parts
    yield from find_size(MatchedMessage((saved, wanted, name), matched.text), case)


def find_states(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:  # noqa: ARG001 - all are of interest, not just the first
    """Yield the parameters that have no optimizer state."""
    yield from list_missing_states(case)


def find_groups(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:  # noqa: ARG001 - the message has no numbers
    """Yield the sizes of the parameter groups in the checkpoint."""
    for optimizer in optimizers_in(case.layout):
        sizes = ", ".join(str(len(group)) for group in optimizer.groups)
        message = f"the groups in the checkpoint have {sizes} parameters: build the optimizer with the same groups"
        yield Finding("groups", optimizer.name, message)


def find_ranks(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:
    """Yield that the checkpoint needs as many ranks as saved it. `parts` are the saved and the current number."""
    before, now = (int(found[0]) if (found := _SIZE.findall(part)) else 0 for part in matched.parts[:2])
    fix = resize(case.checkpoint, now) if now else None
    yield Finding("world_size", None, f"{before} ranks saved the checkpoint, and {now} ranks load it", fix)


def find_file(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the missing file's name contains another world size than the checkpoint."""
    world = _WORLD.search(matched.parts[0])
    ranks = case.layout.world_size
    if world and ranks is not None and int(world[1]) != ranks:
        message = f"{ranks} ranks saved the files, and {world[1]} ranks look for theirs"
        yield Finding("world_size", None, message, reshard(case.checkpoint, int(world[1])))


def find_misfits(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:  # noqa: ARG001 - the names are cut short, or not said
    for kind in (find_wrappers, find_names, find_shapes):
        yield from kind(case)


def find_model(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:
    """Yield the command that exports the model of a training checkpoint, or that torch.save did not write the file."""
    if match := _OPERAND.search(matched.text):
        yield Finding("corrupt", None, f"torch.save did not write this file{_NO_FILE.get(match[1], '')}")
    else:
        message = "this is a training checkpoint, not a model that can be loaded"
        yield Finding("no_model", None, message, export(case.checkpoint))


def find_version(matched: MatchedMessage, case: LoadTarget) -> Iterator[Finding]:  # noqa: ARG001 - the message has only a number
    yield from find_torch_version(case)
