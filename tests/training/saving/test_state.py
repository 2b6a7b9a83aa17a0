"""What a state may be, what it is refused for, and saves that go wrong on one rank of two."""

import os
import pickle
import resource
import signal
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, NotACheckpoint, Occupied, Usage
from ckptkit.formats import locate_all_chunks
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.saving.run import Run
from tests.producers import needs_errors_of_ranks
from tests.training.saving.networks import Network, Trainee, differing
from tests.training.saving.test_background import hold_back
from tests.training.saving.test_run import FORMS

each_form = pytest.mark.parametrize("form", FORMS)


class Failing:
    """A state that one rank cannot give."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"inverse": 1 / (1 - self.rank)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def fail_in_turn(root: Path, place: RankPlace, report: Report) -> None:
    """Saves that fail on one rank; every rank reports the error, and rank 0 what there is to be seen."""
    warnings.simplefilter("error")
    with process_group(place, "cpu"):
        trainee = Trainee.make("fsdp2", seed=0)
        trainee.learn(1)
        Run(root).save(1, trainee.model, trainee.optimizer)

        def fails(victim: int, form: str, **state: Any) -> None:
            for background in (False, True):
                run = Run(root, state_dict=form, background=background)
                assert run._ranks.rank == place.rank  # they have met, through a file
                limit_file_size(1000 if place.rank == victim else resource.RLIM_INFINITY)
                try:
                    with pytest.raises(CkptError) as raised:
                        run.save(2, trainee.model, trainee.optimizer, **state)
                        run.wait()
                finally:
                    limit_file_size(resource.RLIM_INFINITY)
                seen = [path.name for path in root.iterdir()] if place.rank == 0 else []
                report((form, type(raised.value), raised.value.message, seen))

        fails(1, "sharded")
        fails(0, "full")
        fails(-1, "sharded", loader=Failing(place.rank))
        with pytest.raises(Occupied):
            Run(root).save(1, trainee.model)


def limit_file_size(nbytes: int) -> None:
    """Let the disk refuse, on this rank alone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def die_while_saving(root: Path, victim: int, place: RankPlace, report: Report) -> None:
    with process_group(place, "cpu"):
        trainee = Trainee.make("fsdp2", seed=0)
        trainee.learn(1)
        Run(root).save(1, trainee.model, trainee.optimizer)
        run = Run(root, background=True)
        if place.rank == victim:
            hold_back(run)
        run.save(2, trainee.model, trainee.optimizer)
        if place.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        run.wait()


@needs_errors_of_ranks
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    heard: list[tuple[str, type, str, list[str]]] = []
    launch(partial(fail_in_turn, tmp_path), 2, heard.append)
    assert len(heard) == 2 * 2 * 3
    assert {tuple(seen) for *_, seen in heard} == {("ckpt-1",), ()}
    told = {what[:3] for what in heard}
    assert len(told) == 3, told
    assert {(form, kind) for form, kind, _ in told} == {
        ("sharded", IOFailure),
        ("full", IOFailure),
        ("sharded", CkptError),
    }
    messages = sorted(message for _, _, message in told)
    assert any(message.startswith("rank 1 could not save it: ") for message in messages)
    assert "rank 1 failed: ZeroDivisionError: division by zero" in messages


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_leaves_the_older_checkpoint(tmp_path: Path, victim: int) -> None:
    with pytest.raises(CkptError, match="rank"):
        launch(partial(die_while_saving, tmp_path, victim), 2, lambda _: None)
    assert [checkpoint.step for checkpoint in RunFolder(tmp_path).checkpoints()] == [1]
    if victim == 0:
        assert ".ckpt-2.ckptkit.tmp" in [path.name for path in tmp_path.iterdir()]
    trainee = Trainee.make("plain", seed=0)
    assert Run(tmp_path).load(trainee.model, trainee.optimizer) == 1
    Run(tmp_path).save(2, trainee.model, trainee.optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-1", "ckpt-2"]


Build = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "amsgrad": lambda model: AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True),
    "sgd": lambda model: SGD(model.parameters(), lr=0.01),
    "momentum": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.5),
}


def learn(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.arange(5)).backward()
    optimizer.step()
    optimizer.zero_grad()


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {key: value.tolist() if isinstance(value, Tensor) else value for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }


