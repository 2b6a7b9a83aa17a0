"""Find the changes that rename one set of names into another, and convert them from and to rules `REGEX=>TEXT`."""

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
from ckptkit.words import natural_sort_key

Words = tuple[str, ...]  # the components of a name, between its dots
Shapes = Mapping[str, Shape | None]  # None for a non-tensor entry
_MOST_TRIED = 64  # candidate renamings, most frequent first
_MOST_RULES = 8  # rules of `--rename`; nobody reads more
_START, _END = r"(^|\.)", r"(?=\.|$)"


@dataclass(frozen=True, slots=True)
class WordChange:
    """A sequence of words in a name that is replaced by another; with `at_start` only at the beginning."""

    old: Words
    new: Words
    at_start: bool

    def find_new_name(self, name: Words) -> Words | None:
        """Return the new name, None for a name without the old words."""
        places = range(1 if self.at_start else len(name))
        at = next((i for i in places if name[i : i + len(self.old)] == self.old), None)
        return None if at is None else (*name[:at], *self.new, *name[at + len(self.old) :])


Renaming = tuple[WordChange, ...]


@dataclass(frozen=True, slots=True)
class Explained:
    """A rule that explains `count` renamed tensors, as two patterns: `*` is equal in both."""

    old: str
    new: str
    count: int


# -- find how names change ---------------------------------------------------------------------------------------------


def match_names_by_rule(ours: Shapes, theirs: Shapes) -> dict[str, str]:
    """Return our names, each with the name in `theirs` of a tensor of the same shape into which a rule renames it."""
    renamed: dict[str, str] = {}
    votes = Counter(rule for pair in suggest_pairs(ours, theirs) if (rule := rule_between(*pair)))
    for rule, _ in votes.most_common(_MOST_TRIED):
        taken = set(renamed.values())
        pairs = {
            old: new
            for old in ours
            if old not in renamed and (new := apply_rule(rule, old)) in theirs and new not in taken
            if ours[old] == theirs[new]
        }
        if len({fold_numbers(old) for old in pairs}) > 1:
            renamed |= pairs
    return renamed


def suggest_pairs(ours: Shapes, theirs: Shapes) -> Iterator[tuple[str, str]]:
    """Yield pairs that may be the same tensor: of each shape the first names of both sides, the second of both, etc."""
    groups: dict[Shape | None, tuple[list[str], list[str]]] = {}
    for side, shapes in enumerate((ours, theirs)):
        for name in sorted(shapes, key=natural_sort_key):
            groups.setdefault(shapes[name], ([], []))[side].append(name)
    for our_names, their_names in groups.values():
        yield from zip(our_names, their_names, strict=False)


def rule_between(old: str, new: str) -> Renaming:
    """Return how one name becomes the other, word by word; () if they differ only in numbers."""
    changes = word_changes_between(old, new)
    words = [word for change in changes for word in change.old + change.new]
    return () if all(word.isdecimal() for word in words) else changes


def word_changes_between(old: str, new: str) -> Renaming:
    """Return the differences between two names as word sequences. Inserted words join the word before them."""
    a, b = tuple(old.split(".")), tuple(new.split("."))
    changes = []
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            before = 1 if i == j and i else 0
            changes.append(WordChange(a[i - before : j], b[k - before : m], at_start=i == before == 0))
    return tuple(changes)


def apply_rule(rule: Renaming, name: str) -> str:
    """Return the new name, or the old name if the rule does not apply."""
    words: Words | None = tuple(name.split("."))
    for change in rule:
        words = change.find_new_name(words) if words is not None else None
    return name if words is None else ".".join(words)


def fold_numbers(name: str) -> str:
    """Return a name with `*` for its numbers, equal for the same tensor in every layer."""
    return ".".join("*" if word.isdecimal() else word for word in name.split("."))


def find_prefix_rule(missing: Iterable[str], present: Iterable[str]) -> str | None:
    """Return a `--rename` rule that adds or removes a prefix so that every missing tensor gets its name."""
    missing, available = sorted(missing), set(present)
    for name in sorted(available):
        wanted = missing[0]
        if name.endswith("." + wanted):
            prefix = name.removesuffix(wanted)
            if all(prefix + other in available for other in missing):
                return f"^{prefix.replace('.', chr(92) + '.')}=>"
        elif wanted.endswith("." + name):
            prefix = wanted.removesuffix(name)
            if all(other.removeprefix(prefix) in available for other in missing):
                return f"^=>{prefix}"
    return None


# -- describe how names change -----------------------------------------------------------------------------------------


def explain_renames(renamed: Mapping[str, str]) -> list[Explained]:
    """Return the renames as one line per rule, the rule with the most tensors first."""
    return sorted((line for line, _ in group_by_change(renamed)), key=lambda line: (-line.count, line.old))


