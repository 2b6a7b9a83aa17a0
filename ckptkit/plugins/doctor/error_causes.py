"""Find the cause of a load error in the checkpoint. Each function handles one kind of message."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckptkit.layout import Layout
from ckptkit.layout.renames import find_prefix_rule, match_names_by_rule, rules_for_renames
from ckptkit.models.architectures import HEAD
from ckptkit.models.names import HUB
from ckptkit.models.vocabulary import vocabulary_rows_by_name
from ckptkit.plugins.doctor.finding import Finding, consolidate_fix, reshard_fix, rewrite_fix, world_size_fix
from ckptkit.plugins.doctor.load_target import LoadTarget
from ckptkit.plugins.doctor.names import (
    find_name_mismatches,
    find_wrapper_prefixes,
    findings_on_renames,
    may_be_trained,
    names_without_wrappers,
)
from ckptkit.plugins.doctor.optimizer import find_missing_states_if_sharded, readable_optimizers_in
from ckptkit.plugins.doctor.shapes import find_shape_mismatches

Look = Callable[["MatchedMessage", LoadTarget], Iterator[Finding]]
_QUOTED = re.compile(r'"([^"]+)"')
_GROUPS = "param_groups."  # beside `state.` in an optimizer's state dict
_MAX_ENTRIES = 3  # in one finding
_SIZE = re.compile(r"[0-9]+")
_WORLD = re.compile(r"_world_size_([0-9]{1,7})_rank_")
_OPERAND = re.compile(r"Unsupported operand ([0-9]+)")  # the first byte of a file that is not a pickle
_NO_FILE = {"118": ": it is a git-lfs pointer; run `git lfs pull`", "60": ": it is a web page; download the file again"}
_UNEXPECTED = re.compile(r"Unexpected key\(s\) in state_dict: (.*)")


@dataclass(frozen=True, slots=True)
class MatchedMessage:
    """The variable `parts` of a matched message, in order, and the full `text` that contains it."""

    parts: tuple[str, ...]
    text: str


def explain_missing_keys(matched: MatchedMessage, target: LoadTarget) -> Iterator[Finding]:
    """Yield the keys that `load_state_dict` misses, with the names that the checkpoint has for them, if any."""
    wanted = _QUOTED.findall(matched.parts[0])
    unexpected = [name for renamed in _UNEXPECTED.findall(matched.text) for name in _QUOTED.findall(renamed)]
    raw = names_without_wrappers(target)
    pairs = match_names_by_rule(dict.fromkeys(unexpected), dict.fromkeys(wanted))
    if len(pairs) < len(wanted):
        pairs |= {name: own for name, own in raw.items() if own in wanted and name != own}
    renamed = set(pairs.values())
    if pairs:
        rules = rules_for_renames({old: new for old, new in pairs.items() if old in raw}, raw.keys()) if raw else None
        yield from findings_on_renames(target.checkpoint, pairs, rules, "the model")
    elif target.checkpoint.family is not None and target.checkpoint.companions.config is not None:
        message = f"the checkpoint uses {target.checkpoint.family.name}'s names, and the model uses other names"
        yield Finding("family", wanted[0], message, rewrite_fix(target.checkpoint, names=HUB), tuple(wanted))
        return
    present = tuple(name for name in wanted if name not in renamed and name in raw)
    if present:
        where = (
            f"under `{target.weights.dotted_prefix}`"
            if target.weights and target.weights.dotted_prefix
            else "at the top level"
        )
        message = f"the checkpoint contains it {where}: load that part of the checkpoint"
        yield Finding("key", present[0], message, None, present)
    yield from (missing_tensor_finding(target, name) for name in wanted if name not in renamed and name not in raw)


def missing_tensor_finding(target: LoadTarget, name: str) -> Finding:
    if name.endswith(HEAD):
        message = "the checkpoint does not contain it: perhaps it was tied to the embedding and not saved"
        return Finding("tie", name, message, consolidate_fix(target.checkpoint))
    return Finding("missing", name, "the checkpoint does not contain it")


def explain_unexpected_keys(matched: MatchedMessage, target: LoadTarget) -> Iterator[Finding]:
    """Yield the tensors that the model does not have. If keys are missing, too, `explain_missing_keys` answers."""
    if "Missing key(s) in state_dict" not in matched.text:
        for name in _QUOTED.findall(matched.parts[0]):
            fix = None if may_be_trained(target, name) else rewrite_fix(target.checkpoint, exclude=(f"*{name}",))
            yield Finding("unexpected", name, "the checkpoint contains it, but the model does not have it", fix)


def explain_key_not_in_checkpoint(matched: MatchedMessage, target: LoadTarget) -> Iterator[Finding]:
    """Yield why the shards lack a key: its optimizer state was not saved, or it has another name or parent key."""
    name = matched.parts[0].rstrip(".")
    states = [
        state
        for state in find_missing_states_if_sharded(target)
        if state.tensor and name.startswith(f"{state.tensor}.")
    ]
    if states:
        yield from find_missing_states_if_sharded(target)
        return
    wrapper = target.weights.dotted_prefix if target.weights else ""
    unwrapped, raw = name.removeprefix(f"{wrapper}.") if wrapper else name, names_without_wrappers(target)
    if entry_names := entries_with_same_end(name, target.layout):
        yield Finding("key", name, f"the checkpoint contains it as {entry_names}")
    elif (rule := find_prefix_rule([unwrapped], raw)) is not None:
        fix = rewrite_fix(target.checkpoint, rename=(rule,))
        yield Finding("renamed", name, "the checkpoint contains it under another name", fix)
    elif ".param_groups." in name:
        message = "the torch that saved this optimizer did not have this option: load without it, then set it"
        yield Finding("missing", name, message)
    else:
        yield missing_tensor_finding(target, name)


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


def explain_tensor_for_value(matched: MatchedMessage, target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the entry is a tensor in the checkpoint but a plain value in the state to load into."""
    name = matched.parts[0].strip()
    if name in target.layout.tensors:
        message = "expected a plain value as in the state that you load into, found a tensor"
        if ".param_groups." in f".{name}":
            message += ": build the optimizer as it was built for the save, for example with `lr=torch.tensor(...)`"
        yield Finding("kind", name, message)


