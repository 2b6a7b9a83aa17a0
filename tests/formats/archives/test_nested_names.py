"""Classes inside classes, which older pickles find by calling `getattr`: names like any other, and never called."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING

from ckptkit.errors import CkptError
from ckptkit.formats.pickles.inert_pickle import ANY_NAME, Global, Record, load
from ckptkit.formats.pickles.write_pickle import dump

NESTED = ShardedTensor.ProcessGroupState
NAME = Global(ShardedTensor.__module__, "ShardedTensor.ProcessGroupState")


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_nested_class_is_a_name(protocol: int) -> None:
    value, _ = load(pickle.dumps([NESTED, NESTED, MEM_FORMAT_ENCODING], protocol=protocol), ANY_NAME)
    assert value[:2] == [NAME, NAME]


def test_an_instance_of_one_is_a_record() -> None:
    (value,), _ = load(pickle.dumps([NESTED.__new__(NESTED)], protocol=2), ANY_NAME)
    assert isinstance(value, Record)
    assert value.of == NAME


@pytest.mark.parametrize("protocol", [2, 4])
def test_is_written_as_pickle_finds_it(protocol: int) -> None:
    value, _ = load(pickle.dumps([NESTED], protocol=protocol), ANY_NAME)
    assert pickle.loads(dump(value)) == [NESTED]


def getattr_of(*arguments: Any) -> bytes:
    """A pickle that would call `getattr` so."""
    body = b"".join(pickle.dumps(one, protocol=2)[2:-1] if isinstance(one, str) else one for one in arguments)
    return b"\x80\x02c__builtin__\ngetattr\n(" + body + b"tR."


def test_any_other_call_is_a_record() -> None:
    for data in (getattr_of("a", "b"), getattr_of(b"cos\nsystem\n"), getattr_of(b"cos\nsystem\n", "x" * 1000)):
        assert isinstance(load(data, ANY_NAME)[0], Record)


def test_a_name_inside_one_that_is_allowed_is_a_name_too() -> None:
    names = {("__builtin__", "getattr"), ("os", "path")}
    assert load(getattr_of(b"cos\npath\n", "join"), names)[0] == Global("os", "path.join")


def test_names_that_are_not_allowed_stay_so() -> None:
    with pytest.raises(CkptError, match="does not expect"):
        load(getattr_of(b"cos\npath\n", "join"), {("__builtin__", "getattr")})
