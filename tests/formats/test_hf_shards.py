"""Safetensors shards as ranks write them: those of torch itself, and wrong ones made by hand."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.hf import HuggingFace
from tests import producers
from tests.conftest import Produce
from tests.formats.contract import assert_holds
from tests.producers import Producer, bits, counted
from tests.strategies import cells, shapes, tilings

Part = tuple[list[int], Tensor]  # where in its tensor it begins, and what lies there


def write_shard(root: Path, rank: int, parts: dict[str, Part], *, noted: Any = None, name: str | None = None) -> Path:
    """A shard as torch writes it, `noted` instead of what should be said of where the parts lie."""
    if noted is None:
        noted = {tensor: {"saved_offsets": start} for tensor, (start, _) in parts.items()}
    path = root / (name or f"shard-{rank:05d}-model-00001-of-00001.safetensors")
    metadata = {"format": "pt", "DCP_VERSION": "1.0"}
    metadata["DCP_SHARDING_INFO"] = noted if isinstance(noted, str) else json.dumps(noted)
    save_file({tensor: part for tensor, (_, part) in parts.items()}, path, metadata)
    return path


def two_ranks(root: Path) -> None:
    """A tensor of five rows on two ranks, another on the first alone."""
    write_shard(root, 1, {"w": ([0, 0], counted(3, 2)), "scale": ([], torch.tensor(7.0))})
    write_shard(root, 2, {"w": ([3, 0], counted(2, 2))})


@pytest.mark.parametrize(
    ("producer", "world_size"),
    [
        (producers.hf_shards, 3),
        (producers.hf_shards_in_parts, 3),
        (producers.hf_shards_deduplicated, 2),
        (producers.hf_alone, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_torch_writes(produce: Produce, producer: Producer, world_size: int | None) -> None:
    made = produce(producer)
    layout = open_layout(made.root)
    assert_holds(layout, made.truth)
    assert layout.world_size == world_size


def test_chunks_are_where_the_ranks_had_them(produce: Produce) -> None:
    tensors = open_layout(produce(producers.hf_shards).root).tensors
    starts = {name: [(chunk.start, chunk.size) for chunk in tensor.chunks] for name, tensor in tensors.items()}
    assert starts["embed.weight"] == [((0, 0), (4, 6)), ((4, 0), (4, 6)), ((8, 0), (3, 6))]
    assert starts["columns"] == [((0, 0), (2, 3)), ((0, 3), (2, 3)), ((0, 6), (2, 1))]
    assert ((2, 0), (0, 6)) in starts["pair.weight"]
    assert starts["logit_scale"] == [((), ())]


@given(st.data())
def test_any_tiling(data: st.DataObject) -> None:
    torch.manual_seed(0)
    tensors = {name: bits(data.draw(shapes), torch.float16) for name in ("t", "u")}
    with tempfile.TemporaryDirectory() as home:
        parts: list[dict[str, Part]] = [{} for _ in range(8)]
        for name, tensor in tensors.items():
            for rank, box in enumerate(data.draw(tilings(tuple(tensor.shape)))):
                parts[rank][name] = (list(box.start), tensor[cells(box)].contiguous())
        for rank, held in enumerate(parts, 1):
            write_shard(Path(home), rank, held)
        assert_holds(open_layout(Path(home)), tensors)


def test_packed_numbers_are_counted_as_torch_counts_them(tmp_path: Path) -> None:
    packed = bits((5, 4), torch.float4_e2m1fn_x2)
    raw = packed.view(torch.uint8)
    for rank, rows in enumerate((slice(0, 3), slice(3, 5)), 1):
        for half, columns in enumerate((slice(0, 2), slice(2, 4))):
            part = raw[rows, columns].contiguous().view(torch.float4_e2m1fn_x2)
            write_shard(tmp_path, 2 * rank - 1 + half, {"w": ([rows.start, columns.start], part)})
    assert_holds(open_layout(tmp_path), {"w": packed})


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_is_missing_shows(produce: Produce, tmp_path: Path, rank: int) -> None:
    shutil.copytree(produce(producers.hf_shards).root, tmp_path / "in")
    (tmp_path / "in" / f"shard-{rank:05d}-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(Corrupt, match=f"`shard-{rank:05d}-\\*` is missing: expected numbers 1 to 3"):
        open_layout(tmp_path / "in")


def test_a_part_that_is_missing_shows(produce: Produce, tmp_path: Path) -> None:
    shutil.copytree(produce(producers.hf_shards_in_parts).root, tmp_path / "in")
    (tmp_path / "in" / "shard-00002-model-00001-of-00003.safetensors").unlink()
    with pytest.raises(Corrupt, match="gap"):
        open_layout(tmp_path / "in")
    for path in (tmp_path / "in").glob("shard-*-model-00003-*"):
        path.unlink()
    with pytest.raises(Corrupt, match=r"`shard-\*-model-00003-\*` is missing: expected numbers 1 to 3"):
        open_layout(tmp_path / "in")
    assert not HuggingFace().is_complete(tmp_path / "in")


def test_the_last_rank_can_be_missing_without_a_trace(tmp_path: Path) -> None:
    """Nothing in the files says otherwise; but their number is told."""
    two_ranks(tmp_path)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    layout = open_layout(tmp_path)
    assert (layout.specs["w"].shape, layout.world_size) == ((3, 2), 1)


@pytest.mark.parametrize(
    ("start", "part", "words"),
    [
        ([4, 0], counted(2, 2), "gap"),
        ([2, 0], counted(2, 2), "overlap"),
        ([0, 0], counted(3, 2), "overlap"),
        ([3, 1], counted(2, 2), "gap"),
        ([2**62, 0], counted(2, 2), "gap"),
        ([3, 0], counted(2, 2).half(), "disagree"),
        ([3], counted(2), "disagree"),
    ],
)
def test_shards_that_do_not_fit_are_corrupt(tmp_path: Path, start: list[int], part: Tensor, words: str) -> None:
    two_ranks(tmp_path)
    write_shard(tmp_path, 2, {"w": (start, part)})
    with pytest.raises(Corrupt, match=words) as raised:
        open_layout(tmp_path)
    assert raised.value.tensor == "w"


NOTES: dict[str, Any] = {
    "no JSON": "saved",
    "empty": "",
    "nested without end": "[" * 100_000 + "]" * 100_000,
    "surrogate": "\\ud800",
    "equal keys": '{"w": {"saved_offsets": [3, 0]}, "w": {"saved_offsets": [3, 0]}}',
    "a list": [],
    "a number": 7,
    "null": "null",
    "nothing": {},
    "other name": {"x": {"saved_offsets": [3, 0]}},
    "more names": {"w": {"saved_offsets": [3, 0]}, "x": {"saved_offsets": [0]}},
    "no offsets": {"w": {}},
    "bare offsets": {"w": [3, 0]},
}
OFFSETS: tuple[Any, ...] = (
    *(None, 3, "30", {}, [], [3], [3, 0, 0]),
    *([-3, 0], [3.0, 0], [True, 0], [2**63, 0], [None, 0]),
)
NOTES |= {f"offsets {value!r}": {"w": {"saved_offsets": value}} for value in OFFSETS}


@pytest.mark.parametrize("what", NOTES)
def test_a_shard_must_say_where_it_lies(tmp_path: Path, what: str) -> None:
    two_ranks(tmp_path)
    path = write_shard(tmp_path, 2, {"w": ([], counted(2, 2))}, noted=NOTES[what])
    with pytest.raises(Corrupt) as raised:
        open_layout(tmp_path)
    assert raised.value.path == path


def test_a_shard_without_a_word_on_it_is_corrupt(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    save_file({"w": counted(2, 2)}, tmp_path / "shard-00002-model-00001-of-00001.safetensors")
    with pytest.raises(Corrupt, match="DCP_SHARDING_INFO"):
        open_layout(tmp_path)


def test_bytes_in_front_are_corrupt(tmp_path: Path) -> None:
    """As torch 2.13 leaves them where the state holds something else than tensors."""
    two_ranks(tmp_path)
    path = tmp_path / "shard-00002-model-00001-of-00001.safetensors"
    path.write_bytes(b"PK\x03\x04" + bytes(99) + path.read_bytes())
    with pytest.raises(Corrupt, match="header"):
        open_layout(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "b.safetensors"]
)
def test_another_model_beside_the_shards_is_ambiguous(tmp_path: Path, name: str) -> None:
    two_ranks(tmp_path)
    write_shard(tmp_path, 0, {"w": ([0, 0], counted(5, 2))}, name=name)
    with pytest.raises(Corrupt, match=f"2 ranks and `{name}`"):
        open_layout(tmp_path)


def test_shards_of_two_saves_are_corrupt(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    write_shard(tmp_path, 0, {"v": ([0], counted(2))}, name="shard-00002-model-00001-of-00002.safetensors")
    with pytest.raises(Corrupt, match="one of 1 files, one of 2 files"):
        open_layout(tmp_path)


def test_numbers_beyond_all_bounds_cost_nothing(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    far = {"w": ([7, 0], counted(2, 2))}
    write_shard(tmp_path, 0, far, name=f"shard-{'9' * 200}-model-00001-of-00001.safetensors")
    with pytest.raises(Corrupt, match="`shard-00003"):
        open_layout(tmp_path)


def test_a_rank_that_held_nothing_is_not_missed(tmp_path: Path) -> None:
    """As where all that it held was a copy, which another rank wrote."""
    two_ranks(tmp_path)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    write_shard(tmp_path, 7, {"w": ([3, 0], counted(2, 2))})
    layout = open_layout(tmp_path)
    assert (layout.specs["w"].shape, layout.world_size) == ((5, 2), 2)


def test_one_shard_is_no_checkpoint(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    with pytest.raises(Unsupported, match="shard of one rank"):
        open_layout(path)
    assert not HuggingFace().is_complete(path)


def test_a_shard_under_a_models_name_is_corrupt(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, {"w": ([3, 0], counted(2, 2))}, name="model.safetensors")
    with pytest.raises(Corrupt, match="gap"):
        open_layout(tmp_path)


def test_a_model_may_keep_the_notes_of_files_it_was_made_from(tmp_path: Path) -> None:
    """`save_file(changed, path, metadata=old.metadata())` is common."""
    tensors = {"renamed": counted(3)}
    notes = {"w": {"saved_offsets": [3, 0]}}
    write_shard(tmp_path, 0, {"renamed": ([], tensors["renamed"])}, noted=notes, name="model.safetensors")
    assert_holds(open_layout(tmp_path), tensors)


def test_shards_below_what_was_consolidated_of_them(produce: Produce, tmp_path: Path) -> None:
    """`enable_consolidation=True` leaves them in `sharded/`."""
    shards = produce(producers.hf_shards)
    shutil.copytree(produce(producers.hf_alone).root, tmp_path / "out")
    shutil.copytree(shards.root, tmp_path / "out" / "sharded")
    assert_holds(open_layout(tmp_path / "out"), produce(producers.hf_alone).truth)
    assert_holds(open_layout(tmp_path / "out" / "sharded"), shards.truth)


@pytest.mark.slow
def test_any_damage_to_a_shard_is_an_error_of_ours(produce: Produce, tmp_path: Path) -> None:
    shutil.copytree(produce(producers.hf_shards).root, tmp_path / "in")
    path = tmp_path / "in" / "shard-00002-model-00001-of-00001.safetensors"
    sound = path.read_bytes()
    length = 8 + int.from_bytes(sound[:8], "little")
    for at in range(length):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 7
        path.write_bytes(damaged)
        with suppress(CkptError):
            open_layout(tmp_path / "in")
