"""Universal checkpoints: DeepSpeed's are read, and DeepSpeed resumes from ours as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.errors import CkptError, Corrupt, Mismatch, Unsafe, Unsupported, Usage
from ckptkit.formats import get_format
from tests import producers
from tests.conftest import Produce
from tests.plugins.deepspeed.test_deepspeed import assert_holds, truth_of
from tests.storage.states import damage
from tests.trainers import produced_zero as zero

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

TAG = "global_step2_universal"


@pytest.mark.slow
@pytest.mark.parametrize("kind", zero.CONVERTED)
def test_reads_what_deepspeed_makes(kind: str, produce: Produce) -> None:
    made = produce(zero.universal)
    layout = open_layout(made.root / kind / TAG)
    truth = truth_of(made.truth, kind)
    if kind == "zero3":  # of which its tool leaves out what is frozen
        truth = {name: value for name, value in truth.items() if name.split(".")[1] != "up" and "norm.bias" not in name}
    assert layout.format == "universal"
    assert_holds(layout, truth)
    saved = open_layout(made.root / kind / "global_step2")
    assert layout.tensors.keys() == {name for name in saved.tensors if name in layout.tensors}
    steps = [name for name in layout.tensors if name.endswith(".step")]
    assert len(steps) == 3
    assert ckptkit.diff(made.root / kind / TAG, made.root / kind / "global_step2", include=["optimizer.*"]).is_equal


def test_all_model_states_belong_to_it(copy: Any) -> None:
    """DeepSpeed's own conversion from ZeRO 3 keeps the file of each rank."""
    root = copy("zero3")
    (checked,) = ckptkit.verify(root)
    assert (checked.problems, checked.left_behind) == ((), ())
    (second,) = root.glob("zero_pp_rank_1_*_model_states.pt")
    second.write_bytes(second.read_bytes()[:-700])
    assert [problem.path for problem in ckptkit.verify(root)[0].problems] == [second]


def test_it_is_told_from_the_run_that_it_lies_in(produce: Produce) -> None:
    root = produce(zero.universal).root / "zero1"
    assert [(one.step, one.format) for one in ckptkit.ls(root).checkpoints] == [(2, "deepspeed"), (2, "universal")]
    found = Checkpoint.open(root / TAG)
    assert (found.step, found.trainer, found.is_complete) == (2, "DeepSpeed", True)


