"""Rules for optimizer states: their shapes, names and parameter groups, compared with the weights.

Some states differ in shape from their parameters on purpose: factors of a second moment (Adafactor), packed numbers
with scales (8-bit Adam), preconditioners (Shampoo, SOAP), low-rank projections (GaLore, APOLLO), one number for each
row or layer (Adam-mini, NovoGrad). A rule only judges states that are known to be elementwise: one element for each
element of the parameter.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from ckptkit.checkpoints.examination.facts import Facts, Inconsistency, without_wrappers
from ckptkit.io.crc32 import crc32
from ckptkit.layout import KeyPath, Layout
from ckptkit.layout.box import Shape
from ckptkit.layout.wrappers import WRAPPERS, WrapperPrefix, may_be_adapter
from ckptkit.models.names.rename_parameters import ELEMENTWISE, GROUP_MAP, SECOND_MOMENTS

# elementwise states whose names no other optimizer uses for states of another shape
_JUDGED = ELEMENTWISE - {"momentum", "sum", "ax", "prev", "step_size", "state1", "state2"}
_LOW_RANK = frozenset(["rank", "update_proj_gap", "proj_type", "projection_type", "proj", "subspace_update_interval"])
_MARKS_OF_PACKED_STATES = ("projector", "ortho_matrix", "absmax", "qmap")  # the other states are projected or packed
_FLOATS = ("float", "small_float")
_ARRAY_CODES = {"float32": "f", "float64": "d", "int32": "i", "int64": "q"}  # of `array`, for the dtypes of a step
_MOST_STEPS = 1 << 31
_FUSED = 3  # axes of a fused-experts parameter; Hugging Face files store one tensor per expert instead
# States that either all similar parameters have, or none. Only low-precision parameters have masters, the last
# gradient may be missing after one step, and `max_exp_avg_sq` is a setting of single groups. torch's optimizers keep
# `step` for each parameter; others keep it for a group, and then no parameter has it.
_COMMON_STATES = ELEMENTWISE.union(["step"]).difference(
    ["max_exp_avg_sq", "master_param", "fp32_param", "prev_grad", "previous_grad", "neg_pre_grad"]
)
# states of an optimizer with the setting `amsgrad`, if it has no other states. Source: torch/optim/adam.py
_AMSGRAD, _ADAM, _BESIDE_ADAM = "amsgrad", frozenset(["exp_avg", "exp_avg_sq"]), frozenset(["step", "max_exp_avg_sq"])


def find_wrong_state_shapes(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the elementwise states that do not have the shape of their parameter.

    If a parameter is known only by its index, a state shape that no parameter has is wrong if most other states fit. If
    most states do not fit, the optimizer may belong to another model. One-dimensional states may be flat shards, so
    they alone prove nothing.
    """
    every = {facts.layout.tensors[name].spec.shape for name in facts.weights}
    for above, states in facts.states_by_optimizer.items():
        if facts.has_setting(above, _LOW_RANK):
            continue
        fitting, odd = 0, []
        for index, entries in states.items():
            shapes = facts.shapes_of_parameter(above, index)
            is_index = not shapes and index.isdecimal()
            wrong = wrong_states_by_shape(facts, entries, every if is_index else shapes) if shapes or is_index else {}
            if is_index and not any(len(shape) == _FUSED for shape in every):
                wrong = {shape: kinds for shape, kinds in wrong.items() if len(shape) != _FUSED}
            fitting += is_index and not wrong
            if is_index and wrong:
                odd.append(wrong)
            for found, kinds in wrong.items() if shapes else ():
                data = {"expected": list(min(shapes)), "found": list(found)}
                yield Inconsistency("state_shape", kinds[0], data, kinds)
        if len(odd) <= fitting:
            for found, kinds in (pair for wrong in odd for pair in wrong.items()):
                yield Inconsistency("state_size", kinds[0], {"found": list(found), "others": fitting}, kinds)
        elif every and any(len(shape) > 1 for wrong in odd for shape in wrong):
            numbers = {"unfit": len(odd), "total": len(odd) + fitting}
            yield Inconsistency("foreign_states", ".".join(map(str, above)) or None, numbers)


