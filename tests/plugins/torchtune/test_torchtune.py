"""torchtune's names against what its own converters make of models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.errors import Mismatch, Unsupported
from tests.models.names.hub_models import HEAD, HEADS, HIDDEN, KEY_HEADS, config_of, model_of, saved
from tests.models.names.others_code import one_module
from tests.models.names.shelf import check_both_ways, check_same, random_like, to_the_hub
from tests.tiers import nightly_but

_PACKAGES = ("torchtune", "torchtune.models")


def theirs(model_type: str, hub: dict[str, Tensor]) -> dict[str, Tensor]:
    """What torchtune makes of the Hub's tensors."""
    if model_type == "qwen3":  # as in its repository; the last release has none
        like_qwen2 = {name: tensor for name, tensor in hub.items() if not name.endswith("_norm.weight")}
        norms = {
            name.replace("model.layers", "layers").replace("self_attn", "attn").replace(".weight", ".scale"): tensor
            for name, tensor in hub.items()
            if name not in like_qwen2
        }
        return theirs("qwen2", like_qwen2) | norms
    special = {"qwen2": "qwen2", "gemma2": "gemma2", "phi3": "phi3"}.get(model_type)
    if special is None:
        convert = one_module("torchtune.models.convert_weights", *_PACKAGES).hf_to_tune
    else:
        package = f"torchtune.models.{special}"
        convert = getattr(one_module(f"{package}._convert_weights", *_PACKAGES, package), f"{special}_hf_to_tune")
    sizes = {"num_heads": HEADS, "num_kv_heads": KEY_HEADS, "dim": HIDDEN}
    found: dict[str, Tensor] = convert(hub, **sizes, **({} if model_type == "phi3" else {"head_dim": HEAD}))
    return {name: tensor.clone() for name, tensor in found.items()}


FAMILIES = ["llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3", "phi3"]


@pytest.mark.parametrize("model_type", nightly_but(["llama", "phi3"], FAMILIES))
def test_torchtunes_own_converters(model_type: str) -> None:
    """Equal names and bits, of weights and of moments, in chunks that were cut anywhere."""
    config = config_of(model_type)
    hub = {name: tensor.detach() for name, tensor in model_of(config).state_dict().items()}
    for arrays in (hub, random_like(hub)):
        check_both_ways("torchtune", theirs(model_type, arrays), arrays, config.to_dict())


def test_a_training_of_torchtune_becomes_a_model(tmp_path: Path) -> None:
    config = config_of("llama")
    hub = saved(config, tmp_path / "hub")
    torch.save({"model": theirs("llama", hub), "epochs_run": 1}, tmp_path / "model.pt")
    ckptkit.consolidate(tmp_path / "model.pt", tmp_path / "out", base=tmp_path / "hub")
    made = ckptkit.open(tmp_path / "out")
    check_same({name: made[name].torch() for name in made}, hub)
    ckptkit.convert(tmp_path / "hub", tmp_path / "start.pt", to="pt", names="torchtune")
    start = torch.load(tmp_path / "start.pt")
    check_same(start, theirs("llama", hub))


def test_a_tied_head_is_left_out(tmp_path: Path) -> None:
    """There is no tensor for a head that is the embedding, as on the Hub."""
    config = config_of("qwen2", tie_word_embeddings=True)
    hub = saved(config, tmp_path / "hub")
    assert "lm_head.weight" not in hub
    check_both_ways("torchtune", theirs("qwen2", hub), hub, config.to_dict())


def test_what_is_missing_is_named() -> None:
    config = config_of("phi3")
    own = theirs("phi3", dict(model_of(config).state_dict()))
    del own["layers.1.attn.k_proj.weight"]
    with pytest.raises(Mismatch) as caught:
        to_the_hub("torchtune", own, config.to_dict())
    assert caught.value.tensor == "layers.1.attn.k_proj.weight"


def test_other_models_are_refused() -> None:
    config: dict[str, Any] = {"model_type": "mamba"}
    with pytest.raises(Unsupported, match="`mamba`") as caught:
        to_the_hub("torchtune", {"layers.0.attn.q_proj.weight": torch.zeros(2, 2)}, config)
    assert "ckptkit knows llama" in str(caught.value.hint)