def test_parameters_with_different_steps_are_refused(tmp_path: Path) -> None:
    """ZeRO 1 would stop with `Steps [...] are not equal`, and ZeRO 3 would give all parameters the first step."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 6), "late": torch.nn.Linear(5, 3)})
    optimizer = torch.optim.AdamW(model.named_parameters())
    for with_late in (False, True):
        optimizer.zero_grad()
        loss = model["a"](torch.ones(3, 4)).sum() + (model["late"](torch.ones(2, 5)).sum() if with_late else 0.0)
        loss.backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "late.pt")
    with pytest.raises(Unsupported, match=r"one step for all parameters, found 2.0 for `a.\w+` and 1.0 for `late.\w+`"):
        ckptkit.convert(tmp_path / "late.pt", tmp_path / "out", to="universal")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3", "bf16-optimizer"])
def test_ours_holds_what_the_source_has(kind: str, tmp_path: Path, produce: Produce) -> None:
    root = produce(zero.on_two).root / kind
    ckptkit.convert(root, tmp_path / "out", to="universal")
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step2"
    whole, inner = "ckptkit, converted from a `deepspeed` checkpoint", "DeepSpeed"
    for source, trainer in ((tmp_path / "out", whole), (tmp_path / "out" / "global_step2", inner)):
        found = Checkpoint.open(source)
        assert (found.layout.format, found.trainer, found.is_complete) == ("universal", trainer, True)
    compared = ckptkit.diff(tmp_path / "out", root)
    assert not compared.different
    assert not compared.only_in_a
    assert set(compared.only_in_b) <= {"zero_stage"}
    (verified,) = ckptkit.verify(tmp_path / "out")
    assert verified.is_ok
    assert verified.unchecked_bytes == 0
    torch.load(tmp_path / "out" / "global_step2" / "zero" / "embed.weight" / "fp32.pt")  # weights only


@pytest.mark.slow
def test_deepspeed_resumes_at_another_stage_with_another_number_of_ranks(tmp_path: Path, produce: Produce) -> None:
    """With the losses that the run itself had: only the order of sums differs, so a few units in the last place."""
    made = produce(zero.going_on)
    at = [("one", 1), ("one", 2), ("two", 1), ("two", 3), ("three", 1), ("three", 2), ("three", 3)]
    kinds = {f"{kind}-{stage}": (stage, ("groups",) if kind == "one" else ()) for kind, stage in at}
    for name in kinds:
        ckptkit.convert(made.root / name.split("-")[0], tmp_path / name, to="universal")
    resumed = zero.resumed(3, tmp_path, kinds)
    for name in kinds:
        torch.testing.assert_close(resumed[name], made.truth[name.split("-")[0]], rtol=1e-6, atol=0)


def test_of_any_training_with_an_optimizer_by_name(tmp_path: Path, produce: Produce) -> None:
    made = produce(producers.fsdp2)
    ckptkit.convert(made.root, tmp_path / "out", to="universal")
    layout = open_layout(tmp_path / "out")
    renamed = {f"optimizer{name.removeprefix('optim')}" if name.startswith("optim.") else name: value
               for name, value in made.truth.items()}  # fmt: skip
    assert_holds(layout, {name: value for name, value in renamed.items() if not name.startswith("extra.")})
    both = produce(producers.accelerate)  # model and optimizer in directories of their own
    ckptkit.convert(both.root, tmp_path / "both", to="universal")
    assert_holds(open_layout(tmp_path / "both"), both.truth)


def test_half_precision_weights_become_masters(tmp_path: Path) -> None:
    weight = producers.counted(3, 4, dtype=torch.bfloat16)
    state = {
        "model": {"w": weight, "buffer": torch.ones(2, dtype=torch.bfloat16)},
        "optimizer": {
            "state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 4)}},
            "param_groups": [{"lr": 0.1, "params": ["w"]}],
        },
    }
    torch.save(state, tmp_path / "ckpt-3.pt")
    ckptkit.convert(tmp_path / "ckpt-3.pt", tmp_path / "out", to="universal")
    saved = torch.load(tmp_path / "out" / "global_step3" / "zero" / "w" / "fp32.pt")
    assert torch.equal(saved["param"], weight.float())
    assert open_layout(tmp_path / "out").specs["model.buffer"].dtype.name == "bfloat16"
    shared = torch.load(tmp_path / "out" / "global_step3" / "zero" / "optimizer_state.pt")
    assert shared["optimizer_state_dict"]["state"][0]["step"] == 3


def test_what_has_no_optimizer_by_name_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "model.pt")
    with pytest.raises(Mismatch, match="expected optimizer states by parameter name"):
        ckptkit.convert(tmp_path / "model.pt", tmp_path / "out", to="universal")
    states = {0: {"exp_avg": torch.ones(2)}, 1: {"exp_avg": torch.zeros(2)}}
    numbered = {"state": states, "param_groups": [{"params": [0]}, {"params": [1]}]}
    torch.save({"model": {"w": torch.ones(2), "v": torch.ones(2)}, "optimizer": numbered}, tmp_path / "numbered.pt")
    with pytest.raises(Unsupported, match="no file says which state belongs to which"):
        ckptkit.convert(tmp_path / "numbered.pt", tmp_path / "out", to="universal")
    with pytest.raises(Usage, match="dtype"):
        ckptkit.convert(tmp_path / "model.pt", tmp_path / "out", to="universal", dtype="bf16")
    assert not (tmp_path / "out").exists()


def test_numbers_become_names_where_that_is_certain(tmp_path: Path) -> None:
    states = {i: {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 2 - i), float(i))} for i in range(2)}
    model = {"w": torch.ones(2, 2), "v": torch.ones(2, 1)}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "numbered.pt")
    done = ckptkit.convert(tmp_path / "numbered.pt", tmp_path / "out", to="universal")
    assert any("names for its 2 parameters" in note for note in done.notes)
    for i, name in enumerate(model):
        saved = torch.load(tmp_path / "out" / "universal" / "zero" / name / "exp_avg.pt")
        assert torch.equal(saved["param"], states[i]["exp_avg"])


def test_a_manifest_knows_every_file(tmp_path: Path, produce: Produce) -> None:
    out = tmp_path / "out"
    done = ckptkit.convert(produce(zero.on_two).root / "zero1", out, to="universal")
    known = json.loads((out / "ckptkit.json").read_text())["files"]
    assert set(known) == {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} - {"ckptkit.json"}
    assert set(known) == set(done.files)
    (found,) = ckptkit.verify(out)
    assert (found.is_ok, found.has_manifest, found.unchecked_bytes) == (True, True, 0)
    damage(out, "model.head.weight")
    (found,) = ckptkit.verify(out)
    assert not found.is_ok


@pytest.fixture
def copy(tmp_path: Path, produce: Produce) -> Any:
    def make(kind: str) -> Path:
        return Path(shutil.copytree(produce(zero.universal).root / kind / TAG, tmp_path / TAG))

    return make


@pytest.mark.parametrize("kind", zero.CONVERTED)
def test_a_missing_file_is_named(kind: str, copy: Any) -> None:
    root = copy(kind)
    lost = root / "zero" / "down.weight" / "fp32.pt"
    lost.unlink()
    with pytest.raises(Corrupt) as raised:
        open_layout(root)
    assert raised.value.path == lost
    assert [problem.path for problem in get_format("universal").problems(root)] == [lost]
    shutil.rmtree(lost.parent)
    with pytest.raises(Corrupt, match="missing"):
        open_layout(root)


def test_shapes_that_do_not_fit_and_links_are_refused(copy: Any, tmp_path: Path) -> None:
    root = copy("zero3")
    torch.save(torch.ones(77), root / "zero" / "embed.weight" / "exp_avg.pt")
    with pytest.raises(CkptError, match="param_shapes"):
        open_layout(root)
    (root / "zero" / "embed.weight").rename(tmp_path / "elsewhere")
    (root / "zero" / "embed.weight").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unsafe):
        open_layout(root)
    for file in root.glob("*_model_states.pt"):
        file.unlink()
    with pytest.raises(Corrupt, match="names and shapes"):
        open_layout(root)


def test_a_pointer_that_leads_elsewhere_is_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for text in ("../elsewhere", "absent", "\x00", "x" * 5000):
        (tmp_path / "run" / "latest_universal").write_text(text)
        with pytest.raises(CkptError):
            open_layout(tmp_path / "run")
