"""A save in the background writes the state of the moment when it was asked for, while the training goes on."""

import subprocess
import sys
import threading
import warnings
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.saving.run import Run
from ckptkit.training.saving.save import ADAPTER, FORMATS, copy_to_cpu
from tests.training.saving.networks import Trainee, differing, whole

pytestmark = pytest.mark.slow

STEPS = 3
WRAPPERS = ("fsdp2", "fsdp1 FULL_SHARD", "fsdp1 FULL_SHARD bare", "plain")
WAYS = list(product(WRAPPERS, FORMATS))

Heard = list[tuple[tuple[str, str], list[str]]]


def hold_back(run: Run) -> threading.Event:
    """Let the thread of a run do nothing before the event."""
    gate = threading.Event()
    assert run._thread is not None
    run._thread.submit(gate.wait)
    return gate


def save_behind(root: Path, place: RankPlace, report: Report) -> None:
    """Save in the background, and change everything before a byte is written."""
    warnings.simplefilter("error")
    with process_group(place, "cpu"):
        for wrapper, form in WAYS:
            make = partial(Trainee.make, with_adapters=form == ADAPTER)
            expected, ours, other = make(wrapper, seed=0), make(wrapper, seed=0), make(wrapper, seed=1)
            expected.learn(STEPS)
            ours.learn(STEPS)
            with Run(root / f"{wrapper} {form}", state_dict=form, background=True, keep_last=1) as run:
                gate = hold_back(run)
                run.save(STEPS, ours.model, ours.optimizer, **ours.state())
                ours.learn(2)
                ours.place.clear()
                early = run.latest()
                gate.set()
                run.wait()
                run.load(other.model, other.optimizer, **other.state())
                wrong = [name for name in expected.compare(other) if form != ADAPTER or ".lora_" in name]
                for step in range(STEPS, STEPS + 2):
                    run.save(step + 1, other.model, other.optimizer, **other.state())
                    other.learn(1)
            again = make(wrapper, seed=2)
            assert run.load(again.model, again.optimizer, **again.state()) == STEPS + 2
            assert [found.step for found in run.checkpoints()] == [STEPS + 2]
            report(((wrapper, form), [*wrong, *["early"] * (early is not None)]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Heard:
    """What two ranks found wrong after a save of each kind under each wrapper."""
    heard: Heard = []
    launch(partial(save_behind, tmp_path_factory.mktemp("behind")), 2, heard.append)
    return heard


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_the_state_of_the_moment_is_saved(saved: Heard, way: tuple[str, str]) -> None:
    assert [wrong for done, wrong in saved if done == way] == [[], []]


def test_a_relative_path_means_the_directory_at_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run("run", background=True, keep_last=1)
    for step in (1, 2):
        gate = hold_back(run)
        run.save(step, torch.nn.Linear(2, 2))
        monkeypatch.chdir("/")
        gate.set()
        run.wait()
        monkeypatch.chdir(tmp_path)
    assert [found.step for found in run.checkpoints()] == [2]


def test_a_fork_does_not_wait_for_the_last_save(tmp_path: Path) -> None:
    code = (
        "import os, torch\n"
        "from ckptkit import Run\n"
        "from ckptkit.io.staging import Stage\n"
        "Stage.commit = lambda _: os.read(end, 1)\n"
        "end, other_end = os.pipe()\n"
        "Run('run', background=True).save(1, torch.nn.Linear(2, 2))\n"
        "child = os.fork()\n"
        "if child:\n"
        "    os.waitpid(child, 0)\n"
        "    os.write(other_end, b'x')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=True)


def test_an_error_of_the_last_save_is_logged_at_the_exit(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from ckptkit import Run\n"
        "from ckptkit.io.staging import Stage\n"
        "Stage.commit = lambda _: 1 / 0\n"
        "Run('run', background=True).save(1, torch.nn.Linear(2, 2))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stderr.endswith("the last checkpoint was not saved: division by zero\n")


def tensors_of_every_kind(mesh: Any) -> dict[str, Any]:
    uneven = distribute_tensor(torch.rand(5, 2), mesh, [Shard(0)])
    return {
        "transposed": torch.rand(3, 2).t(),
        "with steps": torch.rand(6, 4)[::2, 1:3],
        "scalar": torch.tensor(2.0),
        "a part": torch.arange(1000)[10:13],
        "empty": torch.empty(0, 3),
        "bf16": torch.rand(4).bfloat16(),
        "uneven": uneven,
        "tied": uneven,
        "tied, another object": DTensor.from_local(
            uneven.to_local(), mesh, [Shard(0)], run_check=False, shape=uneven.shape, stride=uneven.stride()
        ),
        "uneven, transposed": distribute_tensor(torch.rand(5, 3), mesh, [Shard(0)]).t(),
        "whole": distribute_tensor(torch.rand(2, 2), mesh, [Replicate()]),
        "a row": distribute_tensor(torch.rand(1, 1), mesh, [Shard(0)]),  # empty on all ranks but the first
        "a column": distribute_tensor(torch.rand(1, 1), mesh, [Shard(1)]),
    }


def copy_every_kind(place: RankPlace, report: Report) -> None:
    """Copy tensors, change the originals, and report what is wrong with the copies."""
    with process_group(place, "cpu") as mesh:
        torch.manual_seed(0)
        tensors = tensors_of_every_kind(mesh)
        before = {name: whole(tensor) for name, tensor in tensors.items()}
        copies = copy_to_cpu({"model": tensors, "optim": [tensors["scalar"]]})
        found = copies["model"]
        for tensor in tensors.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        wrong = differing({name: whole(copied) for name, copied in found.items()}, before)
        wrong += [name for name in tensors if described(found[name]) != described(tensors[name])]
        wrong += ["scalar of optim"] * (copies["optim"][0] != before["scalar"])
        wrong += ["tied"] * (not found["tied"] is found["uneven"] is found["tied, another object"])
        wrong += ["more than a part"] * (found["a part"].untyped_storage().nbytes() != found["a part"].nbytes)
        report(wrong)


def described(tensor: Tensor) -> tuple[Any, ...]:
    placed = (tensor.placements, tensor.to_local().shape) if isinstance(tensor, DTensor) else ()
    return type(tensor), tensor.shape, tensor.dtype, placed


def test_a_copy_is_what_the_tensor_was() -> None:
    heard: list[list[str]] = []
    launch(copy_every_kind, 3, heard.append)
    assert heard == [[]] * 3
