"""Experts that DeepSpeed's AutoEP fused against the state that its ranks had: every tensor, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.errors import CkptError, Unsupported
from tests.conftest import Produce
from tests.plugins.deepspeed.test_deepspeed import MODEL, OPTIMIZER, assert_holds, change, refused, truth_of
from tests.trainers import produced_auto_experts as auto
from tests.trainers.produced_zero import WIDTH

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed with AutoEP is not installed")
pytestmark = pytest.mark.nightly

EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
FUSED = "layers.0.mlp.experts.w1"


@pytest.mark.parametrize("kind", auto.KINDS)
def test_holds_the_live_state(kind: str, produce: Produce) -> None:
    made = produce(auto.auto_experts)
    layout = open_layout(made.root / kind)
    truth = truth_of(made.truth, kind)
    assert_holds(layout, truth)
    assert {name for name in layout.tensors if not name.endswith(".step")} == truth.keys()
    assert layout.tensors[f"model.{FUSED}"].spec.shape == (auto.EXPERTS, auto.INNER, WIDTH)


@pytest.mark.parametrize("kind", auto.KINDS)
def test_copies_are_those_of_the_masters(kind: str, produce: Produce) -> None:
    root = produce(auto.auto_experts).root / kind
    (found,) = ckptkit.verify(root)
    assert (found.is_ok, found.unchecked_bytes) == (True, 0)
    assert (f"model.{FUSED}" in open_layout(root).twins) == (kind != "zero0")


def test_it_becomes_a_model_and_dcp_but_no_universal_checkpoint(produce: Produce, tmp_path: Path) -> None:
    made = produce(auto.auto_experts)
    root = made.root / "data-first"
    done = ckptkit.consolidate(root, tmp_path / "out")
    assert ckptkit.open(done.output)[FUSED].torch().equal(made.truth[f"data-first/model.{FUSED}"])
    ckptkit.convert(root, tmp_path / "dcp", to="dcp")
    assert ckptkit.diff(root, tmp_path / "dcp").is_equal
    for source in (root, tmp_path / "dcp"):
        with pytest.raises(Unsupported, match="experts that AutoEP fused"):
            ckptkit.convert(source, tmp_path / "universal", to="universal")


def test_the_universal_checkpoint_of_its_own_tool(produce: Produce, tmp_path: Path) -> None:
    made = produce(auto.auto_experts)
    code = (
        "import sys; from argparse import Namespace; from deepspeed.checkpoint.ds_to_universal import main\n"
        "main(Namespace(input_folder=sys.argv[1], output_folder=sys.argv[2], num_extract_workers=1,"
        "num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True))"
    )
    source, out = made.root / "zero2" / "global_step2", tmp_path / "global_step2_universal"
    subprocess.run(
        [sys.executable, "-c", code, str(source), str(out)],
        check=True,
        capture_output=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert_holds(open_layout(out), truth_of(made.truth, "zero2"))


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path, produce: Produce) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        source = produce(auto.auto_experts).root / kind / "global_step2"
        return Path(shutil.copytree(source, tmp_path / "global_step2"))

    return make


@pytest.mark.parametrize("name", [EXPERT.format(1, 3), OPTIMIZER.format(2)])
def test_a_missing_file_is_named(name: str, copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    (path,) = root.glob(f"*{name}")
    path.unlink()
    error = refused(root)
    assert error.path == path
    assert "is missing" in error.message
    assert not Checkpoint.at(root).is_complete


def test_files_of_experts_that_were_exchanged_are_told(copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    shutil.copy(root / EXPERT.format(0, 1), root / EXPERT.format(0, 0))
    error = refused(root)
    assert (error.path, error.tensor) == (root / EXPERT.format(0, 0), f"{FUSED}.0")


def test_an_expert_of_another_shape_is_told(copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    change(root / EXPERT.format(0, 2), lambda state: state.update({f"{FUSED}.2": state[f"{FUSED}.2"][:2].clone()}))
    assert "as expert 0 has" in refused(root).message


def place_out_of_order(layer: Any) -> None:
    first, second = layer["expert_placement"]["ranks"]
    first["experts"], second["experts"] = second["experts"], first["experts"]


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda layer: layer.update(num_local_experts=3), "expected 4 experts on 2 ranks, found 3 on each rank"),
        (lambda layer: layer.update(ep_size=4, num_local_experts=1, expert_placement=None), "expected experts on 4"),
        (lambda layer: layer.update(expert_key_prefix=7), "expert_key_prefix"),
        (lambda layer: layer.update(num_experts=8, num_local_experts=4, expert_placement=None), "expected layers of"),
        (place_out_of_order, "out of their order"),
        (lambda layer: layer.update(checkpoint_format="zero3_partitioned"), "AutoEP with ZeRO 3"),
    ],
)
def test_layers_that_contradict_the_experts(alter: Any, message: str, copy: Callable[[str], Path]) -> None:
    root = copy("zero1")
    change(root / MODEL, lambda state: alter(state["ds_autoep_layers"][0]))
    with pytest.raises(CkptError, match=message) as raised:
        open_layout(root)
    assert raised.value.exit_code == 3
    assert raised.value.path is not None


@pytest.mark.parametrize("kind", ["zero1", "zero0"])
def test_a_lost_expert_takes_only_what_has_no_master(
    kind: str, copy: Callable[[str], Path], produce: Produce, tmp_path: Path
) -> None:
    """Without masters the tensors of its layer lose one slice; with masters nothing is lost."""
    root = copy(kind)
    (root / EXPERT.format(0, 1)).unlink()
    done = ckptkit.consolidate(root, tmp_path / "out", salvage=True, names="keep")
    assert done.salvaged is not None
    assert {one.path for one in done.salvaged.lost} == {root / EXPERT.format(0, 1)}
    names = {one.name for one in done.salvaged.lost if one.name}
    assert names == (set() if kind == "zero1" else {f"layers.0.mlp.experts.w{number}" for number in (1, 2, 3)})
    truth = truth_of(produce(auto.auto_experts).truth, kind)
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert tensor.equal(truth[f"model.{name}"].to(tensor.dtype)), name
