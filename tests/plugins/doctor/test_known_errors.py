"""What failed loads say, and what is made of it: each message comes from the library that says it."""

from __future__ import annotations

import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import ckptkit
from ckptkit import Finding, doctor, explain
from ckptkit.errors import NotACheckpoint
from ckptkit.plugins.doctor.known_errors import MESSAGES
from tests import producers
from tests.conftest import Produce
from tests.plugins.doctor import situations
from tests.plugins.doctor.situations import blank, from_pretrained, llama, load_into, run
from tests.plugins.doctor.test_doctor import groups_of
from tests.producers import needs_errors_of_ranks, save_alone, spawn


def error_of(function: Any, *arguments: Any) -> BaseException:
    with pytest.raises((Exception, dcp.api.CheckpointException)) as raised:
        function(*arguments)
    return raised.value


def by_code(found: tuple[Finding, ...]) -> dict[str, Finding]:
    return {one.code: one for one in found}


def test_names_with_a_prefix(tmp_path: Path) -> None:
    state = {f"_orig_mod.{name}": tensor for name, tensor in llama().state_dict().items()}
    save_alone({"model": state}, tmp_path / "ckpt-1")
    error = error_of(llama().load_state_dict, state)
    found = by_code(explain(error, tmp_path / "ckpt-1"))
    assert found.keys() == {"renamed"}
    assert found["renamed"].tensor == "_orig_mod.*"
    fixed = run(found["renamed"].fix)
    load_into({"model": blank(llama().state_dict())}, fixed)
    error = error_of(load_into, {"model": blank(llama().state_dict())}, tmp_path / "ckpt-1")
    (one,) = explain(error, tmp_path / "ckpt-1")
    assert one.code == "renamed"
    assert one.fix == found["renamed"].fix


def test_a_missing_step_is_not_that_of_the_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    wanted = {"step": torch.tensor(0)}
    for extra, said in (
        ({}, "the checkpoint does not contain it"),
        ({"state": wanted}, "the checkpoint contains it as `state.step`"),
        ({"a": wanted, "b": wanted}, "the checkpoint contains it as `a.step` or `b.step`"),
    ):
        path = tmp_path / f"{len(extra)}{'state' in extra}" / "ckpt-1"
        save_alone({**state, **extra}, path)
        (one,) = explain(error_of(load_into, wanted, path), path)
        assert (one.tensor, one.message) == ("step", said)


def test_a_key_too_many(tmp_path: Path) -> None:
    weights = {"up.weight": torch.ones(2, 3), "down.weight": torch.ones(3, 2)}
    save_alone({"model": weights}, tmp_path / "ckpt-1")
    error = error_of(load_into, {"state": {"model": blank(weights)}}, tmp_path / "ckpt-1")
    (one,) = explain(error, tmp_path / "ckpt-1")
    assert (one.code, one.tensor) == ("key", "state.model.up.weight")
    assert "as `model.up.weight`" in one.message
    model = nn.ModuleDict({"up": nn.Linear(3, 2, bias=False), "down": nn.Linear(2, 3, bias=False)})
    (one,) = explain(error_of(model.load_state_dict, {}), tmp_path / "ckpt-1")
    assert (one.code, one.count) == ("key", 2)
    error = error_of(model.load_state_dict, weights | {"more": torch.ones(1)})
    assert [(one.code, one.tensor) for one in explain(error, tmp_path / "ckpt-1")] == [("unexpected", "more")]


def test_shapes(tmp_path: Path) -> None:
    save_alone({"model": llama(vocab_size=64).state_dict()}, tmp_path / "ckpt-1")
    error = error_of(load_into, {"model": blank(llama().state_dict())}, tmp_path / "ckpt-1")
    (one,) = explain(error, tmp_path / "ckpt-1")
    assert one.code == "vocabulary"
    load_into({"model": blank(llama().state_dict())}, run(one.fix))
    found = explain(error_of(llama().load_state_dict, llama(vocab_size=64).state_dict()), tmp_path / "ckpt-1")
    assert [one.code for one in found] == ["vocabulary", "vocabulary"]
    found = explain(error_of(llama(hidden_size=16).load_state_dict, llama().state_dict()), tmp_path / "ckpt-1")
    assert {one.code for one in found} == {"shape"}


@needs_errors_of_ranks
def test_a_state_that_was_never_made(produce: Produce) -> None:
    made = produce(situations.never_trained).root
    found = explain((made / "said").read_text(), made / "ckpt-1")
    assert [(one.code, one.count) for one in found] == [("optimizer_state", 2), ("optimizer_state", 2)]
    assert found[0].fix is not None
    assert "--complete-optimizer" in found[0].fix


def test_a_state_that_one_file_lacks(tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = fresh()
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch.save(state, tmp_path / "last.pt")
    error = error_of(set_optimizer_state_dict, *fresh(), state["optimizer"])
    found = explain(error, tmp_path / "last.pt")
    assert [(one.code, one.tensor) for one in found] == [
        ("optimizer_state", "optimizer.state.1.weight"),
        ("optimizer_state", "optimizer.state.1.bias"),
    ]
    assert "set_optimizer_state_dict" in doctor(tmp_path / "last.pt").notes[0]  # which another loader is not in need of
    fixed = torch.load(run(found[0].fix))
    assert not doctor(tmp_path / "last-fixed.pt").notes[1:]
    set_optimizer_state_dict(*fresh(), fixed["optimizer"])


def test_groups(tmp_path: Path) -> None:
    torch.save(groups_of(["a", "b"], ["c"]), tmp_path / "one.pt")
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))])
    error = error_of(optimizer.load_state_dict, torch.load(tmp_path / "one.pt")["optimizer"])
    (one,) = explain(error, tmp_path / "one.pt")
    assert (one.code, one.tensor) == ("groups", "optimizer")
    assert "2, 1 parameters" in one.message


