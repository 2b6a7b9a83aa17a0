"""Models that DeepSpeed's AutoTP cut, against what its own map makes of the ranks' slices: bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Corrupt, Incomplete, Unsupported
from tests.conftest import Produce
from tests.plugins.deepspeed.test_deepspeed import MODEL, assert_holds, change, refused, truth_of
from tests.trainers import produced_tensor_parallel as produced

pytest.importorskip("deepspeed.checkpoint.affine", reason="DeepSpeed with maps of slices is not installed")
pytestmark = pytest.mark.nightly

KINDS = ("zero1", "zero2")
UP = "^up\\.weight$"


@pytest.mark.parametrize("kind", KINDS)
def test_holds_the_live_state(kind: str, produce: Produce) -> None:
    made = produce(produced.auto_tp)
    layout = open_layout(made.root / kind)
    truth = truth_of(made.truth, kind)
    assert_holds(layout, truth)
    own = {"model.frequencies"}
    assert {name for name in layout.tensors if not name.endswith(".step")} - own == truth.keys()
    (found,) = ckptkit.verify(made.root / kind)
    assert (found.is_ok, found.unchecked_bytes) == (True, 0)
    assert len(layout.twins) == sum(name.startswith("model.") for name in truth)


def test_it_becomes_a_universal_checkpoint(produce: Produce, tmp_path: Path) -> None:
    root = produce(produced.auto_tp).root / "zero1"
    ckptkit.convert(root, tmp_path / "out", to="universal")
    found, wanted = ckptkit.open(tmp_path / "out"), ckptkit.open(root)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].torch(), tensor.torch()) for name, tensor in wanted.items())
    wide = tmp_path / "out" / "global_step2" / "zero" / "model.layers.0.self_attn.o_proj.weight" / "fp32.pt"
    assert torch.load(wide)["param"].shape == (16, 16)


def test_the_universal_checkpoint_of_its_own_tool(produce: Produce, tmp_path: Path) -> None:
    root = shutil.copytree(produce(produced.auto_tp).root / "zero2", tmp_path / "zero2")
    code = (
        "import sys; from argparse import Namespace; from deepspeed.checkpoint.ds_to_universal import main\n"
        "main(Namespace(input_folder=f'{sys.argv[1]}/global_step2', output_folder=f'{sys.argv[1]}/universal',"
        "num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True))"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", code, str(root)], check=True, capture_output=True, env=environment)
    assert ckptkit.diff(root / "global_step2", root / "universal").is_equal


def test_without_zero_it_is_refused(produce: Produce) -> None:
    assert "without ZeRO 1 or 2" in refused(produce(produced.auto_tp).root / "zero0", Unsupported).message


def test_a_rank_without_files_is_missed(produce: Produce, tmp_path: Path) -> None:
    root = shutil.copytree(produce(produced.auto_tp).root / "zero2", tmp_path / "zero2") / "global_step2"
    for path in root.glob("*mp_rank_01*"):
        path.unlink()
    assert "expected the files of 2 ranks of tensor parallelism, found those of 1" in refused(root, Incomplete).message


def test_slices_that_drifted_apart_are_refused(produce: Produce, tmp_path: Path) -> None:
    """What every rank has whole must be the same on all of them."""
    root = shutil.copytree(produce(produced.auto_tp).root / "zero2", tmp_path / "zero2") / "global_step2"
    for path in root.glob("*mp_rank_01_optim_states.pt"):
        change(path, lambda state: state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.add_(1))
    assert "differ" in refused(root, Corrupt).message


def pieces(params: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = params[UP]["ranks"][1]["pieces"]
    return found


@pytest.mark.parametrize(
    ("alter", "kind", "message"),
    [
        (lambda found: found.update(version=2), Unsupported, "expected version 1 of AutoTP's map, found 2"),
        (lambda found: found["params"].pop(UP), Unsupported, "the map of AutoTP does not have it"),
        (lambda found: found["params"][UP]["ranks"].pop(1), Corrupt, "expected slices of 2 ranks, found 1"),
        (lambda found: pieces(found["params"]).pop(), Corrupt, "expected pieces of 96 elements, found 72"),
        (lambda found: pieces(found["params"])[0].update(scale=0.5), Unsupported, "is the parameter times 0.5"),
        (lambda found: pieces(found["params"])[0].update(source=[24, [1, 6]]), Unsupported, "is not a box of it"),
        (lambda found: pieces(found["params"])[0].update(source=[90, [6, 1]]), Corrupt, "reaches out of the shape"),
        (
            lambda found: pieces(found["params"])[0].update(source=[0, [6, 1]]),
            Corrupt,
            "pieces of the parameter overlap",
        ),
        (lambda found: pieces(found["params"])[0].update(source=[1 << 40, [6, 1]]), Corrupt, "is outside the shape"),
        (lambda found: pieces(found["params"])[0].update(source=[0, [6]]), Unsupported, "is not a box of it"),
        (lambda found: pieces(found["params"])[0].update(source=[1]), Corrupt, "found 1 values"),
        (lambda found: found["params"][UP]["ranks"][1].update(shard_shape=[4, 12]), Unsupported, "is not a box of it"),
        (lambda found: found.update(params=[]), Corrupt, "expected a dict by name or number, found"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(
    produce: Produce, tmp_path: Path, alter: Callable[[Any], Any], kind: type[CkptError], message: str
) -> None:
    root = shutil.copytree(produce(produced.auto_tp).root / "zero2", tmp_path / "zero2") / "global_step2"
    change(root / MODEL, lambda state: alter(state["universal_checkpoint_info"]["affine_map"]))
    assert re.search(message, refused(root, kind).message)
    with pytest.raises(CkptError):
        ckptkit.consolidate(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
