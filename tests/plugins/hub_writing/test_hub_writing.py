"""Output to repositories and buckets of the Hub: the bytes of a local one, in one commit, or its marks last."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import run
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import ckptkit
from ckptkit.errors import CkptError, IOFailure, NoRoom, NotACheckpoint, Occupied, Unsafe, Unsupported, Usage
from ckptkit.io.path import RemotePath
from ckptkit.io.stores import open_store
from ckptkit.storage import Writer
from tests.conftest import Some
from tests.directories import files_in
from tests.hub_buckets import Bucket
from tests.hub_server import Hub, start
from tests.hub_server import ckptkit as command
from tests.io.contract import WAYS
from tests.s3 import CLAIM, Place
from tests.tiers import nightly_but

GIT = ".gitattributes"
_CHANGES = "POST .*buckets.*/batch"
_MANY = 1 << 20  # requests


@dataclass(frozen=True, slots=True)
class There:
    """A server, a place on it for an output, and how to see what is there."""

    hub: Hub
    url: str
    see: Callable[[], dict[str, bytes]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that this process takes for the real one, too."""
    with Hub(tmp_path / "hub") as server:
        for name, value in server.storage_env.items():
            monkeypatch.setenv(name, value)
        constants = huggingface_hub.constants
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        open_store.cache_clear()
        yield server
        open_store.cache_clear()


def in_repo(hub: Hub, folder: str = "") -> dict[str, bytes]:
    """The files in a folder of the repository org/name, but for that of git."""
    there = hub.files("org/name") if "org/name" in hub.repositories else {}
    found = {name.removeprefix(folder): data for name, data in there.items() if name.startswith(folder)}
    return {name: data for name, data in found.items() if name != GIT}


def in_bucket(hub: Hub, folder: str = "run/ckpt-5/") -> dict[str, bytes]:
    """The files in a folder of the bucket org/many."""
    bucket = hub.buckets.get("org/many")
    files = bucket.files.items() if bucket else ()
    return {path.removeprefix(folder): blob.path.read_bytes() for path, (_, blob) in files if path.startswith(folder)}


@pytest.fixture(params=["repo", "folder", "bucket"])
def there(request: pytest.FixtureRequest, hub: Hub) -> There:
    if request.param == "bucket":
        return There(hub, "hf://buckets/org/many/run/ckpt-5", lambda: in_bucket(hub))
    if request.param == "folder":
        return There(hub, "hf://org/name/run/ckpt-5", lambda: in_repo(hub, "run/ckpt-5/"))
    return There(hub, "hf://org/name", lambda: in_repo(hub))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of DCP of two pieces, with an optimizer."""
    root = tmp_path_factory.mktemp("run") / "ckpt-5"
    generator = torch.Generator().manual_seed(0)
    model = {f"layers.{i}.w": torch.randn(250 + i, 501, generator=generator) for i in range(3)}
    states = {name: {"exp_avg": torch.ones(one.shape), "step": torch.tensor(5.0)} for name, one in model.items()}
    state = {"model": model, "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": list(model)}]}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=root, no_dist=True)
    (root / "config.json").write_text('{"model_type": "mine"}')
    return root


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkpoint of a few bytes."""
    root = tmp_path / "ckpt-5"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": {"w": torch.arange(1000.0)}}, checkpoint_id=root, no_dist=True)
    (root / "config.json").write_text('{"model_type": "mine"}')
    return root


def commits(hub: Hub) -> list[str]:
    return [commit.title for commit in hub.repositories["org/name"].commits.values()]


@pytest.mark.parametrize("way", ["hf", "hf shards", "dcp"])
def test_the_bytes_are_those_of_a_local_output(way: str, there: There, source: Path, tmp_path: Path) -> None:
    convert, options = WAYS[way]
    convert(source, tmp_path / "out", **options)
    convert(source, there.url, **options)
    assert there.see() == files_in(tmp_path / "out")
    assert all(part.is_ok for part in ckptkit.verify(there.url))
    for repository in there.hub.repositories.values():
        assert repository.private
        assert len(repository.commits) == 2  # the first is of the Hub
    assert all(bucket.private for bucket in there.hub.buckets.values())


