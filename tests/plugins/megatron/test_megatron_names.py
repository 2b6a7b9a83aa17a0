"""Megatron's names into the Hub's and back, against the library's own model and loader, and transformers' logits."""

from __future__ import annotations

import json
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties

import ckptkit
from ckptkit.errors import CkptError, Mismatch, Unsupported
from tests.conftest import Produce, Produced
from tests.formats.contract import assert_same
from tests.models.names.shelf import check_both_ways
from tests.tiers import nightly_but, pairs
from tests.trainers.produced_megatron import STEP
from tests.trainers.produced_megatron_models import (
    EXPERTS,
    PADDED,
    TOKENS,
    TYPES,
    VOCABULARY,
    WAYS,
    hub_config,
    load,
    megatron_models,
)

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

STATES = ("_extra_state", "common_state")  # the second since core 0.20
MIXTURES = [name for name, more in TYPES.items() if "num_moe_experts" in more]


@pytest.fixture(scope="module")
def made(produce: Produce) -> Produced:
    return produce(megatron_models)


def modules(made: Produced, model_type: str) -> dict[str, Tensor]:
    """The tensors of a model as the library's modules call them."""
    own = {key.partition(":")[2]: value for key, value in made.truth.items() if key.startswith(f"{model_type}:")}
    return {name: value for name, value in own.items() if name != "logits"}


def to_hub(source: Path, out: Path, base: Path, **options: Any) -> dict[str, Tensor]:
    done = ckptkit.consolidate(source, out, base=str(base), **options)
    return {name: lazy.torch() for name, lazy in ckptkit.open(done.output).items()}


