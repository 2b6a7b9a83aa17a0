"""Where in a checkpoint a parameter's name stands, and where something else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import Mismatch
from ckptkit.formats.archives.non_tensor_entries import load_value
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import Blob, KeyPath, Layout, Spec, StoredTensor, edits
from ckptkit.layout.dtypes import DTYPES
from ckptkit.models.names.rename_parameters import rename_in_key_path, rename_parameters


def upper(name: str) -> str:
    return name.upper()


@pytest.mark.parametrize(
    ("key", "is_weight", "expected"),
    [
        (("a.w",), True, ("A.W",)),
        (("model", "a.w"), True, ("model", "A.W")),
        (("model", "state.w.x"), True, ("model", "STATE.W.X")),
        (("model", 0), True, ("model", 0)),
        (("optim", "state", "a.w", "exp_avg"), False, ("optim", "state", "A.W", "exp_avg")),
        (("state", "optimizers", "AdamW", "state", "a.w", "step"), False,
         ("state", "optimizers", "AdamW", "state", "A.W", "step")),
        (("optim", "state", "3", "exp_avg"), False, ("optim", "state", "3", "exp_avg")),
        (("optim", "state", 3, "exp_avg"), False, ("optim", "state", 3, "exp_avg")),
        (("optim", "state.a.w.exp_avg"), False, ("optim", "state.A.W.exp_avg")),
        (("optim", "param_groups.a.w.lr"), False, ("optim", "param_groups.A.W.lr")),
        (("optim", "param_groups", 0, "lr"), False, ("optim", "param_groups", 0, "lr")),
        (("rng", "cpu"), False, ("rng", "cpu")),
        (("step",), False, ("step",)),
        (("state", "step"), False, ("state", "step")),
    ],
    ids=str,
)  # fmt: skip
def test_a_name_on_the_way(key: KeyPath, is_weight: bool, expected: KeyPath) -> None:
    assert rename_in_key_path(key, upper, is_weight) == expected


def make_layout(values: dict[KeyPath, object], *tensors: KeyPath) -> Layout:
    """A layout of tensors, and of entries with these values."""
    keys = {".".join(map(str, key)): key for key in (*tensors, *values)}
    stored = {".".join(map(str, key)): StoredTensor(Spec(DTYPES["float32"], (2,)), ()) for key in tensors}
    blobs = {".".join(map(str, key)): Blob("f", 0, 0, dump(value)) for key, value in values.items()}
    return Layout(Path("/none"), "pt", stored, blobs, keys)


def test_the_groups_list_the_new_names() -> None:
    values: dict[KeyPath, object] = {
        ("optim", "param_groups", 0, "params"): ["a.w", "b.w"],
        ("optim", "param_groups", 1, "params"): [0, 1],
        ("optim", "param_groups", 1, "lr"): 0.5,
        ("optim", "param_groups", 1, "names"): ["a.w"],
    }
    layout, renamed = rename_parameters(make_layout(values, ("model", "a.w")), frozenset({"model.a.w"}), upper)
    assert renamed == {"model.a.w": "model.A.W"}
    assert layout.key("model.A.W") == ("model", "A.W")
    found = {layout.key(name): load_value(layout.root, blob) for name, blob in layout.blobs.items()}
    assert found == values | {("optim", "param_groups", 0, "params"): ["A.W", "B.W"]}


def test_without_a_change_all_stays_as_it_is() -> None:
    layout = make_layout({("step",): 1}, ("model", "A"))
    assert rename_parameters(layout, frozenset({"model.A"}), upper) == (layout, {})


def test_two_names_that_become_one_are_refused() -> None:
    layout = make_layout({}, ("optim", "state", "a", "step"), ("optim", "state", "A", "step"))
    with pytest.raises(Mismatch, match=r"`optim\.state\.a\.step` and `optim\.state\.A\.step` would both"):
        rename_parameters(layout, frozenset(), upper)


def test_under_a_key() -> None:
    layout = edits.nest_below_key(make_layout({("step",): 1}, ("a.w",)), ("app", "model"))
    assert {name: layout.key(name) for name in layout.names} == {
        "app.model.a.w": ("app", "model", "a.w"),
        "app.model.step": ("app", "model", "step"),
    }