@each_form
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_come_back_as_they_were(tmp_path: Path, build: Build, steps: int, form: str) -> None:
    model, other, unsaved = (Network(seed, with_unused=True) for seed in (0, 1, 0))
    optimizers = [build(one) for one in (model, other, unsaved)]
    for _ in range(steps):
        learn(model, optimizers[0])
        learn(unsaved, optimizers[2])
    run = Run(tmp_path, state_dict=form)
    run.save(steps, model, optimizers[0])
    other.scale.grad = torch.ones(1)
    optimizers[1].step()  # so that there is some state to be replaced, and more to be made
    assert run.load(other, optimizers[1]) == steps
    assert moments(other, optimizers[1]) == moments(unsaved, optimizers[2])
    assert not any(name.startswith(("unused", "frozen")) for name in moments(other, optimizers[1]))
    learn(other, optimizers[1])
    learn(model, optimizers[0])  # saving has changed nothing
    learn(unsaved, optimizers[2])
    assert differing(other.state_dict(), unsaved.state_dict()) == []
    assert differing(model.state_dict(), unsaved.state_dict()) == []
    assert moments(other, optimizers[1]) == moments(unsaved, optimizers[2]) == moments(model, optimizers[0])


def save_odd_states(root: Path, place: RankPlace, report: Report) -> None:
    """Optimizers that have no state yet, or none of some parameters, go from each wrapper to each."""
    warnings.simplefilter("error")
    wrappers = ("fsdp2", "fsdp1 FULL_SHARD")
    with process_group(place, "cpu"):
        plain = Trainee.make("plain", seed=0, with_unused=True)
        plain.learn(2)
        plain.learn(1)  # on the first batch again
        for form in FORMS:
            for wrapper in wrappers:
                ours = Trainee.make(wrapper, seed=0, with_unused=True)
                run = Run(root / f"{wrapper} {form}", state_dict=form)
                run.save(0, ours.model, ours.optimizer)
                assert not ours.optimizer.state
                ours.learn(2)
                run.save(2, ours.model, ours.optimizer, scheduler=ours.scheduler)
                for into in wrappers:
                    other = Trainee.make(into, seed=1, with_unused=True)
                    other.learn(1)
                    run.load(other.model, other.optimizer, path=run.checkpoint(0))
                    assert not other.optimizer.state
                    run.load(other.model, other.optimizer, scheduler=other.scheduler)
                    other.learn(1)
                    wrong = differing(other.tensors(), plain.tensors())
                    # FSDP1 gives an unused parameter zeros for a gradient, and so lets it decay
                    report([name for name in wrong if into == wrapper == "fsdp2" or "unused" not in name])


@pytest.mark.slow
def test_parameters_without_a_state_stay_so_under_every_wrapper(tmp_path: Path) -> None:
    heard: list[list[str]] = []
    launch(partial(save_odd_states, tmp_path), 2, heard.append)
    assert heard == [[]] * 8 * len(FORMS)


@each_form
def test_states_of_plain_values_come_back_as_they_were(tmp_path: Path, form: str) -> None:
    model = Network(0)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    cycle = OneCycleLR(optimizer, max_lr=1.0, total_steps=9)
    place: dict[Any, Any] = {
        "empty": {},
        3: [1, (2, {"x": None})],
        "text": "\n",
        "raw": b"\0",
        "tensors": [torch.arange(3)],
        "nan": 0.5,
    }
    for _ in range(3):
        learn(model, optimizer)
        cycle.step()
    run = Run(tmp_path, state_dict=form)
    run.save(3, model, optimizer, cycle=cycle, place=place)
    fresh = SGD(model.parameters(), lr=0.3, momentum=0.9)
    again = OneCycleLR(fresh, max_lr=1.0, total_steps=9)
    found: dict[Any, Any] = {"stale": 1}
    run.load(model, fresh, cycle=again, place=found)
    assert again.state_dict() == cycle.state_dict()
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert found.pop("tensors")[0].tolist() == place.pop("tensors")[0].tolist()
    assert found == place


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"loader": 5}, "`loader`: expected an object with a state, found a int"),
        ({"optim": {}}, "`optim` is a name that ckptkit uses itself"),
        ({"path": {}}, "`path` is a name that ckptkit uses itself"),
        ({"loader": {"at": Fraction(1, 2)}}, "the state of `loader` cannot be saved"),
        ({"loader": {"at": lambda: 0}}, "the state of `loader` cannot be saved"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path, state: dict[str, Any], said: str) -> None:
    with pytest.raises(Usage, match=said):
        Run(tmp_path).save(1, nn.Linear(2, 2), **state)
    assert list(tmp_path.iterdir()) == []


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="unknown state dict `flat`"):
        Run(tmp_path, state_dict="flat")
    with pytest.raises(Usage, match="expected at least 0, found -1"):
        Run(tmp_path).save(-1, nn.Linear(2, 2))
    with pytest.raises(CkptError, match="plain file name"):
        Run(tmp_path, files={"../config.json": b""})
    with pytest.raises(NotACheckpoint, match="no complete checkpoint"):
        Run(tmp_path).load(nn.Linear(2, 2))
    with pytest.raises(NotACheckpoint, match="no checkpoint"):
        Run(tmp_path).load(nn.Linear(2, 2), path=tmp_path)


def larger(model: Network) -> None:
    model.scale = nn.Parameter(torch.zeros(2))


