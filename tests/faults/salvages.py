"""Salvages: `convert --salvage` of what is damaged; what it keeps is the truth, and its account lists all else.

With and without the whole checkpoint to fill it from. Part of cases 1 to 17.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.faults.bad_inputs import (
    CHECKED,
    DATA,
    DESCRIBED,
    FLIP,
    OF_RANKS,
    PAGE,
    PARTS,
    SAVED,
    UNCHECKED,
    in_each,
    of_rank,
)
from tests.faults.cases import Case, Seen
from tests.faults.damage import append, cut, remove, write, zero_all
from tests.faults.originals import original
from tests.faults.server import Ended
from tests.faults.subjects import are_equal, read_dcp, same
from tests.faults.trials import Bad, server
from tests.faults.verdicts import Verdict, judge_error

_FEW = 24  # inputs in the fast share, about
_SUM = (*CHECKED, *SAVED)  # whose tensors have checksums
BADS: tuple[Bad, ...] = (
    *in_each("gone", remove, [part for part in (*PARTS, *DESCRIBED) if part[0] != "shards"]),
    *in_each("half", partial(cut, keep=0.5), (*DATA, *DESCRIBED)),
    *in_each("tail", partial(cut, keep=0.95), (*DATA, *DESCRIBED)),
    *in_each("last byte", partial(cut, keep=1)),
    *in_each("0 bytes", partial(cut, keep=0.0)),
    *in_each("1 byte more", partial(append, content=b"\x2a")),
    *in_each("garbage", partial(write, content=b"\x9c\x1f not what it was \xff" * 40)),
    *in_each("flip", FLIP, _SUM),
    *in_each("page", PAGE, _SUM),
    *in_each("all zeros", zero_all, (*_SUM, *UNCHECKED)),
    *in_each("gone", remove, [(kind, of_rank(file, 0)) for kind, file in OF_RANKS]),
)


def try_salvaging(place: Path, whole: bool) -> Iterator[Seen]:
    """Salvage each bad input, once alone and once filled from the sound one."""
    for i, bad in enumerate(BADS if whole else BADS[:: 1 + len(BADS) // _FEW]):
        sound = original(bad.original)
        src, out = place / str(i) / "checkpoint", place / str(i) / "out"
        src.parent.mkdir()
        shutil.copytree(sound.root, src)
        bad.damage(src)
        for fill in (False, True):
            more = ["--fill-from", str(place_in(sound.root))] if fill else []
            words = ["convert", str(place_in(src)), str(out), "--to", "dcp", "--salvage", "--no-sync", *more]
            ended = server(is_ours=True).run("ckptkit", words, timeout=30)
            verdict, seen = judge(ended, out, bad, dict(sound.truth))
            said = f"{bad.name} ({bad.original}): code {ended.code}, {seen}: {ended.err.strip()[:300]}"
            yield Seen("ckptkit convert --salvage" + (" --fill-from" if fill else ""), verdict, said)
            shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(src.parent)


def place_in(root: Path) -> Path:
    """What is named of a checkpoint: a file of llm.c's, of which a directory may hold many."""
    return next(root.glob("model_*[0-9].bin"), root)


def judge(ended: Ended, out: Path, bad: Bad, truth: dict[str, Any]) -> tuple[Verdict, str]:
    """What a salvage came to, and how much it kept."""
    if ended.code not in (0, 1) or (ended.code == 1 and not out.exists()):
        is_left = any(path.is_file() for path in out.parent.glob(".*/**/*")) or out.exists()
        return Verdict.HALF if is_left else judge_error(ended, bad.culprits), "nothing"
    found = read_dcp(out, ended)
    if ended.code == 0:
        return Verdict.RIGHT if are_equal(found, truth) else Verdict.SILENT, "all"
    account = json.loads((out / "salvage.json").read_text())
    lost, filled = ({one["name"] for one in account[kind]} for kind in ("lost", "filled"))
    tensors = {name: value for name, value in truth.items() if isinstance(value, Tensor)}
    seen = f"{len(tensors.keys() & found.keys())} of {len(tensors)} tensors, {len(filled)} filled, {len(lost)} lost"
    if lost & found.keys() or not tensors.keys() - found.keys() <= lost:
        return Verdict.LOST, seen
    kept = {name: value for name, value in found.items() if name in tensors}
    is_true = all(is_that(value, tensors[name], is_rounded=name in filled) for name, value in kept.items())
    return Verdict.RIGHT if is_true and account["lost"] + account["filled"] else Verdict.SILENT, seen


def is_that(value: Tensor, truth: Tensor, *, is_rounded: bool) -> bool:
    """Whether a tensor is the true one, of which some numbers may be rounded as in DeepSpeed's 16-bit copy."""
    if not is_rounded or value.shape != truth.shape:
        return same(value, truth)
    return bool(((value == truth) | (value == truth.bfloat16().to(truth.dtype))).all())


CASES = (Case("1-17", "salvage", "what is kept of damaged checkpoints", try_salvaging),)
