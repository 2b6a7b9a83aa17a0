"""Fold tensor names by module, so that a model of a thousand tensors fits on a screen. Uses names and sizes only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckptkit.layout import Spec


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of the tree. `repeats` equal modules are one line, with the tensors and bytes of all of them.

    `names` are the names of the tensors in the line.
    """

    depth: int
    label: str
    spec: Spec | None
    nbytes: int
    names: tuple[str, ...]

    @property
    def tensors(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor. Two tensors of the same spec are equal under any names."""

    spec: Spec
    name: str = field(compare=False)


_MAX_DEPTH = 64  # levels; limits the recursion for names from an untrusted file: deeper names stay one label
Node = dict[str, "Node | Leaf"]
Group = tuple[str, int, list["Node | Leaf"]]  # label, number of equal children per module, and all children


def folded_tree_lines(specs: Mapping[str, Spec]) -> Iterator[Branch]:
    """Yield the lines of the tree of these names; equal numbered modules are one line, `layers.0-31`."""
    root: Node = {}
    for name, spec in specs.items():
        *modules, leaf = name.split(".", _MAX_DEPTH)
        node = root
        for module in modules:
            below = node.setdefault(f"{module}.", {})
            assert isinstance(below, dict)  # labels of modules end in a dot, those of tensors do not
            node = below
        node[leaf] = Leaf(spec, name)
    yield from _branches_of([root], 0)


def _branches_of(equal_nodes: list[Node | Leaf], depth: int) -> Iterator[Branch]:
    for label, repeats, members in map(_merge_with_only_child, _grouped_children_of(equal_nodes)):
        leaves = [leaf for member in members for leaf in _leaves(member)]
        name = f"{label}  x{repeats}" if repeats > 1 else label
        spec = members[0].spec if isinstance(members[0], Leaf) else None
        nbytes = sum(leaf.spec.nbytes for leaf in leaves)
        yield Branch(depth, name, spec, nbytes, tuple(leaf.name for leaf in leaves))
        yield from _branches_of(members, depth + 1)


def _merge_with_only_child(group: Group) -> Group:
    """Merge a line with its only child line, unless both stand for several modules."""
    label, repeats, members = group
    below = list(_grouped_children_of(members))
    if len(below) != 1 or (repeats > 1 and below[0][1] > 1):
        return group
    return _merge_with_only_child((label + below[0][0], repeats * below[0][1], below[0][2]))


def _grouped_children_of(equal_nodes: list[Node | Leaf]) -> Iterator[Group]:
    """Yield the children of equal nodes; consecutive numbers with equal children become one group, `first-last`."""
    nodes = [node for node in equal_nodes if isinstance(node, dict)]
    pending: list[str] = []
    for label in sorted(nodes[0], key=_number_of_label) if nodes else ():
        if pending and not (_number_of_label(label) >= 0 and nodes[0][label] == nodes[0][pending[-1]]):
            yield _merge_nodes(pending, nodes)
            pending = []
        pending.append(label)
    if pending:
        yield _merge_nodes(pending, nodes)


def _merge_nodes(labels: list[str], nodes: list[Node]) -> Group:
    first, last = labels[0], labels[-1]
    name = first if first == last else f"{first.rstrip('.')}-{last}"
    return name, len(labels), [node[label] for node in nodes for label in labels]


def _number_of_label(label: str) -> int:
    """Return the number of a numeric label, -1 for any other."""
    digits = label.rstrip(".")
    return int(digits) if digits.isdecimal() and len(digits) < 10 else -1


def _leaves(node: Node | Leaf) -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.values():
            yield from _leaves(child)
