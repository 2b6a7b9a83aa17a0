"""Weights of any format and world size, loaded into tensors sharded in any way: what was saved, to the last bit."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Corrupt, Mismatch, NotACheckpoint, Unsupported
from ckptkit.models.names.weights import find_weights
from ckptkit.storage import LayoutReader, load_weights
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from tests import producers
from tests.conftest import Produce
from tests.process_io import bytes_read
from tests.producers import counted, needs_errors_of_ranks
from tests.storage.states import (
    LARGE,
    assert_same_bits,
    blank,
    damage,
    every_kind,
    local,
    of_a_model,
    spread,
    write_hf,
    write_pt,
)

# -- alone -------------------------------------------------------------------------------------------------------------


def test_every_kind_of_tensor_is_loaded_from_every_format(tmp_path: Path) -> None:
    tensors = every_kind() | {"large": torch.rand(LARGE), "turned": torch.rand(6, 5).t()}
    producers.save_alone({"model": tensors}, tmp_path / "dcp")
    in_safetensors = {name: t.contiguous() for name, t in tensors.items() if t.dtype is not torch.complex128}
    for path, expected in (
        (tmp_path / "dcp", tensors),
        (write_pt(tmp_path / "f.pt", tensors), tensors),
        (write_hf(tmp_path / "hf", in_safetensors), in_safetensors),
    ):
        found = blank(expected)
        assert load_weights(path, found) == ()
        assert_same_bits(found, expected)


def test_targets_that_are_not_contiguous(tmp_path: Path) -> None:
    expected = {"w": torch.rand(LARGE), "image": torch.rand(2, 3, 4, 5)}
    found = {"w": torch.ones(LARGE[::-1]).t(), "image": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    load_weights(write_hf(tmp_path / "hf", expected), found)
    assert_same_bits(found, expected)


def test_parameters_are_filled_where_they_are(tmp_path: Path) -> None:
    source, target = nn.Linear(3, 4), nn.Linear(3, 4)
    memory = target.weight.data_ptr()
    load_weights(write_hf(tmp_path / "hf", dict(source.state_dict())), dict(target.named_parameters()))
    assert_same_bits(target.state_dict(), source.state_dict())
    assert target.weight.data_ptr() == memory
    assert target.weight.requires_grad


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_floats_are_converted_as_torch_does(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    tensors = {"w": torch.randn(70, 31).to(stored), "b": torch.randn(5).to(stored), "s": torch.tensor(0.1).to(stored)}
    found = blank(tensors, wanted)
    load_weights(write_hf(tmp_path / "hf", tensors), found, cast="allow")
    assert_same_bits(found, {name: t.to(wanted) for name, t in tensors.items()})


def test_what_was_not_asked_for_is_told(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", {"a": counted(2), "b": counted(3), "c": counted(4)})
    found = {"b": torch.ones(3)}
    assert load_weights(path, found) == ("a", "c")
    assert torch.equal(found["b"], counted(3))


def test_a_tied_tensor_needs_one_of_its_names(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", {"embed": counted(5, 3), "other": counted(5, 3)})
    weight = nn.Embedding(5, 3).weight
    assert load_weights(path, {"embed": weight, "head": weight.detach()}) == ("other",)
    assert torch.equal(weight, counted(5, 3))
    with pytest.raises(Mismatch, match="lacks 1 of"):
        load_weights(path, {"embed": weight, "head": torch.ones(5, 3)})


def test_tied_tensors_that_are_both_there_must_be_equal(tmp_path: Path) -> None:
    weight = nn.Embedding(5, 3).weight
    same = write_hf(tmp_path / "same", {"embed": counted(5, 3), "head": counted(5, 3)})
    assert load_weights(same, {"embed": weight, "head": weight}) == ()
    assert torch.equal(weight, counted(5, 3))
    trained_apart = write_hf(tmp_path / "apart", {"embed": counted(5, 3), "head": counted(5, 3) + 1})
    with pytest.raises(Mismatch, match="the model ties it to `embed`, but the checkpoint's bytes differ") as caught:
        load_weights(trained_apart, {"embed": weight, "head": weight})
    assert caught.value.tensor == "head"
    assert load_weights(trained_apart, {"embed": counted(5, 3), "head": counted(5, 3)}) == ()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", {"w": counted(2, 3), "n": torch.tensor([1, 2]), "big": torch.tensor([1e30])})
    cases: list[tuple[dict[str, Tensor], type[CkptError], str, str]] = [
        ({"w": torch.ones(2, 3), "x": torch.ones(1), "y": torch.ones(2)}, Mismatch, "x", r"lacks 2 of the model's 3"),
        ({"w": torch.ones(3, 2)}, Mismatch, "w", r"expected shape \[3, 2\] as in the model, found \[2, 3\]"),
        ({"n": torch.ones(2, dtype=torch.int32)}, Mismatch, "n", r"expected int32\[2\], found int64\[2\]"),
        ({"big": torch.ones(1, dtype=torch.float16)}, Unsupported, "big", r"float16 cannot hold 1e\+30"),
    ]
    for tensors, kind, name, words in cases:
        with pytest.raises(kind, match=words) as caught:
            load_weights(path, tensors, cast="allow")
        assert caught.value.tensor == name
        assert caught.value.path is not None
    with pytest.raises(NotACheckpoint):
        load_weights(tmp_path / "absent", {})


def test_a_damaged_chunk_is_an_error_that_names_it(produce: Produce, tmp_path: Path) -> None:
    """Chunks of several blocks included, whose CRC-32 is put together."""
    produced = produce(producers.fsdp2)
    path = Path(shutil.copytree(produced.root, tmp_path / "dcp"))
    damage(path, "model.up.weight")
    large = write_pt(tmp_path / "f.pt", {"up.weight": torch.rand(LARGE)})
    damage(large, "model.up.weight")
    for damaged, shape in ((path, (7, 6)), (large, LARGE)):
        with pytest.raises(Corrupt, match="are damaged") as caught:
            load_weights(damaged, {"up.weight": torch.ones(shape)})
        assert caught.value.tensor == "up.weight"


@pytest.mark.gpu
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    tensors = {"w": torch.rand(LARGE), "turned": torch.rand(6, 5), "half": torch.rand(7).bfloat16()}
    found = {name: torch.ones(t.shape, device="cuda") for name, t in tensors.items()}
    found["turned"] = torch.ones(5, 6, device="cuda").t()
    load_weights(write_hf(tmp_path / "hf", tensors), found, cast="allow")
    assert_same_bits({name: t.cpu() for name, t in found.items()}, {name: t.float() for name, t in tensors.items()})


# -- together ----------------------------------------------------------------------------------------------------------


def load_on_ranks(sources: list[tuple[Path, Path]], shape: tuple[int, ...], place: RankPlace, report: Report) -> None:
    """Load each checkpoint into tensors spread over a mesh in every way, and compare this rank's part."""
    with process_group(place, "cpu"):
        mesh = init_device_mesh("cpu", shape)
        for path, truth in sources:
            expected = torch.load(truth)
            for way in range(6):
                found = {name: spread(t, mesh, way + i) for i, (name, t) in enumerate(blank(expected).items())}
                assert load_weights(path, found) == ()
                parts = {name: local(spread(t, mesh, way + i)) for i, (name, t) in enumerate(expected.items())}
                assert_same_bits({name: local(t) for name, t in found.items()}, parts)
                report(path.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [*(pytest.param((ranks,), marks=pytest.mark.nightly) for ranks in (1, 3)), (2, 2)], ids=str
)
def test_every_rank_gets_its_part(shape: tuple[int, ...], produce: Produce, tmp_path: Path) -> None:
    """From checkpoints of 1, 3 and 4 ranks, sharded along one axis and along two, and from files of other formats."""
    kinds = every_kind() | {"large": torch.rand(LARGE), "rows": counted(7, 3), "deep": counted(3, 4, 5)}
    in_safetensors = {name: t for name, t in kinds.items() if t.dtype is not torch.complex128}
    truths = {
        write_pt(tmp_path / "f.pt", kinds): kinds,
        write_hf(tmp_path / "hf", in_safetensors): in_safetensors,
        **{
            produced.root: of_a_model(produced.truth)
            for produced in map(produce, (producers.fsdp2, producers.mesh, producers.tensor_parallel, producers.full))
        },
    }
    sources = []
    for number, (path, truth) in enumerate(truths.items()):
        torch.save(truth, tmp_path / f"truth-{number}")
        sources.append((path, tmp_path / f"truth-{number}"))
    heard: list[Any] = []
    launch(partial(load_on_ranks, sources, shape), torch.Size(shape).numel(), heard.append)
    assert len(heard) == 6 * len(sources) * torch.Size(shape).numel()


