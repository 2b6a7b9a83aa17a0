"""What is left of a checkpoint that was demoted, bit for bit; and that a killed one is all old or all new."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ckptkit import consolidate, list_run, prune, verify
from ckptkit.errors import Corrupt, NoRoom, NotACheckpoint
from ckptkit.runs.prune import Pruned
from ckptkit.storage import Writer
from ckptkit.training.config import TrainConfig
from ckptkit.training.resume import find_resume_candidates
from ckptkit.training.saving.run import Run
from tests import producers
from tests.conftest import Produce
from tests.producers import save_alone
from tests.storage.states import flip

FORMS = ("sharded", "full", "hf")
CONFIG = json.dumps({"model_type": "ours", "architectures": ["Ours"]}).encode()


def make_run(root: Path, form: str, steps: int = 3) -> dict[int, dict[str, Tensor]]:
    """A run with a checkpoint of each step, and the weights that it had."""
    torch.manual_seed(0)
    weights = {}
    run = Run(root, state_dict=form, files={"config.json": CONFIG})
    for step in range(1, steps + 1):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).to(torch.float16))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        run.save(step, model, optimizer, metrics={"loss": 1 / step})
        weights[step] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return weights


def narrow(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floats of more than 16 bits in bfloat16, the others as they are."""
    return {name: t.to(torch.bfloat16) if t.dtype == torch.float32 else t for name, t in weights.items()}


def demote(root: Path, last: int = 1) -> Pruned:
    return prune(root, keep_last=last, demote=True, yes=True)


def assert_demoted(checkpoint: Path, weights: Mapping[str, Tensor]) -> None:
    found, wanted = load_file(checkpoint / "model.safetensors"), narrow(weights)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("form", FORMS)
def test_the_weights_are_left_and_all_that_goes_with_them(tmp_path: Path, form: str) -> None:
    weights = make_run(tmp_path, form)
    before = {one.path: one for one in list_run(tmp_path).checkpoints}
    done = demote(tmp_path)
    assert [entry.step for entry in done.keep] == [3]
    assert [entry.step for entry in done.demote] == [2, 1]
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt-1", "ckpt-2", "ckpt-3"}
    for entry in done.demote:
        (part,) = verify(entry.path)
        assert (part.is_ok, part.has_manifest, part.unchecked_bytes) == (True, True, 0)
        assert {file.name for file in entry.path.iterdir()} == {
            *("model.safetensors", "config.json", "metrics.json", "ckptkit.json")
        }
        assert_demoted(entry.path, weights[entry.step or 0])
        assert json.loads((entry.path / "config.json").read_text())["model_type"] == "ours"
    after = {one.path: one for one in list_run(tmp_path).checkpoints}
    for path, one in after.items():
        assert one.metrics == before[path].metrics
        assert one.saved_at == pytest.approx(before[path].saved_at, abs=1e-3)
        assert one.is_weights_only == (one.step != 3)
    freed = sum(before[path].nbytes - one.nbytes for path, one in after.items())
    assert done.freed_bytes == sum(entry.freed_bytes for entry in done.demote) == freed


@pytest.mark.parametrize("form", FORMS)
def test_it_is_said_before_it_is_done(tmp_path: Path, form: str) -> None:
    make_run(tmp_path, form)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    plan = prune(tmp_path, keep_last=1, demote=True)
    assert [entry.step for entry in plan.demote] == [2, 1]
    assert (plan.delete, plan.deleted, plan.freed_bytes) == ((), False, 0)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    done = demote(tmp_path)
    assert [entry.freed_bytes for entry in plan.demote] == [entry.freed_bytes for entry in done.demote]


def test_once_is_enough_and_pins_hold(tmp_path: Path) -> None:
    weights = make_run(tmp_path, "sharded")
    (tmp_path / "best").symlink_to("ckpt-2")
    demote(tmp_path)
    inode = (tmp_path / "ckpt-1").stat().st_ino
    again = demote(tmp_path)
    assert again.demote == ()
    assert [(entry.step, entry.reason) for entry in again.keep] == [
        (3, "one of the last 1"),
        (2, "`best` names it"),
        (1, "only weights already"),
    ]
    assert (tmp_path / "ckpt-1").stat().st_ino == inode
    assert_demoted(tmp_path / "ckpt-1", weights[1])


@pytest.mark.slow
def test_the_parts_of_accelerate_become_one_model(produce: Produce, tmp_path: Path) -> None:
    truth = produce(producers.accelerate).truth
    for step in (1, 2):
        shutil.copytree(produce(producers.accelerate).root, tmp_path / f"checkpoint-{step}")
    log = [{"step": 1, "loss": 2.5}]
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": log}))
    demote(tmp_path)
    weights = {name.removeprefix("model."): t for name, t in truth.items() if name.startswith("model.")}
    assert_demoted(tmp_path / "checkpoint-1", weights)
    assert list_run(tmp_path).checkpoints[0].metrics == {"loss": 2.5}


