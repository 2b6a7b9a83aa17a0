"""Rules for the weights of a model: empty tensors, missing layers, routers and experts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from ckptkit.checkpoints.examination.facts import Facts
from ckptkit.checkpoints.examination.inconsistency import Inconsistency, first_numbers
from ckptkit.layout.wrappers import may_be_adapted

_FEWEST = 3  # with fewer numbered modules, a missing number proves nothing
_NUMBERED = re.compile(r"(.*?\b(?:layers|layer|h|blocks|block|experts))\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"(?:(.*)\.)?experts\.(.+)")
_ROUTER = re.compile(r"(?:gate|router)(?:\.(?:gate|layer|linear|wg|proj|classifier))?\.weight|gate_weight")
_MATRIX = 2  # dimensions of the weight of one expert


def find_empty_weights(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the weights without elements, if other weights have some.

    A rank's shard that was saved in place of the full tensor has shape [0]: a placeholder of ZeRO 3, or of an FSDP1
    rank without a shard of the parameter. An embedding of zero tokens, [0, n], may be intended.
    """
    specs = {name: facts.layout.tensors[name].spec for name in facts.weights}
    names = [name for name, spec in specs.items() if not spec.numel and name.endswith((".weight", ".bias"))]
    if len(names) == len(specs) or may_be_adapted(facts.weights.values()):
        return
    for name in names:
        code = "empty_weight" if specs[name].shape == (0,) else "empty_tensor"
        yield Inconsistency(code, name, {"found": list(specs[name].shape)})


def find_layer_gaps(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the lists of layers or experts with missing numbers.

    Members of an `nn.Sequential` without parameters leave gaps, too. So only modules that contain modules count, and
    only if most numbers are present.
    """
    members: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    if may_be_adapted(facts.weights.values()):
        return  # an adapter only has the layers that it changes
    for name in facts.weights.values():
        at = 0
        while match := _NUMBERED.match(name, at):
            members[name[: match.end(1)]][int(match[2])].add(match[3])
            at = match.start(3)
    for above, numbered in members.items():
        missing = [number for number in range(min(numbered), max(numbered)) if number not in numbered]
        has_modules = any("." in rest for rests in numbered.values() for rest in rests)
        if missing and len(numbered) >= max(_FEWEST, 2 * len(missing)) and has_modules:
            data = {"expected": max(numbered) + 1, "missing": first_numbers(missing)}
            yield Inconsistency("layer_gap", above, data)


def find_router_rows(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the routers and fused experts whose row count differs from the number of experts of their layer."""
    layers: dict[str, dict[str, int]] = defaultdict(dict)
    numbered: dict[str, set[int]] = defaultdict(set)
    for name, path in facts.weights.items():
        match = _EXPERTS.fullmatch(path)
        shape = facts.layout.tensors[name].spec.shape
        if match is None:
            continue
        above, rest = match[1] or "", match[2]
        if rest.partition(".")[0].isdecimal():
            numbered[above].add(int(rest.partition(".")[0]))
        elif len(shape) > _MATRIX:
            layers[above][name] = shape[0]
    for experts in layers.values():
        first, count = next(iter(experts.items()))
        for name, other in experts.items():
            if other != count:
                yield Inconsistency("experts", name, {"expected": count, "other": first, "found": other})
    counts = {above: next(iter(experts.values())) for above, experts in layers.items()}
    counts |= {above: 1 + max(numbers) for above, numbers in numbered.items()}
    for name, path in facts.weights.items():
        above, shape = layer_of_router(path, counts), facts.layout.tensors[name].spec.shape
        if above is not None and len(shape) == _MATRIX and counts[above] not in shape:
            yield Inconsistency("router", name, {"expected": counts[above], "found": shape[0]})


def layer_of_router(path: str, layers: dict[str, int]) -> str | None:
    """Return the layer whose experts a router tensor selects; None if the tensor is not a router."""
    steps = path.split(".")
    for at in range(max(0, len(steps) - 3), len(steps)):
        above, rest = ".".join(steps[:at]), ".".join(steps[at:])
        if above in layers and _ROUTER.fullmatch(rest):
            return above
    return None
