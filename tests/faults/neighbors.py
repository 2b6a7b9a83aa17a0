"""Neighbors: what other processes do to the same paths while ckptkit reads or writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.faults.cases import Seen
from tests.faults.points import spread
from tests.faults.scenes import NEW, OLD, Scene, Tree, put, read_tree
from tests.faults.server import Server
from tests.faults.shim import Fault
from tests.faults.verdicts import Verdict, judge_error
from tests.faults.writings import MODULES


def try_cut(scene: Scene, most: int | None) -> Iterator[Seen]:
    """Somebody cuts off half of a file of the source, before each time that it is read."""
    source = Path(scene.words(NEW)[1])
    whole = read_tree(source)
    fault = Fault(str(source), kind="cut", calls=("read",))
    scene.lay()
    total = scene.run(replace(fault, kind="nothing", forever=True)).fired
    for at in spread(total, most):
        scene.lay()
        ended = scene.run(replace(fault, at=at))
        put(whole, source)
        verdict, seen = scene.judge(ended)
        yield Seen(scene.writing.subject, verdict, f"{scene.name}, cut at {at} of {total}, {ended.where}: {seen}")


def try_swap(scene: Scene, most: int | None) -> Iterator[Seen]:
    """The source is replaced by another one, as `--overwrite` does it, before each time that it is looked at."""
    source, other = (Path(scene.words(number)[1]) for number in (NEW, OLD))
    theirs, ours = read_tree(other), read_tree(source)
    put(theirs, source)
    scene.lay()
    assert scene.run().code == 0
    of_theirs = scene.tree()
    put(ours, source)
    fault = Fault(str(source), kind="swap", other=str(other))
    scene.lay()
    total = scene.run(replace(fault, kind="nothing", forever=True)).fired
    for at in spread(total, most):
        scene.lay()
        ended = scene.run(replace(fault, at=at))
        put(ours, source)
        put(theirs, other)
        what = f"{scene.name}, swapped at {at} of {total}, {ended.where}: code {ended.code}, {ended.err[:200]}"
        yield Seen(scene.writing.subject, judge_swap(scene, ended.code, ended.err, of_theirs), what)


def judge_swap(scene: Scene, code: int | None, err: str, of_theirs: Tree) -> Verdict:
    """Right is the output of one source or of the other, or an error and what was there before."""
    tree = scene.tree()
    if code == 0:
        return Verdict.RIGHT if tree in (scene.new, of_theirs) else Verdict.SILENT
    if "Traceback" in err:
        return Verdict.TRACEBACK
    return Verdict.CLEAN if tree == scene.old else Verdict.HALF


def try_races(scene: Scene, times: int) -> Iterator[Seen]:
    """Two runs make the same output at once, of two sources."""
    _ = scene.others  # made now, since that takes the place
    with Server(*MODULES) as second, ThreadPoolExecutor(2) as pool:
        for number in range(times):
            scene.lay()
            target = scene.writing.target
            runs = [
                pool.submit(server.run, target, scene.words(of)) for server, of in ((scene.server, NEW), (second, OLD))
            ]
            ended = [run.result() for run in runs]
            codes = sorted(end.code if end.code is not None else -1 for end in ended)
            yield Seen(scene.writing.subject, judge_race(scene, codes), f"{scene.name}, race {number}: {codes}")


def judge_race(scene: Scene, codes: list[int]) -> Verdict:
    """One wins, the other says 5 or comes after it; the output is that of one of the two."""
    if scene.tree() not in (scene.new, scene.others) or scene.leavings():
        return Verdict.SILENT if 0 in codes else Verdict.LOST
    return Verdict.RIGHT if codes == [0, 5] or (scene.is_over and codes == [0, 0]) else Verdict.UNNAMED


def try_own_source(scene: Scene) -> Iterator[Seen]:
    """The output is the source, lies in it, holds it, or is another name of it."""
    source = Path(scene.words(NEW)[1])
    whole = read_tree(source)
    link = source.parent / "link"
    link.symlink_to(source)
    for out in (source, source / "out", source / "new" / "out", source.parent, link, link / "out"):
        ended = scene.server.run(scene.writing.target, [scene.words()[0], str(source), str(out), *scene.words()[3:]])
        verdict = judge_error(ended, [str(source.parent)]) if ended.code == 5 else Verdict.LOST
        if ended.code == 0 and source.resolve() in out.resolve().parents:  # where nothing of the source is touched
            made = {f"out/{name}": content for name, content in read_tree(out).items()}
            verdict = Verdict.RIGHT if {"out/": b"", **made} == scene.new else Verdict.LOST
            shutil.rmtree(out)
            if out.parent not in (source, link):
                out.parent.rmdir()
        if read_tree(source) != whole:
            verdict = Verdict.LOST
            put(whole, source)
        yield Seen(
            scene.writing.subject, verdict, f"output {out.relative_to(scene.root)}: {ended.code} {ended.err[:200]}"
        )
    link.unlink()
    yield from _try_hard_link(scene, source, whole)


def _try_hard_link(scene: Scene, source: Path, whole: Tree) -> Iterator[Seen]:
    """The destination holds hard links of the source's files: replacing it must not write into them."""
    scene.lay()
    out = scene.place / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for file in source.iterdir():
        os.link(file, out / file.name)
    ended = scene.server.run(scene.writing.target, [*scene.words(), "--overwrite"])
    is_right = ended.code == 0 and scene.tree() == scene.new and read_tree(source) == whole
    yield Seen(scene.writing.subject, Verdict.RIGHT if is_right else Verdict.LOST, f"hard links: {ended.err[:200]}")
