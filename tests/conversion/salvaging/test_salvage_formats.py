"""What is saved of checkpoints that libraries have left, one file of which is gone, cut or garbage.

What is whole is what the whole checkpoint holds, which the tests of its format hold against the live state.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptkit
from ckptkit import convert, open_layout
from ckptkit.errors import CkptError
from tests.conftest import Produce
from tests.conversion.salvaging.damage import assert_truth, cut, flip, load_dcp
from tests.producers import Producer, Truth
from tests.tiers import nightly_but
from tests.trainers import produced_megatron, produced_meta, produced_packages, produced_zero

ITEMS = produced_packages.by_torch_checkpointing
MEGATRON, META = produced_megatron.megatron, produced_meta.llama
LEGACY = f"legacy/{produced_megatron.STEP}"


def libraries() -> list[tuple[str, Producer, str, str]]:
    """Each library, with its producer, the place of a checkpoint, and a file in it."""
    return [
        ("torch_checkpointing", ITEMS, "torch", "model_1.pt"),
        ("torch_checkpointing", ITEMS, "torch", "optimizer_0.pt"),
        ("torch_checkpointing", ITEMS, "safetensors", "model_1.safetensors"),
        ("fairscale", META, "llama2", "consolidated.00.pth"),
        ("fairscale", META, "llama3", "consolidated.01.pth"),
        ("megatron.core", MEGATRON, f"moe/{LEGACY}", "mp_rank_01/*"),
        ("megatron.core", MEGATRON, f"dense/{LEGACY}", "mp_rank_01/*"),
        ("deepspeed", produced_zero.universal, "zero1/global_step2_universal", "zero/*/exp_avg.pt"),
        ("deepspeed", produced_zero.universal, "zero3/global_step2_universal", "zero/*/fp32.pt"),
    ]


OF_EACH = {case[0]: case for case in libraries()}.values()  # the last of each library


@pytest.mark.slow
@pytest.mark.parametrize(("library", "producer", "place", "pattern"), nightly_but(OF_EACH, libraries()))
def test_all_else_is_kept_and_the_rest_filled(
    library: str, producer: Producer, place: str, pattern: str, produce: Produce, tmp_path: Path
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    whole = produce(producer).root / place
    truth = {name: lazy.torch() for name, lazy in ckptkit.open(whole).items()}
    file = max(whole.glob(pattern)).relative_to(whole)
    in_it = {name for name, one in open_layout(whole).tensors.items() if any(c.path == str(file) for c in one.chunks)}
    assert in_it
    root = Path(shutil.copytree(whole, tmp_path / "damaged" / whole.name))
    for how in ("garbage", "cut", "gone") if file.name != "exp_avg.pt" else ("garbage",):  # which nothing else names
        damage(root / file, how)
        done = convert(root, tmp_path / how, to="dcp", salvage=True, sync=False)
        assert done.salvaged is not None
        lost = {one.name for one in done.salvaged.lost} & truth.keys()
        rounded = {one.name for one in done.salvaged.filled}
        assert lost | rounded
        assert lost | rounded <= in_it
        assert_kept(tmp_path / how, truth, lost, rounded)
    done = convert(root, tmp_path / "filled", to="dcp", salvage=True, fill_from=whole, sync=False)
    assert_kept(tmp_path / "filled", truth, set(), rounded)


def damage(file: Path, how: str) -> None:
    """Let a file be something else, cut or gone."""
    if how == "gone":
        file.unlink()
    elif how == "garbage":
        file.write_bytes(b"?")
    else:
        cut(file, 7)


def assert_kept(out: Path, truth: Truth, lost: set[str], rounded: set[str]) -> None:
    """All but what is lost is there, and true; the judge is torch's own loader."""
    found = load_dcp(out)
    assert found.keys() == truth.keys() - lost
    assert_truth({name: value for name, value in found.items() if name in truth and name not in rounded}, truth)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.attention_norm.weight"])
def test_another_rank_s_copy_is_taken(name: str, produce: Produce, tmp_path: Path) -> None:
    pytest.importorskip("fairscale", reason="fairscale is not installed")
    whole = produce(META).root / "llama3"
    root = Path(shutil.copytree(whole, tmp_path / "damaged"))
    (chunk,) = open_layout(root).tensors[name].chunks
    flip(root / chunk.path, chunk.offset)
    done = convert(root, tmp_path / "out", to="dcp", salvage=True, sync=False)
    assert done.salvaged is not None
    assert (done.salvaged.is_fully_from_source, done.salvaged.repaired) == (True, (name,))
    assert_kept(tmp_path / "out", {name: lazy.torch() for name, lazy in ckptkit.open(whole).items()}, set(), set())


def test_a_stage_of_a_pipeline_takes_its_layers_along(produce: Produce, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    made = produce(MEGATRON)
    root = Path(shutil.copytree(made.root / "stages" / produced_megatron.STEP, tmp_path / "damaged"))
    shutil.rmtree(root / "mp_rank_00_001")
    with pytest.raises(CkptError, match="no rank of stage 1 of the pipeline can be read"):
        convert(root, tmp_path / "out", to="dcp", salvage=True)
    assert not (tmp_path / "out").exists()
