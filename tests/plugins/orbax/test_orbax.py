"""Trees of arrays as orbax saves them: values, cells, and what must not be believed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import CkptError, Corrupt, Incomplete, Unsafe, Unsupported
from ckptkit.formats import locate_all_chunks
from ckptkit.plugins.orbax.values import parse_location
from tests.plugins.orbax.trees import save_by_processes, save_tree, square

pytest.importorskip("tensorstore", reason="tensorstore is not installed")

_JAX = os.environ.get("CKPTKIT_JAX_PYTHON")


def data_files(root: Path) -> list[Path]:
    """Return the files of cells in a tree, the largest first."""
    return sorted((root / "d").iterdir(), key=lambda path: -path.stat().st_size)


@pytest.mark.parametrize("is_ocdbt", [True, False], ids=["ocdbt", "files"])
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_a_tree_is_read(tmp_path: Path, driver: str, is_ocdbt: bool) -> None:
    tree = save_tree(tmp_path / "tree", driver=driver, is_ocdbt=is_ocdbt)
    state = ckptkit.open(tree)
    assert sorted(state) == ["params.b", "params.w", "step"]
    assert torch.equal(state["params.w"].torch(), torch.from_numpy(square()))
    assert torch.equal(state["params.b"].torch(), torch.arange(6, dtype=torch.bfloat16))
    assert torch.equal(state["step"].torch(), torch.tensor(7, dtype=torch.int32))
    layout = Checkpoint.open(tree).layout
    assert [chunk.start for chunk in layout.tensors["params.w"].chunks] == [(0, 0), (0, 24), (32, 0), (32, 24)]
    assert {name: Checkpoint.open(tree).read_plain_value(layout.key(name)) for name in layout.blobs} == {
        "said": "hello",
        "nothing": None,
    }
    (verified,) = ckptkit.verify(tree)
    assert (list(verified.problems), verified.checked_bytes, verified.unchecked_bytes) == ([], 0, layout.nbytes)


def test_cells_are_unpacked_into_a_file_that_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    layout = locate_all_chunks(Checkpoint.open(save_tree(tmp_path / "tree")).layout)
    (kept,) = tmp_path.glob("ckptkit-*")
    assert kept.stat().st_size == layout.nbytes
    del layout
    assert not kept.exists()


def test_a_step_is_converted(tmp_path: Path) -> None:
    save_tree(tmp_path / "run" / "3" / "items")
    (tmp_path / "run" / "3" / "_CHECKPOINT_METADATA").write_text("{}")
    shutil.copytree(tmp_path / "run" / "3", tmp_path / "run" / "4.orbax-checkpoint-tmp-17")
    ckptkit.consolidate(tmp_path / "run", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert any(torch.equal(one, torch.from_numpy(square())) for one in found.values())
    assert Checkpoint.open(tmp_path / "run").step == 3


def test_states_of_loaders_and_marks_of_the_save(tmp_path: Path) -> None:
    """Grain's `PyGrainCheckpointHandler` leaves the place of each process in the data."""
    step = tmp_path / "3"
    save_tree(step / "items")
    (step / "iter").mkdir()
    states = [f"iter/process_{rank}-of-2.json" for rank in range(2)]
    for name in states:
        (step / name).write_text('{"version": 2, "last_seen_indices": {"0": 7}}')
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    (step / "commit_success.txt").touch()
    same = ckptkit.convert(step, tmp_path / "same", to="dcp", world_size=2)
    assert {name for name in states if (tmp_path / "same" / name).is_file()} == set(states)
    other = ckptkit.convert(step, tmp_path / "other", to="dcp", world_size=3)
    assert f"skipped `{states[0]}` and similar files: state of 2 ranks, which 3 cannot use" in other.notes
    assert not (tmp_path / "other/iter").exists()
    marks = ("_CHECKPOINT_METADATA", "commit_success.txt")
    assert not any((tmp_path / out / mark).exists() for out in ("same", "other") for mark in marks)
    assert not {Path(left.name).name for left in (*same.left_behind, *other.left_behind)} & {*marks}


