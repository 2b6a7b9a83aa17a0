"""Megatron's legacy directories of ranks, joined, against the library's own loader; and what is wrong with others."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checks.verify import verify
from ckptkit.conversion.convert import consolidate
from ckptkit.errors import CkptError
from tests.conftest import Produce, Produced
from tests.formats.contract import raw_bytes
from tests.trainers.produced_megatron import STEP, VARIANTS, megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.fixture(scope="module")
def made(produce: Produce) -> Produced:
    return produce(megatron)


def whole(made: Produced, variant: str) -> dict[str, Tensor]:
    """The tensors of a whole model, as the library itself has them."""
    named = {tuple(key.split(":")): value for key, value in made.truth.items()}
    return {key[1]: value for key, value in named.items() if key[0] == variant and len(key) == 2}


def moments(made: Produced, variant: str) -> dict[str, Tensor]:
    named = {tuple(key.split(":")): value for key, value in made.truth.items()}
    return {f"{key[1]}.{key[2]}": value for key, value in named.items() if key[0] == variant and len(key) == 3}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert raw_bytes(found[name]) == raw_bytes(tensor), name


def below(opened: ckptkit.LazyCheckpoint, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): lazy.torch() for name, lazy in opened.items() if name.startswith(prefix)}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensor_parallel_ranks_are_joined_as_the_library_joins_them(made: Produced, variant: str) -> None:
    opened = ckptkit.open(made.root / variant / "legacy")
    assert_same(below(opened, "model."), whole(made, variant))
    states = below(opened, "optimizer.state.")
    assert_same({name: value for name, value in states.items() if not name.endswith(".step")}, moments(made, variant))


@pytest.mark.parametrize("variant", ["stages", "virtual"])
def test_stages_are_numbered_as_their_layers_are(made: Produced, variant: str) -> None:
    assert_same(below(ckptkit.open(made.root / variant), "model."), whole(made, variant))


def test_it_says_what_it_is(made: Produced) -> None:
    found = ckptkit.inspect(made.root / "dense" / "legacy")
    assert (found.trainer, found.step, found.world_size, found.parameters) == ("Megatron", 3, 2, 5456)
    assert set(found.groups) == {"model", "optimizer", "rest"}
    assert {"rank_state.0.rng_state.0.random", "rank_state.1.rng_state.0.random", "iteration"} <= set(
        found.layout.blobs
    )


def test_it_consolidates_and_verifies(made: Produced, tmp_path: Path) -> None:
    done = consolidate(made.root / "swiglu" / "legacy", tmp_path / "out", names="keep")
    assert any("the output has the checkpoint's own names" in note for note in done.notes)
    assert_same(below(ckptkit.open(tmp_path / "out"), ""), whole(made, "swiglu"))
    assert done.unchecked_bytes == 0
    (found,) = verify(made.root / "swiglu" / "legacy")
    assert found.is_ok
    assert found.unchecked_bytes == 0


def test_a_config_of_a_model_makes_no_model_of_it(made: Produced, tmp_path: Path) -> None:
    """Not even one whose names are not known here: what comes with a config.json looks like something to load."""
    (tmp_path / "base").mkdir()
    for config in ({"model_type": "qwen3_moe"}, {"model_type": "llama", "num_hidden_layers": 2}):
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
        with pytest.raises(CkptError, match=r"config\.json does not have") as raised:
            consolidate(made.root / "moe" / "legacy", tmp_path / "out", base=str(tmp_path / "base"))
        assert raised.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_in_a_gated_layer_is_found_while_it_is_copied(made: Produced, tmp_path: Path) -> None:
    root = copied(made, "swiglu", tmp_path)
    name = "model.decoder.layers.1.mlp.linear_fc1.weight"
    chunk = Checkpoint.open(root).layout.tensors[name].chunks[-1]
    data = bytearray((root / chunk.path).read_bytes())
    data[chunk.offset] ^= 1
    (root / chunk.path).write_bytes(data)
    with pytest.raises(CkptError, match="CRC-32") as raised:
        consolidate(root, tmp_path / "out", names="keep")
    assert (raised.value.code, raised.value.path) == ("corrupt", root / chunk.path)
    assert not (tmp_path / "out").exists()
    (found,) = verify(root)
    assert [problem.tensor for problem in found.problems] == [name]


def test_it_becomes_dcp_for_more_ranks(made: Produced, tmp_path: Path) -> None:
    done = ckptkit.convert(made.root / "moe" / "legacy", tmp_path / STEP, to="dcp", world_size=3)
    assert any(note.startswith("dropped `rank_state`") for note in done.notes)
    assert not (tmp_path / STEP / "mp_rank_00").exists()
    opened = ckptkit.open(tmp_path / STEP)
    assert_same(below(opened, "model."), whole(made, "moe"))
    found = ckptkit.diff(tmp_path / STEP, made.root / "moe" / "legacy")
    assert not found.different
    assert all(name.startswith("rank_state.") for name in (*found.only_in_a, *found.only_in_b))


# -- shapes of jobs that two processes cannot be -----------------------------------------------------------------------


def save_rank(root: Path, name: str, model: dict[str, Tensor], optimizer: object = None, **args: int) -> None:
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}
    state = {"model": model, "args": Namespace(**{**sizes, **args}), "checkpoint_version": 3.0, "iteration": 3}
    (root / name).mkdir(parents=True)
    torch.save(state if optimizer is None else {**state, "optimizer": optimizer}, root / name / "model_optim_rng.pt")


def of_expert_rank(model: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What one of two ranks has that share four experts."""
    found = {}
    for name, tensor in model.items():
        match = re.fullmatch(r"(.*local_experts\.)(\d)(\..*)", name)
        if match is None:
            found[name] = tensor
        elif int(match[2]) // 2 == rank:
            found[f"{match[1]}{int(match[2]) % 2}{match[3]}"] = tensor
    return found