def save(root: Path, state: Mapping[str, Any], *, flat: bool = True) -> Path:
    """A DCP directory as the library leaves it: by names alone, or with the key paths of `fsdp_dtensor`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = dcp.DefaultSavePlanner(flatten_state_dict=not flat)
        dcp.save(dict(state), checkpoint_id=root, planner=planner, no_dist=True)
    if flat:
        (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return root


def base_of(root: Path, model_type: str, **changes: Any) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(hub_config(model_type) | changes))
    return root


# -- to the Hub --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", nightly_but(["llama", "qwen2_moe"], TYPES))
def test_transformers_computes_what_the_library_does(made: Produced, tmp_path: Path, model_type: str) -> None:
    from transformers import AutoModelForCausalLM

    ckptkit.consolidate(made.root / model_type / "whole", tmp_path / "out", base=str(made.root / model_type))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits
    assert (logits - made.truth[f"{model_type}:logits"][..., :VOCABULARY]).abs().max() < 1e-5


@pytest.mark.parametrize("model_type", nightly_but(["llama", "mixtral"], TYPES))
def test_every_way_to_split_and_save_a_model_gives_the_same(made: Produced, tmp_path: Path, model_type: str) -> None:
    root = made.root / model_type
    expected = to_hub(root / "whole", tmp_path / "whole", root)
    for way in [*WAYS, "legacy", "legacy-expert"]:
        if (root / way).exists() and way != "whole":
            assert_same(to_hub(root / way, tmp_path / way, root), expected)


@pytest.mark.parametrize(("model_type", "grouped"), pairs(["qwen3", "mixtral", "qwen2_moe"], (False, True)))
def test_fsdp_dtensor(made: Produced, tmp_path: Path, model_type: str, grouped: bool) -> None:
    """Names as megatron/core/transformer/fsdp_dtensor_checkpoint.py makes them; it needs a GPU to run."""
    model: dict[str, Tensor] = {}
    for name, value in modules(made, model_type).items():
        own = f"module.module.{name}"
        if grouped:
            own = re.sub(r"local_experts\.([0-9]+)\.(linear_fc[12])\.weight", r"\2.weight\1", own)
        if "linear_fc1" in name:
            model[f"{own}_w"], model[f"{own}_v"] = value.chunk(2)
        else:
            model[own] = value
    source = save(tmp_path / STEP, {"model": model, "iteration": 3}, flat=False)
    found = to_hub(source, tmp_path / "out", made.root / model_type)
    assert_same(found, to_hub(made.root / model_type / "whole", tmp_path / "whole", made.root / model_type))


def test_rows_that_pad_the_vocabulary_are_left_out_and_said(made: Produced, tmp_path: Path) -> None:
    done = ckptkit.consolidate(made.root / "llama" / "tensor", tmp_path / "out", base=str(made.root / "llama"))
    left = f"dropped the last {PADDED - VOCABULARY} of the {PADDED} rows of"
    assert sum(note.startswith(left) for note in done.notes) == 2
    expected = modules(made, "llama")["embedding.word_embeddings.weight"][:VOCABULARY]
    assert torch.equal(ckptkit.open(tmp_path / "out")["model.embed_tokens.weight"].torch(), expected)
    assert {left.name for left in done.dropped if not left.name.endswith(STATES)} == {"optimizer"}


def test_as_many_rows_as_are_asked_for(made: Produced, tmp_path: Path) -> None:
    found = to_hub(made.root / "llama" / "tensor", tmp_path / "out", made.root / "llama", vocab_size=PADDED - 1)
    expected = modules(made, "llama")["output_layer.weight"][: PADDED - 1]
    assert torch.equal(found["lm_head.weight"], expected)


def test_states_of_layers_are_left_out_and_said(made: Produced, tmp_path: Path) -> None:
    state = {**modules(made, "llama"), "decoder.layers.0.self_attention.linear_qkv._extra_state": torch.ones(3)}
    source = save(tmp_path / STEP, state)
    done = ckptkit.consolidate(source, tmp_path / "out", base=str(made.root / "llama"))
    assert any(
        note.startswith("dropped 1 tensor for which the Hub has no name, such as `decoder.layers.0.self")
        for note in done.notes
    )


@pytest.mark.parametrize(("model_type", "way"), pairs(["llama", "mixtral"], ["tensor", "legacy"]))
def test_moments_follow_their_weights(made: Produced, tmp_path: Path, model_type: str, way: str) -> None:
    base = made.root / model_type
    done = ckptkit.convert(base / way, tmp_path / "out", to="dcp", names="hub", base=str(base))
    found = ckptkit.open(done.output)
    expected = to_hub(base / way, tmp_path / "hub", base)
    where = {"tensor": ("{}", "optimizer.state.exp_avg.{}"), "legacy": ("model.{}", "optimizer.state.{}.exp_avg")}
    weight, moment = where[way]
    assert_same({name: found[weight.format(name)].torch() for name in expected}, expected)
    assert_same({name: found[moment.format(name)].torch() / 2 for name in expected}, expected)
    assert not [name for name in ckptkit.inspect(done.output).layout.names if "decoder" in name]
    assert any(note.startswith("dropped") and "_extra_state" in note for note in done.notes)
    assert_same(to_hub(done.output, tmp_path / "again", base), expected)


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_without_a_config_it_asks_for_one(made: Produced, tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match="the names of megatron to the Hub's") as raised:
        ckptkit.consolidate(made.root / "llama" / "tensor", tmp_path / "out")
    assert raised.value.exit_code == 3
    assert "--base MODEL" in str(raised.value.hint)
    done = ckptkit.consolidate(made.root / "llama" / "tensor", tmp_path / "out", names="keep")
    assert "decoder.layers.self_attention.linear_qkv.weight" in ckptkit.open(done.output)


def change_config(**changes: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], object]:
    return lambda _, config: config.update(changes)


def change_args(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda state, _: state.update(args=Namespace(**changes))


def grow(name: str) -> Callable[[dict[str, Tensor], dict[str, Any]], object]:
    return lambda state, _: state.update({name: torch.cat([state[name], state[name]])})


BAD: Mapping[str, tuple[str, type[CkptError], str, Callable[[dict[str, Any], dict[str, Any]], object]]] = {
    "type": ("llama", Unsupported, "a model of type `bert`", change_config(model_type="bert")),
    "groups": (
        "llama",
        Mismatch,
        "expected 2 groups of 4",
        change_config(num_key_value_heads=2),
    ),
    "heads": ("llama", Mismatch, "expected key heads that divide", change_config(num_key_value_heads=3)),
    "inner": (
        "llama",
        Mismatch,
        "expected 40 (config.json), found 48 along axis 0",
        change_config(intermediate_size=20),
    ),
    "experts": (
        "mixtral",
        Mismatch,
        "expected numbers 0 to 7 (config.json), found 6 of them",
        change_config(num_local_experts=8),
    ),
    "fewer experts": (
        "mixtral",
        Mismatch,
        "expected numbers 0 to 4 (config.json), found this one too",
        change_config(num_local_experts=5),
    ),
    "expert size": ("qwen3_moe", Mismatch, "expected 44", change_config(moe_intermediate_size=22)),
    "layers": (
        "mixtral",
        Mismatch,
        "expected numbers 0 to 2 (config.json), found 2 of them",
        change_config(num_hidden_layers=3),
    ),
    "fewer layers": (
        "qwen3_moe",
        Mismatch,
        "expected numbers 0 to 0 (config.json), found this one too",
        change_config(num_hidden_layers=1),
    ),
    "vocabulary": (
        "llama",
        Mismatch,
        "expected 49 rows (vocab_size in config.json), found 48",
        change_config(vocab_size=49),
    ),
    "a router's bias": (
        "mixtral",
        Mismatch,
        "no rule translates it from the names of megatron",
        lambda state, _: state.update({"decoder.layers.0.mlp.router.expert_bias": torch.ones(EXPERTS)}),
    ),
    "no experts": (
        "llama",
        Mismatch,
        "expected 6 experts (config.json), found none",
        change_config(**hub_config("mixtral")),
    ),
    "less in a layer": (
        "mixtral",
        Mismatch,
        "layer 0 has this tensor, and otherwise the same tensors as layer 1",
        lambda state, _: state.pop("decoder.layers.1.self_attention.linear_proj.weight"),
    ),
    "no end of layers": (
        "mixtral",
        Mismatch,
        "no known model has",
        lambda state, _: state.update({"decoder.layers.mlp.router.weight": torch.empty(1 << 40, 0, 32)}),
    ),
    "half a gate": (
        "llama",
        Mismatch,
        "weight_w` is here and needs this tensor too",
        lambda state, _: state.update(
            {"decoder.layers.0.mlp.linear_fc1.weight_w": state.pop("decoder.layers.0.mlp.linear_fc1.weight")[:24]}
        ),
    ),
    "twice": (
        "llama",
        Mismatch,
        "two names of one tensor",
        lambda state, _: state.update(
            {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight": state["decoder.layers.0.pre_mlp_layernorm.weight"]}
        ),
    ),
    "fewer groups, by its arguments": (
        "llama",
        Mismatch,
        "expected num_query_groups 4 (config.json), found 2 in Megatron's arguments",
        change_args(group_query_attention=True, num_query_groups=2),
    ),
    "no groups": (
        "llama",
        Mismatch,
        "expected num_attention_heads 4 (config.json), found 8",
        change_args(group_query_attention=False, num_attention_heads=8),
    ),
    "width": ("llama", Mismatch, "expected kv_channels 10 (config.json), found 4", change_args(kv_channels=4)),
    "no gates": ("llama", Mismatch, "swiglu False", change_args(swiglu=False)),
    "in pairs": ("llama", Unsupported, "rotary_interleaved", change_args(rotary_interleaved=True)),
    "zero-centred": ("llama", Unsupported, "apply_layernorm_1p", change_args(apply_layernorm_1p=True)),
    "gemma": ("llama", Unsupported, "norms of `gemma` are centered at zero", change_config(model_type="gemma")),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(made: Produced, tmp_path: Path, case: str) -> None:
    model_type, error, words, damage = BAD[case]
    state: dict[str, Any] = {**modules(made, model_type), "args": Namespace(hidden_size=32)}
    config = hub_config(model_type)
    damage(state, config)
    source = save(tmp_path / STEP, state)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=re.escape(words)) as raised:
        ckptkit.consolidate(source, tmp_path / "out")
    assert raised.value.path is not None
    assert not (tmp_path / "out").exists()


def test_norms_around_zero_are_those_of_gemma(made: Produced, tmp_path: Path) -> None:
    state = modules(made, "llama")
    source = save(tmp_path / STEP, {**state, "args": Namespace(apply_layernorm_1p=True)})
    found = to_hub(source, tmp_path / "out", base_of(tmp_path / "base", "gemma"))
    assert torch.equal(found["model.norm.weight"], state["decoder.final_layernorm.weight"])


# -- as core 0.20 saves ------------------------------------------------------------------------------------------------


def save_inside(made: Produced, root: Path, **args: Any) -> Path:
    """A checkpoint with what all ranks have in common inside, as `save` in serialization.py of core 0.20 writes it."""
    common = {"iteration": 7, "checkpoint_version": 3.0, "args": Namespace(**args)}
    return save(root, {**modules(made, "llama"), "common_state/shard_0_1": [common]})


def test_the_step_and_the_arguments_inside_the_shards(made: Produced, tmp_path: Path) -> None:
    source = save_inside(made, tmp_path / "any", num_layers=2, hidden_size=32)
    assert ckptkit.inspect(source).step == 7
    found = to_hub(source, tmp_path / "out", made.root / "llama")
    assert_same(found, to_hub(made.root / "llama" / "whole", tmp_path / "whole", made.root / "llama"))


@pytest.mark.parametrize(
    ("args", "words", "hint"),
    [
        ({"num_layers": 3}, r"expected num_layers 2 \(config\.json\), found 3", "config.json"),
        ({"hybrid_layer_pattern": "*-|*-"}, "layers are those of a HybridModel", "hybrid-to-gpt"),
        ({"hybrid_layer_pattern": "M*M-"}, "layers are those of a HybridModel", "--names keep"),
    ],
)
def test_arguments_inside_that_fit_no_model(
    made: Produced, tmp_path: Path, args: dict[str, Any], words: str, hint: str
) -> None:
    source = save_inside(made, tmp_path / STEP, **args)
    with pytest.raises(CkptError, match=words) as raised:
        ckptkit.consolidate(source, tmp_path / "out", base=str(made.root / "llama"))
    assert hint in str(raised.value.hint)
    assert raised.value.path is not None


def test_a_common_state_of_another_kind_is_told(made: Produced, tmp_path: Path) -> None:
    source = save(tmp_path / STEP, {**modules(made, "llama"), "common_state/shard_0_1": [1, 2]})
    with pytest.raises(CkptError, match="expected a list of one dict") as raised:
        ckptkit.consolidate(source, tmp_path / "out", base=str(made.root / "llama"))
    assert raised.value.path is not None


def test_the_tokenizer_in_the_checkpoint_goes_with_the_model(made: Produced, tmp_path: Path) -> None:
    source = save_inside(made, tmp_path / STEP)
    (source / "tokenizer").mkdir()
    (source / "tokenizer" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 3}}}')
    (source / "tokenizer" / "tokenizer_config.json").write_text("{}")
    base = base_of(tmp_path / "base", "llama")
    done = ckptkit.consolidate(source, tmp_path / "out", base=str(base))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"model": {"vocab": {"a": 3}}}'
    assert f"used tokenizer.json, tokenizer_config.json from {source / 'tokenizer'}" in done.notes
    (base / "tokenizer.json").write_text("{}")
    ckptkit.consolidate(source, tmp_path / "other", base=str(base))
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "{}"
    ckptkit.reshard(source, tmp_path / "again", to=3)
    assert (tmp_path / "again" / "tokenizer" / "tokenizer.json").is_file()


# -- and back ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started(made: Produced, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the Hub of each type, `TYPE-hub`, and what Megatron is to start from, `TYPE`."""
    root = tmp_path_factory.mktemp("started")
    for model_type in TYPES:
        to_hub(made.root / model_type / "whole", root / f"{model_type}-hub", made.root / model_type)
        ckptkit.convert(root / f"{model_type}-hub", root / model_type, to="dcp", names="megatron")
    return root


