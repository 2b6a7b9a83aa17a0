"""States of optimizers that are not shaped as their parameter, where parameters get other names or rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckptkit
from ckptkit.errors import Unsupported

WIDTH, ROWS = 32, 64
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": ROWS,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


class Soap(torch.optim.Optimizer):
    """The states of SOAP: lists of a preconditioner and its basis for each axis, below the moments.

    Source: soap.py of nikhilvyas/SOAP, without the steps that use the bases.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"]):
            state, gradient = self.state[parameter], parameter.grad
            state["step"] = state.get("step", 0) + 1
            state["exp_avg"] = gradient * 0.1
            state["exp_avg_sq"] = gradient.square()
            if gradient.dim() == 2:
                state["GG"] = [gradient @ gradient.T, gradient.T @ gradient]
                state["Q"] = [torch.linalg.eigh(one)[1] for one in state["GG"]]


class Shampoo(Soap):
    """One preconditioner, in a dict: torch flattens that, but no lists."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            grams, _ = state.pop("GG", None), state.pop("Q", None)
            if grams:
                state["left"] = {"gram": grams[0]}


class Llama(nn.Module):
    """A layer of a Llama by the names of Meta, whose queries the Hub has in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        square = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("wq", "wk", "wv", "wo")}
        wide = {"w1": (WIDTH, 48), "w2": (48, WIDTH), "w3": (WIDTH, 48)}
        mlp = {name: nn.Linear(*shape, bias=False) for name, shape in wide.items()}
        norms = {name: nn.RMSNorm(WIDTH) for name in ("attention_norm", "ffn_norm")}
        layer = nn.ModuleDict({"attention": nn.ModuleDict(square), "feed_forward": nn.ModuleDict(mlp), **norms})
        self.tok_embeddings, self.layers = nn.Embedding(ROWS, WIDTH), nn.ModuleDict({"0": layer})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, ROWS, bias=False)


def trained(kind: Callable[[Any], Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Llama()
    optimizer = kind(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def save(root: Path, kind: Callable[[Any], Any], form: str) -> dict[str, Any]:
    """Save a model with its optimizer by name, nested or flattened by torch; return the states by parameter."""
    model, optimizer = trained(kind)
    states = {name: optimizer.state[one] for name, one in model.named_parameters()}
    nested = {"state": states, "param_groups": [{"lr": 1e-3, "params": list(states)}]}
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = nested if form == "nested" else get_optimizer_state_dict(model, optimizer, options=flat)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model.state_dict(), "optimizer": saved}, checkpoint_id=root)
    (root / "config.json").write_text(json.dumps(CONFIG))
    return states


def tensors_of(state: Any, above: str = "") -> dict[str, Tensor]:
    """The tensors in a state, by their way through dicts and lists."""
    if isinstance(state, Tensor):
        return {above[1:]: state}
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: one for key, inner in pairs for name, one in tensors_of(inner, f"{above}.{key}").items()}


@pytest.mark.parametrize(("kind", "form"), [(Soap, "nested"), (Shampoo, "nested"), (Shampoo, "flat")])
def test_nested_states_get_the_new_names(tmp_path: Path, kind: Callable[[Any], Any], form: str) -> None:
    states = save(tmp_path / "in", kind, form)
    ckptkit.convert(tmp_path / "in", tmp_path / "out", to="dcp", rename=r"^layers\.=>blocks.")
    found = ckptkit.open(tmp_path / "out")
    assert not [name for name in found if "layers." in name]
    for name, state in states.items():
        for what, tensor in tensors_of(state).items():
            own = found[f"optimizer.state.{name.replace('layers.', 'blocks.')}.{what}"]
            assert torch.equal(own.torch(), tensor)


@pytest.mark.parametrize(
    ("kind", "form", "what"),
    [(Soap, "nested", "GG.0"), (Shampoo, "nested", "left.gram"), (Shampoo, "flat", "left.gram")],
)
@pytest.mark.parametrize("options", [{"names": "hub"}, {"vocab_size": 70}, {"vocab_size": 60}], ids=str)
def test_what_cannot_follow_is_refused_by_name(
    tmp_path: Path, kind: Callable[[Any], Any], form: str, what: str, options: dict[str, Any]
) -> None:
    """Rows of queries are permuted, those of the vocabulary are cut: a matrix of rows by rows is not."""
    save(tmp_path / "in", kind, form)
    with pytest.raises(Unsupported, match="reorders, joins or cuts the parameter") as raised:
        ckptkit.convert(tmp_path / "in", tmp_path / "out", to="dcp", **options)
    assert str(raised.value.tensor).endswith(what)
    assert raised.value.hint is not None
    assert "--exclude 'optimizer.*'" in raised.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", [70, 60])
def test_moments_get_the_rows_of_their_parameter(tmp_path: Path, rows: int) -> None:
    states = save(tmp_path / "in", torch.optim.AdamW, "nested")
    ckptkit.convert(tmp_path / "in", tmp_path / "out", to="dcp", vocab_size=rows)
    found = ckptkit.open(tmp_path / "out")
    for name in ("output.weight", "tok_embeddings.weight"):
        moment, before = found[f"optimizer.state.{name}.exp_avg"].torch(), states[name]["exp_avg"]
        assert moment.shape == (rows, WIDTH)
        assert torch.equal(moment[: min(rows, ROWS)], before[:rows])
        assert not moment[ROWS:].any()


def test_a_square_state_of_a_square_parameter_has_to_be_known(tmp_path: Path) -> None:
    """Nothing tells a preconditioner of rows from a moment: only names of torch's optimizers do."""
    model, _ = trained(Soap)
    square = {name: one for name, one in model.state_dict().items() if one.dim() == 1 or one.shape[0] == one.shape[1]}
    for what in ("left", "exp_avg"):
        states = {name: {what: torch.randn_like(one)} if one.dim() == 2 else {} for name, one in square.items()}
        saved = {"state": states, "param_groups": [{"params": list(states)}]}
        torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / f"{what}.pt")
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(Unsupported, match="reorders, joins or cuts the parameter"):
        ckptkit.convert(tmp_path / "left.pt", tmp_path / "no", to="dcp", names="hub")
    ckptkit.convert(tmp_path / "exp_avg.pt", tmp_path / "out", to="dcp", names="hub")
    assert "optimizer.state.model.layers.0.self_attn.q_proj.weight.exp_avg" in ckptkit.open(tmp_path / "out")
