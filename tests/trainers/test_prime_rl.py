"""prime-rl: its checkpoints with two optimizers, and its broadcasts, of which an unfinished one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.errors import Incomplete
from ckptkit.runs.ls import ls
from tests import command
from tests.conftest import Produce
from tests.conversion.judges import raw
from tests.trainers import produced_rl


def read(path: Path) -> dict[str, bytes]:
    return {name: raw(lazy.torch()) for name, lazy in ckptkit.open(path).items()}


def test_it_is_known_with_both_optimizers(produce: Produce) -> None:
    made = produce(produced_rl.prime_rl)
    found = ckptkit.inspect(made.root / "checkpoints")
    assert (found.trainer, found.step, found.world_size) == ("prime-rl", 4, 2)
    assert (found.optimizer_keys, found.unread) == ("names", ())
    assert read(made.root / "checkpoints" / "step_4") == {name: raw(tensor) for name, tensor in made.truth.items()}
    states = {name.rsplit(".", 1)[1] for name in made.truth if name.startswith("app.optimizers.state.up")}
    assert states == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


def test_the_model_comes_out_and_the_rest_is_named(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_rl.prime_rl)
    done = ckptkit.consolidate(made.root / "checkpoints", tmp_path / "hf")
    under = "app.model."
    wanted = {name.removeprefix(under): raw(each) for name, each in made.truth.items() if name.startswith(under)}
    assert read(tmp_path / "hf") == wanted
    assert {left.name for left in done.left_behind} == {
        "orchestrator/progress.pt",
        "trainer/dataloader/rank_0.pt",
        "trainer/dataloader/rank_1.pt",
    }
    assert all(left.is_expected for left in done.left_behind)


def test_it_goes_on_with_other_ranks(produce: Produce, tmp_path: Path) -> None:
    """The loader's states go along: a rank without one takes that of rank 0."""
    made = produce(produced_rl.prime_rl)
    done = ckptkit.reshard(made.root / "checkpoints", tmp_path / "step_4", to=3)
    assert {"orchestrator/progress.pt", "trainer/dataloader/rank_0.pt", "trainer/.metadata"} <= done.files.keys()
    assert read(tmp_path / "step_4") == {name: raw(tensor) for name, tensor in made.truth.items()}


def test_two_optimizers_become_one_list_of_groups(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_rl.prime_rl)
    ckptkit.convert(made.root / "checkpoints", tmp_path, to="pt", optimizer_keys="ids", overwrite=True)
    optimizer = torch.load(tmp_path / "trainer" / "state.pt")["app"]["optimizers"]
    assert [("ns_steps" in group, group["params"]) for group in optimizer["param_groups"]] == [
        (True, [0, 1]),
        (False, [2]),
    ]
    assert raw(optimizer["state"][0]["momentum_buffer"]) == raw(
        made.truth["app.optimizers.state.up.weight.momentum_buffer"]
    )


def test_an_unfinished_broadcast_is_refused(produce: Produce, tmp_path: Path) -> None:
    root = produce(produced_rl.prime_rl).root / "broadcasts"
    assert [(one.step, one.is_complete) for one in ls(root).checkpoints] == [(4, True), (5, False)]
    assert (ckptkit.inspect(root).step, ckptkit.inspect(root).trainer) == (4, "prime-rl, a broadcast")
    with pytest.raises(Incomplete, match="expected the file `STABLE`, found none"):
        ckptkit.consolidate(root / "step_5", tmp_path / "hf")
    found = {part.path.name: part.is_ok for part in ckptkit.verify(root / "step_5")}
    assert found == {"step_5": False}


def test_the_shell_says_it(produce: Produce) -> None:
    place = produce(produced_rl.prime_rl).root / "broadcasts" / "step_5"
    done = command.ckptkit("inspect", ".", cwd=place)
    assert done.returncode == 3
    assert "unfinished: expected the file `STABLE`" in done.stderr
