"""A checkpoint is held against itself: each inconsistency is found in every format, and nothing else is accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.examination import examine_checkpoint, examine_layout
from ckptkit.checkpoints.examination.facts import Certainty
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import Layout
from tests.checkpoints.examination.inconsistent import CHANGES, OF_WEIGHTS, WRITERS, save_dcp, save_pt, tree_with
from tests.command import ckptkit as run


def codes_in(path: Path) -> set[str]:
    return {one.code for one in examine_layout(Checkpoint.at(path).layout)}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_an_inconsistency_is_found_in_every_format(change: str | None, writer: str, tmp_path: Path) -> None:
    if writer == "hf" and change is not None and change not in OF_WEIGHTS:
        pytest.skip("a model alone has no states")
    WRITERS[writer](tree_with(change), tmp_path / "step-1")
    expected = CHANGES[change][1] if change else set()
    assert codes_in(tmp_path / "step-1") == expected


def test_states_by_index_are_compared_with_all_parameters(tmp_path: Path) -> None:
    tree = tree_with("state_of_one_rank")
    order = list(tree["model"])
    states = tree["optimizer"]["state"]
    tree["optimizer"]["state"] = {i: states[name] for i, name in enumerate(order)}
    tree["optimizer"]["param_groups"][0]["params"] = list(range(len(order)))
    save_pt(tree, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == {"state_size"}
    tree["optimizer"]["param_groups"][0]["param_names"] = order
    save_pt(tree, tmp_path / "step-2")
    assert codes_in(tmp_path / "step-2") == {"state_shape"}


def test_states_by_index_may_be_of_weights_in_a_file_beside(tmp_path: Path) -> None:
    """As of sentence-transformers, whose `2_Dense/` is trained by the same optimizer."""
    layer = {f"layers.{i}.weight": torch.zeros(4, 4) for i in range(4)}
    save_file(layer, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    states = {i: {"exp_avg": torch.zeros(4, 4), "exp_avg_sq": torch.zeros(4, 4)} for i in range(4)}
    states[4] = {"exp_avg": torch.zeros(2, 4), "exp_avg_sq": torch.zeros(2, 4)}
    torch.save({"state": states, "param_groups": [{"lr": 0.1, "params": [*range(5)]}]}, tmp_path / "optimizer.pt")
    checkpoint = Checkpoint.open(tmp_path)
    assert {one.code for one in examine_checkpoint(checkpoint)} == {"state_size"}
    (tmp_path / "2_Dense").mkdir()
    save_file({"linear.weight": torch.zeros(2, 4)}, tmp_path / "2_Dense/model.safetensors", {"format": "pt"})
    assert examine_checkpoint(Checkpoint.open(tmp_path)) == ()


def by_index(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with numbers for the names of parameters."""
    optimizer = tree["optimizer"]
    optimizer["state"] = dict(enumerate(optimizer["state"].values()))
    optimizer["param_groups"][0]["params"] = list(optimizer["state"])
    return tree


