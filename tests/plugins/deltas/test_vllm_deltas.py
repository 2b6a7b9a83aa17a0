"""vLLM's weights are patched by deltas while it runs: the tokens are those of the model that was patched to.

vLLM is in an environment of its own, as for test_vllm.py. Its kernels for CPUs pack weights, which nothing can patch in
place: the engine whose weights change runs in one process, without these kernels.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.conversion.convert import consolidate
from ckptkit.plugins.deltas.delta import delta
from tests.integrations.produced_models import SHARDS
from tests.plugins.vllm.test_vllm import HEADS, SIZES, engine, needs_vllm, tokens_of
from tests.producers import save_alone
from tests.trainers.produced_peft import tiny_llama

BACKEND = {"load_format": "ckptkit", "weight_transfer_config": {"backend": "ckptkit"}}
pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy after three steps, `a`, `b` and `c`: shards and export of each, and the deltas `ab` and `bc`.

    Most weights change in few elements; that of `q_proj` in so many that a delta holds it whole.
    """
    root = tmp_path_factory.mktemp("policies")
    model = tiny_llama(**SIZES, **HEADS)
    model.config.architectures = [type(model).__name__]
    torch.manual_seed(0)
    for step, name in enumerate("abc"):
        change(model, rest=1 if step == 0 else 0.05)
        save_alone({"model": dict(model.state_dict())}, root / name / SHARDS)
        model.config.save_pretrained(root / name / SHARDS)
        consolidate(root / name / SHARDS, root / name / "out")
    for one, two in ("ab", "bc"):
        delta(root / one / SHARDS, root / two / "out", root / f"{one}{two}")
    return root


@torch.no_grad()
def change(model: Any, rest: float) -> None:
    """Change 90 % of the elements of `q_proj`, and a fraction `rest` of those of every other weight."""
    for name, parameter in model.named_parameters():
        chosen = torch.rand_like(parameter) < (0.9 if "q_proj" in name else rest)
        parameter.copy_(torch.where(chosen, torch.randn_like(parameter) / 4, parameter))


def test_the_tokens_are_those_of_the_result(policies: Path, tmp_path: Path) -> None:
    """A delta of another base, a damaged one, and one that is applied already are refused, and change nothing."""
    damaged = shutil.copytree(policies / "ab", tmp_path / "damaged")
    (path,) = damaged.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    unsummed = shutil.copytree(policies / "ab", tmp_path / "unsummed")
    (unsummed / "ckptkit.json").unlink()
    exports = [str(policies / name / "out") for name in "bc"]
    a, b, c = tokens_of(engine(model=str(policies / "a" / "out"), plain_kernels=True, reload=exports))
    assert a != b != c != a
    updates = [policies / "bc", damaged, unsummed, policies / "ab", policies / "ab", policies / "bc"]
    done = engine(model=str(policies / "a" / SHARDS), plain_kernels=True, updates=list(map(str, updates)), **BACKEND)
    assert tokens_of(done) == [a, a, a, a, b, b, c]
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    asked = ("expected base", "these bytes are damaged", "expected a CRC-32", "the delta is applied already")
    assert len(refused) == len(asked)
    assert all(words in line for words, line in zip(asked, refused, strict=True))


def test_a_chain_follows_a_reload(policies: Path) -> None:
    """What a reload brings is the base of the next delta; a gap in a chain is refused."""
    chain = [str(policies / name) for name in ("ab", "bc")]
    reload = [str(policies / name / "out") for name in "ca"]
    done = engine(
        model=str(policies / "b" / "out"), plain_kernels=True, reload=reload, updates=[chain[::-1], chain], **BACKEND
    )
    _b, c, a, unchanged, after = tokens_of(done)
    assert (unchanged, after) == (a, c)
    assert "refused: " in done.stdout
    assert "expected a delta of base" in done.stdout


def test_packed_weights_are_refused_by_name(policies: Path) -> None:
    done = engine(model=str(policies / "a" / SHARDS), updates=[str(policies / "ab")], **BACKEND)
    before, after = tokens_of(done)
    assert before == after
    assert (
        "weight`: vLLM has packed this weight for its kernels: it cannot be patched in place"
        in done.stdout + done.stderr
    )


def test_another_loader_is_refused(policies: Path) -> None:
    """Only our own loader knows which weights the engine has."""
    asked = {"weight_transfer_config": {"backend": "ckptkit"}, "updates": [str(policies / "ab")]}
    done = engine(model=str(policies / "a" / "out"), plain_kernels=True, **asked)
    before, after = tokens_of(done)
    assert before == after
    assert "refused: the state of the engine's weights is unknown to ckptkit" in done.stdout
