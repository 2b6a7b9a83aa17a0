"""Find a second copy of a model among its tensors: `module.x` beside `x`, or an average, `ema.x` or `net_ema.x`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from ckptkit.layout.box import Shape
from ckptkit.layout.wrappers import DDP

# words in the name of a module with an average, or at the start of a parameter's name
_AVERAGE = re.compile(r"(?:^|(?<=_))(?:ema|avg|averaged?|shadow|swa)(?:_|$)")

_MIN_TENSORS = 3  # tensors; two modules with so many equal shapes are copies, whatever their names are


class SecondModel(NamedTuple):
    """A tensor of the copy (`name`), the tensor of the model that it copies (`of`), and the prefix of the copy."""

    name: str
    of: str
    prefix: str

    @property
    def module(self) -> str:
        """Return the prefix of the module that contains the copy and perhaps its counters."""
        return self.prefix[: self.prefix.find(".") + 1] or self.prefix


def find_copy(shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the second copy of a model in tensors of these shapes; None if there is none.

    A copy is a prefix under which every other name occurs again, or a prefix that names an average and whose tensors
    the model has too. Some averages drop the dots in names: `model_ema.layers0weight`.
    """
    first = Counter(name.partition(".")[0] for name in shapes)
    for module, count in first.items():
        if count * 2 == len(shapes) and (copy := find_copy_under(f"{module}.", shapes)):
            return copy
        alike = [other for other in first if other != module and first[other] == count >= _MIN_TENSORS]
        if _AVERAGE.search(module) and (copy := find_average(module, alike, shapes)):
            return copy
    return None


def find_copy_under(prefix: str, shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the copy under a prefix, if every other name occurs under it again."""
    copied = {name: name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
    if copied and all(shapes.get(of) == shapes[name] and not of.startswith(prefix) for name, of in copied.items()):
        return SecondModel(*next(iter(copied.items())), prefix)
    return None


def find_average(module: str, alike: Iterable[str], shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the average under a module, or under a prefix of module names as in `ema_layers.0.weight`.

    The model is at the top level, in the module whose name the average contains, or in a module with as many tensors.
    torch's `AveragedModel` has its copy under `module.`.
    """
    match = re.match(r"(?:ema|avg|shadow|swa)_(?=.)", module)
    named_after = _AVERAGE.sub("", module).strip("_")
    for prefix in (*([match[0]] if match else []), f"{module}.{DDP.text}", f"{module}."):
        below = {name: name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
        for above in ("", *(f"{one}." for one in (named_after, *alike))):
            if copy := copy_of({name: f"{above}{rest}" for name, rest in below.items()}, prefix, shapes):
                return copy
    return None


def copy_of(own: Mapping[str, str], prefix: str, shapes: Mapping[str, Shape]) -> SecondModel | None:
    """Return the copy if the model has all of its tensors. Ignores tensors of one element: they may count updates."""
    known = {name.replace(".", ""): name for name in shapes if not name.startswith(prefix)}
    pairs = {name: known.get(of.replace(".", "")) for name, of in own.items() if prod(shapes[name]) != 1}
    copied = [(name, of) for name, of in pairs.items() if of is not None and shapes[of] == shapes[name]]
    return SecondModel(*copied[0], prefix) if copied and len(copied) == len(pairs) else None
