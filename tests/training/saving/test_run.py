"""What is saved comes back to the bit: every form, every wrapper, other numbers of ranks."""

import json
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.optim import SGD

from ckptkit.checkpoints.run import RunFolder
from ckptkit.conversion.convert import consolidate, convert
from ckptkit.errors import Unsupported
from ckptkit.runs.deletion import delete_checkpoint, locked_for_deletion, set_pin
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from ckptkit.training.saving.run import Run
from tests.training.saving.networks import Trainee, differing

FORMS = ("sharded", "full", "hf")
STEPS = 3
ON_ONE = ("fsdp2", "fsdp1 FULL_SHARD")
ON_TWO = ("fsdp2", "fsdp1 FULL_SHARD", "fsdp1 FULL_SHARD bare", "fsdp1 SHARD_GRAD_OP", "fsdp1 NO_SHARD", "plain")
ON_THREE = ("fsdp2", "fsdp1 FULL_SHARD", "fsdp1 FULL_SHARD bare")
ON_FOUR = ("hsdp2", "fsdp1 HYBRID_SHARD", "fsdp1 FULL_SHARD")

Heard = list[tuple[str, list[str]]]


def pairs(wrappers: Sequence[str]) -> list[tuple[str, str]]:
    """The first wrapper in every form, and each other one in one form, in turn."""
    first, *others = wrappers
    return [*((first, form) for form in FORMS), *zip(others, islice(cycle(FORMS), 1, None), strict=False)]


def trained(wrapper: str, **options: Any) -> Trainee:
    trainee = Trainee.make(wrapper, seed=0, **options)
    trainee.learn(STEPS)
    return trainee


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phases", torch.ones(3, dtype=torch.cfloat).conj())


def test_a_conjugate_view_is_saved_and_refused_at_the_load(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.save(1, Conjugated())
    with pytest.raises(Unsupported, match="cannot load into a conjugate or negative view") as raised:
        run.load(Conjugated())
    assert raised.value.tensor == "model.phases"


def save_and_load(root: Path, wrappers: tuple[str, ...], place: RankPlace, report: Report) -> None:
    """Save under each wrapper in both forms, load into one of another seed, and go on with both."""
    warnings.simplefilter("error")
    with process_group(place, "cpu"):
        plain = trained("plain")
        for wrapper, form in pairs(wrappers):
            ours, other = trained(wrapper), Trainee.make(wrapper, seed=1)
            run = Run(root / f"{wrapper} {form}", state_dict=form)
            run.save(STEPS, ours.model, ours.optimizer, **ours.state())
            assert run.load(other.model, other.optimizer, **other.state()) == STEPS
            wrong = plain.compare(other)
            report((f"{wrapper} {form}", wrong))
            assert other.learn(2) == ours.learn(2)


def load_across(root: Path, wrappers: tuple[str, ...], place: RankPlace, report: Report) -> None:
    """Load what these wrappers saved below `root` under each of them."""
    warnings.simplefilter("error")
    with process_group(place, "cpu"):
        load_into([root / f"{wrapper} {form}" for wrapper, form in pairs(wrappers)], wrappers, report)


def load_into(roots: list[Path], wrappers: tuple[str, ...], report: Report) -> None:
    plain = trained("plain")
    for root in roots:
        for wrapper in wrappers:
            other = Trainee.make(wrapper, seed=1)
            assert Run(root).load(other.model, other.optimizer, **other.state()) == STEPS
            report((f"{root.name} into {wrapper}", plain.compare(other)))


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Heard]:
    """Runs of two ranks, one per wrapper and form, and what was heard while they were saved and loaded."""
    root = tmp_path_factory.mktemp("two")
    heard: Heard = []
    launch(partial(save_and_load, root, ON_TWO), 2, heard.append)
    return root, heard


def assert_equal(heard: Heard, count: int) -> None:
    assert len(heard) == count
    assert [what for what in heard if what[1]] == []


@pytest.mark.slow
def test_two_ranks_load_what_they_saved(saved_by_two: tuple[Path, Heard]) -> None:
    assert_equal(saved_by_two[1], 2 * len(pairs(ON_TWO)))


@pytest.mark.slow
def test_three_ranks_load_what_two_saved(saved_by_two: tuple[Path, Heard]) -> None:
    heard: Heard = []
    launch(partial(load_across, saved_by_two[0], ON_THREE), 3, heard.append)
    assert_equal(heard, 3 * len(pairs(ON_THREE)) * len(ON_THREE))


