"""Composer, OLMo-core, torchtitan, torchtune, ColossalAI: whose it is, its step and ranks, and what is the model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.runs.ls import ls
from tests.conftest import Produce
from tests.conversion.judges import raw
from tests.trainers import produced_trees


def read(path: Path) -> dict[str, bytes]:
    return {name: raw(lazy.torch()) for name, lazy in ckptkit.open(path).items()}


def expect(truth: dict[str, Tensor], model: str, optimizer: str) -> dict[str, bytes]:
    """The truth by a trainer's keys."""
    keys = {"model.": model, "optimizer.": optimizer}
    pairs = [(re.match(r"\w+\.", name), name) for name in truth]
    return {keys[found[0]] + name.removeprefix(found[0]): raw(truth[name]) for found, name in pairs if found}


CASES: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "composer/ep0-ba5": (
        "Composer",
        {"step": 5, "world_size": 2, "optimizer_keys": "names"},
        ("state.model.", "state.optimizers.AdamW."),
    ),
    "composer/ep0-ba6-rank0.pt": (
        "Composer",
        {"step": 6, "optimizer_keys": "names"},
        ("state.model.", "state.optimizers.AdamW."),
    ),
    "newer/ep0-ba7": ("Composer", {"step": 7, "world_size": 2, "optimizer_keys": "names"}, ("", "")),
    "olmo/step10": ("OLMo-core", {"step": 10, "world_size": 2, "optimizer_keys": "names"}, ("model.", "optim.")),
    "torchtitan/step-20": (
        "torchtitan",
        {"step": 20, "world_size": 2, "optimizer_keys": "names"},
        ("", "optimizer."),
    ),
}
each_tree = pytest.mark.parametrize("place", CASES)


@each_tree
def test_it_is_known(produce: Produce, place: str) -> None:
    made = produce(produced_trees.trees)
    trainer, facts, keys = CASES[place]
    found = ckptkit.inspect(made.root / place)
    assert found.trainer == trainer
    assert {name: getattr(found, name) for name in facts} == facts
    assert found.unread == ()
    assert {"model", "optimizer"} <= set(found.groups)
    tensors = read(made.root / place)
    wanted = expect(made.truth, *keys)
    assert {name: tensors[name] for name in wanted if name in tensors} == wanted
    assert found.groups["model"].entries == sum(name.startswith("model.") for name in made.truth)


@each_tree
def test_it_is_sound_and_comes_out(produce: Produce, place: str, tmp_path: Path) -> None:
    made = produce(produced_trees.trees)
    assert all(part.is_ok for part in ckptkit.verify(made.root / place))
    ckptkit.consolidate(made.root / place, tmp_path / "hf")
    wanted = {n.removeprefix("model."): raw(t) for n, t in made.truth.items() if n.startswith("model.")}
    assert read(tmp_path / "hf") == wanted
    ckptkit.reshard(made.root / place, tmp_path / "three", to=3)
    there = read(tmp_path / "three")
    assert there.items() <= read(made.root / place).items()
    assert len(there) >= len(made.truth)
    ckptkit.convert(made.root / place, tmp_path / "pt", to="pt")
    assert len(read(tmp_path / "pt")) == len(read(made.root / place))


