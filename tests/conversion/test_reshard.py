"""What `reshard` writes, judged by `dcp.load` in real processes and by what torch itself writes for as many ranks."""

from __future__ import annotations

import shutil
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptkit import reshard
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.checkpoints.run import RunFolder
from ckptkit.errors import Corrupt, NotACheckpoint, Unsafe, Unsupported
from tests import producers
from tests.conftest import Produce
from tests.conversion.judges import (
    assert_items_open,
    items,
    judge_own_files,
    judge_resumed,
    judge_shards,
    structure,
    train,
)
from tests.producers import Producer, counted, save_alone
from tests.test_matrix import assert_same, leaves, load_dcp
from tests.tiers import nightly_but

SOURCES: tuple[Producer, ...] = (
    *(producers.fsdp2, producers.hsdp, producers.fsdp1, producers.mesh, producers.tensor_parallel),
    *(producers.many_files, producers.file_per_item, producers.leftovers, producers.no_crc),
    *(producers.dtypes, producers.strided, producers.nothing, producers.strange_names),
    *(producers.under_nothing, producers.under_state_model, producers.under_app, producers.under_odd_name),
)
SIZES = (3, 16, 1)  # and back to as many ranks as there were
# the ranks that load a checkpoint, and the ranks for which it was written
LOADED = {1: (1, 16), 2: (3,), 3: (3, 16, 1), 16: (16,)}


