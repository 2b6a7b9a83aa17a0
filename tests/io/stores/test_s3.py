"""Checkpoints on S3: everything that reads one, against a real server, and against one that fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.checks.inspect import inspect
from ckptkit.checks.make_manifest import make_manifest
from ckptkit.checks.verify import verify
from ckptkit.conversion.convert import consolidate, convert, reshard
from ckptkit.errors import CkptError, Corrupt, IOFailure, NotACheckpoint, Usage
from ckptkit.formats import locate_all_chunks
from ckptkit.io.path import to_path
from ckptkit.runs.ls import list_run
from tests import command, producers
from tests.conftest import Produce
from tests.producers import Producer
from tests.s3 import Bucket, forget
from tests.storage.states import every_kind, flip, write_hf, write_pt

NAMES = ("a b", "ü-ß", "100%", "%41%2F", "a#b?c", "a+b&c=d", "a'b\"c", "[x]*")


def files_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.name != "ckptkit.json"}


def many_tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"model.layers.{i}.norm.weight": torch.full((300 + i % 7,), float(i)) for i in range(count)}


@pytest.mark.parametrize(
    "producer", [producers.fsdp2, producers.many_files, producers.accelerate, producers.hf_shards, producers.hf_alone]
)
def test_it_becomes_what_a_local_one_becomes(
    producer: Producer, produce: Produce, bucket: Bucket, tmp_path: Path
) -> None:
    local = produce(producer).root
    shutil.copytree(local, bucket.root / "run/ckpt-5")
    url = f"{bucket.url}/run/ckpt-5"
    assert inspect(url).layout.specs == inspect(local).layout.specs
    remote, here = (locate_all_chunks(Checkpoint.open(path).model_component.layout) for path in (to_path(url), local))
    assert remote.tensors == here.tensors
    assert all(part.is_ok for part in verify(url))
    made = consolidate(url, tmp_path / "from-s3")
    consolidate(local, tmp_path / "from-disk")
    assert files_of(tmp_path / "from-s3") == files_of(tmp_path / "from-disk")
    assert load_file(tmp_path / "from-s3/model.safetensors").keys() == inspect(tmp_path / "from-s3").layout.specs.keys()
    assert str(made.source).startswith(url)


@pytest.mark.slow
def test_files_of_torch_and_safetensors(bucket: Bucket, tmp_path: Path) -> None:
    tensors = every_kind()
    write_pt(bucket.root / "model.pt", tensors)
    write_hf(bucket.root / "hf", {name: tensor for name, tensor in tensors.items() if not tensor.is_complex()})
    for name in ("model.pt", "hf/model.safetensors", "hf"):
        consolidate(
            bucket.root / name, tmp_path / "from-disk", overwrite=True, exclude=["*complex*"], allow_unmatched=True
        )
        consolidate(
            f"{bucket.url}/{name}", tmp_path / "from-s3", overwrite=True, exclude=["*complex*"], allow_unmatched=True
        )
        assert files_of(tmp_path / "from-s3") == files_of(tmp_path / "from-disk")
        assert verify(f"{bucket.url}/{name}")[0].is_ok


def test_other_numbers_of_ranks_and_the_files_beside(produce: Produce, bucket: Bucket, tmp_path: Path) -> None:
    local = bucket.root / "run/ckpt-5"
    shutil.copytree(produce(producers.fsdp2).root, local)
    (local / "notes").mkdir()
    (local / "notes/why.txt").write_text("because")
    reshard(local, tmp_path / "from-disk", to=3)
    reshard(f"{bucket.url}/run/ckpt-5", tmp_path / "from-s3", to=3)
    assert (tmp_path / "from-s3/notes/why.txt").read_text() == "because"
    shutil.rmtree(tmp_path / "from-s3/notes")
    shutil.rmtree(tmp_path / "from-disk/notes")
    assert files_of(tmp_path / "from-s3") == files_of(tmp_path / "from-disk")


@pytest.mark.slow
def test_a_run_is_listed_and_its_latest_checkpoint_taken(produce: Produce, bucket: Bucket, tmp_path: Path) -> None:
    for step in (5, 10):
        shutil.copytree(produce(producers.fsdp2).root, bucket.root / f"run/ckpt-{step}")
    (bucket.root / "run/ckpt-15").mkdir()
    shutil.copy(produce(producers.fsdp2).root / "__0_0.distcp", bucket.root / "run/ckpt-15")
    (bucket.root / "run/config.json").write_text('{"model_type": "none"}')
    three = threading.Barrier(3)

    def wait_for_others() -> None:
        with suppress(threading.BrokenBarrierError):
            three.wait(timeout=30)

    bucket.server.fail("GET .*prefix=run/ckpt", first=wait_for_others, times=3)
    found = list_run(f"{bucket.url}/run")
    assert bucket.server.most >= 3
    assert [(listed.step, listed.is_complete) for listed in found.checkpoints] == [(5, True), (10, True), (15, False)]
    assert str(found.latest) == f"{bucket.url}/run/ckpt-10"
    made = consolidate(f"{bucket.url}/run", tmp_path / "out")
    assert str(made.source) == f"{bucket.url}/run/ckpt-10"
    assert (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_are_keys_as_they_stand(name: str, bucket: Bucket, tmp_path: Path) -> None:
    write_hf(bucket.root / "hf", {"t": torch.arange(9.0)})
    shutil.copytree(bucket.root / "hf", bucket.root / name)
    shutil.rmtree(bucket.root / "hf")
    url = f"{bucket.url}/{name}"
    assert str(inspect(url).layout.root) == url
    consolidate(url, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")["t"].equal(torch.arange(9.0))


@pytest.mark.slow
def test_many_small_tensors_take_few_requests(bucket: Bucket, tmp_path: Path) -> None:
    tensors = many_tensors(1000)
    write_hf(tmp_path / "hf", tensors)
    convert(tmp_path / "hf", bucket.root / "dcp", to="dcp", world_size=4)
    shutil.copytree(tmp_path / "hf", bucket.root / "hf")
    for name in ("dcp", "hf"):
        forget()
        bucket.server.requests.clear()
        consolidate(f"{bucket.url}/{name}", tmp_path / f"from-{name}")
        found = load_file(tmp_path / f"from-{name}/model.safetensors")
        assert found.keys() == tensors.keys()
        assert all(found[key].equal(tensor) for key, tensor in tensors.items())
        size = sum(path.stat().st_size for path in (bucket.root / name).iterdir())
        assert len(bucket.server.reads) < 40 + size // (1 << 17), "a request for each tensor would be thousands"
        assert bucket.server.nbytes < 4 * size + (1 << 20)


@pytest.mark.slow
def test_where_large_tensors_lie_is_found_by_their_ends(bucket: Bucket, tmp_path: Path) -> None:
    save_file({str(i): torch.zeros(1 << 18) for i in range(40)}, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", bucket.root / "dcp", to="dcp", world_size=1)
    located = locate_all_chunks(open_layout(to_path(f"{bucket.url}/dcp")))
    assert all(chunk.wrapper is None for tensor in located.tensors.values() for chunk in tensor.chunks)
    assert len(bucket.server.reads) < 50
    assert bucket.server.nbytes < 3 << 20


def test_looking_reads_headers_only(bucket: Bucket, tmp_path: Path) -> None:
    save_file({"t": torch.zeros(1 << 23)}, bucket.root / "model.safetensors")
    torch.save({"t": torch.zeros(1 << 23)}, bucket.root / "model.pt")
    for name in ("model.safetensors", "model.pt"):
        bucket.server.requests.clear()
        assert inspect(f"{bucket.url}/{name}").layout.nbytes == 1 << 25
        assert bucket.server.nbytes <= 3 << 18


@pytest.mark.slow
def test_large_reads_are_in_parallel_and_read_nothing_twice(bucket: Bucket, tmp_path: Path) -> None:
    save_file({str(i): torch.randn(1 << 21) for i in range(4)}, bucket.root / "model.safetensors")
    consolidate(f"{bucket.url}/model.safetensors", tmp_path / "out")
    size = (bucket.root / "model.safetensors").stat().st_size
    assert size <= bucket.server.nbytes < size + (1 << 21)
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"0", "1", "2", "3"}
    bucket.server.fail("GET .*model.safetensors", first=partial(time.sleep, 0.1), times=16)
    assert verify(f"{bucket.url}/model.safetensors")[0].is_ok
    assert bucket.server.most > 4


@pytest.mark.parametrize("producer", [producers.fsdp2, producers.hf_alone])
def test_a_flipped_bit_is_found(producer: Producer, produce: Produce, bucket: Bucket) -> None:
    root = bucket.root / "ckpt"
    shutil.copytree(produce(producer).root, root)
    make_manifest(root)
    largest = max(
        (path for path in root.iterdir() if path.name != "ckptkit.json"), key=lambda path: path.stat().st_size
    )
    flip(largest, largest.stat().st_size // 2)
    (found,) = verify(f"{bucket.url}/ckpt")
    assert [str(problem.path) for problem in found.problems] == [f"{bucket.url}/ckpt/{largest.name}"]


def test_a_file_that_is_missing_or_short_is_named(produce: Produce, bucket: Bucket, tmp_path: Path) -> None:
    root = bucket.root / "ckpt"
    shutil.copytree(produce(producers.fsdp2).root, root)
    data = sorted(root.glob("*.distcp"))
    os.truncate(data[0], 100)
    data[1].unlink()
    (found,) = verify(f"{bucket.url}/ckpt")
    assert {str(problem.path) for problem in found.problems} == {
        f"{bucket.url}/ckpt",
        f"{bucket.url}/ckpt/{data[0].name}",
    }
    with pytest.raises(Corrupt):
        consolidate(f"{bucket.url}/ckpt", tmp_path / "out")


@pytest.mark.slow
def test_dropped_connections_and_busy_servers_are_waited_for(bucket: Bucket, tmp_path: Path) -> None:
    tensors = {str(i): torch.randn(1 << 20) for i in range(4)}
    save_file(tensors, bucket.root / "model.safetensors")
    dropped = bucket.server.fail("GET .*model.safetensors", after=100_000, times=2)
    busy = bucket.server.fail("GET .*model.safetensors", status=503, times=2)
    consolidate(f"{bucket.url}/model.safetensors", tmp_path / "out")
    assert (dropped.times, busy.times) == (0, 0)
    assert all(found.equal(tensors[name]) for name, found in load_file(tmp_path / "out/model.safetensors").items())


@pytest.mark.slow
def test_a_checkpoint_that_is_replaced_meanwhile_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    for folder, value in (("ckpt", 1.0), ("new", 2.0)):
        (tmp_path / folder).mkdir()
        save_file({str(i): torch.full((1 << 20,), value) for i in range(4)}, tmp_path / folder / "model.safetensors")
    (bucket.root / "ckpt").mkdir()
    there = bucket.root / "ckpt/model.safetensors"

    def replace() -> None:  # at once, as a store does: never half a file
        shutil.copy(tmp_path / "new/model.safetensors", bucket.root / "new")
        (bucket.root / "new").replace(there)

    for check in (lambda: consolidate(f"{bucket.url}/ckpt", tmp_path / "out"), lambda: verify(f"{bucket.url}/ckpt")):
        forget()
        shutil.copy(tmp_path / "ckpt/model.safetensors", there)
        bucket.server.requests.clear()
        bucket.server.fail("GET .*model.safetensors", first=replace)
        try:
            problems = check()[0].problems  # type: ignore[index]
        except CkptError as error:
            problems = (error,)
        found = {(type(problem), str(problem.path)) for problem in problems}
        assert found == {(IOFailure, f"{bucket.url}/ckpt/model.safetensors")}, problems
    assert not (tmp_path / "out").exists()


def test_a_file_that_vanishes_is_named(bucket: Bucket, tmp_path: Path) -> None:
    save_file({str(i): torch.randn(1 << 20) for i in range(4)}, bucket.root / "model.safetensors")
    layout = open_layout(to_path(f"{bucket.url}/model.safetensors"))
    (bucket.root / "model.safetensors").unlink()
    with pytest.raises(IOFailure, match="vanished") as raised:
        verify_reading(layout.root / "model.safetensors")
    assert str(raised.value.path) == f"{bucket.url}/model.safetensors"


def verify_reading(path: Path) -> None:
    from ckptkit.io.file import opening, read_at

    with opening(path) as file:
        read_at(file, 1 << 20, 1 << 20)


def test_what_is_not_there(bucket: Bucket) -> None:
    with pytest.raises(NotACheckpoint) as raised:
        inspect(f"{bucket.url}/nothing")
    assert str(raised.value.path) == f"{bucket.url}/nothing"
    with pytest.raises(IOFailure, match="the bucket does not exist") as refused:
        inspect("s3://no-such-bucket/ckpt")
    assert str(refused.value.path) == "s3://no-such-bucket"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", None), ("AWS_ENDPOINT_URL", "gone")],
)
def test_who_is_not_let_in_is_told_what_to_look_at(
    setting: str, value: str | None, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    if value is None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    else:
        monkeypatch.setenv(setting, "http://127.0.0.1:9" if value == "gone" else value)
    with pytest.raises(IOFailure) as raised:
        inspect(f"{bucket.url}/ckpt")
    assert str(raised.value.path) == f"{bucket.url}/ckpt"
    assert "AWS_" in (raised.value.hint or "")


def test_a_manifest_is_not_written_there(bucket: Bucket) -> None:
    with pytest.raises(Usage, match="expected a local path"):
        make_manifest(f"{bucket.url}/out")
    assert not bucket.server.requests


@pytest.mark.slow
def test_the_command_line(produce: Produce, bucket: Bucket, tmp_path: Path) -> None:
    shutil.copytree(produce(producers.fsdp2).root, bucket.root / "run/ckpt-5")
    url = f"{bucket.url}/run"

    def ckptkit(*words: str) -> subprocess.CompletedProcess[str]:
        return command.ckptkit(*words, cwd=tmp_path)

    assert f"{url}/ckpt-5" in ckptkit("inspect", url).stdout
    assert "ckpt-5" in ckptkit("ls", url).stdout
    assert f"{url}/ckpt-5" in ckptkit("verify", url).stdout
    assert ckptkit("consolidate", url, "out").returncode == 0
    written = ckptkit("consolidate", url, f"{bucket.url}/out")
    assert written.returncode == 0
    assert "this store does not" in written.stdout
    assert ckptkit("verify", f"{bucket.url}/out").returncode == 0
    assert (tmp_path / "out/model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