@pytest.mark.parametrize(("wrong", "code"), [(1, "state_size"), (5, "state_size"), (14, "foreign_states")])
def test_states_by_index_of_no_parameter(wrong: int, code: str, tmp_path: Path) -> None:
    """A few are a problem. If most fit nothing, the optimizer may be that of another model: a finding."""
    tree = by_index(tree_with(None))
    for i in range(wrong):
        tree["optimizer"]["state"][i] |= {kind: zeros(5, 7 + i) for kind in ("exp_avg", "exp_avg_sq")}
    save_pt(tree, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == {code}
    (checked,) = ckptkit.verify(tmp_path / "step-1")
    assert checked.is_ok is (code == "foreign_states")
    assert {one.code for one in ckptkit.doctor(tmp_path / "step-1").findings} == {code}


def test_states_of_experts_that_the_file_has_one_by_one(tmp_path: Path) -> None:
    """Version 5 of transformers trains the experts of a layer as one parameter, and saves each by itself."""
    weights = {"gate.weight": zeros(4, 6), **{f"experts.{i}.up.weight": zeros(8, 6) for i in range(4)}}
    states = {0: {"exp_avg": zeros(4, 6)}, 1: {"exp_avg": zeros(4, 8, 6)}}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    save_pt({"model": weights, "optimizer": optimizer}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == set()


@pytest.mark.parametrize(("counted", "skipped", "codes"), [(3, 0, set()), (4, 2, set()), (4, 0, {"other_step"})])
@pytest.mark.parametrize("step", [3, torch.tensor(3.0), torch.tensor(3), torch.tensor(3, dtype=torch.int32)])
def test_the_optimizers_step_beside_deepspeeds_count(
    counted: int, skipped: int, codes: set[str], step: Any, tmp_path: Path
) -> None:
    tree = tree_with(None)
    for state in tree["optimizer"]["state"].values():
        state["step"] = step
    save_pt(tree | {"global_steps": counted, "skipped_steps": skipped}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == codes
    (checked,) = ckptkit.verify(tmp_path / "step-1")
    assert checked.is_ok
    assert any("expected step 4" in note for note in checked.notes) is bool(codes)


@pytest.mark.parametrize("counted", [2**63, 2**200, 0, "3", None, 2.5])
def test_counts_that_prove_nothing(counted: Any, tmp_path: Path) -> None:
    tree = tree_with(None)
    for state in tree["optimizer"]["state"].values():
        state["step"] = torch.tensor(3.0)
    save_pt(tree | {"global_steps": counted, "skipped_steps": 0}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == set()


def step(optimizer: Callable[[nn.Module], torch.optim.Optimizer], root: Path) -> Layout:
    """Train a small model for a step, and save it as torch's own functions do."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    made = optimizer(net)
    net(torch.arange(12)).square().sum().backward()
    made.step()
    save_dcp({"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, made)}, root)
    return Checkpoint.at(root).layout


@pytest.mark.parametrize(
    "kind",
    [
        *(torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adadelta),
        *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    ],
)
def test_optimizers_of_torch_are_consistent(kind: Any, tmp_path: Path) -> None:
    options: dict[Any, dict[str, Any]] = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.AdamW: {"amsgrad": True}}
    more = options.get(kind, {})
    layout = step(lambda net: kind(net.parameters(), lr=1e-3, **more), tmp_path / "step-1")
    assert examine_layout(layout) == ()


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


ADAM = {"exp_avg": zeros(8, 6), "exp_avg_sq": zeros(8, 6)}
SMALL = {"exp_avg": zeros(6), "exp_avg_sq": zeros(6)}


@pytest.mark.parametrize(
    ("a", "b", "vector", "settings"),
    [
        (ADAM, {"momentum_buffer": zeros(8, 6)}, SMALL, {}),
        (ADAM, {"exp_avg": zeros(8, 6), "exp_avg_sq_row": zeros(8), "exp_avg_sq_col": zeros(6)}, SMALL, {}),
        ({"exp_avg": zeros(8, 6)}, {"exp_avg": zeros(8, 6)}, SMALL, {}),
        ({"exp_avg": zeros(8, 6)}, {"exp_avg": zeros(8, 6)}, {"exp_avg": zeros(6)}, {}),
        (ADAM, {**ADAM, "master_param": zeros(8, 6)}, SMALL, {"amsgrad": False}),
        (ADAM, {**ADAM, "max_exp_avg_sq": zeros(8, 6)}, SMALL, {"amsgrad": True}),
        ({"exp_avg": zeros(8, 6), "exp_avg_var": zeros(8, 6)}, {}, {}, {"amsgrad": False}),
        (
            {"state1": zeros(48), "state2": zeros(48)},
            {"state1": zeros(48), "state2": zeros(48), "qmap1": zeros(256)},
            {},
            {},
        ),
        (ADAM, {}, SMALL, {"amsgrad": False}),
    ],
    ids=["muon", "adafactor", "by axes", "lion", "masters", "amsgrad of a group", "adabelief", "8-bit", "no gradient"],
)
@pytest.mark.parametrize("is_flat", [False, True])
def test_parameters_with_other_kinds_of_states_on_purpose(
    a: dict[str, Any],
    b: dict[str, Any],
    vector: dict[str, Any],
    settings: dict[str, Any],
    is_flat: bool,
    tmp_path: Path,
) -> None:
    states = {"a.weight": a, "b.weight": b, "norm.weight": vector}
    states = {name: {"step": torch.tensor(1.0), **state} for name, state in states.items() if state}
    group = {"lr": 0.1, **settings, "params": ["a.weight", "b.weight", "norm.weight"]}
    optimizer: dict[str, Any] = {"state": states, "param_groups": [group]}
    if is_flat:
        flat = {f"state.{name}.{kind}": one for name, state in states.items() for kind, one in state.items()}
        optimizer = flat | {f"param_groups.{name}.lr": 0.1 for name in group["params"]}
    model = {"a.weight": zeros(8, 6), "b.weight": zeros(8, 6), "norm.weight": zeros(6)}
    save_dcp({"model": model, "optimizer": optimizer}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == set()


@pytest.mark.parametrize(
    ("state", "settings"),
    [
        ({"exp_avg": zeros(8, 6), "exp_avg_sq_row": zeros(8), "exp_avg_sq_col": zeros(6)}, {}),
        ({"state1": zeros(48).byte(), "absmax1": zeros(1), "qmap1": zeros(256)}, {}),
        ({"exp_avg": zeros(24).byte(), "exp_avg_sq": zeros(24).byte(), "absmax1": zeros(1)}, {}),
        ({"exp_avg": zeros(8, 6), "exp_avg_sq": zeros(8, 6), "GG": [zeros(8, 8), zeros(6, 6)], "Q": [zeros(8, 8)]}, {}),
        ({"exp_avg": zeros(2, 6), "exp_avg_sq": zeros(2, 6)}, {"rank": 2, "update_proj_gap": 200, "proj_type": "std"}),
        ({"exp_avg": zeros(8, 6), "exp_avg_sq": zeros(8, 1)}, {}),
        ({"exp_avg": zeros(8, 6), "exp_avg_sq": torch.tensor(0.0)}, {}),
        ({"exp_avg": zeros(48), "exp_avg_sq": zeros(48)}, {}),
        ({"block_0": {"exp_avg": zeros(4, 6), "shampoo": {"factor": zeros(4, 4)}}}, {}),
        ({"momentum_buffer": zeros(8, 6), "second_momentum_buffer": zeros(8, 1)}, {}),
        ({"my_sketch": zeros(3)}, {}),
    ],
    ids=["adafactor", "8-bit", "4-bit", "soap", "galore", "rows", "layer", "flat", "blocks", "normuon", "unknown"],
)
@pytest.mark.parametrize("save", [save_dcp, save_pt])
def test_states_of_other_shapes_on_purpose(
    state: dict[str, Any], settings: dict[str, Any], save: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    group = {"lr": 0.1, "params": ["a.weight"], **settings}
    optimizer = {"state": {"a.weight": {"step": torch.tensor(1.0), **state}}, "param_groups": [group]}
    save({"model": {"a.weight": zeros(8, 6), "b.weight": zeros(5)}, "optimizer": optimizer}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == set()


@pytest.mark.parametrize(
    "names",
    [
        ["layers.0.weight", "layers.2.weight", "layers.4.weight", "layers.6.weight"],  # with activations between
        ["features.0.conv.weight", "features.7.conv.weight", "features.9.conv.weight"],
        ["layers.4.attn.weight", "layers.5.attn.weight", "layers.6.attn.weight"],  # a stage of a pipeline
        ["blocks.0.conv.weight", "blocks.2.conv.weight", "blocks.4.conv.weight", "blocks.6.conv.weight"],
        [*(f"layers.{i}.attn.weight" for i in range(3)), "layers.1000000000000.attn.weight"],  # too many to list
    ],
)
def test_numbers_that_may_be_missing(names: list[str], tmp_path: Path) -> None:
    save_dcp({"model": {name: zeros(2, 2) for name in names}}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == set()


def test_a_list_of_unequal_modules_may_have_gaps(tmp_path: Path) -> None:
    """An encoder of audio (Encodec): convolutions that widen, blocks between them, and activations without tensors."""
    weights: dict[str, Any] = {}
    for i in range(5):
        weights |= {f"layers.{3 * i}.conv.weight": zeros(2**i, 4), f"layers.{3 * i + 1}.block.1.weight": zeros(2**i, 2)}
    save_pt({"model": weights}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == set()


@pytest.mark.parametrize("above", ["", "moe.", ".", ".moe."])
def test_the_router_beside_its_experts(above: str, tmp_path: Path) -> None:
    experts = {f"{above}experts.{i}.w1.weight": zeros(8, 6) for i in range(4)}
    save_file({**experts, f"{above}gate.weight": zeros(3, 6)}, tmp_path / "model.safetensors")
    assert codes_in(tmp_path) == {"router"}


@pytest.mark.parametrize(("rows", "codes"), [(6, set()), (4, set()), (5, {"router"})])
def test_a_router_may_have_rows_for_shared_experts(rows: int, codes: set[str], tmp_path: Path) -> None:
    weights = {"mlp.experts.down_proj": zeros(4, 6, 8), "mlp.shared_experts.down_proj": zeros(2, 6, 8)}
    save_file({**weights, "mlp.gate.weight": zeros(rows, 7)}, tmp_path / "model.safetensors")
    assert codes_in(tmp_path) == codes


def test_an_embedding_of_no_tokens_is_only_likely_wrong(tmp_path: Path) -> None:
    save_dcp({"model": {"types.weight": zeros(0, 6), "b.weight": zeros(5)}}, tmp_path / "step-1")
    (found,) = examine_layout(Checkpoint.at(tmp_path / "step-1").layout)
    assert (found.code, found.certainty) == ("empty_tensor", Certainty.LIKELY)


@pytest.mark.parametrize("change", CHANGES)
def test_doctor_and_verify(change: str, tmp_path: Path) -> None:
    """Doctor finds all of it; for verify the certain ones are problems, and the others notes. Each is said once."""
    save_dcp(tree_with(change), tmp_path / "step-1")
    odd = examine_layout(Checkpoint.at(tmp_path / "step-1").layout)
    diagnosis = ckptkit.doctor(tmp_path / "step-1")
    found = [one for one in diagnosis.findings if one.code in CHANGES[change][1]]
    noted = [one for one in odd if one.certainty is Certainty.NOTE]
    assert [one.message for one in found] == [one.message for one in odd if one not in noted]
    assert {one.message_with_tensor for one in noted} <= {*diagnosis.notes}
    assert bool(noted) is (change == "short_head")
    certain = [one for one in odd if one.certainty is Certainty.CERTAIN]
    for fast in (True, False):
        (checked,) = ckptkit.verify(tmp_path / "step-1", fast=fast)
        assert [one.code for one in checked.problems] == ["mismatch"] * len(certain)
        assert {one.message_with_tensor for one in odd if one not in certain} <= {*checked.notes}


@pytest.mark.slow
def test_a_prefix_is_taken_off_by_the_fix(tmp_path: Path) -> None:
    wrapped = ("checkpointed_states", "compiled_states", "ddp_states")
    for change in (*wrapped, "prefixed_states", "prefixed_state_of_one"):
        root = tmp_path / change / "step-1"
        save_dcp(tree_with(change), root)
        (found,) = ckptkit.doctor(root).findings
        assert found.code == ("wrapped_state" if change in wrapped else "prefixed_state")
        assert found.fixed_by is not None
        assert run(*found.fixed_by.process_arguments[1:]).returncode == 0
        assert codes_in(root.with_name("step-1-fixed")) == set()


def test_exports_warn(tmp_path: Path) -> None:
    save_dcp(tree_with("missing_experts"), tmp_path / "step-1")
    done = ckptkit.consolidate(tmp_path / "step-1", tmp_path / "out")
    assert any("expected 2 rows, one for each expert, found 4" in note for note in done.warnings)
    save_dcp(tree_with("state_of_one_rank"), tmp_path / "step-2")
    done = ckptkit.consolidate(tmp_path / "step-2", tmp_path / "model")
    assert not any("expected shape" in note for note in done.warnings)  # the model alone has no states
    done = ckptkit.convert(tmp_path / "step-2", tmp_path / "copy", to="dcp")
    assert any("expected shape [4, 8, 6] of its parameter, found [2, 8, 6]" in note for note in done.warnings)
    with pytest.raises(Mismatch, match="expected shape") as raised:
        ckptkit.convert(tmp_path / "step-2", tmp_path / "universal", to="universal")
    assert raised.value.path == tmp_path / "step-2"


def test_prune_does_not_count_it(tmp_path: Path) -> None:
    for number, change in ((1, None), (2, None), (3, "state_of_one_rank")):
        save_dcp(tree_with(change), tmp_path / "run" / f"step-{number}")
    planned = ckptkit.prune(tmp_path / "run", keep_last=1)
    assert [entry.path.name for entry in planned.keep] == ["step-2"]
    assert [entry.path.name for entry in planned.other] == ["step-3"]
    assert "expected shape" in planned.other[0].reason


def test_the_training_point_of_schedule_free(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    for mode in (True, False):
        group = {"lr": 0.1, "betas": (0.9, 0.999), "train_mode": mode, "params": ["a.weight"]}
        state = {"a.weight": {"z": torch.randn(4, 4), "exp_avg_sq": torch.rand(4, 4)}}
        tree = {"model": {"a.weight": weight}, "optimizer": {"state": state, "param_groups": [group]}}
        for save in (save_dcp, save_pt):
            root = tmp_path / f"{save.__name__}-{mode}"
            save(tree, root)
            done = ckptkit.consolidate(root, tmp_path / f"out-{root.name}")
            assert any("schedule-free" in note for note in done.warnings) is mode
            assert ckptkit.doctor(root).is_ok
            assert any("schedule-free" in note for note in ckptkit.doctor(root).notes) is mode
            for to in ("dcp", "pt"):
                whole = ckptkit.convert(root, tmp_path / f"whole-{root.name}-{to}", to=to)
                assert not any("schedule-free" in note for note in whole.warnings)
                alone = ckptkit.convert(root, tmp_path / f"model-{root.name}-{to}", to=to, include="model.*")
                assert (
                    any("found True: 1 of 1 weights are those for training" in note for note in alone.warnings) is mode
                )


def test_the_training_point_is_said_of_deltas_and_never_all_that_is_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in range(3):
        group = {"lr": 0.1, "betas": (0.9, 0.999), "train_mode": True, "params": ["a.weight"]}
        states = {"a.weight": {"z": zeros(32, 32), "exp_avg_sq": zeros(32, 32)}}
        model = {"a.weight": zeros(32, 32)}
        model["a.weight"][0, 0] = number
        save_dcp({"model": model, "optimizer": {"state": states, "param_groups": [group]}}, run / f"step-{number}")
    done = ckptkit.delta(run / "step-0", run / "step-1", tmp_path / "delta")
    assert sum("schedule-free" in note for note in done.notes) == 2
    planned = ckptkit.prune(run, keep_last=1, demote=True)
    assert not planned.demote
    assert sum("cannot be demoted: expected `train_mode` False" in one.reason for one in planned.keep) == 2


@pytest.mark.parametrize("writer", ["dcp", "joined", "ranks"])
@pytest.mark.parametrize("change", ["one_without_second_moment", "one_without_moments", "all_without_second_moment"])
def test_formats_of_all_states_refuse_incomplete_ones(change: str, writer: str, tmp_path: Path) -> None:
    WRITERS[writer](tree_with(change), tmp_path / "step-1")
    for to in ("universal", "ranks"):
        with pytest.raises(Mismatch, match=r"expected the states .*exp_avg_sq.*, found only"):
            ckptkit.convert(tmp_path / "step-1", tmp_path / to, to=to)
        assert not (tmp_path / to).exists()


def compiled_state_of_one(tree: dict[str, Any]) -> None:
    states = tree["optimizer"]["state"]
    states["_orig_mod.norm.weight"] = states.pop("norm.weight")


def ghost_for_another(tree: dict[str, Any]) -> None:
    CHANGES["ghost"][0](tree)
    del tree["optimizer"]["state"]["norm.weight"]


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        *(CHANGES[name][0] for name in ("prefixed_state_of_one", "renamed_state")),
        compiled_state_of_one,
        ghost_for_another,
    ],
)
def test_no_zeros_for_a_state_under_another_name(
    change: Callable[[dict[str, Any]], None], is_flat: bool, tmp_path: Path
) -> None:
    tree = tree_with(None)
    change(tree)
    if is_flat:
        states, (group,) = tree["optimizer"]["state"], tree["optimizer"]["param_groups"]
        flat = {f"state.{name}.{kind}": one for name, state in states.items() for kind, one in state.items()}
        tree["optimizer"] = flat | {f"param_groups.{name}.lr": 0.1 for name in group["params"]}
    save_dcp(tree, tmp_path / "step-1")
    with pytest.raises(Unsupported, match=r"but no (model has|group lists) it; `norm.weight` has no state"):
        ckptkit.convert(tmp_path / "step-1", tmp_path / "no", to="dcp", complete_optimizer=True)
    (found,) = ckptkit.doctor(tmp_path / "step-1").findings
    assert found.code in ("prefixed_state", "unknown_parameter", "wrapped_state")
    assert "never received a gradient" not in found.message


@pytest.mark.parametrize(
    "beside",
    [
        {"losses": [torch.tensor(1.0), torch.tensor(2.0)]},
        {"losses": (torch.tensor(1.0), 2)},
        {"losses": {0: torch.tensor(1.0)}},
        {"losses": {"0": torch.tensor(1.0)}},
        {"ema": {"shadow_params": [zeros(5), zeros(5, 7)]}},
    ],
)
@pytest.mark.parametrize("save", [save_pt, save_dcp])
def test_a_list_of_tensors_is_not_the_parameters_of_a_numbered_optimizer(
    beside: dict[str, Any], save: Callable[[dict[str, Any], Path], None], tmp_path: Path
) -> None:
    save({**by_index(tree_with(None)), **beside}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == set()


def test_numbers_as_names_are_names(tmp_path: Path) -> None:
    """An `nn.ParameterList` is the model, and torch's functions name the states."""
    net = nn.ParameterList([zeros(2, 3), zeros(4)])
    optimizer = torch.optim.Adam(net.parameters())
    (net[0].sum() + net[1].sum()).backward()
    optimizer.step()
    states: Any = get_optimizer_state_dict(net, optimizer)
    states["state"]["1"]["exp_avg"] = zeros(5)
    save_dcp({"model": get_model_state_dict(net), "optim": states}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == {"state_shape"}


def keep(weights: dict[str, Tensor]) -> None:
    """Change nothing."""


def end_without_keys(weights: dict[str, Tensor]) -> None:
    """The last layer shares keys and values of another."""
    del weights["layers.5.k.weight"], weights["layers.5.v.weight"]


def dense_first(weights: dict[str, Tensor]) -> None:
    """The first layer is dense and wide."""
    weights["layers.0.up.weight"] = zeros(9, 4)


def full_attention(weights: dict[str, Tensor]) -> None:
    """One layer of full attention among windows has larger heads."""
    weights |= {"layers.2.q.weight": zeros(8, 4), "layers.2.k.weight": zeros(8, 4)}


def other_kind(weights: dict[str, Tensor]) -> None:
    """One layer of attention among layers of states."""
    del weights["layers.2.up.weight"]
    weights["layers.2.gate.weight"] = zeros(4, 4)


def alternating(weights: dict[str, Tensor]) -> None:
    """Every second layer lacks a norm, and has other heads."""
    for layer in (1, 3, 5):
        del weights[f"layers.{layer}.norm.weight"]
        weights[f"layers.{layer}.k.weight"] = zeros(2, 4)


@pytest.mark.parametrize(
    "change",
    [keep, end_without_keys, dense_first, full_attention, other_kind, alternating],
    ids=lambda one: one.__name__,
)
def test_layers_that_differ_on_purpose(change: Callable[[dict[str, Tensor]], None], tmp_path: Path) -> None:
    weights = {
        f"layers.{layer}.{name}.weight": zeros(*shape)
        for layer in range(6)
        for name, shape in {"q": (4, 4), "k": (4, 4), "v": (4, 4), "up": (6, 4), "norm": (4,)}.items()
    }
    change(weights)
    save_pt({"model": weights}, tmp_path / "step-1")
    assert codes_in(tmp_path / "step-1") == set()
