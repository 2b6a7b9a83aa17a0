"""Find tensors of two checkpoints that are the same under other names, by a rule or by what is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from ckptkit.engine.compare import fingerprints
from ckptkit.formats import locate
from ckptkit.layout import Layout, Spec, edits
from ckptkit.tensors.box import Shape

Words = tuple[str, ...]  # of a name, between its dots
Shapes = Mapping[str, Shape | None]  # None for an entry that is no tensor
_MOST_RULES = 64  # that are tried, those first that the most names suggest


@dataclass(frozen=True, slots=True)
class Change:
    """A run of words in a name that becomes others; `at_start` if only there."""

    old: Words
    new: Words
    at_start: bool

    def apply(self, name: Words) -> Words | None:
        """Return the new name, None for one that does not have the old words."""
        places = range(1 if self.at_start else len(name))
        at = next((i for i in places if name[i : i + len(self.old)] == self.old), None)
        return None if at is None else (*name[:at], *self.new, *name[at + len(self.old) :])


Rule = tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Explained:
    """A rule that explains renamed tensors, `count` of them, in two patterns: `*` is whatever is the same in both."""

    old: str
    new: str
    count: int


def find_renames(a: Layout, b: Layout, *, jobs: int | None = None) -> dict[str, str]:
    """Return the names in `b` of tensors that are in `a` under another; of two layouts that have no name in common.

    A rule must explain tensors of different kinds, not layers alone, for these to be the same whatever is in them.
    Other tensors must have the same elements, and be the only ones that do; to know that they are read.
    """
    found = by_rule(shapes_of(a), shapes_of(b))
    rest_a = edits.select(a, lambda name: name not in found)
    rest_b = edits.select(b, lambda name: name not in found.values())
    return found | by_content(rest_a, rest_b, jobs)


def shapes_of(layout: Layout) -> dict[str, Shape | None]:
    """Return the shape of every tensor, None for other entries."""
    return {name: spec.shape for name, spec in layout.specs.items()} | dict.fromkeys(layout.blobs)


def by_rule(ours: Shapes, theirs: Shapes) -> dict[str, str]:
    """Return names of ours that are one of theirs, of a tensor of the same shape, once a rule has been applied."""
    found: dict[str, str] = {}
    votes = Counter(rule for pair in suggest(ours, theirs) if (rule := rule_of(*pair)))
    for rule, _ in votes.most_common(_MOST_RULES):
        taken = set(found.values())
        pairs = {
            old: new
            for old in ours
            if old not in found and (new := apply(rule, old)) in theirs and new not in taken
            if ours[old] == theirs[new]
        }
        if len({fold(old) for old in pairs}) > 1:
            found |= pairs
    return found


def suggest(ours: Shapes, theirs: Shapes) -> Iterator[tuple[str, str]]:
    """Yield pairs that may be the same tensor: of one shape the first of both, the second of both, and so on."""
    groups: dict[Shape | None, tuple[list[str], list[str]]] = {}
    for side, shapes in enumerate((ours, theirs)):
        for name in sorted(shapes, key=natural):
            groups.setdefault(shapes[name], ([], []))[side].append(name)
    for one, two in groups.values():
        yield from zip(one, two, strict=False)


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which `layers.10` comes after `layers.9`: the longer number is the greater."""
    return [(len(word) if word.isdecimal() else 0, word) for word in name.split(".")]


def rule_of(old: str, new: str) -> Rule:
    """Return how one name becomes the other, word by word; nothing where only a number is another."""
    changes = changes_of(old, new)
    words = [word for change in changes for word in change.old + change.new]
    return () if all(word.isdecimal() for word in words) else changes


def changes_of(old: str, new: str) -> Rule:
    """Return the runs of words in which two names differ; words that are put in go with the one before them."""
    a, b = tuple(old.split(".")), tuple(new.split("."))
    changes = []
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            before = 1 if i == j and i else 0
            changes.append(Change(a[i - before : j], b[k - before : m], at_start=i == before == 0))
    return tuple(changes)


def apply(rule: Rule, name: str) -> str:
    """Return the new name; the old one, if the rule does not apply."""
    words: Words | None = tuple(name.split("."))
    for change in rule:
        words = change.apply(words) if words is not None else None
    return name if words is None else ".".join(words)


def fold(name: str) -> str:
    """Return a name without its numbers: that of the same tensor in every layer."""
    return ".".join("*" if word.isdecimal() else word for word in name.split("."))


def by_content(a: Layout, b: Layout, jobs: int | None) -> dict[str, str]:
    """Return names of tensors of which there is just one in either with the same elements; single numbers aside."""
    shared = {spec for spec in a.specs.values() if spec.numel > 1} & set(b.specs.values())
    ours, theirs = owners_of(a, shared, jobs), owners_of(b, shared, jobs)
    return {
        ours[content][0]: theirs[content][0]
        for content in ours
        if content in theirs and len(ours[content]) == len(theirs[content]) == 1
    }


def owners_of(layout: Layout, specs: AbstractSet[Spec], jobs: int | None) -> dict[tuple[Spec, int], list[str]]:
    """Return the names of the tensors with one of these specs, by what they are: spec and CRC-32."""
    owners: dict[tuple[Spec, int], list[str]] = {}
    tensors = {name: tensor for name, tensor in layout.tensors.items() if tensor.spec in specs}
    for name, crc in fingerprints(locate(replace(layout, tensors=tensors, blobs={})), jobs=jobs).items():
        owners.setdefault((tensors[name].spec, crc), []).append(name)
    return owners


def explain(renamed: Mapping[str, str]) -> list[Explained]:
    """Return the renames in as few lines as there are rules, that with the most tensors first."""
    groups: dict[Rule, list[tuple[str, str]]] = {}
    for old, new in renamed.items():
        groups.setdefault(changes_of(old, new), []).append((old, new))
    lines = [describe(rule, pairs) for rule, pairs in groups.items()]
    return sorted(lines, key=lambda line: (-line.count, line.old))


def describe(rule: Rule, pairs: Sequence[tuple[str, str]]) -> Explained:
    """Return the names themselves, those without their layer, or the words that become others."""
    olds, news = zip(*pairs, strict=True)
    if len({fold(old) for old in olds}) == 1:
        one = len(pairs) == 1
        return Explained(olds[0] if one else fold(olds[0]), news[0] if one else fold(news[0]), len(pairs))
    return Explained(
        pattern([change.old for change in rule], rule[0].at_start, olds),
        pattern([change.new for change in rule], rule[0].at_start, news),
        len(pairs),
    )


def pattern(runs: Sequence[Words], at_start: bool, names: Sequence[str]) -> str:
    """Return words that all the names have, with `*` for whatever is before, between and after them."""
    words = [".".join(run) for run in runs if run]
    if not words:
        return "*"
    at_end = all(name.endswith(f".{words[-1]}") for name in names)
    return ("" if at_start else "*.") + ".*.".join(words) + ("" if at_end else ".*")
