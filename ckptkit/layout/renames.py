"""Find the changes that rename one set of names into another, and convert them from and to rules `REGEX=>TEXT`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import translate
from glob import escape
from itertools import chain, islice

from ckptkit.errors import Usage
from ckptkit.layout.box import Shape
from ckptkit.words import natural_sort_key

Words = tuple[str, ...]  # the components of a name, between its dots
Shapes = Mapping[str, Shape | None]  # None for a non-tensor entry
_MOST_TRIED = 64  # candidate renamings, most frequent first
_MOST_RULES = 8  # rules of `--rename`; nobody reads more
_START, _END = r"(^|\.)", r"(?=\.|$)"
# a number that is a whole step of a name, or follows `weight` or `bias`, as in modules with several experts; a pattern
# that begins with a digit is found four times as fast as one that begins with what is before it
_NUMBER = re.compile(r"[0-9](?:(?<![^.].)[0-9]{0,8}(?![^.])|(?:(?<=\.weight.)|(?<=\.bias.))[0-9]{0,8}(?![^._]))")


Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WordChange:
    """A sequence of words in a name that is replaced by another; with `at_start` only at the beginning."""

    old: Words
    new: Words
    at_start: bool


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
    # the first names of a shape on both sides may be the same tensor, the second names too, and so on
    by_shape: dict[Shape | None, tuple[list[str], list[str]]] = {}
    for side, shapes in enumerate((ours, theirs)):
        for name in sorted(shapes, key=natural_sort_key):
            by_shape.setdefault(shapes[name], ([], []))[side].append(name)
    votes: Counter[Renaming] = Counter()
    for old, new in chain.from_iterable(zip(*names, strict=False) for names in by_shape.values()):
        changes = word_changes_between(old, new)
        if not all(word.isdecimal() for change in changes for word in change.old + change.new):
            votes[changes] += 1
    for rule, _ in votes.most_common(_MOST_TRIED):
        taken = set(renamed.values())
        pairs = {
            old: new
            for old in ours
            if old not in renamed and (new := apply_rule(rule, old)) in theirs and new not in taken
            if ours[old] == theirs[new]
        }
        if len({numbers_to_wildcards(old) for old in pairs}) > 1:
            renamed |= pairs
    return renamed


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
    words = tuple(name.split("."))
    for change in rule:
        places = range(1 if change.at_start else len(words))
        at = next((i for i in places if words[i : i + len(change.old)] == change.old), None)
        if at is None:
            return name
        words = (*words[:at], *change.new, *words[at + len(change.old) :])
    return ".".join(words)


def numbers_to_wildcards(name: str) -> str:
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


def group_by_change(renamed: Mapping[str, str]) -> Iterator[tuple[Explained, tuple[str, ...]]]:
    """Yield each kind of change, with the old names that change that way.

    It shows full names, names with `*` for numbers, or the words that change.
    """
    groups: dict[Renaming, dict[str, str]] = {}
    for old, new in renamed.items():
        groups.setdefault(word_changes_between(old, new), {})[old] = new
    for rule, members in groups.items():
        olds, news = tuple(members), tuple(members.values())
        if len(members) == 1:
            old, new = olds[0], news[0]
        elif len(set(map(numbers_to_wildcards, olds))) == 1:
            old, new = numbers_to_wildcards(olds[0]), numbers_to_wildcards(news[0])
        else:
            old = glob_of_words([change.old for change in rule], rule[0].at_start, olds)
            new = glob_of_words([change.new for change in rule], rule[0].at_start, news)
        yield Explained(old, new, len(members)), olds


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


def rules_for_renames(renamed: Mapping[str, str], names: Collection[str]) -> tuple[str, ...] | None:
    """Return the rules that rename `renamed` and no other of the `names`; None if a user would not read so many."""
    rules = Counter(word_changes_between(old, new) for old, new in renamed.items())
    if len(rules) > _MOST_RULES:
        return None
    spelled = tuple(dict.fromkeys(spell_rule(change) for rule, _ in rules.most_common() for change in rule))
    new_name = renaming_function(spelled)
    return spelled if all(new_name(name) == renamed.get(name, name) for name in names) else None


def spell_rule(change: WordChange) -> str:
    old, new = re.escape(".".join(change.old)), ".".join(change.new).replace("\\", r"\\")
    if not old:
        return f"^=>{new}."
    start, kept = ("^", "") if change.at_start else (_START, r"\1")
    return f"{start}{old}{_END}=>{kept}{new}" if new else rf"{start}{old}\.=>{kept}"


# -- globs -------------------------------------------------------------------------------------------------------------


def find_few_globs(names: Iterable[str], others: Collection[str], max_globs: int) -> tuple[str, ...] | None:
    """Return at most `max_globs` globs that match all names and none of the others; None if that is impossible."""
    globs = tuple(islice(globs_for(names, others), max_globs + 1))
    return globs if 0 < len(globs) <= max_globs else None


def globs_for(names: Iterable[str], others: Collection[str]) -> Iterator[str]:
    """Yield globs that match all names and no others: of whole modules, or of one tensor in all layers, if possible."""
    remaining = dict.fromkeys(names)
    while remaining:
        # the name itself, with `*` for its numbers, and its modules, innermost first
        name = escape(next(iter(remaining)))
        words = name.split(".")
        modules = (".".join([*words[:end], "*"]) for end in range(len(words) - 1, 0, -1))
        globs = [glob for glob in (name, numbers_to_wildcards(name), *modules) if not names_matching(glob, others)]
        matches = {glob: names_matching(glob, remaining) for glob in globs}
        best = max(matches, key=lambda glob: len(matches[glob]))
        yield best
        for matched in matches[best]:
            del remaining[matched]


def names_matching(glob: str, names: Collection[str]) -> list[str]:
    pattern = re.compile(translate(glob))
    return [name for name in names if pattern.match(name)]


def mask_numbers(name: str) -> str:
    """Return a name with `#` for each of its numbers (whole steps, or ends of `weight` and `bias`)."""
    return _NUMBER.sub("#", name)


def numbers_in(name: str) -> Numbers:
    """Return the numbers that `mask_numbers` replaces."""
    return tuple(map(int, _NUMBER.findall(name)))
