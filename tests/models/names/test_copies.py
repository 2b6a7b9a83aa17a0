"""A model that is twice in one file is not exported twice: the user chooses, and both choices give plain names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.errors import SeveralModels
from ckptkit.models.names.copies import find_copy
from ckptkit.models.names.weights import COPY
from tests.command import ckptkit as run
from tests.tiers import slow_but

MODEL = {"layers.0.w": torch.arange(8.0).reshape(2, 4), "layers.1.w": torch.ones(2, 4), "norm.b": torch.zeros(4)}


def under(prefix: str, *, more: float = 0.0, dots: str = ".") -> dict[str, Tensor]:
    return {prefix + name.replace(".", dots): value + more for name, value in MODEL.items()}


COUNTERS = {"model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(3)}
TWICE = {
    "ddp": {**MODEL, **under("module.", more=5)},
    "equal": {**MODEL, **under("module.")},
    "ema": {**MODEL, **under("ema.", more=5)},
    "ema-prefix": {**MODEL, **under("ema_", more=5)},
    "ema-module": {**MODEL, **under("model_ema.", more=5)},
    "both-prefixed": {**under("net."), **under("net_ema.", more=5)},
    "averaged": {**under("model."), **under("averaged_model.", more=5)},
    "trained-only": {**MODEL, "ema.layers.1.w": torch.zeros(2, 4)},
    "under-another-name": {**under("net."), **under("ema.", more=5)},
    "wrapped": {**under("model."), **under("ema_model.", more=5)},
    "wrapped-twice": {**under("model."), **under("ema_model.model.", more=5)},
    "swa": {**MODEL, **under("swa_model.module.", more=5), "swa_model.n_averaged": torch.tensor(7)},
    "without-dots": {**under("model."), **under("model_ema.", more=5, dots=""), **COUNTERS},
}
OTHERS = {
    "towers": {**under("student."), **under("teacher.")},
    "shapes": {**MODEL, **{name: torch.ones(3, 3) for name in under("module.")}},
    "one-tower": {**MODEL, "module.layers.0.w": torch.ones(2, 4)},
    "codebook": {"quantize.embed": torch.ones(4, 4), "quantize.ema_w": torch.ones(4, 4)},
    "no-dots": {"a": torch.ones(2), "b": torch.ones(2)},
    "pool": {**MODEL, "avg_pool.w": torch.ones(2, 4)},
    "two-of-a-kind": {
        "norm.w": torch.ones(4),
        "norm.b": torch.ones(4),
        "avg_x.w": torch.ones(4),
        "avg_x.b": torch.ones(4),
    },
    "average-of-other": {**MODEL, "ema.other.w": torch.ones(2, 4)},
}


@pytest.mark.parametrize("wrapper", ["", "model"])
@pytest.mark.parametrize("what", TWICE)
def test_a_model_that_is_there_twice_is_refused(tmp_path: Path, what: str, wrapper: str) -> None:
    torch.save({wrapper: TWICE[what]} if wrapper else TWICE[what], tmp_path / "src.pt")
    with pytest.raises(SeveralModels, match=r"the model is here twice: `.*` and `.*`"):
        ckptkit.consolidate(tmp_path / "src.pt", tmp_path / "out")
    ckptkit.consolidate(tmp_path / "src.pt", tmp_path / "kept", names="keep")
    assert len(ckptkit.open(tmp_path / "kept")) == len(TWICE[what])


@pytest.mark.parametrize("wrapper", ["", "model", "state_dict"])
@pytest.mark.parametrize(
    "what",
    slow_but(
        ["ema", "swa"],
        ["ddp", "ema", "ema-prefix", "ema-module", "under-another-name", "wrapped", "wrapped-twice", "swa"],
    ),
)
def test_the_hint_writes_either(tmp_path: Path, what: str, wrapper: str) -> None:
    torch.save({wrapper: TWICE[what]} if wrapper else TWICE[what], tmp_path / "src.pt")
    refused = run("consolidate", tmp_path / "src.pt", tmp_path / "out")
    assert refused.returncode == 3
    found = re.search(r"hint: pass (--exclude .*), or for the copy (--include .*)", refused.stderr)
    assert found is not None
    for options, more in ((found[1], 0.0), (found[2], 5.0)):
        out = tmp_path / str(more)
        assert run("consolidate", tmp_path / "src.pt", out, *shlex.split(options)).returncode == 0
        opened = ckptkit.open(out)
        written = {re.sub(r"^(net|model)\.", "", name): name for name in opened}  # where the model itself is there
        assert sorted(written) == sorted(MODEL)
        assert all(torch.equal(opened[written[name]].torch(), MODEL[name] + more) for name in MODEL)


@pytest.mark.parametrize("what", OTHERS)
def test_other_names_are_no_copy(what: str) -> None:
    assert find_copy({name: tuple(value.shape) for name, value in OTHERS[what].items()}) is None


COPIES: dict[str, dict[str, Any]] = {
    "NeMo's EMAOptimizer": {"optimizer": {"ema": list(MODEL.values()), "decay": 0.9}},
    "torch_ema": {"optimizer": {"ema": {"shadow_params": list(MODEL.values()), "collected_params": None}}},
    "by name": {"optim_ema": MODEL},
    "of the wrapped model": {"train_state": {"ema": under("module._orig_mod."), "step": 5}},
    "without dots": {"train_state": {"ema": under("", dots="")}},
    "in a list": {"optimizers": [{"slow": MODEL}]},
    "a state dict": {"scheduler": {"swa": {"state": MODEL}}},
    "of a part": {"rng_and_ema": {"layers.1.w": MODEL["layers.1.w"]}},
}
NO_COPIES: dict[str, dict[str, Any]] = {
    "moments": {"optimizer": {"state": {name: {"exp_avg": value} for name, value in MODEL.items()}}},
    "moments by number": {"optimizer": {"state": {i: {"exp_avg": v} for i, v in enumerate(MODEL.values())}}},
    "moments of Megatron": {"optimizer": {"state": {"exp_avg": MODEL, "fp32_param": MODEL}}},
    "moments of optax": {"opt_state": {"0": {"mu": MODEL, "nu": {"params": MODEL}}}},
    "master weights": {"optimizer": {"fp32_from_fp16_params": [list(MODEL.values())]}},
    "gradients": {"train_state": {"grads": MODEL}},
    "other shapes": {"optim_ema": {name: torch.ones(3, 3) for name in MODEL}},
    "generators": {"rng_state": [torch.ones(4, dtype=torch.uint8)] * 4},
    "counters": {"train_state": {"norm.b": torch.ones(1)}},
}


@pytest.mark.parametrize("what", [*COPIES, *NO_COPIES])
def test_a_copy_under_the_key_of_training_state(tmp_path: Path, what: str) -> None:
    torch.save({"model": MODEL, **{**COPIES, **NO_COPIES}[what]}, tmp_path / "ckpt-5.pt")
    groups = ckptkit.Checkpoint.open(tmp_path / "ckpt-5.pt").weights.summarize_left_out()
    assert (COPY in {one.why for one in groups}) == (what in COPIES)
    done = ckptkit.consolidate(tmp_path / "ckpt-5.pt", tmp_path / "out")
    assert any(f"({COPY}); `ckptkit convert` copies it" in text for text in done.warnings) == (what in COPIES)
