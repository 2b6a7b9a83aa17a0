"""The whole road on two processes, and that its checks do find what is wrong."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import Occupied
from ckptkit.training.config import TrainConfig
from ckptkit.training.metrics import StepMetrics
from ckptkit.training.smoke.checks import ADAPTER_CHECKS, CHECKS
from ckptkit.training.smoke.rank_tasks import RankAccount
from ckptkit.training.smoke.run_check import Check, run_check
from ckptkit.training.smoke.runs import SmokeRuns
from ckptkit.training.smoke.smoke import smoke
from tests.training.test_commands import ckptkit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which `ckptkit smoke --json` left run/, out/ and what it printed."""
    root = tmp_path_factory.mktemp("smoke")
    done = ckptkit(root, "smoke", "--json", "--untied", "--device", "cpu")
    assert done.returncode == 0, done.stderr + done.stdout
    (root / "printed.json").write_text(done.stdout)
    return root


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> SmokeRuns:
    """A copy of what smoke left, to damage."""
    shutil.copytree(made / "run", tmp_path / "run")
    shutil.copytree(made / "out", tmp_path / "out")
    return make_runs(tmp_path)


def make_runs(root: Path, *, heard: Sequence[RankAccount] = (), resumed: Sequence[RankAccount] = ()) -> SmokeRuns:
    """A runs in `root`, whose ranks have given these accounts."""
    (root / "room").mkdir(exist_ok=True)
    config = TrainConfig(run=root / "run", untied=True, sequence_length=128)
    runs = SmokeRuns(config, 2, root / "out", root / "room")
    runs.__dict__.update({"first_accounts": list(heard), "resumed_accounts": list(resumed)})
    return runs


def taken(rank: int, number: int, **others: Any) -> StepMetrics:
    """A step that gives no reason to complain, but for `others`."""
    usual: dict[str, Any] = {
        "loss": 9.0 - number,
        "local_loss": 9.0 - number + rank,
        "grad_norm": 1.0,
        "lr": 0.1,
        "tokens": number,
    }
    return StepMetrics(step=number, tokens_per_second=1.0, **{**usual, **others})


def account(rank: int, *steps: StepMetrics, state: tuple[dict[str, Any], dict[str, int]] | None = None) -> RankAccount:
    """What a rank tells of these steps, and of its state after the fourth."""
    return RankAccount(rank, steps, {} if state is None else {4: state})


GOOD = [[taken(rank, number) for number in range(1, 9)] for rank in (0, 1)]


LAUNCHING = {"replicas", "another world size", "full state", *ADAPTER_CHECKS}  # they start processes before they judge


def check(runs: SmokeRuns, name: str) -> Check:
    return run_check(name, lambda: CHECKS[name](runs))


def test_all_checks_pass_and_leave_run_and_export(made: Path) -> None:
    printed = json.loads((made / "printed.json").read_text())
    assert printed["ok"] is True
    assert [check["name"] for check in printed["checks"]] == list(CHECKS)
    for found in printed["checks"]:
        assert list(found) == ["name", "ok", "detail", "seconds"]
        assert found["ok"] is not False
        assert found["detail"]
    assert [checkpoint.step for checkpoint in RunFolder(made / "run").checkpoints()] == [4, 8]
    assert len(load_file(made / "out/model.safetensors")) == 21


def test_a_changed_weight_is_found(runs: SmokeRuns) -> None:
    path = runs.out / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    found = check(runs, "equal tensors")
    assert found.ok is False
    assert found.detail == "1 of 21 tensors differ, first `model.layers.1.mlp.up_proj.weight`"
    assert check(runs, "equal logits").ok is False
    assert check(runs, "equal logits in transformers").ok is not True


def test_a_lost_tensor_is_found(runs: SmokeRuns) -> None:
    path = runs.out / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, path, {"format": "pt"})
    for name in ("equal tensors", "equal logits"):
        found = check(runs, name)
        assert found.ok is False
        assert "lm_head.weight" in found.detail


def test_what_the_ranks_tell_is_judged(tmp_path: Path) -> None:
    good = [account(rank, *GOOD[rank]) for rank in (0, 1)]
    for name in ("losses are finite", "loss falls", "ranks agree"):
        assert check(make_runs(tmp_path, heard=good), name).ok is True

    def found(name: str, **others: float) -> Check:
        return check(make_runs(tmp_path, heard=[good[0], account(1, *GOOD[1][:7], taken(1, 8, **others))]), name)

    for others in ({"loss": 0.5}, {"grad_norm": 2.0}, {"lr": 0.2}, {"tokens": 9}):
        assert "the ranks disagree" in found("ranks agree", **others).detail, others
    assert "the same data" in found("ranks agree", local_loss=1.0).detail
    rising = [account(rank, *(taken(rank, number, loss=number) for number in range(1, 9))) for rank in (0, 1)]
    assert check(make_runs(tmp_path, heard=rising), "loss falls").ok is False
    endless = account(0, *GOOD[0][:7], taken(0, 8, loss=float("nan")))
    for heard in (endless, account(0, *GOOD[0][:4])):
        assert check(make_runs(tmp_path, heard=[heard]), "losses are finite").ok is False


