"""Pulls over real HTTP, by `huggingface_hub` as it is: what is in the directory, when, and how often it was fetched."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ckptkit.errors import Unsafe
from ckptkit.plugins.hub.pull import require_safe_file_name
from tests.hub_server import Hub, ckptkit, start

BIG = 24_000_000  # bytes; the client writes 10 MiB at a time
BLOCK = 10 << 20
CONTENT = "GET /org/tiny/[0-9a-f]{40}/model.safetensors"  # where the Hub redirects to


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A destination in a directory of its own."""
    home = tmp_path / "here"
    home.mkdir()
    return home / "out"


@pytest.mark.slow
def test_what_transformers_pushed_and_we_pulled_loads(hub: Hub, out: Path, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    assert ckptkit(hub, "push", tmp_path / "model", "org/tiny", "--yes").returncode == 0
    ran = ckptkit(hub, "pull", "org/tiny", out, "--json")
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["format"] == "hf"
    assert told["commit"] == hub.head("org/tiny").oid
    assert told["fetched_bytes"] == told["nbytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert len(list(out.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_only_the_files_and_nothing_else(hub: Hub, out: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": os.urandom(999), "a/b/c.txt": b"deep", "empty.txt": b""}
    hub.put("org/tiny", files, private=True)
    ran = ckptkit(hub, "pull", "org/tiny", out)
    assert ran.returncode == 0, ran.stderr
    there = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert there == files
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_killed_and_gone_on_with(hub: Hub, out: Path) -> None:
    content = os.urandom(BIG)
    hub.put("org/tiny", {"a.safetensors": os.urandom(5000), "model.safetensors": content, "z.txt": b"last"})
    fault = hub.fail(CONTENT, "stall", after=BIG - 1000)
    process = start(hub, "pull", "org/tiny", out, "--jobs", "1")
    assert fault.reached.wait(60)
    half = out.parent / ".out.ckptkit.tmp" / "model.safetensors"
    while half.stat().st_size < BLOCK:
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    fault.go.set()
    assert not out.exists()
    had = half.stat().st_size
    assert BLOCK <= had < BIG
    hub.served.clear()
    ran = ckptkit(hub, "pull", "org/tiny", out, "--json")
    assert ran.returncode == 0, ran.stderr
    assert (out / "model.safetensors").read_bytes() == content
    assert hub.served["org/tiny/a.safetensors"] == 0
    assert hub.served["org/tiny/model.safetensors"] == BIG - had
    assert json.loads(ran.stdout)["fetched_bytes"] == BIG - had + len(b"last")


@pytest.mark.slow
def test_interrupted(hub: Hub, out: Path) -> None:
    content = os.urandom(BIG)
    hub.put("org/tiny", {"model.safetensors": content})
    fault = hub.fail(CONTENT, "stall", after=BIG - 1000)
    process = start(hub, "pull", "org/tiny", out)
    assert fault.reached.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.startswith("interrupted\nthe same command continues")
    fault.go.set()
    assert not out.exists()
    assert ckptkit(hub, "pull", "org/tiny", out).returncode == 0
    assert (out / "model.safetensors").read_bytes() == content


@pytest.mark.slow
def test_a_connection_that_drops_is_gone_on_with(hub: Hub, out: Path) -> None:
    content = os.urandom(BIG)
    hub.put("org/tiny", {"model.safetensors": content})
    hub.fail(CONTENT, "drop", after=BIG - 1000)
    ran = ckptkit(hub, "pull", "org/tiny", out)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (out / "model.safetensors").read_bytes() == content
    assert hub.served["org/tiny/model.safetensors"] < BIG + BIG // 2


def test_a_bit_that_flips_on_the_way_is_found(hub: Hub, out: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": os.urandom(5000), "other.safetensors": os.urandom(5000)}
    hub.put("org/tiny", files)
    hub.fail(CONTENT, "flip", after=1234)
    hub.fail(r"GET .*/resolve/.*/config.json", "flip", after=1)
    ran = ckptkit(hub, "pull", "org/tiny", out, "--json")
    assert ran.returncode == 3
    error = json.loads(ran.stdout)["error"]
    assert error["code"] == "corrupt"
    assert error["path"] in ("model.safetensors", "config.json")
    assert not out.exists()
    assert ckptkit(hub, "pull", "org/tiny", out).returncode == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files
    assert hub.served["org/tiny/other.safetensors"] == 5000
    assert hub.served["org/tiny/model.safetensors"] == 10_000


@pytest.mark.parametrize(
    ("lies", "status"),
    [
        ({"sha256": hashlib.sha256(b"another").hexdigest()}, 3),
        ({"size": 4000}, 4),
        ({"size": 6000}, 4),
        ({"size": 1 << 60}, 4),
    ],
    ids=["sum", "shorter", "longer", "more than the disk"],
)
def test_what_is_not_what_the_hub_says(hub: Hub, out: Path, lies: dict[str, object], status: int) -> None:
    hub.put("org/tiny", {"model.safetensors": os.urandom(5000)})
    hub.claim("org/tiny", "model.safetensors", **lies)
    ran = ckptkit(hub, "pull", "org/tiny", out)
    assert ran.returncode == status, ran.stderr
    assert ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr
    assert not out.exists()
    if lies.get("size") == 1 << 60:
        assert "are free" in ran.stderr
        assert not hub.served
        assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "a//x", "a\\x", "./x", "a/.", "x\0y", ".ckptkit-work/x"]
)
def test_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(Unsafe):
        require_safe_file_name(name, "org/tiny")


