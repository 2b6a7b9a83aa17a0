"""Megatron's `torch_dist` directories, which are DCP without key paths, against the library's own loader."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.find_components import CHANGES, DESCRIPTION, EXPORTED
from ckptkit.checks.make_manifest import make_manifest
from ckptkit.checks.verify import verify
from ckptkit.conversion.convert import consolidate
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats import locate_all_chunks
from tests.conftest import Produce, Produced
from tests.faults.trained import Truth
from tests.faults.trees import core, fsdp_dtensor
from tests.formats.contract import assert_same, raw_bytes
from tests.tiers import nightly_but
from tests.trainers.produced_megatron import STEP, VARIANTS, load, megatron, model_space

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

STATES = ("_extra_state", "common_state")  # the second since core 0.20


@pytest.fixture(scope="module")
def made(produce: Produce) -> Produced:
    return produce(megatron)


def layers_of(made: Produced, variant: str, stacked: str) -> Tensor:
    """The tensor that the library loads, layer by layer and expert by expert, stacked as the file has it."""
    own = {key.partition(":")[2]: value for key, value in made.truth.items() if key.startswith(f"{variant}:")}
    name = stacked.replace("linear_qkv.layer_norm_", "@").replace("mlp.linear_fc1.layer_norm_", "#")
    name = name.replace("self_attention.@", "input_layernorm.").replace("#", "pre_mlp_layernorm.")
    if name in own:
        return own[name]
    names = [name.replace("decoder.layers.", f"decoder.layers.{layer}.") for layer in range(2)]
    if names[0] in own:
        return torch.stack([own[one] for one in names])
    experts = [[own[one.replace("experts.experts.", f"experts.local_experts.{i}.")] for i in range(4)] for one in names]
    return torch.stack([torch.stack(one) for one in experts])


@pytest.mark.parametrize("variant", nightly_but(["moe"], VARIANTS))
def test_every_tensor_is_what_the_library_loads(made: Produced, variant: str, tmp_path: Path) -> None:
    done = consolidate(made.root / variant / "torch_dist", tmp_path / "out", names="keep")
    assert {left.name for left in done.dropped if not left.name.endswith(STATES)} == {"optimizer"}
    assert any("the output has the checkpoint's own names" in note for note in done.notes)
    found = ckptkit.open(tmp_path / "out")
    assert sum(lazy.numel for lazy in found.values()) == sum(
        value.numel() for key, value in made.truth.items() if key.count(":") == 1 and key.startswith(f"{variant}:")
    )
    for name, lazy in found.items():
        assert raw_bytes(lazy.torch()) == raw_bytes(layers_of(made, variant, name)), name


def test_moments_have_a_way_to_them(made: Produced) -> None:
    found = ckptkit.inspect(made.root / "swiglu" / "torch_dist")
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    assert found.layout.key(name) == ("optimizer", "state", "exp_avg", "decoder.layers.mlp.linear_fc2.weight")
    assert (found.trainer, found.step, found.world_size, found.parameters) == ("Megatron", 3, 2, 6048)
    assert found.groups["optimizer"].under == ("optimizer",)
    moments = [f"swiglu:decoder.layers.{layer}.mlp.linear_fc2.weight:exp_avg" for layer in range(2)]
    expected = torch.stack([made.truth[moment] for moment in moments])
    assert torch.equal(ckptkit.open(made.root / "swiglu" / "torch_dist")[name].torch(), expected)


@pytest.mark.slow
def test_the_library_loads_it_after_resharding(made: Produced, tmp_path: Path) -> None:
    source, result = made.root / "moe" / "torch_dist", tmp_path / "torch_dist" / STEP
    ckptkit.reshard(source, result, to=3)
    assert ckptkit.diff(source, result).is_equal
    one, two = (ckptkit.inspect(path) for path in (source, result))
    assert one.parameters == two.parameters
    assert one.groups["optimizer"].nbytes == two.groups["optimizer"].nbytes
    loaded = load(tmp_path, "moe")
    assert loaded.keys() == {key for key in made.truth if key.startswith("moe:")}
    for key, tensor in loaded.items():
        assert raw_bytes(tensor) == raw_bytes(made.truth[key]), key


def test_a_rename_reaches_the_moments(made: Produced, tmp_path: Path) -> None:
    ckptkit.reshard(made.root / "dense" / "torch_dist", tmp_path / STEP, to=2, rename=["^decoder=>encoder"])
    opened = ckptkit.open(tmp_path / STEP)
    assert not [name for name in opened if "decoder" in name]
    assert "optimizer.state.exp_avg.encoder.layers.mlp.linear_fc2.weight" in opened


def test_all_of_it_is_verified(made: Produced) -> None:
    found = [part for part in verify(made.root / "dense" / "torch_dist") if part.path.name == STEP]
    assert [(part.is_ok, part.unchecked_bytes) for part in found] == [(True, 0)]


def test_flattened_moments_get_the_shape_of_their_parameters(produce: Produce, tmp_path: Path) -> None:
    made = produce(model_space)
    assert_same({name: lazy.torch() for name, lazy in ckptkit.open(made.root).items()}, made.truth)
    (found,) = verify(made.root)
    assert (found.problems, found.unchecked_bytes) == ((), 0)
    ckptkit.reshard(made.root, tmp_path / "out", to=3)
    assert_same({name: lazy.torch() for name, lazy in ckptkit.open(tmp_path / "out").items()}, made.truth)


def test_moments_of_no_parameter_are_left_as_they_are(produce: Produce, tmp_path: Path) -> None:
    made = produce(model_space)
    ckptkit.reshard(made.root, tmp_path / "out", to=1, exclude=["fc1.weight"])
    opened = ckptkit.open(tmp_path / "out")
    assert "fc1.weight" not in opened
    assert opened["optimizer.state.exp_avg.fc1.weight"].shape == (2, 8, 6)


def test_a_flipped_bit_in_a_flattened_moment_is_found(produce: Produce, tmp_path: Path) -> None:
    made = produce(model_space)
    root = tmp_path / "there"
    shutil.copytree(made.root, root)
    layout = locate_all_chunks(Checkpoint.open(root).layout)
    chunk = layout.tensors["optimizer.state.exp_avg.fc2.weight"].chunks[-1]
    data = bytearray((root / chunk.path).read_bytes())
    data[chunk.offset] ^= 1
    (root / chunk.path).write_bytes(data)
    (found,) = verify(root)
    assert [(problem.tensor, problem.path) for problem in found.problems] == [
        ("optimizer.state.exp_avg.fc2.weight", root / chunk.path)
    ]


# -- what other options of the library leave, by its names ------------------------------------------------------------


def save_flat(root: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(state, checkpoint_id=root, planner=planner, no_dist=True)
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return root


def test_buckets_are_carried_as_they_are_and_that_is_said(tmp_path: Path) -> None:
    bucket = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_0.exp_avg"
    )
    name = "decoder.layers.mlp.linear_fc1.weight"
    state = {name: torch.ones(2, 4, 3), f"chained_0.{bucket}": torch.arange(64.0), bucket: torch.arange(128.0)}
    root = save_flat(tmp_path / STEP, state)
    found = ckptkit.inspect(root)
    assert (found.groups["model"].entries, found.groups["optimizer"].entries) == (1, 2)
    assert list(ckptkit.open(consolidate(root, tmp_path / "out", names="keep").output)) == [name]
    done = ckptkit.reshard(root, tmp_path / "resharded", to=2)
    assert any("does not name the parameters" in note for note in done.notes)
    assert torch.equal(ckptkit.open(tmp_path / "resharded")[bucket].torch(), state[bucket])


@pytest.fixture
def fsdp(tmp_path: Path) -> tuple[Path, Truth]:
    """What Megatron-FSDP saves with `--ckpt-format fsdp_dtensor`: DCP with key paths, without metadata.json."""
    root = tmp_path / STEP
    return root, fsdp_dtensor(root, {}, 3, 2)


def test_layers_with_numbers_of_their_own(fsdp: tuple[Path, Truth], tmp_path: Path) -> None:
    root, truth = fsdp
    found = ckptkit.inspect(root)
    assert (found.trainer, found.step, found.groups["model"].entries) == ("Megatron", 3, 6)
    assert not ckptkit.doctor(root).findings
    opened = ckptkit.open(consolidate(root, tmp_path / "out", names="keep").output)
    above = "model.module."
    expected = {name.removeprefix(above): value for name, value in sorted(truth.items()) if name.startswith(above)}
    assert_same({name: lazy.torch() for name, lazy in opened.items()}, expected)


def test_states_and_groups_of_megatron_fsdp_follow_their_weights(fsdp: tuple[Path, Truth], tmp_path: Path) -> None:
    """Which have `module.` twice more than the model, and one group for both halves of a gated layer."""
    root, truth = fsdp
    base = {"model_type": "llama", "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3}
    sizes = {"num_hidden_layers": 1, "intermediate_size": 24, "vocab_size": 48, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(base | sizes))
    done = ckptkit.convert(root, tmp_path / "out", to="dcp", names="hub", base=str(tmp_path))
    saved = ckptkit.open(done.output)
    state = "optimizer.state"
    for hub, own in {"gate_proj": "linear_fc1.weight_w", "up_proj": "linear_fc1.weight_v"}.items():
        layer = f"{state}.model.layers.0.mlp.{hub}.weight.exp_avg"
        old = f"{state}.module.module.module.decoder.layers.0.mlp.{own}.exp_avg"
        assert torch.equal(saved[layer].torch(), truth[old])
    weights = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert {name for name in saved if name.startswith(state)} == {f"{state}.{name}.exp_avg" for name in weights}
    groups = {f"optimizer.param_to_group_meta.{name}.{key}" for name in weights for key in ("lr", "step")}
    assert {name for name in ckptkit.inspect(done.output).layout.blobs if "group_meta" in name} == groups
    with pytest.raises(Unsupported, match="found `param_to_group_meta`"):
        ckptkit.convert(root, tmp_path / "universal", to="universal")


def test_what_all_ranks_share_is_a_part_of_it(made: Produced, tmp_path: Path) -> None:
    root = tmp_path / "any"
    shutil.copytree(made.root / "swiglu" / "torch_dist" / STEP, root)
    found = ckptkit.inspect(root)
    assert found.step == 3  # of `common.pt`, where no name says one
    assert {"iteration", "args", "optimizer.param_groups.0.lr"} <= set(found.layout.blobs)
    make_manifest(root)
    assert [part.problems for part in verify(root)] == [(), ()]
    ckptkit.convert(root, tmp_path / "state.pt", to="pt")
    state = torch.load(tmp_path / "state.pt", weights_only=False)
    assert (state["iteration"], state["args"].num_layers) == (3, 2)
    assert state["optimizer"]["param_groups"][0]["lr"] == 1e-3
    weights = {key for key in state if key.startswith(("dec", "emb", "out")) and "_extra_state" not in key}
    assert state["optimizer"]["state"]["exp_avg"].keys() == weights


def save_bridge(root: Path) -> None:
    """A step as `save_checkpoint` in megatron/bridge/training/checkpointing.py leaves it, of 067f987, August 2026.

    With `save_tokenizer_assets` and `also_save_hf_checkpoint`; the model in `hf` is another one here.
    """
    core(root, {}, 3, 2)
    for folder in ("tokenizer", "hf"):
        (root / folder).mkdir()
        (root / folder / "tokenizer.json").write_text("{}")
    (root / "run_config.yaml").write_text("model: {}")
    torch.save({"step": torch.tensor(3)}, root / "train_state.pt")
    (root / "hf" / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    (root / "hf" / "README.md").write_text("a model")
    save_file({"model.norm.weight": torch.ones(2)}, root / "hf" / "model.safetensors")


def test_strict_knows_what_megatron_bridge_leaves(tmp_path: Path) -> None:
    save_bridge(tmp_path / STEP)
    done = consolidate(tmp_path / STEP, tmp_path / "out", names="keep", strict=True)
    assert {(left.name, left.why) for left in done.left_behind if left.name.startswith("hf")} == {
        ("hf/model.safetensors", EXPORTED),
        ("hf/README.md", DESCRIPTION),
    }
    assert not done.warnings


def test_a_state_of_modelopt_is_no_weights_and_is_not_lost(tmp_path: Path) -> None:
    """As `save_sharded_modelopt_state` in modelopt/torch/opt/plugins/mcore_dist_checkpointing.py leaves it."""
    root = tmp_path / STEP
    save_bridge(root)
    save_flat(root / "modelopt_state", {"common_state/shard_0_1": [{"modelopt_version": "0.40"}]})
    done = consolidate(root, tmp_path / "out", names="keep")
    assert done.warnings == [f"not copied: modelopt_state ({CHANGES})"]
    with pytest.raises(Mismatch, match="`modelopt_state` would not be copied"):
        consolidate(root, tmp_path / "strict", names="keep", strict=True)
    again = ckptkit.reshard(root, tmp_path / "again", to=2).output
    files = sorted(path.name for path in (root / "modelopt_state").iterdir())
    assert sorted(path.name for path in (again / "modelopt_state").iterdir()) == files
    sound = [part.path.name for part in verify(again) if not part.problems]
    assert sound == ["again", "model.safetensors", "modelopt_state"]


@pytest.mark.parametrize("kind", ["nemo", "bridge"])
def test_it_is_found_in_other_trees(made: Produced, tmp_path: Path, kind: str) -> None:
    source = made.root / "swiglu" / "torch_dist" / STEP
    if kind == "nemo":
        root = tmp_path / "model--val_loss=2.50-step=3-consumed_samples=8.0"
        shutil.copytree(source, root / "weights")
        (root / "context").mkdir()
        (root / "context" / "io.json").write_text("{}")
    else:
        root = tmp_path / STEP
        shutil.copytree(source, root)
        (root / "run_config.yaml").write_text("model: {}")
        torch.save({"step": torch.tensor(3)}, root / "train_state.pt")
        torch.save({"step": torch.tensor(3)}, tmp_path / "latest_train_state.pt")
    for path in (tmp_path, root):
        found = ckptkit.inspect(path)
        assert (found.whole, found.step, found.parameters) == (root, 3, 6048)
        assert found.trainer == {"nemo": "NeMo", "bridge": "Megatron-Bridge"}[kind]
    assert [listed.is_complete for listed in ckptkit.ls(tmp_path).checkpoints] == [True]