@pytest.mark.slow
def test_one_process_without_a_group_loads_what_two_saved(saved_by_two: tuple[Path, Heard]) -> None:
    heard: Heard = []
    load_into(list(saved_by_two[0].iterdir()), ("plain",), heard.append)
    assert_equal(heard, len(pairs(ON_TWO)))


@pytest.mark.nightly
def test_four_ranks_and_one(tmp_path: Path) -> None:
    for ranks, wrappers in ((4, ON_FOUR), (1, ON_ONE)):
        heard: Heard = []
        launch(partial(save_and_load, tmp_path / str(ranks), wrappers), ranks, heard.append)
        assert_equal(heard, ranks * len(pairs(wrappers)))
    heard = []
    load_into(list((tmp_path / "4").iterdir()), ("plain",), heard.append)
    assert_equal(heard, len(pairs(ON_FOUR)))


@pytest.mark.slow
def test_others_open_the_checkpoints(saved_by_two: tuple[Path, Heard], tmp_path: Path) -> None:
    plain = trained("plain").model
    for run in saved_by_two[0].iterdir():
        assert [found.step for found in RunFolder(run).checkpoints()] == [STEPS]
        consolidate(run, tmp_path / run.name)
        exported = load_file(tmp_path / run.name / "model.safetensors")
        missing = plain.state_dict().keys() - exported.keys()
        assert missing <= {"head.weight"}  # tied
        assert differing(exported, {name: plain.state_dict()[name] for name in exported}) == []
    tied = torch.load(saved_by_two[0] / "fsdp2 full" / f"ckpt-{STEPS}" / "state.pt", weights_only=True)["model"]
    assert tied["head.weight"].data_ptr() == tied["embed.weight"].data_ptr()
    whole = torch.load(saved_by_two[0] / "fsdp1 FULL_SHARD full" / f"ckpt-{STEPS}" / "state.pt", weights_only=True)
    assert differing(whole["model"], plain.state_dict()) == []
    assert whole["step"] == STEPS


