"""What proves the names of an optimizer's numbers, and which of several models it belongs to; else numbers stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel

import ckptkit
from ckptkit.errors import Mismatch, Unsupported, Usage
from tests.checkpoints.examination.inconsistent import save_dcp, save_joined

DOUBT = "no file says which of them it trains"
SAME_SHAPE = "no file says which state belongs to which"


class Disc(nn.Module):
    """A model whose first layers have the shapes of another model, and other names."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.more = nn.Sequential(*more)

    def forward(self, value: Tensor) -> Tensor:
        return self.more(self.b(self.a(value)))


def gen() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def trained(model: nn.Module) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    return optimizer


def named_in(source: Mapping[str, Any], tmp_path: Path) -> tuple[dict[str, set[str]], tuple[str, ...]]:
    """The parameters of each optimizer as ckptkit calls them in shards, and what it says."""
    torch.save(source, tmp_path / "saved.pt")
    done = ckptkit.convert(tmp_path / "saved.pt", tmp_path / "dcp", to="dcp")
    found: dict[str, set[str]] = {}
    for name in ckptkit.open(tmp_path / "dcp"):
        above, state, rest = name.partition(".state.")
        if state:
            found.setdefault(above, set()).add(rest.rpartition(".")[0])
    return found, tuple(done.notes)


def parameters(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


NUMBERS = {"0", "1", "2", "3"}


def test_two_models_of_the_same_shapes_leave_numbers(tmp_path: Path) -> None:
    one, two = gen(), Disc()
    opt_g, opt_d = trained(one), trained(two)
    source = {
        "model": one.state_dict(),
        "disc": two.state_dict(),
        "opt_g": opt_g.state_dict(),
        "opt_d": opt_d.state_dict(),
    }
    found, notes = named_in(source, tmp_path)
    assert found == {"opt_g": NUMBERS, "opt_d": NUMBERS}
    assert [note for note in notes if SAME_SHAPE in note] == list(notes)
    with pytest.raises(Unsupported, match=SAME_SHAPE):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="dcp", optimizer_keys="names")
    with pytest.raises(Unsupported, match=SAME_SHAPE):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="universal")
    with pytest.raises(Unsupported, match=f"`model` and `disc`, and {DOUBT}"):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="dcp", optimizer_order="model")
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "alone.pt", to="pt", include=["disc.*", "opt_d.*"])
    ckptkit.convert(tmp_path / "alone.pt", tmp_path / "named", to="dcp", optimizer_keys="names")
    loaded: dict[str, Any] = {"opt_d": get_optimizer_state_dict(two, trained(two))}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, checkpoint_id=tmp_path / "named")
    for name, one_of in two.named_parameters():
        torch.testing.assert_close(loaded["opt_d"]["state"][name], opt_d.state[one_of], rtol=0, atol=0)


@pytest.mark.parametrize("nest", ["keys", "lists"])
def test_shapes_that_one_model_has_name_its_optimizer(tmp_path: Path, nest: str) -> None:
    """Also where the keys tell lies: what is called first is not the first model's."""
    one = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    two = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 2))
    states = [trained(two).state_dict(), trained(one).state_dict()]
    models = [one.state_dict(), two.state_dict()]
    if nest == "keys":
        source: dict[str, Any] = {"model": models[0], "disc": models[1], "opt_g": states[0], "opt_d": states[1]}
    else:
        source = {"nets": models, "optimizers": states}
    found, notes = named_in(source, tmp_path)
    second, first = found.values()
    assert second == parameters(two)
    assert first == {str(number) for number in range(6)}  # two of its biases have one shape
    assert len([note for note in notes if SAME_SHAPE in note]) == 1
    assert any("their shapes allow only one assignment" in note for note in notes)


