"""What is saved of damaged DCP directories, of real ranks: all that is whole, bit for bit, and nothing else."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptkit import consolidate, convert, inspect, open_layout, reshard, verify
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import RESTORE, SALVAGE, CkptError, Corrupt, Occupied, Usage
from ckptkit.formats import locate_all_chunks
from tests import producers
from tests.conftest import Produce, Produced, Some
from tests.conversion.salvaging.damage import (
    assert_truth,
    bytes_of_tensors,
    cut,
    flip,
    forget_place,
    items_of_tensors,
    load_dcp,
    load_hf,
    names_in,
)
from tests.faults.shim import build

FLIPS = 60


def copy_of(made: Produced, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.root, tmp_path / "damaged"))


def lost_names(root: Path) -> set[str]:
    return {one["name"] for one in json.loads((root / "salvage.json").read_text())["lost"]}


def assert_salvaged(root: Path, out: Path, made: Produced, lost: set[str]) -> None:
    """Exactly these tensors are left out, all others are the true ones; torch opens the result, verify accepts it."""
    done = reshard(root, out, to=2, salvage=True, sync=False)
    assert done.salvaged is not None
    assert {one.name for one in done.salvaged.lost if one.shape is not None} == lost
    found = load_dcp(out)
    assert found.keys() == made.truth.keys() - lost
    assert_truth(found, made.truth)
    assert all(part.is_ok for part in verify(out)), [p for part in verify(out) for p in part.problems]
    if lost:
        assert lost <= lost_names(out)


def test_a_missing_file_takes_the_tensors_that_were_in_it(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = copy_of(made, tmp_path)
    lost = names_in(bytes_of_tensors(root), "__1_0.distcp", 0, 1 << 40)
    (root / "__1_0.distcp").unlink()
    assert lost
    assert_salvaged(root, tmp_path / "out", made, lost)


def test_a_file_cut_short_takes_what_lay_behind(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    size = (made.root / "__0_0.distcp").stat().st_size
    for i, keep in enumerate((0, size // 3, size // 2, size - 1)):
        root = copy_of(made, tmp_path / str(i))
        with_bytes = bytes_of_tensors(root).keys()
        lost = names_in(items_of_tensors(root), "__0_0.distcp", keep, 1 << 40) & with_bytes
        cut(root / "__0_0.distcp", keep)
        assert_salvaged(root, tmp_path / f"out{i}", made, lost)


def test_a_flipped_bit_takes_just_the_tensor_that_holds_it(produce: Produce, tmp_path: Path, some: Some) -> None:
    """Wherever it is: in a tensor's numbers that one is lost, anywhere else at most the item that it is in."""
    made = produce(producers.fsdp2)
    places, items = bytes_of_tensors(made.root), items_of_tensors(made.root)
    choose = random.Random(7)
    runs = [run for of_one in places.values() for run in of_one]
    spots = [(file, choose.randrange(start, stop)) for file, start, stop in choose.sample(runs, FLIPS // 2)]
    files = sorted(path.name for path in made.root.glob("*.distcp"))
    for _ in range(FLIPS // 2):
        file = choose.choice(files)
        spots.append((file, choose.randrange((made.root / file).stat().st_size)))
    root = copy_of(made, tmp_path)
    for i, (file, offset) in [(i, spots[i]) for i in some(FLIPS)]:
        before = (root / file).read_bytes()
        flip(root / file, offset, choose.randrange(8))
        must = names_in(places, file, offset, offset + 1)
        may = names_in(items, file, offset, offset + 1)
        done = reshard(root, tmp_path / f"out{i}", to=2, salvage=True, sync=False)
        assert done.salvaged is not None
        lost = {one.name for one in done.salvaged.lost}
        assert must <= lost <= may, (file, offset)
        found = load_dcp(tmp_path / f"out{i}")
        assert found.keys() == made.truth.keys() - lost
        assert_truth(found, made.truth)
        (root / file).write_bytes(before)


def test_several_damages_at_once(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = copy_of(made, tmp_path)
    places = bytes_of_tensors(root)
    (file, start, _), *_ = places["model.down.weight"]
    flip(root / file, start)
    lost = {"model.down.weight"} | names_in(places, "__2_0.distcp", 0, 1 << 40)
    (root / "__2_0.distcp").unlink()
    assert_salvaged(root, tmp_path / "out", made, lost)


def test_a_chunk_without_a_place_in_the_metadata(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = copy_of(made, tmp_path)
    forget_place(root, "model.up.weight")
    assert_salvaged(root, tmp_path / "out", made, {"model.up.weight"})


def test_the_part_that_is_lost_is_said(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = copy_of(made, tmp_path)
    (root / "__1_0.distcp").unlink()
    done = consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    one = next(one for one in done.salvaged.lost if one.name == "embed.weight")
    assert one.label == "embed.weight[4:8]"
    assert one.path == root / "__1_0.distcp"
    assert "missing" in one.why
    assert_truth({f"model.{name}": value for name, value in load_hf(tmp_path / "out").items()}, made.truth)


def test_replicas_of_other_ranks_are_taken(produce: Produce, tmp_path: Path) -> None:
    """Ranks that save without talking to each other each write what they all have: nothing of that is lost."""
    made = produce(producers.no_collectives)
    root = copy_of(made, tmp_path)
    (chunk,) = locate_all_chunks(open_layout(root)).tensors["model.scale"].chunks
    assert chunk.path == "__0_0.distcp"
    flip(root / chunk.path, chunk.offset)
    done = reshard(root, tmp_path / "out", to=2, salvage=True)
    assert done.salvaged is not None
    assert done.salvaged.is_fully_from_source
    assert done.salvaged.repaired == ("model.scale",)
    assert not (tmp_path / "out" / "salvage.json").exists()
    assert_truth(load_dcp(tmp_path / "out"), made.truth)


def test_what_is_lost_comes_from_another_checkpoint(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = copy_of(made, tmp_path)
    (root / "__1_0.distcp").unlink()
    done = reshard(root, tmp_path / "out", to=2, salvage=True, fill_from=made.root)
    assert done.salvaged is not None
    assert not done.salvaged.lost
    assert done.salvaged.filled
    found = load_dcp(tmp_path / "out")
    assert found.keys() == made.truth.keys()
    assert_truth(found, made.truth)
    said = json.loads((tmp_path / "out" / "salvage.json").read_text())
    assert {one["name"] for one in said["filled"]} >= {"model.embed.weight"}


def test_a_model_fills_a_training(produce: Produce, tmp_path: Path) -> None:
    """The model's own names are enough, whatever it lies under; its optimizer stays lost, and dtypes are said."""
    made = produce(producers.fsdp2)
    consolidate(made.root, tmp_path / "base", dtype="bf16")
    root = copy_of(made, tmp_path)
    (root / "__1_0.distcp").unlink()
    done = reshard(root, tmp_path / "out", to=2, salvage=True, fill_from=tmp_path / "base")
    assert done.salvaged is not None
    filled = {one.name: one.cast for one in done.salvaged.filled}
    assert filled["model.embed.weight"] == "bfloat16 => float32"
    assert all(one.name.startswith("optim.") or not one.shape for one in done.salvaged.lost)
    found = load_dcp(tmp_path / "out")
    for name in filled:
        rounded = made.truth[name].bfloat16().float() if made.truth[name].is_floating_point() else made.truth[name]
        assert torch.equal(found.pop(name), rounded), name
    assert_truth(found, made.truth)


def test_shapes_that_do_not_fit_are_not_taken(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = copy_of(made, tmp_path)
    (root / "__1_0.distcp").unlink()
    torch.save({"embed.weight": torch.zeros(12, 6), "up.bias": made.truth["model.up.bias"]}, tmp_path / "other.pt")
    done = consolidate(root, tmp_path / "out", salvage=True, fill_from=tmp_path / "other.pt")
    assert done.salvaged is not None
    assert [one.name for one in done.salvaged.filled] == ["up.bias"]
    assert "embed.weight" in {one.name for one in done.salvaged.lost}
    assert any("float32[12,6]" in text for text in done.notes)


def test_nothing_is_said_of_a_whole_checkpoint(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    done = reshard(made.root, tmp_path / "out", to=2, salvage=True)
    assert done.salvaged is not None
    assert done.salvaged.is_fully_from_source
    assert not done.salvaged.repaired
    assert not (tmp_path / "out" / "salvage.json").exists()
    assert_truth(load_dcp(tmp_path / "out"), made.truth)


def test_a_dry_run_says_it_and_writes_nothing(produce: Produce, tmp_path: Path) -> None:
    root = copy_of(produce(producers.fsdp2), tmp_path)
    (root / "__1_0.distcp").unlink()
    done = consolidate(root, tmp_path / "out", salvage=True, dry_run=True)
    assert done.salvaged is not None
    assert done.salvaged.lost
    assert not (tmp_path / "out").exists()


def test_without_it_all_is_as_strict_as_before(produce: Produce, tmp_path: Path) -> None:
    root = copy_of(produce(producers.fsdp2), tmp_path)
    (root / "__1_0.distcp").unlink()
    with pytest.raises(Corrupt, match="missing") as caught:
        consolidate(root, tmp_path / "out")
    assert f"or {SALVAGE}" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_nothing_left_is_an_error(produce: Produce, tmp_path: Path) -> None:
    root = copy_of(produce(producers.fsdp2), tmp_path)
    for file in root.glob("*.distcp"):
        file.unlink()
    with pytest.raises(Corrupt, match="nothing can be salvaged"):
        consolidate(root, tmp_path / "out", salvage=True)
    (root / ".metadata").unlink()
    with pytest.raises(CkptError):
        consolidate(root, tmp_path / "out", salvage=True)
    assert not (tmp_path / "out").exists()


def test_no_salvage_is_suggested_of_names_that_contradict_each_other(produce: Produce, tmp_path: Path) -> None:
    root = copy_of(produce(producers.fsdp2), tmp_path)
    content = (root / ".metadata").read_bytes()
    step = b"up.weight"  # of a key path, apart from the name of the entry
    for place in (found.start() for found in re.finditer(step, content)):
        changed = content[:place] + b"un" + content[place + 2 :]
        (root / ".metadata").write_bytes(changed)
        try:
            consolidate(root, tmp_path / "out", dry_run=True)
        except Corrupt as error:
            if "key path" in error.message:
                break
    else:
        pytest.fail("no key path has this name")
    with pytest.raises(Corrupt, match="key path") as caught:
        consolidate(root, tmp_path / "out")
    assert caught.value.hint == RESTORE
    with pytest.raises(Corrupt, match="key path") as caught:
        consolidate(root, tmp_path / "out", salvage=True)
    assert caught.value.hint == f"nothing can be salvaged without it: {RESTORE}"


def test_the_source_of_the_fill_is_not_written_over(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = copy_of(made, tmp_path)
    (root / "__1_0.distcp").unlink()
    other = Path(shutil.copytree(made.root, tmp_path / "other"))
    with pytest.raises(CkptError, match="inside it"):
        consolidate(root, other, salvage=True, fill_from=other, overwrite=True)
    with pytest.raises(Occupied):
        consolidate(root, other, salvage=True, fill_from=made.root)


@pytest.mark.parametrize("options", [{"part": "1/2"}, {"merge": True}])
def test_what_does_not_go_with_it_is_refused(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(Usage):
        convert(tmp_path, tmp_path / "out", to="dcp", salvage=True, **options)  # type: ignore[arg-type]


def test_filling_needs_salvaging(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="fill"):
        consolidate(tmp_path, tmp_path / "out", fill_from=tmp_path)


def test_a_salvaged_checkpoint_is_told(produce: Produce, tmp_path: Path) -> None:
    root = copy_of(produce(producers.fsdp2), tmp_path)
    (root / "__1_0.distcp").unlink()
    reshard(root, tmp_path / "out", to=2, salvage=True)
    assert inspect(tmp_path / "out").salvaged
    again = reshard(tmp_path / "out", tmp_path / "again", to=1)
    assert again.salvaged is None
    assert lost_names(tmp_path / "again") == lost_names(tmp_path / "out")
    assert inspect(tmp_path / "again").salvaged


READ = """
import errno, sys
from tests.faults.shim import Fault, arm, count_fired
from ckptkit import reshard
arm(Fault(sys.argv[1], kind="error", number=errno.EIO, at=int(sys.argv[4]), forever=True, calls=("read",)))
done = reshard(sys.argv[2], sys.argv[3], to=2, salvage=True)
assert count_fired()
print("\\n".join(sorted({one.name for one in done.salvaged.lost if "input/output error" in one.why})))
"""


def with_fault(root: Path, out: Path, at: int) -> subprocess.CompletedProcess[str]:
    """Salvage where reads of one file fail from a number on."""
    env = {**os.environ, "LD_PRELOAD": str(build())}
    line = [sys.executable, "-c", READ, str(root / "__1_0.distcp"), str(root), str(out), str(at)]
    return subprocess.run(line, capture_output=True, text=True, env=env, check=False)


def test_a_disk_that_cannot_be_read(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = copy_of(made, tmp_path)
    done = with_fault(root, tmp_path / "out", 1)
    assert done.returncode == 0, done.stderr
    lost = set(done.stdout.split())
    assert lost >= names_in(bytes_of_tensors(root), "__1_0.distcp", 0, 1 << 40)
    found = load_dcp(tmp_path / "out")
    assert found.keys() == made.truth.keys() - lost
    assert_truth(found, made.truth)


def test_a_disk_that_fails_after_it_was_surveyed(produce: Produce, tmp_path: Path) -> None:
    """The copy is as strict as ever: it ends, and nothing is there."""
    done = with_fault(copy_of(produce(producers.fsdp2), tmp_path), tmp_path / "out", 60)
    assert done.returncode != 0
    assert "IOFailure" in done.stderr
    assert not (tmp_path / "out").exists()


def test_several_directories_are_salvaged_and_filled_as_one(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = copy_of(made, tmp_path)
    other = tmp_path / "node1"
    other.mkdir()
    shutil.move(root / "__1_0.distcp", other)
    cut(other / "__1_0.distcp", 3000)
    both = Checkpoint.open(root, also=[other])
    done = reshard(both, tmp_path / "out", to=2, salvage=True)
    assert done.salvaged is not None
    assert done.salvaged.lost
    found = load_dcp(tmp_path / "out")
    assert found.keys() == made.truth.keys() - {one.name for one in done.salvaged.lost}
    assert_truth(found, made.truth)
    reshard(both, tmp_path / "whole", to=2, salvage=True, fill_from=made.root)
    assert_truth(load_dcp(tmp_path / "whole"), made.truth)
    assert load_dcp(tmp_path / "whole").keys() == made.truth.keys()