def test_ranks_of_experts_are_numbered_through(made: Produced, tmp_path: Path) -> None:
    model = whole(made, "moe")
    for rank in range(2):
        save_rank(tmp_path, f"mp_rank_00_{rank:03d}", of_expert_rank(model, rank), expert_model_parallel_size=2)
    assert_same(below(ckptkit.open(tmp_path), "model."), model)


def test_ranks_of_experts_and_stages_and_tensors(made: Produced, tmp_path: Path) -> None:
    """2 x 2 x 2 ranks: gates and rows are cut as the library's layers are, here by their published shapes."""
    model = whole(made, "moe")
    sizes = {f"{kind}_model_parallel_size": 2 for kind in ("tensor", "pipeline", "expert")}
    for tensor, stage, expert in product(range(2), repeat=3):
        here = {}
        for name, value in of_expert_rank(model, expert).items():
            layer = re.match(r"decoder\.layers\.(\d)\.", name)
            if (int(layer[1]) if layer else int(name.startswith(("decoder.final", "output")))) != stage:
                continue
            if "linear_fc1" in name:
                value = torch.cat([half.chunk(2)[tensor] for half in value.chunk(2)])  # noqa: PLW2901
            elif "linear_fc2" in name or "linear_proj" in name:
                value = value.chunk(2, dim=1)[tensor].clone()  # noqa: PLW2901
            elif "linear_qkv" in name or "embeddings" in name or "output_layer" in name:
                value = value.chunk(2)[tensor].clone()  # noqa: PLW2901
            here[re.sub(r"(decoder\.layers\.)\d", r"\g<1>0", name)] = value
        save_rank(tmp_path, f"mp_rank_{tensor:02d}_{stage:03d}_{expert:03d}", here, **sizes)
    found = below(ckptkit.open(tmp_path), "model.")
    assert_same(found, model)