def test_a_resumed_run_that_differs_is_found(tmp_path: Path) -> None:
    scheduler, progress = {"last_epoch": 4}, {"sequences": 32, "tokens": 100}
    first = account(0, *GOOD[0], state=(scheduler, progress))
    good = make_runs(tmp_path, heard=[first], resumed=[account(0, *GOOD[0][4:], state=(scheduler, progress))])
    assert check(good, "resume: state").ok is True
    assert check(good, "resume: losses").ok is True
    for wrong in ((scheduler, {"sequences": 31}), ({"last_epoch": 3}, progress)):
        assert check(make_runs(tmp_path, heard=[first], resumed=[account(0, state=wrong)]), "resume: state").ok is False
    for steps in ([*GOOD[0][4:7], taken(0, 8, loss=1.0 + 1e-15)], GOOD[0][5:]):
        runs = make_runs(tmp_path, heard=[first], resumed=[account(0, *steps)])
        assert check(runs, "resume: losses").ok is False


def test_checkpoints_are_compared_tensor_by_tensor(runs: SmokeRuns) -> None:
    again = runs.scratch / "resumed" / "ckpt-8"
    shutil.copytree(runs.last_checkpoint_path, again)
    found = check(runs, "resume: weights")
    assert (found.ok, found.detail) == (True, "84 tensors of model and optimizer equal, bit for bit")
    shutil.rmtree(again)
    shutil.copytree(runs.last_checkpoint_path.with_name("ckpt-4"), again)
    assert "84 of 84 tensors differ" in check(runs, "resume: weights").detail


def test_a_resharded_checkpoint_that_differs_is_found(runs: SmokeRuns) -> None:
    runs.__dict__["resharded_paths"] = [runs.last_checkpoint_path, runs.last_checkpoint_path]
    assert check(runs, "reshard").ok is True
    runs.__dict__["resharded_paths"] = [runs.last_checkpoint_path.with_name("ckpt-4"), runs.last_checkpoint_path]
    assert "84 of 84 tensors differ" in check(runs, "reshard").detail


def test_another_step_after_resharding_is_found(tmp_path: Path) -> None:
    found = make_runs(tmp_path)
    for others, is_good in (({}, True), ({"loss": 0.5}, False), ({"grad_norm": 2.0}, False)):
        found.__dict__["original_and_resharded_steps"] = [
            account(0, taken(0, 5), taken(0, 5, **others)),
            account(1, *[taken(1, 5)] * 2),
        ]
        assert check(found, "resume after reshard").ok is is_good, others
    found.__dict__["original_and_resharded_steps"] = [account(0, taken(0, 5))]
    assert check(found, "resume after reshard").ok is False


def test_an_export_that_does_not_come_back_is_found(runs: SmokeRuns) -> None:
    found = check(runs, "round trip")
    assert (found.ok, found.detail.count("bit for bit")) == (True, 2)
    path = runs.out / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, {"format": "pt"})
    shutil.rmtree(runs.scratch)
    detail = check(runs, "round trip").detail
    assert "model.safetensors: tensor `model.model.norm.weight`: expected CRC-32 " in detail
    assert " of the 256 bytes at " in detail
    (runs.out / "ckptkit.json").unlink()  # without which nothing shows that the file was changed
    shutil.rmtree(runs.scratch)
    assert check(runs, "round trip").detail == "1 of 21 tensors differ, first `model.model.norm.weight`"


def test_memory_beyond_the_estimate_is_found(runs: SmokeRuns) -> None:
    runs.first_accounts.append(RankAccount(0, parameters=1_000_000, optimizer=2_000_000))
    found = check(runs, "memory as estimated")
    assert found.ok is False
    assert found.detail.startswith("expected 2")
    assert found.detail.endswith("of moments (estimate), found 1,000,000 and 2,000,000")


def test_what_was_never_made_fails_every_check_with_a_reason(tmp_path: Path) -> None:
    absent = make_runs(tmp_path)
    for name in CHECKS.keys() - LAUNCHING:
        found = check(absent, name)
        assert found.ok is False, name
        assert found.detail


def test_a_damaged_shard_fails_consolidation_and_names_the_file(runs: SmokeRuns) -> None:
    (shard, *_) = sorted(runs.last_checkpoint_path.glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    found = check(runs, "consolidate")
    assert found.ok is False
    assert shard.name in found.detail


def test_nothing_but_an_earlier_smoke_is_replaced(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    (run / "precious").touch()
    with pytest.raises(Occupied, match="not made by a smoke test"):
        smoke(run, out, overwrite=True)
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(Occupied, match="exists"):
        smoke(tmp_path / "another", out)
    assert (run / "precious").exists()
    assert not (tmp_path / "another").exists()


def test_the_last_checkpoint_is_the_one_compared(runs: SmokeRuns) -> None:
    shutil.rmtree(runs.last_checkpoint_path)
    earlier = make_runs(runs.config.run.parent)
    assert earlier.last_checkpoint_path.name == "ckpt-4"
    assert not torch.equal(earlier.trained_model.lm_head.weight, runs.exported_tensors["lm_head.weight"])