def explain_shape_mismatch(parts: Sequence[str], target: LoadTarget) -> Iterator[Finding]:
    """Yield the shape mismatch of a tensor. `parts` are the checkpoint's shape, the model's shape, and its name."""
    saved, wanted = (tuple(map(int, _SIZE.findall(part))) for part in parts[:2])
    name = parts[2].strip().rstrip(".")
    rows = vocabulary_rows_by_name(target.weights.layout.tensors) if target.weights else {}
    is_vocabulary = any(f".{name}".endswith(f".{known}") or known.endswith(f".{name}") for known in rows)
    if saved and wanted and saved[1:] == wanted[1:] and is_vocabulary:
        message = f"expected {wanted[0]} rows as in the model, found {saved[0]}: one of the two is padded"
        yield Finding("vocabulary", name, message, rewrite_fix(target.checkpoint, vocab_size=wanted[0]))
    elif len(wanted) == 1 and len(saved) > 1:
        message = (
            f"expected {list(saved)}, found {list(wanted)} in the model, FSDP1's flat parameter: load inside "
            "`FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)`, or with `get_state_dict`"
        )
        yield Finding("shape", name, message)
    else:
        message = f"expected {list(wanted)} as in the model, found {list(saved)}: check that it is the same model"
        yield Finding("shape", name, message)


def list_group_sizes(matched: MatchedMessage, target: LoadTarget) -> Iterator[Finding]:  # noqa: ARG001 - the message has no numbers
    """Yield the sizes of the parameter groups in the checkpoint."""
    for optimizer in readable_optimizers_in(target.layout):
        sizes = ", ".join(str(len(group)) for group in optimizer.groups)
        message = f"the groups in the checkpoint have {sizes} parameters: build the optimizer with the same groups"
        yield Finding("groups", optimizer.name, message)


def explain_rank_count(matched: MatchedMessage, target: LoadTarget) -> Iterator[Finding]:
    """Yield that the checkpoint needs as many ranks as saved it. `parts` are the saved and the current number."""
    before, now = (int(found[0]) if (found := _SIZE.findall(part)) else 0 for part in matched.parts[:2])
    fix = world_size_fix(target.checkpoint, now) if now else None
    yield Finding("world_size", None, f"{before} ranks saved the checkpoint, and {now} ranks load it", fix)


def explain_missing_file(matched: MatchedMessage, target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the missing file's name contains another world size than the checkpoint."""
    world = _WORLD.search(matched.parts[0])
    ranks = target.layout.world_size
    if world and ranks is not None and int(world[1]) != ranks:
        message = f"{ranks} ranks saved the files, and {world[1]} ranks look for theirs"
        yield Finding("world_size", None, message, reshard_fix(target.checkpoint, int(world[1])))


def explain_mismatch_without_names(matched: MatchedMessage, target: LoadTarget) -> Iterator[Finding]:  # noqa: ARG001 - the names are cut short, or not said
    for kind in (find_wrapper_prefixes, find_name_mismatches, find_shape_mismatches):
        yield from kind(target)


def explain_missing_model(matched: MatchedMessage, target: LoadTarget) -> Iterator[Finding]:
    """Yield the command that exports the model of a training checkpoint, or that torch.save did not write the file."""
    if match := _OPERAND.search(matched.text):
        yield Finding("corrupt", None, f"torch.save did not write this file{_NO_FILE.get(match[1], '')}")
    else:
        message = "this is a training checkpoint, not a model that can be loaded"
        yield Finding("no_model", None, message, consolidate_fix(target.checkpoint))