def test_parts_of_two_models_may_have_been_trained(tmp_path: Path) -> None:
    """Only one model has all shapes, but four of the six states may belong to the other one."""
    one, two = gen(), Disc(nn.Linear(4, 1))
    source = {"model": one.state_dict(), "disc": two.state_dict(), "opt_d": trained(two).state_dict()}
    found, notes = named_in(source, tmp_path)
    assert found == {"opt_d": {str(number) for number in range(6)}}
    assert any(SAME_SHAPE in note for note in notes)


def test_models_of_the_same_names_are_no_doubt(tmp_path: Path) -> None:
    """Averaged weights and a target network: the names are the same, whichever of them it is."""
    model = gen()
    averaged = AveragedModel(model)
    optimizer = trained(model)
    source = {
        "model": model.state_dict(),
        "ema": averaged.state_dict(),
        "target": gen().state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    found, _ = named_in(source, tmp_path)
    assert found == {"optimizer": parameters(model)}


PARTS: dict[str, Callable[[], nn.Module]] = {
    "a temperature of one number": lambda: layers((1, 1)),
    "a discriminator": lambda: layers((7, 2)),
    "a head": lambda: layers((5, 6), (6, 7)),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("keys", [("model", "optim", "other_optim"), ("critic", "critic_optim", "alpha_optim")])
def test_an_optimizer_of_something_that_was_not_saved_keeps_numbers(
    tmp_path: Path, part: str, keys: tuple[str, str, str]
) -> None:
    """Its shapes are those of a part of the model, each once; nothing says that it trains this part."""
    model, other = layers(*UNLIKE, (2, 1), (1, 1)), PARTS[part]()
    optimizer, its = trained(model), torch.optim.Adam(other.parameters())
    torch.cat([one.flatten() for one in other.parameters()]).sum().backward()
    its.step()
    source = dict(zip(keys, (model.state_dict(), optimizer.state_dict(), its.state_dict()), strict=True))
    found, notes = named_in(source, tmp_path)
    count = len(list(other.parameters()))
    assert found == {keys[1]: parameters(model), keys[2]: {str(number) for number in range(count)}}
    (note,) = (note for note in notes if "something that was not saved" in note)
    assert f"expected 6 parameters as in the model, found {count}" in note
    with pytest.raises(Unsupported, match="something that was not saved") as raised:
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="universal")
    assert "--optimizer-order model" in str(raised.value.hint)
    two = ckptkit.reshard(tmp_path / "saved.pt", tmp_path / "two", to=2)
    assert any("something that was not saved" in note for note in two.notes)


def test_one_optimizer_of_two_models_keeps_numbers(tmp_path: Path) -> None:
    one, two = gen(), Disc()
    optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()])
    two(one(torch.randn(3, 4))).sum().backward()
    optimizer.step()
    source = {"gen": one.state_dict(), "disc": two.state_dict(), "optimizer": optimizer.state_dict()}
    found, notes = named_in(source, tmp_path)
    assert found == {"optimizer": {str(number) for number in range(8)}}
    assert any(SAME_SHAPE in note for note in notes)
    with pytest.raises(Unsupported, match="fits none of the 2 models: `gen`: expected"):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="dcp", optimizer_order="model")


# -- the order of the parameters ---------------------------------------------------------------------------------------


def layers(*shapes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))


