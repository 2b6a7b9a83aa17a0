"""Find the moments of each tensor in the states of llm.c's ranks.

Source: karpathy/llm.c, train_gpt2.cu, gpt2_update, and llmc/zero.cuh. A rank's state holds first moments, second
moments and perhaps weights in 32 bits, each for all tensors in their order. With ZeRO-1 each rank has its share of
every layer of each tensor; or else each has all. Which of the two it is, the length of a file says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from struct import Struct

from ckptkit.errors import Corrupt, Report
from ckptkit.files.file import file_size, opening, read_at
from ckptkit.formats.llmc.header import HEADER, Config, State, count, is_stacked, shapes_of
from ckptkit.layout import Chunk, Spec, StoredTensor
from ckptkit.tensors.dtypes import DTYPES
from ckptkit.tensors.flat_ranges import boxes_of_range

_MOMENTS = ("exp_avg", "exp_avg_sq", "master_weights")
_FLOAT = DTYPES["float32"]
_COUNT = Struct("<Q")
_GENERATOR = 2520  # bytes of the state of a Mersenne twister


def find_moments(
    root: Path, files: Sequence[str], states: Mapping[str, State], config: Config, report: Report
) -> dict[tuple[str, str], StoredTensor]:
    """Return the tensors of an optimizer, by the name of the parameter and of the moment.

    `files` are those of all ranks, in order; chunks of those without a state are unreadable. Reports files of another
    size, of which nothing is used either.
    """
    total, ranks = count(config), len(files)
    shares = 1 if ranks == 1 or any(holds(root / file, state, total) for file, state in states.items()) else ranks
    sound: list[str] = []
    for file, state in states.items():
        if total % shares == 0 and holds(root / file, state, total // shares):
            sound.append(file)
            continue
        wanted = HEADER.size + moments_in(state) * total // shares * _FLOAT.itemsize
        message = f"expected {wanted} bytes for the moments of {total} parameters, found {file_size(root / file)}"
        report(
            Corrupt(
                message,
                path=root / file,
                hint=f"check that the file belongs to the model of the {ranks} ranks in this directory",
            )
        )
    names = _MOMENTS[: moments_in(next(iter(states.values())))]
    used = files if shares > 1 else [*sound, *files][:1]
    return {
        (name, moment): StoredTensor(
            Spec(_FLOAT, shape), tuple(chunks_of(used, sound, name, shape, places[name] + i * total, shares))
        )
        for places in (offsets(shapes_of(config)),)
        for i, moment in enumerate(names)
        for name, shape in shapes_of(config).items()
    }


def moments_in(state: State) -> int:
    return 3 if state.has_masters else 2


def holds(path: Path, state: State, numel: int) -> bool:
    """Return whether a rank's file holds the state of so many parameters, and nothing else that is not a loader's."""
    end = HEADER.size + moments_in(state) * numel * _FLOAT.itemsize
    with opening(path) as file:
        at = end
        for _ in range(2 if state.is_shuffled else 0):  # the orders of shards, and of samples in one
            if at + _COUNT.size > file.size:
                return False
            at += _COUNT.size + 4 * _COUNT.unpack(read_at(file, _COUNT.size, at))[0]
        return file.size == at + (_GENERATOR if state.is_shuffled else 0)


def offsets(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return where each tensor begins, in elements from the first."""
    found, at = {}, 0
    for name, shape in shapes.items():
        found[name] = at
        at += prod(shape)
    return found


def chunks_of(
    files: Sequence[str], sound: Collection[str], name: str, shape: tuple[int, ...], start: int, shares: int
) -> Iterator[Chunk]:
    """Yield where a moment lies that begins at element `start` of all ranks' together, in `shares` of every layer.

    Chunks of files that are not `sound` are unreadable.
    """
    layers = shape[0] if is_stacked(name) else 1
    size = prod(shape) // layers
    share = size // shares
    if size % shares:
        raise Corrupt(f"{size} elements of a layer cannot be split evenly among {shares} ranks", tensor=name)
    for rank, file in enumerate(files):
        for layer in range(layers):
            first = layer * size + rank * share
            held = HEADER.size + (start // shares + layer * share) * _FLOAT.itemsize
            for box, at in boxes_of_range(shape, first, first + share):
                offset = held + at * _FLOAT.itemsize
                chunk = Chunk(box, file, offset, box.numel * _FLOAT.itemsize, _FLOAT)
                yield chunk if file in sound else Chunk.unreadable(box, file, _FLOAT)