def test_names_that_look_like_globs_keep_their_dtype(tmp_path: Path) -> None:
    weights = {"a[0]*?=keep": torch.ones(3, dtype=torch.float16), "a0": torch.ones(3), "n": torch.arange(3)}
    for step in (1, 2):
        save_alone({"model": weights, "optimizer": {"state": torch.ones(100)}}, tmp_path / f"ckpt-{step}")
    demote(tmp_path)
    assert_demoted(tmp_path / "ckpt-1", weights)


def test_what_has_no_model_or_would_not_shrink_is_kept(tmp_path: Path) -> None:
    save_alone({"optimizer": {"param_groups": {"lr": torch.ones(9)}}}, tmp_path / "ckpt-1")
    save_alone({"actor": {"w": torch.ones(9)}, "critic": {"w": torch.ones(9)}}, tmp_path / "ckpt-2")
    save_alone({"model": {"w": torch.ones(9)}}, tmp_path / "ckpt-3")
    done = demote(tmp_path)
    reasons = {entry.step: entry.reason for entry in done.keep}
    assert reasons[1].startswith("cannot be demoted: expected model weights")
    assert reasons[2].startswith("cannot be demoted: several entries could be the model: actor, critic")
    assert done.demote == ()


def test_another_checkpoint_or_a_link_inside_is_not_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_alone({"model": {"w": torch.ones(99)}, "optimizer": {"m": torch.ones(99)}}, tmp_path / f"ckpt-{step}")
    shutil.copytree(tmp_path / "ckpt-3", tmp_path / "ckpt-1" / "ckpt-7")
    (tmp_path / "ckpt-2" / "best").symlink_to(tmp_path / "ckpt-3")
    done = demote(tmp_path)
    reasons = {entry.step: entry.reason for entry in done.keep}
    assert reasons[1] == "cannot be demoted: `ckpt-7` would be deleted (a checkpoint of its own)"
    assert reasons[2] == "cannot be demoted: `best` would be deleted (not a regular file)"
    assert (tmp_path / "ckpt-1" / "ckpt-7" / ".metadata").exists()


def test_what_is_damaged_stays_as_it_was(tmp_path: Path) -> None:
    weights = torch.arange(1 << 18, dtype=torch.float32)  # more than `prune` reads when it looks what is whole
    for step in (1, 2, 3):
        save_alone({"model": {"w": weights}, "optimizer": {"m": weights}}, tmp_path / f"ckpt-{step}")
    flip(tmp_path / "ckpt-2" / "__0_0.distcp", 500_000)
    before = {file.name: file.read_bytes() for file in (tmp_path / "ckpt-2").iterdir()}
    with pytest.raises(Corrupt, match="CRC-32"):
        demote(tmp_path)
    assert {file.name: file.read_bytes() for file in (tmp_path / "ckpt-2").iterdir()} == before
    assert (tmp_path / "ckpt-1" / "model.safetensors").is_file()  # the older one's turn came first
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt-1", "ckpt-2", "ckpt-3"}


