"""Make checkpoints whose entries contradict each other, in several formats. Written by torch and safetensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.faults import trained

Tree = dict[str, Any]
EXPERTS, LAYERS = 4, 4


def consistent() -> Tree:
    """A model of four layers with experts, and an Adam of all its parameters."""
    weights = {"embed.weight": torch.randn(12, 6), "norm.weight": torch.randn(6)}
    for i in range(LAYERS):
        weights |= {
            f"layers.{i}.attn.wq.weight": torch.randn(6, 6),
            f"layers.{i}.moe.gate.weight": torch.randn(EXPERTS, 6),
            f"layers.{i}.moe.experts.w1": torch.randn(EXPERTS, 8, 6),
            f"layers.{i}.moe.experts.w2": torch.randn(EXPERTS, 6, 8),
        }
    states = {
        name: {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(one), "exp_avg_sq": torch.zeros_like(one)}
        for name, one in weights.items()
    }
    group = {"lr": 0.1, "betas": (0.9, 0.999), "params": list(weights)}
    return {"model": weights, "optimizer": {"state": states, "param_groups": [group]}}


def state_of_one_rank(tree: Tree) -> None:
    """Expert parallelism saved the optimizer states of one rank's experts."""
    for name, state in tree["optimizer"]["state"].items():
        if "experts" in name:
            state |= {kind: state[kind][:2].clone() for kind in ("exp_avg", "exp_avg_sq")}


def state_of_one_expert(tree: Tree) -> None:
    """As many ranks as experts: each has one."""
    for name, state in tree["optimizer"]["state"].items():
        if "experts" in name:
            state |= {kind: state[kind][:1].clone() for kind in ("exp_avg", "exp_avg_sq")}


def empty_states(tree: Tree) -> None:
    """A rank without a part of a parameter saved its states."""
    tree["optimizer"]["state"]["norm.weight"]["exp_avg"] = torch.empty(0)


def transposed_state(tree: Tree) -> None:
    """Rows and columns of a state are swapped."""
    state = tree["optimizer"]["state"]["embed.weight"]
    state["exp_avg"] = state["exp_avg"].T.contiguous()