@pytest.fixture(scope="module")
def chains(produce: Produce, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each source a directory of it resharded to one size after the other: `PRODUCER/3`, `PRODUCER/16`, ..."""
    home = tmp_path_factory.mktemp("chains")
    for producer in SOURCES:
        made = produce(producer)
        there = home / producer.__name__
        torch.save(made.truth, there.with_suffix(".truth"))
        before = made.root
        for size in SIZES:
            reshard(before, there / str(size), to=size, sync=False)
            before = there / str(size)
        reshard(before, there / "back", to=open_layout(made.root).world_size or 1, sync=False)
    return home


@pytest.mark.slow
@pytest.mark.parametrize("world_size", nightly_but([1, 2, 3], LOADED))
def test_every_rank_of_any_job_loads_its_shards(chains: Path, world_size: int) -> None:
    homes = [chains / producer.__name__ for producer in SOURCES]
    judge_shards(
        world_size, [(home / str(size), home.with_suffix(".truth")) for home in homes for size in LOADED[world_size]]
    )


@pytest.mark.parametrize("producer", SOURCES, ids=lambda producer: producer.__name__)
def test_nothing_is_lost_on_the_way(chains: Path, produce: Produce, producer: Producer) -> None:
    expected = leaves(load_dcp(produce(producer).root))
    for step in (*map(str, SIZES), "back"):
        assert_same(leaves(load_dcp(chains / producer.__name__ / step)), expected)


@pytest.mark.parametrize("producer", SOURCES, ids=lambda producer: producer.__name__)
def test_every_item_is_an_archive_with_its_checksums(chains: Path, producer: Producer) -> None:
    for size in (3, 1):
        root = chains / producer.__name__ / str(size)
        assert_items_open(root)
        names = {path.name for path in root.iterdir()}
        assert names == {".metadata", "ckptkit.json", *(f"__{rank}_0.distcp" for rank in range(size))}


def test_torch_turns_it_into_one_file(chains: Path, produce: Produce, tmp_path: Path) -> None:
    dcp_to_torch_save(chains / "fsdp2" / "16", tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(leaves(found), leaves(load_dcp(produce(producers.fsdp2).root)))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", nightly_but([1, 5], [1, 5, 16]))
def test_it_is_what_torch_writes_for_as_many_ranks(tmp_path: Path, world_size: int) -> None:
    """And a training that goes on from it takes the same steps as one that goes on from the original."""
    original, resharded, again = tmp_path / "original", tmp_path / "resharded", tmp_path / "again"
    train(original, 3)
    reshard(original, resharded, to=world_size)
    judge_resumed(world_size, original, resharded, again)
    ours, theirs = structure(resharded), structure(again)
    assert ours == theirs
    assert world_size == 1 or any(0 in size for _, size, _ in ours["model.tiny"])
    assert_same(leaves(load_dcp(resharded)), leaves(load_dcp(again)))


def test_the_way_there_does_not_matter(tmp_path: Path) -> None:
    """As long as the shards can be told from what is not sharded: by one rank, all is written whole."""
    train(tmp_path / "3", 3)
    for before, size in ((3, 16), (16, 2), (2, 5), (5, 3)):
        reshard(tmp_path / str(before), tmp_path / f"{size}{'-again' * (size == 3)}", to=size)
    assert structure(tmp_path / "3-again") == structure(tmp_path / "3")
    reshard(tmp_path / "3", tmp_path / "direct", to=3)
    assert contents(tmp_path / "direct") == contents(tmp_path / "3-again")


def test_a_rank_needs_no_file_but_its_own(chains: Path) -> None:
    judge_own_files(3, chains / "fsdp2" / "3", chains / "fsdp2.truth")


def contents(root: Path) -> dict[str, bytes]:
    """The files of a checkpoint, but for the manifest, which says where it came from."""
    return {path.name: path.read_bytes() for path in root.iterdir() if path.name != "ckptkit.json"}


@pytest.mark.parametrize("producer", [producers.fsdp2, producers.mesh], ids=lambda producer: producer.__name__)
def test_the_same_bytes_each_time(produce: Produce, tmp_path: Path, producer: Producer) -> None:
    for jobs in (1, 3):
        reshard(produce(producer).root, tmp_path / str(jobs), to=4, jobs=jobs)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert (tmp_path / "1/ckptkit.json").read_bytes() == (tmp_path / "3/ckptkit.json").read_bytes()


def test_what_was_compared_with_a_checksum(produce: Produce, tmp_path: Path) -> None:
    done = reshard(produce(producers.no_crc).root, tmp_path / "sealed", to=2)
    assert (done.checked_bytes, done.unchecked_bytes) == (0, done.nbytes)
    done = reshard(tmp_path / "sealed", tmp_path / "again", to=3)
    assert (done.checked_bytes, done.unchecked_bytes) == (done.nbytes, 0)


# -- parts, and files beside -------------------------------------------------------------------------------------------


def test_both_parts_of_a_checkpoint_and_the_files_beside_them(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.accelerate)
    source = Path(shutil.copytree(made.root, tmp_path / "checkpoint-7"))
    beside = {
        "scheduler.bin": b"scheduler",
        "trainer_state.json": b"{}",
        "pytorch_model_fsdp_0/config.json": b"{ }",
        "sub/deeper/note": b"",
    }
    for name, content in beside.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    (source / "latest").symlink_to("sub")
    (source / ".cache").mkdir()
    (source / "pytorch_model_fsdp_0/__7_0.distcp").write_bytes(b"left by an earlier save of more ranks")
    done = reshard(source, to=3)
    out = tmp_path / "checkpoint-7-to3"
    assert done.output == out
    assert {name: (out / name).read_bytes() for name in beside} == beside
    parts = [out / "pytorch_model_fsdp_0", out / "optimizer_0"]
    data = {".metadata", "ckptkit.json", *(f"__{rank}_0.distcp" for rank in range(3))}
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == {
        *beside,
        *(f"{part.name}/{name}" for part in parts for name in data),
    }
    assert "skipped `latest`: not a regular file" in done.notes
    for part in parts:
        truth = tmp_path / f"{part.name}.truth"
        names = structure(part)
        torch.save({name: tensor for name, tensor in made.truth.items() if name in names}, truth)
        judge_shards(3, [(part, truth)])
        assert_same(leaves(load_dcp(part)), leaves(load_dcp(source / part.name)))
    assert done.tensors == len(made.truth)
    assert done.files.keys() == {name for name in map(str, done.files) if (out / name).is_file()}


def test_one_part_alone(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.accelerate).root / "optimizer_0"
    reshard(source, tmp_path / "out", to=5)
    assert_same(leaves(load_dcp(tmp_path / "out")), leaves(load_dcp(source)))


def test_what_an_earlier_save_left_is_not_carried_on(produce: Produce, tmp_path: Path) -> None:
    reshard(produce(producers.leftovers).root, tmp_path / "out", to=1)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".metadata", "__0_0.distcp", "ckptkit.json"}


def test_a_rank_per_metadata(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.no_collectives)
    reshard(made.root, tmp_path / "out", to=2)
    torch.save(made.truth, tmp_path / "truth")
    judge_shards(2, [(tmp_path / "out", tmp_path / "truth")])
    assert not list((tmp_path / "out").glob("__*.metadata"))


# -- where -------------------------------------------------------------------------------------------------------------


def test_the_latest_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for step in (2, 10):
        save_alone({"model": {"w": counted(4) + step}}, run / f"ckpt-{step}")
    (run / "ckpt-11").mkdir()
    (run / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    done = reshard(to=2)
    assert (done.source, done.output) == (Path("run/ckpt-10"), Path("run/ckpt-10-to2"))
    assert not (done.output / "config.json").exists()
    monkeypatch.chdir(run)
    done = reshard(to=3)
    assert (done.source, done.output) == (Path("ckpt-10"), Path("ckpt-10-to3"))
    monkeypatch.chdir("ckpt-10")
    assert reshard(to=4).output == run / "ckpt-10-to4"
    assert load_dcp(run / "ckpt-10-to4")["model"]["w"].tolist() == [10, 11, 12, 13]
    assert [ckpt.step for ckpt in RunFolder(run).checkpoints()] == [2, 10], "what was resharded is not of the run"


def test_one_file_as_the_source(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.full)
    (tmp_path / "precious").write_text("no part of it")
    shutil.copy(made.root / "state.pt", tmp_path)
    done = reshard(tmp_path / "state.pt", to=2)
    assert done.output == tmp_path / "state.pt-to2"
    assert {path.name for path in done.output.iterdir()} == {
        *("__0_0.distcp", "__1_0.distcp", ".metadata", "ckptkit.json")
    }
    torch.save(made.truth, tmp_path / "truth")
    judge_shards(2, [(done.output, tmp_path / "truth")])


@pytest.mark.parametrize("name", ["absent", "text", "empty"])
def test_what_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpoint) as caught:
        reshard(tmp_path / name, tmp_path / "out", to=2)
    assert caught.value.path == tmp_path / name


def test_source_and_destination_apart(produce: Produce, tmp_path: Path) -> None:
    source = Path(shutil.copytree(produce(producers.under_model).root, tmp_path / "run" / "ckpt-1"))
    before = sorted(tmp_path.rglob("*"))
    for destination in (source, source.parent, source / "training"):
        with pytest.raises(Unsafe):
            reshard(source, destination, to=2, overwrite=True)
    with pytest.raises(Unsafe):
        reshard(source, source.parent, to=2)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_writes_nothing(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    draft = reshard(source, tmp_path / "out", to=16, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    done = reshard(source, tmp_path / "out", to=16)
    assert (draft.files, draft.tensors, draft.nbytes) == (done.files, done.tensors, done.nbytes)
    assert {name: (tmp_path / "out" / name).stat().st_size for name in done.files} == done.files


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["extra.note", "extra.losses", "model.mask", "optim.state.up.weight.exp_avg"])
def test_damage_anywhere_is_found_and_leaves_nothing(produce: Produce, tmp_path: Path, name: str) -> None:
    source = Path(shutil.copytree(produce(producers.fsdp2).root, tmp_path / "in" / "source"))
    raw = next(raw for entry, raw in items(source) if entry == name)
    with zipfile.ZipFile(BytesIO(raw)) as archive:
        within = next(raw.index(archive.read(entry)) for entry in ("archive/data/0", "archive/data.pkl")
                      if entry in archive.namelist())  # fmt: skip
    (shard,) = (path for path in source.glob("*.distcp") if raw in path.read_bytes())
    content = bytearray(shard.read_bytes())
    content[content.index(raw) + within] ^= 1
    shard.write_bytes(content)
    with pytest.raises(Corrupt) as caught:
        reshard(source, tmp_path / "out", to=2)
    assert (caught.value.path, caught.value.tensor) == (shard, name)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


@pytest.mark.parametrize("producer", [producers.transformed, producers.lazy], ids=lambda producer: producer.__name__)
def test_what_is_beyond_us_is_refused(produce: Produce, tmp_path: Path, producer: Producer) -> None:
    with pytest.raises(Unsupported):
        reshard(produce(producer).root, tmp_path / "out", to=2)
    assert list(tmp_path.iterdir()) == []


def test_weights_in_safetensors_stay_as_they_are(tmp_path: Path) -> None:
    """They are the same for any number of ranks; the optimizer beside them is not."""
    source = tmp_path / "ckpt-4"
    source.mkdir()
    save_file({"w": torch.arange(8.0)}, source / "model.safetensors")
    save_alone({"optim": {"state": {"w": {"exp_avg": torch.arange(8.0)}}}}, source / "training")
    reshard(source, tmp_path / "out", to=3)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert len(open_layout(tmp_path / "out/training").tensors["optim.state.w.exp_avg"].chunks) == 3


@pytest.mark.parametrize(("to", "empty"), [(4, None), (15, None), (17, "9 of 17"), (100000, "99,992 of 100,000")])
def test_ranks_that_would_hold_nothing_are_counted(tmp_path: Path, to: int, empty: str | None) -> None:
    save_alone({"model": {"a": torch.ones(8, 2), "b": torch.ones(3)}}, tmp_path / "ckpt-1")
    done = reshard(tmp_path / "ckpt-1", tmp_path / "out", to=to, dry_run=True)
    assert list(done.warnings) == ([f"{empty} ranks get no shard: no tensor has more than 8 rows"] if empty else [])
