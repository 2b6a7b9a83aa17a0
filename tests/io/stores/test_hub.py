"""Checkpoints on the Hub: a repository at one commit, read by range, against a local server that speaks its calls."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.conversion.convert import consolidate
from ckptkit.formats import locate_all_chunks
from tests import command, producers
from tests.conftest import Produce
from tests.hub_server import Hub
from tests.storage.states import write_hf

_MANY = {f"model.layers.{i}.weight": torch.randn(64, 64) for i in range(40)}


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command said."""

    code: int
    value: dict[str, Any]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as server:
        yield server


def ckptkit(hub: Hub, *words: str, **environment: str) -> CommandResult:
    done = command.ckptkit(*words, "--json", env={**hub.env, **environment}, cwd=hub.root)
    assert "Traceback" not in done.stderr, done.stderr
    return CommandResult(done.returncode, json.loads(done.stdout))


def files_in(root: Path) -> dict[str, Path]:
    return {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}


def test_an_id_is_looked_at_without_its_weights(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for number in (1, 2):
        save_file({f"w{number}": torch.zeros(1 << 22)}, tmp_path / f"model/model-{number:05d}-of-00002.safetensors")
    places = {f"w{number}": f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    hub.put("org/model", files_in(tmp_path / "model"), private=True)
    found = ckptkit(hub, "inspect", "hf://org/model")
    assert [(tensor["name"], tensor["nbytes"]) for tensor in found.value["tensors"]] == [
        ("w1", 1 << 24),
        ("w2", 1 << 24),
    ]
    assert found.value["root"] == "hf://org/model"
    assert sum(hub.served.values()) < 1 << 18


@pytest.mark.slow
def test_all_of_it_is_of_one_commit(hub: Hub, tmp_path: Path) -> None:
    old, new = ({name: tensor + step for name, tensor in _MANY.items()} for step in (0, 1))
    for step, tensors in enumerate((old, new)):
        write_hf(tmp_path / str(step), tensors)
    first = hub.put("org/model", files_in(tmp_path / "0"))
    hub.put("org/model", files_in(tmp_path / "1"))
    for name, tensors in (("hf://org/model", new), (f"hf://org/model@{first}", old)):
        assert ckptkit(hub, "consolidate", name, str(tmp_path / "out"), "--overwrite").code == 0
        found = load_file(tmp_path / "out/model.safetensors")
        assert all(found[key].equal(tensor) for key, tensor in tensors.items())
    asked = [request for request in hub.requests if "/resolve/" in request or "/tree/" in request]
    assert not any("/main/" in request or request.endswith("/main") for request in asked)


def test_a_checkpoint_in_a_folder_is_verified_and_consolidated(hub: Hub, produce: Produce, tmp_path: Path) -> None:
    local = produce(producers.fsdp2).root
    hub.put("org/runs", {f"run/ckpt-5/{name}": path for name, path in files_in(local).items()})
    url = "hf://org/runs/run/ckpt-5"
    assert ckptkit(hub, "verify", url).value["ok"]
    assert ckptkit(hub, "ls", "hf://org/runs/run").value["latest"] is not None
    assert ckptkit(hub, "consolidate", url, str(tmp_path / "out")).value["source"] == url
    shutil.copytree(local, tmp_path / "ckpt-5")
    consolidate(tmp_path / "ckpt-5", tmp_path / "again")
    made, again = ((tmp_path / place / "model.safetensors").read_bytes() for place in ("out", "again"))
    assert made == again
    chunk = next(
        tensor.chunks[0] for tensor in locate_all_chunks(open_layout(local)).tensors.values() if tensor.spec.numel
    )
    damaged = bytearray((local / chunk.path).read_bytes())
    damaged[chunk.offset] ^= 1
    hub.put("org/runs", {f"run/ckpt-5/{chunk.path}": bytes(damaged)})
    found = ckptkit(hub, "verify", url)
    assert (found.code, {problem["path"] for problem in found.value["problems"]}) == (1, {f"{url}/{chunk.path}"})


@pytest.mark.slow
def test_where_a_file_is_sent_from_is_asked_for_once(hub: Hub, tmp_path: Path) -> None:
    save_file({str(i): torch.randn(1 << 20) for i in range(8)}, tmp_path / "model.safetensors")
    hub.put("org/model", {"model.safetensors": tmp_path / "model.safetensors"})
    hub.fail(r"GET /org/model/\w+/model.safetensors", "drop", after=1000)
    hub.fail(r"GET /org/model/\w+/model.safetensors", status=503)
    hub.fail(r"GET /org/model/\w+/model.safetensors", status=403)  # the place was signed, and that is over
    assert ckptkit(hub, "consolidate", "hf://org/model", str(tmp_path / "out")).code == 0
    assert load_file(tmp_path / "out/model.safetensors").keys() == set(map(str, range(8)))
    assert sum(count for request, count in hub.requests.items() if request.startswith("HEAD")) == 2
    size = (tmp_path / "model.safetensors").stat().st_size
    assert hub.served["org/model/model.safetensors"] < size + (1 << 20)


@pytest.mark.slow
def test_what_the_hub_has_not_or_does_not_show(hub: Hub, tmp_path: Path) -> None:
    write_hf(tmp_path / "model", {"t": torch.arange(3.0)})
    hub.put("org/model", files_in(tmp_path / "model"), private=True)
    for name, code in (("hf://org/none", 3), ("hf://org/model@none", 3), ("hf://org/model/none", 3)):
        said = ckptkit(hub, "inspect", name)
        assert (said.code, said.value["error"]["path"]) == (code, name)
    env, hub.token = hub.env, "hf_the_right_one"
    done = command.ckptkit("inspect", "hf://org/model", env=env)
    assert done.returncode == 4
    assert "HF_TOKEN" in done.stderr


def test_a_hub_that_is_gone_is_an_io_failure(tmp_path: Path) -> None:
    with Hub(tmp_path / "hub") as gone:
        pass
    said = ckptkit(gone, "inspect", "hf://org/model")
    assert (said.code, said.value["error"]["path"]) == (4, "hf://org/model")


def test_a_typo_in_a_local_path_stays_on_this_machine(hub: Hub, produce: Produce, tmp_path: Path) -> None:
    """Only `hf://` asks the Hub, and an option for a model, where the first part of the id is no name here."""
    source = str(produce(producers.fsdp2).root)
    said = ckptkit(hub, "inspect", "rnu/ckpt-30")
    assert (said.code, said.value["error"]["path"]) == (3, "rnu/ckpt-30")
    assert "hf://rnu/ckpt-30" in said.value["error"]["hint"]
    (hub.root / "run").mkdir()
    for words in (
        ("consolidate", source, str(tmp_path / "out"), "--base", "run/ckpt-30"),
        ("estimate", "run/ckpt-30", "--world-size", "8"),
        ("merge", "run/ckpt-30", source, str(tmp_path / "out")),
    ):
        assert ckptkit(hub, *words).code in (2, 3)
    assert not hub.requests


@pytest.mark.slow
def test_a_model_of_the_hub_is_said_to_be_one(hub: Hub, produce: Produce, tmp_path: Path) -> None:
    source = str(produce(producers.fsdp2).root)
    hub.put("org/model", {"config.json": b'{"model_type": "strange", "architectures": ["Strange"]}'})
    found = ckptkit(hub, "consolidate", source, str(tmp_path / "out"), "--base", "org/model")
    assert any("`org/model` is not a path here" in note for note in found.value["notes"])


@pytest.mark.slow
def test_what_the_cache_has_is_read_offline(hub: Hub, produce: Produce, tmp_path: Path) -> None:
    """As transformers does: weights, config and tokenizer come from the cache while HF_HUB_OFFLINE is set."""
    source = str(produce(producers.fsdp2).root)
    write_hf(tmp_path / "model", {"t": torch.arange(3.0)})
    config = b'{"model_type": "strange", "architectures": ["Strange"]}'
    hub.put("org/model", {**files_in(tmp_path / "model"), "config.json": config})
    fetch = "import huggingface_hub as h; h.snapshot_download('org/model')"
    subprocess.run([sys.executable, "-c", fetch], env=hub.env, check=True, capture_output=True)
    hub.requests.clear()
    offline = {"HF_HUB_OFFLINE": "1"}
    assert ckptkit(hub, "consolidate", source, str(tmp_path / "out"), "--base", "org/model", **offline).code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "strange"
    found = ckptkit(hub, "inspect", "hf://org/model", **offline)
    assert [tensor["name"] for tensor in found.value["tensors"]] == ["t"]
    assert ckptkit(hub, "consolidate", "hf://org/model", str(tmp_path / "again"), **offline).code == 0
    assert load_file(tmp_path / "again/model.safetensors")["t"].equal(torch.arange(3.0))
    assert not hub.requests


def test_an_error_of_the_hub_is_one_line(hub: Hub, produce: Produce, tmp_path: Path) -> None:
    source = str(produce(producers.fsdp2).root)
    for offline, code in (("0", 3), ("1", 4)):
        said = ckptkit(hub, "consolidate", source, str(tmp_path / "out"), "--base", "org/none", HF_HUB_OFFLINE=offline)
        message = said.value["error"]["message"]
        assert said.code == code
        assert "org/none" in message
        assert "\n" not in message
        assert ("HF_HUB_OFFLINE is set" in message) is (offline == "1")
