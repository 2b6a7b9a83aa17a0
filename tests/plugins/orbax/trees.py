"""Make trees as orbax leaves them, with tensorstore alone: JSON, and arrays of zarr in cells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def square() -> np.ndarray:
    """Return random numbers: cells of them do not become small."""
    return np.random.default_rng(0).standard_normal((64, 48)).astype("float32")


def save_tree(root: Path, *, driver: str = "zarr", is_ocdbt: bool = True, dtype: str = "bfloat16") -> Path:
    """Save a matrix in four cells, a vector and a scalar, beside a text and a None."""
    root.mkdir(parents=True)
    (root / "_METADATA").write_text(json.dumps(metadata(driver, is_ocdbt=is_ocdbt)))
    (root / "_CHECKPOINT_METADATA").write_text("{}")
    (root / "_strings.json").write_text('{"said": "hello"}')
    save_array(root, "params.w", square(), "float32", (32, 24), driver, is_ocdbt=is_ocdbt)
    save_array(root, "params.b", np.arange(6), dtype, (4,), driver, is_ocdbt=is_ocdbt)
    save_array(root, "step", np.array(7), "int32", (), driver, is_ocdbt=is_ocdbt)
    return root


def metadata(driver: str, *, is_ocdbt: bool) -> dict[str, Any]:
    kinds = {("params", "w"): "jax.Array", ("params", "b"): "np.ndarray", ("step",): "scalar"}
    entries = {**kinds, ("said",): "string", ("nothing",): "None"}
    return metadata_of(entries, driver, is_ocdbt=is_ocdbt)


def metadata_of(entries: Mapping[tuple[str, ...], str], driver: str, *, is_ocdbt: bool) -> dict[str, Any]:
    """Return the metadata of entries of these kinds, by their key paths."""
    tree = {
        str(key): {
            "key_metadata": [{"key": step, "key_type": 2} for step in key],
            "value_metadata": {"value_type": kind, "skip_deserialize": kind == "None"},
        }
        for key, kind in entries.items()
    }
    return {"tree_metadata": tree, "use_ocdbt": is_ocdbt, "use_zarr3": driver == "zarr3"}


def save_arrays(root: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """Save arrays, each in one cell, in a directory each; every dot in a name is a step of its key path."""
    root.mkdir(parents=True)
    entries = dict.fromkeys((tuple(name.split(".")) for name in arrays), "jax.Array")
    (root / "_METADATA").write_text(json.dumps(metadata_of(entries, "zarr", is_ocdbt=False)))
    for name, value in arrays.items():
        save_array(root, name, value, value.dtype.name, value.shape, "zarr", is_ocdbt=False)
    return root


def save_array(
    root: Path, name: str, value: np.ndarray, dtype: str, grid: tuple[int, ...], driver: str, *, is_ocdbt: bool
) -> None:
    import tensorstore

    files: dict[str, Any] = {"driver": "file", "path": f"{root}/" if is_ocdbt else f"{root}/{name}/"}
    store = {"driver": "ocdbt", "base": files, "path": f"{name}/"} if is_ocdbt else files
    layout = tensorstore.ChunkLayout(chunk_shape=grid) if grid else None
    spec = {"driver": driver, "kvstore": store, "store_data_equal_to_fill_value": True}
    array = tensorstore.open(
        spec, create=True, dtype=tensorstore.dtype(dtype), shape=value.shape, chunk_layout=layout
    ).result()
    array.write(value.astype(array.dtype.numpy_dtype)).result()


def save_by_processes(root: Path, processes: int) -> Path:
    """Save the rows of a matrix by several processes, each into an OCDBT of its own, and merge these as orbax does."""
    import tensorstore

    root.mkdir(parents=True)
    (root / "_METADATA").write_text(json.dumps(metadata_of({("params", "w"): "jax.Array"}, "zarr3", is_ocdbt=True)))
    apart = {"value_data_prefix": "ocdbt_data/", "btree_node_data_prefix": "ocdbt_meta/"}
    settings = {"driver": "ocdbt", "config": {"max_decoded_node_bytes": 300}, **apart}
    context, transaction = tensorstore.Context(), tensorstore.Transaction(atomic=True)

    def store(place: Path, path: str = "") -> dict[str, Any]:
        return {**settings, "base": {"driver": "file", "path": f"{place}/"}, "path": path}

    whole = tensorstore.KvStore.open(store(root), context=context).result().with_transaction(transaction)
    rows = len(square()) // processes
    for process in range(processes):
        place = root / f"ocdbt.process_{process}"
        spec = {"driver": "zarr3", "kvstore": store(place, "params.w/")}
        cells = tensorstore.ChunkLayout(chunk_shape=(4, 8))
        new: dict[str, Any] = {
            "create": True,
            "dtype": tensorstore.float32,
            "shape": square().shape,
        }
        array = tensorstore.open(spec, context=context, chunk_layout=cells, **new).result()
        mine = slice(process * rows, (process + 1) * rows)
        array[mine].write(square()[mine]).result()
        tensorstore.KvStore.open(store(place), context=context).result().experimental_copy_range_to(whole).result()
    transaction.commit_async().result()
    return root
