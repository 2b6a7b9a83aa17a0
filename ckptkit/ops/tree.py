"""Trees: tensor names folded by module, so that a model of a thousand tensors fits a screen. Names and sizes only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptkit.layout import Spec


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of the tree: `repeats` modules alike are one line, with the tensors and bytes of all of them."""

    depth: int
    label: str
    spec: Spec | None
    tensors: int
    nbytes: int


_DEEPEST = 64  # levels; what a stranger nests deeper stays one label
Node = dict[str, "Node | Spec"]
Group = tuple[str, int, "Node | Spec"]  # label, how many are alike, one of them


def fold(specs: Mapping[str, Spec]) -> Iterator[Branch]:
    """The tree of some names, as lines; numbered modules that are alike, like `layers.0` to `layers.31`, are folded."""
    root: Node = {}
    for name, spec in specs.items():
        *modules, leaf = name.split(".", _DEEPEST)
        node = root
        for module in modules:
            below = node.setdefault(f"{module}.", {})
            assert isinstance(below, dict)  # labels of modules end in a dot, those of tensors do not
            node = below
        node[leaf] = spec
    yield from _lines(root, 0, 1)


def _lines(node: Node, depth: int, times: int) -> Iterator[Branch]:
    for label, repeats, child in map(_with_only_child, _grouped(node)):
        name = f"{label}  x{repeats}" if repeats > 1 else label
        count, nbytes = _totals(child)
        factor = times * repeats
        spec = child if isinstance(child, Spec) else None
        yield Branch(depth, name, spec, count * factor, nbytes * factor)
        if isinstance(child, dict):
            yield from _lines(child, depth + 1, factor)


def _with_only_child(group: Group) -> Group:
    """A line together with the one below it, if that is its only one and not both stand for several."""
    label, repeats, child = group
    below = list(_grouped(child)) if isinstance(child, dict) else []
    if len(below) != 1 or (repeats > 1 and below[0][1] > 1):
        return group
    return _with_only_child((label + below[0][0], repeats * below[0][1], below[0][2]))


def _grouped(node: Node) -> Iterator[Group]:
    """The children of a node; runs of numbered ones that are equal become one, called `first-last`."""
    pending: list[tuple[str, Node | Spec]] = []
    for label, child in sorted(node.items(), key=lambda item: _number(item[0])):
        if pending and not (_number(label) >= 0 and child == pending[-1][1]):
            yield _group(pending)
            pending = []
        pending.append((label, child))
    if pending:
        yield _group(pending)


def _group(alike: list[tuple[str, Node | Spec]]) -> Group:
    (first, child), (last, _) = alike[0], alike[-1]
    return (first if first == last else f"{first.rstrip('.')}-{last}"), len(alike), child


def _number(label: str) -> int:
    """The number that a label is, -1 if it is none."""
    digits = label.rstrip(".")
    return int(digits) if digits.isdecimal() and len(digits) < 10 else -1


def _totals(node: Node | Spec) -> tuple[int, int]:
    """Tensors and bytes below a node."""
    if isinstance(node, Spec):
        return 1, node.nbytes
    counts = [_totals(child) for child in node.values()]
    return sum(count for count, _ in counts), sum(nbytes for _, nbytes in counts)
