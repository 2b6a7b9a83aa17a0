"""Diffs: across formats, world sizes and dtypes, with torch as the judge of what differs and by how much."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit import Diff, consolidate, convert, diff, reshard
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import Corrupt, NotACheckpoint, Usage
from ckptkit.formats import locate_all_chunks
from tests import producers
from tests.conftest import Produce
from tests.producers import Producer, Truth, save_alone
from tests.tiers import slow_but

CONVERSIONS: dict[str, Callable[[Path, Path], object]] = {
    "consolidate": consolidate,
    "reshard": lambda src, dst: reshard(src, dst, to=5),
    "pt": lambda src, dst: convert(src, dst, to="pt"),
}
SOURCES = (
    *(producers.fsdp2, producers.hsdp, producers.fsdp1, producers.mesh, producers.from_ddp, producers.from_compile),
    *(producers.strided, producers.dtypes, producers.full, producers.under_app),
)


@pytest.fixture
def source(produce: Produce) -> Path:
    return produce(producers.fsdp2).root


def names(found: Diff) -> list[str]:
    return sorted(one.name for one in found.different)


@pytest.mark.parametrize("producer", slow_but([producers.fsdp2, producers.full], SOURCES))
def test_what_was_converted_is_the_same(produce: Produce, producer: Producer, tmp_path: Path) -> None:
    root = produce(producer).root
    for name, make in CONVERSIONS.items():
        if name == "consolidate" and producer in (producers.strided, producers.dtypes):
            continue  # of dtypes that safetensors lacks
        make(root, tmp_path / name)
        for found in (diff(tmp_path / name, root), diff(root, tmp_path / name)):
            assert found.is_equal, found
            assert found.tensors > 0
            assert found.checked_bytes > 0
            is_reduced = any("compared only the model" in text for text in found.notes)
            assert (found.tensors < len(open_layout(root).tensors)) == is_reduced
            assert not is_reduced or name == "consolidate"


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = {
        f"layers.{i}.{name}": torch.randn(5, 7, generator=generator) for i in range(3) for name in ("up", "down")
    }
    return {
        **numbers,
        "head": numbers["layers.0.up"].clone(),
        "step": torch.tensor(7),
        "ids": torch.arange(9),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "small": torch.randn(6, generator=generator).to(torch.float8_e4m3fn),
        "turn": torch.randn(4, generator=generator, dtype=torch.complex64),
    }


def pt(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


def judge(a: Tensor, b: Tensor) -> dict[str, Any]:
    """What torch says of two tensors of one shape."""
    wide = torch.complex128 if a.is_complex() else torch.float64 if a.is_floating_point() else torch.int64
    x, y = a.to(wide), b.to(wide)
    places = (x != y).nonzero()
    return {
        "max_abs": (x - y).abs().max().item(),
        "different": len(places),
        "first": tuple(places[0].tolist()),
        "rel_l2": pytest.approx(((x - y).abs().double().norm() / x.abs().double().norm()).item(), rel=1e-9),
    }


def test_values_are_measured_as_torch_would(tmp_path: Path) -> None:
    before, after = weights(), weights()
    after["layers.1.up"][3, 2] += 0.5
    after["layers.2.down"] += 1e-3
    after["ids"][4] = 2**60
    after["mask"][1] = True
    after["small"] = (after["small"].float() * 2).to(torch.float8_e4m3fn)
    after["turn"][1] += 1j
    after["step"] += 1
    save_alone({"model": before}, tmp_path / "a")
    found = diff(tmp_path / "a", pt(tmp_path / "b.pt", after))
    expected = {name: judge(before[name], after[name]) for name in before if not torch.equal(before[name], after[name])}
    assert names(found) == sorted(expected)
    assert len(expected) == 7
    for one in found.different:
        assert one.reason == "values"
        assert one.distance is not None
        assert {key: getattr(one.distance, key) for key in expected[one.name]} == expected[one.name]
    ratios = [one.distance.rel_l2 for one in found.different if one.distance]
    assert ratios == sorted(ratios, reverse=True)
    assert (found.only_in_a, found.only_in_b, found.renamed) == ((), (), {})


@pytest.mark.parametrize(("rtol", "atol"), [(1e-3, None), (None, 1e-3), (1e-4, 1e-4), (0.0, 0.0), (None, 10.0)])
def test_a_tolerance_is_torchs(tmp_path: Path, rtol: float | None, atol: float | None) -> None:
    before = {f"x{i}": torch.randn(50, generator=torch.Generator().manual_seed(i)) for i in range(8)}
    after = {name: x + torch.randn_like(x) * 10.0 ** -(i + 1) for i, (name, x) in enumerate(before.items())}
    before["nan"] = after["nan"] = torch.tensor([1.0, torch.nan])
    save_file(before, tmp_path / "a.safetensors")
    save_file(after, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rtol=rtol, atol=atol)
    far = [
        name
        for name, x in before.items()
        if not torch.allclose(x.double(), after[name].double(), rtol=rtol or 0, atol=atol or 0, equal_nan=True)
    ]
    assert names(found) == sorted(far)


def test_names_shapes_and_dtypes(tmp_path: Path) -> None:
    before, after = weights(), weights()
    after["layers.0.up"] = after["layers.0.up"].T.contiguous()
    after["layers.1.up"] = after["layers.1.up"].half()
    after["ids"] = after["ids"].int()
    del before["head"], after["mask"]
    found = diff(pt(tmp_path / "a.pt", before), pt(tmp_path / "b.pt", after))
    assert (found.only_in_a, found.only_in_b) == (("mask",), ("head",))
    assert {one.name: one.reason for one in found.different} == {
        "layers.0.up": "shape",
        "layers.1.up": "dtype",
        "ids": "dtype",
    }
    by_name = {one.name: one for one in found.different}
    assert found.different[0].name == "layers.0.up"
    assert by_name["layers.0.up"].distance is None
    distance = by_name["layers.1.up"].distance
    assert distance is not None
    assert distance.max_abs == judge(before["layers.1.up"], after["layers.1.up"])["max_abs"]
    assert by_name["ids"].distance is not None
    assert by_name["ids"].distance.different == 0


def test_a_cast_that_is_allowed(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out", dtype="bf16")
    strict = diff(tmp_path / "out", source)
    assert strict.different
    assert {one.reason for one in strict.different} == {"dtype"}
    for pair in ((tmp_path / "out", source), (source, tmp_path / "out")):
        assert diff(*pair, allow_cast=True).is_equal
    shutil.copyfile(tmp_path / "out" / "model.safetensors", tmp_path / "changed.safetensors")
    tensors = load_file(tmp_path / "changed.safetensors")
    tensors["up.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "changed.safetensors")
    found = diff(tmp_path / "changed.safetensors", source, allow_cast=True)
    assert [(one.name, one.reason) for one in found.different] == [("up.weight", "values")]


@pytest.mark.parametrize("turned", [False, True])
def test_a_number_that_no_half_can_hold_differs_from_infinity(tmp_path: Path, turned: bool) -> None:
    numbers = torch.tensor([1.0, 131008.0])
    pair = (
        pt(tmp_path / "a.pt", {"x": numbers, "y": numbers[:1]}),
        pt(tmp_path / "b.pt", {"x": numbers.half(), "y": numbers[:1].half()}),
    )
    found = diff(*(pair[::-1] if turned else pair), allow_cast=True)
    (one,) = found.different
    assert (one.name, one.reason, one.distance and one.distance.first) == ("x", "values", (1,))
    assert any("float16 cannot hold 131008" in note for note in found.notes)


def test_halves_of_two_kinds_are_compared_as_numbers(tmp_path: Path) -> None:
    numbers = torch.tensor([1.0, 1.5, 1 + 2**-9])
    a = pt(tmp_path / "a.pt", {"x": numbers.half()})
    b = pt(tmp_path / "b.pt", {"x": numbers.bfloat16()})
    (one,) = diff(a, b, allow_cast=True).different
    assert (one.reason, one.distance and one.distance.first) == ("values", (2,))
    assert diff(a, b, allow_cast=True, rtol=2**-8).is_equal
    same_bits = pt(tmp_path / "c.pt", {"x": numbers.half().view(torch.bfloat16)})
    assert [one.reason for one in diff(a, same_bits, allow_cast=True).different] == ["values"]


def test_the_optimizer_and_what_is_no_tensor_count(source: Path, produce: Produce, tmp_path: Path) -> None:
    """Of 3 ranks and of 4 the model and the optimizer are the same; the note in `extra` is the same too."""
    assert diff(source, produce(producers.hsdp).root, rtol=1e-4, atol=1e-6).is_equal
    state: dict[str, Any] = {
        "model": {"w": torch.ones(3)},
        "optim": {"state": {"w": {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "extra": {"step": 4, "seen": [1, 2, {"deep": 1.5}]},
    }
    save_alone(state, tmp_path / "a")
    assert diff(tmp_path / "a", pt(tmp_path / "same.pt", state)).is_equal
    state["optim"]["state"]["w"]["exp_avg"][2] = 1e-30
    state["extra"] = {"step": 5, "seen": [1, 2, {"deep": 2.5}]}
    for other in (pt(tmp_path / "b.pt", state), tmp_path / "b"):
        if other.suffix != ".pt":
            save_alone(state, other)
        found = diff(tmp_path / "a", other)
        assert names(found) == sorted(["optim.state.w.exp_avg", "extra.step", *seen(found)])
        assert {one.values for one in found.different if one.name == "extra.step"} == {(4, 5)}


def test_a_tensor_inside_an_entry_counts(tmp_path: Path) -> None:
    """A tuple is no tensor for torch, but an archive with a storage in it: its pickle is the same, not its bytes."""
    for name, number in (("a", 1.0), ("b", 2.0), ("same", 1.0)):
        save_alone({"model": weights(), "extra": (torch.tensor([number]), "x")}, tmp_path / name)
    assert diff(tmp_path / "a", tmp_path / "same").is_equal
    assert [(one.name, one.reason) for one in diff(tmp_path / "a", tmp_path / "b").different] == [("extra", "entry")]


def seen(found: Diff) -> list[str]:
    """The names that a list in `extra` got: of one entry, or of its parts."""
    differing = [one.name for one in found.different if one.name.startswith("extra.seen")]
    assert len(differing) == 1
    return differing


def test_only_one_has_an_optimizer(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out")
    found = diff(source, tmp_path / "out")
    assert found.is_equal
    assert any("compared only the model" in text and "optim" in text for text in found.notes)
    assert any("removed the prefix `model.`" in text for text in found.notes)


def test_an_optimizer_under_another_wrapper(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": weights(), "optim": {"state": {"head": {"exp_avg": torch.randn(5, 7)}}}}
    save_alone({"app": state}, tmp_path / "a")
    state["model"] = {f"_orig_mod.{name}": tensor for name, tensor in weights().items()}
    state["optim"] = {"state": {"_orig_mod.head": state["optim"]["state"]["head"]}}
    save_alone(state, tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.is_equal, found
    assert found.tensors == len(weights()) + 1


def trained(prefix: str, seed: int) -> dict[str, Any]:
    """A model and its optimizer, flattened by torch's names."""
    generator = torch.Generator().manual_seed(seed)
    model = {
        f"{prefix}.{i}.{name}": torch.randn(shape, generator=generator)
        for i in range(2)
        for name, shape in (("weight", (4, 3)), ("bias", (4,)))
    }
    state = {name: {"exp_avg": x / 2, "step": torch.tensor(3.0)} for name, x in model.items()}
    groups = [{"lr": 0.1, "params": list(model)}]
    return {"model": model, "optim": {"state": state, "param_groups": groups}}


