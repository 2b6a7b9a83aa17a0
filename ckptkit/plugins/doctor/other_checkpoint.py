"""Compare a checkpoint with another one that loads: names, shapes and dtypes of all common entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptkit.checks.diff import shapes_of_entries
from ckptkit.formats import get_format
from ckptkit.layout import Layout, Spec
from ckptkit.layout.dtypes import DType
from ckptkit.layout.renames import match_names_by_rule, numbers_to_wildcards, rules_for_renames
from ckptkit.models.names import HUB
from ckptkit.plugins.doctor.finding import Finding, Fix, rewrite_fix
from ckptkit.plugins.doctor.load_target import LoadTarget
from ckptkit.plugins.doctor.names import findings_on_renames
from ckptkit.plugins.doctor.optimizer import parameters_lacking_state, states_keyed_by_name
from ckptkit.state.match_checkpoints import Side, pair_components, with_comparable_names, with_hub_names_on_both
from ckptkit.trainers import find_owner_rank_of_key

_MAX_RULES = 8


def compare_with_checkpoint(target: LoadTarget) -> Iterator[Finding]:
    """Yield the entries that another checkpoint has and this one lacks, or has under another name, shape or dtype."""
    if target.like is None:
        return
    path = target.like.path
    our_family, their_family = target.checkpoint.family, target.like.family
    if our_family is not their_family:
        one, other = (family.name if family else HUB for family in (our_family, their_family))
        message = f"the names are {one}'s here, and {other}'s in {path}"
        yield Finding("family", None, message, rewrite_fix(target.checkpoint, names=other))
    for pair in pair_components(target.checkpoint, target.like)[0]:
        ours, theirs = with_comparable_names(*with_hub_names_on_both(target.checkpoint, target.like, pair))
        shared = ours.layout.tensors.keys() & theirs.layout.tensors.keys()
        if our_family is their_family or shared:
            yield from find_enclosing_key_difference(target, path, ours, theirs)
            yield from find_missing_and_extra(target, path, ours, theirs)
            yield from find_spec_differences(target, path, ours, theirs)
            is_sharded = target.checkpoint.model_component.reader.is_sharded  # torch can load the opposite
            for name in ours.layout.tensors.keys() & theirs.layout.blobs.keys() if is_sharded else ():
                message = (
                    f"a tensor here, a plain value in {path}: torch's load fails with `Invalid checkpoint metadata`; "
                    "build the optimizer as it was built here, for example with `lr=torch.tensor(...)`"
                )
                yield Finding("kind", name, message)


def find_enclosing_key_difference(target: LoadTarget, other: Path, ours: Side, theirs: Side) -> Iterator[Finding]:
    """Yield a finding if the model is under another key than in the other checkpoint."""
    if ours.wrapper == theirs.wrapper or any(get_format(side.layout.format).is_model_only for side in (ours, theirs)):
        return
    here, there = (f"under `{side.wrapper}`" if side.wrapper else "under no key" for side in (ours, theirs))
    is_simple = not ours.wrapper and "." not in theirs.wrapper and not ours.left_out
    fix = rewrite_fix(target.checkpoint, under=theirs.wrapper) if is_simple else None
    yield Finding("key", None, f"expected the model {there} as in {other}, found it {here}", fix)


def find_missing_and_extra(target: LoadTarget, other: Path, ours: Side, theirs: Side) -> Iterator[Finding]:
    """Yield the entries that only the other checkpoint has, and the weights that only this one has."""
    is_sharded = target.checkpoint.model_component.reader.is_sharded
    reported_states: set[str] = set()
    if is_sharded:  # `find_missing_states_if_sharded` reports the states that are missing for whole parameters
        lacking = {name for states in states_keyed_by_name(ours.layout) for name in parameters_lacking_state(states)}
        states_there = [states.of for states in states_keyed_by_name(theirs.layout)]
        present = [state for of in states_there for name, state in of.items() if name in lacking]
        reported_states = {entry for state in present for entry in state.values()}
    our_names, their_names = set(ours.layout.names), set(theirs.layout.names)
    missing = {
        name: shape
        for name, shape in shapes_of_entries(theirs.layout).items()
        if name not in our_names and not is_per_rank(theirs.layout, name) and name not in reported_states
    }
    extra = {
        name: shape
        for name, shape in shapes_of_entries(ours.layout).items()
        if name not in their_names and not is_per_rank(ours.layout, name)
    }
    pairs = match_names_by_rule(extra, missing)
    own = {old: new for old, new in pairs.items() if old in ours.weights}
    rules = rules_for_renames(own, ours.weights) if own else None  # the rules for the model rename its optimizer too
    yield from findings_on_renames(target.checkpoint, pairs, rules, str(other))
    for name in missing:
        if name not in pairs.values():
            message = (
                f"missing here, but {other} has it: torch's load fails with `Missing key in checkpoint state_dict`"
            )
            yield Finding("missing", name, message)
    for name in extra:
        if name not in pairs and name in ours.weights:
            yield Finding("unexpected", name, f"{other} does not have it: `load_state_dict` refuses it")


def find_spec_differences(target: LoadTarget, other: Path, ours: Side, theirs: Side) -> Iterator[Finding]:
    """Yield the tensors that have another shape or dtype in the other checkpoint."""
    specs = theirs.layout.specs
    pairs = {name: (spec, specs[name]) for name, spec in ours.layout.specs.items() if specs.get(name, spec) != spec}
    shapes = {name: (one, two) for name, (one, two) in pairs.items() if one.shape != two.shape}
    for name, (one, two) in shapes.items():
        yield Finding("shape", name, f"expected {list(two.shape)} as in {other}, found {list(one.shape)}")
    dtypes = {name: (one, two) for name, (one, two) in pairs.items() if name not in shapes}
    fix = find_dtype_fix(target, dtypes, ours, theirs)
    changes: dict[tuple[DType, DType], list[str]] = {}
    for name, (one, two) in dtypes.items():
        changes.setdefault((one.dtype, two.dtype), []).append(name)
    for (here, there), names in changes.items():
        message = f"expected {there} as in {other}, found {here}: torch's load converts it silently"
        yield Finding("dtype", names[0], message, fix, tuple(names))


def find_dtype_fix(target: LoadTarget, pairs: Mapping[str, tuple[Spec, Spec]], ours: Side, theirs: Side) -> Fix | None:
    """Return the command that casts tensors to the other checkpoint's dtypes; None if one cannot be cast."""
    weight_dtypes = {spec.dtype for name, spec in theirs.layout.specs.items() if name in theirs.weights}
    is_simple = len(weight_dtypes) == 1 and any(name in ours.weights for name in pairs)
    rules = [dtype.name for dtype in weight_dtypes] if is_simple else []
    other_dtypes = {name: two.dtype for name, (_, two) in pairs.items() if not (is_simple and name in ours.weights)}
    # the last words of names, such as `exp_avg`, whose tensors all change to the same dtype get one rule
    dtypes_by_kind: dict[str, set[DType | None]] = {}
    for name in ours.layout.tensors:
        kind = name.rpartition(".")[2]
        dtypes_by_kind.setdefault(kind, set()).add(other_dtypes.get(name) if "." in name else None)
    uniform_kinds = {kind for kind, dtypes in dtypes_by_kind.items() if len(dtypes) == 1 and None not in dtypes}
    globs = {
        name: f"*.{kind}" if (kind := name.rpartition(".")[2]) in uniform_kinds else f"*{numbers_to_wildcards(name)}"
        for name in other_dtypes
    }
    rules += dict.fromkeys(f"{globs[name]}={dtype.name}" for name, dtype in other_dtypes.items())
    if not rules or len(rules) > _MAX_RULES or not all(a.dtype.is_castable_to(b.dtype) for a, b in pairs.values()):
        return None
    return rewrite_fix(target.checkpoint, dtype=tuple(rules))


def is_per_rank(layout: Layout, name: str) -> bool:
    return find_owner_rank_of_key(layout.key(name)) is not None
