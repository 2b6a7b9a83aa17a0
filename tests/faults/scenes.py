"""Scenes: a writing in a directory of its own, with an old output or none, and what stands there after a fault.

Knows what is old, new, both or neither, bit for bit; injects nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.faults.server import Ended, Server
from tests.faults.shim import Fault
from tests.faults.verdicts import Verdict, judge_error
from tests.faults.writings import Writing

Tree = Mapping[str, bytes]
OLD, NEW, THIRD = 1, 2, 3


@dataclass(frozen=True)
class Scene:
    """A writing in directory `root`, which may have `sources` in it: over a good old output, or where there is none."""

    server: Server
    writing: Writing
    root: Path
    is_over: bool

    @property
    def place(self) -> Path:
        """The directory of the output."""
        return self.root / "place"

    @property
    def name(self) -> str:
        """The scene in a word or two."""
        return "over an old one" if self.is_over else "fresh"

    @cached_property
    def old(self) -> Tree:
        """What is there before."""
        return self.others if self.is_over else {}

    @cached_property
    def new(self) -> Tree:
        """What is there after a writing that nothing came to."""
        self.lay()
        return self._made(self.words(NEW))

    @cached_property
    def third(self) -> Tree:
        """What is there after one more."""
        put(self.new, self.place)
        return self._made(self._words_after)

    @cached_property
    def others(self) -> Tree:
        """What is there after a writing of the old source where there was nothing."""
        self._clear()
        return self._made(self.words(OLD))

    def load_noop_patch(self) -> None:
        """Find out what it comes to when nothing goes wrong, for all that follows."""
        _ = self.old, self.new, self.third

    def words(self, number: int = NEW) -> list[str]:
        """What the writing is called with."""
        words = (*self.writing.words, *(self.writing.over if self.is_over else ()))
        return self._filled(words, number)

    @property
    def _words_after(self) -> list[str]:
        return self._filled((*self.writing.words, *self.writing.after), NEW)

    def _filled(self, words: tuple[str, ...], number: int) -> list[str]:
        src = self.root / "sources" / str(number) / self.writing.source
        return [word.format(src=src, out=self.place / "out", place=self.place, step=number) for word in words]

    def _made(self, words: list[str]) -> Tree:
        ended = self.server.run(self.writing.target, words)
        assert ended.code == 0, ended
        return self.tree()

    def _clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)

    def lay(self) -> None:
        """Put the scene as it is before the writing."""
        old = self.old
        self._clear()
        put(old, self.place)

    def run(self, fault: Fault | None = None, *, limits: Mapping[int, int] = {}, server: Server | None = None) -> Ended:
        """Write."""
        return (server or self.server).run(self.writing.target, self.words(), fault=fault, limits=limits)

    def tree(self) -> Tree:
        """What everybody can see in the place, by its path."""
        return {name: content for name, content in read_tree(self.place).items() if not self._is_hidden(name)}

    def leavings(self) -> list[str]:
        """What is hidden in the place."""
        return sorted({name.split("/")[0] for name in read_tree(self.place) if self._is_hidden(name)})

    def _is_hidden(self, name: str) -> bool:
        parts = name.split("/")
        return parts[0].startswith(".") if self.writing.is_ours else any(part.startswith(".") for part in parts)

    def stands(self) -> str:
        """`old`, `new`, `both` or `neither`."""
        tree = self.tree()
        known = {"old": self.old, "new": self.new, "both": {**self.old, **self.new}}
        return next((name for name, expected in known.items() if tree == expected), "neither")

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def judge(self, ended: Ended, *, crashed: bool = False) -> tuple[Verdict, str]:
        """What became of a writing, and what stands there. One that `crashed` has nothing to say."""
        stands = self.stands()
        left = ", ".join(self.leavings())
        seen = f"code {ended.code}, {stands} there{left and f', and {left}'}"
        said = ended.err.strip().splitlines()[:1]
        if ended.code == 0:
            # a checkpoint that could not be deleted after the save is no reason to end a training
            return (Verdict.RIGHT if stands in ("new", "both") else Verdict.SILENT), seen
        if stands == "neither":
            return self._judge_neither(), seen
        if ended.code is not None and crashed:
            return Verdict.RIGHT, seen
        return judge_error(ended, [str(self.root)]), ": ".join([seen, *said])

    def _judge_neither(self) -> Verdict:
        return Verdict.LOST if self.is_over else Verdict.HALF

    def judge_again(self) -> tuple[Verdict, str]:
        """What becomes of the same writing when nothing comes to it any more: all is right, and nothing is left."""
        was_there = self.stands() in ("new", "both") and (not self.is_over or self.new != self.third)
        words, expected = (self._words_after, self.third) if was_there else (self.words(), self.new)
        ended = self.server.run(self.writing.target, words)
        left = self.leavings()
        seen = f"run again: code {ended.code}, left {left}: {ended.err.strip()[-300:]}"
        if ended.code != 0 or left:
            return (judge_error(ended, [str(self.root)]) if ended.code else Verdict.HALF), seen
        return (Verdict.RIGHT if self.tree() == expected else Verdict.SILENT), seen


def read_tree(root: Path) -> Tree:
    """The content of every file below a directory by its path from there; directories end in a slash."""
    paths = {path: path.relative_to(root) for path in sorted(root.rglob("*"))}
    return {f"{name}/" if path.is_dir() else str(name): read(path) for path, name in paths.items()}


def read(path: Path) -> bytes:
    """The content of a file, nothing for a directory."""
    return b"" if path.is_dir() else path.read_bytes()


def put(tree: Tree, root: Path) -> None:
    """Write a tree, and nothing else, to directory `root`."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        if name.endswith("/"):
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
