"""Find the parameters without an optimizer state, and give them the initial state: zeros.

torch's optimizers create the state of a parameter at its first gradient, so a parameter without gradients has no state.
But `get_optimizer_state_dict`, which `torch.distributed.checkpoint` uses for every load, creates a state for every
parameter that requires gradients, and then misses it in the checkpoint. Source: `_init_optim_state` in
torch/distributed/checkpoint/state_dict.py; torch/optim, for the states that start as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptkit.checkpoints.optimizers.flattened_state_dict import find_flattened_optimizers
from ckptkit.checkpoints.optimizers.keys import Optimizer, find_optimizers, states_by_parameter
from ckptkit.errors import Unsupported, errors_at
from ckptkit.formats.archives.non_tensor_entries import load_value, with_new_value
from ckptkit.layout import Blob, Chunk, KeyPath, Layout, Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DType

STEP, _MOMENTUM, _DAMPENING = "step", "momentum_buffer", "dampening"
FIRST_ZERO = frozenset(
    [STEP, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "grad_avg", _MOMENTUM]
)
_OF_ALL = frozenset(["func_evals", "n_iter"])  # LBFGS; source: torch/optim/lbfgs.py
_HINT = "drop --complete-optimizer, and load the checkpoint without these states"


@dataclass(frozen=True, slots=True)
class States:
    """The states of an optimizer. Parameters are names, or parameter indices as text.

    `above` is the key path of the optimizer in the checkpoint.
    `groups` are the parameters in each parameter group.
    `of` has the names of each parameter's state entries, by kind, such as `exp_avg`.
    `optimizer` is None if torch has flattened the optimizer.
    """

    above: KeyPath
    groups: tuple[tuple[str, ...], ...]
    of: Mapping[str, Mapping[str, str]]
    optimizer: Optimizer | None = None

    @property
    def name(self) -> str:
        return ".".join(map(str, self.above)) or "optimizer"

    @property
    def parameters_without_state(self) -> list[str]:
        """Return the parameters in its groups without a state; [] for LBFGS, whose first parameter has all states."""
        if any(kinds.keys() >= _OF_ALL for kinds in self.of.values()):
            return []
        return [parameter for group in self.groups for parameter in group if parameter not in self.of]

    @property
    def ungrouped_parameters(self) -> list[str]:
        listed = {parameter for group in self.groups for parameter in group}
        return [parameter for parameter in self.of if parameter not in listed]


@dataclass(frozen=True, slots=True)
class StateForm:
    """The form that all states of one kind share: the shape of the parameter, or a single number.

    `dtype` None means the parameter's own dtype. `zero` is set for a non-tensor entry.
    """

    is_single: bool = False
    dtype: DType | None = None
    zero: Blob | None = None


def find_optimizer_states(layout: Layout) -> list[States]:
    """Return the optimizers in a checkpoint that list their parameters in groups, nested or flattened by torch."""
    found = []
    for optimizer in find_optimizers(layout):
        groups = tuple(tuple(map(str, group)) for group in optimizer.groups)
        found.append(States(optimizer.above, groups, states_by_parameter(layout, optimizer), optimizer))
    return [*found, *states_of_flattened_optimizers(layout)]


def states_of_flattened_optimizers(layout: Layout) -> Iterator[States]:
    """Yield the optimizers that torch has flattened, with all parameters as one group: no entry records the groups."""
    for one in find_flattened_optimizers(layout):
        yield States(one.above, (tuple(one.settings),), one.states)


def with_complete_states(
    layout: Layout, states: States, parameters: Mapping[str, StoredTensor]
) -> tuple[Layout, dict[str, Spec | None]]:
    """Return a layout in which an optimizer has a state for every parameter in its groups, and the new entries.

    `parameters` are the model's, under the optimizer's names. A new entry maps to its spec, or to None for a
    non-tensor. Raises `Unsupported` if the form of the states is unknown, or if they do not start as zeros.
    """
    tensors, blobs, keys = dict(layout.tensors), dict(layout.blobs), dict(layout.keys)
    new_entries: dict[str, Spec | None] = {}
    at = 0  # tensors are identified by their byte offsets, so the new ones get offsets in a file that does not exist
    with errors_at(path=layout.path):
        if states.parameters_without_state:
            refuse_stray_states(states, parameters)
        for group in states.groups:
            lacking = [parameter_name for parameter_name in group if parameter_name not in states.of]
            forms = state_forms_by_kind(layout, states, group, parameters) if lacking else {}
            for parameter in lacking:
                like = require_parameter(parameters, parameter)
                for kind, form in forms.items():
                    is_flat = states.optimizer is None
                    steps = (f"state.{parameter}.{kind}",) if is_flat else ("state", parameter, kind)
                    key = (*states.above, *steps)
                    name = ".".join(map(str, key))
                    keys[name] = key
                    if form.zero is not None:
                        blobs[name], new_entries[name] = form.zero, None
                        continue
                    spec = Spec(form.dtype or like.spec.dtype, () if form.is_single else like.spec.shape)
                    tensors[name], new_entries[name] = zeros_like_parameter(spec, like, at), spec
                    at += spec.nbytes
    return replace(layout, tensors=tensors, blobs=blobs, keys=keys), new_entries


def refuse_stray_states(states: States, parameters: Mapping[str, StoredTensor]) -> None:
    """Raise `Unsupported` for the state of a parameter that no group lists or that the model lacks.

    It may be the missing state of another parameter, under a wrong name.
    """
    stray = next(iter(states.ungrouped_parameters), None) or next(
        (one for one in states.of if one not in parameters), None
    )
    if stray is not None:
        owner = "group lists it" if stray in states.ungrouped_parameters else "model has it"
        message = (
            f"the optimizer has a state for this parameter, but no {owner}; "
            f"`{states.parameters_without_state[0]}` has no state and may "
            "be the same parameter"
        )
        raise Unsupported(message, tensor=stray, hint="rename the parameter with --rename")


def require_parameter(parameters: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    """Return a parameter of the model. Raises `Unsupported` if the model has none of this name."""
    if name not in parameters:
        message = "the optimizer lists this parameter, but the model does not have it, so its shape is unknown"
        raise Unsupported(message, tensor=name, hint=_HINT)
    return parameters[name]


def zeros_like_parameter(spec: Spec, parameter: StoredTensor, first_offset: int) -> StoredTensor:
    """Return zeros, split into chunks like a parameter. No two chunks of a checkpoint may share an offset."""
    is_alike = parameter.splits is None and parameter.spec.shape == spec.shape
    chunks: list[Chunk] = []
    for box in [chunk.box for chunk in parameter.chunks] if is_alike else [full_box(spec.shape)]:
        chunks.append(Chunk.of_zeros(box, spec.dtype, first_offset))
        first_offset += chunks[-1].length
    return StoredTensor(spec, tuple(chunks))


def state_forms_by_kind(
    layout: Layout, states: States, group: Sequence[str], parameters: Mapping[str, StoredTensor]
) -> dict[str, StateForm]:
    """Return the form of the states in a group, taken from the group's other states, or else from all states."""
    peers = [parameter for parameter in group if parameter in states.of] or list(states.of)
    if not peers:
        message = f"`{states.name}` has no state at all, so the dtypes and shapes of the missing states are unknown"
        raise Unsupported(message, hint="drop --complete-optimizer: the optimizer has not stepped yet")
    first = states.of[peers[0]].keys()
    other = next((parameter for parameter in peers if states.of[parameter].keys() != first), None)
    if other is not None:
        own = (f"`{parameter}` has {', '.join(sorted(states.of[parameter]))}" for parameter in (peers[0], other))
        kinds = " and ".join(own)
        message = f"the states of this parameter are unknown, because other parameters have different ones: {kinds}"
        lacking = next(parameter for parameter in group if parameter not in states.of)
        raise Unsupported(message, tensor=lacking, hint=_HINT)
    unknown = sorted(first - FIRST_ZERO)
    if unknown:
        message = f"ckptkit does not know the initial value of the state `{unknown[0]}`, or it is not zero"
        raise Unsupported(message, tensor=states.name, hint=_HINT)
    # with dampening, the first gradient counts in full and later ones do not, so SGD's buffer does not start as zeros.
    # Source: `_single_tensor_sgd` in torch/optim/sgd.py
    for name, blob in layout.blobs.items() if _MOMENTUM in first else ():
        key = layout.key(name)
        is_dampening = key[: len(states.above)] == states.above and str(key[-1]).rpartition(".")[2] == _DAMPENING
        if is_dampening and load_value(layout.root, blob):
            message = "the momentum does not start at zero, because the group uses dampening"
            raise Unsupported(message, tensor=name, hint=_HINT)
    entries = {kind: {parameter: states.of[parameter][kind] for parameter in peers} for kind in first}
    return {kind: common_state_form(layout, kind, by_parameter, parameters) for kind, by_parameter in entries.items()}


