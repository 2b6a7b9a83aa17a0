"""A conversion is proved tensor by tensor, whatever the formats; one bit, one name or one dtype is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit import consolidate, convert, reshard
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.checks.differences import Diff
from ckptkit.checks.verify import Verified, verify
from ckptkit.errors import Corrupt
from ckptkit.formats import locate_all_chunks
from tests import producers
from tests.conftest import Produce
from tests.producers import Producer

CONVERSIONS: dict[str, Callable[[Path, Path], object]] = {
    "consolidate": consolidate,
    "reshard": lambda src, dst: reshard(src, dst, to=5),
    "pt": lambda src, dst: convert(src, dst, to="pt"),
}
SOURCES = (producers.fsdp2, producers.hsdp, producers.mesh, producers.from_ddp, producers.from_compile)


def one(path: Path, other: Path, *, allow_cast: bool = False) -> Verified:
    (found,) = verify(path, against=other, allow_cast=allow_cast)
    return found


def compared(found: Verified) -> Diff:
    assert found.compared is not None
    return found.compared


@pytest.fixture
def source(produce: Produce) -> Path:
    return produce(producers.fsdp2).root


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a safetensors file; its manifest goes, which would say that they were changed."""
    (path.parent / "ckptkit.json").unlink(missing_ok=True)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("producer", SOURCES, ids=lambda producer: producer.__name__)
def test_what_was_converted_is_the_same(produce: Produce, producer: Producer, name: str, tmp_path: Path) -> None:
    root = produce(producer).root
    CONVERSIONS[name](root, tmp_path / "out")
    for pair in ((tmp_path / "out", root), (root, tmp_path / "out")):
        found = one(*pair)
        assert found.problems == ()
        assert compared(found).tensors > 0
    assert (compared(found).tensors == len(open_layout(root).tensors)) or name == "consolidate"


def test_one_bit(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out")
    names = sorted(load_file(tmp_path / "out" / "model.safetensors"))
    edit(tmp_path / "out" / "model.safetensors", lambda t: t[names[2]].view(-1).view(torch.uint8)[0].bitwise_xor_(1))
    (problem,) = one(tmp_path / "out", source).problems
    assert problem.tensor == names[2]
    assert "the bytes differ from those" in problem.message


def test_one_tensor_less_and_one_more(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out")
    names = sorted(load_file(tmp_path / "out" / "model.safetensors"))
    edit(tmp_path / "out" / "model.safetensors", lambda t: t.update(more=t.pop(names[0])))
    problems = {problem.tensor: problem.message for problem in one(tmp_path / "out", source).problems}
    assert problems == {"more": f"not in {source}", names[0]: f"only in {source}"}


def test_another_dtype_is_a_problem_unless_it_is_allowed(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out", dtype="bf16")
    found = one(tmp_path / "out", source)
    floats = [name for name, spec in open_layout(tmp_path / "out").specs.items() if spec.dtype.name == "bfloat16"]
    assert sorted(problem.tensor or "" for problem in found.problems) == sorted(floats)
    assert all("bfloat16" in problem.message for problem in found.problems)
    found = one(tmp_path / "out", source, allow_cast=True)
    assert found.problems == ()
    assert f"{len(floats)} tensors were converted to be compared" in compared(found).notes
    edit(tmp_path / "out" / "model.safetensors", lambda t: t[floats[0]].view(-1)[0].add_(1))
    assert [problem.tensor for problem in one(tmp_path / "out", source, allow_cast=True).problems] == [floats[0]]


def test_a_tied_head_is_compared_with_both(tmp_path: Path) -> None:
    embedding = torch.randn(7, 4)
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    producers.save_alone({"model": state}, tmp_path / "dcp")
    (tmp_path / "dcp" / "config.json").write_text(json.dumps({"model_type": "strange", "tie_word_embeddings": True}))
    consolidate(tmp_path / "dcp", tmp_path / "out")
    assert "lm_head.weight" not in open_layout(tmp_path / "out").tensors
    found = one(tmp_path / "out", tmp_path / "dcp")
    assert (found.problems, compared(found).tensors) == ((), 2)
    state["lm_head.weight"][0] += 1
    shutil.rmtree(tmp_path / "dcp")
    producers.save_alone({"model": state}, tmp_path / "dcp")
    assert [problem.tensor for problem in one(tmp_path / "out", tmp_path / "dcp").problems] == ["lm_head.weight"]


def test_checkpoints_of_several_parts(produce: Produce, tmp_path: Path) -> None:
    root = produce(producers.accelerate).root
    shutil.copytree(root, tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "out", to=3)
    found = verify(tmp_path / "out", against=tmp_path / "src")
    assert [part.problems for part in found] == [()] * len(found)
    assert all(compared(part).tensors for part in found)


def test_the_other_is_read_as_carefully(source: Path, tmp_path: Path) -> None:
    consolidate(source, tmp_path / "out")
    shutil.copytree(source, tmp_path / "damaged")
    tensors = locate_all_chunks(open_layout(tmp_path / "damaged")).tensors
    chunk = next(chunk for name, t in tensors.items() if name.startswith("model.") for chunk in t.chunks if chunk.crc32)
    with (tmp_path / "damaged" / chunk.path).open("r+b") as file:
        file.seek(chunk.offset)
        file.write(b"\xff")
    with pytest.raises(Corrupt):
        verify(tmp_path / "out", against=tmp_path / "damaged")