@pytest.mark.parametrize(
    ("run", "steps", "latest"),
    [
        ("composer", [5, 6], "ep0-ba6-rank0.pt"),
        ("newer", [7], "ep0-ba7"),
        ("olmo", [10], "step10"),
        ("torchtitan", [20], "step-20"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*`latest-rank0.symlink` names ep0-ba5")  # of an object store; the link names ba6
def test_runs_are_listed(produce: Produce, run: str, steps: list[int], latest: str) -> None:
    root = produce(produced_trees.trees).root / run
    found = ls(root)
    assert [(one.step, one.is_complete) for one in found.checkpoints] == [(step, True) for step in steps]
    assert found.latest is not None
    assert found.latest.name == latest == ckptkit.inspect(root).whole.name


def test_composers_links_say_which_is_meant(produce: Produce) -> None:
    """A link on a disk, and a file that stands for one in a store."""
    named = {one.step: one.named_by for one in ls(produce(produced_trees.trees).root / "composer").checkpoints}
    assert named == {5: ("latest-rank0.symlink",), 6: ("latest-rank0.pt",)}


def test_olmo_finds_all_that_it_needs_again(produce: Produce, tmp_path: Path) -> None:
    root = produce(produced_trees.trees).root / "olmo"
    done = ckptkit.reshard(root, tmp_path / "step10", to=4)
    assert {".metadata.json", "config.json", "train/rank0.pt", "train/rank1.pt"} <= done.files.keys()
    assert (tmp_path / "step10" / ".metadata.json").read_bytes() == (root / "step10" / ".metadata.json").read_bytes()


def test_olmos_own_files_are_known(produce: Produce, tmp_path: Path) -> None:
    """Its config.json is not transformers', so it is not compared with the one in the base."""
    root, base = tmp_path / "step10", tmp_path / "base"
    shutil.copytree(produce(produced_trees.trees).root / "olmo" / "step10", root)
    (root / "data_paths.txt").write_text("tokens.npy")
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "own", "architectures": ["Own"]}')
    done = ckptkit.consolidate(root, tmp_path / "out", base=str(base), names="keep")
    assert {left.name for left in done.left_behind} == {".metadata.json", "data_paths.txt", "train"}
    assert all(left.is_expected for left in done.left_behind)
    assert not any("config.json" in words for words in done.warnings)


def test_newer_composer_keeps_its_two_directories(produce: Produce, tmp_path: Path) -> None:
    done = ckptkit.convert(produce(produced_trees.trees).root / "newer", tmp_path / "ep0-ba7", to="dcp", world_size=1)
    assert {"model/.metadata", "optim/.metadata", "composer_metadata.json", "resumption.pkl"} <= done.files.keys()
    assert ckptkit.inspect(tmp_path / "ep0-ba7").optimizer_keys == "names"


def test_torchtune_and_colossalai_have_the_hubs_names(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_trees.hugging_face_trees)
    wanted = {name: raw(tensor) for name, tensor in made.truth.items()}
    ckptkit.consolidate(made.root / "torchtune", tmp_path / "tune")
    assert read(tmp_path / "tune") == wanted
    assert [one.step for one in ls(made.root / "torchtune").checkpoints] == [0, 1, None]
    recipe = ckptkit.inspect(made.root / "torchtune" / "recipe_state")
    assert (recipe.trainer, recipe.optimizer_keys) == ("torchtune", "ids")
    colossal = made.root / "colossal" / "epoch0-step30"
    ckptkit.consolidate(colossal, tmp_path / "colossal")
    assert read(tmp_path / "colossal") == wanted
    found = ckptkit.inspect(colossal)
    assert found.step == 30
    assert not found.unread
    for order, keys in ((None, "ids"), ("model", "names")):  # users build the optimizer
        ckptkit.convert(colossal, tmp_path / keys, to="dcp", optimizer_order=order)
        assert (found.optimizer_keys, ckptkit.inspect(tmp_path / keys).optimizer_keys) == ("ids", keys)


def test_torch_goes_on_from_resharded_ones(produce: Produce, tmp_path: Path) -> None:
    """Torch's own loader, of what torchtitan would ask for."""
    import torch.distributed.checkpoint as dcp

    made = produce(produced_trees.trees)
    ckptkit.reshard(made.root / "torchtitan", tmp_path / "step-20", to=1)
    wanted = expect(made.truth, "", "optimizer.")
    state = {name: torch.zeros_like(made.truth[f"model.{name}"]) for name in wanted if f"model.{name}" in made.truth}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=tmp_path / "step-20")
    assert {name: raw(tensor) for name, tensor in state.items()} == {name: wanted[name] for name in state}
