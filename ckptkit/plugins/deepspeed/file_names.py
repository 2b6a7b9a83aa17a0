"""Parse the names of DeepSpeed's files: the kind of state and the rank.

Source: deepspeed/runtime/engine.py, `_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`;
deepspeed/runtime/pipe/module.py, `ckpt_layer_path`. In `zero_pp_rank_D_mp_rank_MM_*` D is the data-parallel rank; MM is
the tensor-parallel rank, or the stage of a pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.errors import ELSEWHERE, Corrupt, Incomplete, Report, Unsupported, and_more, raise_problem

Rank = tuple[int, int]  # (model part, data-parallel rank)

_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{2,9})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{2,9})_optim_states\.pt")
_LAYER = re.compile(r"layer_([0-9]{2,9})-(?:model_([0-9]{2,9})-)?model_states\.pt")
_EXPERT = re.compile(r"(?:layer_([0-9]{1,9})_)?expert_([0-9]{1,9})_mp_rank_([0-9]{2,9})_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_([0-9]{1,9})_mp_rank_([0-9]{2,9})_optim_states\.pt")
_ALL = (_MODEL, _OPTIMIZER, _LAYER, _EXPERT, _EXPERT_OPTIMIZER)
OFFLOADED = "offloaded_tensors"  # directory of DeepSpeed's NVMe swapper


def is_deepspeed_file(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _ALL)


def is_useless_alone(name: str) -> bool:
    """Return whether a file of this name is useless without other files: it belongs to one rank or one layer."""
    match = _MODEL.fullmatch(name)
    return is_deepspeed_file(name) and not (match and match[1] is None)


def parse_part_and_rank(name: str) -> Rank | None:
    """Return the model part and the data-parallel rank in a file name; None if the name does not contain both."""
    match = _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name)
    return (int(match[2]), int(match[1])) if match and match[1] is not None else None


def split_experts_error(path: Path) -> Unsupported:
    hint = "save the checkpoint again with a tensor-parallel size of 1"
    return Unsupported("ckptkit cannot read experts that are split by tensor parallelism", path=path, hint=hint)


@dataclass(frozen=True, slots=True)
class DeepSpeedFiles:
    """The files of a directory by kind. In `models`, data-parallel rank -1 means that all ranks share the file.

    The keys of `experts` are (index among the expert layers, expert index); the keys of `expert_optimizers` are
    expert-parallel ranks.
    """

    models: dict[Rank, str] = field(default_factory=dict)
    optimizers: dict[Rank, str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[Rank, str] = field(default_factory=dict)
    expert_optimizers: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str], root: Path) -> DeepSpeedFiles:
        """Return the files among `names`.

        Raises `Corrupt` if two files claim the same rank, `Unsupported` for expert files of early versions and for
        experts that are split by tensor parallelism.
        """
        files = cls()
        for name in sorted(names):
            if match := _MODEL.fullmatch(name):
                add_file(files.models, (int(match[2]), -1 if match[1] is None else int(match[1])), name, root)
            elif match := _OPTIMIZER.fullmatch(name):
                add_file(files.optimizers, (int(match[2]), int(match[1])), name, root)
            elif match := _LAYER.fullmatch(name):
                add_file(files.layers, (int(match[1]), int(match[2] or 0)), name, root)
            elif match := _EXPERT.fullmatch(name):
                if match[1] is None:
                    message = "ckptkit cannot read files of experts without a layer number, as old DeepSpeed wrote them"
                    hint = "load the checkpoint and save it again with a newer DeepSpeed"
                    raise Unsupported(message, path=root / name, hint=hint)
                if int(match[3]):
                    raise split_experts_error(root / name)
                add_file(files.experts, (int(match[1]), int(match[2])), name, root)
            elif match := _EXPERT_OPTIMIZER.fullmatch(name):
                if int(match[2]):
                    raise split_experts_error(root / name)
                files.expert_optimizers[int(match[1])] = name
        return files

    @property
    def parts(self) -> list[int]:
        """Return the indices of the model parts: pipeline stages or tensor-parallel ranks."""
        return sorted({part for part, _ in (*self.models, *self.optimizers)})


def add_file(files: dict[Rank, str], rank: Rank, name: str, root: Path) -> None:
    """Add the file of a rank. Raises `Corrupt` if the rank already has a file."""
    if rank in files:
        message = f"`{files[rank]}` claims the same rank: this directory mixes files of two runs"
        raise Corrupt(message, path=root / name, hint="keep the files of one run")
    files[rank] = name


def files_of_part(files: dict[Rank, str], part: int) -> dict[int, str]:
    """Return the files of a model part by data-parallel rank; -1 if all ranks share one file."""
    return {rank: name for (of_part, rank), name in sorted(files.items()) if of_part == part}


def expected_file_name_of_rank(files: dict[int, str], rank: int) -> str:
    """Return the file name of a rank, even if the file is missing."""
    known, name = next(iter(files.items()))
    return files.get(rank, name.replace(f"pp_rank_{known}_", f"pp_rank_{rank}_"))


def report_missing_ranks(
    files: dict[int, str], count: int, root: Path, recorded_in: str, report: Report = raise_problem
) -> None:
    """Report each of `count` ranks that has no file. Raises `Corrupt` for the file of a higher rank."""
    extra = [name for rank, name in files.items() if rank >= count]
    if extra:
        found = f"this one too{and_more(len(extra) - 1)}: it is of an older, larger run"
        message = f"expected files of {count} ranks (`{recorded_in}`), found {found}"
        raise Corrupt(message, path=root / extra[0], hint="move the files of the older run to another directory")
    for missing in (rank for rank in range(count) if rank not in files):
        message = f"the file of rank {missing} is missing: expected {count} ranks (`{recorded_in}`), found {len(files)}"
        report(
            Incomplete(message, path=root / expected_file_name_of_rank(files, missing), hint=ELSEWHERE, ranks=[missing])
        )