def test_what_does_not_read_as_it_was_written_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, "sharded")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def damage(_: Path, model: Path) -> None:
        data = bytearray((model / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (model / "model.safetensors").write_bytes(data)

    monkeypatch.setattr("ckptkit.runs.demote.add_metrics_to_model", damage)
    with pytest.raises(Corrupt, match="CRC-32"):
        demote(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_full_disk_is_said_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, "sharded")

    def fail(fd: int, _offset: int, _length: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(NoRoom) as full:
        demote(tmp_path)
    assert full.value.path == tmp_path / "ckpt-1" / "model.safetensors"


@pytest.mark.parametrize("form", FORMS)
def test_no_training_goes_on_from_weights_alone_and_none_deletes_them(tmp_path: Path, form: str) -> None:
    make_run(tmp_path, form)
    demote(tmp_path)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).to(torch.float16))
    run = Run(tmp_path, state_dict=form, keep_last=1)
    assert run.load(model, torch.optim.AdamW(model.parameters())) == 3
    run.save(4, model)
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt-1", "ckpt-2", "ckpt-4"}
    for path in (tmp_path / "ckpt-1", None):
        with pytest.raises(NotACheckpoint, match="contains only weights"):
            run.load(model, path=path)
        shutil.rmtree(tmp_path / "ckpt-4", ignore_errors=True)
    with pytest.raises(NotACheckpoint, match="contains only weights"):
        find_resume_candidates(TrainConfig(run=tmp_path, resume="auto"))


def test_the_newest_to_go_on_from_stays_where_a_newer_one_is_weights(tmp_path: Path) -> None:
    make_run(tmp_path, "sharded", steps=4)
    demote(tmp_path)
    shutil.rmtree(tmp_path / "ckpt-4")
    make_run(tmp_path / "other", "sharded", steps=2)
    shutil.rmtree(tmp_path / "ckpt-2")
    shutil.move(tmp_path / "other" / "ckpt-2", tmp_path / "ckpt-2")
    done = prune(tmp_path, keep_last=1, yes=True)
    assert [(entry.step, entry.reason) for entry in done.keep] == [
        (3, "one of the last 1"),
        (2, "the newest to go on from"),
    ]


@pytest.mark.slow
def test_killed_at_any_moment_each_is_all_old_or_all_new(tmp_path: Path) -> None:
    """Killed as soon as one more name has appeared in the run, at one after the other of those that come and go."""
    root, kept = tmp_path / "run", tmp_path / "kept"
    weights = make_run(kept, "sharded", steps=2)
    old = {file.name: file.read_bytes() for file in (kept / "ckpt-1").iterdir()}
    command = [sys.executable, "-m", "ckptkit", "prune", str(root), "--keep-last", "1", "--demote", "--yes"]
    states: set[str] = set()
    for moment in range(2, 40, 12):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(kept, root)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
            seen: list[frozenset[str]] = []
            while running.poll() is None and len(seen) < moment:
                now = frozenset(str(path.relative_to(root)) for path in look(root))
                if not seen or now != seen[-1]:
                    seen.append(now)
            running.send_signal(signal.SIGKILL)
        if all((root / "ckpt-1" / name).is_file() for name in old):
            assert {file.name: file.read_bytes() for file in (root / "ckpt-1").iterdir()} == old
            states.add("old")
        else:
            assert_demoted(root / "ckpt-1", weights[1])
            assert verify(root / "ckpt-1")[0].is_ok
            states.add("new")
        demote(root)
        assert_demoted(root / "ckpt-1", weights[1])
        assert {path.name for path in root.iterdir()} == {"ckpt-1", "ckpt-2"}
        if len(states) == 2 and running.returncode == 0:
            break
    assert "old" in states


def look(root: Path) -> list[Path]:
    """Whatever is in a directory, while others change it."""
    found = []
    for folder, folders, files in os.walk(root):
        found += [Path(folder, name) for name in (*folders, *files)]
    return found


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("custom_checkpoint_0.pkl", ("shadow",)),
        ("extra_state.pt", ()),
        ("train_state.pt", ("ema",)),
        ("optimizer.safetensors", ()),
        ("optim", ("ema",)),
        ("", ("optim_ema",)),
        ("", ("train_state", "ema")),
    ],
)
def test_an_average_that_is_named_like_training_state_is_kept(tmp_path: Path, name: str, keys: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    average: dict[str, Any] = {key: tensor * 2 for key, tensor in model.items()}
    for key in reversed(keys):
        average = {key: average}
    for step in (1, 2):
        checkpoint = tmp_path / f"ckpt-{step}"
        save_alone({"model": model, **({} if name else average)}, checkpoint)
        if name == "optim":
            save_alone(average, checkpoint / name)
        elif name.endswith(".safetensors"):
            save_file(dict(average), checkpoint / name)
        elif name:
            torch.save(average, checkpoint / name)
    done = demote(tmp_path)
    assert [entry.reason for entry in done.keep][1:] == [done.keep[1].reason]
    assert "cannot be demoted: `" in done.keep[1].reason
    assert "(a copy of the model's weights, such as an average)" in done.keep[1].reason
    assert not done.demote
    done_alone = consolidate(tmp_path / "ckpt-2", tmp_path / "out")
    assert any("a copy of the model's weights" in text for text in done_alone.warnings)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", [*FORMS, "writer"])
@pytest.mark.parametrize("kind", ["average", "nested", "list", "another model"])
def test_weights_in_the_state_of_an_object_are_kept(tmp_path: Path, kind: str, form: str) -> None:
    """`Run` stores such a state as one entry, `Writer` as tensors; both beside a Hugging Face model if asked for it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    average = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    states: dict[str, dict[Any, Any]] = {
        "average": average,
        "nested": {"decay": 0.9, "ema": average},
        "list": {"shadow_params": list(average.values())},
        "another model": {"critic.weight": torch.ones(64, 64)},
    }
    run = Run(tmp_path, state_dict="hf" if form == "writer" else form, files={"config.json": CONFIG})
    for step in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        if form == "writer":
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra": states[kind]}
            writer = Writer(tmp_path / f"ckpt-{step}", "hf", files={"config.json": CONFIG})
            dcp.save(state, storage_writer=writer, no_dist=True)
        else:
            run.save(step, model, optimizer, extra=states[kind])
    done = demote(tmp_path)
    assert done.demote == ()
    assert done.keep[1].reason.startswith("cannot be demoted: `")
    warnings = consolidate(tmp_path / "ckpt-2", tmp_path / "out").warnings
    assert any(word in warnings[0] for word in ("not copied: `extra`", "not copied: training/"))


def test_a_state_without_weights_may_be_deleted(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    run = Run(tmp_path, files={"config.json": CONFIG})
    for step in (1, 2):
        run.save(
            step, model, loader={"seen": list(range(9000)), "rng": torch.get_rng_state(), "order": torch.ones(9000)}
        )
    assert [entry.step for entry in demote(tmp_path).demote] == [1]