@pytest.mark.slow
@pytest.mark.skipif(
    "strides" in TensorProperties.__dataclass_fields__,
    reason="megatron-core 0.16.1 reads no metadata under this torch, not even its own: it has no place for strides",
)
def test_the_library_loads_what_is_made_of_models_of_the_hub(made: Produced, started: Path) -> None:
    own = {name: value for name, value in made.truth.items() if name.partition(":")[0] in TYPES}
    expected = {name: value.clone() for name, value in own.items() if not name.endswith(":logits")}
    for name, value in expected.items():
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            value[VOCABULARY:] = 0  # the library fills what is not there
    assert_same(load(started), expected)


@pytest.mark.parametrize("model_type", nightly_but(["llama", "mixtral"], TYPES))
def test_there_and_back(started: Path, tmp_path: Path, model_type: str) -> None:
    found = to_hub(started / model_type, tmp_path / "again", started / f"{model_type}-hub")
    assert_same(found, {name: lazy.torch() for name, lazy in ckptkit.open(started / f"{model_type}-hub").items()})


@pytest.mark.parametrize(
    ("model_type", "changes", "with_experts"),
    [
        ("glm4_moe", {"first_k_dense_replace": 2}, [2, 3]),
        ("glm4_moe", {}, [1, 2, 3]),
        ("qwen2_moe", {"decoder_sparse_step": 2}, [1, 3]),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, [1, 3]),
        ("llama", {}, []),
    ],
)
def test_a_layer_without_experts_has_its_norm_in_linear_fc1(
    model_type: str, changes: Mapping[str, Any], with_experts: list[int]
) -> None:
    """As Transformer Engine's layers have it: where a layer has experts, the norm before these is a module."""
    config = {"model_type": model_type, "num_hidden_layers": 4, **changes}
    hub = {f"model.layers.{layer}.post_attention_layernorm.weight": torch.full((8,), layer + 1.0) for layer in range(4)}
    own = {
        f"decoder.layers.{i}.{'pre_mlp_layernorm.' if i in with_experts else 'mlp.linear_fc1.layer_norm_'}weight": one
        for i, one in enumerate(hub.values())
    }
    check_both_ways("megatron", own, hub, config)


def test_what_is_made_is_a_checkpoint_like_any_other(started: Path) -> None:
    assert ckptkit.inspect(started / "mixtral").family == "megatron"
    opened = ckptkit.open(started / "mixtral")
    assert opened["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape == (EXPERTS, 48, 32)
    assert not [name for name in opened if name.startswith("model.")]
    assert all(part.is_ok for part in ckptkit.verify(started / "mixtral"))