def test_a_rename_is_recognized_in_the_optimizer_too(tmp_path: Path) -> None:
    save_alone(trained("encoder", 0), tmp_path / "a")
    save_alone(trained("backbone.blocks", 0), tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert not found.is_equal
    assert (found.only_in_a, found.only_in_b, found.different) == ((), (), ())
    assert found.renamed["encoder.0.weight"] == "backbone.blocks.0.weight"
    assert found.renamed["optim.state.encoder.1.bias.exp_avg"] == "optim.state.backbone.blocks.1.bias.exp_avg"
    save_alone(trained("backbone.blocks", 1), tmp_path / "c")
    other = diff(tmp_path / "a", tmp_path / "c")
    assert other.renamed == found.renamed
    assert len(other.different) == 8
    assert other.different[0].name.startswith("backbone.blocks")


def test_a_rename_by_content(tmp_path: Path) -> None:
    before, after = weights(), weights()
    after["odd"] = after.pop("layers.2.down")
    found = diff(pt(tmp_path / "a.pt", before), pt(tmp_path / "b.pt", after))
    assert found.renamed == {"layers.2.down": "odd"}
    assert not found.is_equal
    assert found.different == ()


def test_globs(tmp_path: Path) -> None:
    before, after = weights(), weights(1)
    a, b = pt(tmp_path / "a.pt", before), pt(tmp_path / "b.pt", after)
    assert names(diff(a, b, include=["layers.1.*"])) == ["layers.1.down", "layers.1.up"]
    assert diff(a, b, exclude=["layers.*", "head", "small", "turn"]).is_equal
    with pytest.raises(Usage):
        diff(a, b, include=["nothing.*"])


def test_checkpoints_of_several_parts(produce: Produce, tmp_path: Path) -> None:
    root = produce(producers.accelerate).root
    shutil.copytree(root, tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "out", to=3)
    found = diff(tmp_path / "out", tmp_path / "src")
    assert found.is_equal
    parts = [len(open_layout(part).tensors) for part in root.iterdir() if part.is_dir()]
    assert found.tensors == sum(parts)
    alone = diff(tmp_path / "out", tmp_path / "src" / "pytorch_model_fsdp_0")
    assert alone.is_equal
    assert any("optimizer_0" in text for text in alone.notes)


def test_the_latest_of_a_run(tmp_path: Path) -> None:
    for step in (1, 2):
        save_alone({"model": {"x": torch.tensor([step])}}, tmp_path / "run" / f"ckpt-{step}")
    found = diff(tmp_path / "run", tmp_path / "run" / "ckpt-1")
    assert found.a == tmp_path / "run" / "ckpt-2"
    assert names(found) == ["model.x"]


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("is_first", [True, False])
def test_damage_is_no_difference(source: Path, tmp_path: Path, is_first: bool, jobs: int) -> None:
    shutil.copytree(source, tmp_path / "damaged")
    layout = locate_all_chunks(open_layout(tmp_path / "damaged"))
    chunk = next(chunk for tensor in layout.tensors.values() for chunk in tensor.chunks if chunk.crc32)
    with (tmp_path / "damaged" / chunk.path).open("r+b") as file:
        file.seek(chunk.offset)
        file.write(b"\xff")
    pair = (tmp_path / "damaged", source) if is_first else (source, tmp_path / "damaged")
    with pytest.raises(Corrupt):
        diff(*pair, jobs=jobs)


def test_damage_that_only_a_manifest_knows(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(Corrupt):
        diff(source, tmp_path / "out")


def test_what_is_none(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        diff(source, tmp_path / "missing")


def test_all_kinds_of_threads_agree(produce: Produce, tmp_path: Path) -> None:
    """The first index that differs is the first, whoever finds which."""
    truth: Truth = {"x": torch.zeros(300, 5000)}
    a = pt(tmp_path / "a.pt", truth)
    truth["x"][17, 3] = truth["x"][299, 4999] = truth["x"][200, 0] = 1
    b = pt(tmp_path / "b.pt", truth)
    for jobs in (1, 2, 5):
        (one,) = diff(a, b, jobs=jobs).different
        assert one.distance is not None
        assert (one.distance.first, one.distance.different) == ((17, 3), 3)


def test_a_head_that_was_left_out_for_being_tied(tmp_path: Path) -> None:
    """It is written once by a conversion, and compared with both all the same."""
    state = {"model.embed_tokens.weight": torch.randn(7, 4), "norm": torch.ones(4)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_alone({"model": state}, tmp_path / "dcp")
    (tmp_path / "dcp" / "config.json").write_text('{"model_type": "strange", "tie_word_embeddings": true}')
    consolidate(tmp_path / "dcp", tmp_path / "out")
    assert diff(tmp_path / "dcp", tmp_path / "out").is_equal
    state["lm_head.weight"][3, 1] += 1
    shutil.rmtree(tmp_path / "dcp")
    save_alone({"model": state}, tmp_path / "dcp")
    (one,) = diff(tmp_path / "dcp", tmp_path / "out").different
    assert (one.name, one.is_weight, one.distance and one.distance.first) == ("lm_head.weight", True, (3, 1))
    (same,) = diff(tmp_path / "out", tmp_path / "dcp").different
    assert same.is_weight
