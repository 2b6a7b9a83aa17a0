"""Adapters with hostile configs and damaged matrices, merged into the base that lies in a folder beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.faults.damage import Damage, cut, write
from tests.faults.originals import ADAPTER_CONFIG
from tests.faults.subjects import Subject, command, read_safetensors
from tests.faults.trials import Bad, case

WEIGHTS, SAID = "adapter_model.safetensors", "adapter_config.json"
_A, _B = (f"base_model.model.up.lora_{which}.weight" for which in "AB")
_EXPERTS, _CUBE = "base_model.model.mlp.experts.down_proj.lora_", torch.ones(3, 4, 5)
_MEGATRON = "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight"

MERGE = Subject(
    *("ckptkit merge", frozenset({"adapter"}), "ckptkit"),
    lambda src, out: command("merge", str(src / "base"), "SRC", "OUT", "--no-sync")(src, out),
    read_safetensors,
)


def said(**values: Any) -> Damage:
    """Let the config say something else."""
    return write(SAID, json.dumps(ADAPTER_CONFIG | values).encode())


def changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Change the matrices."""

    def damage(root: Path) -> None:
        tensors = load_file(root / WEIGHTS)
        change(tensors)
        (root / WEIGHTS).unlink()
        save_file(tensors, root / WEIGHTS)

    return damage


def experts(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Matrices of experts, lora_B of a shape."""
    return {f"{_EXPERTS}A.weight": _CUBE, f"{_EXPERTS}B.weight": torch.ones(shape)}


def elsewhere(tensors: dict[str, torch.Tensor]) -> None:
    """Have the matrices of a module that is none."""
    for name in (_A, _B):
        tensors[name.replace(".up.", ".on.")] = tensors.pop(name)


def bad(name: str, damage: Damage, culprit: str) -> Bad:
    """An adapter of which nothing may come out."""
    return Bad(name, "adapter", damage, (culprit,), refused=True, seconds=10.0, memory=512 << 20, subjects=(MERGE,))


CASES = (
    case(
        *("63", "hostile", "adapters with configs that say what cannot be"),
        [
            *(bad(f"rank {rank}", said(r=rank), SAID) for rank in (2**40, 0, -4, "4", True, 4.5)),
            bad("another rank", said(r=8), SAID),
            *(bad(f"alpha {alpha}", said(lora_alpha=alpha), SAID) for alpha in (math.nan, math.inf, "6", 1e300)),
            bad("a slow pattern", said(rank_pattern={"(a*)*b": 4}), SAID),
            bad("a pattern that is none", said(rank_pattern={"(": 4}), SAID),
            bad("another method", said(peft_type="LOHA"), SAID),
            bad("a switch", said(use_qalora=True), SAID),
            bad("deep", write(SAID, b'{"a":' * 200_000 + b"1" + b"}" * 200_000), SAID),
            bad("no JSON", write(SAID, b"\x00\xff"), SAID),
            bad("0 bytes", write(SAID, b""), SAID),
        ],
    ),
    case(
        *("64", "hostile", "adapters with matrices that fit nothing"),
        [
            bad("half of the file", cut(WEIGHTS, keep=0.5), WEIGHTS),
            bad("one of two", changed(lambda tensors: tensors.pop(_B)), _A),
            bad("another rank", changed(lambda tensors: tensors.update({_B: torch.ones(24, 5)})), _B),
            bad("another width", changed(lambda tensors: tensors.update({_A: torch.ones(4, 31)})), _A),
            bad("a vector", changed(lambda tensors: tensors.update({_B: torch.ones(24)})), _B),
            bad("NaN", changed(lambda tensors: tensors[_B].fill_(torch.nan)), "up.weight"),
            bad("another module", changed(elsewhere), ".on."),
            bad(
                "experts without B", changed(lambda tensors: tensors.update({f"{_EXPERTS}A.weight": _CUBE})), "experts"
            ),
            bad("experts of other ranks", changed(lambda tensors: tensors.update(experts((3, 6, 5)))), "experts"),
            bad("experts of other counts", changed(lambda tensors: tensors.update(experts((2, 6, 4)))), "experts"),
            bad("experts of no base", changed(lambda tensors: tensors.update(experts((3, 6, 4)))), "experts"),
            bad("another trainer's names", changed(lambda tensors: tensors.update({_MEGATRON: _CUBE})), "linear_qkv"),
        ],
    ),
)
