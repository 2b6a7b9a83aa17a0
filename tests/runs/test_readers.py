"""A checkpoint stays while something that stays in its run reads it: a link, or an adapter of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptkit import consolidate, delta
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.io.joined_path import join_paths
from ckptkit.runs.prune import Pruned, prune
from ckptkit.training.saving.run import Run
from tests import producers
from tests.conftest import Produce


@pytest.fixture
def run(produce: Produce, tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        shutil.copytree(produce(producers.under_model).root, tmp_path / "run" / f"step-{step}")
        (tmp_path / "run" / f"step-{step}" / "config.json").write_text("{}")
    return tmp_path / "run"


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def adapter(path: Path, base: str) -> None:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))


def directory_of_links(run: Path) -> None:
    for file in (run / "step-1").iterdir():
        link(run / "best" / file.name, f"../step-1/{file.name}")


def two_links(run: Path) -> None:
    link(run / "a" / "one", "../step-1")
    link(run / "b" / "two", "../a/one")


READERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a directory of links": (directory_of_links, "`best/.metadata` links into it"),
    "a shared config": (
        lambda run: link(run / "step-3" / "config.json", "../step-1/config.json"),
        "`step-3/config.json` links into it",
    ),
    "a link in a directory": (lambda run: link(run / "links" / "best", "../step-1"), "`links/best` links to it"),
    "a deep link": (lambda run: link(run / "a" / "b" / "c", "../../step-1"), "`a/b/c` links to it"),
    "an absolute link": (lambda run: link(run / "a" / "b", str(run / "step-1")), "`a/b` links to it"),
    "a link by a link": (
        two_links,
        "`a/one` links to it, `b/two` links to it",
    ),
    "an adapter": (
        lambda run: adapter(run / "dpo", str(run / "step-1")),
        "the adapter in `dpo` has it as its base",
    ),
    "an adapter of a relative path": (
        lambda run: adapter(run / "dpo" / "x", "run/step-1/"),
        "the adapter in `dpo/x` has it as its base",
    ),
    "an adapter of another mount": (
        lambda run: adapter(run / "dpo", "/mnt/disk/run/step-1"),
        "the adapter in `dpo` has it as its base",
    ),
}


@pytest.mark.parametrize("place", ["delta-3", "deltas/2-to-3"])
def test_the_base_of_a_delta_stays(run: Path, place: str) -> None:
    consolidate(run / "step-3", run.parent / "new")
    delta(run / "step-1", run.parent / "new", run / place, force=True)
    found = reasons(prune(run, keep_last=1))
    assert found == {"step-3": found["step-3"], "step-1": f"the delta in `{place}` has it as its base"}


@pytest.mark.parametrize("has_states", [False, True])
def test_another_model_in_weights_is_no_training_state(run: Path, has_states: bool) -> None:
    shutil.rmtree(run / "step-3")
    consolidate(run / "step-2", run / "step-3")
    consolidate(run / "step-2", run / "step-3" / "merged")
    if has_states:
        torch.save({"step": 3}, run / "step-3" / "merged" / "scheduler.pt")
    assert Checkpoint.at(run / "step-3").is_weights_only is not has_states


def reasons(done: Pruned) -> dict[str, str]:
    return {entry.path.name: entry.reason for entry in done.keep}


@pytest.mark.parametrize("case", READERS)
def test_what_is_read_stays(run: Path, case: str) -> None:
    make, reason = READERS[case]
    make(run)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "step-2" not in path.parts}
    done = prune(run, keep_last=1, yes=True)
    assert reasons(done) == {"step-3": "one of the last 1", "step-1": reason}
    assert [entry.path.name for entry in done.delete] == ["step-2"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_a_link_of_a_checkpoint_that_goes_keeps_nothing(run: Path) -> None:
    link(run / "step-2" / "config.json", "../step-1/config.json")
    done = prune(run, keep_last=1, yes=True)
    assert [path.name for path in run.iterdir() if path.is_dir() and not path.name.startswith(".")] == ["step-3"]
    assert reasons(done) == {"step-3": "one of the last 1"}


def test_a_chain_of_links_stays(run: Path) -> None:
    link(run / "step-3" / "config.json", "../step-2/config.json")
    link(run / "step-2" / "extra", "../step-1/config.json")
    assert prune(run, keep_last=1).delete == ()


@pytest.mark.parametrize(
    "base", ["meta-llama/Llama-3", "/data/other/step-1", "step-9", "step-1-of-another", "../step-1/../x"]
)
def test_another_base_keeps_nothing(run: Path, base: str) -> None:
    adapter(run / "dpo", base)
    assert [entry.path.name for entry in prune(run, keep_last=1).delete] == ["step-2", "step-1"]


def test_links_within_a_checkpoint_and_out_of_the_run_keep_nothing(run: Path, tmp_path: Path) -> None:
    link(run / "step-1" / "copy.json", "config.json")
    link(run / "links" / "out", str(tmp_path))
    link(run / "links" / "gone", "../step-9/config.json")
    (run / "dpo").mkdir()
    (run / "dpo" / "adapter_config.json").write_text("{")
    assert [entry.path.name for entry in prune(run, keep_last=1).delete] == ["step-2", "step-1"]


def test_a_link_on_another_disk_counts(run: Path, tmp_path: Path) -> None:
    link(tmp_path / "other" / "best" / "x", str(run / "step-1" / "config.json"))
    done = prune(join_paths([run, tmp_path / "other"]), keep_last=1)
    assert reasons(done)["step-1"] == "`best/x` links into it"


def test_demote_keeps_what_is_read(run: Path) -> None:
    link(run / "step-2" / "config.json", "../step-1/config.json")
    kept = reasons(prune(run, keep_last=1, demote=True))
    assert kept["step-1"] == "`step-2/config.json` links into it"
    assert kept["step-2"] == "cannot be demoted: the file is a symbolic link"


def test_run_keeps_what_is_read(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1)
    run.save(1, nn.Linear(2, 2))
    link(tmp_path / "links" / "best", "../ckpt-1")
    for step in (2, 3):
        run.save(step, nn.Linear(2, 2))
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-1", "ckpt-3"]