@pytest.mark.slow
def test_a_stranger_with_hostile_names(hub: Hub, out: Path) -> None:
    for i, name in enumerate(("../escaped", "/tmp/escaped", "a/../../escaped")):
        hub.put(f"org/evil{i}", {name: b"evil", "config.json": b"{}"})
        ran = ckptkit(hub, "pull", f"org/evil{i}", out)
        assert ran.returncode == 5
        assert ran.stderr.startswith("error: ")
        assert not hub.served
    assert list(out.parent.iterdir()) == []
    assert not list(out.parent.parent.rglob("escaped"))


def test_a_file_that_is_also_a_directory(hub: Hub, out: Path) -> None:
    hub.put("org/evil", {"a": b"file", "a/b": b"below it"})
    ran = ckptkit(hub, "pull", "org/evil", out)
    assert ran.returncode in (4, 5)
    assert "Traceback" not in ran.stderr
    assert not out.exists()


@pytest.mark.slow
def test_some_files_of_a_revision(hub: Hub, out: Path) -> None:
    old = hub.put("org/tiny", {"a.json": b"old", "b.json": b"b", "c.txt": b"c"})
    hub.put("org/tiny", {"a.json": b"new"})
    chosen = ["--include", "*.json", "--exclude", "b*"]
    assert ckptkit(hub, "pull", f"org/tiny@{old}", out, *chosen).returncode == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"a.json": b"old"}
    ran = ckptkit(hub, "pull", "hf://org/tiny", out, *chosen)
    assert ran.returncode == 5
    assert ckptkit(hub, "pull", "hf://org/tiny", out, "--overwrite", "--revision", "main", *chosen).returncode == 0
    assert (out / "a.json").read_bytes() == b"new"
    ran = ckptkit(hub, "pull", "org/tiny", out.parent / "none", "--include", "*.bin")
    assert ran.returncode == 2
    assert "a.json" in ran.stderr
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_what_is_not_there(hub: Hub, out: Path) -> None:
    hub.put("org/tiny", {"a.json": b"{}"}, private=True)
    asked: list[tuple[str, dict[str, str], int]] = [
        ("org/none", {}, 3),
        ("org/tiny@none", {}, 3),
        ("org/tiny", {"HF_TOKEN": ""}, 3),
        ("org/tiny", {"HF_TOKEN": "hf_wrong"}, 4),
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, 4),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, 4),
    ]
    for place, environment, status in asked:
        ran = ckptkit(hub, "pull", place, out, **environment)
        assert ran.returncode == status, ran.stderr
        assert ran.stderr.startswith("error: ")
        assert "hf_wrong" not in ran.stderr
        assert "Traceback" not in ran.stderr
    assert list(out.parent.iterdir()) == []


@pytest.mark.slow
def test_a_file_too_large_for_plain_http(hub: Hub, out: Path) -> None:
    content = os.urandom(5000)
    hub.put("org/tiny", {"config.json": b"{}", "sub/model.safetensors": content})
    code = (
        "import sys, types; from ckptkit.plugins.hub import pull\n"
        "pull.constants = types.SimpleNamespace(MAX_HTTP_DOWNLOAD_SIZE=4000, ENDPOINT='')\n"
        "print(pull.pull('org/tiny', sys.argv[1]).nbytes)"
    )
    command = [sys.executable, "-c", code, str(out)]
    ran = subprocess.run(command, env=hub.env, capture_output=True, text=True, check=True)
    assert ran.stdout == "5002\n"
    assert (out / "sub" / "model.safetensors").read_bytes() == content
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "sub"]
