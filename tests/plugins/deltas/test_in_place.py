"""Changes in place: a crash at any write leaves a model that is old, new, or that the same call completes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.errors import CkptError, Incomplete, Mismatch, Occupied, Unsafe, Unsupported, Usage
from ckptkit.io.locks import acquire_lock, release_lock
from ckptkit.plugins.deltas.apply_in_place import apply_in_place
from tests.conftest import Some
from tests.conversion.judges import raw
from tests.plugins.deltas.models import State, as_hf, files, load, policy, step


def contents(root: Path) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in load(root).items()}


def raws(state: State) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in state.items()}


@pytest.fixture
def states() -> list[State]:
    found = [policy(torch.float32)]
    for seed in range(1, 4):
        found.append(step(found[-1], seed))
    return found


def published(root: Path, states: list[State]) -> Path:
    """A directory of deltas, whose names say nothing of their order."""
    saved = [as_hf(root / f"policy-{i}", state) for i, state in enumerate(states)]
    for i, name in enumerate("cab"[: len(states) - 1]):
        ckptkit.delta(saved[i], saved[i + 1], root / "deltas" / name)
    return root / "deltas"


@pytest.mark.parametrize("start", range(4))
def test_all_that_follow(tmp_path: Path, states: list[State], start: int) -> None:
    root = published(tmp_path, states)
    local = as_hf(tmp_path / "local", states[start])
    done = apply_in_place(local, root)
    assert [path.name for path in done.deltas] == list("cab"[start:])
    assert contents(local) == raws(states[3])
    assert {path.name for path in local.iterdir()} == {"model.safetensors"}
    assert apply_in_place(local, root).deltas == ()


def test_an_unfinished_delta_beside_others_is_named(tmp_path: Path, states: list[State]) -> None:
    root = published(tmp_path, states[:3])
    (root / "a" / "delta.json").unlink()
    done = apply_in_place(tmp_path / "policy-0", root)
    assert ([path.name for path in done.deltas], done.unfinished) == (["c"], (root / "a",))
    assert list(done.summary())[-1] == "skipped a: unfinished, its `delta.json` is missing"


def test_one_delta_and_shards_and_the_manifest(tmp_path: Path, states: list[State]) -> None:
    published(tmp_path, states)
    local = tmp_path / "local"
    ckptkit.consolidate(tmp_path / "policy-0", local, max_shard_size=1600)
    assert len(files(local)) > 1
    apply_in_place(local, tmp_path / "deltas" / "c")
    assert contents(local) == raws(states[1])
    (found,) = ckptkit.verify(local)
    assert found.is_ok
    assert found.unchecked_bytes == 0
    ckptkit.consolidate(tmp_path / "policy-1", tmp_path / "expected", max_shard_size=1600)
    assert files(local) == files(tmp_path / "expected")


def test_many_pieces(tmp_path: Path) -> None:
    """A tensor of several pieces, of which some do not change, and one that changes as a whole."""
    before = {"w": torch.zeros(1 << 20), "v": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    after = {"w": before["w"].clone(), "v": torch.ones(1 << 20, dtype=torch.bfloat16)}
    for at in (0, 65535, 65536, 700_000, (1 << 20) - 1):
        after["w"][at] = 7
    local, new = as_hf(tmp_path / "local", before), as_hf(tmp_path / "new", after)
    ckptkit.delta(local, new, tmp_path / "delta")
    done = apply_in_place(local, tmp_path / "delta")
    assert (done.tensors, done.elements) == (2, 5 + (1 << 20))
    assert files(local) == files(new)


CALLS = ("pwrite", "fsync", "rename", "replace", "link", "unlink", "rmdir", "mkdir")


def calls_of(work: Callable[[], object]) -> int:
    """How many calls to the system that write some work makes, which is done in a process of its own."""
    made = mmap(-1, 4)  # which the process shares
    assert not dies_at(-1, work, made)
    return int.from_bytes(made)


def dies_at(number: int, work: Callable[[], object], made: mmap | None = None) -> bool:
    """Do the work in a process that dies at a call to the system that writes; of a `pwrite` half is done.

    The calls are counted in `made`.
    """
    pid = os.fork()
    if pid == 0:
        counted = mmap(-1, 4) if made is None else made

        def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                counted[:] = (int.from_bytes(counted) + 1).to_bytes(4)
                if int.from_bytes(counted) == number:
                    if name == "pwrite":
                        fd, data, offset = args
                        real(fd, data[: len(data) // 2], offset)
                    os._exit(9)
                return real(*args, **more)

            return call

        for name in CALLS:
            setattr(os, name, dying(name, getattr(os, name)))
        try:
            work()
        except BaseException:  # noqa: BLE001 - the parent sees it
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_crash_at_every_write(tmp_path: Path, some: Some, has_manifest: bool) -> None:
    states = [policy(torch.float32), step(policy(torch.float32))]
    root = published(tmp_path, states)
    old, new = raws(states[0]), raws(states[1])
    seen = set()

    def make(name: str) -> Path:
        local = as_hf(tmp_path / name, states[0])
        if has_manifest:
            ckptkit.make_manifest(local)
        return local

    for number in some(1 + calls_of(partial(apply_in_place, make("local"), root))):
        local = make(f"local-{number}")
        names = {path.name for path in local.iterdir()}
        assert dies_at(number, partial(apply_in_place, local, root)) == (number > 0)
        try:
            ckptkit.inspect(local)
        except Incomplete as error:
            assert "a change of this model was interrupted" in error.message  # noqa: PT017
            seen.add("to be completed")
        else:
            found = contents(local)
            assert found in (old, new)
            seen.add("old" if found == old else "new")
            if has_manifest:
                assert ckptkit.verify(local)[0].is_ok
        apply_in_place(local, root)
        assert contents(local) == new
        assert {path.name for path in local.iterdir()} == names
        assert ckptkit.verify(local)[0].is_ok
    assert seen == {"old", "to be completed", "new"}


def test_the_journal_needs_nothing_else(tmp_path: Path, some: Some, states: list[State]) -> None:
    """Once it is there the deltas may go."""
    root = published(tmp_path, states)
    total = calls_of(partial(apply_in_place, as_hf(tmp_path / "local", states[0]), root))
    for number in some(total)[1:]:
        local = as_hf(tmp_path / f"local-{number}", states[0])
        assert dies_at(number, partial(apply_in_place, local, root))
        if (local / ".ckptkit-delta").exists():
            break
    root.rename(tmp_path / "gone")
    root.mkdir()
    with pytest.raises(CkptError, match="expected deltas, found none"):
        apply_in_place(local, root)
    assert contents(local) == raws(states[3])


def test_what_is_refused_changes_nothing(tmp_path: Path, states: list[State]) -> None:
    root = published(tmp_path, states)
    other = as_hf(tmp_path / "other", policy(torch.float32, seed=7))
    before = files(other)
    with pytest.raises(Mismatch, match=r"expected a delta of base .*, found 3 deltas with other bases"):
        apply_in_place(other, root)
    with pytest.raises(Mismatch, match="4 of 4 tensors that the delta changes differ"):
        apply_in_place(other, root / "c")
    assert files(other) == before
    (root / "a" / "delta-00001-of-00001.safetensors").write_bytes(b"")
    local = as_hf(tmp_path / "local", states[0])
    with pytest.raises(CkptError):
        apply_in_place(local, root)
    assert contents(local) == raws(states[0])
    assert {path.name for path in local.iterdir()} == {"model.safetensors"}
    lock = local.parent / ".local.ckptkit.lock"
    held = acquire_lock(lock)
    try:
        with pytest.raises(Occupied):
            apply_in_place(local, root)
    finally:
        release_lock(held, lock)


@pytest.mark.parametrize(
    ("link", "words"), [(os.link, r"the file has 2 names \(hard links\)"), (os.symlink, "the file is a symbolic link")]
)
def test_a_file_with_other_names_is_not_changed(
    tmp_path: Path, states: list[State], link: Callable[[Path, Path], None], words: str
) -> None:
    root = published(tmp_path, states)
    other = as_hf(tmp_path / "other", states[0])
    local = tmp_path / "local"
    local.mkdir()
    link(other / "model.safetensors", local / "model.safetensors")
    before = files(other)
    with pytest.raises(Unsafe, match=words):
        apply_in_place(local, root)
    assert files(other) == before
    assert {path.name for path in local.iterdir()} == {"model.safetensors"}
    shutil.copytree(local, tmp_path / "copy")
    assert apply_in_place(tmp_path / "copy", root).deltas
    assert files(other) == before


def test_two_deltas_of_one_base(tmp_path: Path, states: list[State]) -> None:
    root = published(tmp_path, states[:2])
    ckptkit.delta(tmp_path / "policy-0", as_hf(tmp_path / "b", states[2]), root / "fork", force=True)
    with pytest.raises(Usage, match="expected one delta of base"):
        apply_in_place(tmp_path / "policy-0", root)


def test_only_what_consolidate_would_write(tmp_path: Path, states: list[State]) -> None:
    root = published(tmp_path, states)
    torch.save(states[0], tmp_path / "model.pt")
    (tmp_path / "pt").mkdir()
    (tmp_path / "model.pt").rename(tmp_path / "pt" / "model.pt")
    with pytest.raises(Unsupported, match="expected a Hugging Face model to change in place"):
        apply_in_place(tmp_path / "pt", root)
    wrapped: dict[str, Tensor] = {f"_orig_mod.{name}": tensor for name, tensor in states[0].items()}
    with pytest.raises(Unsupported, match="`consolidate` would write"):
        apply_in_place(as_hf(tmp_path / "wrapped", wrapped), root)
