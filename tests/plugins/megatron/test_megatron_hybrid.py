"""The names of Megatron's hybrid models into the Hub's and back, against the library's own classes and transformers."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties

import ckptkit
from ckptkit.errors import CkptError, Mismatch, Unsupported
from tests.conftest import Produce, Produced
from tests.formats.contract import assert_same
from tests.plugins.megatron.test_megatron_names import save, to_hub
from tests.trainers.produced_megatron import STEP
from tests.trainers.produced_megatron_hybrid import CONFIG, HYBRID, WAYS, load
from tests.trainers.produced_megatron_models import TOKENS, VOCABULARY, megatron_models

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def made(produce: Produce) -> Produced:
    found = produce(megatron_models)
    truth = {name.partition(":")[2]: value for name, value in found.truth.items() if name.startswith(f"{HYBRID}:")}
    return Produced(found.root / HYBRID, truth)


@pytest.fixture(scope="module")
def whole(made: Produced, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the model becomes that was saved in one piece."""
    out = tmp_path_factory.mktemp("hub") / "out"
    ckptkit.consolidate(made.root / "whole", out, base=str(made.root))
    return out


def tensors_of(root: Path) -> dict[str, Tensor]:
    return {name: lazy.torch() for name, lazy in ckptkit.open(root).items()}


def modules(made: Produced) -> dict[str, Tensor]:
    """The tensors as the library's modules call them."""
    return {name: value for name, value in made.truth.items() if name != "logits"}


