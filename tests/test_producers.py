"""The producers are what they claim to be, as torch's own reader sees it; ckptkit is not imported here."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests import producers
from tests.conftest import Produce
from tests.producers import READABLE, Producer, flatten


def metadata_of(root: Path) -> Metadata:
    return FileSystemReader(root).read_metadata()


def chunks_of(root: Path, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    entry = metadata_of(root).state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)


def load_with_torch(root: Path) -> dict[str, Tensor]:
    """Every tensor by its flat key, as `dcp_to_torch_save` loads them."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _load_state_dict(state, FileSystemReader(root), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    paths = metadata_of(root).planner_data
    return {name: leaf for name, path in paths.items() if isinstance(leaf := _follow(state, path), Tensor)}


def _follow(tree: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor in row-major order, whatever its dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return bytes(plain.reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b""


LOADABLE = [producer for producer in READABLE if producer is not producers.no_collectives]


@pytest.mark.parametrize("producer", LOADABLE, ids=lambda producer: producer.__name__)
def test_torch_loads_the_truth(produce: Produce, producer: Producer) -> None:
    made = produce(producer)
    loaded = load_with_torch(made.root)
    assert loaded.keys() == made.truth.keys()
    for name, tensor in made.truth.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert raw(loaded[name]) == raw(tensor), name


def test_fsdp2_has_uneven_and_empty_chunks_ties_and_odd_buffers(produce: Produce) -> None:
    made = produce(producers.fsdp2)
    assert chunks_of(made.root, "model.embed.weight") == [((0, 0), (4, 6)), ((4, 0), (4, 6)), ((8, 0), (3, 6))]
    assert ((2, 0), (0, 6)) in chunks_of(made.root, "model.pair.weight")
    assert chunks_of(made.root, "model.logit_scale") == [((), ())]
    assert made.truth["model.norm.num_batches_tracked"].item() == 1
    assert made.truth["model.position_ids"].dtype == torch.int64
    assert made.truth["model.mask"].dtype == torch.bool
    assert torch.equal(made.truth["model.head.weight"], made.truth["model.embed.weight"])
    assert "optim.state.head.weight.exp_avg" not in made.truth
    assert made.truth["optim.state.up.weight.exp_avg"].abs().sum() > 0
    assert {"extra.step", "extra.note"} <= metadata_of(made.root).state_dict_metadata.keys()


def test_mesh_has_unsorted_chunks_somewhere(produce: Produce) -> None:
    entries = metadata_of(produce(producers.mesh).root).state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    orders = [[tuple(chunk.offsets) for chunk in tensor.chunks] for tensor in tensors]
    assert any(order != sorted(order) for order in orders)


def test_fsdp1_leaves_out_empty_chunks(produce: Produce) -> None:
    root = produce(producers.fsdp1).root
    assert chunks_of(root, "model.pair.weight") == [((0, 0), (1, 6)), ((1, 0), (1, 6))]


def test_hsdp_keeps_every_chunk_once(produce: Produce) -> None:
    made = produce(producers.hsdp)
    assert chunks_of(made.root, "model.embed.weight") == [((0, 0), (6, 6)), ((6, 0), (5, 6))]
    assert {path.name for path in made.root.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(4)}


def test_meshes_shard_along_any_dimension(produce: Produce) -> None:
    root = produce(producers.mesh).root
    assert chunks_of(root, "model.columns") == [((0, 0), (3, 3)), ((0, 3), (3, 2))]
    assert chunks_of(root, "model.grid") == [((0, 0), (3, 4)), ((0, 4), (3, 3)), ((3, 0), (2, 4)), ((3, 4), (2, 3))]
    assert len(chunks_of(root, "model.deep")) == 4
    assert chunks_of(root, "model.twice") == [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((4, 0), (2, 2)), ((6, 0), (1, 2))]


def test_tensor_parallel_has_two_dimensional_chunks(produce: Produce) -> None:
    root = produce(producers.tensor_parallel).root
    assert chunks_of(root, "model.0.weight") == [((0, 0), (3, 6)), ((3, 0), (2, 6)), ((5, 0), (3, 6)), ((8, 0), (2, 6))]
    assert ((3, 5), (3, 5)) in chunks_of(root, "model.2.weight")


def test_many_files_has_several_files_per_rank_and_empty_ones(produce: Produce) -> None:
    sizes = [path.stat().st_size for path in produce(producers.many_files).root.glob("__0_*.distcp")]
    assert len(sizes) > 1
    assert 0 in sizes


def test_file_per_item_has_a_file_per_item(produce: Produce) -> None:
    root = produce(producers.file_per_item).root
    places = [place.relative_path for place in metadata_of(root).storage_data.values()]
    assert len(places) == len(set(places))


def test_no_collectives_leaves_a_metadata_per_rank(produce: Produce) -> None:
    root = produce(producers.no_collectives).root
    assert {path.name for path in root.glob("*.metadata")} == {"__0.metadata", "__1.metadata"}
    assert not (root / ".metadata").exists()


def test_leftovers_are_files_that_the_metadata_does_not_know(produce: Produce) -> None:
    root = produce(producers.leftovers).root
    known = {place.relative_path for place in metadata_of(root).storage_data.values()}
    assert {path.name for path in root.glob("*.distcp")} - known == {"__2_0.distcp", "__3_0.distcp"}


def test_no_crc_is_only_about_its_own_checkpoint(produce: Produce) -> None:
    central = b"PK\x01\x02"
    item = (produce(producers.no_crc).root / "__0_0.distcp").read_bytes()
    at = item.index(central)
    assert item[at + 16 : at + 20] == bytes(4)
    item = (produce(producers.under_model).root / "__0_0.distcp").read_bytes()
    at = item.index(central)
    assert item[at + 16 : at + 20] != bytes(4)


def test_dtypes_has_all_shapes_of_all_dtypes(produce: Produce) -> None:
    truth = produce(producers.dtypes).truth
    assert {tensor.dtype for tensor in truth.values()} == set(producers.DTYPES)
    assert {tuple(tensor.shape) for tensor in truth.values()} == {(3, 4), (1,), (), (0, 4), (3, 0)}


def test_strided_items_keep_their_strides(produce: Produce) -> None:
    loaded = {}
    root = produce(producers.strided).root
    for index, place in metadata_of(root).storage_data.items():
        item = (root / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        (root.parent / "item.pt").write_bytes(item)
        loaded[index.fqn] = torch.load(root.parent / "item.pt")
    assert loaded["model.transposed"].stride() == (1, 4)
    assert loaded["model.channels_last"].stride() == (60, 1, 15, 3)
    assert not loaded["model.permuted"].is_contiguous()
    assert loaded["model.sliced"].is_contiguous()


@pytest.mark.parametrize(
    ("producer", "descriptor"),
    [
        (producers.transformed, "stream.inverted/1"),
        pytest.param(
            producers.zstd,
            "stream.zstd/1",
            marks=pytest.mark.skipif(not ZStandard.is_available(), reason="torch needs `zstandard` to write zstd"),
        ),
    ],
)
def test_transforms_are_recorded(produce: Produce, producer: Producer, descriptor: str) -> None:
    root = produce(producer).root
    assert [place.transform_descriptors for place in metadata_of(root).storage_data.values()] == [[descriptor]]
    assert b"PK\x03\x04" not in (root / "__0_0.distcp").read_bytes()


def test_safetensors_items_are_safetensors(produce: Produce) -> None:
    assert (produce(producers.safetensors_items).root / "__0_0.distcp").read_bytes()[8:9] == b"{"


def test_lazy_tensors_are_stored_unresolved(produce: Produce) -> None:
    stored = (produce(producers.lazy).root / "__0_0.distcp").read_bytes()
    assert b"conj" in stored
    assert b"neg" in stored


def test_hf_shards_carry_their_offsets(produce: Produce) -> None:
    root = produce(producers.hf_shards).root
    assert sorted(path.name for path in root.iterdir()) == [
        f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in (1, 2, 3)
    ]
    assert all(b"DCP_SHARDING_INFO" in path.read_bytes() for path in root.iterdir())
    assert sum(b'"shape":[0,6]' in path.read_bytes() for path in root.iterdir()) == 1, "an empty shard"


def test_hf_shards_in_parts_have_a_file_per_rank_and_part(produce: Produce) -> None:
    names = {path.name for path in produce(producers.hf_shards_in_parts).root.iterdir()}
    assert names == {
        f"shard-{rank:05d}-model-{part:05d}-of-00003.safetensors" for rank in (1, 2, 3) for part in (1, 2, 3)
    }


def test_deduplicated_hf_shards_are_of_every_other_rank(produce: Produce) -> None:
    names = {path.name for path in produce(producers.hf_shards_deduplicated).root.iterdir()}
    assert names == {f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in (1, 3)}


def test_hf_alone_has_an_index_and_notes_offsets(produce: Produce) -> None:
    root = produce(producers.hf_alone).root
    assert {path.name for path in root.iterdir()} == {
        "model.safetensors.index.json",
        *(f"model-{part:05d}-of-00003.safetensors" for part in (1, 2, 3)),
    }
    assert all(b"DCP_SHARDING_INFO" in path.read_bytes() for path in root.glob("*.safetensors"))


def test_accelerate_writes_model_and_optimizer_beside_each_other(produce: Produce) -> None:
    made = produce(producers.accelerate)
    both = load_with_torch(made.root / "pytorch_model_fsdp_0") | load_with_torch(made.root / "optimizer_0")
    assert both.keys() == made.truth.keys()
    assert all(raw(both[name]) == raw(tensor) for name, tensor in made.truth.items())


@pytest.mark.parametrize(
    ("producer", "prefix"),
    [
        (producers.under_nothing, "0."),
        (producers.under_model, "model.0."),
        (producers.under_state_model, "state.model.0."),
        (producers.under_app, "app.model.0."),
        (producers.under_odd_name, "my net.v2.0."),
        (producers.from_ddp, "model.module."),
        (producers.from_compile, "model._orig_mod."),
        (producers.from_checkpoint_wrapper, "model.0._checkpoint_wrapped_module."),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_wrappers_are_in_the_names(produce: Produce, producer: Producer, prefix: str) -> None:
    assert f"{prefix}weight" in produce(producer).truth


def test_a_failing_rank_ends_all() -> None:
    with pytest.raises(ChildProcessError, match="rank 1 gives up"):
        producers.spawn(2, fail_on_rank_1)


def fail_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("rank 1 gives up")
    torch.distributed.barrier()


def test_flatten_names_as_torch_does() -> None:
    leaf = torch.zeros(1)
    assert flatten({"a": {"b.c": leaf}, "d": [1]}) == {"a.b.c": leaf}