def test_there_and_back(there: There, source: Path, tmp_path: Path) -> None:
    done = ckptkit.cp(source, there.url)
    assert there.see() == files_in(source)
    assert 0 < done.sent_bytes <= done.nbytes
    ckptkit.cp(there.url, tmp_path / "back")
    assert files_in(tmp_path / "back") == files_in(source)


def test_a_single_file(hub: Hub, source: Path, tmp_path: Path) -> None:
    ckptkit.convert(source, tmp_path / "state.pt", to="pt")
    expected = (tmp_path / "state.pt").read_bytes()
    ckptkit.convert(source, "hf://org/name/states/state.pt", to="pt")
    assert in_repo(hub) == {"states/state.pt": expected}
    ckptkit.convert(source, "hf://buckets/org/many/run/state.pt", to="pt")
    assert in_bucket(hub, "") == {"run/state.pt": expected}
    for url in ("hf://org/name/states/state.pt", "hf://buckets/org/many/run/state.pt"):
        with pytest.raises(Occupied):
            ckptkit.convert(source, url, to="pt")
        ckptkit.convert(source, url, to="pt", dtype="bfloat16", overwrite=True)
    assert in_repo(hub)["states/state.pt"] == in_bucket(hub, "")["run/state.pt"] != expected
    with pytest.raises(Usage, match="one file"):
        ckptkit.convert(source, "hf://org/name.pt", to="pt")


@pytest.mark.nightly
def test_transformers_opens_what_the_hub_has(hub: Hub, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "ckpt-5", no_dist=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "ckpt-5")
    ckptkit.consolidate(tmp_path / "ckpt-5", "hf://org/name")
    script = "import torch; from transformers import AutoModelForCausalLM as Auto\n"
    script += "model = Auto.from_pretrained('org/name'); torch.save(model.state_dict(), 'loaded.pt')"
    run([sys.executable, "-c", script], env=hub.env, cwd=tmp_path, check=True)
    loaded = torch.load(tmp_path / "loaded.pt")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "words"),
    [("repo", "consolidate"), ("folder", "cp"), ("bucket", "convert --to dcp")],
    indirect=["there"],
)
def test_without_yes_nothing_is_sent(words: str, there: There, small: Path) -> None:
    first, *more = words.split()
    ran = command(there.hub, first, small, there.url, *more, **there.hub.storage_env)
    assert ran.returncode == 0, ran.stderr
    assert "(new, private); nothing was sent yet: pass --yes to send it" in ran.stdout
    told = json.loads(command(there.hub, first, small, there.url, *more, "--json", **there.hub.storage_env).stdout)
    assert any("nothing was sent" in text for text in told["notes"])
    assert {request.split()[0] for request in there.hub.requests} == {"GET"}
    assert not there.hub.repositories
    assert not there.hub.buckets
    ran = command(there.hub, first, small, there.url, *more, "--yes", **there.hub.storage_env)
    assert ran.returncode == 0, ran.stderr
    assert there.see()
    again = command(there.hub, first, small, there.url, *more, **there.hub.storage_env)
    assert again.returncode == 5, "what would be refused is refused before"


def test_doctor_sends_nothing(hub: Hub, small: Path) -> None:
    ran = command(hub, "doctor", small, "--fix", "hf://org/name", **hub.storage_env)
    assert ran.returncode == 2
    assert "--fix does not write to the Hub" in ran.stderr
    assert not hub.requests


@pytest.mark.slow
def test_somebody_else_pushes_meanwhile(hub: Hub, source: Path) -> None:
    hub.put("org/name", {"README.md": b"theirs"})
    fault = hub.fail("POST .*/commit/", "stall")
    process = start(hub, "cp", source, "hf://org/name", "--yes", **hub.storage_env)
    assert fault.reached.wait(60)
    hub.put("org/name", {"notes.md": b"theirs, too"})
    fault.go.set()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 5, said
    assert "somebody else pushed to main of `org/name`" in said
    assert "run the same command again" in said
    assert set(in_repo(hub)) == {"README.md", "notes.md"}
    done = ckptkit.cp(source, "hf://org/name")
    assert in_repo(hub) == {**files_in(source), "README.md": b"theirs", "notes.md": b"theirs, too"}
    assert done.sent_bytes < done.nbytes / 100
    assert any("were there already" in line for line in done.summary())