def group_by_change(pairs: Mapping[str, str]) -> Iterator[tuple[Explained, tuple[str, ...]]]:
    """Yield each kind of change, with the old names that change that way."""
    groups: dict[Renaming, dict[str, str]] = {}
    for old, new in pairs.items():
        groups.setdefault(word_changes_between(old, new), {})[old] = new
    for rule, members in groups.items():
        yield describe_renaming(rule, list(members.items())), tuple(members)


def describe_renaming(rule: Renaming, pairs: Sequence[tuple[str, str]]) -> Explained:
    """Return the full names, the names with `*` for numbers, or the words that change."""
    olds, news = zip(*pairs, strict=True)
    if len({fold_numbers(old) for old in olds}) == 1:
        is_single = len(pairs) == 1
        return Explained(
            olds[0] if is_single else fold_numbers(olds[0]), news[0] if is_single else fold_numbers(news[0]), len(pairs)
        )
    return Explained(
        glob_of_words([change.old for change in rule], rule[0].at_start, olds),
        glob_of_words([change.new for change in rule], rule[0].at_start, news),
        len(pairs),
    )


def glob_of_words(word_sequences: Sequence[Words], at_start: bool, names: Sequence[str]) -> str:
    """Return a pattern of the words that all names have, with `*` before, between and after them."""
    words = [".".join(run) for run in word_sequences if run]
    if not words:
        return "*"
    at_end = all(name.endswith(f".{words[-1]}") for name in names)
    return ("" if at_start else "*.") + ".*.".join(words) + ("" if at_end else ".*")


# -- rules of `--rename` -----------------------------------------------------------------------------------------------


def renaming_function(rules: Iterable[str]) -> Callable[[str], str]:
    """Return the function that renames by each rule in turn. Raises `Usage` for an invalid rule."""
    parsed = [parse_rule(rule) for rule in rules]

    def new_name(name: str) -> str:
        for pattern, text in parsed:
            name = pattern.sub(text, name)
        return name

    return new_name


def parse_rule(rule: str) -> tuple[re.Pattern[str], str]:
    """Return a rule `REGEX=>TEXT`, compiled. Raises `Usage` if it is invalid."""
    pattern, arrow, text = rule.partition("=>")
    if not arrow:
        raise Usage(f"--rename: expected REGEX=>TEXT, found `{rule}`", hint="write a rule like --rename '^model\\.=>'")
    try:
        compiled = re.compile(pattern)
        compiled.sub(text, "")
    except (re.error, IndexError) as error:
        raise Usage(f"--rename '{rule}': not a valid regular expression: {error}") from error
    return compiled, text


def rules_for(pairs: Mapping[str, str], names: Collection[str]) -> tuple[str, ...] | None:
    """Return the rules that rename `pairs` and no other of the `names`; None if a user would not read so many."""
    rules = Counter(word_changes_between(old, new) for old, new in pairs.items())
    if len(rules) > _MOST_RULES:
        return None
    spelled = tuple(dict.fromkeys(spell_rule(change) for rule, _ in rules.most_common() for change in rule))
    new_name = renaming_function(spelled)
    return spelled if all(new_name(name) == pairs.get(name, name) for name in names) else None


def spell_rule(change: WordChange) -> str:
    old, new = re.escape(".".join(change.old)), ".".join(change.new).replace("\\", r"\\")
    if not old:
        return f"^=>{new}."
    start, kept = ("^", "") if change.at_start else (_START, r"\1")
    return f"{start}{old}{_END}=>{kept}{new}" if new else rf"{start}{old}\.=>{kept}"


# -- globs -------------------------------------------------------------------------------------------------------------


def find_few_globs(names: Iterable[str], others: Collection[str], most: int) -> tuple[str, ...] | None:
    """Return at most `most` globs that match all names and none of the others; None if that is impossible."""
    globs = tuple(islice(globs_for(names, others), most + 1))
    return globs if 0 < len(globs) <= most else None


def globs_for(names: Iterable[str], others: Collection[str]) -> Iterator[str]:
    """Yield globs that match all names and no others: of whole modules, or of one tensor in all layers, if possible."""
    remaining = dict.fromkeys(names)
    while remaining:
        matches = {
            glob: names_matching(glob, remaining)
            for glob in candidate_globs(next(iter(remaining)))
            if not names_matching(glob, others)
        }
        best = max(matches, key=lambda glob: len(matches[glob]))
        yield best
        for name in matches[best]:
            del remaining[name]


def candidate_globs(name: str) -> Iterator[str]:
    """Yield globs for a name: itself, with `*` for its numbers, and its modules, innermost first."""
    yield escape(name)
    yield fold_numbers(escape(name))
    words = escape(name).split(".")
    yield from (".".join([*words[:end], "*"]) for end in range(len(words) - 1, 0, -1))


def names_matching(glob: str, names: Collection[str]) -> list[str]:
    pattern = re.compile(translate(glob))
    return [name for name in names if pattern.match(name)]
