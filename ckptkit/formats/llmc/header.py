"""Read the headers of llm.c's files: 256 integers of 32 bits.

Source: karpathy/llm.c, train_gpt2.cu, gpt2_write_to_checkpoint and save_state; train_gpt2.py, write_model.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.files.file import opening, read_at
from ckptkit.tensors.box import Shape
from ckptkit.tensors.dtypes import DTYPES, DType

MODEL, STATE = 20240326, 20240527  # the first number of a file with a model, and with the state of a rank's optimizer
HEADER = Struct("<256i")
_DTYPES = {3: "float32", 5: "bfloat16"}  # by version
_MOST = 1 << 28  # of each number in a header


class Config(NamedTuple):
    """The sizes of a model, in the order of its header, which has them from the third number on."""

    max_seq_len: int
    vocab_size: int
    num_layers: int
    num_heads: int
    channels: int
    padded_vocab_size: int


class State(NamedTuple):
    """The header of a rank's state.

    `has_masters` if weights in 32 bits follow the moments, `is_shuffled` if a loader's order follows all.
    """

    ranks: int
    rank: int
    has_masters: bool
    is_shuffled: bool
    step: int


def read_numbers(path: Path) -> tuple[int, ...]:
    """Return the numbers of a file's header, () for a file that is too short for one."""
    with opening(path) as file:
        if file.size < HEADER.size:
            return ()
        return HEADER.unpack(read_at(file, HEADER.size, 0))


def read_config(path: Path) -> tuple[Config, DType]:
    """Return the sizes of the model in a file, and the dtype of all its tensors."""
    numbers = read_numbers(path)
    if numbers[:1] != (MODEL,):
        raise Corrupt("expected the header of a model", path=path)
    if numbers[1] not in _DTYPES:
        hint = "write it again with llm.c's `train_gpt2.py`"
        raise Unsupported(f"expected version 3 or 5 of llm.c's models, found {numbers[1]}", path=path, hint=hint)
    config = Config(*numbers[2:8])
    if not all(0 < number < _MOST for number in config) or config.padded_vocab_size < config.vocab_size:
        raise Corrupt(f"the sizes of the model are impossible: {config._asdict()}", path=path)
    return config, DTYPES[_DTYPES[numbers[1]]]


def read_state(path: Path) -> State:
    """Return the header of a rank's state."""
    numbers = read_numbers(path)
    if numbers[:1] != (STATE,):
        raise Corrupt("expected the header of an optimizer state", path=path)
    if numbers[1] != 1:
        raise Unsupported(f"expected version 1 of llm.c's states, found {numbers[1]}", path=path)
    ranks, rank, has_masters, is_shuffled = numbers[2:6]
    if not 0 <= rank < ranks < _MOST or has_masters not in (0, 1) or is_shuffled not in (0, 1):
        raise Corrupt(f"the numbers of this rank are impossible: {numbers[2:6]}", path=path)
    return State(ranks, rank, bool(has_masters), bool(is_shuffled), numbers[10])


def shapes_of(config: Config) -> dict[str, Shape]:
    """Return the shape of each tensor by its name in llm.c, in the order of the file; stacked over layers."""
    length, _, layers, _, wide, vocabulary = config
    return {
        "wte": (vocabulary, wide),
        "wpe": (length, wide),
        "ln1w": (layers, wide),
        "ln1b": (layers, wide),
        "qkvw": (layers, 3 * wide, wide),
        "qkvb": (layers, 3 * wide),
        "attprojw": (layers, wide, wide),
        "attprojb": (layers, wide),
        "ln2w": (layers, wide),
        "ln2b": (layers, wide),
        "fcw": (layers, 4 * wide, wide),
        "fcb": (layers, 4 * wide),
        "fcprojw": (layers, wide, 4 * wide),
        "fcprojb": (layers, wide),
        "lnfw": (wide,),
        "lnfb": (wide,),
    }


def count(config: Config) -> int:
    """Return the number of a model's parameters."""
    return sum(map(prod, shapes_of(config).values()))


def is_stacked(name: str) -> bool:
    """Return whether a tensor has one part for each layer."""
    return name not in ("wte", "wpe", "lnfw", "lnfb")