def test_files_that_are_not_there(produce: Produce, tmp_path: Path) -> None:
    root = tmp_path / "ckpt-9"
    shutil.copytree(produce(producers.fsdp2).root, root)
    (root / "__1_0.distcp").unlink()
    error = error_of(load_into, {"model": {"up.weight": torch.zeros(7, 6)}}, root)
    assert "incomplete" in by_code(explain(error, root))
    (root / ".metadata").unlink()
    error = error_of(load_into, {"model": {"up.weight": torch.zeros(7, 6)}}, root)
    assert "did not finish" in explain(error, root)[0].message


@pytest.mark.slow
def test_another_number_of_ranks(produce: Produce, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from tests.trainers.produced_zero import on_two

    root, said = tmp_path / "zero1", tmp_path / "said"
    shutil.copytree(produce(on_two).root / "zero1", root)
    spawn(1, situations.load_zero_and_again, root, said)
    first, fix, second = json.loads(said.read_text())
    assert "DP world size of 2 but the current world size is 1" in first
    assert second == "loaded"
    (found,) = doctor(root, world_size=1).findings
    assert (found.code, found.fix) == ("world_size", fix)
    assert doctor(produce(on_two).root / "zero0", world_size=1).is_ok
    assert doctor(tmp_path / "zero1" / "global_step2-universal", world_size=1).is_ok


def test_no_model_yet(produce: Produce, tmp_path: Path) -> None:
    root = tmp_path / "ckpt-9"
    save_alone({"model": llama().state_dict()}, root)
    llama().config.save_pretrained(root)
    found = explain(error_of(from_pretrained, root), root)
    assert [one.code for one in found] == ["no_model"]
    _, info = from_pretrained(run(found[0].fix))
    assert not info["missing_keys"]


class Setting:
    """A class of the training's own, pickled beside its weights."""


def test_pickles(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict(), "args": Setting()}, tmp_path / "model.pt")
    (one,) = explain(error_of(torch.load, tmp_path / "model.pt"), tmp_path / "model.pt")
    assert one.code == "no_model"
    assert sorted(ckptkit.open(run(one.fix))) == ["bias", "weight"]


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "model.pt")
    (tmp_path / "model.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:2000])
    found = by_code(explain(error_of(torch.load, tmp_path / "model.pt"), tmp_path / "model.pt"))
    assert "corrupt" in found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "it is a git-lfs pointer"),
        (b"<!doctype html>", "a web page"),
        (bytes(5000), "only zeros"),
        (b"", "the file is empty"),
    ],
    ids=["pointer", "page", "zeros", "empty"],
)
def test_files_that_are_none_of_torch(tmp_path: Path, content: bytes, words: str) -> None:
    save_alone({"model": {"w": torch.ones(2)}}, tmp_path / "ckpt-1")
    (tmp_path / "model.pt").write_bytes(content)
    (one,) = explain(error_of(torch.load, tmp_path / "model.pt"), tmp_path / "ckpt-1")
    assert one.code == "corrupt"
    assert words in one.message


def test_the_report_of_transformers(tmp_path: Path) -> None:
    """A warning, in which many names are cut short: what is wrong shows in the checkpoint."""
    weights = {f"net.{name}": tensor for name, tensor in llama().state_dict().items()}
    root = situations.write_hf(tmp_path / "hf", weights, llama().config.to_dict())
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("transformers").addHandler(handler)
    try:
        from_pretrained(root)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    if "LOAD REPORT" not in said.getvalue():
        pytest.skip("this transformers says it in other words")
    (one,) = explain(said.getvalue(), root)
    assert (one.code, one.tensor) == ("renamed", "net.*")
    _, info = from_pretrained(run(one.fix))
    assert not info["missing_keys"]


def test_what_nobody_knows(tmp_path: Path) -> None:
    save_alone({"model": {"w": torch.ones(2)}}, tmp_path / "ckpt-1")
    assert explain(RuntimeError("CUDA out of memory"), tmp_path / "ckpt-1") == ()
    with pytest.raises(NotACheckpoint):
        explain(RuntimeError("Missing key(s) in state_dict"), tmp_path / "nothing")


def test_an_error_and_what_led_to_it(tmp_path: Path) -> None:
    save_alone({"model": {"w": torch.ones(2)}}, tmp_path / "ckpt-1")
    first = RuntimeError("Missing key in checkpoint state_dict: model.x.")
    second = RuntimeError("resume failed")
    second.__cause__ = first
    (one,) = explain(second, tmp_path / "ckpt-1")
    assert (one.code, one.tensor) == ("missing", "model.x")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.words[:40])
def test_every_message_is_known_by_its_own_words(tmp_path: Path, message: Any) -> None:
    save_alone({"model": {"w": torch.ones(2)}}, tmp_path / "ckpt-1")
    text = message.words.replace("…", "x")
    assert message.pattern.search(text)
    assert explain(text, tmp_path / "ckpt-1")
