"""Write the `--rename` rules by which tensors get the names that they are looked for by. Arithmetic on names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from ckptkit.comparison.renames import Change, Explained, Rule, changes_of, describe
from ckptkit.conversion.selection import Edits

_START, _END = r"(^|\.)", r"(?=\.|$)"
_MOST = 8  # rules; more than that nobody reads


def rules_for(pairs: Mapping[str, str], names: Collection[str]) -> tuple[str, ...] | None:
    """Return the rules that give each old name in `pairs` its new one, and every other of the `names` its own.

    Returns None if no few rules do that.
    """
    rules = Counter(changes_of(old, new) for old, new in pairs.items())
    if len(rules) > _MOST:
        return None
    found = tuple(dict.fromkeys(spell(change) for rule, _ in rules.most_common() for change in rule))
    new_name = Edits(rename=found).renaming()
    return found if all(new_name(name) == pairs.get(name, name) for name in names) else None


def by_change(pairs: Mapping[str, str]) -> Iterator[tuple[Explained, tuple[str, ...]]]:
    """Yield the ways in which names change, each with the old names that change so."""
    groups: dict[Rule, dict[str, str]] = {}
    for old, new in pairs.items():
        groups.setdefault(changes_of(old, new), {})[old] = new
    for rule, members in groups.items():
        yield describe(rule, list(members.items())), tuple(members)


def spell(change: Change) -> str:
    """Return a change of words in names as a rule `REGEX=>TEXT`."""
    old, new = re.escape(".".join(change.old)), ".".join(change.new).replace("\\", r"\\")
    if not old:
        return f"^=>{new}."
    start, kept = ("^", "") if change.at_start else (_START, r"\1")
    return f"{start}{old}{_END}=>{kept}{new}" if new else rf"{start}{old}\.=>{kept}"
