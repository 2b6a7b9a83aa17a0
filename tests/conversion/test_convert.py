"""What `convert` writes: Hugging Face weights that an FSDP job starts from, files of torch.save there and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptkit.storage
from ckptkit import consolidate, convert, reshard
from ckptkit.errors import Mismatch, NotACheckpoint, Occupied, Unsafe, Usage
from tests import producers
from tests.conftest import Produce
from tests.conversion.judges import judge_shards, raw, structure
from tests.models.test_fit import make_model
from tests.producers import counted, save_alone, spawn
from tests.test_matrix import assert_same, leaves, load_dcp, load_hf, load_pt, nested

# -- Hugging Face weights into a training ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_job_of_fsdp2_starts_from_hugging_face_weights(tmp_path: Path, tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    torch.save(dict(model.state_dict()), tmp_path / "truth")
    done = convert(tmp_path / "hf", tmp_path / "start", to="dcp", world_size=3, under="model")
    spawn(3, _start, tmp_path / "start", tmp_path / "truth", tied)
    spawn(2, _start, tmp_path / "start", tmp_path / "truth", tied)
    assert done.notes == (["wrote `lm_head.weight` as a tensor of its own, although it is tied"] if tied else [])
    assert done.world_size == 3
    beside = {"config.json", "generation_config.json", "tokenizer.json"}
    data = {".metadata", "ckptkit.json", *(f"__{rank}_0.distcp" for rank in range(3))}
    assert {path.name for path in (tmp_path / "start").iterdir()} == beside | data
    chunks = structure(tmp_path / "start")["model.model.embed_tokens.weight"]
    assert [file for *_, file in chunks] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]


@pytest.mark.parametrize("to", ["pt", "dcp"])
def test_it_says_whether_a_tied_head_shares_the_bytes_of_the_embedding(tmp_path: Path, to: str) -> None:
    make_model(tie_word_embeddings=True).save_pretrained(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "out", to=to, under="model")
    (note,) = (note for note in done.notes if "lm_head.weight" in note)
    places = {
        (chunk.path, chunk.checksummed_range)
        for name, tensor in ckptkit.open(tmp_path / "out").layout.tensors.items()
        if "lm_head" in name or "embed_tokens" in name
        for chunk in tensor.chunks
    }
    assert ("in the storage of the embedding" in note) is (len(places) == 1)


def _start(root: Path, truth: Path, tied: bool) -> None:
    torch.manual_seed(7)
    model = make_model(tie_word_embeddings=tied)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=root)
    set_model_state_dict(model, state["model"])
    for name, tensor in torch.load(truth).items():
        found = model.state_dict()[name]
        assert isinstance(found, DTensor)
        assert raw(found.full_tensor()) == raw(tensor), name
    assert dist.get_world_size() in {2, 3}


def test_the_key_asked_for(tmp_path: Path) -> None:
    save_file({"a.w": counted(4, 3), "b": counted(2)}, str(tmp_path / "model.safetensors"))
    convert(tmp_path / "model.safetensors", tmp_path / "plain", to="dcp")
    assert load_dcp(tmp_path / "plain").keys() == {"a.w", "b"}
    convert(tmp_path / "model.safetensors", tmp_path / "dcp", to="dcp", under="net")
    assert load_dcp(tmp_path / "dcp").keys() == {"net"}
    assert load_dcp(tmp_path / "dcp")["net"].keys() == {"a.w", "b"}
    convert(tmp_path / "dcp", tmp_path / "pt", to="pt", under="state_dict")
    assert load_pt(tmp_path / "pt")["state_dict"]["net"]["a.w"].tolist() == counted(4, 3).tolist()
    with pytest.raises(Usage, match="cannot be under a key"):
        convert(tmp_path / "dcp", tmp_path / "hf", to="hf", under="model")


def test_a_state_with_nothing_in_it(tmp_path: Path) -> None:
    save_alone({}, tmp_path / "in")
    for source, made, to in (("in", "pt", "pt"), ("pt", "dcp", "dcp"), ("dcp", "back", "pt")):
        convert(tmp_path / source, tmp_path / made, to=to)
    reshard(tmp_path / "in", tmp_path / "resharded", to=3)
    assert load_dcp(tmp_path / "dcp") == load_dcp(tmp_path / "resharded") == {}
    assert load_pt(tmp_path / "pt") == load_pt(tmp_path / "back") == {}


def test_consolidated_and_converted_back(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    consolidate(made.root, tmp_path / "hf", max_shard_size=200)
    convert(tmp_path / "hf", tmp_path / "back", to="dcp", under="model", world_size=3)
    weights = {name: tensor for name, tensor in made.truth.items() if name.startswith("model.")}
    found = {".".join(way): leaf for way, leaf in leaves(load_dcp(tmp_path / "back")).items()}
    assert weights.keys() - found.keys() <= {"model.head.weight"}, "a tie is written once, and no config says so"
    assert_same(
        {(name,): leaf for name, leaf in found.items()}, {(name,): weights[name] for name in found.keys() & weights}
    )
    torch.save({name: weights[name] for name in found}, tmp_path / "truth")
    judge_shards(3, [(tmp_path / "back", tmp_path / "truth")])


# -- files of torch.save -----------------------------------------------------------------------------------------------


def state_of(kind: str) -> dict[str, Any]:
    """A state dict as people save it in one file."""
    state, _ = nested()
    weights = {"layers.0.weight": counted(7, 3), "layers.0.bias": counted(7), "scale": torch.tensor(2.0)}
    wrapped = {"epoch": 3, "optimizer": state["optim"], "loss": 0.5, "args": {"lr": 0.1, "betas": (0.9, 0.99)}}
    return {
        "flat": weights,
        "nested": state,
        "model": {"model": weights, **wrapped},
        "state_dict": {"state_dict": weights, **wrapped},
    }[kind]


@pytest.mark.parametrize("is_legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", ["flat", "nested", "model", "state_dict"])
def test_there_and_back(tmp_path: Path, kind: str, is_legacy: bool) -> None:
    state = state_of(kind)
    torch.save(state, tmp_path / "weights.pth", _use_new_zipfile_serialization=not is_legacy)
    convert(tmp_path / "weights.pth", tmp_path / "dcp", to="dcp", world_size=4)
    assert_same(leaves(load_dcp(tmp_path / "dcp")), leaves(state))
    convert(tmp_path / "dcp", tmp_path / "pt", to="pt")
    assert_same(leaves(load_pt(tmp_path / "pt")), leaves(state))
    found = load_pt(tmp_path / "pt")
    assert found.keys() == state.keys()
    convert(tmp_path / "pt" / "state.pt", tmp_path / "again", to="pt")
    assert (tmp_path / "again" / "state.pt").read_bytes() == (tmp_path / "pt" / "state.pt").read_bytes()


def test_shards_into_one_file_and_back(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    convert(made.root, tmp_path / "pt", to="pt")
    done = convert(tmp_path / "pt", tmp_path / "dcp", to="dcp", world_size=3)
    assert done.nbytes == sum(tensor.nbytes for tensor in made.truth.values())
    assert_same(leaves(load_dcp(tmp_path / "dcp")), leaves(load_dcp(made.root)))
    full = produce(producers.full)
    convert(full.root, tmp_path / "sharded", to="dcp", world_size=3)
    torch.save(full.truth, tmp_path / "truth")
    judge_shards(3, [(tmp_path / "sharded", tmp_path / "truth")])


def test_the_model_alone_out_of_one_file(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.full)
    done = convert(made.root / "state.pt", tmp_path / "hf", to="hf")
    assert {left.name for left in done.dropped} == {"optim", "run"}
    for name, tensor in load_hf(tmp_path / "hf").items():
        assert raw(tensor) == raw(made.truth[f"model.{name}"])


# -- sources and sizes -------------------------------------------------------------------------------------------------


def test_as_many_ranks_as_before(produce: Produce, tmp_path: Path) -> None:
    sources = ((producers.fsdp2, 3), (producers.hsdp, 4), (producers.accelerate, 2), (producers.full, 1))
    for producer, ranks in (*sources, (producers.hf_alone, 1)):
        out = tmp_path / producer.__name__
        done = convert(produce(producer).root, out, to="dcp")
        assert done.world_size == ranks
        parts = [path.parent for path in out.rglob(".metadata")]
        for part in parts:
            assert {path.name for path in part.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(ranks)}


@pytest.mark.parametrize("to", ["dcp", "pt", "hf"])
def test_the_latest_of_a_run(tmp_path: Path, to: str) -> None:
    for step in (1, 2):
        save_alone({"model": {"w": counted(3) + step}}, tmp_path / "run" / f"ckpt-{step}")
    done = convert(tmp_path / "run", tmp_path / "out", to=to)
    assert done.source == tmp_path / "run" / "ckpt-2"
    load = {"dcp": load_dcp, "pt": load_pt, "hf": load_hf}[to]
    (found,) = (leaf for leaf in leaves(load(tmp_path / "out")).values() if isinstance(leaf, Tensor))
    assert found.tolist() == [2, 3, 4]


@pytest.mark.parametrize("to", ["dcp", "pt", "hf"])
def test_only_the_file_that_was_named(tmp_path: Path, to: str) -> None:
    home = tmp_path / "in"
    home.mkdir()
    for name in ("one", "two"):
        torch.save({"model": {name: counted(3)}}, home / f"{name}.pt")
    (home / "notes.txt").touch()
    convert(home / "one.pt", tmp_path / "out", to=to)
    manifest = json.loads((tmp_path / "out" / "ckptkit.json").read_text())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*manifest["files"], "ckptkit.json"}
    assert [name.removeprefix("model.") for name in manifest["tensors"]] == ["one"]


def test_what_is_not_to_be_had(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.under_model).root
    for to in ("pt", "hf"):
        with pytest.raises(Usage, match="any number of ranks"):
            convert(source, tmp_path / "out", to=to, world_size=2)
    for to in ("dcp", "pt", "hf"):
        with pytest.raises(NotACheckpoint):
            convert(tmp_path / "absent", tmp_path / "out", to=to)
        with pytest.raises(Unsafe):
            convert(source, source / "training", to=to)
        with pytest.raises(Usage, match="matches no tensor"):
            convert(source, tmp_path / "out", to=to, include=["nothing*"])
    assert list(tmp_path.iterdir()) == []


def test_names_that_cannot_be_nested_in_one_another(tmp_path: Path) -> None:
    save_alone({"a": {"w": counted(2)}, "b": {"v": counted(2)}, "c": counted(3)}, tmp_path / "in")
    for to in ("dcp", "pt"):
        with pytest.raises(Mismatch, match="expected a dict at `a`") as caught:
            convert(tmp_path / "in", tmp_path / "out", to=to, rename=["^c$=>a"])
        assert caught.value.tensor == "a.w"


def test_all_formats_overwrite_only_when_told_to(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.under_model).root
    shutil.copytree(source, tmp_path / "out")
    for to in ("pt", "dcp", "hf"):
        with pytest.raises(Exception, match="the destination exists"):
            convert(source, tmp_path / "out", to=to)
        convert(source, tmp_path / "out", to=to, overwrite=True)
    assert load_file(tmp_path / "out" / "model.safetensors")
    assert not list((tmp_path / "out").glob("*.distcp"))


def test_a_missing_source_is_said_before_a_destination_that_exists(produce: Produce, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("keep")
    with pytest.raises(NotACheckpoint, match="no such file or directory") as caught:
        convert(tmp_path / "absent", tmp_path / "out", to="hf")
    assert caught.value.path == tmp_path / "absent"
    shutil.copytree(produce(producers.under_model).root, tmp_path / "run" / "ckpt-1")
    with pytest.raises(Unsafe, match="the source is the destination, or inside it"):
        convert(tmp_path / "run" / "ckpt-1", tmp_path / "run", to="hf")


def test_overwrite_is_not_suggested_for_a_checkpoint_of_a_training(produce: Produce, tmp_path: Path) -> None:
    training = Path(shutil.copytree(produce(producers.fsdp2).root, tmp_path / "ckpt-1"))
    convert(training, tmp_path / "made", to="pt")
    with pytest.raises(Occupied, match="the destination exists") as caught:
        convert(tmp_path / "made", training, to="hf")
    assert caught.value.hint == "choose another destination"
    with pytest.raises(Occupied, match="the destination exists") as caught:
        convert(training, tmp_path / "made", to="hf")
    assert caught.value.hint == "choose another, or pass --overwrite to replace it"


# -- types of keys -----------------------------------------------------------------------------------------------------

KEYED: dict[Any, Any] = {1: torch.arange(3.0), 2: {"a": torch.ones(2), True: 5}}
TUPLES = {"pair": (torch.zeros(2), {4: torch.ones(3)}), "list": [torch.zeros(2), (torch.ones(1),)]}


def shape_of(value: Any) -> Any:
    """The kinds of containers in a value, and of their keys."""
    if isinstance(value, dict):
        return {(type(key), key): shape_of(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [shape_of(child) for child in value]
    return type(value)


def save_typed(root: Path) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    state = {"model": {"w": torch.ones(2)}, "optim": optimizer.state_dict(), "keyed": {**KEYED}, "tuples": {**TUPLES}}
    torch.save(state, root / "state.pt")
    return state


def test_keys_that_are_numbers_and_tuples_stay_so(tmp_path: Path) -> None:
    state = save_typed(tmp_path)
    convert(tmp_path / "state.pt", tmp_path / "again.pt", to="pt")
    convert(tmp_path / "state.pt", tmp_path / "ranks", to="ranks", world_size=2, optimizer_keys="ids")
    convert(tmp_path / "ranks", tmp_path / "whole.pt", to="pt", optimizer_keys="ids")
    for name in ("again.pt", "whole.pt", "ranks/extra_state_world_size_2_rank_1.pt"):
        found = torch.load(tmp_path / name, weights_only=False)
        assert {key: shape_of(found[key]) for key in ("keyed", "tuples", "optim")} == {
            key: shape_of(state[key]) for key in ("keyed", "tuples", "optim")
        }
        assert torch.equal(found["tuples"]["pair"][1][4], torch.ones(3))


def test_dcp_has_text_and_lists_and_says_so(tmp_path: Path) -> None:
    """An optimizer's numbers are not among them: they become numbers again."""
    save_typed(tmp_path)
    done = convert(tmp_path / "state.pt", tmp_path / "dcp", to="dcp", optimizer_keys="ids")
    assert done.notes == [
        "keys that are integers or dtypes become text in DCP, as torch writes them: `keyed.1` and 3 more",
        "tuples with tensors become lists in DCP: `tuples.pair.0` and 2 more",
    ]
    recorded = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().planner_data
    assert {type(step) for key in recorded.values() for step in key} == {str, int}
    given = ckptkit.storage.Reader(tmp_path / "state.pt").read_metadata().planner_data
    assert {type(step) for key in given.values() for step in key} == {str, int}
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    assert convert(tmp_path / "w.safetensors", tmp_path / "other", to="dcp").notes == []
