"""Wrong arguments of public functions, and what the objects of the package look like in a prompt."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import ckptkit
from ckptkit import Checkpoint, CkptError, Run
from ckptkit.errors import Usage, replace_options_with_arguments
from ckptkit.storage import Reader, Writer, find_cause

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch says so of one process

WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: ckptkit.inspect(None), "`source`: expected str, Path or Checkpoint, found None"),  # type: ignore[arg-type]
    (lambda: ckptkit.verify(["run"]), r"`sources`: expected str, Path or Checkpoint, found \['run'\] \(list\)"),  # type: ignore[arg-type]
    (lambda: ckptkit.consolidate("run", None), "`dst`: expected str or Path, found None"),  # type: ignore[arg-type]
    (lambda: ckptkit.consolidate("run", "out", jobs="4"), r"`jobs`: expected int or None, found '4' \(str\)"),  # type: ignore[arg-type]
    (lambda: ckptkit.consolidate("run", "out", include=5), r"`include`: expected str or a list of str, found 5"),  # type: ignore[arg-type]
    (lambda: ckptkit.consolidate("run", "out", include=["a", 5]), r"`include`: .*, found \['a', 5\] \(list\)"),  # type: ignore[list-item]
    (lambda: ckptkit.consolidate("run", "out", strict="no"), r"`strict`: expected bool, found 'no' \(str\)"),  # type: ignore[arg-type]
    (lambda: ckptkit.consolidate("run", "out", max_shard_size="much"), "expected a size, found `much`"),
    (
        lambda: ckptkit.convert("run", "out", to="dcp", world_size=True),
        r"`world_size`: expected int or None, found True",
    ),
    (lambda: ckptkit.convert("run", "out"), "to: expected dcp, torch_checkpointing, hf, .* or adapter, found none"),
    (lambda: ckptkit.estimate("8b", world_size="8"), r"`world_size`: expected int, found '8' \(str\)"),  # type: ignore[arg-type]
    (lambda: ckptkit.estimate("8b", world_size=8, gpu_memory="80 potatoes"), "expected a size, found `80 potatoes`"),
    (lambda: ckptkit.push("out", None), "`repo_id`: expected str, found None"),  # type: ignore[arg-type]
    (lambda: ckptkit.train("run", steps="5"), "steps: expected a whole number, found '5'"),
    (lambda: ckptkit.train("run", stepz=5), "unknown setting `stepz` .hint: use steps"),
    (lambda: Checkpoint.open(None), "`source`: expected str, Path or Checkpoint, found None"),  # type: ignore[arg-type]
    (lambda: Run(None), "`root`: expected str or Path, found None"),  # type: ignore[arg-type]
    (lambda: Run("run", keep_last="3"), r"`keep_last`: expected int or None, found '3' \(str\)"),  # type: ignore[arg-type]
    (lambda: Run("run").save("5", nn.Linear(2, 2)), r"`step`: expected int, found '5' \(str\)"),  # type: ignore[arg-type]
    (lambda: Run("run").save(5, {}), r"`model`: expected Module, found \{\} \(dict\)"),  # type: ignore[arg-type]
    (lambda: Reader(None), "`path`: expected str or Path, found None"),  # type: ignore[arg-type]
    (lambda: Reader("run", cast=True), r"`cast`: expected str, found True \(bool\)"),  # type: ignore[arg-type]
    (lambda: Writer(5), r"`path`: expected str or Path, found 5 \(int\)"),  # type: ignore[arg-type]
    (
        lambda: Writer("out", "safetensors"),
        "unknown format `safetensors` .hint: use one of dcp, torch_checkpointing, hf, ",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_error_names_the_argument(
    call: Callable[[], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Usage, match=f"^{message}"):
        call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in ckptkit.__all__ if inspect.isfunction(getattr(ckptkit, name))])
def test_every_public_function_checks_its_arguments(name: str) -> None:
    function = getattr(ckptkit, name)
    first, *others = inspect.signature(function).parameters.values()
    needed = [one for one in others if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    by_name = {one.name: 0 for one in needed if one.kind is one.KEYWORD_ONLY}
    with pytest.raises(Usage, match=f"^`{first.name}`: expected .*, found"):
        function(object(), *("x" for one in needed if one.name not in by_name), **by_name)


def test_public_functions_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(ckptkit.verify)) is ckptkit.verify


def test_sizes_may_be_text() -> None:
    small, large = (ckptkit.estimate("8b", world_size=8, gpu_memory=size) for size in ("80GB", 80 * 10**9))
    assert small == large


def test_numbers_of_numpy_and_dtypes_of_torch_are_taken(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="no such file or directory"):
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out", jobs=np.int64(2), dtype=torch.bfloat16)  # type: ignore[arg-type]


def test_best_metric_that_no_checkpoint_has_deletes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_best="los:min")
    with pytest.warns(UserWarning, match="no checkpoint has a finite metric `los` .hint: use loss"):
        run.save(1, nn.Linear(2, 2), metrics={"loss": 1.0})
    with pytest.warns(UserWarning, match="was not deleted"):
        run.save(2, nn.Linear(2, 2), metrics={"loss": 2.0})
    assert [found.path.name for found in run.checkpoints()] == ["ckpt-1", "ckpt-2"]


def test_objects_show_how_they_were_made(tmp_path: Path) -> None:
    run = Run("run", keep_last=2, keep_best="loss:3")
    assert repr(run) == "Run('run', state_dict='sharded', keep_last=2, keep_best='loss:min:3')"
    assert (
        repr(Reader("run", under="model"))
        == "Reader('run', under='model', missing='error', cast='error', unasked='warn')"
    )
    assert repr(Writer("out", overwrite=True)) == "Writer('out', overwrite=True)"
    Run(tmp_path).save(1, nn.Linear(2, 2))
    assert repr(Checkpoint.open(tmp_path)) == f"<dcp checkpoint: {tmp_path / 'ckpt-1'}>"
    with pytest.raises(TypeError, match="use `is_equal`"):
        bool(ckptkit.diff(tmp_path, tmp_path))


@ALONE
def test_errors_of_torch_s_storage_name_the_checkpoint_and_the_shapes(tmp_path: Path) -> None:
    Run(tmp_path).save(1, nn.Linear(4, 8))
    wider, more = nn.Linear(4, 9), nn.Sequential(nn.Linear(4, 8))
    for model, message in (
        (wider, r"ckpt-1: tensor `model.weight`: expected shape \[9, 4\] as in the state to load into, found \[8, 4\]"),
        (more, "ckpt-1: tensor `model.0.(weight|bias)`: "),
    ):
        with pytest.raises(CheckpointException) as raised:
            dcp.load({"model": model.state_dict()}, storage_reader=Reader(tmp_path), no_dist=True)
        assert re.search(message, str(find_cause(raised.value)))


@ALONE
def test_an_occupied_destination_is_named_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Run("run").save(1, nn.Linear(2, 2))
    with pytest.raises(
        CkptError, match=r"^run/ckpt-1: the destination exists .hint: save another step, or delete this"
    ):
        Run("run").save(1, nn.Linear(2, 2))
    two = {"a": nn.Linear(2, 2).state_dict(), "b": nn.Linear(3, 2).state_dict(), "step": 3}
    with pytest.raises(CheckpointException) as raised:
        dcp.save(two, storage_writer=Writer("out"), no_dist=True)
    assert str(find_cause(raised.value)).startswith("out: several entries could be the model: a, b")


def test_metrics_are_numbers(tmp_path: Path) -> None:
    with pytest.raises(Usage, match=r"`metrics`: expected numbers by name, found {'loss': 'low'}"):
        Run(tmp_path).save(1, nn.Linear(2, 2), metrics={"loss": "low"})  # type: ignore[dict-item]
    Run(tmp_path).save(1, nn.Linear(2, 2), metrics={"loss": torch.tensor(1.0)})  # type: ignore[dict-item]


def test_options_with_words_become_arguments() -> None:
    text = "pass --to hf, --names keep or --jobs, then run `ckptkit convert SRC OUT --to dcp`"
    assert (
        replace_options_with_arguments(text)
        == "pass to='hf', names='keep' or jobs, then run `ckptkit convert SRC OUT --to dcp`"
    )
