"""Meta's `consolidated.NN.pth`, joined, against fairscale's whole weights; and what is wrong with others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.checks.verify import verify
from ckptkit.conversion.convert import consolidate
from ckptkit.errors import CkptError
from tests.conftest import Produce, Produced
from tests.formats.contract import raw_bytes
from tests.trainers.produced_meta import PARAMS, llama

pytest.importorskip("fairscale", reason="fairscale is not installed")


@pytest.fixture(scope="module")
def made(produce: Produce) -> Produced:
    return produce(llama)


@pytest.mark.parametrize("version", ["llama2", "llama3"])
def test_ranks_are_joined_to_what_was_cut(made: Produced, version: str, tmp_path: Path) -> None:
    truth = {key.partition(":")[2]: value for key, value in made.truth.items() if key.startswith(version)}
    done = consolidate(made.root / version, tmp_path / "out", names="keep")
    assert any("the output has the checkpoint's own names" in note for note in done.notes)
    found = ckptkit.open(tmp_path / "out")
    assert sorted(found) == sorted(truth)
    for name, tensor in truth.items():
        assert found[name].shape == tensor.shape, name
        assert raw_bytes(found[name].torch()) == raw_bytes(tensor), name


def test_it_says_what_it_is(made: Produced) -> None:
    found = ckptkit.inspect(made.root / "llama3")
    assert (found.layout.format, found.world_size, found.trainer) == ("consolidated", 2, "Meta, or in its format")
    (verified,) = verify(made.root / "llama3")
    assert verified.is_ok
    assert verified.unchecked_bytes == 0
    assert ckptkit.diff(made.root / "llama2", made.root / "llama2").is_equal


def save(root: Path, ranks: list[dict[str, Tensor]], **params: object) -> Path:
    root.mkdir(exist_ok=True)
    for i, rank in enumerate(ranks):
        torch.save(rank, root / f"consolidated.{i:02d}.pth")
    (root / "params.json").write_text(json.dumps({**PARAMS, **params}))
    return root


def test_ranks_that_share_a_head_have_copies_of_it(tmp_path: Path) -> None:
    keys = torch.arange(8 * 16.0).reshape(8, 16)  # two heads of four
    name = "layers.0.attention.wk.weight"
    root = save(tmp_path / "m", [{name: keys[rank // 2 * 4 :][:4].clone()} for rank in range(4)])
    assert torch.equal(ckptkit.open(root)[name].torch(), keys)


def test_parts_and_whole_multiply_alike(made: Produced) -> None:
    """Not how it was cut but what it computes: ranks' outputs one after another, or their sum."""
    files = [torch.load(made.root / "llama3" / f"consolidated.{rank:02d}.pth") for rank in range(2)]
    opened = ckptkit.open(made.root / "llama3")
    x = torch.arange(48.0).reshape(2, 24) / 7
    up, down = "layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w2.weight"
    inner = x[:, :16] @ opened[up].torch().T
    assert torch.allclose(inner, torch.cat([x[:, :16] @ file[up].T for file in files], dim=1))
    halves = zip(files, x.chunk(2, dim=1), strict=True)
    assert torch.allclose(x @ opened[down].torch().T, sum(part @ file[down].T for file, part in halves), atol=1e-5)


Damage = Callable[[Path], Any]


def change(root: Path, ranks: slice, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    for file in sorted(root.glob("*.pth"))[ranks]:
        state = torch.load(file)
        edit(state)
        torch.save(state, file)


def set_params(root: Path, **params: object) -> None:
    (root / "params.json").write_text(json.dumps({**PARAMS, **params}))


FAULTS: list[tuple[str, Damage, str]] = [
    ("first missing", lambda root: (root / "consolidated.00.pth").unlink(), "the file is missing"),
    ("last missing", lambda root: (root / "consolidated.01.pth").unlink(), "the file is missing"),
    ("no params", lambda root: (root / "params.json").unlink(), "without a params.json"),
    ("other params", lambda root: set_params(root, vocab_size=33), r"\(params.json\), found"),
    ("bad params", lambda root: (root / "params.json").write_text("{}"), "`dim` and `n_heads`"),
    (
        "a tensor of one rank",
        lambda root: change(root, slice(1, 2), lambda state: state.pop("layers.1.attention.wq.weight")),
        "found it in one of them",
    ),
    (
        "an unknown tensor",
        lambda root: change(root, slice(2), lambda state: state.update(x=torch.ones(2))),
        "there is no rule for how the tensor is split over 2 ranks",
    ),
    (
        "another shape",
        lambda root: change(root, slice(1, 2), lambda state: state.update({"norm.weight": torch.ones(4)})),
        "as on another rank, found",
    ),
    (
        "another dtype",
        lambda root: change(root, slice(1, 2), lambda state: state.update({"output.weight": torch.ones(16)})),
        "expected a tensor that fits",
    ),
    ("a file of several", lambda _: "consolidated.01.pth", "this is the file of one of 2 ranks"),
]


@pytest.mark.parametrize(("damage", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_ranks_that_do_not_fit_are_an_error(made: Produced, tmp_path: Path, damage: Damage, message: str) -> None:
    root = tmp_path / "model"
    shutil.copytree(made.root / "llama3", root)
    inside = damage(root)
    source = root / inside if isinstance(inside, str) else root
    with pytest.raises(CkptError, match=message) as raised:
        consolidate(source, tmp_path / "out")
    assert raised.value.exit_code == 3
    assert not (tmp_path / "out").exists()