def test_transformers_loads_all_of_it_and_computes_what_the_library_does(made: Produced, whole: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(whole, attn_implementation="eager", output_loading_info=True)
    assert not any(said.values())
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits
    assert (logits - made.truth["logits"][..., :VOCABULARY]).abs().max() < 1e-5


@pytest.mark.parametrize("way", [*WAYS[1:], "legacy"])
def test_every_way_to_split_and_save_it_gives_the_same(made: Produced, whole: Path, tmp_path: Path, way: str) -> None:
    assert_same(to_hub(made.root / way, tmp_path / way, made.root), tensors_of(whole))


def test_moments_follow_their_weights(made: Produced, whole: Path, tmp_path: Path) -> None:
    done = ckptkit.convert(made.root / "tensor", tmp_path / "out", to="dcp", names="hub", base=str(made.root))
    found = ckptkit.open(done.output)
    trained = {name: value for name, value in tensors_of(whole).items() if not name.endswith("correction_bias")}
    assert_same({name: found[f"optimizer.state.exp_avg.{name}"].torch() / 2 for name in trained}, trained)


def save_whole(made: Produced, root: Path, ranks: int) -> Path:
    """Without pieces, as `fsdp_dtensor` saves it of core 0.20, in which the convolution is no module."""
    state = {f"module.{name.replace('conv1d.', 'conv1d_')}": value for name, value in modules(made).items()}
    args = Namespace(tensor_model_parallel_size=ranks)
    return save(root, {"model": state, "args": args, "checkpoint_version": 3.0, "iteration": 3}, flat=False)


def test_without_pieces(made: Produced, whole: Path, tmp_path: Path) -> None:
    assert_same(to_hub(save_whole(made, tmp_path / STEP, 1), tmp_path / "out", made.root), tensors_of(whole))
    with pytest.raises(Unsupported, match="the order of its rows depends on tensor_model_parallel_size") as raised:
        ckptkit.consolidate(save_whole(made, tmp_path / "two", 2), tmp_path / "never", base=str(made.root))
    assert str(raised.value.tensor).endswith("layers.0.mixer.in_proj.weight")


@pytest.mark.skipif(
    "strides" in TensorProperties.__dataclass_fields__,
    reason="megatron-core 0.16.1 reads no metadata under this torch, not even its own: it has no place for strides",
)
def test_the_library_loads_what_is_made_of_a_model_of_the_hub(made: Produced, whole: Path, tmp_path: Path) -> None:
    ckptkit.convert(whole, tmp_path / STEP, to="dcp", names="megatron")
    expected = {name: value.clone() for name, value in modules(made).items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        expected[name][VOCABULARY:] = 0  # the library fills what is not there
    assert_same(load(tmp_path / STEP), expected)
    assert_same(to_hub(tmp_path / STEP, tmp_path / "back", made.root), tensors_of(whole))


BAD: Mapping[str, tuple[type[CkptError], str, dict[str, Any], dict[str, Any]]] = {
    "kinds": (
        Mismatch,
        r"expected the layers M\*-E \(config.json\), found M\*E-",
        {},
        {"layers_block_type": list("M*-E")},
    ),
    "more layers": (Mismatch, r"found M\*E-M in", {"hybrid_layer_pattern": "M*|E-M/MM"}, {}),
    "gated delta": (Unsupported, "a layer of `G`", {}, {"layers_block_type": list("MGE-")}),
    "no kinds": (Mismatch, "does not have `layers_block_type`", {}, {"layers_block_type": None}),
    "heads": (Mismatch, "expected mamba_num_heads 8", {}, {"mamba_num_heads": 8}),
    "states": (
        Mismatch,
        r"expected 14 rows of B \(config.json\), found 12",
        {"mamba_state_dim": None},
        {"ssm_state_size": 7},
    ),
    "positions": (Unsupported, "found rope in Megatron.s arguments", {"position_embedding_type": "rope"}, {}),
    "activation": (Mismatch, "expected squared_relu True", {"squared_relu": False}, {}),
    "gates": (Mismatch, "swiglu True, but a model of type `nemotron_h` has no gated layers", {"swiglu": True}, {}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(made: Produced, tmp_path: Path, case: str) -> None:
    error, words, args, config = BAD[case]
    shutil.copytree(made.root / "whole" / STEP, tmp_path / STEP)
    common = torch.load(tmp_path / STEP / "common.pt", weights_only=False)
    vars(common["args"]).update(args)
    torch.save(common, tmp_path / STEP / "common.pt")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    with pytest.raises(error, match=words):
        ckptkit.consolidate(tmp_path / STEP, tmp_path / "out", base=str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_layers_that_predict_further_tokens_are_named(made: Produced, whole: Path, tmp_path: Path) -> None:
    state = {**modules(made), "mtp.layers.0.mtp_model_layer.layers.0.mixer.D": torch.ones(4)}
    source = save(tmp_path / STEP, {**state, "args": Namespace(tensor_model_parallel_size=1)})
    with pytest.raises(Mismatch, match="no rule translates it") as raised:
        ckptkit.consolidate(source, tmp_path / "out", base=str(made.root))
    assert str(raised.value.tensor).startswith("mtp.")
    assert_same(to_hub(source, tmp_path / "out", made.root, exclude=["mtp.*"]), tensors_of(whole))


def without_output(model: dict[str, Tensor]) -> None:
    del model["decoder.layers.0.mixer.out_proj.weight"]


def with_a_row_less(model: dict[str, Tensor]) -> None:
    name = "decoder.layers.0.mixer.in_proj.weight"
    model[name] = model[name][1:].clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_output, "out_proj or dt_bias is missing"),
        (with_a_row_less, r"expected 66 rows \(32 channels, 2 heads\) and an even number more, found 77"),
    ],
)
def test_ranks_whose_shapes_do_not_tell_are_refused(
    made: Produced, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    shutil.copytree(made.root / "legacy", tmp_path / "run")
    for file in (tmp_path / "run").glob("*/*/model_optim_rng.pt"):
        saved = torch.load(file, weights_only=False)
        change(saved["model"])
        del saved["optimizer"]
        torch.save(saved, file)
    with pytest.raises(CkptError, match=words) as raised:
        ckptkit.consolidate(tmp_path / "run", tmp_path / "out", base=str(made.root))
    assert "decoder.layers.0.mixer" in str(raised.value.tensor)