def wrong_states_by_shape(
    facts: Facts, entry_by_kind: Mapping[str, str], shapes: Collection[Shape]
) -> dict[Shape, tuple[str, ...]]:
    """Return a parameter's elementwise states that fit none of `shapes`, by their shape."""
    specs = {kind: facts.layout.tensors[name].spec for kind, name in entry_by_kind.items()}
    if any(word in kind for word in _MARKS_OF_PACKED_STATES for kind in specs):
        return {}
    kinds_by_shape: dict[Shape, tuple[str, ...]] = {}
    main_shapes = {spec.shape for kind, spec in specs.items() if kind in _JUDGED - SECOND_MOMENTS}
    for kind in _JUDGED & specs.keys():
        own, spec = specs[kind].shape, specs[kind]
        fits = own in shapes or (len(own) == 1 and own[0] in map(prod, shapes))  # equal, or flattened
        if kind in SECOND_MOMENTS and own not in main_shapes:  # it may have one number for each row or other slice
            alike = (shape for shape in shapes if len(shape) == len(own))
            fits = fits or any(all(a in (1, b) for a, b in zip(own, shape, strict=True)) for shape in alike)
        if spec.dtype.kind in _FLOATS and spec.numel != 1 and not fits:
            kinds_by_shape[own] = (*kinds_by_shape.get(own, ()), entry_by_kind[kind])
    return {shape: tuple(sorted(kinds)) for shape, kinds in kinds_by_shape.items()}


