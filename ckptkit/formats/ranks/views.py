"""Leave out the duplicates in a file: views of flat parameters under the names of parameters.

Source: torch/distributed/fsdp/_state_dict_utils.py, `_local_post_state_dict_hook`, with `use_orig_params=True`: a
rank's piece of each parameter, flattened, is a view of the flat parameter beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptkit.formats.shards.rank_tensor import RankFile
from ckptkit.formats.shards.sharded_tensors import ShardedTensor
from ckptkit.layout.wrappers import is_flat_name


def without_views(files: Sequence[RankFile]) -> list[RankFile]:
    """Return the files of all ranks without tensors that are views of flat parameters in them."""
    views = {name for file in files for name in views_in(file)}
    kept = []
    for file in files:
        tensors = {name: tensor for name, tensor in file.flat.tensors.items() if name not in views}
        kept.append(replace(file, flat=replace(file.flat, tensors=tensors)) if views else file)
    return kept


def views_in(file: RankFile) -> Iterator[str]:
    """Yield the names of plain tensors that lie inside a flat parameter's storage."""
    held = file.tensors
    spans = [
        (chunk.offset, chunk.offset + chunk.length)
        for name, one in held.items()
        if isinstance(one.spread, ShardedTensor) and is_flat_name(str(file.flat.keys[name][-1]))
        for chunk in one.chunks
    ]
    for name, one in held.items() if spans else ():
        if one.spread is None and one.chunks[0].length:
            begin, end = one.chunks[0].offset, one.chunks[0].offset + one.chunks[0].length
            if any(low <= begin and end <= high for low, high in spans):
                yield name