EQUAL = [(4, 4)] * 4
UNLIKE = [(4, 5), (5, 6), (6, 7), (7, 2)]
ORDERS: dict[str, Callable[[list[nn.Parameter]], list[Any]]] = {
    "of the model": lambda every: every,
    "reversed": lambda every: every[::-1],
    "shuffled": lambda every: [every[2], every[0], every[3], every[1]],
    "two groups, the last layers first": lambda every: [{"params": every[2:]}, {"params": every[:2]}],
    "two groups, one reversed": lambda every: [{"params": every[:2]}, {"params": every[2:][::-1]}],
    "frozen": lambda every: every[1:3],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shapes", [EQUAL, UNLIKE], ids=["equal", "unlike"])
def test_names_are_right_or_there_are_none(tmp_path: Path, shapes: list[tuple[int, int]], order: str) -> None:
    """In whatever order a script has passed the parameters; a file may list them as it did."""
    torch.manual_seed(0)
    model = layers(*shapes)
    optimizer = torch.optim.Adam(ORDERS[order](list(model.parameters())))
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    truth = {name: optimizer.state[one]["exp_avg"] for name, one in model.named_parameters() if one in optimizer.state}
    names = {one: name for name, one in model.named_parameters()}
    passed = [names[one] for group in optimizer.param_groups for one in group["params"]]
    (tmp_path / "order.txt").write_text("\n".join(passed))
    (tmp_path / "order.json").write_text(json.dumps(passed))
    for to in ("dcp", "universal"):
        done = None
        try:
            done = ckptkit.convert(tmp_path / "saved.pt", tmp_path / f"guess-{to}", to=to)
        except Unsupported as error:
            assert "--optimizer-order model" in str(error.hint)  # noqa: PT017 - universal has no numbers
        moments = moments_in(tmp_path / f"guess-{to}") if done else {}
        is_proof = shapes is UNLIKE and order != "frozen"  # such an optimizer may belong to something else
        assert moments.keys() == (
            truth.keys() if is_proof else {str(number) for number in range(len(truth))} if moments else set()
        )
        for file in ("order.txt", "order.json"):
            out = tmp_path / f"{to}-{file}"
            done = ckptkit.convert(tmp_path / "saved.pt", out, to=to, optimizer_order=tmp_path / file)
            moments = moments_in(out)
            assert moments.keys() == truth.keys()
            assert all(torch.equal(moments[name], one) for name, one in truth.items())
            proof = (
                "their shapes allow only one assignment"
                if is_proof
                else f"assumed, as --optimizer-order {tmp_path / file} says"
            )
            assert any(proof in note for note in done.notes)


@pytest.mark.parametrize("trainer", ["nanoGPT", "transformers' Trainer"])
def test_marks_of_a_trainer_prove_no_order(tmp_path: Path, trainer: str) -> None:
    """A fork of nanoGPT, and a script that passes an optimizer to the Trainer, may reverse the layers in each group."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    every = list(model.named_parameters())[::-1]
    groups = [[pair for pair in every if (pair[1].ndim > 1) is is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW([{"params": [one for _, one in group]} for group in groups])
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    source = tmp_path / "checkpoint-1"
    source.mkdir()
    if trainer == "nanoGPT":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "model_args": {}, "iter_num": 1, "best_val_loss": 1.0}, source / "ckpt.pt")
    else:
        save_file(model.state_dict(), source / "model.safetensors", metadata={"format": "pt"})
        torch.save(optimizer.state_dict(), source / "optimizer.pt")
        (source / "trainer_state.json").write_text('{"global_step": 1}')
    assert ckptkit.inspect(source).trainer == trainer
    ckptkit.convert(source, tmp_path / "numbered", to="dcp")
    assert moments_in(tmp_path / "numbered").keys() == {str(number) for number in range(6)}
    with pytest.raises(Unsupported, match="no file says") as raised:
        ckptkit.convert(source, tmp_path / "no", to="universal")
    assert "optimizer-order model" in str(raised.value.hint).replace("_", "-")
    (tmp_path / "order").write_text("\n".join(name for group in groups for name, _ in group))
    (tmp_path / "other").write_text("\n".join(name for group in groups for name, _ in group[::-1]))
    ckptkit.convert(source, tmp_path / "named", to="dcp", optimizer_order=tmp_path / "order")
    moments = moments_in(tmp_path / "named")
    assert all(torch.equal(moments[name], optimizer.state[one]["exp_avg"]) for name, one in every)
    assert ckptkit.diff(source, tmp_path / "named", optimizer_order=tmp_path / "order").is_equal
    found = ckptkit.diff(source, tmp_path / "named", optimizer_order=tmp_path / "other")
    assert not found.is_equal
    assert any(f"assumed, as --optimizer-order {tmp_path / 'other'} says" in note for note in found.notes)
    assert not ckptkit.diff(source, tmp_path / "named").is_equal
    with pytest.raises(Usage, match="expected numbers of parameters in one optimizer and names in the other"):
        ckptkit.diff(source, tmp_path / "numbered", optimizer_order="model")


def moments_in(path: Path) -> dict[str, Tensor]:
    found = ckptkit.open(path)
    names = [name for name in found if name.endswith(".exp_avg") and name.startswith("optimizer.state.")]
    return {name.removeprefix("optimizer.state.").removesuffix(".exp_avg"): found[name].torch() for name in names}


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (["0.weight", "1.weight", "3.weight", "2.weight"], "expected `2.weight` as parameter 2, found `3.weight`; "),
        (["0.weight", "1.weight"], "optimizer_order.*: expected 4 names, the parameters of .*, found 2"),
        (["0.weight", "1.weight", "2.weight", "x"], "lists it, but the model does not have it"),
    ],
)
def test_an_order_that_contradicts_the_checkpoint_is_refused(tmp_path: Path, listed: list[str], message: str) -> None:
    """Recorded names are the proof."""
    model = layers(*EQUAL)
    optimizer = torch.optim.Adam(model.named_parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    (tmp_path / "order").write_text("\n".join(listed))
    with pytest.raises(Mismatch, match=message):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="dcp", optimizer_order=tmp_path / "order")


@pytest.mark.parametrize("content", [None, "", "a\nb\na", '{"a": 1}', "[]", "[1, 2]"])
def test_a_file_without_names_is_no_order(tmp_path: Path, content: str | None) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "saved.pt")
    if content is not None:
        (tmp_path / "order").write_text(content)
    with pytest.raises(Usage, match="optimizer_order"):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="dcp", optimizer_order=tmp_path / "order")


def test_an_order_needs_an_optimizer_with_numbers(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "saved.pt")
    with pytest.raises(Unsupported, match="no optimizer with parameter groups") as raised:
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="dcp", optimizer_order="model")
    assert raised.value.hint == "drop --optimizer-order"
    with pytest.raises(Usage, match="has no optimizer"):
        ckptkit.convert(tmp_path / "x", tmp_path / "no", to="hf", optimizer_order="model")


@pytest.mark.parametrize("is_flat", [False, True])
def test_an_optimizer_with_names_and_no_lists_needs_none(tmp_path: Path, is_flat: bool) -> None:
    """As Megatron's `torch_dist` has it, with the kind of a state first, and torch's flattened one."""
    optimizer: dict[str, Any] = {"state": {"exp_avg": {"w": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
    if is_flat:
        optimizer = {"state.w.exp_avg": torch.ones(2), "param_groups.w.lr": 0.1}
    save_dcp({"w": torch.ones(2), "optimizer": optimizer}, tmp_path / "step-1")
    ckptkit.convert(tmp_path / "step-1", tmp_path / "out", to="dcp", optimizer_keys="names")
    assert ckptkit.diff(tmp_path / "step-1", tmp_path / "out").is_equal
    with pytest.raises(Unsupported, match="have the names of their parameters, but no group lists the parameters"):
        ckptkit.convert(tmp_path / "step-1", tmp_path / "no", to="dcp", optimizer_order="model")


def test_groups_in_one_entry_are_edited_as_others(tmp_path: Path) -> None:
    """As torch before 2.4 saves the groups of an optimizer."""
    root, model = tmp_path / "step-1", gen()
    state: dict[str, Any] = get_optimizer_state_dict(model, trained(model))
    del state["state"]["1.bias"]
    save_joined({"model": model.state_dict(), "optimizer": state}, root)
    assert "optimizer.param_groups" in ckptkit.open_layout(root).blobs
    ckptkit.convert(root, tmp_path / "named.pt", to="pt", rename="^0=>first")
    (group,) = torch.load(tmp_path / "named.pt", weights_only=True)["optimizer"]["param_groups"]
    assert group["params"] == ["first.weight", "first.bias", "1.weight", "1.bias"]
    assert group["betas"] == (0.9, 0.999)
    ckptkit.convert(root, tmp_path / "ids.pt", to="pt", optimizer_keys="ids")
    numbered = torch.load(tmp_path / "ids.pt", weights_only=True)["optimizer"]
    assert (numbered["param_groups"][0]["params"], list(numbered["state"])) == ([0, 1, 2, 3], [0, 1, 2])
    ckptkit.convert(root, tmp_path / "full.pt", to="pt", complete_optimizer=True)
    assert "1.bias" in torch.load(tmp_path / "full.pt", weights_only=True)["optimizer"]["state"]
    ckptkit.reshard(root, tmp_path / "same", to=2)
    assert "optimizer.param_groups" in ckptkit.open_layout(tmp_path / "same").blobs  # torch before 2.4 asks for it
    ckptkit.convert(root, tmp_path / "later", to="dcp", optimizer_keys="names")
    assert "optimizer.param_groups.0.params" in ckptkit.open_layout(tmp_path / "later").blobs
    assert ckptkit.diff(root, tmp_path / "same").is_equal
    assert ckptkit.diff(root, tmp_path / "later").is_equal


def test_zeros_have_the_shapes_of_the_optimizers_own_model(tmp_path: Path) -> None:
    """Both models have a parameter of the name that has no state yet."""
    one, two = Disc(nn.Linear(4, 4)), Disc(nn.Linear(4, 2))
    state: dict[str, Any] = get_optimizer_state_dict(two, trained(two))
    del state["state"]["more.0.bias"]
    torch.save({"model": one.state_dict(), "disc": two.state_dict(), "opt_d": state}, tmp_path / "saved.pt")
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "out.pt", to="pt", complete_optimizer=True)
    made = torch.load(tmp_path / "out.pt", weights_only=True)["opt_d"]["state"]["more.0.bias"]
    assert made["exp_avg"].shape == (2,)


def test_a_rename_leaves_the_optimizer_of_another_model(tmp_path: Path) -> None:
    one, two = gen(), Disc()
    states = {
        "opt_g": get_optimizer_state_dict(one, trained(one)),
        "opt_d": get_optimizer_state_dict(two, trained(two)),
    }
    torch.save({"model": one.state_dict(), "disc": two.state_dict(), **states}, tmp_path / "saved.pt")
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "out.pt", to="pt", rename=r"^=>net.")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    named = {f"net.{name}" for name in parameters(one)}
    assert found["model"].keys() == found["opt_g"]["state"].keys() == named
    assert found["disc"].keys() == found["opt_d"]["state"].keys() == parameters(two)
    assert set(found["opt_d"]["param_groups"][0]["params"]) == parameters(two)
    with pytest.raises(Usage, match="matches no tensor"):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no.pt", to="pt", rename=r"^b\.=>c.")


# -- optimizers that torch has flattened -------------------------------------------------------------------------------


def save_flattened(root: Path) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model with decay of weights alone: the groups do not have the model's order."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    groups = [[one for one in model.parameters() if (one.dim() > 1) == wide] for wide in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-2
    )
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=root)
    return model, optimizer


def test_a_flattened_optimizer_of_one_process_has_the_order_of_its_groups(tmp_path: Path) -> None:
    _, optimizer = save_flattened(tmp_path / "in")
    ckptkit.convert(tmp_path / "in", tmp_path / "out.pt", to="pt", optimizer_keys="ids")
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    truth = optimizer.state_dict()
    assert [group["params"] for group in found["param_groups"]] == [group["params"] for group in truth["param_groups"]]
    assert [group["weight_decay"] for group in found["param_groups"]] == [0.1, 0.0]
    torch.testing.assert_close({int(key): one for key, one in found["state"].items()}, truth["state"], rtol=0, atol=0)


def test_a_flattened_optimizer_that_was_rewritten_needs_an_order(tmp_path: Path) -> None:
    model, optimizer = save_flattened(tmp_path / "in")
    ckptkit.reshard(tmp_path / "in", tmp_path / "two", to=2)
    for to, keys in (("pt", "ids"), ("universal", None)):
        with pytest.raises(Unsupported, match="the order of its parameters is unknown"):
            ckptkit.convert(tmp_path / "two", tmp_path / f"no-{to}", to=to, optimizer_keys=keys)
    names = {one: name for name, one in model.named_parameters()}
    order = [names[one] for group in optimizer.param_groups for one in group["params"]]
    (tmp_path / "order").write_text("\n".join(order))
    file = str(tmp_path / "order")
    done = ckptkit.convert(tmp_path / "two", tmp_path / "out.pt", to="pt", optimizer_keys="ids", optimizer_order=file)
    assert any("assumed" in note for note in done.notes)
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    truth = optimizer.state_dict()["state"]
    torch.testing.assert_close({int(key): one for key, one in found["state"].items()}, truth, rtol=0, atol=0)
    ckptkit.convert(tmp_path / "two", tmp_path / "universal", to="universal", optimizer_order=file)


@pytest.mark.parametrize(
    ("state", "is_proof"),
    [
        ({"row_norm": torch.rand(4)}, False),
        ({"row_norm": torch.rand(4), "scale": torch.tensor(1.0)}, False),
        ({"scale": torch.tensor(1.0)}, False),
        ({"hessian": torch.rand(4, 6)}, False),
        ({"inner": {"per_row": torch.rand(4)}}, False),
        ({"exp_avg": torch.rand(4), "master_param": torch.rand(4, 6)}, False),
        ({"exp_avg": torch.rand(4, 6), "row_norm": torch.rand(4)}, True),
        ({"exp_avg": torch.rand(4, 6), "exp_avg_sq": torch.rand(4, 1)}, True),
        ({"inner": {"exp_avg": torch.rand(4, 6)}}, True),
        ({"square_avg": torch.rand(4, 6)}, True),
        ({"z": torch.rand(4, 6)}, True),
    ],
)
def test_only_elementwise_states_prove_a_shape(state: dict[str, Any], is_proof: bool, tmp_path: Path) -> None:
    """A state for each row of the weight has the shape of the bias."""
    source = {
        "model": {"fc.weight": torch.randn(4, 6), "fc.bias": torch.randn(4)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), **state}},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        },
    }
    torch.save(source, tmp_path / "saved.pt")
    done = ckptkit.convert(tmp_path / "saved.pt", tmp_path / "dcp", to="dcp")
    states = {name.split(".state.")[1] for name in ckptkit.open(tmp_path / "dcp") if ".state." in name}
    assert all(name.startswith("fc.weight." if is_proof else "0.") for name in states)
    assert any("allow only one assignment" in note for note in done.notes) is is_proof


def test_recorded_names_of_a_module_are_no_names_of_the_model(tmp_path: Path) -> None:
    """`Adam(model.encoder.named_parameters())` records `fc.weight`, which the model has, too."""
    model = nn.ModuleDict({"fc": nn.Linear(4, 4), "encoder": nn.ModuleDict({"fc": nn.Linear(4, 4)})})
    for module in (model["encoder"], model):
        optimizer = torch.optim.Adam(module.named_parameters())
        sum(parameter.square().sum() for parameter in module.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        found, notes = named_in({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
        if module is model:
            assert found == {"optimizer": set(model.state_dict())}
        else:
            assert found == {"optimizer": {"0", "1"}}
            assert any("can mean several parameters: `fc.weight`, `encoder.fc.weight`" in note for note in notes)
        shutil.rmtree(tmp_path / "dcp")
