"""Find what renames one set of names into another, and read and write it as rules `REGEX=>TEXT` of `--rename`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import translate
from glob import escape
from itertools import islice

from ckptkit.errors import Usage
from ckptkit.layout.box import Shape
from ckptkit.words import natural

Words = tuple[str, ...]  # of a name, between its dots
Shapes = Mapping[str, Shape | None]  # None for an entry that is no tensor
_MOST_TRIED = 64  # ways of renaming, those first that the most names suggest
_MOST_RULES = 8  # of `--rename`; more than that nobody reads
_START, _END = r"(^|\.)", r"(?=\.|$)"


@dataclass(frozen=True, slots=True)
class WordChange:
    """A run of words in a name that becomes others; `at_start` if only there."""

    old: Words
    new: Words
    at_start: bool

    def apply(self, name: Words) -> Words | None:
        """Return the new name, None for one that does not have the old words."""
        places = range(1 if self.at_start else len(name))
        at = next((i for i in places if name[i : i + len(self.old)] == self.old), None)
        return None if at is None else (*name[:at], *self.new, *name[at + len(self.old) :])


Renaming = tuple[WordChange, ...]


@dataclass(frozen=True, slots=True)
class Explained:
    """A rule that explains renamed tensors, `count` of them, in two patterns: `*` is whatever is the same in both."""

    old: str
    new: str
    count: int


# -- find how names change ---------------------------------------------------------------------------------------------


def by_rule(ours: Shapes, theirs: Shapes) -> dict[str, str]:
    """Return names of ours that are one of theirs, of a tensor of the same shape, once a rule has been applied."""
    found: dict[str, str] = {}
    votes = Counter(rule for pair in suggest(ours, theirs) if (rule := rule_of(*pair)))
    for rule, _ in votes.most_common(_MOST_TRIED):
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


def rule_of(old: str, new: str) -> Renaming:
    """Return how one name becomes the other, word by word; nothing where only a number is another."""
    changes = changes_of(old, new)
    words = [word for change in changes for word in change.old + change.new]
    return () if all(word.isdecimal() for word in words) else changes


def changes_of(old: str, new: str) -> Renaming:
    """Return the runs of words in which two names differ; words that are put in go with the one before them."""
    a, b = tuple(old.split(".")), tuple(new.split("."))
    changes = []
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            before = 1 if i == j and i else 0
            changes.append(WordChange(a[i - before : j], b[k - before : m], at_start=i == before == 0))
    return tuple(changes)


def apply(rule: Renaming, name: str) -> str:
    """Return the new name; the old one, if the rule does not apply."""
    words: Words | None = tuple(name.split("."))
    for change in rule:
        words = change.apply(words) if words is not None else None
    return name if words is None else ".".join(words)


def fold(name: str) -> str:
    """Return a name without its numbers: that of the same tensor in every layer."""
    return ".".join("*" if word.isdecimal() else word for word in name.split("."))


def find_prefix_rule(missing: Iterable[str], present: Iterable[str]) -> str | None:
    """Return a `--rename` rule, taking a prefix off or putting one on, that gives every missing tensor its name."""
    missing, there = sorted(missing), set(present)
    for name in sorted(there):
        wanted = missing[0]
        if name.endswith("." + wanted):
            prefix = name.removesuffix(wanted)
            if all(prefix + other in there for other in missing):
                return f"^{prefix.replace('.', chr(92) + '.')}=>"
        elif wanted.endswith("." + name):
            prefix = wanted.removesuffix(name)
            if all(other.removeprefix(prefix) in there for other in missing):
                return f"^=>{prefix}"
    return None


# -- say how they change -----------------------------------------------------------------------------------------------


def explain(renamed: Mapping[str, str]) -> list[Explained]:
    """Return the renames in as few lines as there are rules, that with the most tensors first."""
    return sorted((line for line, _ in by_change(renamed)), key=lambda line: (-line.count, line.old))


def by_change(pairs: Mapping[str, str]) -> Iterator[tuple[Explained, tuple[str, ...]]]:
    """Yield the ways in which names change, each with the old names that change so."""
    groups: dict[Renaming, dict[str, str]] = {}
    for old, new in pairs.items():
        groups.setdefault(changes_of(old, new), {})[old] = new
    for rule, members in groups.items():
        yield describe(rule, list(members.items())), tuple(members)


def describe(rule: Renaming, pairs: Sequence[tuple[str, str]]) -> Explained:
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


# -- rules of `--rename` -----------------------------------------------------------------------------------------------


def renaming(rules: Iterable[str]) -> Callable[[str], str]:
    """Return the function that gives a name its new one, by each rule in turn. Raises `Usage` for what is no rule."""
    parsed = [parse_rule(rule) for rule in rules]

    def new_name(name: str) -> str:
        for pattern, text in parsed:
            name = pattern.sub(text, name)
        return name

    return new_name


def parse_rule(rule: str) -> tuple[re.Pattern[str], str]:
    """Return a rule `REGEX=>TEXT`, compiled. Raises `Usage` if it is none."""
    pattern, arrow, text = rule.partition("=>")
    if not arrow:
        raise Usage(f"`=>` is missing in --rename '{rule}'", hint="write a rule like --rename '^model\\.=>'")
    try:
        compiled = re.compile(pattern)
        compiled.sub(text, "")
    except (re.error, IndexError) as error:
        raise Usage(f"--rename '{rule}': not a valid regular expression: {error}") from error
    return compiled, text


def rules_for(pairs: Mapping[str, str], names: Collection[str]) -> tuple[str, ...] | None:
    """Return the rules that give each old name in `pairs` its new one, and every other of the `names` its own.

    Returns None if no few rules do that.
    """
    rules = Counter(changes_of(old, new) for old, new in pairs.items())
    if len(rules) > _MOST_RULES:
        return None
    found = tuple(dict.fromkeys(spell(change) for rule, _ in rules.most_common() for change in rule))
    new_name = renaming(found)
    return found if all(new_name(name) == pairs.get(name, name) for name in names) else None


def spell(change: WordChange) -> str:
    """Return a change of words in names as a rule `REGEX=>TEXT`."""
    old, new = re.escape(".".join(change.old)), ".".join(change.new).replace("\\", r"\\")
    if not old:
        return f"^=>{new}."
    start, kept = ("^", "") if change.at_start else (_START, r"\1")
    return f"{start}{old}{_END}=>{kept}{new}" if new else rf"{start}{old}\.=>{kept}"


# -- globs -------------------------------------------------------------------------------------------------------------


def few_globs(names: Iterable[str], others: Collection[str], most: int) -> tuple[str, ...] | None:
    """Return globs that match all of the names and none of the others; None if it takes more than `most`, or none."""
    globs = tuple(islice(globs_for(names, others), most + 1))
    return globs if 0 < len(globs) <= most else None


def globs_for(names: Iterable[str], others: Collection[str]) -> Iterator[str]:
    """Yield globs that together match all of the names and none of the others.

    Each matches as many of the names as it can: all tensors of a module, or the same tensor in all layers.
    """
    left = dict.fromkeys(names)
    while left:
        matches = {glob: matched(glob, left) for glob in globs_of(next(iter(left))) if not matched(glob, others)}
        best = max(matches, key=lambda glob: len(matches[glob]))
        yield best
        for name in matches[best]:
            del left[name]


def globs_of(name: str) -> Iterator[str]:
    """Yield the name itself as a glob, with all numbers, and all that lies in the same modules, from the innermost."""
    yield escape(name)
    yield fold(escape(name))
    words = escape(name).split(".")
    yield from (".".join([*words[:end], "*"]) for end in range(len(words) - 1, 0, -1))


def matched(glob: str, names: Collection[str]) -> list[str]:
    pattern = re.compile(translate(glob))
    return [name for name in names if pattern.match(name)]