class WithExtraState(torch.nn.Linear):
    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_the_extra_state_of_a_module_comes_back(tmp_path: Path, form: str) -> None:
    ours, other = WithExtraState(2, 2), WithExtraState(2, 2)
    ours.seen = 3
    with Run(tmp_path, state_dict=form, background=True) as run:
        run.save(1, ours)
        run.load(other)
    assert other.seen == 3
    assert torch.equal(other.weight, ours.weight)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_loop_of_three_lines(tmp_path: Path, form: str, background: bool) -> None:
    def train(root: Path, steps: int) -> tuple[nn.Module, list[int]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        taken = []
        with Run(root, state_dict=form, background=background) as run:
            step = run.load(model, optimizer) if run.latest() else 0
            while step < steps:
                model(torch.ones(3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                taken.append(step)
                assert run.save(step, model, optimizer) == root / f"ckpt-{step}"
        return model, taken

    train(tmp_path / "resumed", 2)
    resumed, taken = train(tmp_path / "resumed", 4)
    assert taken == [3, 4]
    straight, taken = train(tmp_path / "straight", 4)
    assert taken == [1, 2, 3, 4]
    assert differing(resumed.state_dict(), straight.state_dict()) == []


@pytest.mark.parametrize("form", FORMS)
def test_files_and_metrics_lie_beside_the_state(tmp_path: Path, form: str) -> None:
    run = Run(tmp_path, state_dict=form, files={"config.json": b"{}"})
    path = run.save(7, nn.Linear(2, 2), metrics={"loss": 0.5, "accuracy": 1})
    assert (path / "config.json").read_bytes() == b"{}"
    assert json.loads((path / "metrics.json").read_text()) == {"loss": 0.5, "accuracy": 1.0, "step": 7}
    path.rename(tmp_path / "best")
    assert run.load(nn.Linear(2, 2), path=tmp_path / "best") == 7


@pytest.mark.parametrize("form", FORMS)
def test_old_checkpoints_go_and_the_best_stay(tmp_path: Path, form: str) -> None:
    (tmp_path / ".ckpt-0.leaving").mkdir()  # of a process that was ended
    run = Run(tmp_path, state_dict=form, keep_last=2, keep_best="loss:2")
    for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0, 4.0, 5.0], 1):
        run.save(step, nn.Linear(2, 2), metrics={"loss": loss})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-2", "ckpt-4", "ckpt-5", "ckpt-6"]
    Run(tmp_path, state_dict=form, keep_last=1).save(3, nn.Linear(2, 2))  # after resuming from step 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-3", "ckpt-6"]
    Run(tmp_path, state_dict=form, keep_every=3, keep_best="loss").save(7, nn.Linear(2, 2), metrics={"loss": 6.0})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-3", "ckpt-6", "ckpt-7"]
    Run(tmp_path, state_dict=form, keep_best="loss").save(8, nn.Linear(2, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-6", "ckpt-8"]


def test_what_is_pinned_while_others_are_deleted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete_and_pin(path: Path) -> None:
        delete_checkpoint(path)
        set_pin(tmp_path / "ckpt-2")
        (tmp_path / "latest").write_text("ckpt-3")

    everything = Run(tmp_path)
    for step in (1, 2, 3, 4):
        everything.save(step, nn.Linear(2, 2))
    monkeypatch.setattr("ckptkit.runs.run_backend.delete_checkpoint", delete_and_pin)
    Run(tmp_path, keep_last=1).save(5, nn.Linear(2, 2))
    assert [found.step for found in everything.checkpoints()] == [2, 3, 5]  # 4 went first


def test_what_a_prune_left_half_deleted_goes_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-5.leaving").mkdir()
    Run(tmp_path).save(1, nn.Linear(2, 2))
    Run(tmp_path).save(2, nn.Linear(2, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-1", "ckpt-2"]


def test_while_somebody_prunes_a_training_deletes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1)
    run.save(1, nn.Linear(2, 2))
    with locked_for_deletion(tmp_path), pytest.warns(UserWarning, match="not deleted: .*another process is deleting"):
        run.save(2, nn.Linear(2, 2))
    assert [found.step for found in run.checkpoints()] == [1, 2]
    run.save(3, nn.Linear(2, 2))
    assert [found.step for found in run.checkpoints()] == [3]


def test_a_checkpoint_that_cannot_be_deleted_ends_no_training(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1)
    run.save(1, nn.Linear(2, 2), metrics={"loss": 1.0})
    (tmp_path / "ckpt-1" / "metrics.json").write_text("not JSON")
    with pytest.warns(UserWarning, match="an old checkpoint was not deleted: .*metrics.json: not the metrics"):
        run.save(2, nn.Linear(2, 2))
    assert [found.step for found in run.checkpoints()] == [1, 2]


def trained_alone() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


PLACE: dict[str, Any] = {"epoch": 3, "seen": [1, 2], "weights": torch.arange(2.0), "inner": {"a": None}}


def require_loaded(path: Path) -> None:
    """Load a checkpoint of `trained_alone` and `PLACE`, and compare."""
    expected, before = trained_alone()
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.5)
    place: dict[str, Any] = {}
    assert Run(path.parent).load(model, optimizer, path=path, place=place) == 5
    assert differing(model.state_dict(), expected.state_dict()) == []
    assert str(optimizer.state_dict()) == str(before.state_dict())
    assert torch.equal(place.pop("weights"), PLACE["weights"])
    assert place == {name: value for name, value in PLACE.items() if name != "weights"}


def test_a_state_that_was_converted_is_loaded(tmp_path: Path) -> None:
    """Into one file a dict comes in the tuple that DCP kept it whole in; into DCP's files it comes taken apart."""
    model, optimizer = trained_alone()
    run = Run(tmp_path / "run", state_dict="full")
    full = run.save(5, model, optimizer, place=PLACE)
    require_loaded(full)
    state = torch.load(full / "state.pt", weights_only=True)
    (tmp_path / "wrapped").mkdir()
    torch.save({**state, "place": (state["place"],)}, tmp_path / "wrapped/state.pt")
    require_loaded(tmp_path / "wrapped")
    with warnings.catch_warnings(action="ignore"):
        state_dict_saver.save(state, checkpoint_id=tmp_path / "apart")
    require_loaded(tmp_path / "apart")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to", ["dcp", "pt"])
def test_a_checkpoint_that_ckptkit_converted_is_loaded(tmp_path: Path, form: str, to: str) -> None:
    model, optimizer = trained_alone()
    path = Run(tmp_path / "run", state_dict=form).save(5, model, optimizer, place=PLACE)
    convert(path, tmp_path / "out", to=to)
    require_loaded(tmp_path / "out")
