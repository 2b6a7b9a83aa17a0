"""Read and check full deltas, for an engine that patches its weights in place and cannot undo it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ckptkit.errors import Unsupported, errors_at
from ckptkit.integrations.loaded_weights import LoadedWeights
from ckptkit.io.path import to_path
from ckptkit.plugins.deltas.chain import DeltaChain
from ckptkit.plugins.deltas.changes import Changes, as_unsigned_elements, merge_changes, read_delta_tensor
from ckptkit.plugins.deltas.open_delta import INDICES, VALUES, WHOLE, Delta, index_dtype, open_delta
from ckptkit.plugins.deltas.verify_delta import count_nan_in_tensor

# in a vLLM patch NaN marks unchanged elements, so only floats can be patched
FLOATS = ("float64", "float32", "float16", "bfloat16")


def load_and_check_chain(paths: Sequence[str | Path], weights: LoadedWeights) -> tuple[DeltaChain, LoadedWeights]:
    """Return the chain of deltas, and the weights that it produces from `weights`. Reads all delta data.

    Raises `Mismatch` if `weights` are not the base or a delta is missing in between; `Corrupt` for damaged bytes, wrong
    positions, or a wrong result; `Unsupported` for NaN values and for dtypes that cannot be patched.
    """
    chain = DeltaChain.of(open_delta(to_path(path)) for path in paths)
    chain.check_base(weights.layout, weights.sums)
    for delta in chain.deltas:
        for name in delta.record.tensors:
            check_patchable(delta, name)
    return chain, LoadedWeights(weights.layout, {**weights.sums, **chain.final_checksums})


def check_patchable(delta: Delta, name: str) -> None:
    """Raise a `CkptError` unless the tensor's checksums are recorded and correct, and its values can be patched."""
    dtype = delta.record.tensors[name].spec.dtype.name
    payload = (delta.layout.tensors.get(name + suffix) for suffix in (INDICES, VALUES, WHOLE))
    with errors_at(path=delta.payload_path_of(name), tensor=name):
        if dtype not in FLOATS:
            raise Unsupported(f"expected one of {', '.join(FLOATS)} to patch in place, found {dtype}")
        if any(tensor is not None and tensor.chunks[0].crc32 is None for tensor in payload):
            hint = "write the delta again with `ckptkit delta`, or copy it together with that file"
            raise Unsupported("expected a CRC-32 in `ckptkit.json`, found none", hint=hint)
        if number := count_nan_in_tensor(delta, name):
            raise Unsupported(f"expected new values without NaN, found {number}: vLLM patches no NaN")


def all_changes_of(chain: DeltaChain, name: str) -> Changes:
    """Return all changes of a chain to one tensor; a full tensor counts as a change of every element."""
    last, later = chain.find_last_full_delta(name), chain.find_changes_since_full(name)
    if last is None:
        assert later is not None
        return later
    spec = chain.specs[name]
    values = as_unsigned_elements(read_delta_tensor(chain.deltas[last], name + WHOLE), spec.dtype.itemsize)
    every = Changes(np.arange(spec.numel, dtype=index_dtype(spec)), values)
    return every if later is None else merge_changes([every, later])