def test_an_unfinished_save_is_refused(tmp_path: Path) -> None:
    step = tmp_path / "4.orbax-checkpoint-tmp-17"
    save_tree(step / "items")
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    for path in (step, step / "items"):
        with pytest.raises(CkptError, match="orbax did not finish this save"):
            ckptkit.open(path)


def without_metadata(tree: Path) -> None:
    (tree / "_METADATA").unlink()


def without_manifest(tree: Path) -> None:
    (tree / "manifest.ocdbt").unlink()


def with_short_manifest(tree: Path) -> None:
    os.truncate(tree / "manifest.ocdbt", 40)


def with_strange_value(tree: Path) -> None:
    said = json.loads((tree / "_METADATA").read_text())
    said["tree_metadata"]["('step',)"]["value_metadata"]["value_type"] = "jax.random.key"
    (tree / "_METADATA").write_text(json.dumps(said))


def with_unlisted_array(tree: Path) -> None:
    text = (tree / "_METADATA").read_text()
    (tree / "_METADATA").write_text(text.replace('"key": "w"', '"key": "v"'))


@pytest.mark.parametrize(
    ("harm", "kind", "message"),
    [
        (without_metadata, Incomplete, "no `_METADATA`"),
        (without_manifest, Incomplete, "manifest.ocdbt: the file is missing"),
        (with_short_manifest, Corrupt, "does not match actual length"),
        (with_strange_value, Unsupported, "a value of type `jax.random.key`"),
        (with_unlisted_array, Corrupt, "params.v.*does not exist"),
    ],
)
def test_bad_trees_are_refused(
    tmp_path: Path, harm: Callable[[Path], None], kind: type[CkptError], message: str
) -> None:
    tree = save_tree(tmp_path / "tree")
    harm(tree)
    with pytest.raises(kind, match=message):
        assert Checkpoint.open(tree).layout
    assert ckptkit.verify(tree)[0].problems


@pytest.mark.parametrize("place", [".", ".."], ids=["tree", "step"])
def test_a_save_without_its_end_is_refused(tmp_path: Path, place: str) -> None:
    """In a bucket a save has its last name from the start; the time of its end and a marker say that it is whole."""
    tree = save_tree(tmp_path / "step" / "items")
    said, marker = tree / place / "_CHECKPOINT_METADATA", tree / place / "commit_success.txt"
    said.write_text('{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": null}')
    with pytest.raises(Incomplete, match="orbax did not finish this save"):
        ckptkit.open(tree)
    marker.write_text("Checkpoint commit was successful")
    assert ckptkit.open(tree)
    marker.unlink()
    said.write_text('{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}')
    assert ckptkit.open(tree)


@pytest.mark.parametrize("name", ["../other/params.w", "{}/other/params.w", "", "..", "a//b"])
def test_names_do_not_lead_out_of_the_tree(tmp_path: Path, name: str) -> None:
    save_tree(tmp_path / "other", is_ocdbt=False)
    tree = save_tree(tmp_path / "tree", is_ocdbt=False)
    said = json.loads((tree / "_METADATA").read_text())
    said["tree_metadata"]["('step',)"]["key_metadata"] = [{"key": name.format(tmp_path), "key_type": 2}]
    (tree / "_METADATA").write_text(json.dumps(said))
    with pytest.raises(Unsafe, match="is not a plain file name"):
        ckptkit.open(tree)


def with_link(tree: Path) -> None:
    (tree / "params.w").rename(tree.parent / "away")
    (tree / "params.w").symlink_to(tree.parent / "away")


def with_pipe(tree: Path) -> None:
    (tree / "params.w" / "0.1").unlink()
    os.mkfifo(tree / "params.w" / "0.1")


@pytest.mark.parametrize("harm", [with_link, with_pipe])
def test_links_and_pipes_are_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    tree = save_tree(tmp_path / "tree", is_ocdbt=False)
    harm(tree)
    with pytest.raises(Unsafe):
        ckptkit.open(tree)