def find_missing_state_kinds(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the parameters that lack a state that similar parameters have: a load, or the next step, fails.

    Similar parameters have the same settings and the same number of axes, because some optimizers treat vectors or
    groups differently. A parameter without any state never received a gradient, which is fine.
    """
    for above, kinds in facts.state_kinds_by_parameter.items():
        settings = facts.setting_names_by_parameter(above)
        kinds_of_similar: dict[object, set[frozenset[str]]] = defaultdict(set)
        similarity: dict[str, object] = {}
        for parameter, own in kinds.items():
            states = facts.states_by_optimizer.get(above, {}).get(parameter, {})
            shapes = facts.shapes_of_parameter(above, parameter) or {
                facts.layout.tensors[name].spec.shape for name in states.values()
            }
            similarity[parameter] = settings.get(parameter), max(map(len, shapes), default=0)
            kinds_of_similar[similarity[parameter]].add(own)
        lacking: dict[tuple[str, str], list[str]] = defaultdict(list)
        for parameter, own in kinds.items():
            more = {
                kind for other in kinds_of_similar[similarity[parameter]] if own < other for kind in other - own
            } & _COMMON_STATES
            if _AMSGRAD in settings.get(parameter, ()) and own <= _ADAM | _BESIDE_ADAM:
                more |= _ADAM - own
            more = {kind for kind in more if f"{state_entry_name(above, parameter)}.{kind}" not in facts.lost_entries}
            if more:
                lacking[", ".join(sorted(own | more)), ", ".join(sorted(own))].append(
                    state_entry_name(above, parameter)
                )
        for (expected, found), names in lacking.items():
            yield Inconsistency("state_kinds", names[0], {"expected": expected, "found": found}, tuple(names))


def find_wrapper_prefix_mismatch(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the optimizers whose parameter names have a wrapper prefix that the weights lack, or vice versa."""
    entries_by_wrapper: dict[tuple[str, WrapperPrefix, KeyPath], list[str]] = defaultdict(list)
    for above, states in facts.states_by_optimizer.items():
        if has_group_map(facts.layout, above):
            continue  # this trainer looks the states up by their wrapped names
        for name, entries in states.items():
            weight = None if name in facts.shapes_by_name else facts.name_by_unwrapped_name.get(without_wrappers(name))
            if weight is None or name.isdecimal():
                continue
            code, text = ("wrapped_state", name) if without_wrappers(name) != name else ("wrapped_weight", weight)
            wrapper = next(candidate for candidate in reversed(WRAPPERS) if candidate.text in text)
            entries_by_wrapper[code, wrapper, above] += entries.values()
    for (code, wrapper, _), names in entries_by_wrapper.items():
        yield Inconsistency(code, names[0], {"prefix": wrapper.text, "whose": wrapper.whose}, tuple(names))


def find_unknown_names(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the optimizer's parameter names that match no weight, because of an unknown prefix or altogether."""
    listed = {
        optimizer.above: {str(name) for group in optimizer.groups for name in group} for optimizer in facts.optimizers
    }
    for above, kinds in facts.state_kinds_by_parameter.items():
        names = {name for name in kinds.keys() | listed.get(above, set()) if not name.isdecimal()}
        unknown = sorted(name for name in names if not facts.is_weight_name(name))
        if not unknown or not facts.weights or has_group_map(facts.layout, above) or may_be_adapter(unknown):
            continue
        entries = tuple(state_entry_name(above, name) for name in unknown)
        if (prefix := find_extra_prefix(facts, unknown, kinds)) is not None:
            yield Inconsistency("prefixed_state", entries[0], {"prefix": prefix}, entries)
        elif (prefix := find_missing_prefix(facts, unknown)) is not None:
            yield Inconsistency("prefixed_weight", entries[0], {"prefix": prefix}, entries)
        else:
            data = {"unknown": len(unknown), "total": len(names)}
            yield Inconsistency("unknown_parameter", entries[0], data, entries)


def find_extra_prefix(facts: Facts, unknown: Sequence[str], states: Collection[str]) -> str | None:
    """Return the prefix that turns names of weights without a state into all the unknown names; None without.

    A prefix that weights have, too, does not count.
    """
    first = unknown[0]
    for prefix in (first[: at + 1] for at, letter in enumerate(first) if letter == "."):
        rest = [name.removeprefix(prefix) for name in unknown if name.startswith(prefix)]
        is_free = not any(name.startswith(prefix) for name in facts.shapes_by_name)
        is_shared = len(rest) == len(unknown) and is_free
        if is_shared and all(facts.is_weight_name(suffix) and suffix not in states for suffix in rest):
            return prefix
    return None


def find_missing_prefix(facts: Facts, unknown: Sequence[str]) -> str | None:
    """Return the prefix that turns all unknown names into names of weights; None if no prefix does."""
    first = f".{unknown[0]}"
    prefixes = (name.removesuffix(unknown[0]) for name in facts.shapes_by_name if name.endswith(first))
    fitting = [prefix for prefix in prefixes if all(facts.is_weight_name(prefix + name) for name in unknown)]
    return min(fitting, key=len, default=None)


def has_group_map(layout: Layout, optimizer_key: KeyPath) -> bool:
    """Return whether an optimizer has a map from parameters to groups instead of parameter lists."""
    key = (*optimizer_key, GROUP_MAP)
    return any(layout.key(name)[: len(key)] == key for name in layout.blobs)


def find_empty_groups(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the groups without parameters, in optimizers that name their parameters.

    torch's `_split_optim_state_dict` in torch/distributed/checkpoint/state_dict.py finds a named group by the names in
    it. Groups of indices are found by their position, so an empty one does no harm.
    """
    for optimizer in facts.optimizers:
        if optimizer.has_parameter_names and any(optimizer.groups):
            for number, group in enumerate(optimizer.groups):
                if not group:
                    yield Inconsistency("empty_group", optimizer.name, {"number": number})


def group_list_inconsistencies(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the parameters that groups list twice, and known parameters with a state that no group lists."""
    for optimizer in facts.optimizers:
        above = optimizer.above
        times = Counter(str(parameter) for group in optimizer.groups for parameter in group)
        for parameter, number in times.items():
            if number > 1:
                yield Inconsistency("listed_twice", state_entry_name(above, parameter), {"times": number})
        listed = set(map(without_wrappers, times))
        for parameter in facts.state_kinds_by_parameter.get(above, {}):
            if without_wrappers(parameter) not in listed and (parameter.isdecimal() or facts.is_weight_name(parameter)):
                yield Inconsistency("unlisted_state", state_entry_name(above, parameter))


def state_entry_name(optimizer_key: KeyPath, parameter: str) -> str:
    """Return the name of a parameter's state entry in the optimizer at a key path."""
    return ".".join([*map(str, optimizer_key), "state", parameter])


def find_train_mode_schedule_free(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the schedule-free optimizers that were saved in training mode (see `train` in schedulefree's adamw)."""
    for above, states in facts.states_by_optimizer.items():
        averaged = sum("z" in entries for entries in states.values())
        if averaged and any(value is True for value in facts.setting_values(above, "train_mode")):
            optimizer = ".".join(map(str, above)) or None
            yield Inconsistency("training_point", optimizer, {"averaged": averaged, "total": len(states)})


def find_optimizer_step_mismatch(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the optimizers with another step than the job's counters, which are in another file of the save.

    The files may be of two saves; or the job loaded its weights without their optimizer. The step in a tensor is
    compared by its CRC-32.
    """
    taken, skipped = map(facts.find_number, ("global_steps", "skipped_steps"))
    if taken is None or skipped is None or not 0 < taken - skipped < _MOST_STEPS:
        return
    steps = (taken - skipped, taken - skipped + 1)  # some jobs make the states by a step of their own
    for states in facts.states_among(facts.layout.names).values():
        entries = [entries["step"] for entries in states.values() if "step" in entries]
        found = [is_step for name in entries if (is_step := is_one_of_steps(facts, name, steps)) is not None]
        if found and not any(found):
            yield Inconsistency("other_step", entries[0], {"taken": steps[0]})


def is_one_of_steps(facts: Facts, entry: str, steps: Collection[int]) -> bool | None:
    """Return whether an entry has one of these numbers; None if that is unknown."""
    if entry not in facts.layout.tensors:
        number = facts.find_number(entry)
        return None if number is None else number in steps
    tensor = facts.layout.tensors[entry]
    code, sums = _ARRAY_CODES.get(tensor.spec.dtype.name), {chunk.crc32 for chunk in tensor.chunks if chunk.run is None}
    if code is None or tensor.spec.shape or len(sums) != 1 or None in sums:
        return None
    return any(crc32(array(code, [step]).tobytes()) in sums for step in steps)
