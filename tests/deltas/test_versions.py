"""Versions for engines: what ckptkit writes an engine pulls, and what trainers publish ckptkit applies."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.errors import CkptError, Corrupt, Mismatch, Unsupported, Usage
from ckptkit.ops.apply_in_place import apply_in_place
from ckptkit.ops.delta_version import delta_version
from tests.conftest import Some
from tests.deltas.engines import publish, publish_manifest, pull, tensors_in
from tests.deltas.models import State, as_dcp, as_hf, as_pt, files, policy, step, updated
from tests.deltas.test_in_place import calls_of, contents, dies_at, raws

ENCODINGS = ("xor", "overwrite")


@pytest.fixture
def states() -> list[State]:
    found = [policy()]
    for seed in range(1, 4):
        found.append(step(found[-1], seed))
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_engine_pulls_what_ckptkit_writes(tmp_path: Path, states: list[State], encoding: str) -> None:
    engine = as_hf(tmp_path / "engine", states[0])
    saved = [save(tmp_path / f"policy-{i}", states[i]) for i, save in enumerate((as_hf, as_dcp, as_pt, as_hf))]
    for number in range(1, 4):
        done = delta_version(saved[number - 1], saved[number], tmp_path / "root", encoding=encoding, force=True)
        assert done.output == tmp_path / "root" / f"weight_v{number:06d}"
        assert (done.version, done.tensors, done.checksum) == (number, 4, "adler32")
        pull(engine, done.output)
        assert tensors_in(engine) == raws(states[number])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ckptkit_applies_what_a_trainer_publishes(tmp_path: Path, states: list[State], encoding: str) -> None:
    base = as_hf(tmp_path / "base", states[0])
    known = [raws(state) for state in states]
    for number in range(1, 4):
        publish(tmp_path / "root", number, known[number - 1], known[number], encoding)
    versions = sorted((tmp_path / "root").iterdir())
    ckptkit.apply(base, versions, tmp_path / "out")
    assert contents(tmp_path / "out") == known[3]
    ckptkit.apply(as_dcp(tmp_path / "dcp", states[0]), versions[:2], tmp_path / "of-dcp")
    assert contents(tmp_path / "of-dcp") == known[2]
    done = apply_in_place(base, tmp_path / "root")
    assert [path.name for path in done.deltas] == [path.name for path in versions]
    assert contents(base) == known[3]
    assert json.loads((base / ".weight_sync" / "state.json").read_text()) == {"version": "000003"}
    assert apply_in_place(base, tmp_path / "root").deltas == ()


def test_an_engine_and_ckptkit_take_turns(tmp_path: Path, states: list[State]) -> None:
    local = as_hf(tmp_path / "local", states[0])
    known = [raws(state) for state in states]
    for number in range(1, 4):
        place = publish(tmp_path / "root", number, known[number - 1], known[number], "xor")
        if number == 2:
            pull(local, place)
        else:
            apply_in_place(local, tmp_path / "root")
        assert contents(local) == known[number]


def test_manifests(tmp_path: Path, states: list[State]) -> None:
    """SkyRL's."""
    known = [raws(state) for state in states]
    deltas = [publish_manifest(tmp_path / "root", i, known[i - 1], known[i]) for i in range(1, 4)]
    base = as_hf(tmp_path / "base", states[0])
    assert str(ckptkit.inspect_delta(deltas[1])).startswith(f"{deltas[1]}: skyrl, from version 1 to 2\n4 tensors")
    assert ckptkit.verify_delta(deltas[0], base=base).is_ok
    ckptkit.apply(base, deltas, tmp_path / "out")
    assert contents(tmp_path / "out") == known[3]
    apply_in_place(base, tmp_path / "root")
    assert contents(base) == known[3]
    with pytest.raises(Mismatch, match="expected a delta of version 1, found one of version 2"):
        ckptkit.apply(base, [deltas[0], deltas[2]], tmp_path / "gap")
    manifest = json.loads((deltas[0] / "manifest.json").read_text())
    other = {**manifest["tensors"][0], "payload_key": "y"}
    changes: tuple[dict[str, object], ...] = ({"tensors": [{}]}, {"version": "x"}, {"tensors": [other]})
    for change in changes:
        (deltas[0] / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(Corrupt):
            ckptkit.apply(base, deltas[0], tmp_path / "bad")


def test_a_whole_version_begins_anew(tmp_path: Path, states: list[State]) -> None:
    root = tmp_path / "root"
    known = [raws(state) for state in states]
    publish(root, 1, raws(policy(seed=8)), raws(policy(seed=9)), "xor")  # nobody's
    as_hf(root / "weight_v000002", states[2])
    publish(root, 3, known[2], known[3], "xor")
    local = as_hf(tmp_path / "local", states[0])
    done = apply_in_place(local, root)
    assert [path.name for path in done.deltas] == ["weight_v000002", "weight_v000003"]
    assert contents(local) == known[3]
    assert delta_version(local, as_hf(tmp_path / "next", states[1]), root, force=True).version == 4


def test_a_crash_at_every_write(tmp_path: Path, some: Some, states: list[State]) -> None:
    """XOR is not written twice: the journal has absolute values."""
    known = [raws(state) for state in states]
    for number in range(1, 3):
        publish(tmp_path / "root", number, known[number - 1], known[number], "xor")
    for number in some(1 + calls_of(partial(apply_in_place, as_hf(tmp_path / "local", states[0]), tmp_path / "root"))):
        local = as_hf(tmp_path / f"local-{number}", states[0])
        assert dies_at(number, partial(apply_in_place, local, tmp_path / "root")) == (number > 0)
        apply_in_place(local, tmp_path / "root")
        assert contents(local) == known[2]
        assert json.loads((local / ".weight_sync" / "state.json").read_text()) == {"version": "000002"}


def test_a_chain_goes_on_from_its_own_state_only(tmp_path: Path, states: list[State]) -> None:
    root = tmp_path / "root"
    saved = [as_hf(tmp_path / f"policy-{i}", state) for i, state in enumerate(states)]
    delta_version(saved[0], saved[1], root, force=True)
    with pytest.raises(Mismatch, match=r"expected adler32 .* as in the newest version, found"):
        delta_version(saved[0], saved[2], root, force=True)
    again = delta_version(saved[0], saved[1], root, force=True)
    assert (again.is_new, again.version, again.output.name) == (False, 1, "weight_v000001")
    assert [path.name for path in root.iterdir()] == ["weight_v000001"]
    with pytest.raises(Mismatch, match="--version: expected 2, which follows the newest version, found 5"):
        delta_version(saved[1], saved[2], root, version=5, force=True)
    assert delta_version(saved[0], saved[1], tmp_path / "later", version=5, force=True).version == 5
    with pytest.raises(Usage, match="--encoding"):
        delta_version(saved[1], saved[2], root, encoding="add")


def test_another_base_and_gaps_are_found_before_anything_is_written(tmp_path: Path, states: list[State]) -> None:
    known = [raws(state) for state in states]
    root = tmp_path / "root"
    versions = [publish(root, i, known[i - 1], known[i], "xor") for i in range(1, 4)]
    other = as_hf(tmp_path / "other", policy(seed=6))
    before = files(other)
    for act in (lambda: ckptkit.apply(other, versions[0], tmp_path / "out"), lambda: apply_in_place(other, root)):
        with pytest.raises(Mismatch, match=r"expected adler32 .* after the change, found"):
            act()
    assert files(other) == before
    assert {path.name for path in other.iterdir()} == {"model.safetensors"}
    assert not (tmp_path / "out").exists()
    assert not ckptkit.verify_delta(versions[0], base=other).is_ok
    assert ckptkit.verify_delta(versions[0], base=as_hf(tmp_path / "base", states[0])).is_ok
    shutil.rmtree(versions[1])
    with pytest.raises(Mismatch, match="expected a delta of version 1, found one of version 2"):
        ckptkit.apply(tmp_path / "base", [versions[0], versions[2]], tmp_path / "out")
    with pytest.raises(Mismatch, match="expected a delta of version 1, found one of version 2"):
        apply_in_place(tmp_path / "base", root)
    assert contents(tmp_path / "base") == known[0]


def test_bad_versions(tmp_path: Path, states: list[State]) -> None:
    known = [raws(state) for state in states]
    base = as_hf(tmp_path / "base", states[0])
    good = publish(tmp_path / "good", 1, known[0], known[1], "overwrite")
    index = json.loads((good / "model.safetensors.index.json").read_text())

    def refused(kind: type[CkptError], words: str, **metadata: object) -> None:
        changed = {"metadata": index["metadata"] | metadata, "weight_map": index["weight_map"]}
        (good / "model.safetensors.index.json").write_text(json.dumps(changed))
        with pytest.raises(kind, match=words):
            ckptkit.apply(base, good, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused(Unsupported, "expected encoding xor or overwrite, found 'add'", delta_encoding="add")
    refused(Unsupported, "expected compression zstd, found 'gzip'", compression_format="gzip")
    refused(Unsupported, "need the package `blake3`", checksum_format="blake3")
    refused(Unsupported, "unknown digest `md4`", checksum_format="md4")
    refused(Corrupt, "expected numbers in", version="new")
    refused(Corrupt, "zstd frame", delta_encoding="xor")
    (good / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Unsupported, match="expected a checkpoint, found a delta"):
        ckptkit.consolidate(good, tmp_path / "out")
    file = good / "model-00000-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x55
    file.write_bytes(data)
    with pytest.raises(CkptError):
        ckptkit.apply(base, good, tmp_path / "out")
    file.write_bytes(data[:-3])
    with pytest.raises(Corrupt, match=r"bytes .header., found"):
        ckptkit.apply(base, good, tmp_path / "out")
    file.unlink()
    with pytest.raises(CkptError):
        ckptkit.apply(base, good, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_and_little_changed(tmp_path: Path, states: list[State]) -> None:
    base, same = as_hf(tmp_path / "base", states[0]), as_pt(tmp_path / "same", states[0])
    done = delta_version(base, same, tmp_path / "root")
    assert (done.tensors, done.nbytes) == (0, 0)
    large = {"w": torch.zeros(3, 1 << 20), "b": torch.ones(5)}
    after = updated(large, {"w": 9})
    engine = as_hf(tmp_path / "engine", large)
    done = delta_version(engine, as_dcp(tmp_path / "new", after), tmp_path / "other")
    assert done.share < 0.01
    pull(engine, done.output)
    assert tensors_in(engine) == raws(after)


def test_a_delta_is_no_model(tmp_path: Path, states: list[State]) -> None:
    """Nor is one of its files."""
    old, new = raws(states[0]), raws(states[1])
    version, published = publish(tmp_path / "root", 1, old, new, "xor"), publish_manifest(tmp_path / "sky", 1, old, new)
    sources = [version, published, *version.glob("*.safetensors"), *published.glob("*.safetensors")]
    assert len(sources) >= 4
    for source in sources:
        with pytest.raises(Unsupported, match="expected a checkpoint, found a delta"):
            ckptkit.consolidate(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
