"""Cut the flat parameters of all ranks into the original parameters.

Source: fairscale/nn/data_parallel/fully_sharded_data_parallel.py, `local_metadata_dict` and
`consolidate_shard_weights`: each rank has an equal piece of a flat parameter, the last ones with padding at the end,
and says of each unit the names, shapes and sizes of what follows one another in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.archives.flatten import pairs_of
from ckptkit.formats.pickles.tensor_calls import as_shape
from ckptkit.formats.shards.rank_tensor import RankFile
from ckptkit.layout import Chunk, StoredTensor
from ckptkit.layout.flat import cut_out, pieces_in_turn
from ckptkit.names.wrappers import unwrapped
from ckptkit.tensors.box import Shape, whole

METADATA = ("shard_metadata", "fsdp_metadata")  # as fairscale's own example and metaseq, and as fairseq


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """A flat parameter as one rank describes it: what it is made of, in order, and the padding at its own end."""

    members: tuple[tuple[str, Shape], ...]
    padding: int

    @property
    def numel(self) -> int:
        """Return how many numbers it has, without padding."""
        return sum(prod(shape) for _, shape in self.members)


def read_flats(value: Any) -> dict[str, FlatParameter]:
    """Return the flat parameters that a rank's file describes, by their names in its state dict."""
    saved = dict(pairs_of(value) or ())
    name = next((key for key in METADATA if key in saved), METADATA[0])
    try:
        found = dict(pairs_of(saved[name]) or ())
        flats: dict[str, FlatParameter] = {}
        for unit in found["param_metadata"]:
            if unit.get("shared_param_info"):
                raise Unsupported("some flat parameters are shared between modules")
            above = unit["fsdp_path"] + "." if unit["fsdp_path"] else ""
            for flat, described in pairs_of(unit["params"]) or ():
                flats[above + flat] = read_flat(above, described)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"`{name}` is malformed") from error
    return flats


def read_flat(above: str, described: Mapping[str, Any]) -> FlatParameter:
    """Return one flat parameter of the unit whose names begin with `above`."""
    names, padding = described["names"], described["padding"]
    shapes = [as_shape(shape) for shape in described["shapes"]]
    if list(map(prod, shapes)) != list(described["numels"]) or type(padding) is not int or padding < 0:
        raise ValueError("numels")
    return FlatParameter(
        tuple((unwrapped(above + name), shape) for name, shape in zip(names, shapes, strict=True)), padding
    )


def count_ranks(name: str, flat: FlatParameter, file: RankFile) -> int:
    """Return how many ranks have a piece of a flat parameter, of which all are as large as that of one."""
    return -(-flat.numel // max(1, file.tensors[name].spec.numel))


def cut_flat(
    name: str, described: Sequence[FlatParameter], files: Sequence[RankFile], names: Sequence[str]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the members of a flat parameter, of which each rank has a piece and a description.

    `names` are the files of all ranks; pieces in those that are not among `files` are unreadable.
    """
    members, total = described[0].members, described[0].numel
    if any(flat.members != members for flat in described):
        raise Corrupt(
            "the ranks describe the contents of a flat parameter differently",
            hint="check that all files come from one run",
        )
    spec = files[0].tensors[name].spec
    sizes = [min(max(0, total - rank * spec.numel), spec.numel) for rank in range(len(names))]
    chunks = [Chunk.unreadable(whole(spec.shape), path, spec.dtype) for path in names]
    for file, flat in zip(files, described, strict=True):
        held = file.tensors[name]
        if held.spec != spec or held.spec.numel - flat.padding != sizes[file.rank]:
            message = f"`{file.name}` has {held.spec}, {flat.padding} of it padding, of a flat parameter of {total}"
            raise Corrupt(f"{message} numbers", hint="check that the file comes from the same run")
        chunks[file.rank] = held.chunks[0]
    pieces = list(pieces_in_turn(zip(chunks, sizes, strict=True)))
    at = 0
    for own, shape in members:
        yield own, StoredTensor(replace(spec, shape=shape), tuple(cut_out(pieces, at, shape)))
        at += prod(shape)
