"""MaxText's names in trees of orbax: every type, scanned or not, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.models.names.weights import TRAINING
from tests.models.names.hub_models import config_of
from tests.plugins.orbax.maxtext_tree import maxtext_arrays
from tests.plugins.orbax.trees import save_arrays
from tests.tiers import pairs

pytest.importorskip("tensorstore", reason="tensorstore is not installed")

_MAXTEXT = os.environ.get("CKPTKIT_MAXTEXT_PYTHON")
_NAMES = {"llama": "llama3.1-8b", "qwen3": "qwen3-8b", "gemma2": "gemma2-2b", "gemma3_text": "gemma3-4b"}
_LAYERS = 8  # of Gemma 3 one block of six, and two behind it


def small_config(model_type: str, root: Path, **changes: Any) -> dict[str, Any]:
    """Write the config.json of a small model whose roots are powers of two, so that no factor rounds."""
    tied = {"tie_word_embeddings": model_type.startswith("gemma")}
    config = config_of(model_type, num_hidden_layers=_LAYERS, hidden_size=16, head_dim=4, **tied, **changes).to_dict()
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config, default=str))
    return config


def hub_arrays(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return what a model of the Hub has, in numbers of few bits."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**{key: value for key, value in config.items() if key != "dtype"})
        )
    random = np.random.default_rng(0)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    return {
        name: (random.integers(-64, 64, tuple(one.shape)) / 32).astype("float32")
        for name, one in model.state_dict().items()
        if name not in tied
    }


def save_training(root: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """Save arrays as a training of MaxText does, beside its step and an optimizer."""
    state = {"step": np.array(7, "int32"), "opt_state.mu.params.decoder.decoder_norm.scale": np.zeros(4, "float32")}
    return save_arrays(root, {**{f"params.params.{name}": one for name, one in arrays.items()}, **state})


def check_equal(out: Path, hub: Mapping[str, np.ndarray]) -> None:
    made = ckptkit.open(out)
    assert sorted(made) == sorted(hub)
    for name, array in hub.items():
        assert np.array_equal(made[name].torch().numpy(), array), name


@pytest.mark.parametrize(("model_type", "is_scanned"), pairs([*_NAMES], (True, False)))
def test_a_training_becomes_a_model(tmp_path: Path, model_type: str, is_scanned: bool) -> None:
    config = small_config(model_type, tmp_path / "base")
    hub = hub_arrays(config)
    tree = save_training(tmp_path / "tree", maxtext_arrays(hub, config, is_scanned=is_scanned, padding=8))
    ckptkit.consolidate(tree, tmp_path / "out", base=str(tmp_path / "base"))
    check_equal(tmp_path / "out", hub)
    assert set(Checkpoint.open(tree).weights.left_out.values()) == {TRAINING}


def test_names_of_nnx(tmp_path: Path) -> None:
    """Each has `.value` behind it, and there are states of generators."""
    config = small_config("qwen3", tmp_path / "base")
    hub = hub_arrays(config)
    arrays = {f"{name}.value": one for name, one in maxtext_arrays(hub, config, is_scanned=True, padding=0).items()}
    arrays["decoder.rngs.params.count.value"] = np.array(1, "uint32")
    ckptkit.consolidate(save_arrays(tmp_path / "tree", arrays), tmp_path / "out", base=str(tmp_path / "base"))
    check_equal(tmp_path / "out", hub)


def test_numbers_of_bfloat16_are_rounded_once(tmp_path: Path) -> None:
    config = small_config("gemma2", tmp_path / "base")
    hub = hub_arrays(config)
    save_arrays(tmp_path / "tree", maxtext_arrays(hub, config, is_scanned=True, padding=0))
    ckptkit.convert(tmp_path / "tree", tmp_path / "kept", to="dcp", dtype=["bf16"])
    ckptkit.consolidate(tmp_path / "kept", tmp_path / "out", base=str(tmp_path / "base"))
    norm = torch.from_numpy(hub["model.norm.weight"] + np.float32(1)).bfloat16() - 1
    assert torch.equal(ckptkit.open(tmp_path / "out")["model.norm.weight"].torch(), norm)


def llama(tmp_path: Path, **changes: np.ndarray) -> Path:
    config = small_config("llama", tmp_path / "base")
    arrays = maxtext_arrays(hub_arrays(config), config, is_scanned=True, padding=0)
    return save_training(tmp_path / "tree", arrays | changes)


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    tree = llama(tmp_path)
    small_config("mistral", tmp_path / "base")
    with pytest.raises(Unsupported, match="does not know maxtext's names for a model of type `mistral`"):
        ckptkit.consolidate(tree, tmp_path / "out", base=str(tmp_path / "base"))


def test_an_array_that_no_rule_knows(tmp_path: Path) -> None:
    tree = llama(tmp_path, **{"decoder.layers.mlp.wi.kernel": np.zeros((16, _LAYERS, 2, 4), "float32")})
    with pytest.raises(Mismatch, match=r"decoder\.layers\.mlp\.wi\.kernel.*no rule translates it"):
        ckptkit.consolidate(tree, tmp_path / "out", base=str(tmp_path / "base"))


def test_layers_that_lie_along_another_axis(tmp_path: Path) -> None:
    tree = llama(tmp_path, **{"decoder.layers.mlp.wo.kernel": np.zeros((_LAYERS, 24, 16), "float32")})
    with pytest.raises(Mismatch, match=r"expected 8 layers along axis 1 \(config.json\), found shape \[8, 24, 16\]"):
        ckptkit.consolidate(tree, tmp_path / "out", base=str(tmp_path / "base"))


def test_a_training_keeps_its_names(tmp_path: Path) -> None:
    tree = llama(tmp_path)
    with pytest.raises(Unsupported, match="translates maxtext's names only for a model without optimizer"):
        ckptkit.convert(tree, tmp_path / "out", to="dcp", names="hub", base=str(tmp_path / "base"))


def test_the_names_are_only_read(tmp_path: Path) -> None:
    ckptkit.consolidate(llama(tmp_path), tmp_path / "hub", base=str(tmp_path / "base"))
    with pytest.raises(Unsupported, match="reads maxtext's names and does not write them"):
        ckptkit.convert(tmp_path / "hub", tmp_path / "out", to="dcp", names="maxtext")


@pytest.mark.skipif(_MAXTEXT is None, reason="CKPTKIT_MAXTEXT_PYTHON names no Python with maxtext")
@pytest.mark.parametrize("model_type", _NAMES)
def test_maxtexts_own_conversion(tmp_path: Path, model_type: str) -> None:
    """Equal bits, with factors that round."""
    config = config_of(model_type, num_hidden_layers=_LAYERS, tie_word_embeddings=model_type.startswith("gemma"))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    script = Path(__file__).with_name("save_with_maxtext.py")
    command = [str(_MAXTEXT), str(script), str(tmp_path), _NAMES[model_type]]
    subprocess.run(command, check=True, env={}, capture_output=True)
    for kind in ("apart", "scanned"):
        ckptkit.consolidate(tmp_path / kind / "tree", tmp_path / kind / "out", base=str(tmp_path))
        check_equal(tmp_path / kind / "out", dict(np.load(tmp_path / kind / "hub.npz")))
