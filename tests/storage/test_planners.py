"""Planners that do more than torch's default ones: what they are promised by torch's storage, they get from ours."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckptkit.errors import CkptError, Mismatch
from ckptkit.storage import Writer, find_cause
from tests.producers import counted
from tests.storage.test_like_torch import PAIRS, READERS, WRITERS

each_pair = pytest.mark.parametrize(("writer", "reader"), PAIRS)
each_format = pytest.mark.parametrize("to", ["dcp", "pt", "hf"])


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Torch warns that there is no process group."""
    with warnings.catch_warnings(action="ignore"):
        yield


def cause_of(error: pytest.ExceptionInfo[CheckpointException]) -> CkptError:
    cause = find_cause(error.value)
    assert isinstance(cause, CkptError)
    return cause


# -- data of another dtype than the plan's -----------------------------------------------------------------------------


class Rounding(DefaultSavePlanner):
    """Gives data of another dtype, which the plan says only if `is_planned`; as the example in torch's docs."""

    def __init__(self, dtype: torch.dtype, *, is_planned: bool) -> None:
        super().__init__()
        self.dtype = dtype
        self.is_planned = is_planned

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if not self.is_planned:
            return plan
        return replace(plan, items=[self.change(item) for item in plan.items])

    def change(self, item: WriteItem) -> WriteItem:
        if item.tensor_data is None:
            return item
        properties = replace(item.tensor_data.properties, dtype=self.dtype)
        return replace(item, tensor_data=replace(item.tensor_data, properties=properties))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return data.to(self.dtype) if isinstance(data, Tensor) else data


@each_pair
def test_a_planner_that_rounds_what_it_gives(tmp_path: Path, writer: str, reader: str) -> None:
    for is_planned, loaded in ((True, torch.float16), (False, torch.float32)):
        path = tmp_path / str(is_planned)
        planner = Rounding(torch.float16, is_planned=is_planned)
        if not is_planned and writer == "torch":
            continue  # one file of torch's that says one dtype and holds another
        dcp.save({"w": counted(5) / 3}, storage_writer=WRITERS[writer](path), planner=planner)
        found = {"w": torch.zeros(5, dtype=loaded)}
        dcp.load(found, storage_reader=READERS[reader](path))
        assert torch.equal(found["w"], (counted(5) / 3).half().to(loaded))


@each_format
@pytest.mark.parametrize("given", [torch.int32, torch.float64, torch.complex64])
def test_data_that_the_planned_dtype_cannot_hold_is_refused(tmp_path: Path, to: str, given: torch.dtype) -> None:
    planner = Rounding(given, is_planned=False)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": counted(5)}, storage_writer=Writer(tmp_path / "out", to), planner=planner)
    cause = cause_of(caught)
    assert isinstance(cause, Mismatch)
    assert cause.tensor == "w"
    assert cause.message == f"expected dtype float32 (the plan's), found {str(given).removeprefix('torch.')}"
    assert not (tmp_path / "out").exists()


def test_halves_of_another_kind_are_refused(tmp_path: Path) -> None:
    planner = Rounding(torch.bfloat16, is_planned=False)
    with pytest.raises(CheckpointException, match="expected dtype float16"):
        dcp.save({"w": counted(5).half()}, storage_writer=Writer(tmp_path / "out"), planner=planner)
