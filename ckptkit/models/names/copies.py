"""Find a second copy of a model among its tensors: `module.x` beside `x`, or an average, `ema.x` or `net_ema.x`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from ckptkit.layout.box import Shape
from ckptkit.layout.wrappers import DDP

# in the name of the module that keeps an average, or at the start of a parameter's name
_AVERAGE = re.compile(r"(?:^|(?<=_))(?:ema|avg|averaged?|shadow|swa)(?:_|$)")

_FEWEST = 3  # tensors by which two modules are copies of each other whatever they are called


class SecondModel(NamedTuple):
    """A tensor of the copy and the one of the model that it copies, and the prefix of all tensors of the copy."""

    name: str
    of: str
    prefix: str

    @property
    def module(self) -> str:
        """Return the prefix of the module with the copy, which may have counters beside it."""
        return self.prefix[: self.prefix.find(".") + 1] or self.prefix


def find_copy(shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the second copy of a model in tensors of these shapes; None if there is none.

    It is a prefix with which every other name occurs again; or one that says it is an average, all of whose tensors
    the model has. Some averages leave the dots out of the names: `model_ema.layers0weight`.
    """
    first = Counter(name.partition(".")[0] for name in shapes)
    for module, count in first.items():
        if count * 2 == len(shapes) and (found := find_under(f"{module}.", shapes)):
            return found
        alike = [other for other in first if other != module and first[other] == count >= _FEWEST]
        if _AVERAGE.search(module) and (found := find_average(module, alike, shapes)):
            return found
    return None


def find_under(prefix: str, shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the copy that has every other name with a prefix."""
    copied = {name: name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
    if copied and all(shapes.get(of) == shapes[name] and not of.startswith(prefix) for name, of in copied.items()):
        return SecondModel(*next(iter(copied.items())), prefix)
    return None


def find_average(module: str, alike: Iterable[str], shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the average under a module, or under a prefix of the names of modules as in `ema_layers.0.weight`.

    The model is at the top, in the module that the average is called after, or in one of as many tensors. torch's
    `AveragedModel` has its copy under `module.`.
    """
    match = re.match(r"(?:ema|avg|shadow|swa)_(?=.)", module)
    other = _AVERAGE.sub("", module).strip("_")
    for prefix in (*([match[0]] if match else []), f"{module}.{DDP.text}", f"{module}."):
        below = {name: name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
        for above in ("", *(f"{one}." for one in (other, *alike))):
            if found := copy_of({name: f"{above}{rest}" for name, rest in below.items()}, prefix, shapes):
                return found
    return None


def copy_of(own: Mapping[str, str], prefix: str, shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the copy if the model has all of its tensors; those of one element count something, such as updates."""
    known = {name.replace(".", ""): name for name in shapes if not name.startswith(prefix)}
    pairs = {name: known.get(of.replace(".", "")) for name, of in own.items() if prod(shapes[name]) != 1}
    found = [(name, of) for name, of in pairs.items() if of is not None and shapes[of] == shapes[name]]
    return SecondModel(*found[0], prefix) if found and len(found) == len(pairs) else None