def rename_states(tree: Tree, new_name: Callable[[str], str]) -> None:
    optimizer = tree["optimizer"]
    optimizer["state"] = {new_name(name): state for name, state in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [new_name(name) for name in group["params"]]


def checkpointed_states(tree: Tree) -> None:
    """Activation checkpointing is in the optimizer's names alone."""
    rename_states(tree, lambda name: name.replace(".attn.", "._checkpoint_wrapped_module.attn."))


def compiled_states(tree: Tree) -> None:
    """torch.compile is in the optimizer's names alone."""
    rename_states(tree, lambda name: f"_orig_mod.{name}")


def ddp_states(tree: Tree) -> None:
    """DDP is in the optimizer's names alone."""
    rename_states(tree, lambda name: f"module.{name}")


def compiled_weights(tree: Tree) -> None:
    """torch.compile is in the weights' names alone."""
    tree["model"] = {f"_orig_mod.{name}": one for name, one in tree["model"].items()}


def empty_group(tree: Tree) -> None:
    """A frozen tower has a group of no parameters."""
    tree["optimizer"]["param_groups"].append({"lr": 0.2, "betas": (0.9, 0.999), "params": []})


def missing_layer(tree: Tree) -> None:
    """A layer is in neither weights nor states."""
    for part in (tree["model"], tree["optimizer"]["state"]):
        for name in [name for name in part if name.startswith("layers.2.")]:
            del part[name]
    group = tree["optimizer"]["param_groups"][0]
    group["params"] = list(tree["model"])


def missing_experts(tree: Tree) -> None:
    """The routers choose among more experts than there are."""
    for name in [name for name in tree["model"] if "experts" in name]:
        tree["model"][name] = tree["model"][name][:2].clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            tree["optimizer"]["state"][name][kind] = torch.zeros_like(tree["model"][name])


def experts_of_one_matrix(tree: Tree) -> None:
    """Only one of two matrices has all experts."""
    name = "layers.1.moe.experts.w2"
    tree["model"][name] = tree["model"][name][:2].clone()
    for kind in ("exp_avg", "exp_avg_sq"):
        tree["optimizer"]["state"][name][kind] = torch.zeros_like(tree["model"][name])


def empty_weight(tree: Tree) -> None:
    """ZeRO 3 left a placeholder in the place of a weight."""
    tree["model"]["layers.1.attn.wq.weight"] = torch.empty(0)
    for kind in ("exp_avg", "exp_avg_sq"):
        tree["optimizer"]["state"]["layers.1.attn.wq.weight"][kind] = torch.empty(0)


def one_without_second_moment(tree: Tree) -> None:
    """A state of one matrix was lost."""
    del tree["optimizer"]["state"]["layers.1.attn.wq.weight"]["exp_avg_sq"]


def one_without_moments(tree: Tree) -> None:
    """Only the step of one matrix is left."""
    tree["optimizer"]["state"]["layers.1.attn.wq.weight"] = {"step": torch.tensor(1.0)}


def all_without_second_moment(tree: Tree) -> None:
    """Each state of an AdamW of torch was lost: it has `amsgrad` in its groups."""
    tree["optimizer"]["param_groups"][0]["amsgrad"] = False
    for state in tree["optimizer"]["state"].values():
        del state["exp_avg_sq"]


def prefixed_states(tree: Tree) -> None:
    """The optimizer was built of a model within another module."""
    rename_states(tree, lambda name: f"net.{name}")


def one_without_step(tree: Tree) -> None:
    """A matrix has no `step`."""
    del tree["optimizer"]["state"]["layers.1.attn.wq.weight"]["step"]


def most_without_step(tree: Tree) -> None:
    """Only one matrix has a `step`."""
    for name, state in tree["optimizer"]["state"].items():
        if name != "layers.1.attn.wq.weight":
            del state["step"]


def prefixed_state_of_one(tree: Tree) -> None:
    """One state alone has another name than its group lists."""
    state = tree["optimizer"]["state"]
    state["net.norm.weight"] = state.pop("norm.weight")


def prefixed_weights(tree: Tree) -> None:
    """The model was saved within another module."""
    tree["model"] = {f"net.{name}": one for name, one in tree["model"].items()}


def ghost(tree: Tree) -> None:
    """A parameter has a state, is in a group, and is no weight."""
    tree["optimizer"]["state"]["ghost"] = deepcopy(tree["optimizer"]["state"]["norm.weight"])
    tree["optimizer"]["param_groups"][0]["params"].append("ghost")


def renamed_state(tree: Tree) -> None:
    """A parameter was renamed in the optimizer, and in one of two places only."""
    state = tree["optimizer"]["state"]
    state["scale"] = state.pop("norm.weight")


def listed_twice(tree: Tree) -> None:
    """A group lists a tied parameter twice."""
    tree["optimizer"]["param_groups"][0]["params"].append("norm.weight")


def unlisted_state(tree: Tree) -> None:
    """No group lists a parameter that has a state."""
    tree["optimizer"]["param_groups"][0]["params"].remove("norm.weight")


def replace_weight(tree: Tree, name: str, weight: torch.Tensor | None) -> None:
    """Replace or remove a weight and its states."""
    states = tree["optimizer"]["state"]
    if weight is None:
        del tree["model"][name], states[name]
        tree["optimizer"]["param_groups"][0]["params"].remove(name)
        return
    tree["model"][name] = weight
    zero = torch.zeros_like(weight, dtype=torch.float32)
    states[name] = {"step": torch.tensor(1.0), "exp_avg": zero, "exp_avg_sq": zero.clone()}
    group = tree["optimizer"]["param_groups"][0]["params"]
    group += [] if name in group else [name]


def missing_weight(tree: Tree) -> None:
    """One layer lacks a tensor that the others have."""
    replace_weight(tree, "layers.2.attn.wq.weight", None)


def wide_weight(tree: Tree) -> None:
    """One layer's tensor has another shape than the others'."""
    replace_weight(tree, "layers.2.attn.wq.weight", torch.randn(12, 6))


def packed_weight(tree: Tree) -> None:
    """One layer's tensor was quantized, without a scale."""
    replace_weight(tree, "layers.1.attn.wq.weight", torch.zeros(6, 6, dtype=torch.int8))


def short_bias(tree: Tree) -> None:
    """One rank's rows of a bias were saved."""
    replace_weight(tree, "head.weight", torch.randn(5, 6))
    replace_weight(tree, "head.bias", torch.randn(3))


def short_head(tree: Tree) -> None:
    """The embedding was resized, and the head was not."""
    replace_weight(tree, "embed_tokens.weight", tree["model"]["embed.weight"].clone())
    replace_weight(tree, "lm_head.weight", torch.randn(10, 6))


CHANGES: dict[str, tuple[Callable[[Tree], None], set[str]]] = {
    change.__name__: (change, codes)
    for change, codes in (
        (state_of_one_rank, {"state_shape"}),
        (state_of_one_expert, {"state_shape"}),
        (empty_states, {"state_shape"}),
        (transposed_state, {"state_shape"}),
        (checkpointed_states, {"wrapped_state"}),
        (compiled_states, {"wrapped_state"}),
        (ddp_states, {"wrapped_state"}),
        (compiled_weights, {"wrapped_weight"}),
        (empty_group, {"empty_group"}),
        (one_without_second_moment, {"state_kinds"}),
        (one_without_moments, {"state_kinds"}),
        (one_without_step, {"state_kinds"}),
        (most_without_step, {"state_kinds"}),
        (all_without_second_moment, {"state_kinds"}),
        (prefixed_states, {"prefixed_state"}),
        (prefixed_state_of_one, {"prefixed_state"}),
        (prefixed_weights, {"prefixed_weight"}),
        (ghost, {"unknown_parameter"}),
        (renamed_state, {"unknown_parameter"}),
        (listed_twice, {"listed_twice"}),
        (unlisted_state, {"unlisted_state"}),
        (missing_layer, {"layer_gap"}),
        (missing_weight, {"layer_lacks"}),
        (wide_weight, {"layer_differs"}),
        (packed_weight, {"layer_differs"}),
        (short_bias, {"bias"}),
        (short_head, {"head"}),
        (missing_experts, {"router"}),
        (experts_of_one_matrix, {"experts"}),
        (empty_weight, {"empty_weight"}),
    )
}
OF_WEIGHTS = (
    *("missing_layer", "missing_experts", "experts_of_one_matrix", "empty_weight"),
    *("missing_weight", "wide_weight", "packed_weight", "short_bias", "short_head"),
)


def tree_with(change: str | None) -> Tree:
    """A consistent checkpoint with one inconsistency, or none."""
    tree = deepcopy(consistent())
    if change is not None:
        CHANGES[change][0](tree)
    return tree


def save_dcp(tree: Tree, root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=root, no_dist=True)


def save_joined(tree: Tree, root: Path) -> None:
    """As torch before 2.4 does: all groups are one entry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.checkpoint._version, "_derived_version", "2_3")
        save_dcp(tree, root)


def save_pt(tree: Tree, root: Path) -> None:
    trained.save(tree, root / "state.pt")


def save_ranks(tree: Tree, root: Path) -> None:
    """As verl does: a file for each rank. Every tensor is whole in each."""
    root.mkdir(parents=True)
    for rank in range(2):
        torch.save(tree["model"], root / f"model_world_size_2_rank_{rank}.pt")
        torch.save(tree["optimizer"], root / f"optim_world_size_2_rank_{rank}.pt")
        torch.save({"step": 1}, root / f"extra_state_world_size_2_rank_{rank}.pt")


def save_accelerate(tree: Tree, root: Path) -> None:
    """Safetensors with an optimizer that names its parameters beside them."""
    root.mkdir(parents=True)
    save_file(tree["model"], root / "model.safetensors", metadata={"format": "pt"})
    trained.save(tree["optimizer"], root / "optimizer.bin")


def save_hf(tree: Tree, root: Path) -> None:
    root.mkdir(parents=True)
    save_file(tree["model"], root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps({"model_type": "odd"}))


WRITERS = {
    "dcp": save_dcp,
    "joined": save_joined,
    "pt": save_pt,
    "ranks": save_ranks,
    "accelerate": save_accelerate,
    "hf": save_hf,
}
