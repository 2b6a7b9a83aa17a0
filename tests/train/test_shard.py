"""Three ranks, so that no tensor of the model divides evenly."""

from typing import Any

import pytest
import torch

from ckptkit.errors import Occupied, Usage
from ckptkit.train.launch import Report, launch
from ckptkit.train.llama import initial_weight
from ckptkit.train.model_config import ModelConfig
from ckptkit.train.ranks import Place, choose_device, on_rank_0, process_group
from ckptkit.train.shard import build_model
from tests.train.test_llama import plain_model

CONFIG = ModelConfig(hidden_size=40, intermediate_size=67, head_dim=10)
TOKENS = torch.arange(64).reshape(2, 32)


def refuse() -> None:
    raise Occupied("only rank 0 knows")


def describe(place: Place, report: Report) -> None:
    with process_group(place, "cpu") as mesh:
        model = build_model(CONFIG, seed=5, mesh=mesh)
        weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
        sharded = all(weight.to_local().shape[0] < weight.shape[0] for weight in model.state_dict().values())
        expected = {name: initial_weight(name, weight.shape, CONFIG, 5) for name, weight in weights.items()}
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        with pytest.raises(Occupied, match="only rank 0 knows"):
            on_rank_0(refuse)
        report(
            {
                "sharded": sharded,
                "weights": all(torch.equal(expected[name], weight) for name, weight in weights.items()),
                "tied": model.lm_head.weight is model.model.embed_tokens.weight,
                "logits": model(TOKENS).detach().numpy(),
                "told by": on_rank_0(lambda: place.rank),
            }
        )


def test_sharded_model_is_the_plain_model_of_the_seed_on_every_rank() -> None:
    heard: list[dict[str, Any]] = []
    launch(describe, 3, heard.append)
    expected = plain_model(CONFIG, seed=5)(TOKENS).detach()
    assert len(heard) == 3
    for found in heard:
        assert found["weights"]
        assert found["sharded"]
        assert found["tied"]
        assert found["told by"] == 0
        torch.testing.assert_close(torch.from_numpy(found["logits"]), expected)


def test_more_ranks_than_gpus_are_refused_or_go_to_the_cpu() -> None:
    place = Place(0, 1024, 0, 1024, "env://")
    assert choose_device("auto", place).type == "cpu"
    with pytest.raises(Usage, match="1024 ranks need a GPU each"):
        choose_device("cuda", place)