def test_more_cells_than_bytes_are_not_counted(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree", is_ocdbt=False)
    said = json.loads((tree / "params.w" / ".zarray").read_text())
    (tree / "params.w" / ".zarray").write_text(json.dumps({**said, "shape": [1 << 40, 48], "chunks": [1, 1]}))
    with pytest.raises(Incomplete, match=rf"expected {48 << 40} chunks for shape .*, found \d+ in the checkpoint"):
        ckptkit.open(tree)


@pytest.mark.parametrize(("driver", "cell"), [("zarr", "0.1"), ("zarr3", "c/0/1")])
def test_a_missing_cell_is_not_zeros(tmp_path: Path, driver: str, cell: str) -> None:
    tree = save_tree(tmp_path / "tree", driver=driver, is_ocdbt=False)
    (tree / "params.w" / cell).unlink()
    with pytest.raises(Incomplete, match=r"expected 4 chunks, found 3: \[32, 24\] elements at \[0, 24\] are missing"):
        ckptkit.open(tree)
    (problem,) = ckptkit.verify(tree)[0].problems
    assert problem.tensor == "params.w"


def test_a_cell_that_ocdbt_lacks_is_not_zeros(tmp_path: Path) -> None:
    import tensorstore

    tree = save_tree(tmp_path / "tree")
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{tree}/"}}).result()
    store.write(b"params.w/1.0", None).result()
    with pytest.raises(Incomplete, match=r"params\.w.*expected 4 chunks, found 3: .* at \[32, 0\] are missing"):
        ckptkit.open(tree)


def test_a_missing_data_file_is_found_before_any_is_read(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree")
    data_files(tree)[0].unlink()
    with pytest.raises(Incomplete, match=r"d/.*: the file is missing"):
        ckptkit.open(tree)
    assert ckptkit.verify(tree, fast=True)[0].problems


def test_a_deep_tree_of_several_processes(tmp_path: Path) -> None:
    """As orbax merges what each process saved; its newest option keeps values and nodes in directories apart."""
    tree = save_by_processes(tmp_path / "tree", 2)
    assert {path.name for path in tree.iterdir()} >= {"ocdbt.process_0", "ocdbt.process_1", "ocdbt_meta"}
    assert torch.equal(ckptkit.open(tree)["params.w"].torch(), torch.from_numpy(square()))
    layout = Checkpoint.open(tree).layout
    assert len(layout.tensors["params.w"].chunks) == 96
    assert all(path.startswith("ocdbt.process_") and "/ocdbt_data/" in path for path in layout.paths)
    assert set(ckptkit.verify(tree)[0].problems) == set()


def test_no_file_outside_of_the_tree_is_read() -> None:
    for location in ("value:..%2F:d/3f:0:1", "value::%2Fetc/passwd:0:1", "value::d/../../x:0:1"):
        with pytest.raises(Unsafe, match="which is not a file in it"):
            parse_location(location, Path("tree"))


def test_a_dtype_that_torch_does_not_have(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree", dtype="float8_e4m3b11fnuz")
    with pytest.raises(Unsupported, match=r"params\.b.*float8_e4m3b11fnuz"):
        ckptkit.open(tree)


def test_without_tensorstore_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = save_tree(tmp_path / "tree")
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(Unsupported, match="need the package `tensorstore`") as caught:
        ckptkit.open(tree)
    assert caught.value.hint == "run `pip install 'ckptkit-fsdp[orbax]'`"


@pytest.mark.skipif(_JAX is None, reason="CKPTKIT_JAX_PYTHON names no Python with jax and orbax-checkpoint")
def test_what_orbax_saves_is_read(tmp_path: Path) -> None:
    script = Path(__file__).with_name("save_with_jax.py")
    subprocess.run([str(_JAX), str(script), str(tmp_path)], check=True, env={}, capture_output=True)
    truth = np.load(tmp_path / "truth.npz")
    for name in ("ocdbt2", "ocdbt3", "files2", "files3", "run"):
        state = ckptkit.open(tmp_path / name)
        assert sorted(state) == sorted(truth.files), name
        for entry in truth.files:
            tensor = state[entry].torch()
            plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            assert np.array_equal(plain.numpy(), truth[entry]), (name, entry)
        assert len(Checkpoint.open(tmp_path / name).layout.tensors["params.square"].chunks) == 4