def read_a_part(paths: list[Path], place: RankPlace, report: Report) -> None:
    with process_group(place, "cpu") as mesh:
        tensors = {f"{i}": distribute_tensor(torch.ones(1000, 500), mesh, [Shard(0)]) for i in range(4)}
        load_weights(paths[0], dict(tensors))  # whatever is read once per process is read
        for path in paths:
            before = bytes_read()
            load_weights(path, dict(tensors))
            report(bytes_read() - before)


@pytest.mark.slow
def test_a_rank_reads_its_part_only(tmp_path: Path) -> None:
    tensors = {f"{i}": torch.rand(1000, 500) for i in range(4)} | {"unwanted": torch.rand(1000, 500)}
    heard: list[int] = []
    producers.save_alone({"model": tensors}, tmp_path / "dcp")
    paths = [tmp_path / "dcp", write_hf(tmp_path / "hf", tensors), write_pt(tmp_path / "f.pt", tensors)]
    launch(partial(read_a_part, paths), 2, heard.append)
    assert len(heard) == 6
    share = 4 * 1000 * 500 * 4 // 2
    assert all(share < nbytes < 1.02 * share for nbytes in heard), heard


def fail_together(damaged: Path, sound: Path, place: RankPlace, report: Report) -> None:
    """Every rank hears of what only one of them met, as the error that it is, and can go on."""
    with process_group(place, "cpu") as mesh:
        last = place.rank == place.world_size - 1

        def expect(kind: type[CkptError], path: Path, tensors: dict[str, Tensor]) -> None:
            with pytest.raises(kind) as caught:
                load_weights(path, tensors)
            report((place.rank, kind.code, caught.value.tensor))

        up = distribute_tensor(torch.ones(7, 6), mesh, [Shard(0)])
        expect(NotACheckpoint, sound.with_name("absent") if last else sound, {"up.weight": up})
        expect(Mismatch, sound, {"up.weight": torch.ones(7, 5) if last else up})
        expect(Corrupt, damaged, {"up.weight": up})  # saved by as many ranks: the last one's chunk is read by it alone
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"up.weight": up}, storage_reader=LayoutReader(find_weights(open_layout(damaged)).layout))
        assert list(caught.value.failures) == [place.world_size - 1]
        load_weights(sound, {"up.weight": up})
        report((place.rank, "done", dist.get_world_size()))


@needs_errors_of_ranks
def test_an_error_of_one_rank_is_raised_on_all(produce: Produce, tmp_path: Path) -> None:
    sound = produce(producers.fsdp2).root
    damaged = Path(shutil.copytree(sound, tmp_path / "dcp"))
    damage(damaged, "model.up.weight")
    heard: list[Any] = []
    launch(partial(fail_together, damaged, sound), 3, heard.append)
    expected = [("not_a_checkpoint", None), ("mismatch", "up.weight"), ("corrupt", "up.weight"), ("done", 3)]
    assert sorted(heard) == sorted((rank, *what) for rank in range(3) for what in expected)