@pytest.mark.parametrize("end", nightly_but([signal.SIGKILL], [signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
def test_an_end_before_the_commit_shows_nothing(end: signal.Signals, hub: Hub, source: Path) -> None:
    fault = hub.fail("POST .*/commit/", "stall")
    process = start(hub, "cp", source, "hf://org/name", "--yes", **hub.storage_env)
    assert fault.reached.wait(60)
    process.send_signal(end)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not in_repo(hub)
    fault.kind = "drop"
    fault.go.set()
    done = ckptkit.cp(source, "hf://org/name")
    assert in_repo(hub) == files_in(source)
    assert done.sent_bytes < done.nbytes / 100


def test_a_commit_whose_answer_is_lost_counts(hub: Hub, small: Path) -> None:
    hub.fail("POST .*/commit/", "mute")
    ckptkit.cp(small, "hf://org/name")
    assert in_repo(hub) == files_in(small)
    assert len(commits(hub)) == 2


@pytest.mark.parametrize(
    "where", nightly_but(["/commit/"], ["/commit/", "/preupload/", "xet-write-token", "/repos/create"])
)
def test_what_the_hub_refuses_leaves_no_file(where: str, hub: Hub, small: Path) -> None:
    hub.fail(where, status=403)
    with pytest.raises(IOFailure, match="403"):
        ckptkit.cp(small, "hf://org/name")
    assert not in_repo(hub)
    ckptkit.cp(small, "hf://org/name")
    assert in_repo(hub) == files_in(small)


def test_what_arrived_is_compared(hub: Hub, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = hub.store

    def damage(name: str, content: bytes | Path, **how: Any) -> Any:
        return store(name, b"{}" if name == "config.json" else content, **how)

    monkeypatch.setattr(hub, "store", damage)
    with pytest.raises(CkptError, match=r"config\.json: the Hub has other bytes: expected 22 bytes, .*; found 2 bytes"):
        ckptkit.cp(small, "hf://org/name")


def shards(root: Path, number: int, value: float) -> Path:
    """A model in so many files."""
    names = [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]
    root.mkdir()
    for i, name in enumerate(names):
        save_file({f"w{i}": torch.full((10,), value)}, root / name)
    index = {"metadata": {}, "weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "config.json").write_text('{"model_type": "mine"}')
    return root


def test_overwrite_in_a_repository(hub: Hub, tmp_path: Path) -> None:
    old, new = shards(tmp_path / "old", 3, 1.0), shards(tmp_path / "new", 2, 2.0)
    others = {"README.md": b"# a card", "figures/loss.png": b"\0png"}
    hub.put("org/name", {**others, **files_in(old)})
    with pytest.raises(Occupied, match="the destination exists"):
        ckptkit.cp(new, "hf://org/name")
    ckptkit.cp(new, "hf://org/name", overwrite=True)
    assert in_repo(hub) == {**others, **files_in(new)}
    assert len(commits(hub)) == 3
    ckptkit.cp(new, "hf://org/name", overwrite=True)
    assert len(commits(hub)) == 3, "nothing to commit"


def test_other_files_in_a_repository_stay(hub: Hub, tmp_path: Path) -> None:
    new = shards(tmp_path / "new", 2, 2.0)
    hub.put("org/name", {"README.md": b"# a card", "config.json": b"{}"})
    with pytest.raises(Occupied, match=r"files of these names: config\.json"):
        ckptkit.cp(new, "hf://org/name")
    with pytest.raises(Occupied, match=r"expected a directory or nothing at .*, found a file"):
        ckptkit.cp(new, "hf://org/name/config.json")
    ckptkit.cp(new, "hf://org/name", overwrite=True)
    assert in_repo(hub) == {"README.md": b"# a card", **files_in(new)}


def test_a_new_branch_has_the_output_alone(hub: Hub, tmp_path: Path) -> None:
    old, new = shards(tmp_path / "old", 3, 1.0), shards(tmp_path / "new", 2, 2.0)
    hub.put("org/name", files_in(old))
    ckptkit.cp(new, "hf://org/name@dev")
    assert hub.files("org/name", "dev").keys() - {GIT} == files_in(new).keys()
    assert in_repo(hub) == files_in(old)
    ckptkit.cp(old, "hf://org/other@dev")
    assert hub.files("org/other", "dev").keys() - {GIT} == files_in(old).keys()
    assert hub.files("org/other").keys() == {GIT}


def test_from_s3_to_the_hub(hub: Hub, small: Path, place: Place) -> None:
    ckptkit.cp(small, place.url)
    for url in ("hf://org/name/ckpt-5", "hf://buckets/org/many/run/ckpt-5"):
        ckptkit.cp(place.url, url)
    assert in_repo(hub, "ckpt-5/") == in_bucket(hub) == files_in(small)


def test_marks_come_last_in_a_bucket(hub: Hub, source: Path) -> None:
    ckptkit.consolidate(source, "hf://buckets/org/many/run/ckpt-5", max_shard_size=1_000_000)
    batches = [[path.removeprefix("run/ckpt-5/") for path in batch] for batch in hub.buckets["org/many"].batches]
    assert batches[0] == batches[-1] == [CLAIM]
    assert batches[-4:-1] == [["ckptkit.json"], ["model.safetensors.index.json"], ["config.json"]]
    assert all(name.startswith("model-") for name in batches[1])


MARKS = [("hf", "config.json"), ("dcp", ".metadata")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "mark"), nightly_but([("hf", "config.json")], MARKS))
def test_whatever_request_fails_a_bucket_has_no_mark_or_all(
    way: str, mark: str, hub: Hub, small: Path, some: Some, tmp_path: Path
) -> None:
    convert, options = WAYS[way]
    convert(small, tmp_path / "out", **options)
    expected = files_in(tmp_path / "out")
    totals = {where: hub.fail(where, status=403, skip=_MANY) for where in ("buckets", _CHANGES)}
    convert(small, "hf://buckets/org/many/run/ckpt-5", **options)
    points = [(where, skip) for where, fault in totals.items() for skip in some(_MANY - fault.skip)]
    for where, skip in points:
        hub.buckets.clear()
        hub.faults.clear()
        open_store.cache_clear()
        fault = hub.fail(where, status=403, skip=skip)
        try:
            convert(small, "hf://buckets/org/many/run/ckpt-5", **options)
        except CkptError:
            found = in_bucket(hub)
            assert mark not in found or found.items() >= expected.items()
            convert(small, "hf://buckets/org/many/run/ckpt-5", overwrite=mark in found, **options)
        assert in_bucket(hub) == expected
        assert fault.times == 0, f"request {skip} did not fail"


def test_a_killed_upload_to_a_bucket_is_resumed(hub: Hub, source: Path, small: Path) -> None:
    fault = hub.fail("POST .*/batch", "stall", skip=1)
    url = "hf://buckets/org/many/run/ckpt-5"
    process = start(hub, "cp", source, url, "--yes", **hub.storage_env)
    assert fault.reached.wait(60)
    process.kill()
    process.communicate()
    fault.go.set()
    with pytest.raises(Occupied, match="another upload has been under way since"):
        ckptkit.cp(small, url)
    done = ckptkit.cp(source, url)
    assert in_bucket(hub) == files_in(source)
    assert done.sent_bytes < done.nbytes / 100


def test_only_the_files_of_an_abandoned_upload_to_a_bucket_are_deleted(hub: Hub, source: Path, small: Path) -> None:
    url = "hf://buckets/org/many/run/ckpt-5"
    hub.fail("POST .*/batch", skip=2, status=403)
    with pytest.raises(IOFailure, match="403"):
        ckptkit.cp(source, url)
    files = hub.buckets["org/many"].files
    assert CLAIM in in_bucket(hub)
    assert "__0_0.distcp" in in_bucket(hub)
    files["run/ckpt-5/ckpt-6/mine.png"] = files["run/ckpt-5/__0_0.distcp"]
    with pytest.raises(Occupied, match=r"does not know: .*ckpt-6"):
        ckptkit.cp(small, url, overwrite=True)
    assert in_bucket(hub).keys() == {"ckpt-6/mine.png"}


def test_overwrite_in_a_bucket(hub: Hub, tmp_path: Path) -> None:
    old, new = shards(tmp_path / "old", 3, 1.0), shards(tmp_path / "new", 2, 2.0)
    url = "hf://buckets/org/many/run/ckpt-5"
    ckptkit.cp(old, url)
    with pytest.raises(Occupied, match="the destination exists"):
        ckptkit.cp(new, url)
    bucket = hub.buckets["org/many"]
    before = len(bucket.batches)
    ckptkit.cp(new, url, overwrite=True)
    assert in_bucket(hub) == files_in(new)
    first, second = bucket.batches[before : before + 2]
    assert first == [f"run/ckpt-5/{CLAIM}"]
    assert {"run/ckpt-5/config.json", "run/ckpt-5/model.safetensors.index.json"} == set(second)
    hub.fail("POST .*/batch", skip=1, status=403)  # the claim is there, and no file has been deleted
    with pytest.raises(IOFailure, match="403"):
        ckptkit.cp(old, url, overwrite=True)
    ckptkit.cp(old, url)
    assert in_bucket(hub) == files_in(old)
    hub.fail("POST .*/batch", skip=1, status=403)
    with pytest.raises(IOFailure, match="403"):
        ckptkit.cp(new, url, overwrite=True)
    ckptkit.cp(new, url)
    assert in_bucket(hub) == files_in(new)
    bucket.files["run/ckpt-5/mine.png"] = bucket.files["run/ckpt-5/config.json"]
    with pytest.raises(Occupied, match=r"does not know: mine\.png"):
        ckptkit.cp(old, url, overwrite=True)


def test_a_base_in_a_bucket_is_not_replaced(hub: Hub, small: Path) -> None:
    url = "hf://buckets/org/many/run/ckpt-5"
    ckptkit.cp(small, f"{url}/base")
    with pytest.raises(Unsafe, match="the source is the destination, or inside it"):
        ckptkit.consolidate(small, url, base=f"{url}/base", overwrite=True)
    assert in_bucket(hub, "run/ckpt-5/base/") == files_in(small)


@pytest.mark.parametrize("url", ["hf://org/name", "hf://buckets/org/many/run/ckpt-5"])
def test_one_process_only(url: str, hub: Hub, small: Path) -> None:
    for refused in (
        lambda: ckptkit.consolidate(small, url, part="1/2"),
        lambda: ckptkit.finalize(url),
        lambda: Writer(url),
        lambda: ckptkit.Run(url),
    ):
        with pytest.raises(Unsupported, match="several processes cannot write to hf:// together") as caught:
            refused()
        assert "ckptkit cp" in (caught.value.hint or "")
    assert not hub.storage.files()


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("hf://datasets/org/name", Usage, "does not write to `hf://datasets/org/name`"),
        ("hf://spaces/org/name", Usage, "does not write to `hf://spaces/org/name`"),
        (f"hf://org/name@{'0' * 40}", Usage, "a commit cannot be written to"),
        ("hf://buckets/org/many", Usage, "is a whole bucket"),
        ("hf://nobody/name", IOFailure, "403"),
        ("hf://buckets/nobody/name/run", IOFailure, "403"),
        ("hf://org/-bad-", Usage, "does not allow the name"),
    ],
)
def test_where_nothing_can_be_written(url: str, kind: type[CkptError], words: str, hub: Hub, small: Path) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        ckptkit.cp(small, url)
    assert not hub.storage.files()


def test_who_may_not_write_is_told_why(hub: Hub, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fail("POST .*/commit/", status=403, message="Private repository storage limit reached, please upgrade")
    with pytest.raises(NoRoom, match="storage limit reached") as full:
        ckptkit.cp(small, "hf://org/name")
    assert "free some space there" in (full.value.hint or "")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    open_store.cache_clear()
    with pytest.raises(IOFailure, match="401") as caught:
        ckptkit.cp(small, "hf://org/other")
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(IOFailure, match="no token"):
        ckptkit.cp(small, "hf://org/other")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with pytest.raises(Unsupported, match="HF_HUB_DISABLE_XET"):
        ckptkit.cp(small, "hf://org/other")
    assert "org/other" not in hub.repositories


def test_a_bucket_that_is_missing_is_no_checkpoint(hub: Hub) -> None:
    with pytest.raises(NotACheckpoint, match="no such bucket"):
        ckptkit.verify("hf://buckets/org/many/run")
    hub.buckets["org/many"] = Bucket(private=True)
    assert not RemotePath("hf:", "buckets", "org", "many", "run").exists()