def longer(model: Network) -> None:
    model.layers.append(nn.Linear(6, 6))


def shorter(model: Network) -> None:
    model.layers[1] = nn.Linear(6, 6, bias=False)


def halved(model: Network) -> None:
    model.scale.data = model.scale.data.half()


def frozen(model: Network) -> None:
    model.scale.requires_grad_(False)


@each_form
@pytest.mark.parametrize(
    ("change", "tensor", "said"),
    [
        (larger, "model.scale", r"expected shape \[2\] as in the model, found \[1\]"),
        (longer, "model.layers.2.weight", "the checkpoint lacks `layers.2.weight` and 1 more \\(hint"),
        (shorter, "model.layers.1.bias", "the model lacks `layers.1.bias`($| \\(hint)"),
        (halved, "model.scale", "expected float16 as in the model, found float32"),
        (frozen, "optim.state.scale", "no state for this parameter"),
    ],
)
def test_another_model_is_a_mismatch(
    tmp_path: Path, form: str, change: Callable[[Network], None], tensor: str, said: str
) -> None:
    saved, other = Trainee.make("plain", seed=0), Network(1)
    saved.learn(1)
    Run(tmp_path, state_dict=form).save(1, saved.model, saved.optimizer)
    change(other)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(Mismatch, match=said) as raised:
        Run(tmp_path).load(other, AdamW(other.parameters()))
    assert (raised.value.tensor, raised.value.path) == (tensor, tmp_path / "ckpt-1")
    assert differing(other.state_dict(), before) == []


@each_form
def test_another_optimizer_or_scheduler_is_a_mismatch(tmp_path: Path, form: str) -> None:
    model, run = Network(0), Run(tmp_path, state_dict=form)
    optimizer = AdamW(model.parameters())
    learn(model, optimizer)
    run.save(1, model)
    run.save(2, model, optimizer)
    for wrong, said in [
        (SGD(model.parameters(), momentum=0.9), "lacks `"),
        (SGD(model.parameters()), "no state for this parameter"),
        (AdamW(model.parameters(), amsgrad=True), "the checkpoint lacks `max_exp_avg_sq`"),
        (AdamW([{"params": [one]} for one in model.parameters()]), "groups of the optimizer, found 1"),
    ]:
        with pytest.raises(Mismatch, match=said):
            run.load(model, wrong)
    with pytest.raises(Mismatch, match="expected `optim` in the checkpoint") as raised:
        run.load(model, optimizer, path=run.checkpoint(1))
    assert raised.value.hint is not None
    with pytest.raises(Mismatch, match="expected `scheduler` in the checkpoint"):
        run.load(model, optimizer, scheduler=LambdaLR(optimizer, float))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scramble(path: Path) -> None:
    path.write_bytes(pickle.dumps(object()))


@pytest.mark.parametrize(
    ("form", "file", "harm", "kind"),
    [
        ("sharded", "__0_0.distcp", cut, Corrupt),
        ("sharded", "__0_0.distcp", Path.unlink, Corrupt),
        ("sharded", ".metadata", cut, Corrupt),
        ("sharded", ".metadata", Path.unlink, Corrupt),
        ("full", "state.pt", cut, Corrupt),
        ("full", "state.pt", scramble, NotACheckpoint),
    ],
)
def test_a_damaged_checkpoint_is_an_error(
    tmp_path: Path, form: str, file: str, harm: Callable[[Path], None], kind: type[CkptError]
) -> None:
    trainee = Trainee.make("plain", seed=0)
    path = Run(tmp_path, state_dict=form).save(1, trainee.model, trainee.optimizer)
    harm(path / file)
    with pytest.raises(kind) as raised:
        Run(tmp_path).load(trainee.model, trainee.optimizer, path=path)
    assert raised.value.path in (path, path / file)


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_code_in_a_checkpoint_never_runs(tmp_path: Path) -> None:
    trainee = Trainee.make("plain", seed=0)
    path = Run(tmp_path).save(1, trainee.model, trainee.optimizer)
    (path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(CkptError):
        Run(tmp_path).load(trainee.model, trainee.optimizer, path=path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))  # by torch's reader, for one
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_bit_rot_is_found_when_a_checkpoint_is_loaded(tmp_path: Path, form: str) -> None:
    trainee = Trainee.make("plain", seed=0)
    path = Run(tmp_path, state_dict=form).save(1, trainee.model, trainee.optimizer)
    chunk = next(
        t.chunks[0] for name, t in locate_all_chunks(open_layout(path)).tensors.items() if name.startswith("model.")
    )
    with (path / chunk.path).open("r+b") as file:
        file.seek(chunk.offset)
        file.write(b"\x55")
    with pytest.raises(Corrupt, match="damaged"):
        Run(tmp_path).load(trainee.model, trainee.optimizer, path=path)
