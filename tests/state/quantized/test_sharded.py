"""Quantized weights that three ranks saved in rows or columns, cut within groups, words and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import compressed_tensors  # noqa: F401  # the ranks write with it
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import consolidate, convert, finalize
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from tests.state.quantized.few_bits import Stored, deepseek_v4, integers, mlx, modelopt
from tests.state.quantized.quantized_models import written
from tests.state.quantized.test_dequantize import assert_same, model, sizes  # noqa: F401
from tests.test_matrix import load_dcp
from tests.tiers import pairs

RANKS = 3
CASES: Mapping[str, Callable[[], Stored]] = {
    "int4": partial(integers, 4, symmetric=False, shape=(44, 224)),  # 28 words a row: 10, 10 and 8 of 8 numbers each
    "mlx 3 bits": partial(mlx, 3, 32, shape=(44, 224)),  # 21 words a row: cut within a number
    "modelopt": partial(modelopt, (44, 176)),
    "deepseek": deepseek_v4,
}


def save(root: Path, place: RankPlace, report: Report) -> None:
    with process_group(place, "cpu"):
        mesh = init_device_mesh("cpu", (RANKS,))
        for case, make in CASES.items():
            for axis in (0, 1):
                tensors = make().tensors
                shards = {
                    name: distribute_tensor(tensor, mesh, [Shard(axis)], src_data_rank=None)
                    if tensor.ndim > 1
                    else tensor
                    for name, tensor in tensors.items()
                }
                dcp.save(shards, checkpoint_id=root / case / str(axis))
        report(place.rank)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each case twice: rows sharded, and columns."""
    root = tmp_path_factory.mktemp("saved")
    launch(partial(save, root), RANKS, lambda _: None)
    for case, make in CASES.items():
        stored = make()
        said = {"model_type": "unheard_of", stored.section: dict(stored.said), **stored.more}
        for axis in (0, 1):
            (root / case / str(axis) / "config.json").write_text(json.dumps(said))
    return root


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(("case", "axis"), pairs([*CASES], (0, 1)))
def test_shards_make_what_the_whole_makes(saved: Path, tmp_path: Path, case: str, axis: int) -> None:
    stored = CASES[case]()
    done = consolidate(saved / case / str(axis), tmp_path / "out", dtype="bf16", names="keep")
    assert_same(model(tmp_path / "out"), {stored.name: stored.truth.bfloat16()})
    assert done.unchecked_bytes == 0
    convert(saved / case / str(axis), tmp_path / "bytes", to="dcp", world_size=2)
    found = load_dcp(tmp_path / "bytes")
    for name, tensor in stored.tensors.items():
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_parts_say_it_once_when_all_are_done(saved: Path, tmp_path: Path) -> None:
    stored = integers(4)
    root = written(tmp_path / "in", stored.said, stored.tensors)
    for part in ("2/2", "1/2"):
        done = consolidate(root, tmp_path / "out", dtype="bf16", names="keep", part=part)
        assert not any("quantizing to" in note for note in done.notes)
    done = finalize(tmp_path / "out")
    assert sum("quantizing to" in note for note in done.notes) == 1
    assert_same(model(tmp_path / "out"), {stored.name: stored.truth})
