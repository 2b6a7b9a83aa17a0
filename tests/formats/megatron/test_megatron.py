"""Megatron's legacy directories of ranks, joined, against the library's own loader; and what is wrong with others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptkit
from ckptkit.errors import CkptError
from ckptkit.ops.consolidate import consolidate
from ckptkit.ops.verify import verify
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
    done = consolidate(made.root / "swiglu" / "legacy", tmp_path / "out")
    assert any("Megatron's own" in note for note in done.notes)
    assert_same(below(ckptkit.open(tmp_path / "out"), ""), whole(made, "swiglu"))
    (found,) = verify(made.root / "swiglu" / "legacy")
    assert found.is_ok
    assert found.unchecked_bytes == 0


def test_it_becomes_dcp_for_more_ranks(made: Produced, tmp_path: Path) -> None:
    done = ckptkit.convert(made.root / "moe" / "legacy", tmp_path / STEP, to="dcp", world_size=3)
    assert any(note.startswith("dropped `rank_state`") for note in done.notes)
    assert not (tmp_path / STEP / "mp_rank_00").exists()
    opened = ckptkit.open(tmp_path / STEP)
    assert_same(below(opened, "model."), whole(made, "moe"))
    found = ckptkit.diff(tmp_path / STEP, made.root / "moe" / "legacy")
    assert not found.different
    assert all(name.startswith("rank_state.") for name in (*found.only_in_a, *found.only_in_b))


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
    ("swiglu", "missing file", lambda root: (root / "mp_rank_01/model_optim_rng.pt").unlink(), "no `model_optim_rng"),
    (
        "swiglu",
        "rank of another job",
        lambda root: shutil.copytree(root / "mp_rank_00", root / "mp_rank_02"),
        "mp_rank_02 beside the 2 x 1 x 1 ranks",
    ),
    (
        "swiglu",
        "names of two jobs",
        lambda root: shutil.copytree(root / "mp_rank_00", root / "mp_rank_00_001"),
        "several jobs",
    ),
    ("swiglu", "another step", of_rank("mp_rank_01", lambda state: state.update(iteration=4)), "iteration is 4"),
    ("swiglu", "another shape", of_rank("mp_rank_01", cut_row), "do not fit together"),
    (
        "swiglu",
        "a tensor of one rank",
        of_rank("mp_rank_01", lambda state: state["model"].pop("decoder.final_layernorm.weight")),
        "not every tensor-parallel rank has it",
    ),
    (
        "stages",
        "missing stage",
        lambda root: shutil.rmtree(root / "mp_rank_00_001"),
        "1 of 2 ranks are missing: mp_rank_00_001",
    ),
    ("stages", "layers", of_rank("mp_rank_00_000", set_args(num_layers=5)), "4 layers, the arguments say 5"),
    ("swiglu", "no model", of_rank("mp_rank_00", lambda state: state.pop("model")), "no `model` in it"),
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
        consolidate(root, tmp_path / "out")
    assert raised.value.exit_code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(checkpoint_version=1.0), "checkpoint version 1.0"),
        (lambda state: state.pop("checkpoint_version"), "checkpoint version 0"),
        (rename_tensor, "no rule says how it is split over 2 ranks"),
        (set_args(group_query_attention=True, num_query_groups=1), "fewer groups of queries"),
        (set_args(num_experts=4, expert_tensor_parallel_size=1), "experts are split otherwise"),
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
        with pytest.raises(CkptError, match="one of several ranks") as raised:
            ckptkit.open(made.root / "dense" / "legacy" / STEP / path)
        assert "name the directory above" in str(raised.value.hint)


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