def common_state_form(
    layout: Layout, kind: str, entries: Mapping[str, str], parameters: Mapping[str, StoredTensor]
) -> StateForm:
    """Return the common form of the entries of one kind, by parameter. Raises `Unsupported` if they differ."""
    names = list(entries.values())
    if all(name in layout.blobs for name in names):
        blob = layout.blobs[names[0]]
        value = load_value(layout.root, blob)
        if type(value) not in (int, float):
            message = f"expected a tensor or a number, found a {type(value).__name__}"
            raise Unsupported(message, tensor=names[0], hint=_HINT)
        return StateForm(zero=with_new_value(blob, type(value)(0)))
    differing = f"the states `{kind}` differ in shape or dtype, so ckptkit cannot create one for other parameters"
    forms_differ = Unsupported(differing, tensor=names[0], hint=_HINT)
    if not all(name in layout.tensors for name in names):
        raise forms_differ
    pairs = [
        (require_parameter(parameters, parameter).spec, layout.tensors[name].spec)
        for parameter, name in entries.items()
    ]
    is_shaped = all(own.shape == spec.shape for own, spec in pairs)
    is_single = all(not spec.shape for _, spec in pairs)
    dtypes = {spec.dtype for _, spec in pairs}
    is_own = not is_single and all(own.dtype == spec.dtype for own, spec in pairs)
    if not (is_shaped or is_single) or (len(dtypes) > 1 and not is_own):
        raise forms_differ
    return StateForm(is_single and (kind == STEP or not is_shaped), None if is_own else dtypes.pop())