def test_groups_with_and_without_decay_and_masters_in_32_bits(tmp_path: Path) -> None:
    """The optimizer of a job in 16 bits: numbers go through the groups, masters lie by group."""
    model = {
        "a.weight": torch.ones(2, 3),
        "a.bias": torch.ones(2),
        "norm.weight": torch.ones(3),
        "b.weight": torch.ones(4, 2),
    }
    order = [["a.weight", "b.weight"], ["a.bias", "norm.weight"]]
    moments = {name: torch.randn_like(value) for name, value in model.items()}
    masters = [[torch.randn_like(model[name]) for name in names] for names in order]
    flat = [name for names in order for name in names]
    inner = {
        "state": {i: {"exp_avg": moments[name]} for i, name in enumerate(flat)},
        "param_groups": [
            {"params": [0, 1], "wd_mult": 1.0, "lr": 0.5, "step": 7},
            {"params": [2, 3], "wd_mult": 0.0, "lr": 0.5, "step": 7},
        ],
    }
    optimizer = {"optimizer": inner, "fp32_from_fp16_params": masters, "grad_scaler": {"scale": 2.0}}
    save_rank(tmp_path, "mp_rank_00", {name: value.bfloat16() for name, value in model.items()}, optimizer)
    found = below(ckptkit.open(tmp_path), "optimizer.state.")
    expected = {f"{name}.exp_avg": value for name, value in moments.items()}
    for names, values in zip(order, masters, strict=True):
        expected |= {f"{name}.fp32_param": value for name, value in zip(names, values, strict=True)}
    assert_same(found, expected)
    blobs = ckptkit.inspect(tmp_path).layout.blobs
    assert {"optimizer.grad_scaler.scale", "optimizer.param_groups.1.params", "optimizer.param_groups.0.step"} <= set(
        blobs
    )
    ckptkit.convert(tmp_path, tmp_path / "out.pt", to="pt")
    groups = torch.load(tmp_path / "out.pt", weights_only=False)["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == order


def test_stages_may_have_their_groups_in_different_orders(tmp_path: Path) -> None:
    """Each stage has its groups in the order in which its own parameters begin with them."""
    stages = [
        {"embedding.weight": torch.ones(4, 3), "norm.weight": torch.ones(3)},
        {"final.bias": torch.ones(5), "output_layer.weight": torch.ones(4, 3)},
    ]
    for stage, (model, decays) in enumerate(zip(stages, [(1.0, 0.0), (0.0, 1.0)], strict=True)):
        groups = [{"params": [i], "wd_mult": decay, "lr": 0.5} for i, decay in enumerate(decays)]
        states = {i: {"exp_avg": value} for i, value in enumerate(model.values())}
        optimizer = {"state": states, "param_groups": groups}
        save_rank(tmp_path, f"mp_rank_00_{stage:03d}", model, optimizer, pipeline_model_parallel_size=2)
    ckptkit.convert(tmp_path, tmp_path / "out.pt", to="pt")
    found = torch.load(tmp_path / "out.pt", weights_only=False)["optimizer"]["param_groups"]
    assert {group["wd_mult"]: group["params"] for group in found} == {
        1.0: ["embedding.weight", "output_layer.weight"],
        0.0: ["norm.weight", "final.bias"],
    }


SMALL = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2)}


def test_a_parameter_without_a_state_has_no_entry(tmp_path: Path) -> None:
    optimizer = {"state": {0: {"exp_avg": torch.ones(2, 3)}, 1: {}}, "param_groups": [{"params": [0, 1]}]}
    save_rank(tmp_path, "mp_rank_00", SMALL, optimizer)
    names = ckptkit.inspect(tmp_path).layout.names
    assert {name for name in names if name.startswith("optimizer.state.")} == {"optimizer.state.a.weight.exp_avg"}


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        ({0: {"exp_avg": torch.ones(2, 3)}, 7: {"exp_avg": torch.ones(2)}}, [{"params": [0, 1]}]),
        ({0: {"exp_avg": torch.ones(2, 3)}, "b": {"exp_avg": torch.ones(2)}}, [{"params": [0, 1]}]),
        ({0: {"step": torch.tensor(1.0)}}, [{"params": [0, 0]}]),
        ({0: {"exp_avg": torch.ones(2, 3)}}, [{"params": [[0], 1]}]),
        ({0: {"exp_avg": torch.ones(2, 3)}}, [{"params": [0], "wd_mult": [1]}, {"params": [1], "wd_mult": 0.0}]),
        ({0: {"exp_avg": torch.ones(2, 3), "other": torch.ones(2)}}, [{"params": [0, 1]}]),
    ],
    ids=["stray", "stray by name", "twice", "lists", "no decay", "two shapes"],
)
def test_an_optimizer_that_contradicts_itself_is_carried_as_it_is(
    tmp_path: Path, state: dict[Any, Any], groups: list[dict[str, Any]]
) -> None:
    save_rank(tmp_path, "mp_rank_00", SMALL, {"state": state, "param_groups": groups})
    expected = {f"{number}.{kind}": value for number, one in state.items() for kind, value in one.items()}
    assert_same(below(ckptkit.open(tmp_path), "optimizer.state."), expected)


