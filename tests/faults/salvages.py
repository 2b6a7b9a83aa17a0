"""Salvages: `convert --salvage` of what is damaged; what it keeps is the truth, and its account lists all else.

With and without the whole checkpoint to fill it from. Cases 1 to 17 and 21 once more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
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
    of_other_ranks,
    of_rank,
)
from tests.faults.cases import Case, Seen
from tests.faults.damage import append, cut, remove, write, zero_all
from tests.faults.originals import original
from tests.faults.server import Ended
from tests.faults.subjects import are_equal, read_dcp, same
from tests.faults.trials import Bad, server
from tests.faults.verdicts import Verdict, judge_error

_FEW = 8  # inputs in the fast share, about
_SUMMED = (*CHECKED, *SAVED)  # files that have checksums
BADS: tuple[Bad, ...] = (
    *in_each("gone", remove, [part for part in (*PARTS, *DESCRIBED) if part[0] != "shards"]),
    *in_each("half", partial(cut, keep=0.5), (*DATA, *DESCRIBED)),
    *in_each("tail", partial(cut, keep=0.95), (*DATA, *DESCRIBED)),
    *in_each("last byte", partial(cut, keep=1)),
    *in_each("0 bytes", partial(cut, keep=0.0)),
    *in_each("1 byte more", partial(append, content=b"\x2a")),
    *in_each("garbage", partial(write, content=b"\x9c\x1f not what it was \xff" * 40)),
    *in_each("flip", FLIP, _SUMMED),
    *in_each("page", PAGE, _SUMMED),
    *in_each("all zeros", zero_all, (*_SUMMED, *UNCHECKED)),
    *in_each("gone", remove, [(kind, of_rank(file, 0)) for kind, file in OF_RANKS]),
    *of_other_ranks(),
)


def try_salvaging(place: Path, whole: bool) -> Iterator[Seen]:
    """Salvage each bad input, once alone and once filled from the sound one."""
    for i, bad in enumerate(BADS if whole else BADS[:: 1 + len(BADS) // _FEW]):
        sound = original(bad.original)
        src, out = place / str(i) / "checkpoint", place / str(i) / "out"
        src.parent.mkdir()
        shutil.copytree(sound.root, src)
        bad.damage(src)
        for fill in ([], ["--fill-from", str(sound.root)]):
            words = ["convert", str(src), str(out), "--to", "dcp", "--salvage", "--no-sync", *fill]
            ended = server(is_ours=True).run("ckptkit", words, timeout=30)
            verdict = judge(ended, out, bad, is_filled=bool(fill))
            said = f"{bad.name} ({bad.original}): code {ended.code}: {ended.err.strip()}"
            yield Seen(" ".join(["ckptkit convert --salvage", *fill[:1]]), verdict, said)
            shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(src.parent)


def judge(ended: Ended, out: Path, bad: Bad, *, is_filled: bool) -> Verdict:
    """What a salvage came to: the whole truth; what is true of it, and a list of the rest; or an error and nothing."""
    if not out.exists():
        is_left = any(path.is_file() for path in out.parent.glob(".*/**/*"))
        return Verdict.HALF if is_left else judge_error(ended, bad.culprits)
    found, truth = read_dcp(out, ended), original(bad.original).truth
    if not (out / "salvage.json").exists():
        return Verdict.RIGHT if ended.code == 0 and are_equal(found, dict(truth)) else Verdict.SILENT
    account = json.loads((out / "salvage.json").read_text())
    lost, filled = ({one["name"] for one in account[kind]} for kind in ("lost", "filled"))
    kept, wanted = tensors_of(found), tensors_of(truth)
    if lost & kept.keys() or not wanted.keys() - kept.keys() <= (set() if is_filled else lost):
        return Verdict.LOST
    is_true = kept.keys() <= wanted.keys() and all(
        is_that(value, wanted[name], may_be_rounded=name in filled) for name, value in kept.items()
    )
    is_said = ended.code == 0 and "warning: " in ended.err and bool(account["lost"] + account["filled"])
    return Verdict.RIGHT if is_true and is_said else Verdict.SILENT


def tensors_of(leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those of the values that are tensors."""
    return {name: value for name, value in leaves.items() if isinstance(value, Tensor)}


def is_that(value: Tensor, truth: Tensor, *, may_be_rounded: bool) -> bool:
    """Whether a tensor is the true one, or has numbers of DeepSpeed's 16-bit copy of it."""
    if not may_be_rounded or (value.dtype, value.shape) != (truth.dtype, truth.shape):
        return same(value, truth)
    return bool(((value == truth) | (value == truth.bfloat16().to(truth.dtype))).all())


CASES = (Case("1-17, 21", "salvage", "what is kept of damaged checkpoints", try_salvaging),)
