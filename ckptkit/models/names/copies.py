"""Find a second copy of a model: `module.x` beside `x`, an average, `ema.x` or `net_ema.x`, or in training state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckptkit.layout import KeyPath, Layout
from ckptkit.layout.box import Shape
from ckptkit.layout.wrappers import DDP, without_prefixes_except_ddp
from ckptkit.models.names.rename_parameters import ELEMENTWISE, OPTAX

# words in the name of a module with an average, or at the start of a parameter's name
_AVERAGE = re.compile(r"(?:^|(?<=_))(?:ema|avg|averaged?|shadow|swa)(?:_|$)")

# keys of fp32 master weights and gradients, which an optimizer may store by the parameters' names or in their order
_MASTERS = re.compile(r"(?:fp32|master)s?(?:_from_\w+?)?(?:_(?:params?|weights?))?(?:_groups)?|(?:.*_)?grads?")
_STATE = "state"

_MIN_TENSORS = 3  # tensors; two modules with so many equal shapes are copies, whatever their names are


class SecondModel(NamedTuple):
    """A tensor of the copy (`name`), the tensor of the model that it copies (`of`), and the prefix of the copy."""

    name: str
    of: str
    prefix: str

    @property
    def module_prefix(self) -> str:
        """Return the prefix of the module that contains the copy and perhaps its counters."""
        return self.prefix[: self.prefix.find(".") + 1] or self.prefix


def find_copy(shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the second copy of a model in tensors of these shapes; None if there is none.

    A copy is a prefix under which every other name occurs again, or a prefix that names an average and whose tensors
    the model has too. Some averages drop the dots in names: `model_ema.layers0weight`.
    """
    first = Counter(name.partition(".")[0] for name in shapes)
    for module, count in first.items():
        prefix = f"{module}."
        below = {name: name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
        is_half = below and count * 2 == len(shapes)
        if is_half and all(shapes.get(of) == shapes[name] for name, of in below.items()):
            return SecondModel(*next(iter(below.items())), prefix)
        alike = [other for other in first if other != module and first[other] == count >= _MIN_TENSORS]
        if _AVERAGE.search(module) and (copy := find_average_under(module, alike, shapes)):
            return copy
    return None


def find_average_under(module: str, alike: Iterable[str], shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the average under a module, or under a prefix of module names as in `ema_layers.0.weight`.

    The model is at the top level, in the module whose name the average contains, or in a module with as many tensors.
    torch's `AveragedModel` has its copy under `module.`.
    """
    match = re.match(r"(?:ema|avg|shadow|swa)_(?=.)", module)
    named_after = _AVERAGE.sub("", module).strip("_")
    for prefix in (*([match[0]] if match else []), f"{module}.{DDP.text}", f"{module}."):
        below = {name: name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
        # tensors of one element may count updates
        below = {name: rest for name, rest in below.items() if prod(shapes[name]) != 1}
        known = {name.replace(".", ""): name for name in shapes if not name.startswith(prefix)}
        for above in ("", *(f"{one}." for one in (named_after, *alike))):
            pairs = {name: known.get((above + rest).replace(".", "")) for name, rest in below.items()}
            copied = [(name, of) for name, of in pairs.items() if of is not None and shapes[of] == shapes[name]]
            if copied and len(copied) == len(pairs):  # the model has all tensors of the copy
                return SecondModel(*copied[0], prefix)
    return None


def find_copies_in(layout: Layout, names: Iterable[str], shapes: Mapping[str, Shape]) -> set[str]:
    """Return the tensors among `names`, which are training state by their keys, that are copies of a model's weights.

    `shapes` are those of the model. A copy ends with the name of a weight and has its shape, or is in a list of tensors
    with the shapes of weights, in which some averages store them. Optimizer state and fp32 master weights, which are
    stored by parameter too, are no copies. Ignores tensors of one element: they may be counters or settings.
    """
    known = {name.replace(".", ""): shape for name, shape in shapes.items() if prod(shape) != 1}
    copies: set[str] = set()
    lists: dict[KeyPath, list[str]] = {}
    for name in names:
        spec = layout.tensors[name].spec if name in layout.tensors else None
        if spec is None or spec.dtype.kind != "float" or prod(spec.shape) == 1:
            continue
        key = layout.key(name)
        if isinstance(key[-1], int):
            while key and isinstance(key[-1], int):  # a list may contain a list for each group of parameters
                key = key[:-1]
            lists.setdefault(key, []).append(name)
            continue
        steps = key_components(key)
        # a name that starts later is below `state` and a name or a kind: most states need not be looked up
        end = steps.index(_STATE) + 2 if _STATE in steps else len(steps)
        starts = (at for at in range(min(end, len(steps))) if known.get("".join(steps[at:])) == spec.shape)
        start = next(starts, None)
        if start is not None and not is_optimizer_state_path(steps[:start]):
            copies.add(name)
    available = Counter(known.values())
    for above, members in lists.items():
        wanted = Counter(layout.tensors[name].spec.shape for name in members)
        if (
            len(members) >= min(_MIN_TENSORS, len(known))
            and wanted <= available
            and not is_optimizer_state_path(key_components(above))
        ):
            copies.update(members)
    return copies


def is_optimizer_state_path(above: Sequence[str]) -> bool:
    """Return whether the tensors below these steps are optimizer state: `state.exp_avg`, `opt_state.0.mu`."""
    return _STATE in above[:-1] or any(step in ELEMENTWISE | OPTAX or _MASTERS.fullmatch(step) for step in above)


def key_components(key: KeyPath) -> list[str]:
    """Return the steps of a key path, split at dots and without the prefixes of wrappers."""
    return without_prefixes_except_ddp(".".join(map(str, key))).split(".")