def test_recorded_names_decide_and_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Two layers of one shape on each of two stages, which the optimizer has in another order, by local names."""
    for stage in range(2):
        names = [f"decoder.layers.{i}.mlp.weight" for i in range(2)]
        model = {name: torch.full((3, 3), 10.0 * stage + i) for i, name in enumerate(names)}
        states = {i: {"exp_avg": model[name]} for i, name in enumerate(reversed(names))}
        groups = [{"params": [0, 1], "param_names": names[::-1]}]
        optimizer = {"state": states, "param_groups": groups}
        save_rank(tmp_path, f"mp_rank_00_{stage:03d}", model, optimizer, pipeline_model_parallel_size=2)
    ckptkit.convert(tmp_path, tmp_path / "out.pt", to="pt")
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    (group,) = found["optimizer"]["param_groups"]
    assert group["params"] == group["param_names"] == [f"decoder.layers.{i}.mlp.weight" for i in (1, 0, 3, 2)]
    averages = {name: state["exp_avg"] for name, state in found["optimizer"]["state"].items()}
    assert_same(averages, found["model"])


def test_keys_beside_the_states_of_a_plain_optimizer_are_kept(tmp_path: Path) -> None:
    states = {0: {"exp_avg": torch.ones(2, 3)}, 1: {"exp_avg": torch.ones(2)}}
    optimizer = {"state": states, "param_groups": [{"params": [0, 1]}], "scale": 2.0, "ema": {"decay": 0.5}}
    save_rank(tmp_path, "mp_rank_00", SMALL, optimizer)
    ckptkit.convert(tmp_path, tmp_path / "out.pt", to="pt")
    found = torch.load(tmp_path / "out.pt", weights_only=False)["optimizer"]
    assert (found["scale"], found["ema"]) == (2.0, {"decay": 0.5})


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), torch.bfloat16], ids=["tuple", "one"])
def test_buffers_of_a_shared_optimizer_are_carried_as_they_are(made: Produced, tmp_path: Path, dtypes: object) -> None:
    root = copied(made, "swiglu", tmp_path)
    for rank in ("mp_rank_00", "mp_rank_01"):
        edit(
            root / rank / "model_optim_rng.pt",
            lambda state: state.update(optimizer={"optimizer": {"param_groups": []}}),
        )
        torch.save(
            {0: {dtypes: {"exp_avg": torch.arange(6.0)}}, "buckets_coalesced": True}, root / rank / "distrib_optim.pt"
        )
    opened = ckptkit.open(root)
    assert torch.equal(opened[f"rank_state.1.distrib_optim.0.{dtypes}.exp_avg"].torch(), torch.arange(6.0))
    assert_same(below(opened, "model."), whole(made, "swiglu"))
    assert consolidate(root, tmp_path / "out", names="keep").tensors == len(whole(made, "swiglu"))


FUSED = "language_model.encoder.layers.0.self_attention.query_key_value"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", [None, 0, 1.0])
def test_old_orders_of_queries_keys_and_values(tmp_path: Path, version: float | None, ranks: int) -> None:
    """As the source reads them: `[3, heads, width]` in version 0, `[heads, width, 3]` in version 1, on each rank."""
    heads, width, wide = 4, 3, 5
    truth = {
        f"{FUSED}.weight": torch.randn(heads * 3 * width, wide),
        f"{FUSED}.bias": torch.randn(heads * 3 * width),
    }
    averages = {f"{name}.exp_avg": value * 0.5 for name, value in truth.items()}

    def old(value: Tensor, rank: int) -> Tensor:
        part = value.chunk(ranks)[rank].unflatten(0, (heads // ranks, 3, width))
        moved = part.transpose(1, 2) if version == 1 else part.transpose(0, 1)
        return moved.flatten(0, 2).contiguous()

    for rank in range(ranks):
        model = {name: old(value, rank) for name, value in truth.items()}
        states = {i: {"exp_avg": old(value, rank)} for i, value in enumerate(averages.values())}
        optimizer = {"state": states, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
        sizes = {"tensor_model_parallel_size": ranks, "num_attention_heads": heads}
        save_rank(tmp_path, f"mp_rank_{rank:02d}", model, optimizer, **sizes)
        edit(tmp_path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", lambda state: set_version(state, version))
    opened = ckptkit.open(tmp_path)
    assert_same(below(opened, "model."), truth)
    assert_same(below(opened, "optimizer.state."), averages)
    ckptkit.convert(tmp_path, tmp_path / "out.pt", to="pt")
    assert torch.load(tmp_path / "out.pt", weights_only=False)["checkpoint_version"] == 2.0


def set_version(state: dict[str, Any], version: float | None) -> None:
    state.update(checkpoint_version=version)
    if version is None:
        del state["checkpoint_version"]


@pytest.mark.parametrize("is_copied", [True, False])
def test_latent_attention_is_joined_by_its_sizes(tmp_path: Path, is_copied: bool) -> None:
    prefix = "decoder.layers.0.self_attention.linear_"
    truth = {f"{prefix}q_down_proj.weight": torch.randn(6, 4), f"{prefix}kv_down_proj.weight": torch.randn(10, 4)}
    sizes = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_pos_emb_head_dim": 2, "tensor_model_parallel_size": 2}
    for rank in range(2):
        model = {name: value if is_copied else value.chunk(2)[rank].clone() for name, value in truth.items()}
        save_rank(tmp_path, f"mp_rank_{rank:02d}", model, **sizes)
    assert_same(below(ckptkit.open(tmp_path), "model."), truth)
    edit(tmp_path / "mp_rank_00" / "model_optim_rng.pt", set_args(q_lora_rank=7))
    with pytest.raises(CkptError, match="7 rows in all"):
        ckptkit.open(tmp_path)
    edit(tmp_path / "mp_rank_00" / "model_optim_rng.pt", set_args(q_lora_rank=None))
    with pytest.raises(CkptError, match="do not give the size"):
        ckptkit.open(tmp_path)


# -- what is wrong -----------------------------------------------------------------------------------------------------

Damage = Callable[[Path], Any]


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def of_rank(rank: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda root: edit(root / rank / "model_optim_rng.pt", change)


def set_args(**values: object) -> Callable[[dict[str, Any]], Any]:
    return lambda state: vars(state["args"]).update(values)


def cut_row(state: dict[str, Any]) -> None:
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    state["model"][name] = state["model"][name][:-1].clone()


def rename_tensor(state: dict[str, Any]) -> None:
    state["model"]["decoder.layers.0.self_attention.in_proj.weight"] = torch.ones(2, 2)


FAULTS: list[tuple[str, str, Damage, str]] = [
    ("swiglu", "missing rank", lambda root: shutil.rmtree(root / "mp_rank_01"), "1 of 2 ranks are missing: mp_rank_01"),
    ("swiglu", "missing file", lambda root: (root / "mp_rank_01/model_optim_rng.pt").unlink(), "`model_optim_rng"),
    (
        "swiglu",
        "rank of another job",
        lambda root: shutil.copytree(root / "mp_rank_00", root / "mp_rank_02"),
        "expected 2 x 1 x 1 ranks, .*mp_rank_02",
    ),
    (
        "swiglu",
        "names of two jobs",
        lambda root: shutil.copytree(root / "mp_rank_00", root / "mp_rank_00_001"),
        "several jobs",
    ),
    ("swiglu", "another step", of_rank("mp_rank_01", lambda state: state.update(iteration=4)), "found 4: this"),
    ("swiglu", "another shape", of_rank("mp_rank_01", cut_row), "expected a tensor that fits"),
    (
        "swiglu",
        "a tensor of one rank",
        of_rank("mp_rank_01", lambda state: state["model"].pop("decoder.final_layernorm.weight")),
        "some tensor-parallel ranks do not have this tensor",
    ),
    (
        "stages",
        "missing stage",
        lambda root: shutil.rmtree(root / "mp_rank_00_001"),
        "1 of 2 ranks are missing: mp_rank_00_001",
    ),
    ("stages", "layers", of_rank("mp_rank_00_000", set_args(num_layers=5)), r"expected 5 layers \(`args`\), found 4"),
    ("swiglu", "no model", of_rank("mp_rank_00", lambda state: state.pop("model")), "the file has no `model`"),
]


def copied(made: Produced, variant: str, tmp_path: Path) -> Path:
    source = made.root / variant
    source = source / "legacy" if (source / "legacy").exists() else source
    shutil.copytree(source / STEP, tmp_path / STEP)
    return tmp_path / STEP


@pytest.mark.parametrize(
    ("variant", "damage", "message"), [(v, d, m) for v, _, d, m in FAULTS], ids=[f[1] for f in FAULTS]
)
def test_ranks_that_do_not_fit_are_an_error(
    made: Produced, tmp_path: Path, variant: str, damage: Damage, message: str
) -> None:
    root = copied(made, variant, tmp_path)
    damage(root)
    with pytest.raises(CkptError, match=message) as raised:
        consolidate(root, tmp_path / "out", names="keep")
    assert raised.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def add_layer(number: int) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["model"].update({f"decoder.layers.{number}.w": torch.ones(2)})


HOSTILE: list[tuple[str, Damage, str]] = [
    ("ranks by name", lambda root: (root / "mp_rank_00").rename(root / "mp_rank_9999_9999_9999"), "several jobs"),
    ("a rank by name", lambda root: (root / "mp_rank_00").rename(root / "mp_rank_9999"), "ranks are missing"),
    (
        "ranks in the file",
        of_rank("mp_rank_00", set_args(tensor_model_parallel_size=2**31, pipeline_model_parallel_size=2**20)),
        "ranks are missing: mp_rank_00_001, mp_rank_00_002",
    ),
    ("no ranks", of_rank("mp_rank_00", set_args(tensor_model_parallel_size=0)), "expected at least 1 rank"),
    ("a long number", of_rank("mp_rank_00", set_args(pipeline_model_parallel_size=10**500)), "expected number of"),
    (
        "a long iteration",
        of_rank("mp_rank_00", lambda state: state.update(iteration=10**500)),
        "found 3: ",
    ),
    ("a longer one", of_rank("mp_rank_00", lambda state: state.update(iteration=10**5000)), "pickle opcode"),
    (
        "a layer's number",
        lambda root: [of_rank(rank.name, add_layer(10**12))(root) for rank in root.iterdir()],
        "found 1000000000000",
    ),
    (
        "no dict",
        lambda root: torch.save([1, 2], root / "mp_rank_00/model_optim_rng.pt"),
        "the file does not contain a dict",
    ),
    (
        "no archive",
        lambda root: (root / "mp_rank_00/model_optim_rng.pt").write_bytes(b"PK"),
        "an archive of at least",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [fault[1:] for fault in HOSTILE], ids=[fault[0] for fault in HOSTILE])
def test_numbers_of_strangers_cost_nothing(made: Produced, tmp_path: Path, damage: Damage, message: str) -> None:
    root = copied(made, "swiglu", tmp_path)
    damage(root)
    with pytest.raises(CkptError, match=message) as raised:
        ckptkit.open(root)
    assert raised.value.exit_code == 3


def with_old_layer(state: dict[str, Any]) -> None:
    state.update(checkpoint_version=1.0)
    state["model"]["decoder.layers.0.attention.query_key_value.bias"] = torch.ones(12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_old_layer, "checkpoint version 1.0: `args` do not give"),
        (rename_tensor, "there is no rule for how the tensor is split over 2 ranks"),
        (set_args(group_query_attention=True, num_query_groups=1), "expected at least 2 groups of queries"),
        (set_args(num_experts=4, expert_tensor_parallel_size=1), "expected experts split over"),
    ],
)
def test_no_rule_is_guessed(
    made: Produced, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    root = copied(made, "moe", tmp_path)
    for rank in ("mp_rank_00", "mp_rank_01"):
        edit(root / rank / "model_optim_rng.pt", change)
    with pytest.raises(CkptError, match=message) as raised:
        ckptkit.open(root)
    assert raised.value.code == "unsupported"


def test_a_rank_of_several_is_no_checkpoint(made: Produced) -> None:
    for path in ("mp_rank_01", "mp_rank_01/model_optim_rng.pt"):
        with pytest.raises(CkptError, match="this is the directory of one rank") as raised:
            ckptkit.open(made.root / "dense" / "legacy" / STEP / path)
        assert "pass the directory above" in str(raised.value.hint)


def test_an_optimizer_that_may_be_in_another_order_is_carried_as_it_is(made: Produced, tmp_path: Path) -> None:
    root = copied(made, "swiglu", tmp_path)
    edit(
        root / "mp_rank_01" / "model_optim_rng.pt",
        lambda state: state["optimizer"]["state"][0].update(exp_avg=torch.ones(3)),
    )
    opened = ckptkit.open(root)
    assert "rank_state.1.optimizer.state.0.exp_avg" in opened
    assert not below(opened, "optimizer.")
    assert_same(below(opened, "model."), whole(made, "swiglu"))
