"""Make one command of those that mend several findings, where one can do all. Arithmetic on words of commands."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptkit.diagnosis.commands import SHARDS, command

REPEATED = frozenset(["--rename", "--include", "--exclude", "--dtype", "--also"])
_FLAGS = frozenset(["--merge", "--complete-optimizer", "--salvage"])  # options without a value
_APART = frozenset(["--include", "--salvage"])  # what comes of these is to be looked at first
_ORDER = ("--to", "--world-size", "--also")  # the first of all
_RESHARD, _CONVERT, _EXPORT = "reshard", "convert", "consolidate"
Option = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A command that makes a checkpoint of another: verb, source and destination, and its options."""

    verb: str
    paths: tuple[str, ...]
    options: tuple[Option, ...]

    @classmethod
    def of(cls, fix: str) -> Command:
        """Take a command line of ours apart."""
        _, verb, *words = shlex.split(fix)
        start = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        return cls(verb, tuple(words[:start]), tuple(options_in(words[start:])))

    def __str__(self) -> str:
        return command(self.verb, *self.paths, *(word for option in self.options for word in option))

    @property
    def flags(self) -> set[str]:
        return {option[0] for option in self.options}

    def as_shards(self) -> Command:
        """Return a command that writes a checkpoint for other ranks as one that converts it to shards for them."""
        rest = [("--world-size", *one[1:]) if one[0] == "--to" else one for one in self.options]
        return replace(self, verb=_CONVERT, options=(("--to", SHARDS), *rest))

    def others(self) -> Iterator[Command]:
        """Yield what does nearly the same where the command itself is refused.

        A model with the names that it has is not held against its config, of which something may be missing. Files
        that cannot be written for other ranks become shards.
        """
        if self.verb == _EXPORT and "--names" not in self.flags:
            yield replace(self, options=(*self.options, ("--names", "keep")))
        elif self.verb == _RESHARD:
            yield self.as_shards()


def options_in(words: Sequence[str]) -> Iterator[Option]:
    """Yield the options of a command line, each with its value if it has one."""
    at = 0
    while at < len(words):
        size = 1 if words[at] in _FLAGS else 2
        yield tuple(words[at : at + size])
        at += size


def join_all(commands: Collection[Command], *, is_sharded: bool) -> dict[Command, Command]:
    """Return by each command the one that does the same as all with its verb and paths, if they do not disagree.

    Where the checkpoint `is_sharded` already, one that writes it for other ranks is one that converts it too.
    """
    own = {one: one for one in commands}
    whole = {one.paths for one in own if one.verb == _CONVERT and ("--to", SHARDS) in one.options}
    for one in commands if is_sharded else ():
        if one.verb == _RESHARD and one.paths in whole:
            own[one] = one.as_shards()
    alike: dict[tuple[str, ...], list[Command]] = {}
    for one, same in own.items():
        if not one.flags & _APART:
            alike.setdefault((same.verb, *one.paths), []).append(one)
    found = dict(own)
    for members in alike.values():
        options = in_order(dict.fromkeys(option for one in members for option in own[one].options))
        single = [option[0] for option in options if option[0] not in REPEATED]
        if len(single) == len(set(single)):
            found |= dict.fromkeys(members, replace(own[members[0]], options=options))
    return found


def in_order(options: Iterable[Option]) -> tuple[Option, ...]:
    """Return options with what a checkpoint becomes first, and what it is held against last."""
    places = {flag: number for number, flag in enumerate(_ORDER)}
    return tuple(sorted(options, key=lambda one: (places.get(one[0], len(places)), one[0] == "--base")))
